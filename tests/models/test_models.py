"""Parameter counts that the papers (docs/references.md) state."""

import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import polymode as pm
from polymode.models import (
    CNNLSTM,
    LSTM,
    MLP,
    AlexNet,
    FilterResponseNorm,
    LeNet,
    LeNet5,
    MediumCNN,
    SmallCNN,
    pyramidnet110,
    resnet8,
    resnet18,
    resnet20,
    resnet20_frn,
    resnet32,
    resnet56,
)
from polymode.networks.members import forward_members, stack
from polymode.networks.surgery import normalisation_and_bias_names, reinitialised, tensors_of


def count(module, keep=lambda name: True):
    return sum(p.numel() for name, p in module.named_parameters() if keep(name))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SmallCNN, 19_466),
        (MediumCNN, 971_146),
        (resnet32, 466_906),
        (resnet56, 855_770),
        (lambda: resnet32(100), 472_756),
        (lambda: resnet56(100), 861_620),
        (resnet8, 78_042),
        (resnet18, 11_689_512),
        (pyramidnet110, 28_485_477),
        (lambda: pyramidnet110(100), 28_511_307),
        (resnet20_frn, 274_042),
        (AlexNet, 1_488_202),
        (CNNLSTM, 2_700_098),
        (lambda: LeNet(7), 61_751),
        (LeNet5, 62_006 + 452),
        (lambda: LeNet5(batch_norm=False), 62_006),
        (lambda: MLP(8, 2, (50,)), 552),
        (lambda: MLP(13, 1, (50,)), 751),
    ],
)
def test_counts(make, expected):
    assert count(make()) == expected


def test_resnet20_convolutions_and_classifier():
    """268,346 without BatchNorm and the two 1×1 shortcuts."""
    module = resnet20()
    kept = count(module, lambda n: "bn" not in n and "downsample" not in n)
    assert kept == 268_346


@pytest.mark.parametrize(("activation", "function"), [("relu", F.relu), ("silu", F.silu)])
def test_resnets_are_their_definition_with_either_activation(activation, function, float64):
    module = resnet8(7, 2, activation=activation).eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):  # off the identity it begins as
            for tensor in (part.weight, part.bias, part.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(part.running_var, 0.5, 2.0)

    def norm(inputs, layer):
        return F.batch_norm(inputs, layer.running_mean, layer.running_var, layer.weight, layer.bias)

    images = torch.randn(2, 2, 8, 8)
    out = function(norm(F.conv2d(images, module.conv.weight, padding=1), module.bn))
    for index, block in enumerate(module.blocks):
        stride = 2 if index else 1
        inner = function(norm(F.conv2d(out, block.conv1.weight, None, stride, 1), block.bn1))
        inner = norm(F.conv2d(inner, block.conv2.weight, padding=1), block.bn2)
        if index:
            out = norm(F.conv2d(out, block.downsample[0].weight, None, stride), block.downsample[1])
        out = function(inner + out)
    head = module.classifier
    torch.testing.assert_close(module(images), F.linear(out.mean((2, 3)), head.weight, head.bias))
    assert module.state_dict().keys() == resnet8(7, 2).state_dict().keys()


def test_a_posterior_is_not_read_into_a_network_with_another_activation(tmp_path):
    data = pm.ArrayData(torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 0, 1]))
    silu = pm.models.make_model("resnet8", (3, 4, 4), 2, {"activation": "silu"})
    posterior = pm.fit(pm.methods.Single(), silu, data, likelihood="categorical", epochs=1, progress=False)
    posterior.save(tmp_path / "saved")
    assert pm.load_posterior(tmp_path / "saved", silu()).num_members == 1
    with pytest.raises(pm.errors.CheckpointError, match="activation=silu"):
        pm.load_posterior(tmp_path / "saved", resnet8(2))


