"""The networks of von Oswald et al. (2021): wide residual networks and a character LSTM."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.models import CharacterLSTM, WideResNet, make_model, wrn16_2, wrn28_10, wrn28_14
from polymode.networks.members import Members, forward_members, stack
from polymode.networks.surgery import batch_norms, reinitialised, tensors_of


def count(module, keep=lambda name: True):
    return sum(p.numel() for name, p in module.named_parameters() if keep(name))


def lived(module):
    """Values that are nobody's defaults, so that no layer is an identity; evaluation mode."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_()
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 1.5)
    return module.eval()


# --- wide residual networks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "num_classes", "expected"),
    [
        (wrn16_2, 10, 691_674),
        (wrn28_10, 10, 36_479_194),
        (wrn28_10, 100, 36_536_884),
        (wrn28_14, 10, 71_470_810),
        (wrn28_14, 100, 71_551_540),
    ],
)
def test_counts(make, num_classes, expected):
    with torch.device("meta"):
        assert count(make(num_classes)) == expected


def test_late_phase_numbers_of_wrn28_10():
    with torch.device("meta"):
        module = wrn28_10(100)
    norms = batch_norms(module)
    assert len(norms) == 25
    assert count(module, lambda name: name.rpartition(".")[0] in norms) == 17_952
    assert count(module.classifier) == 64_100
    with torch.device("meta"):
        assert count(wrn28_10(10).classifier) == 6_410
    assert not any(part.bias is not None for part in module.modules() if isinstance(part, nn.Conv2d))


@pytest.mark.parametrize("size", [16, 9])
def test_a_wide_network_is_its_definition(size, float64):
    module = lived(WideResNet(16, 2, 7))
    t = module.state_dict()

    def normalised(name, inputs):
        names = ("running_mean", "running_var", "weight", "bias")
        return F.relu(F.batch_norm(inputs, *(t[f"{name}.{part}"] for part in names)))

    images = torch.randn(2, 3, size, size)
    out = F.conv2d(images, t["conv.weight"], padding=1)
    for index, channels in enumerate((32, 32, 64, 64, 128, 128)):
        name, stride = f"blocks.{index}", 2 if index in (2, 4) else 1
        active = normalised(f"{name}.bn1", out)
        inner = F.conv2d(active, t[f"{name}.conv1.weight"], stride=stride, padding=1)
        inner = F.conv2d(normalised(f"{name}.bn2", inner), t[f"{name}.conv2.weight"], padding=1)
        if index % 2 == 0:  # the shape changes: the shortcut takes what the first ReLU gives
            out = F.conv2d(active, t[f"{name}.downsample.weight"], stride=stride)
        assert out.shape[1] == channels
        out = out + inner
    out = normalised("bn", out).mean((2, 3))
    expected = F.linear(out, t["classifier.weight"], t["classifier.bias"])
    torch.testing.assert_close(module(images), expected)


def test_wide_members_side_by_side_are_members_one_by_one(float64):
    images = torch.randn(2, 3, 9, 9)
    members = stack([tensors_of(lived(WideResNet(10, 1, 3))) for _ in range(2)])
    module = WideResNet(10, 1, 3).eval()
    together = forward_members(module, members, images, backend="vmap")
    torch.testing.assert_close(together, forward_members(module, members, images, backend="loop"))
    assert not torch.allclose(together[0], together[1])


def test_dropout_stands_behind_the_first_convolution_of_a_block():
    plain, dropping = wrn16_2(), wrn16_2(dropout=0.2)
    assert plain.state_dict().keys() == dropping.state_dict().keys()
    assert not any(isinstance(part, nn.Dropout) for part in plain.modules())
    assert [part.p for part in dropping.modules() if isinstance(part, nn.Dropout)] == [0.2] * 6
    ran = []
    for part in dropping.blocks[0].children():
        part.register_forward_hook(lambda part, inputs, output: ran.append(type(part).__name__))
    dropping.eval()(torch.randn(1, 3, 8, 8))
    assert ran == ["BatchNorm2d", "Conv2d", "Dropout", "BatchNorm2d", "Conv2d", "Conv2d"]


def test_wide_initial_weights_are_those_of_he_by_fan_out():
    module = wrn16_2()
    weights = module.blocks[5].conv2.weight
    assert weights.std().item() == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.02)
    for old, new in zip(module.parameters(), reinitialised(module, seed=1).parameters(), strict=True):
        assert torch.equal(old, new) == (old.std() == 0)


def test_wide_networks_that_do_not_exist_are_refused():
    with pytest.raises(InputError, match=r"depth must be 6 n \+ 4, such as 28, got 27. The nearest is 28"):
        WideResNet(27, 10)
    with pytest.raises(InputError, match=r"width must be a whole number of at least 1, got 0"):
        WideResNet(28, 0)
    with pytest.raises(InputError, match=r"dropout must be a rate .* got 1.0"):
        make_model("wrn28_10", (3, 32, 32), 10, {"dropout": 1.0})()


