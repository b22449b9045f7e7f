"""What networks multiply, and what is left of them, against counts by hand."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from cases import NETWORKS, TransformerBlock
from polymode.errors import InputError
from polymode.networks.adaptations import adapt
from polymode.networks.costs import Accounting, LayerCost, layer_costs, multiplications
from polymode.networks.surgery import prepare, tensors_of, trainable_names
from polymode.trees import leaves

IMAGES = torch.zeros(2, 3, 32, 32)


@pytest.fixture(scope="module")
def resnet20():
    return Accounting.of(pm.models.resnet20(), IMAGES)


# --- multiplications -----------------------------------------------------------------------------------


def by_loops(images, kernel, stride, padding):
    """A convolution one product at a time: how many there are, those with padding among them."""
    padded = F.pad(images, (padding,) * 4)
    count = 0
    for row in range(0, padded.shape[-2] - kernel.shape[-2] + 1, stride):
        for column in range(0, padded.shape[-1] - kernel.shape[-1] + 1, stride):
            window = padded[0, :, row : row + kernel.shape[-2], column : column + kernel.shape[-1]]
            count += sum((window * each).numel() for each in kernel)
    return count


@pytest.mark.parametrize(("stride", "padding", "kernel"), [(1, 1, 3), (2, 1, 3), (2, 0, 1), (3, 2, 5)])
def test_a_convolution_multiplies_as_often_as_its_loops(stride, padding, kernel):
    layer = nn.Conv2d(2, 3, kernel, stride, padding)
    images = torch.randn(4, 2, 7, 6)
    assert multiplications(layer, images) == by_loops(images, layer.weight, stride, padding)
    [cost] = layer_costs(layer, images).values()
    assert cost.multiplications == multiplications(layer, images)
    assert (cost.weights, cost.outputs) == (6 * kernel**2, 3)
    assert cost.uses == layer(images)[0, 0].numel()


class Vectors(nn.Module):
    """A matrix by hand, times a vector of weights."""

    def __init__(self):
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.ones(7, 5)), nn.Parameter(torch.ones(5))

    def forward(self, inputs):
        return torch.tanh(inputs @ self.matrix) @ self.vector


class Branching(nn.Module):
    """Looks at its numbers, which the meta device does not have; counts its calls."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(4, 9), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return self.large(inputs) if float(inputs.sum()) > 0 else self.small(inputs)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Linear(7, 5), (7,), 35),
        (nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 5)), (6, 7), 6 * 60),  # six places
        (nn.Conv2d(4, 4, 3, padding=1, groups=2), (4, 5, 5), 25 * 4 * 2 * 9),
        (nn.Conv1d(3, 2, 4), (3, 10), 7 * 24),
        (nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 4, 4), 16 * 54),
        (nn.LSTM(3, 4, batch_first=True), (6, 3), 6 * 16 * (3 + 4)),
        (nn.GRU(3, 4, batch_first=True, bidirectional=True), (6, 3), 6 * 2 * 12 * (3 + 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (6, 8), 6 * 4 * 64 + 2 * 36 * 8 + 6 * 256),
        (nn.BatchNorm1d(7), (7,), 0),
        (Vectors(), (7,), 35 + 5),
        (pm.models.MLP(8, 2, (50,), batch_norm="after"), (8,), 8 * 50 + 50 * 2),
        (pm.models.resnet20(), (3, 32, 32), 40_551_050 - 10 + 2 * 131_072),  # no bias, two shortcuts
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_multiplications_of_any_network(module, shape, expected, batch):
    assert multiplications(module, torch.randn(batch, *shape)) == expected


def test_a_network_that_looks_at_its_numbers_is_run_with_them():
    module = Branching()
    assert multiplications(module, torch.ones(1, 4)) == 36
    assert multiplications(module, -torch.ones(1, 4)) == 8
    assert layer_costs(module, torch.ones(1, 4)) == {
        "large": LayerCost(36, 9, 1),
        "small": LayerCost(8, 2, 0),
    }
    assert module.calls == 0


@pytest.mark.parametrize("case", NETWORKS, ids=lambda case: case.name)
def test_counting_leaves_module_mode_and_random_state_alone(case):
    module, inputs = case.double_factory(), case.data().inputs
    module.train()
    before, trainable = copy.deepcopy(tensors_of(module)), trainable_names(module)
    given = [leaf.clone() for leaf in leaves(inputs)]
    state = torch.get_rng_state()
    counted = multiplications(module, inputs)
    costs = layer_costs(module, inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert module.training
    assert all(not part._forward_hooks for part in module.modules())
    assert all(torch.equal(t, before[n]) for n, t in tensors_of(module).items())
    assert trainable_names(module) == trainable
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(given, leaves(inputs), strict=True))
    # Layers hold a part of the products at most; attention, recurrence and ties have others.
    assert 0 < sum(cost.multiplications for cost in costs.values()) <= counted


def test_a_prepared_network_with_sampled_dropout_multiplies_as_often():
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    prepared = prepare(module)
    sampled = adapt(prepared, pm.methods.MCDropout().adaptations(prepared), 0)
    assert multiplications(sampled, torch.randn(1, 4)) == 24 + 18


def test_a_layer_that_is_called_twice_is_used_twice():
    shared = nn.Linear(5, 5, bias=False)
    costs = layer_costs(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(1, 5))
    assert costs == {"0": LayerCost(25, 5, 2)}


def test_layers_whose_weights_are_used_without_a_call_count():
    """The last matrix of attention is a layer, its first three are not."""
    module = TransformerBlock().double()
    inputs = torch.randn(1, 5, 8, dtype=torch.float64)
    costs = layer_costs(module, inputs)
    assert costs["block.self_attn.out_proj"] == LayerCost(64, 8, 5)
    rest = multiplications(module, inputs) - sum(cost.multiplications for cost in costs.values())
    assert rest == 5 * 3 * 64 + 2 * 25 * 8
    texts = layer_costs(pm.models.CNNLSTM(vocabulary=9), torch.ones(1, 20, dtype=torch.int64))
    assert texts["conv"] == LayerCost(128 * 5 * 64, 64, 16)


def test_a_weight_that_is_tied_counts_once_with_all_its_uses():
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    costs = layer_costs(nn.Sequential(first, nn.Tanh(), second), torch.randn(1, 5))
    assert costs == {"0": LayerCost(25, 5, 2)}


# --- the accounting of Jantre et al. (2022) ------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "num_classes", "parameters", "multiplied"),
    [
        (20, 10, 268_346, 40_551_050),
        (32, 10, 461_882, 68_862_602),
        (56, 10, 848_954, 125_485_706),
        (20, 100, 274_196, 40_556_900),
        (32, 100, 467_732, 68_868_452),
        (56, 100, 854_804, 125_491_556),
    ],
)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_dense_figures_of_the_paper(depth, num_classes, parameters, multiplied, activation):
    module = getattr(pm.models, f"resnet{depth}")(num_classes, activation=activation)
    accounting = Accounting.of(module, IMAGES)
    assert (accounting.parameters, accounting.multiplications) == (parameters, multiplied)
    assert len(accounting.layers) == depth - 1
    assert len(accounting.ignored) == 3  # two shortcuts, the classifier
    whole = accounting.shares({})
    assert (whole["parameters"], whole["multiplications"]) == (1, 1)


