"""Predictives: what members say together, accumulated in a stream.

An accumulator sees blocks of member outputs [m, b, ...] with their weights, for the rows they belong
to, and never keeps them: memory grows with points × classes, not with draws.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.special import ndtr

from polymode.errors import InputError


def entropy(probabilities: Tensor) -> Tensor:
    """−Σ_c p_c log p_c over the last axis, with 0 log 0 = 0, in nats.

    Added up in 64 bits: mutual information is a small difference of two such sums.
    """
    return torch.special.entr(probabilities).sum(-1, dtype=torch.float64).to(probabilities.dtype)


def softmax_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis and its entropy.

    The class axis is moved to the front for the arithmetic: over a short last axis the CPU kernels
    take about ten times as long.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # probabilities of half precision do not sum to one
    log_p = logits.movedim(-1, 0).contiguous().log_softmax(0)
    p = log_p.exp()
    # A class that is ruled out (log p = −∞) contributes 0 · log 0 = 0.
    plogp = p * log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return p.movedim(0, -1), -plogp.sum(0, dtype=torch.float64).to(p.dtype)


def _described(predictive: object, shape: Sequence[int], *facts: str, **values: Tensor) -> str:
    """A predictive in one line: what it is about, and means over all points."""
    each = "" if len(shape) == 1 else f" of {list(shape[1:])}"
    means = [f"mean {name} {value.double().mean().item():.3g}" for name, value in values.items()]
    return f"{type(predictive).__name__}({', '.join([f'{shape[0]} points{each}', *facts, *means])})"


@dataclass(frozen=True)
class CategoricalPredictive:
    """Mean class probabilities and how the members' opinions spread.

    mean: [N, ..., C], the weighted mean of the members' probabilities.
    expected_entropy: [N, ...], the weighted mean of the members' entropies.
    """

    mean: Tensor
    expected_entropy: Tensor
    num_members: int

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty: the entropy of the mean."""
        return entropy(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        """Disagreement of the members: entropy of the mean minus mean of the entropies, ≥ 0."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    def __repr__(self) -> str:
        return _described(
            self,
            self.mean.shape[:-1],
            f"{self.mean.shape[-1]} classes",
            f"{self.num_members} members",
            confidence=self.confidence,
            entropy=self.entropy,
            mutual_information=self.mutual_information,
        )

    @property
    def labels(self) -> Tensor:
        return self.mean.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        return self.mean.amax(-1)


@dataclass(frozen=True)
class BernoulliPredictive:
    """Mean probabilities of independent yes/no outputs: mean and expected_entropy [N, ...]."""

    mean: Tensor
    expected_entropy: Tensor
    num_members: int

    @property
    def entropy(self) -> Tensor:
        return torch.special.entr(self.mean) + torch.special.entr(1 - self.mean)

    @property
    def mutual_information(self) -> Tensor:
        return (self.entropy - self.expected_entropy).clamp(min=0)

    def __repr__(self) -> str:
        return _described(
            self,
            self.mean.shape,
            f"{self.num_members} members",
            probability=self.mean,
            entropy=self.entropy,
            mutual_information=self.mutual_information,
        )

    @property
    def labels(self) -> Tensor:
        return (self.mean > 0.5).to(torch.int64)


@dataclass(frozen=True)
class GaussianPredictive:
    """A mixture of the members' Gaussians, by its moments and, when asked for, its quantiles.

    Shapes are those of the network's means: a network with one output gives [N, 1], so compare with
    targets [N] after ``squeeze(-1)``. (The functions of ``polymode.metrics`` do this by themselves.)

    mean, noise_variance (mean of the members' σ²), member_variance (variance of the members' means):
    [N, ...]; quantiles: level -> [N, ...].
    """

    mean: Tensor
    noise_variance: Tensor
    member_variance: Tensor
    num_members: int
    quantiles: dict[float, Tensor] | None = None

    def __repr__(self) -> str:
        levels = (
            [f"quantiles {', '.join(f'{level:g}' for level in self.quantiles)}"] if self.quantiles else []
        )
        return _described(
            self,
            self.mean.shape,
            f"{self.num_members} members",
            *levels,
            prediction=self.mean,
            std=self.std,
            member_std=self.member_variance.sqrt(),
        )

    @property
    def variance(self) -> Tensor:
        """Law of total variance: mean of the variances plus variance of the means."""
        return self.noise_variance + self.member_variance

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    def rescaled(self, shift: Tensor | float, scale: Tensor | float) -> "GaussianPredictive":
        """The predictive of ``shift + scale · y`` for a positive scale, e.g. in the target's own units."""
        quantiles = self.quantiles and {q: shift + scale * v for q, v in self.quantiles.items()}
        return replace(
            self,
            mean=shift + scale * self.mean,
            noise_variance=scale**2 * self.noise_variance,
            member_variance=scale**2 * self.member_variance,
            quantiles=quantiles,
        )


Predictive = CategoricalPredictive | BernoulliPredictive | GaussianPredictive


def labelled(probabilities: Tensor, labels: Tensor, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities [N, C] and labels [N] of all observations, from [..., C] and [...].

    Observations whose label is ``ignore_index`` are left out; any other label that is not one of the
    C classes is an error.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"Labels must be a tensor of integers, got {kind}.")
    if probabilities.shape[:-1] != labels.shape:
        raise InputError(
            f"Probabilities {list(probabilities.shape)} need labels {list(probabilities.shape[:-1])}, "
            f"got {list(labels.shape)}."
        )
    flat, of_each = probabilities.flatten(0, -2), labels.flatten().long().to(probabilities.device)
    if ignore_index is not None:
        kept = of_each != ignore_index
        flat, of_each = flat[kept], of_each[kept]
    num_classes = probabilities.shape[-1]
    if not len(of_each):
        raise InputError("There are no labelled points.")
    low, high = int(of_each.min()), int(of_each.max())
    if low < 0 or high >= num_classes:
        raise InputError(
            f"Labels go from {low} to {high}; with {num_classes} classes they must lie between 0 and "
            f"{num_classes - 1}."
        )
    return flat, of_each


class Accumulator(ABC):
    """Collects blocks of member outputs into a predictive.

    ``update(outputs, weights, rows)`` takes outputs [m, b, ...] of the points ``rows`` and weights
    [m]; every member must see every row exactly once.
    """

    def __init__(self, num_points: int) -> None:
        self.num_points = num_points
        self.sums: dict[str, Tensor] = {}
        self.total = torch.zeros(num_points, dtype=torch.float64)
        self.num_members = 0
        self.dtype = torch.get_default_dtype()

    def add(self, name: str, weights: Tensor, values: Tensor, rows: slice) -> None:
        """Add Σ_m w_m values_m (in float64) to the running sum of the rows."""
        self.dtype = values.dtype
        block = torch.tensordot(weights.double(), values.double(), 1)
        if name not in self.sums:
            self.sums[name] = block.new_zeros(self.num_points, *block.shape[1:])
        self.sums[name][rows] += block

    def count(self, weights: Tensor, rows: slice) -> None:
        self.total[rows] += weights.double().sum().cpu()
        self.num_members += len(weights) if rows.start == 0 else 0

    def mean(self, name: str) -> Tensor:
        sums = self.sums[name]
        total = self.total.to(sums.device).reshape(-1, *[1] * (sums.ndim - 1))
        return (sums / total).to(self.dtype)

    @abstractmethod
    def update(self, outputs: object, weights: Tensor, rows: slice) -> None: ...

    @abstractmethod
    def result(self) -> Predictive: ...


def mixture_quantiles(means: Tensor, stds: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """Invert the distribution function F(t) = Σ_m w_m Φ((t − μ_m)/σ_m) of a mixture by bisection.

    means, stds: [m, ...]; weights: [m], normalised; levels: [q] in (0, 1). Returns [q, ...].
    The bracket is that of the components' own quantiles; it is halved until it is 1e-10 of the narrowest
    component, or float64 is exhausted.
    """
    if not bool(((levels > 0) & (levels < 1)).all()):
        raise InputError(f"Quantile levels must lie strictly between 0 and 1, got {levels.tolist()}.")
    means, stds, weights = means.double(), stds.double(), weights.double()
    z = torch.special.ndtri(levels.double()).reshape(-1, *[1] * means.ndim)
    components = means + z * stds
    low, high = components.amin(1), components.amax(1)
    level = levels.double().reshape(-1, *[1] * (means.ndim - 1))
    narrowest, epsilon = stds.amin(0), torch.finfo(torch.float64).eps
    for _ in range(200):
        middle = 0.5 * (low + high)
        cdf = torch.stack([_mixture_cdf(t, means, stds, weights) for t in middle])
        below = cdf < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        if bool((high - low <= 1e-10 * narrowest + 4 * epsilon * middle.abs()).all()):
            break
    return 0.5 * (low + high)


def _mixture_cdf(at: Tensor, means: Tensor, stds: Tensor, weights: Tensor) -> Tensor:
    return torch.tensordot(weights, ndtr((at - means) / stds), 1)


def gaussian_log_prob(targets: Tensor, means: Tensor, stds: Tensor | float) -> Tensor:
    """Log N(y; μ, σ²), element by element."""
    constant = 0.5 * math.log(2 * math.pi)
    if not isinstance(stds, Tensor):  # fewer operations, which a small network feels
        return (targets - means).square() * (-0.5 / stds**2) - (math.log(stds) + constant)
    return -0.5 * ((targets - means) / stds).square() - stds.log() - constant
