"""The networks of ensemble model patching (Chang et al. 2019), and dropout before BatchNorm."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.application.cli.compare import ABOUT, CompareOptions
from polymode.application.cli.jobs import load_job
from polymode.application.cli.options import parse
from polymode.errors import InputError
from polymode.models import MLP, PyramidNet, make_model, pyramidnet110, resnet8, resnet18, resnet20
from polymode.networks.members import forward_members, stack
from polymode.networks.surgery import batch_norms, reinitialised, tensors_of

# Networks that are small where they can be; images of odd size show how halves are rounded.
IMAGES = {
    "resnet8": lambda **options: resnet8(5, **options),
    "resnet18": lambda **options: resnet18(5, **options),
    "pyramidnet": lambda **options: PyramidNet(14, 20, 5, **options),
}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def lived(module):
    """Values that are nobody's defaults, so that no layer is an identity; evaluation mode."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_()
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 1.5)
    return module.eval()


def normalised(tensors, name, inputs):
    names = ("running_mean", "running_var", "weight", "bias")
    return F.batch_norm(inputs, *(tensors[f"{name}.{part}"] for part in names))


# --- images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"), [(resnet8, 9), (resnet20, 21), (resnet18, 20), (pyramidnet110, 164)]
)
def test_numbers_of_batch_norms(make, expected):
    assert len(batch_norms(make())) == expected


def test_resnet18_has_the_names_of_torchvision():
    expected = {"conv1.weight", "fc.weight", "fc.bias"}
    norms = ["bn1"]
    for layer in range(1, 5):
        for block in range(2):
            prefix = f"layer{layer}.{block}"
            expected |= {f"{prefix}.conv1.weight", f"{prefix}.conv2.weight"}
            norms += [f"{prefix}.bn1", f"{prefix}.bn2"]
        if layer > 1:
            expected.add(f"layer{layer}.0.downsample.0.weight")
            norms.append(f"layer{layer}.0.downsample.1")
    parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected |= {f"{norm}.{part}" for norm in norms for part in parts}
    found = resnet18().state_dict()
    assert found.keys() == expected
    assert found["layer3.0.downsample.0.weight"].shape == (256, 128, 1, 1)
    assert found["fc.weight"].shape == (1000, 512)


@pytest.mark.parametrize("size", [64, 45])
def test_resnet18_is_its_definition(size, float64):
    module = lived(resnet18(7))
    t = module.state_dict()
    images = torch.randn(2, 3, size, size)
    out = F.relu(normalised(t, "bn1", F.conv2d(images, t["conv1.weight"], stride=2, padding=3)))
    out = F.max_pool2d(out, 3, stride=2, padding=1)
    for layer, stride in zip(range(1, 5), (1, 2, 2, 2), strict=True):
        for block in range(2):
            name, step = f"layer{layer}.{block}", 1 if block else stride
            inner = F.conv2d(out, t[f"{name}.conv1.weight"], stride=step, padding=1)
            inner = F.relu(normalised(t, f"{name}.bn1", inner))
            inner = normalised(t, f"{name}.bn2", F.conv2d(inner, t[f"{name}.conv2.weight"], padding=1))
            if step == 2:
                out = F.conv2d(out, t[f"{name}.downsample.0.weight"], stride=2)
                out = normalised(t, f"{name}.downsample.1", out)
            out = F.relu(inner + out)
    expected = F.linear(F.adaptive_avg_pool2d(out, 1).flatten(1), t["fc.weight"], t["fc.bias"])
    torch.testing.assert_close(module(images), expected)


@pytest.mark.parametrize("size", [16, 9])
def test_resnet20_is_its_definition(size, float64):
    module = lived(resnet20(7))
    t = module.state_dict()
    images = torch.randn(2, 3, size, size)
    out = F.relu(normalised(t, "bn", F.conv2d(images, t["conv.weight"], padding=1)))
    for index in range(9):
        name, stride = f"blocks.{index}", 2 if index in (3, 6) else 1
        inner = F.conv2d(out, t[f"{name}.conv1.weight"], stride=stride, padding=1)
        inner = F.relu(normalised(t, f"{name}.bn1", inner))
        inner = normalised(t, f"{name}.bn2", F.conv2d(inner, t[f"{name}.conv2.weight"], padding=1))
        if stride == 2:
            out = F.conv2d(out, t[f"{name}.downsample.0.weight"], stride=2)
            out = normalised(t, f"{name}.downsample.1", out)
        out = F.relu(inner + out)
    expected = F.linear(out.mean((2, 3)), t["classifier.weight"], t["classifier.bias"])
    torch.testing.assert_close(module(images), expected)