def naive_shares(masks):
    """Figures of ResNet-20 channel by channel, from the sizes of its layers alone."""
    layers = [("conv", 3, 16, 32)]
    for stack, (width, size) in enumerate(((16, 32), (32, 16), (64, 8))):
        for block in range(3):
            before = width // 2 if stack and not block else width
            layers.append((f"blocks.{3 * stack + block}.conv1", before, width, size))
            layers.append((f"blocks.{3 * stack + block}.conv2", width, width, size))
    parameters = multiplied = 650
    for name, before, width, size in layers:
        for channel in range(width):
            if bool(masks[name][channel]):
                parameters += before * 9
                multiplied += before * 9 * size * size
    return parameters / 268_346, multiplied / 40_551_050


@pytest.mark.parametrize("by", ["layer", "weight"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_shares_of_members_are_those_counted_channel_by_channel(resnet20, by, dtype, float64):
    generator = torch.Generator().manual_seed(0)
    widths = {name: cost.outputs for name, cost in resnet20.layers.items()}
    masks = {name: torch.rand(3, width, generator=generator) < 0.6 for name, width in widths.items()}
    suffix = "" if by == "layer" else ".weight"
    given = {f"{name}{suffix}": mask.to(dtype) for name, mask in masks.items()}
    given |= {f"blocks.3.downsample.0{suffix}": torch.zeros(3, 32), f"classifier{suffix}": torch.zeros(3, 10)}
    shares = resnet20.shares(given)
    for member in range(3):
        expected = naive_shares({name: mask[member] for name, mask in masks.items()})
        found = shares["parameters"][member], shares["multiplications"][member]
        assert tuple(map(float, found)) == pytest.approx(expected, rel=1e-14)
    alone = resnet20.shares({name: mask[0] for name, mask in given.items()})
    assert {name: share.shape for name, share in alone.items()} == dict.fromkeys(shares, torch.Size([]))
    assert alone["parameters"] == shares["parameters"][0]


def test_nothing_but_the_classifier_remains_when_all_channels_are_gone(resnet20, float64):
    gone = {name: torch.zeros(2, cost.outputs) for name, cost in resnet20.layers.items()}
    shares = resnet20.shares(gone)
    torch.testing.assert_close(shares["parameters"], torch.full((2,), 650 / 268_346))
    torch.testing.assert_close(shares["multiplications"], torch.full((2,), 650 / 40_551_050))


def test_single_zeros_count_where_they_are(resnet20, float64):
    """A weight of the stem is used 1,024 times, one of the last block 64 times."""
    nonzero = {
        "conv.weight": torch.tensor([432 - 5, 432]),
        "blocks.8.conv2": torch.tensor([36_864, 36_864 - 7]),
    }
    shares = resnet20.shares({}, nonzero)
    lost = torch.tensor([5.0, 7.0])
    torch.testing.assert_close(shares["parameters"], 1 - lost / 268_346)
    torch.testing.assert_close(shares["multiplications"], 1 - lost * torch.tensor([1024.0, 64]) / 40_551_050)
    channels = resnet20.shares({"conv": torch.arange(16) > 1})  # two channels are 54 single weights
    single = resnet20.shares({}, {"conv": torch.tensor(432 - 54)})
    assert channels == single


def test_a_fully_connected_network_counts_its_hidden_units(float64):
    module = pm.models.MLP(8, 2, (50, 20), batch_norm="after")
    accounting = Accounting.of(module, torch.randn(1, 8))
    dense = 8 * 50 + 50 * 20 + (20 * 2 + 2)
    assert (accounting.parameters, accounting.multiplications) == (dense, dense)
    [first, _] = accounting.layers
    mask = torch.arange(50) < 10
    for share in accounting.shares({first: mask}).values():
        torch.testing.assert_close(share, torch.tensor((dense - 8 * 40) / dense))


@pytest.mark.parametrize(
    ("make", "shape", "left_out"),
    [
        (pm.models.wrn16_2, (3, 32, 32), 3),
        (pm.models.resnet20_frn, (3, 32, 32), 2),
        (pm.models.resnet18, (3, 64, 64), 3),
        (lambda: pm.models.LeNet(image_size=28, in_channels=1), (1, 28, 28), 0),
    ],
)
def test_shortcuts_of_all_residual_networks_are_left_out(make, shape, left_out):
    module = make()
    accounting = Accounting.of(module, torch.zeros(1, *shape))
    costs = layer_costs(module, torch.zeros(1, *shape))
    assert len(costs) - len(accounting.layers) - 1 == left_out
    kernels = {n: module.get_submodule(n).weight.shape for n in accounting.ignored}
    assert sum(shape[2:] == (1, 1) for shape in kernels.values()) == left_out
    lost = sum(math.prod(shape) for shape in kernels.values() if len(shape) == 4)
    biases = sum(p.numel() for p in module.parameters() if p.ndim == 1)
    [last] = [n for n, shape in kernels.items() if len(shape) == 2]
    of_last = module.get_submodule(last).bias.numel()
    assert accounting.parameters == sum(p.numel() for p in module.parameters()) - biases - lost + of_last


def test_masks_that_do_not_fit_are_refused(resnet20):
    with pytest.raises(InputError, match=r"mask of 'conv' is \[3, 9\].* the 16 output units"):
        resnet20.shares({"conv": torch.ones(3, 9)})
    with pytest.raises(
        InputError, match=r"Unknown Linear layer or convolution 'blocks.0.conv3.weight'. Did you"
    ):
        resnet20.shares({"blocks.0.conv3.weight": torch.ones(16)})
    with pytest.raises(InputError, match=r"Unknown Linear layer or convolution 'bn.weight'"):
        resnet20.shares({}, {"bn.weight": torch.tensor(3)})
    with pytest.raises(
        InputError, match=r"This Linear cannot run on inputs \[1, 3\] torch.float32: .*shapes"
    ):
        multiplications(nn.Linear(4, 2), torch.randn(5, 3))
    with pytest.raises(InputError, match=r"No Linear layer or convolution of this Embedding is used"):
        Accounting.of(nn.Embedding(5, 3), torch.ones(1, 4, dtype=torch.int64))
