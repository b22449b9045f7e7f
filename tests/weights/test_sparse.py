"""Densities, masks and their exchange against plain loops over numbers."""

import math

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME, conv_net
from polymode.errors import InputError, UnknownName
from polymode.networks.surgery import trainable_names
from polymode.weights.sparse import draw_masks, erk_densities, masked_names, prune_and_grow, share_active

SHAPES = {
    "stem": (16, 3, 3, 3),
    "one": (32, 16, 3, 3),
    "shortcut": (32, 16, 1, 1),
    "two": (64, 32, 3, 3),
    "head": (10, 64),
}


def naive_densities(shapes, density):
    """As Evci et al. (2020) state it: the densest layer that exceeds 1 is taken out, one after another."""
    full = set()
    while True:
        wanted, divisor = 0.0, 0.0
        for name, shape in shapes.items():
            size = math.prod(shape)
            wanted += -size * (1 - density) if name in full else size * density
            divisor += 0 if name in full else sum(shape)
        found = {n: wanted / divisor * sum(s) / math.prod(s) for n, s in shapes.items() if n not in full}
        largest = max(found, key=lambda name: found[name])
        if found[largest] <= 1:
            return found | dict.fromkeys(full, 1.0)
        full.add(largest)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.2, 0.35, 0.6, 0.9])
def test_densities(density):
    found = erk_densities(SHAPES, density)
    assert list(found) == list(SHAPES)
    assert found == pytest.approx(naive_densities(SHAPES, density))
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    assert sum(found[n] * sizes[n] for n in sizes) == pytest.approx(density * sum(sizes.values()))
    assert all(0 < each <= 1 for each in found.values())


def test_small_layers_are_dense_where_they_would_have_to_be_more_than_that():
    for density, full in ((0.05, []), (0.11, ["head"]), (0.2, ["stem", "shortcut", "head"])):
        assert [name for name, each in erk_densities(SHAPES, density).items() if each == 1] == full
    assert set(erk_densities(SHAPES, 1.0).values()) == {1.0}
    assert erk_densities({"only": (7, 3)}, 0.3) == pytest.approx({"only": 0.3})


def test_masks_have_their_densities_and_the_layout_of_the_weights():
    weights = {
        "conv": torch.randn(1, 64, 32, 3, 3).permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2),
        "linear": torch.randn(1, 90, 80, dtype=torch.float64),
        "dense": torch.randn(1, 5, 5),
    }
    densities = {"conv": 0.2, "linear": 0.37, "dense": 1.0}
    masks = draw_masks(weights, densities, torch.Generator().manual_seed(0))
    for name, mask in masks.items():
        assert (mask.dtype, mask.stride()) == (weights[name].dtype, weights[name].stride())
        assert set(mask.unique().tolist()) <= {0.0, 1.0}
        spread = math.sqrt(densities[name] * (1 - densities[name]) / mask.numel())
        assert abs(mask.mean().item() - densities[name]) <= 4 * spread
    again = draw_masks(weights, densities, torch.Generator().manual_seed(0))
    assert all(torch.equal(mask, again[name]) for name, mask in masks.items())
    counts = torch.tensor([[mask.sum().item(), mask.numel()] for mask in masks.values()]).sum(0)
    assert share_active(masks).tolist() == pytest.approx([(counts[0] / counts[1]).item()])


def naive_exchange(weight, mask, gradient, rate):
    """One member, as lists of numbers."""
    weight, mask = list(weight), list(mask)
    active = [place for place, each in enumerate(mask) if each]
    if len(active) == len(mask):
        return weight, mask
    number = math.ceil(rate * len(active))
    for place in sorted(active, key=lambda place: abs(weight[place]))[:number]:  # sorting is stable
        mask[place], weight[place] = 0, 0
    inactive = [place for place, each in enumerate(mask) if not each]
    for place in sorted(inactive, key=lambda place: -abs(gradient[place]))[:number]:
        mask[place] = 1
    return weight, mask


@pytest.mark.parametrize("shape", [(1, 1), (5, 4), (3, 2, 3, 3)])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_an_exchange_is_that_of_plain_loops(shape, ties, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        if ties:
            return torch.randint(-2, 3, size, generator=generator).double()
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rates = torch.tensor([0.0, 0.2, 0.5, 0.8, 0.8, 0.5], dtype=torch.float64)
    densities = torch.tensor([0.5, 0.3, 0.7, 0.2, 1.0, 0.0]).reshape(-1, *[1] * len(shape))
    mask = (torch.rand(6, *shape, generator=generator) < densities).double()
    weight, gradient = draw(6, *shape) * mask, draw(6, *shape)
    found, masks = prune_and_grow(weight, mask, gradient, rates)
    for row in range(6):
        tensors = (t[row].flatten().tolist() for t in (weight, mask, gradient))
        expected, active = naive_exchange(*tensors, rates[row].item())
        assert found[row].flatten().tolist() == expected
        assert masks[row].flatten().tolist() == active


def test_what_returns_begins_at_zero_and_the_number_of_active_weights_stays():
    weight = torch.tensor([[3.0, -1.0, 2.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]])
    gradient = torch.tensor([[0.0, 9.0, 0.0, 1.0, -2.0]])
    weight, mask = prune_and_grow(weight, mask, gradient, torch.tensor([0.6], dtype=torch.float64))
    assert weight.tolist() == [[3.0, 0.0, 0.0, 0.0, 0.0]]
    assert mask.tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0]]


def test_a_share_is_rounded_as_numbers_of_python_are():
    """0.2 · 15 is 3; in single precision it is more than that, and its ceiling 4."""
    weight = torch.arange(1.0, 21.0).reshape(1, 20)
    mask = (torch.arange(20) < 15).float()[None]
    weight, _ = prune_and_grow(
        weight * mask, mask, torch.zeros(1, 20), torch.tensor([0.2], dtype=torch.float64)
    )
    assert torch.count_nonzero(weight) == 12


def names(module, where="all"):
    return masked_names(module, trainable_names(module), where)


def test_weights_of_linear_and_convolutional_layers_are_masked():
    assert names(conv_net()) == ["0.weight", "5.weight"]
    assert names(conv_net(), "Conv2d") == ["0.weight"]
    assert names(conv_net(), ("norm", "output")) == ["5.weight"]
    assert names(nn.Linear(3, 2)) == ["weight"]
    assert names(BY_NAME["lstm"].factory()) == ["head.weight"]
    assert names(BY_NAME["tied_tokens"].factory()) == ["mix.weight"]  # the other one is an embedding, too
    wanted = ["block.self_attn.out_proj", "block.linear1", "block.linear2", "head"]
    assert names(BY_NAME["transformer"].factory()) == [f"{layer}.weight" for layer in wanted]


def test_frozen_weights_are_left_out():
    module = pm.models.MLP(4, 3, (6, 5))
    first, *others = names(module)
    module.get_parameter(first).requires_grad_(False)
    assert names(module) == others
    with pytest.raises(InputError, match=f"selects no weights of this MLP .*{first} is frozen, or tied"):
        names(module, first.removesuffix(".weight"))


def test_a_network_without_such_layers_is_refused():
    with pytest.raises(InputError, match=r"where='all' selects no weights of this BatchNorm1d .* can be\."):
        names(nn.BatchNorm1d(4))
    with pytest.raises(UnknownName, match="pattern in where 'Linaer'"):
        names(conv_net(), "Linaer")
