"""Sparse weights: how many of each layer are active, which ones at first, and how they are exchanged.

Erdős–Rényi-kernel densities: Evci, Gale, Menick, Castro and Elsen, "Rigging the Lottery: Making All Tickets
Winners", ICML 2020.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polymode.errors import InputError
from polymode.networks.members import Tensors
from polymode.networks.selection import Where, select_layers

MASKED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def masked_names(module: nn.Module, trainable: frozenset[str], where: Where) -> list[str]:
    """Names of the weights to mask: the trained ones of Linear and convolutional layers, without biases."""
    layers = [n for n in select_layers(module, where) if isinstance(module.get_submodule(n), MASKED)]
    names = [f"{layer}.weight".lstrip(".") for layer in layers]
    if found := [name for name in names if name in trainable]:
        return found
    raise InputError(
        f"where={where!r} selects no weights of this {type(module).__name__} that could be sparse: those of "
        "Linear, Conv1d, Conv2d and Conv3d layers with a gradient can be"
        f"{f' ({names[0]} is frozen, or tied to another)' if names else ''}."
    )


def erk_densities(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, float]:
    """Shares of active weights, ε · (sum of a tensor's dimensions)/(their product), but at most 1.

    ε makes ``density`` the share of active weights in all tensors together: small tensors stay denser.

    >>> erk_densities({"first": (2, 2), "second": (8, 10)}, 0.5)
    {'first': 1.0, 'second': 0.475}
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    active, full = density * sum(sizes.values()), set()
    while True:
        sparse = {name: sum(shape) for name, shape in shapes.items() if name not in full}
        factor = (active - sum(sizes[name] for name in full)) / max(1, sum(sparse.values()))
        exceeding = {name for name, dimensions in sparse.items() if factor * dimensions > sizes[name]}
        if not exceeding:
            return {n: factor * sparse[n] / sizes[n] if n in sparse else 1.0 for n in shapes}
        full |= exceeding  # what they cannot take goes to the others


def draw_masks(weights: Tensors, densities: Mapping[str, float], generator: torch.Generator) -> Tensors:
    """Masks z ~ Bernoulli(density), 1 where a weight is active, of the type and layout of the weights."""
    masks = {}
    for name, density in densities.items():
        drawn = torch.rand(weights[name].shape, generator=generator, dtype=torch.float64)
        masks[name] = torch.empty_like(weights[name]).copy_(drawn < density)
    return masks


def prune_and_grow(weight: Tensor, mask: Tensor, gradient: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Remove the ⌈rate · active⌉ smallest active weights, then activate as many of the largest |gradient|.

    weight, mask, gradient: [M, ...], each member by itself; rates: [M]. What was just removed may return.
    Weights that are activated are 0. Of equals the first in a tensor goes first. A mask without zeros stays
    as it is. Returns weights and masks.
    """
    active = mask.flatten(1) > 0
    number = (rates.to(mask.device) * active.sum(1)).ceil()
    number = number.masked_fill(active.all(1), 0)
    size = weight.flatten(1).abs().masked_fill(~active, torch.inf)
    left = active & ~_lowest(size, number)
    missed = gradient.flatten(1).abs().neg().masked_fill(left, torch.inf)
    after = left | _lowest(missed, number)
    return weight * left.view_as(weight), after.view_as(mask).to(mask)


def _lowest(scores: Tensor, number: Tensor) -> Tensor:
    """Where the lowest scores of each row of [M, n] are; number: how many, [M]."""
    order = scores.sort(dim=1, stable=True).indices
    chosen = torch.arange(scores.shape[1], device=scores.device) < number[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen)


def share_active(masks: Tensors) -> Tensor:
    """The share of active weights in all masks of each member, [M]."""
    active = sum(mask.flatten(1).sum(1, dtype=torch.float64) for mask in masks.values())
    return torch.as_tensor(active / sum(mask[0].numel() for mask in masks.values()))