# --- the character LSTM -----------------------------------------------------------------------------


def small(**options):
    return CharacterLSTM(7, width=5, hidden=4, **options)


def test_the_count_of_the_character_lstm():
    module = CharacterLSTM()
    assert count(module) == 1_556_730
    assert dict(module.named_parameters())["lstm.weight_hidden"].shape == (2000, 500)
    assert count(make_model("char_lstm", (100,), 205, {})()) == 1_556_730


def test_the_character_lstm_is_that_of_torch(float64):
    module = small(initial_range=1.0)
    torchs = nn.LSTM(5, 4, batch_first=True)
    with torch.no_grad():
        torchs.weight_ih_l0.copy_(module.lstm.weight_input)
        torchs.weight_hh_l0.copy_(module.lstm.weight_hidden)
        torchs.bias_ih_l0.copy_(module.lstm.bias)
        torchs.bias_hh_l0.zero_()
        torchs.bias_ih_l0[4:8] += 1  # the forget gate
    tokens = torch.randint(7, (3, 11))
    states, _ = torchs(module.embedding.weight[tokens])
    expected = F.linear(states, module.classifier.weight, module.classifier.bias)
    torch.testing.assert_close(module(tokens), expected)


def test_no_output_depends_on_later_symbols():
    module = small()
    tokens = torch.randint(7, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = (tokens[:, 4:] + 1) % 7
    torch.testing.assert_close(module(tokens)[:, :4], module(changed)[:, :4])
    assert not torch.allclose(module(tokens)[:, 4], module(changed)[:, 4])


def test_members_with_recurrent_weights_of_their_own(float64):
    """A rank-one factor u vᵀ a member multiplies the shared recurrent matrix; gradients are autograd's."""
    module, tokens = small(), torch.randint(7, (3, 5))
    shared = {name: tensor.detach() for name, tensor in module.named_parameters()}
    u, v = 1 + 0.3 * torch.randn(2, 16), 1 + 0.3 * torch.randn(2, 4)

    def loss(u, v):
        weights = shared | {"lstm.weight_hidden": torch.outer(u, v) * shared["lstm.weight_hidden"]}
        return functional_call(module, weights, (tokens,)).square().sum()

    found = vmap(grad(loss, argnums=(0, 1)))(u, v)
    for index in range(2):
        own = [u[index].clone().requires_grad_(), v[index].clone().requires_grad_()]
        torch.testing.assert_close(
            [part[index] for part in found], list(torch.autograd.grad(loss(*own), own))
        )
    recurrent = torch.stack(
        [torch.outer(a, b) * shared["lstm.weight_hidden"] for a, b in zip(u, v, strict=True)]
    )
    rest = {name: tensor[None] for name, tensor in shared.items() if name != "lstm.weight_hidden"}
    members = Members({"lstm.weight_hidden": recurrent}, rest)
    together = forward_members(module, members, tokens, backend="vmap")
    torch.testing.assert_close(together, forward_members(module, members, tokens, backend="loop"))
    assert not torch.allclose(together[0], together[1])


def test_initial_weights_of_the_character_lstm():
    module = CharacterLSTM(50, width=20, hidden=30)
    assert module.embedding.weight.std().item() == pytest.approx(0.88, rel=0.1)
    assert module.lstm.weight_hidden.std().item() == pytest.approx(0.88 / 50**0.5, rel=0.1)
    assert not module.lstm.bias.any()
    paper = CharacterLSTM(50, width=20, hidden=30, initial_range=0.01)
    for name, tensor in paper.named_parameters():
        assert tensor.abs().max().item() <= 0.01, name
        assert tensor.std().item() == pytest.approx(0.01 / 3**0.5, rel=0.25), name
    fresh = reinitialised(paper, seed=1)
    assert fresh.lstm.bias.abs().max().item() <= 0.01
    assert not torch.equal(fresh.lstm.bias, paper.lstm.bias)
    with pytest.raises(InputError, match=r"initial_range must be a positive number, got 0"):
        small(initial_range=0)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_the_character_lstm_learns_a_cycle(backend):
    """The next symbol of a cycle is certain: far below log₂ 3 bits."""
    start = torch.randint(3, (32, 1), generator=torch.Generator().manual_seed(0))
    symbols = (start + torch.arange(9)) % 3
    data = pm.ArrayData(symbols[:, :-1], symbols[:, 1:], batch_size=32)
    posterior = pm.fit(
        pm.methods.DeepEnsemble(2, pm.methods.Single(optimizer=pm.Optimizer("Adam", lr=0.05))),
        lambda: CharacterLSTM(3, width=4, hidden=8),
        data,
        likelihood="categorical",
        epochs=60,
        backend=backend,
        progress=False,
    )
    scores = pm.evaluate(posterior, data)
    assert scores["bits_per_character"] < 0.5
    assert scores["bits_per_character"] == pytest.approx(scores["nll"] / torch.tensor(2.0).log().item())