@pytest.mark.parametrize(("make", "num_layers"), [(SmallCNN, 3), (MediumCNN, 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_plain_cnns_are_their_definition(make, num_layers, dropout, float64):
    """Convolution, 2×2 maximum, ReLU; no ReLU behind the last; dropout acts in training only."""
    module = make(7, 2, 16, dropout).eval()
    *convolutions, head = (part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear))
    assert len(convolutions) == num_layers
    images = torch.randn(3, 2, 16, 16)
    out = images
    for index, layer in enumerate(convolutions):
        out = F.max_pool2d(F.conv2d(out, layer.weight, layer.bias, padding=1), 2)
        out = F.relu(out) if index < num_layers - 1 else out
    torch.testing.assert_close(module(images), F.linear(out.flatten(1), head.weight, head.bias))


def test_resnet20_frn_is_its_definition(float64):
    """The stem, nine blocks (their padding is tested below), the mean over all pixels, a linear layer."""
    module = resnet20_frn(7)
    for part in module.modules():
        if isinstance(part, FilterResponseNorm):
            for parameter in part.parameters():
                nn.init.normal_(parameter)
    images = torch.randn(2, 3, 8, 8)
    stem = F.conv2d(images, module.conv.weight, module.conv.bias, padding=1)
    out = F.silu(_filter_response_norm(stem, *module.norm.parameters()))
    for index, block in enumerate(module.blocks):
        padded = F.pad(out, (0, 1, 0, 1) if index in (3, 6) else (1, 1, 1, 1))
        inner = F.conv2d(padded, block.conv1.weight, block.conv1.bias, stride=2 if index in (3, 6) else 1)
        inner = F.silu(_filter_response_norm(inner, *block.norm1.parameters()))
        inner = F.conv2d(inner, block.conv2.weight, block.conv2.bias, padding=1)
        if index in (3, 6):
            out = F.conv2d(out, block.shortcut[0].weight, block.shortcut[0].bias, stride=2)
            out = _filter_response_norm(out, *block.shortcut[1].parameters())
        out = F.silu(_filter_response_norm(inner, *block.norm2.parameters()) + out)
    head = module.classifier
    torch.testing.assert_close(module(images), F.linear(out.mean((2, 3)), head.weight, head.bias))


@pytest.mark.parametrize("size", [16, 10])
def test_alexnet_is_its_definition(size, float64):
    module = AlexNet(7, 2, size)
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    convolutions, dense = layers[:5], layers[5:]
    images = torch.randn(3, 2, size, size)
    out = images
    for layer in convolutions[:2]:
        out = F.max_pool2d(F.silu(F.conv2d(out, layer.weight, layer.bias, padding=1)), 2)
    for layer in convolutions[2:]:
        out = F.silu(F.conv2d(F.pad(out, (0, 1, 0, 1)), layer.weight, layer.bias))
    out = out.flatten(1)
    for layer in dense[:2]:
        out = F.silu(F.linear(out, layer.weight, layer.bias))
    torch.testing.assert_close(module(images), F.linear(out, dense[2].weight, dense[2].bias))


def test_names_without_decay():
    names = normalisation_and_bias_names(resnet20())
    assert "bn.weight" in names
    assert "blocks.3.downsample.1.weight" in names
    assert "classifier.bias" in names
    assert not names & {"conv.weight", "classifier.weight", "blocks.3.downsample.0.weight"}


def test_networks_by_name_fit_the_examples():
    from polymode.models import MODELS, make_model

    for name, architecture in MODELS.items():
        shape = {"table": (7,), "images": (3, 32, 32), "tokens": (9,)}[architecture.takes]
        examples = torch.randint(1, 4, (2, 9)) if architecture.takes == "tokens" else torch.randn(2, *shape)
        module = make_model(name, shape, 4, {})()
        expected = (2, 9, 4) if name == "char_lstm" else (2, 4)
        with torch.no_grad():
            outputs, alone = module.eval()(examples), module(examples[:1])
        assert outputs.shape == expected
        # An example's outputs follow from it, and from no other.
        torch.testing.assert_close(alone[0], outputs[0], rtol=1e-3, atol=1e-4 * float(outputs.abs().max()))
        assert not torch.allclose(outputs[0], outputs[1], rtol=1e-3), name
    assert make_model("mlp", (7,), 4, {"hidden": [3]})()[1].weight.shape == (3, 7)
    assert make_model("smallcnn", (1, 8, 8), 8, {})().classifier.weight.shape == (8, 32)


def test_padding_does_not_change_a_bag_of_words():
    module = pm.models.MeanEmbedding(2, vocabulary=10)
    padded = module(torch.tensor([[0, 0, 3, 5]]))
    torch.testing.assert_close(padded, module(torch.tensor([[3, 5]])))
    assert bool(module(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all())


@pytest.mark.parametrize(
    ("spec", "shape", "options", "message"),
    [
        ("smalcnn", (3, 8, 8), {}, r"Did you mean 'smallcnn'.*package.module:callable"),
        ("smallcnn", (7,), {}, r"takes images .* these examples are \[7\]"),
        ("smallcnn", (3, 8, 10), {}, "square images, these are 8×10"),
        ("mlp", (7,), {"hiden": [3]}, "Unknown option of the model mlp 'hiden'. Did you mean 'hidden'"),
        ("mlp", {"a": (3,)}, {}, "several inputs"),
        ("resnet8", (3, 8, 8), {"activation": "relux"}, "Unknown activation 'relux'. Did you mean 'relu'"),
        ("resnet20", (3, 8, 8), {"activation": ["silu"]}, r"Unknown activation \['silu'\].* relu, silu"),
        ("nowhere.at_all:build", (7,), {}, "there is no module 'nowhere'"),
        ("torch.nn:Linaer", (7,), {}, "Did you mean 'Linear'"),
        ("math:pi", (7,), {}, "math:pi is a float"),
    ],
)
def test_networks_that_do_not_fit_are_refused(spec, shape, options, message):
    from polymode.models import make_model

    with pytest.raises(pm.errors.InputError, match=message):
        make_model(spec, shape, 2, options)()


# The networks of Delaunoy and Louppe (2021), small where they can be, and their inputs.
SEQUENTIAL = {
    "resnet20_frn": (resnet20_frn, lambda: torch.randn(3, 3, 8, 8)),
    "alexnet": (lambda: AlexNet(image_size=8), lambda: torch.randn(3, 3, 8, 8)),
    "lenet": (lambda: LeNet(7, image_size=16), lambda: torch.randn(3, 3, 16, 16)),
    "cnn_lstm": (
        lambda: CNNLSTM(vocabulary=50, width=6, channels=5, hidden=4),
        lambda: torch.randint(50, (3, 21)),
    ),
}


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_members_side_by_side_are_members_one_by_one(name, float64):
    make, inputs = SEQUENTIAL[name]
    examples = inputs()
    members = stack([tensors_of(make()) for _ in range(3)])
    together = forward_members(make(), members, examples, backend="vmap")
    one_by_one = forward_members(make(), members, examples, backend="loop")
    torch.testing.assert_close(together, one_by_one)
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_gradients_side_by_side_are_those_of_backward(name, float64):
    make, inputs = SEQUENTIAL[name]
    module, examples = make(), inputs()

    def loss(weights):
        return functional_call(module, weights, (examples,)).square().sum()

    members = stack([tensors_of(make()) for _ in range(2)])
    together = vmap(grad(loss))(members.stacked)
    for index in range(2):
        weights = {name: tensor.requires_grad_() for name, tensor in members.member(index).items()}
        alone = torch.autograd.grad(loss(weights), list(weights.values()))
        torch.testing.assert_close([tensor[index] for tensor in together.values()], list(alone))


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_new_initial_weights_have_the_scale_of_the_old(name):
    make, _ = SEQUENTIAL[name]
    module = make()
    fresh = reinitialised(module, seed=1)
    for old, new in zip(module.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(old, new) == (old.std() == 0)  # constants stay, the rest is drawn


def test_initial_weights_are_those_of_haiku():
    """std 1/√fan_in before truncation at 2 std; He's √(2/fan_in) after it for the residual network."""
    truncated = 0.8796
    layer = AlexNet().classifier[0]
    assert layer.weight.std().item() == pytest.approx(truncated / 64, rel=0.01)
    assert layer.weight.abs().max().item() <= 2 / 64
    assert not layer.bias.any()
    kernel = resnet20_frn().blocks[8].conv2.weight
    assert kernel.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    module = CNNLSTM()
    assert module.embedding.weight.std().item() == pytest.approx(truncated, rel=0.01)
    assert module.lstm.weight_input.std().item() == pytest.approx(truncated / 192**0.5, rel=0.02)
    assert module.lstm.weight_hidden.std().item() == pytest.approx(truncated / 192**0.5, rel=0.02)


def test_plain_cnns_are_drawn_as_published():
    """U(−b, b) with b² = 6/(fan_in + fan_out); of biases both fans are their length, b² = 3/n."""
    module = MediumCNN(initialisation="xavier")
    weights, biases = [], []
    for layer in (part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)):
        area = layer.weight[0, 0].numel()
        bound = (6 / (area * sum(layer.weight.shape[:2]))) ** 0.5
        weights.append(layer.weight.detach().flatten() / bound)
        biases.append(layer.bias.detach() / (3 / len(layer.bias)) ** 0.5)
    assert len(weights) == 5
    for drawn in (*weights, torch.cat(biases)):
        # In [−1, 1] and uniform: Kolmogorov's statistic is above 1.95/√n with a probability of 1e-3.
        assert stats.kstest((drawn.numpy() + 1) / 2, "uniform").statistic < 1.95 / len(drawn) ** 0.5
    assert all(float(bias.abs().max()) <= 1 for bias in biases)
    usual = MediumCNN().classifier
    assert usual.weight.abs().max().item() <= usual.in_features**-0.5  # as PyTorch draws them
    with pytest.raises(pm.errors.InputError, match=r"Unknown initialisation 'xavire'. Did you mean 'xavier'"):
        SmallCNN(initialisation="xavire")


def _filter_response_norm(images, weight, bias, threshold):
    root = (images.square().mean((2, 3)) + 1e-6).sqrt()
    weight, bias, threshold = (value[None, :, None, None] for value in (weight, bias, threshold))
    return torch.maximum(weight * images / root[:, :, None, None] + bias, threshold)


def test_filter_response_norm_and_its_gradients(float64):
    layer = FilterResponseNorm(3)
    images = torch.randn(2, 3, 4, 5, requires_grad=True)
    torch.testing.assert_close(layer(images), F.relu(_filter_response_norm(images, *layer.parameters())))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    found, expected = layer(images), _filter_response_norm(images, *layer.parameters())
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(found)
    arguments = [images, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found, arguments, direction), torch.autograd.grad(expected, arguments, direction)
    )
    parameters = [parameter.detach().requires_grad_() for parameter in layer.parameters()]

    def apply(images, weight, bias, threshold):
        values = {"weight": weight, "bias": bias, "threshold": threshold}
        return functional_call(layer, values, (images,))

    assert torch.autograd.gradgradcheck(apply, (images, *parameters))


@pytest.mark.parametrize("size", [8, 7])
def test_stride_2_pads_below_and_right_first(size, float64):
    """Same padding of JAX: ⌈size/2⌉ positions, an odd row of zeros at the end."""
    block = resnet20_frn().blocks[3]
    images = torch.randn(2, 16, size, size)
    before = 0 if size == 8 else 1
    padded = torch.zeros(2, 16, size + 1 + before, size + 1 + before)
    padded[..., before : before + size, before : before + size] = images
    inner = F.conv2d(padded, block.conv1.weight, block.conv1.bias, stride=2)
    outer = block.norm2(block.conv2(F.silu(block.norm1(inner)))) + block.shortcut(images)
    torch.testing.assert_close(block(images), F.silu(outer))


def test_alexnet_pads_below_and_right(float64):
    module = AlexNet()
    pad, conv = module.features[6:8]
    images = torch.randn(2, 128, 8, 8)
    padded = torch.zeros(2, 128, 9, 9)
    padded[..., :8, :8] = images
    torch.testing.assert_close(conv(pad(images)), F.conv2d(padded, conv.weight, conv.bias))
    assert conv.kernel_size == (2, 2)


def test_lstm_is_the_recurrence_of_torch(float64):
    layer = LSTM(5, 4)
    nn.init.normal_(layer.bias)
    torchs = nn.LSTM(5, 4, batch_first=True)
    with torch.no_grad():
        torchs.weight_ih_l0.copy_(layer.weight_input)
        torchs.weight_hh_l0.copy_(layer.weight_hidden)
        torchs.bias_ih_l0.copy_(layer.bias)
        torchs.bias_hh_l0.zero_()
        torchs.bias_ih_l0[4:8] += 1  # the forget gate
    sequences = torch.randn(3, 7, 5)
    states, _ = torchs(sequences)
    torch.testing.assert_close(layer(sequences), states)


def test_cnn_lstm_is_a_convolution_of_sequences_and_an_lstm(float64):
    module = CNNLSTM(vocabulary=50, width=6, channels=5, hidden=4)
    tokens = torch.randint(50, (3, 23))
    pooled = F.max_pool1d(F.relu(module.conv(module.embedding(tokens).transpose(1, 2))), 4)
    assert pooled.shape == (3, 5, 4)
    torch.testing.assert_close(
        module(tokens), module.classifier(module.lstm(pooled.transpose(1, 2))[:, -1]), check_stride=False
    )


def test_lenet5_normalises_behind_each_hidden_activation(float64):
    module = LeNet5(3, 1, image_size=20).eval()
    for name, tensor in module.named_buffers():
        if name.endswith(("mean", "var")):
            tensor.uniform_(0.5, 2.0)
    images = torch.randn(4, 1, 20, 20)

    def block(x, layer, norm):
        x = layer(x).relu()
        shape = (1, -1, *[1] * (x.ndim - 2))
        std = (norm.running_var + norm.eps).sqrt()
        return (x - norm.running_mean.reshape(shape)) / std.reshape(shape)

    features, classifier = module.features, module.classifier
    x = F.max_pool2d(block(images, features[0], features[2]), 2)
    x = F.max_pool2d(block(x, features[4], features[6]), 2).flatten(1)
    x = block(block(x, classifier[0], classifier[2]), classifier[3], classifier[5])
    torch.testing.assert_close(module(images), classifier[6](x))