@pytest.mark.parametrize("size", [16, 10])
def test_pyramidnet_is_its_definition(size, float64):
    module = lived(PyramidNet(14, 20, 7))
    t = module.state_dict()
    images = torch.randn(2, 3, size, size)
    out = normalised(t, "bn1", F.conv2d(images, t["conv1.weight"], padding=1))
    widths = [19, 23, 26, 29, 33, 36]  # 16 + 20/6, 16 + 40/6, ...: rounded
    for index, width in enumerate(widths):
        name, stride = f"layer{index // 2 + 1}.{index % 2}", 2 if index in (2, 4) else 1
        inner = normalised(t, f"{name}.bn1", out)
        inner = F.conv2d(inner, t[f"{name}.conv1.weight"], stride=stride, padding=1)
        inner = F.relu(normalised(t, f"{name}.bn2", inner))
        inner = normalised(t, f"{name}.bn3", F.conv2d(inner, t[f"{name}.conv2.weight"], padding=1))
        if stride == 2:
            out = F.avg_pool2d(out, 2, ceil_mode=True)
        zeros = torch.zeros(2, width - out.shape[1], *out.shape[2:])
        out = inner + torch.cat([out, zeros], 1)
    out = F.relu(normalised(t, "bn_final", out)).mean((2, 3))
    torch.testing.assert_close(module(images), F.linear(out, t["fc.weight"], t["fc.bias"]))


def test_pyramidnet_without_its_branches_is_a_chain_of_averages(float64):
    """With the scales of each last BatchNorm at 0, a stack of any depth hands its input on."""
    module = PyramidNet(26, 30, 4).eval()
    for name, part in module.named_modules():
        if name.endswith("bn3"):
            nn.init.zeros_(part.weight)
    stem = torch.randn(2, 16, 16, 16)
    features = module.layer3(module.layer2(module.layer1(stem)))
    assert features.shape == (2, 46, 4, 4)
    torch.testing.assert_close(features[:, :16], F.avg_pool2d(stem, 4))
    assert not features[:, 16:].any()


