"""A compact network computes what the masked one does, with smaller layers."""

import copy
import io
import re
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import polymode as pm
from polymode import models
from polymode.errors import InputError
from polymode.networks.adaptations import Sampling, adapt
from polymode.networks.compaction import PRUNABLE, compact_with
from polymode.networks.surgery import prepare


def unusual(module, seed=0):
    """BatchNorm as no initialiser leaves it, and biases that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            for name, low, high in (("running_mean", -1, 1), ("running_var", 0.5, 2)):
                getattr(part, name).uniform_(low, high, generator=generator)
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -1.5, 1.5, generator=generator)
        elif isinstance(part, PRUNABLE) and part.bias is not None:
            nn.init.uniform_(part.bias, -1, 1, generator=generator)
    return module


def random_masks(module, rate, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight".lstrip("."): torch.rand(len(part.weight), generator=generator) >= rate
        for name, part in module.named_modules()
        if isinstance(part, PRUNABLE)
    }


def masked(module, masks):
    """The oracle: weight rows set to zero, biases left alone."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for name, kept in masks.items():
            module.get_parameter(name)[~kept] = 0
    return module.eval()


def check(module, masks, *inputs, tolerance=1e-12):
    """Compact a module and compare it with the masked one."""
    before = copy.deepcopy(module.state_dict())
    compacted = pm.compact(module, masks)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.no_grad():
        expected = masked(module, masks)(*inputs)
        found = copy.deepcopy(compacted.module).eval()(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert not masked(module, masks).training
    return compacted


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


class Branching(nn.Module):
    """A user's network: a skip connection, a concatenation, functions and methods of tensors."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.inner = nn.Conv2d(6, 6, 3, padding="same", dilation=2, bias=False)
        self.narrow = nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect")
        self.wide = nn.Conv2d(6, 5, (3, 1), stride=2, padding=(2, 0))
        self.every_other = nn.Conv2d(4, 5, 1, stride=2)
        self.hidden = nn.Linear(10 * 4 * 4, 12)
        self.hidden_norm = nn.BatchNorm1d(12)
        self.left, self.right = nn.Linear(12, 4), nn.Linear(12, 3)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        x = F.silu(self.norm(self.stem(x)))
        x = x + 0.5 * self.inner(x).tanh()
        x += F.relu(self.inner_again(x))
        both = torch.cat([self.wide(x)[:, :, :4], F.max_pool2d(self.every_other(self.narrow(x)), 1)], dim=1)
        both = F.avg_pool2d(both, 3, 1, padding=1, count_include_pad=False)
        flat = F.dropout(F.pad(both, (0, 0, 0, 0, 0, 0)), 0.5, self.training).view(both.size(0), -1)
        hidden = F.leaky_relu(self.hidden_norm(self.hidden(flat)))
        return self.head(torch.cat([self.left(hidden), torch.sigmoid(self.right(hidden))], -1))

    def inner_again(self, x):
        return torch.mul(x, 2)


def images(side, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, 3, side, side, generator=generator, dtype=dtype)


NETWORKS = {
    "resnet8": (models.resnet8, images(9)),
    "resnet20": (models.resnet20, images(8)),
    "resnet20 with dropout": (lambda: models.resnet20(dropout=0.1), images(8)),
    "wrn16_2": (models.wrn16_2, images(8)),
    "pyramid": (lambda: models.PyramidNet(14, 12), images(9)),
    "lenet": (models.LeNet, images(28)),
    "lenet5": (models.LeNet5, images(32)),
    "smallcnn": (models.SmallCNN, images(16)),
    "mlp": (lambda: models.MLP(5, 3, (20, 30), batch_norm="before"), torch.randn(4, 5).double()),
    "mlp after": (
        lambda: models.MLP(5, 3, (20, 30), batch_norm="after", activation=nn.ELU, input_norm=True),
        torch.randn(4, 5).double(),
    ),
    "branching": (Branching, images(8)),
    "frn": (models.resnet20_frn, images(8)),
}
NETWORKS["smallcnn"] = (lambda: models.SmallCNN(image_size=16), images(16))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_masked_network(name, rate):
    factory, inputs = NETWORKS[name]
    module = unusual(factory().double())
    for seed in range(2):
        masks = random_masks(module, rate, seed)
        compacted = check(module, masks, inputs)
        bound = 1.2 - rate if name == "frn" else 1.05 - rate  # a normalisation of one's own keeps widths
        assert size(compacted.module) < bound * size(module)
    check(module.float(), masks, inputs.float(), tolerance=1e-5)


@pytest.mark.parametrize("factory", [models.resnet32, models.resnet56, partial(models.resnet18, 10)])
def test_deep_networks(factory):
    module = unusual(factory().double())
    compacted = check(module, random_masks(module, 0.5), images(33 if factory.__class__ is partial else 8))
    assert size(compacted.module) < 0.4 * size(module)
    assert list(compacted.left) == [
        "classifier.weight" if "classifier" in dict(module.named_children()) else "fc.weight"
    ]


def test_widths_are_those_of_the_masks():
    module = unusual(models.resnet8().double())
    masks = random_masks(module, 0.5)
    compacted = check(module, masks, images(8))
    small = compacted.module
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        kept = int(masks[f"{name}.conv1.weight"].sum())
        block = small.get_submodule(name)
        assert block.conv1.out_channels == block.bn1.num_features == block.conv2.in_channels == kept
        assert block.conv2.out_channels == int(masks[f"{name}.conv2.weight"].sum())
        assert compacted.removed[f"{name}.conv1.weight"] == (kept, len(masks[f"{name}.conv1.weight"]))
    stream = masks["conv.weight"] | masks["blocks.0.conv2.weight"]
    assert small.blocks[0].conv1.in_channels == int(stream.sum())
    assert compacted.inputs["blocks.1.conv1.weight"] == (int(stream.sum()), 16)
    assert type(small.blocks[0].bn1) is nn.BatchNorm2d
    assert isinstance(small, models.ResNet)
    text = str(compacted)
    assert re.search(r"^weight +outputs +inputs$", text, re.MULTILINE)
    kept, of = compacted.removed["blocks.0.conv1.weight"]
    assert re.search(
        rf"^blocks.0.conv1.weight +{kept} of {of} +{int(stream.sum())} of 16$", text, re.MULTILINE
    )
    assert "classifier.weight: constants are filled in: what leaves the network has all its channels" in text


@pytest.mark.parametrize(
    "name", ["resnet8", "wrn16_2", "pyramid", "lenet", "lenet5", "mlp after", "branching"]
)
def test_layers_with_nothing_left(name):
    factory, inputs = NETWORKS[name]
    module = unusual(factory().double())
    everything = {key: torch.zeros_like(mask) for key, mask in random_masks(module, 0.5).items()}
    compacted = check(module, everything, inputs)
    # After ``x += …`` a graph does not show who else sees x, so that stream keeps its width.
    assert size(compacted.module) < (0.08 if name == "branching" else 0.06) * size(module)
    assert all(parameter.numel() for parameter in compacted.module.parameters())
    for key in everything:  # one at a time
        check(module, {key: everything[key]}, inputs)
    torch.export.export(compacted.module.eval(), (inputs,))


def test_nothing_to_take_out_changes_nothing():
    module = models.resnet8()
    compacted = pm.compact(module, {name: torch.ones_like(m) for name, m in random_masks(module, 0).items()})
    assert not compacted.removed
    assert not compacted.inputs
    assert not compacted.left
    assert [type(part) for part in compacted.module.modules()] == [type(part) for part in module.modules()]
    assert compacted.module.state_dict().keys() == module.state_dict().keys()


def test_constants_that_are_zero_cost_nothing():
    """Without biases and shifts nothing is left of what is taken out."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4, bias=False)).double()
    nn.init.zeros_(module[0].bias)
    masks = random_masks(module, 0.5)
    del masks["5.weight"]
    plain = check(module, masks, images(4)).module
    assert plain.state_dict().keys() == module.state_dict().keys()
    assert [type(part) for part in plain] == [type(part) for part in module]
    shifted = check(unusual(module), masks, images(4)).module
    assert shifted.state_dict().keys() - module.state_dict().keys() == {"2.constant_kernel"}
    gelu = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3, bias=False)).double()
    added = check(gelu, {"0.weight": torch.tensor([True, False] * 3)}, torch.randn(5, 4).double()).module
    assert added.state_dict().keys() - gelu.state_dict().keys() == {"2.bias"}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


