"""Numbers: what all likelihoods of them share, written once for any law of a member."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from polymode import metrics
from polymode.errors import InputError, require, shortened
from polymode.likelihoods.base import Likelihood, Seen, check_same_shape, match_trailing_one
from polymode.likelihoods.calibration import moved_levels
from polymode.likelihoods.predictive import (
    Accumulator,
    Observations,
    Predictive,
    columns_of_outputs,
    described,
    error_of_mean,
)
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.columns import Column, by_key, to_samples
from polymode.metrics.curves import coverage_curve, histogram
from polymode.metrics.diversity import label_disagreement
from polymode.trees import Tree, leaves, map_tree

CACHED = 2**17  # outputs of all members whose quantiles are found at once: 1 MB in double precision
MOST_SCORES = 1000  # of held-out points that a calibration keeps
HALVED_EVERY = 4  # steps of an inversion: no function takes more than so many times those of halving alone


@dataclass(frozen=True)
class Law(ABC):
    """The distributions of all members at some points, of one family: its tensors are [M, b, ...]."""

    mean: Tensor

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Variances, in 64 bits."""

    @abstractmethod
    def cdf(self, at: Tensor) -> Tensor:
        """P(Y ≤ t) of every member, [M, b, ...], at t [b, ...]."""

    @abstractmethod
    def brackets(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers [q, M, b, ...] at or below, and at or above, the members' own quantiles."""

    @abstractmethod
    def sample(self, noise: torch.Generator) -> Tensor:
        """One draw of each member at each point, in 64 bits."""

    @abstractmethod
    def taken(self, members: Tensor) -> Self:
        """The law of some members [S], with outputs side by side: [S, b]."""

    def cdf_below(self, at: Tensor) -> Tensor:
        """P(Y < t); another number than P(Y ≤ t) where numbers have a probability of their own."""
        return self.cdf(at)

    @property
    def resolution(self) -> Tensor:
        """How close a quantile has to be bracketed, [b, ...]."""
        return 1e-10 * self.variance.sqrt().amin(0)

    def rounded(self, quantiles: Tensor) -> Tensor:
        """Quantiles that are known up to the resolution, as the numbers that they are."""
        return quantiles


def mixture_cdf(law: Law, weights: Tensor, at: Tensor) -> Tensor:
    """F(t) = Σ_m w_m F_m(t) at t [b, ...]; weights: [M], normalised."""
    return torch.tensordot(weights, law.cdf(at), 1)


def mixture_quantiles(law: Law, weights: Tensor, levels: Tensor) -> Tensor:
    """Invert the distribution function of a mixture: the smallest t with F(t) ≥ level.

    weights: [M], normalised; levels: [q] in (0, 1). Returns [q, b, ...]. The bracket is that of the members'
    own quantiles; it is narrowed until it is as narrow as the law's resolution, or float64 is exhausted: by
    inverse quadratic interpolation where that can be trusted (Chandrupatla 1997), by halving elsewhere.
    """
    if not bool(((levels > 0) & (levels < 1)).all()):
        raise InputError(f"Quantile levels must lie strictly between 0 and 1, got {levels.tolist()}.")
    weights, levels = weights.double(), levels.double()
    below, above = law.brackets(levels)
    level = levels.reshape(-1, *[1] * (law.mean.ndim - 1))
    resolution, epsilon = law.resolution, torch.finfo(torch.float64).eps

    def excess(at: Tensor) -> Tensor:
        return torch.stack([mixture_cdf(law, weights, t) for t in at]) - level

    # The last point, the end of the bracket beyond the quantile from there, and the point before.
    last, other = below.amin(1), above.amax(1)
    at_last, at_other = (end - level.expand_as(last) for end in (0.0, 1.0))  # near enough to begin with
    share = torch.full_like(last, 0.5)  # of the way to the other end that the next point lies at
    for step in range(200):
        width = (other - last).abs()
        if bool((width <= resolution + 4 * epsilon * last.abs()).all()):
            break
        point = last + share * (other - last)
        found = excess(point)
        stays = (found < 0) == (at_last < 0)
        before, at_before = torch.where(stays, last, other), torch.where(stays, at_last, at_other)
        other, at_other = torch.where(stays, other, last), torch.where(stays, at_other, at_last)
        last, at_last = point, found
        xi, phi = (last - other) / (before - other), (at_last - at_other) / (at_before - at_other)
        share = at_last / (at_other - at_last) * at_before / (at_other - at_before) + (before - last) / (
            other - last
        ) * at_last / (at_before - at_last) * at_other / (at_before - at_other)
        trusted = (phi.square() < xi) & ((1 - phi).square() < 1 - xi) & (step % HALVED_EVERY > 0)
        # A point next to the quantile is put beyond it by less than what counts, so that the bracket closes.
        least = (0.4 * (resolution + 4 * epsilon * last.abs()) / (other - last).abs()).clamp(max=0.5)
        share = torch.where(trusted, torch.maximum(torch.minimum(share, 1 - least), least), 0.5)
    return law.rounded(0.5 * (last + other))


@dataclass(frozen=True)
class Numbers(Likelihood):
    """Numbers of any law, with independent dimensions: their log densities add up to one observation's.

    A member's law says all that is needed: moments, distribution function and samples. conformal: sorted
    scores |2 F(y) − 1| of held-out points, by which calibration moves the quantiles.
    """

    conformal: tuple[float, ...] = field(default=(), kw_only=True)
    reads: ClassVar = "numbers"
    columns: ClassVar[Mapping[str, Column]] = by_key(
        Column("rmse", "RMSE", "low", 4, "root mean square error of the mean, in the target's units"),
        Column("log_density", "log density", "high", 4, "mean log density of the targets, in their units"),
        Column("coverage90", "90 % coverage", 0.9, 3, "share of targets inside the central 90 % interval"),
        Column("mean_std", "mean std", None, 4, "mean predictive standard deviation"),
        Column(
            "disagreement", "disagree", None, 4, "difference of two members' means over the targets' spread"
        ),
        *to_samples("standardised units"),
    )
    quality: ClassVar[str] = "log_density"
    reference_kind: ClassVar = "samples"
    levels: ClassVar[tuple[float, ...]] = (0.025, 0.05, 0.95, 0.975)
    units: ClassVar[str] = "standardised units"
    difference_name: ClassVar[str] = "difference of means / spread of targets"
    squared_errors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "conformal", tuple(self.conformal))  # a file holds a list
        scores = self.conformal
        ordered = all(isinstance(s, int | float) for s in scores) and list(scores) == sorted(scores)
        if not ordered or (scores and not 0 <= scores[0] <= scores[-1] <= 1):
            raise InputError(
                f"conformal of {self.kind!r} must be sorted scores between 0 and 1, got "
                f"{shortened(repr(list(scores)))}."
            )

    @abstractmethod
    def law(self, outputs: Tree) -> Law:
        """What outputs [M, b, ...] say."""

    @abstractmethod
    def means(self, outputs: Tree) -> Tensor:
        """Means of one or many members, in the shape of the outputs that give them."""

    @abstractmethod
    def predictive(
        self, mean: Tensor, noise_variance: Tensor, member_variance: Tensor, num_members: int
    ) -> "NumbersPredictive":
        """The predictive with these moments."""

    def _means_like(self, outputs: Tree, targets: Tensor) -> Tensor:
        return match_trailing_one(self.means(outputs), targets)

    def errors(self, outputs: Tree, targets: Tensor) -> Tensor:
        squares = (self._means_like(outputs, targets) - targets).square()
        return squares.flatten(1).mean(1) if squares.ndim > 1 else squares

    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        check_same_shape(type(self).__name__, self._means_like(outputs, targets), targets)

    def accumulator(self, num_points: int) -> Accumulator:
        return _NumbersAccumulator(self, num_points)

    # --- judging ----------------------------------------------------------------------------

    def found(self, outputs: Tree, weights: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Beside "log_prob" "below" and "up_to": P(Y < y) and P(Y ≤ y) of the mixture, for every output."""
        law, share = self.law(outputs), weights.double() / weights.double().sum()
        at = targets.reshape(law.mean.shape[1:])
        integrals = {
            "below": torch.tensordot(share, law.cdf_below(at), 1).flatten(),
            "up_to": mixture_cdf(law, share, at).flatten(),
        }
        return super().found(outputs, weights, targets) | integrals

    def answers(self, outputs: Tree) -> Tensor:
        return self.means(outputs)

    def difference(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Root mean square differences of means over the targets' spread."""
        spread = targets.double().std().item() if targets.numel() > 1 else 0.0
        if not spread:
            return label_disagreement(answers)
        return torch.stack([(answers - row).double().square().mean(-1).sqrt() for row in answers]) / spread

    def quantiles(self, outputs: Tree, weights: Tensor, levels: Sequence[float]) -> Tensor:
        share = weights.double() / weights.double().sum()
        moved = moved_levels(levels, self.conformal) if self.conformal else list(levels)
        first = next(leaves(outputs))
        at = torch.tensor(moved, dtype=torch.float64, device=first.device)
        count = first.shape[1]
        # The inversion goes over its numbers many times: a processor's cache holds those of some points.
        some = count if first.is_cuda else max(1, CACHED * count // max(1, first.numel()))
        found = [
            mixture_quantiles(
                self.law(map_tree(lambda x, at=start: x[:, at : at + some], outputs)), share, at
            )
            for start in range(0, count, some)
        ]
        return torch.cat(found, 1)

    def conformal_scores(self, seen: Sequence[Seen]) -> tuple[float, ...]:
        """|2 F(y) − 1| of all targets, sorted: how far from the middle of its law each lies.

        Of many, evenly spread ranks are kept: what is lost is less than a rank in MOST_SCORES.
        """
        found = []
        for outputs, weights, targets in seen:
            law, share = self.law(outputs), weights.double() / weights.double().sum()
            cdf = mixture_cdf(law, share, targets.reshape(law.mean.shape[1:]))
            found.append((2 * cdf - 1).abs().flatten().cpu())
        scores = torch.cat(found).clamp(0, 1).sort().values
        if len(scores) > MOST_SCORES:
            scores = scores[
                torch.linspace(0, len(scores) - 1, MOST_SCORES, dtype=torch.float64).ceil().long()
            ]
        return tuple(scores.tolist())

    def samples(
        self, outputs: Tree, weights: Tensor, num_samples: int, noise: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Members take part in proportion to their weights, spread evenly, each with noise of its own."""
        law = self.law(outputs)
        if law.mean[0, 0].numel() != 1:
            raise InputError(f"A reference is about one output, the network has {law.mean[0, 0].numel()}.")
        share = (weights.double() / weights.double().sum()).cumsum(0).cpu()
        places = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
        chosen = torch.searchsorted(share, places).clamp(max=len(share) - 1).to(law.mean.device)
        return law.taken(chosen).sample(noise), chosen


class _NumbersAccumulator(Accumulator):
    def __init__(self, likelihood: Numbers, num_points: int) -> None:
        super().__init__(num_points)
        self.likelihood = likelihood
        self.centre: Tensor | None = None
        self.begun: set[int] = set()  # where the rows begin that a member has seen

    def update(self, outputs: Tree, weights: Tensor, rows: slice) -> None:
        law = self.likelihood.law(outputs)
        mean = law.mean
        if self.centre is None:
            self.centre = mean.new_zeros(self.num_points, *mean.shape[2:], dtype=torch.float64)
        if rows.start not in self.begun:
            self.begun.add(rows.start)
            self.centre[rows] = mean[0].double()
        # Squares are taken around the first member: sums of raw squares would cancel.
        deviation = mean.double() - self.centre[rows]
        self.add("deviation", weights, deviation, rows)
        self.add("square", weights, deviation.square(), rows)
        self.add("noise", weights, law.variance, rows)
        self.count(weights, rows)
        self.dtype = mean.dtype

    def result(self) -> "NumbersPredictive":
        dtype, self.dtype = self.dtype, torch.float64
        deviation = self.mean("deviation")
        spread = (self.mean("square") - deviation.square()).clamp(min=0)
        assert self.centre is not None
        return self.likelihood.predictive(
            (self.centre + deviation).to(dtype),
            self.mean("noise").to(dtype),
            spread.to(dtype),
            self.num_members,
        )


@dataclass(frozen=True)
class NumbersPredictive(Predictive):
    """A mixture of the members' laws, by its moments and, when asked for, its quantiles.

    Shapes are those of the network's means: a network with one output gives [N, 1], so compare with
    targets [N] after ``squeeze(-1)``. (The functions of ``polymode.metrics`` do this by themselves.)

    mean, noise_variance (mean of the members' variances), member_variance (variance of the members' means):
    [N, ...]; quantiles: level -> [N, ...].
    """

    noise_variance: Tensor
    member_variance: Tensor
    num_members: int
    quantiles: dict[float, Tensor] | None = None

    def __repr__(self) -> str:
        levels = (
            [f"quantiles {', '.join(f'{level:g}' for level in self.quantiles)}"] if self.quantiles else []
        )
        return described(
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

    def with_quantiles(self, quantiles: Mapping[float, Tensor]) -> Self:
        return replace(self, quantiles=dict(quantiles))

    def rescaled(self, shift: Tensor | float, scale: Tensor | float) -> Self:
        """The predictive of ``shift + scale · y`` for a positive scale, e.g. in the target's own units."""
        # In 64 bits: targets such as years or amounts need more digits than a network computes with.
        quantiles = self.quantiles and {q: shift + scale * v.double() for q, v in self.quantiles.items()}
        return replace(
            self,
            mean=shift + scale * self.mean.double(),
            noise_variance=scale**2 * self.noise_variance.double(),
            member_variance=scale**2 * self.member_variance.double(),
            quantiles=quantiles,
        )

    def scores(
        self, observations: Observations, *, target_scale: float = 1.0, bins: Bins = BINS
    ) -> dict[str, float]:
        assert self.quantiles is not None
        q = {level: value.cpu() for level, value in self.quantiles.items()}
        targets = observations.targets.cpu()
        log_density = observations.log_prob.double().mean().item()
        return {
            "rmse": target_scale * metrics.rmse(self.mean.cpu(), targets),
            # The density of scale · y is the density of y divided by the scale, once for each output.
            "log_density": log_density - math.log(target_scale) * targets[0].numel(),
            "coverage90": metrics.interval_coverage(q[0.05], q[0.95], targets),
            "coverage95": metrics.interval_coverage(q[0.025], q[0.975], targets),
            "mean_std": target_scale * self.std.double().mean().item(),
        }

    def errors(self, observations: Observations, *, target_scale: float = 1.0) -> dict[str, float]:
        assert self.quantiles is not None
        q = {level: value.cpu().flatten() for level, value in self.quantiles.items()}
        targets = observations.targets.cpu().flatten()
        squares = (self.mean.cpu().flatten().double() - targets.double()).square()
        rmse = squares.mean().sqrt().item()
        return {
            # The error of a square root is that of what is under it, over twice the root.
            "rmse": target_scale * error_of_mean(squares) / (2 * rmse) if rmse else 0.0,
            "log_density": error_of_mean(observations.log_prob),
            "coverage90": error_of_mean((q[0.05] <= targets) & (targets <= q[0.95])),
            "coverage95": error_of_mean((q[0.025] <= targets) & (targets <= q[0.975])),
            "mean_std": target_scale * error_of_mean(self.std.cpu()),
        }

    def curves(
        self, observations: Observations, *, num_bins: int = BINS.number, foreign: Predictive | None = None
    ) -> dict[str, Any]:
        return {
            "std": histogram([self.std.flatten()], self.std.max().item()),
            "coverage": coverage_curve(observations.more["below"], observations.more["up_to"]),
        }

    def table(
        self, *, classes: Sequence[str] = (), shift: float = 0.0, scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        scaled = self.rescaled(shift, scale)
        columns = {"mean": scaled.mean, "std": scaled.std, "member_std": scaled.member_variance.sqrt()}
        columns |= {f"q{level:g}": values for level, values in (scaled.quantiles or {}).items()}
        return columns_of_outputs(columns)

    def tensors(self, target_scale: float = 1.0) -> dict[str, Tensor]:
        # Standardised, as the network saw them; target_scale and the manifest's shift undo it.
        return {"mean": self.mean, "std": self.std, "target_scale": torch.tensor(target_scale)}

    def standardised_errors(self, targets: Tensor) -> Tensor:
        require(
            targets.numel() == self.mean.numel(),
            f"Targets {list(targets.shape)} do not fit means {list(self.mean.shape)}.",
        )
        targets = targets.to(self.mean.device)
        mean, std = (t.reshape(targets.shape).double() for t in (self.mean, self.std))
        return ((targets - mean) / std).abs().flatten()

    def interval(self, factor: float) -> tuple[Tensor, Tensor]:
        margin = factor * self.std
        return self.mean - margin, self.mean + margin