def test_pyramidnet110_widens_by_five_channels_a_block():
    module = pyramidnet110(100)
    blocks = [*module.layer1, *module.layer2, *module.layer3]
    assert [block.conv2.out_channels for block in blocks] == list(range(21, 287, 5))
    assert [index for index, block in enumerate(blocks) if block.conv1.stride == (2, 2)] == [18, 36]
    weights = blocks[-1].conv2.weight
    assert weights.std().item() == pytest.approx((2 / (9 * 286)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("name", IMAGES)
def test_members_side_by_side_are_members_one_by_one(name, float64):
    make = IMAGES[name]
    images = torch.randn(2, 3, 15, 15)
    members = stack([tensors_of(lived(make())) for _ in range(2)])
    together = forward_members(make().eval(), members, images, backend="vmap")
    one_by_one = forward_members(make().eval(), members, images, backend="loop")
    torch.testing.assert_close(together, one_by_one)
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("name", IMAGES)
def test_new_initial_weights_have_the_scale_of_the_old(name):
    module = IMAGES[name]()
    for old, new in zip(module.parameters(), reinitialised(module, seed=1).parameters(), strict=True):
        assert torch.equal(old, new) == (old.std() == 0)


# --- dropout before BatchNorm -----------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_dropout_changes_training_only(name, float64):
    plain = lived(IMAGES[name]())
    dropping = IMAGES[name](dropout=0.3).eval()
    dropping.load_state_dict(plain.state_dict())  # the same names
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(dropping(images), plain(images))
    assert not any(isinstance(part, nn.Dropout) for part in plain.modules())
    for part in dropping.modules():
        if isinstance(part, nn.Dropout):
            part.train()
    assert not torch.allclose(dropping(images), dropping(images))


@pytest.mark.parametrize("name", IMAGES)
def test_dropout_comes_directly_before_every_batch_norm(name):
    """In the order in which the layers run, each BatchNorm follows a dropout layer whose output it takes."""
    module = IMAGES[name](dropout=0.005).eval()
    ran: list[tuple[nn.Module, torch.Tensor]] = []

    def record(part, inputs, output):
        ran.append((part, inputs[0] if isinstance(part, nn.BatchNorm2d) else output))

    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.BatchNorm2d):
            part.register_forward_hook(record)
    module(torch.randn(1, 3, 16, 16))
    pairs = list(zip(ran[::2], ran[1::2], strict=True))
    assert len(pairs) == len(batch_norms(module))
    for (dropout, dropped), (norm, taken) in pairs:
        assert isinstance(dropout, nn.Dropout)
        assert dropout.p == 0.005
        assert isinstance(norm, nn.BatchNorm2d)
        assert dropped is taken


def test_dropout_before_batch_norm_is_drawn_alike_by_both_backends(float64):
    data = pm.ArrayData(torch.randn(8, 3, 8, 8), torch.arange(8) % 2, batch_size=8)
    images = torch.randn(3, 3, 8, 8)

    def trained(backend, dropout=0.1):
        posterior = pm.fit(
            pm.methods.DeepEnsemble(2),
            lambda: resnet8(2, dropout=dropout),
            data,
            likelihood="categorical",
            epochs=2,
            backend=backend,
            progress=False,
        )
        return posterior.predict(images).mean

    together = trained("vmap")
    torch.testing.assert_close(together, trained("loop"))
    assert not torch.allclose(together, trained("vmap", dropout=0.0))


# --- fully connected --------------------------------------------------------------------------------

REGRESSIONS = {  # inputs, outputs, units; parameters without and with BatchNorm
    "boston": (13, 1, 50, 751, 877),
    "concrete, kin8nm": (8, 1, 50, 501, 617),
    "energy": (8, 2, 50, 552, 668),
    "naval": (16, 2, 50, 952, 1084),
    "power": (4, 1, 50, 301, 409),
    "protein": (9, 1, 100, 1101, 1319),
    "wine": (11, 1, 50, 651, 773),
    "yacht": (6, 1, 50, 401, 513),
    "year": (90, 1, 100, 9201, 9581),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression_networks(name):
    inputs, outputs, units, plain, normed = REGRESSIONS[name]
    options = {"hidden": [units]}
    assert count(make_model("mlp", (inputs,), outputs, options)()) == plain
    options |= {"batch_norm": "after", "input_norm": True, "norm_scale": 0.2}
    module = make_model("mlp", (inputs,), outputs, options)()
    assert count(module) == normed
    kinds = [type(part).__name__ for part in module]
    assert kinds == ["Flatten", "BatchNorm1d", "Linear", "ReLU", "BatchNorm1d", "Linear"]
    for index in (1, 4):
        torch.testing.assert_close(module[index].weight, torch.full_like(module[index].weight, 0.2))
        assert not module[index].bias.any()


def test_hundred_layers_of_table_3():
    options = {"hidden": [100] * 99, "output_bias": False}
    assert count(make_model("mlp", (100,), 100, options)()) == 1_009_900
    module = make_model("mlp", (100,), 100, options | {"batch_norm": "after"})()
    assert count(module) == 1_029_700
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm1d)]
    assert len(norms) == 99
    assert count(module) - sum(count(norm) for norm in norms) == 1_009_900
    assert module[-1].bias is None


def test_regression_network_is_its_definition(float64):
    module = lived(MLP(3, 2, (4,), batch_norm="after", input_norm=True, norm_scale=0.2))
    t = module.state_dict()
    inputs = torch.randn(5, 3)
    hidden = F.linear(normalised(t, "1", inputs), t["2.weight"], t["2.bias"])
    expected = F.linear(normalised(t, "4", F.relu(hidden)), t["5.weight"], t["5.bias"])
    torch.testing.assert_close(module(inputs), expected)