class Custom(nn.Module):
    """Steps that are not known, one after another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])
        self.groups = nn.Conv1d(6, 6, 3, groups=2)
        self.pool = nn.AvgPool1d(3, 1, padding=1)
        self.last = nn.Conv1d(6, 3, 3)

    def forward(self, x):
        first, second, third, fourth, fifth, sixth, seventh, eighth = self.layers
        x = torch.softmax(first(x), -1)
        x = second(x).view(-1, 6)
        x = third(x)[:, torch.arange(6)]
        x = torch.cat([fourth(x)[:, :3], x[:, 3:]], 1)
        x = torch.relu_(shared := fifth(x)) + shared  # in place: both are the same tensor
        x = F.dropout(sixth(x), 0.0) * x.mean()
        size = seventh(x)
        x = eighth(size) * size.shape[1]
        sequence = self.groups(x[:, :, None].expand(-1, -1, 7))
        return self.last(self.pool(sequence).flip(1)).flatten(1)


def test_what_is_not_known_gets_all_channels():
    x = torch.randn(5, 4, dtype=torch.float64)
    module = unusual(Scaled().double())
    compacted = check(module, {"body.weight": torch.tensor([True, False, True, False, True, False])}, x)
    assert compacted.removed == {"body.weight": (3, 6)}
    assert compacted.left == {"body.weight": "constants are filled in: LayerNorm 'norm' needs all channels"}
    custom = unusual(Custom().double())
    x = torch.randn(5, 6, dtype=torch.float64)
    for seed in range(3):
        masks = random_masks(custom, 0.5, seed) | {"groups.weight": torch.tensor([True, False] * 3)}
        compacted = check(custom, masks, x)
    assert compacted.left["groups.weight"] == "it is a grouped convolution"


class Chooses(nn.Module):
    """Looks at its inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.inside = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return self.inside(x) if x.sum() > 0 else self.inside(x + 1)


