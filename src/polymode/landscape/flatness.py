"""How much the loss rises around trained weights (von Oswald et al. 2021, "Flatness")."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from polymode.data import arrays_of, as_data
from polymode.errors import InputError, require, require_whole
from polymode.landscape.networks import each_network
from polymode.landscape.survey import judged
from polymode.networks.members import Members, Tensors, stack
from polymode.posteriors import Posterior
from polymode.posteriors.base import BLOCK_BYTES
from polymode.posteriors.particles import BLOCK_MEMBERS
from polymode.seeds import derive_generator

SCALES = (0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Flatness:
    """δL of M networks at S scales, from D draws each.

    loss: [M], L(w) of the networks as they are. increases: [S, M, D], L(w + z) − L(w) of each draw.
    """

    scales: tuple[float, ...]
    loss: Tensor
    increases: Tensor

    @property
    def mean(self) -> Tensor:
        """δL at each scale, [S]: the mean over draws and networks."""
        return self.increases.mean((1, 2))

    @property
    def standard_error(self) -> Tensor:
        """Of ``mean``, [S]: what other draws would change, for these networks."""
        if self.increases.shape[2] < 2:
            return torch.full_like(self.mean, math.nan)
        of_network = self.increases.var(2) / self.increases.shape[2]
        return of_network.sum(1).sqrt() / self.increases.shape[1]

    def rows(self) -> list[dict[str, float]]:
        """One row a scale."""
        columns = zip(self.scales, self.mean.tolist(), self.standard_error.tolist(), strict=True)
        return [{"scale": s, "increase": mean, "increase_se": error} for s, mean, error in columns]


def flatness(
    posterior: Posterior,
    data: Any,
    *,
    scales: Sequence[float] = SCALES,
    num_draws: int = 10,
    num_members: int | None = None,
    seed: int = 0,
) -> Flatness:
    """δL = E_z[L(w + z) − L(w)] with z_i ~ N(0, σ_z² w_i²) for every parameter that the networks hold.

    L is the mean of −log p(y | x, w) over the observations of ``data``, without sample weights. Every network
    of the posterior (``num_members`` of them, as in ``predict``) is judged by itself; collapse an ensemble in
    weight space first. Frozen parameters that all networks have in common and all buffers stay as they are:
    BatchNorm runs in evaluation mode on its running statistics, which are those of w and not of w + z.

    scales: the values of σ_z. seed: fixes the draws, which are the same for all scales and networks, and for
    other networks of the same names and shapes: differences between them have less noise than each has.
    """
    scales = tuple(scales)
    for scale in scales:
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
            raise InputError(f"scales must be numbers of at least 0, got {scale!r}.")
    require(len(scales) > 0, "scales must hold at least one number.")
    require_whole("num_draws", num_draws)
    inputs, targets = arrays_of(as_data(data))
    trained = {name for name, _ in posterior.network.module.named_parameters()}
    # w + 0 is w: nothing has to run to know what a scale of zero adds.
    pairs = list(product((i for i, scale in enumerate(scales) if scale), range(num_draws)))
    losses, increases = [], []
    for weights in each_network(posterior, num_members):
        moved = {name: tensor for name, tensor in weights.items() if name in trained}
        fixed = {name: tensor[None] for name, tensor in weights.items() if name not in trained}
        alone = Members({n: t[None] for n, t in moved.items()}, fixed)
        [loss] = judged(posterior.network, alone, inputs, targets).loss
        increase = loss.new_zeros(len(scales), num_draws)
        for some in _in_blocks(pairs, sum(t.numel() * t.element_size() for t in moved.values())):
            drawn = [_perturbed(moved, scales[index], seed, draw) for index, draw in some]
            block = replace(stack(drawn), shared=fixed)
            losses_of_draws = judged(posterior.network, block, inputs, targets).loss
            for (index, draw), value in zip(some, losses_of_draws, strict=True):
                increase[index, draw] = value - loss
        losses.append(loss)
        increases.append(increase)
    return Flatness(scales, torch.stack(losses), torch.stack(increases, 1))


def _in_blocks(pairs: list[tuple[int, int]], num_bytes: int) -> Iterator[list[tuple[int, int]]]:
    number = max(1, min(BLOCK_MEMBERS, BLOCK_BYTES // max(1, num_bytes)))
    for start in range(0, len(pairs), number):
        yield pairs[start : start + number]


def _perturbed(weights: Tensors, scale: float, seed: int, draw: int) -> Tensors:
    """The weights w (1 + σ_z ε); ε follows from the seed, the number of the draw and the name alone."""
    perturbed = {}
    for name, weight in weights.items():
        generator = derive_generator(seed, "flatness", draw, name)
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        perturbed[name] = weight * (1 + scale * noise.to(weight.device))
    return perturbed