def test_dropout_stands_where_batch_norm_would():
    module = MLP(3, 2, (4, 4), dropout=0.005, input_dropout=True)
    kinds = [type(part).__name__ for part in module]
    assert kinds == ["Flatten", "Dropout", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    assert {part.p for part in module if isinstance(part, nn.Dropout)} == {0.005}
    both = MLP(3, 2, (4,), dropout=0.1, input_dropout=True, batch_norm="after", input_norm=True)
    kinds = [type(part).__name__ for part in both][1:]
    assert kinds == ["Dropout", "BatchNorm1d", "Linear", "ReLU", "Dropout", "BatchNorm1d", "Linear"]


def test_true_is_before_the_activation():
    kinds = [[type(part).__name__ for part in MLP(3, 2, (4,), batch_norm=how)] for how in (True, "before")]
    assert kinds[0] == kinds[1] == ["Flatten", "Linear", "BatchNorm1d", "ReLU", "Linear"]


def test_new_initial_weights_keep_the_scale_of_batch_norm():
    module = MLP(30, 2, (40,), batch_norm="after", input_norm=True, norm_scale=0.2)
    fresh = reinitialised(module, seed=1)
    assert torch.equal(fresh[4].weight, module[4].weight)
    assert not torch.equal(fresh[2].weight, module[2].weight)


def test_options_reach_the_networks_from_the_command_line():
    settings = ("hidden=[5]", "batch_norm=after", "input_norm=true", "norm_scale=0.2", "output_bias=false")
    arguments = [word for setting in settings for word in ("--set", f"model.{setting}")]
    module = load_job(parse(CompareOptions, "compare", ABOUT, ["--data", "two_moons", *arguments])).model()
    expected = MLP(2, 2, [5], batch_norm="after", input_norm=True, norm_scale=0.2, output_bias=False)
    assert repr(module) == repr(expected)
    assert module[4].weight[0].item() == pytest.approx(0.2)
    for name in ("resnet8", "resnet18", "pyramidnet110"):
        arguments = ["--data", "digits", "--model", name, "--set", "model.dropout=0.005"]
        module = load_job(parse(CompareOptions, "compare", ABOUT, arguments)).model()
        rates = [part.p for part in module.modules() if isinstance(part, nn.Dropout)]
        assert rates == [0.005] * len(batch_norms(module))


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            "mlp",
            {"batch_norm": "behind"},
            """batch_norm must be false, true, "before" or "after", got 'behind'""",
        ),
        ("mlp", {"input_norm": "after"}, "input_norm must be true or false, got 'after'"),
        ("mlp", {"input_dropout": 0.1}, "input_dropout must be true or false, got 0.1"),
        ("mlp", {"output_bias": None}, "output_bias must be true or false, got None"),
        ("mlp", {"norm_scale": 0.2}, "norm_scale=0.2 .*lacks: set batch_norm or input_norm"),
        ("mlp", {"norm_scale": -1.0, "batch_norm": True}, "norm_scale must be a positive number, got -1.0"),
        ("mlp", {"dropout": -0.1}, "dropout must be a rate of at least 0 and below 1, got -0.1"),
        ("smallcnn", {"dropout": 1.5}, "dropout must be a rate .* got 1.5"),
        ("resnet8", {"dropout": 1.0}, "dropout must be a rate .* got 1.0"),
        ("resnet18", {"dropout": -0.1}, "dropout must be a rate .* got -0.1"),
        ("pyramidnet110", {"dropout": "much"}, "dropout must be a rate .* got 'much'"),
        ("pyramidnet110", {"alpha": 0}, "alpha must be a positive number, got 0"),
    ],
)
def test_options_out_of_range_are_refused(spec, options, message):
    shape = (7,) if spec == "mlp" else (3, 8, 8)
    with pytest.raises(InputError, match=message):
        make_model(spec, shape, 2, options)()


@pytest.mark.parametrize(
    ("depth", "message"), [(111, "6 n [+] 2.*nearest is 110"), (2, "depth must be a whole")]
)
def test_depths_of_a_pyramidnet(depth, message):
    with pytest.raises(InputError, match=message):
        PyramidNet(depth, 270)