class ReadsWeights(Chooses):
    def forward(self, x):
        x = F.linear(torch.tanh(self.first(x)), self.second.weight)
        return self.inside(x) if x.sum() > 0 else x


@pytest.mark.parametrize("kind", [Chooses, ReadsWeights])
def test_what_cannot_be_traced_is_made_smaller_inside(kind):
    x = torch.randn(5, 6, dtype=torch.float64)
    alone = unusual(kind().double())
    compacted = check(alone, random_masks(alone, 0.5), x)
    assert "cannot be traced" in compacted.left[""]
    if kind is ReadsWeights:
        assert not compacted.removed
        assert compacted.left["second.weight"] == "the code that calls it is not known"
        return
    assert compacted.removed.keys() == {"first.weight", "second.weight", "inside.0.weight", "inside.2.weight"}
    within = unusual(nn.Sequential(nn.Linear(6, 6), kind(), nn.ReLU(), nn.Linear(6, 3)).double())
    compacted = check(within, random_masks(within, 0.5), x)
    assert compacted.left["1"].startswith(f"{kind.__name__} cannot be traced: ")
    assert compacted.left["0.weight"] == f"constants are filled in: {kind.__name__} '1' needs all channels"
    assert compacted.inputs["1.inside.2.weight"][0] == compacted.removed["1.inside.0.weight"][0]


class ReadsSizes(nn.Module):
    """Computes with what its layers tell of themselves."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 7, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(7), nn.Linear(7, 2)

    def forward(self, x):
        x = torch.relu(self.first(x))
        new = self.second.out_channels - self.first.out_channels
        x = self.norm(self.second(x)) + F.pad(x, (0, 0, 0, 0, new, 0))
        return self.head(x.mean((2, 3))) * self.norm.num_features


def test_code_that_reads_sizes_reads_what_it_read():
    module = unusual(ReadsSizes().double())
    for seed in range(3):
        compacted = check(module, random_masks(module, 0.5, seed), images(5))
    assert compacted.module.first.out_channels == 4
    assert len(compacted.module.first.weight) < 4


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, shift=None):
        x = self.first(x)
        if shift is not None:
            x = x * shift
        return self.second(x)


class Trains(Optional):
    def forward(self, x):
        x = self.first(x)
        return self.second(torch.softmax(x, -1) if self.training else x)


def test_code_that_goes_several_ways_is_right_on_all_of_them():
    x, shift = torch.randn(2, 5, 4, dtype=torch.float64)
    masks = {"first.weight": torch.tensor([True, False, True, False])}
    for inputs in ((x,), (x, shift)):
        assert "optional arguments" in check(unusual(Optional().double()), masks, *inputs).left[""]
    module = unusual(Trains().double())
    small = check(module, masks, x).module
    torch.testing.assert_close(small.train()(x), masked(module, masks).train()(x))


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.tied, self.same = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.same.weight
        self.read, self.hooked, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.hooked.register_forward_hook(lambda layer, inputs, outputs: outputs + 1)
        self.listed = [self.head]  # not registered here, but the same layer

    def forward(self, x):
        x = self.same(torch.tanh(self.tied(self.twice(self.twice(x)))))
        return self.listed[0](self.hooked(F.linear(x, self.read.weight)))


def test_what_others_depend_on_stays():
    module = unusual(Shares().double())
    masks = random_masks(module, 0.5, seed=2) | {"twice.weight": torch.tensor([True, False, True, False])}
    masks["same.weight"] = masks["tied.weight"]
    compacted = check(module, masks, torch.randn(5, 4, dtype=torch.float64))
    assert compacted.left["twice.weight"] == "this Linear is used 2 times"
    assert compacted.left["tied.weight"] == "this Linear shares a tensor with another layer"
    assert compacted.left["read.weight"] == "the network reads the tensors of this Linear itself"
    assert compacted.left["hooked.weight"] == "this Linear has hooks"
    assert compacted.removed.keys() == {"head.weight"} & compacted.removed.keys()


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 3), nn.Conv3d(3, 4, 2, padding=1)])
def test_a_layer_alone(layer):
    layer = unusual(layer.double())
    x = torch.randn(2, *([3, 5, 5, 5] if isinstance(layer, nn.Conv3d) else [3, 3]), dtype=torch.float64)
    compacted = check(layer, {"weight": torch.tensor([False, True, False, True])}, x)
    assert compacted.removed == {"weight": (2, 4)}
    assert compacted.module(x[0]).shape == layer(x[0]).shape  # without an axis of examples


def test_one_and_three_axes_of_space():
    for conv, norm, pool, side in (
        (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, (9,)),
        (nn.Conv3d, nn.BatchNorm3d, nn.AvgPool3d, (5, 4, 6)),
    ):
        layers = [conv(3, 6, 3, padding=1), norm(6), nn.GELU(), conv(6, 7, 3, 2, padding=2), nn.Hardtanh()]
        module = unusual(nn.Sequential(*layers, pool(2), conv(7, 4, 1)).double())
        x = torch.randn(2, 3, *side, dtype=torch.float64)
        compacted = check(module, random_masks(module, 0.5), x)
        assert compacted.inputs.keys() == {"3.weight", "6.weight"}
        torch.testing.assert_close(compacted.module.eval()(x[:1])[0], compacted.module(x)[0])


def test_masks_of_rows_without_weights():
    module = models.LeNet5()
    assert pm.masks_of(module) == {}
    with torch.no_grad():
        module.features[0].weight[2] = 0
        module.classifier[0].weight[[1, 5], :] = 0
        module.classifier[3].weight[:, 4] = 0  # a column is none of its business
    masks = pm.masks_of(module)
    assert masks.keys() == {"features.0.weight", "classifier.0.weight"}
    assert masks["classifier.0.weight"].nonzero().flatten().tolist() == [
        i for i in range(120) if i not in (1, 5)
    ]
    check(unusual(module.double()), masks, images(32))


def test_bad_masks():
    module = models.LeNet()
    for masks, message in (
        ({"features.0.wieght": torch.ones(6).bool()}, "Did you mean 'features.0.weight'"),
        ({"features.0.bias": torch.ones(6).bool()}, "Unknown weight of a linear layer"),
        ({"features.0.weight": torch.ones(5).bool()}, r"'features.0.weight' must be booleans \[6\].*\[5\]"),
        ({"features.0.weight": torch.ones(6)}, "got .* of torch.float32"),
        ({"features.0.weight": [True] * 6}, "got list"),
    ):
        with pytest.raises(InputError, match=message):
            pm.compact(module, masks)


def test_it_is_exported_and_saved():
    module = unusual(models.resnet8().double())
    masks = random_masks(module, 0.5)
    small = pm.compact(module, masks).module.eval()
    program = torch.export.export(
        small, (images(8),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        torch.testing.assert_close(loaded(images(8, 5)), masked(module, masks)(images(8, 5)))
    again = pm.compact(module, masks).module.eval()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(images(8)), small(images(8)))


def test_training_goes_on():
    module = unusual(models.resnet8().double())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in ("conv.weight", "blocks.0.conv2.weight"))
    module.blocks[1].bn1.eval()
    small = pm.compact(module, random_masks(module, 0.5)).module
    assert [part.training for part in small.modules()] == [part.training for part in module.modules()]
    assert not small.conv.weight.requires_grad
    assert not small.blocks[0].conv2.constant_kernel.requires_grad
    assert small.blocks[2].conv2.constant_kernel.requires_grad
    assert small.blocks[0].bn2.constants.requires_grad
    optimizer = torch.optim.Adam([p for p in small.parameters() if p.requires_grad], 1e-2)
    labels, losses = torch.arange(8) % 3, []
    for _ in range(15):
        loss = F.cross_entropy(small(images(8, 8)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is not None for p in small.parameters() if p.requires_grad)


def test_types_and_layouts_stay():
    module = models.resnet8().to(torch.bfloat16, memory_format=torch.channels_last)
    small = pm.compact(module, random_masks(module, 0.5)).module.eval()
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    kernels = [p for p in small.parameters() if p.ndim == 4]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    x = images(8, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    video = nn.Sequential(nn.Conv3d(3, 8, 3), nn.Conv3d(8, 2, 3)).to(memory_format=torch.channels_last_3d)
    half = pm.compact(video, {"0.weight": torch.arange(8) % 2 == 0}).module
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last_3d) for conv in half)
    layouts = []
    for part in small.modules():
        part.register_forward_hook(lambda _, __, out: layouts.append((out.shape, out.stride())))
    small(x)
    shapes = [(shape, stride) for shape, stride in layouts if len(shape) == 4 and shape[1] > 1]
    assert len(shapes) > 15
    assert all(stride[1] == 1 for _, stride in shapes)


def test_members_run_side_by_side():
    """What the layers do to their outputs goes through vmap."""
    module = unusual(models.resnet8().double()).eval()
    small = pm.compact(module, random_masks(module, 0.5)).module
    states = [{n: t * (1 + 0.1 * i) for n, t in small.named_parameters()} for i in range(2)]
    members = pm.stack([{n: t.detach() for n, t in state.items()} for state in states])
    mapped = pm.forward_members(small, members, images(8), backend="vmap")
    torch.testing.assert_close(mapped, pm.forward_members(small, members, images(8), backend="loop"))


def test_dropout_that_acts_needs_all_channels():
    module = unusual(models.MLP(5, 3, (20, 30), dropout=0.3).double())
    masks = random_masks(module, 0.5)
    still = pm.compact(prepare(module), masks)
    assert still.inputs.keys() == {"4.weight", "7.weight"}
    acting = adapt(prepare(module), [Sampling()], seed=0)
    compacted = check(acting, masks, torch.randn(4, 5, dtype=torch.float64))
    assert not compacted.inputs
    hooked = adapt(prepare(module), [Sampling(added={"4": 0.2})], seed=0)
    assert (
        check(hooked, masks, torch.randn(4, 5, dtype=torch.float64)).left["4.weight"]
        == "this Linear has hooks"
    )


def test_tensors_are_those_that_are_named():
    """A file says which constants there are, whatever the weights at hand."""
    module = unusual(models.resnet8().double())
    masks = random_masks(module, 0.5)
    names = pm.compact(module, masks).module.state_dict().keys()
    blank = models.resnet8().double()
    for parameter in blank.parameters():
        nn.init.zeros_(parameter)
    assert pm.compact(blank, masks).module.state_dict().keys() < names
    assert compact_with(blank, masks, names).module.state_dict().keys() == names
    plain = pm.compact(blank, masks).module.state_dict().keys()
    assert compact_with(module, masks, plain).module.state_dict().keys() == plain


def test_others_may_predict_meanwhile():
    """Tracing exchanges the call of every module for a moment, in all threads."""
    module, x = unusual(models.resnet8()).eval(), images(8, dtype=torch.float32)
    with torch.no_grad():
        expected, wrong, done = module(x), [], threading.Event()

    def predict():
        with torch.no_grad():
            while not done.is_set():
                try:
                    if not torch.equal(module(x), expected):
                        wrong.append("other outputs")
                except Exception as error:
                    wrong.append(error)

    thread = threading.Thread(target=predict)
    thread.start()
    other = models.resnet8()
    for seed in range(10):
        pm.compact(other, random_masks(other, 0.5, seed))
    done.set()
    thread.join()
    assert not wrong


# --- code that a graph does not show ------------------------------------------------------------------


class Augmented(nn.Module):
    """``y += 1`` writes over what ``skip`` is, too; a graph of torch.fx does not show it."""

    def __init__(self):
        super().__init__()
        self.c, self.d, self.e = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        y = self.c(x)
        skip = y
        y += 1.0
        return self.d(y) + self.e(skip)


class AddsInPlace(nn.Module):
    """The usual residual block: nobody else reads what is written over."""

    def __init__(self):
        super().__init__()
        self.c, self.d, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        first = torch.relu(self.c(x))
        out = self.d(first)
        out += first
        return self.head(out)


class ReadsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.d = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.d(torch.relu(self.c(x))) + sum(p.square().sum() for p in self.parameters())


class ReachesIn(nn.Module):
    """Cannot be traced, and takes what its child computes on the way."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        return self.body(x) + self.body[0](x).mean(1, keepdim=True)


class OtherSpellings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.d = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3), nn.Linear(8, 3)

    def forward(self, x):
        both = torch.cat([self.a(x), self.b(x)], axis=1)
        return self.d(both.mean(axis=(2, 3)))


def hooked():
    module = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 3))
    module[1].register_forward_hook(lambda m, i, o: o + 1)
    return module


def overridden():
    module = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 3))
    module[1].forward = lambda x: x + 2
    return module


@pytest.mark.parametrize(
    ("make", "name", "shape"),
    [
        (Augmented, "c.weight", (4,)),
        (AddsInPlace, "c.weight", (4,)),
        (ReadsItself, "c.weight", (4,)),
        (ReachesIn, "body.0.weight", (4,)),
        (OtherSpellings, "a.weight", (2, 6, 6)),
        (hooked, "0.weight", (4,)),
        (overridden, "0.weight", (4,)),
    ],
)
def test_code_that_a_graph_does_not_show(make, name, shape):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().double().eval()
        x = torch.randn(5, *shape, dtype=torch.float64)
    rows = module.get_parameter(name).shape[0]
    mask = torch.arange(rows) % 2 == 0
    expected = copy.deepcopy(module)
    with torch.no_grad():
        expected.get_parameter(name)[~mask] = 0
        torch.testing.assert_close(
            pm.compact(module, {name: mask}).module(x), expected(x), rtol=0, atol=1e-12
        )


def test_what_is_no_module_or_cannot_be_copied_is_refused():
    with pytest.raises(InputError, match="build the network"):
        pm.compact(Augmented, {})
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    prune.random_unstructured(module[0], "weight", 0.5)
    module(torch.ones(1, 4))
    with pytest.raises(InputError, match=r"prune\.remove"):
        pm.compact(module, {})
    assert "nothing to take out" in str(pm.compact(nn.Linear(3, 2), {}))
