"""Counts: 0, 1, 2, … with a rate that the network gives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from polymode.errors import InputError, require
from polymode.likelihoods.base import first_place, match_trailing_one
from polymode.likelihoods.numbers import Law, Numbers, NumbersPredictive, mixture_quantiles
from polymode.likelihoods.predictive import Observations
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.columns import Column, by_key, to_samples
from polymode.trees import Tree

# Mean counts whose logarithm lies beyond this are remarked on. Outputs begin around 0, and Adam moves a
# number by its rate, 0.001, a step: half of the 10,000 steps of a first comparison go by on the way there.
FAR_LOG_RATE = 5.0

# Terms of a ranked probability score are squares of probabilities: of less than this they do not matter. A
# right predictive has some twelve deviations of them, so cells of 500 are a fortieth of one wide at most: the
# rule of midpoints is then wrong by less than 1/24 of 1/40², 3e-5 of the score.
NEGLIGIBLE, MOST_TERMS = 1e-9, 500


@dataclass(frozen=True)
class PoissonLaw(Law):
    """Poisson(λ) of every member; its mean is the rate."""

    @property
    def variance(self) -> Tensor:
        return self.mean.double()

    def cdf(self, at: Tensor) -> Tensor:
        return self.smooth_cdf(at.double().floor())

    def smooth_cdf(self, at: Tensor) -> Tensor:
        """P(Y ≤ k) = Γ(k + 1, λ) / k!, which has values between counts, too; 0 below them."""
        return torch.special.gammaincc((at + 1).clamp(min=1), self.mean.double()) * (at >= 0)

    def cdf_below(self, at: Tensor) -> Tensor:
        return self.cdf(at.double().ceil() - 1)

    def brackets(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Bernstein's bound: P(Y ≥ λ + x) ≤ exp(−x² / (2λ + 2x/3)), which is 1 − level at the upper end."""
        rate = self.mean.double()
        doubt = -torch.log1p(-levels).reshape(-1, *[1] * rate.ndim)
        above = rate + doubt / 3 + (doubt.square() / 9 + 2 * rate * doubt).sqrt()
        return torch.full_like(above, -1.0), above + 1

    @property
    def resolution(self) -> Tensor:
        return torch.full_like(self.mean[0], 0.5, dtype=torch.float64)

    def rounded(self, quantiles: Tensor) -> Tensor:
        return quantiles.round() + 0.0  # −0 becomes 0

    def sample(self, noise: torch.Generator) -> Tensor:
        return torch.poisson(self.mean.double().cpu(), generator=noise).to(self.mean.device)

    def taken(self, members: Tensor) -> Self:
        return type(self)(self.mean.flatten(1)[members])


class PoissonPredictive(NumbersPredictive):
    """A mixture of the members' Poisson laws: its quantiles are counts, and so are the ends of intervals."""

    def rescaled(self, shift: Tensor | float, scale: Tensor | float) -> Self:
        """Itself; counts have no other units."""
        is_same = torch.as_tensor(shift).eq(0).all() and torch.as_tensor(scale).eq(1).all()
        require(bool(is_same), f"Counts are never shifted or scaled, got {shift} and {scale}.")
        return self

    def scores(
        self, observations: Observations, *, target_scale: float = 1.0, bins: Bins = BINS
    ) -> dict[str, float]:
        """Those of numbers, and crps: Σ_k (P(Y ≤ k) − 1{y ≤ k})², in counts."""
        require(target_scale == 1, f"Counts are never scaled, got target_scale={target_scale}.")
        counts = replace(observations, targets=observations.targets.to(self.mean.dtype))
        crps = observations.more["crps"].mean().item()
        return super().scores(counts, target_scale=target_scale, bins=bins) | {"crps": crps}

    def interval(self, factor: float) -> tuple[Tensor, Tensor]:
        """The smallest and the largest count within μ ± factor · σ; the nearest one where there is none."""
        mean, margin = self.mean.double(), factor * self.std.double()
        slack = 1e-9 * (1 + mean)  # of rounding, for a count that is an end
        low, high = (mean - margin - slack).ceil().clamp(min=0), (mean + margin + slack).floor()
        low, high = (torch.where(low > high, mean.round(), end) for end in (low, high))
        return (low + 0.0).to(self.mean.dtype), high.to(self.mean.dtype)  # −0 becomes 0


@dataclass(frozen=True)
class Poisson(Numbers):
    """Counts with the rate λ = exp(output): log p(y) = y·output − λ − log y!.

    Targets are whole numbers of 0 or more, of any type; they are never standardised.
    """

    kind: ClassVar[str] = "poisson"
    columns: ClassVar[Mapping[str, Column]] = by_key(
        Column("rmse", "RMSE", "low", 4, "root mean square error of the mean count"),
        Column("log_density", "log mass", "high", 4, "mean log probability of the counts"),
        Column("crps", "CRPS", "low", 4, "ranked probability score: distance of P(Y ≤ k) from the count"),
        Column(
            "coverage90",
            "90 % coverage",
            None,
            3,
            "share of counts from the 5 % to the 95 % quantile, 90 % or more where these are right",
        ),
        Column("mean_std", "mean std", None, 4, "mean predictive standard deviation"),
        Column(
            "disagreement", "disagree", None, 4, "difference of two members' means over the counts' spread"
        ),
        *to_samples("in counts"),
    )
    units: ClassVar[str] = "counts"

    def means(self, outputs: Tree) -> Tensor:
        return self.read(outputs).exp()

    def law(self, outputs: Tree) -> PoissonLaw:
        return PoissonLaw(self.means(outputs))

    def predictive(
        self, mean: Tensor, noise_variance: Tensor, member_variance: Tensor, num_members: int
    ) -> PoissonPredictive:
        return PoissonPredictive(mean, noise_variance, member_variance, num_members)

    def function_values(self, outputs: Tree) -> Tensor:
        return self.read(outputs)  # log rates: ranks, which R-hat may go by, are those of the rates

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        log_rate = match_trailing_one(self.read(outputs), targets)
        # In 64 bits: the terms of a count of 100,000 are differences of numbers a million times as large.
        counts, outputs = targets.double(), log_rate.double()
        return (counts * outputs - outputs.exp() - torch.lgamma(counts + 1)).to(log_rate.dtype)

    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        if targets.is_complex() or targets.dtype == torch.bool:
            raise InputError(f"Counts must be numbers, got {targets.dtype}: use targets.long().")
        wrong = ~((targets >= 0) & (targets == targets.floor()) & targets.isfinite())
        if bool(wrong.any()):
            raise InputError(
                f"Counts must be whole numbers of 0 or more, got {targets[wrong][0].item():g}, "
                f"{first_place(wrong)} ({int(wrong.sum())} in all). For other numbers use 'gaussian' or "
                "'student_t'."
            )

    def remark_on(self, targets: Tensor) -> str | None:
        means = targets.double().reshape(len(targets), -1).mean(0)
        far = means.log().abs() > FAR_LOG_RATE
        if not bool(far.any()):
            return None
        mean = means[far][0].item()
        shown = f"{math.log(mean):.3g}" if mean > 0 else "−∞"
        return (
            f"The counts have a mean of {mean:.4g}, a log rate of {shown}; networks begin around 0 and learn "
            "well up to 5 on either side. Train longer or at a higher rate; large counts may be regressed as "
            "numbers ('gaussian', 'student_t')."
        )

    def found(self, outputs: Tree, weights: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Beside what numbers have "crps", the ranked probability score of every output."""
        law, share = self.law(outputs), weights.double() / weights.double().sum()
        crps = ranked_probability_scores(law, share, targets.double().reshape(law.mean.shape[1:]))
        return super().found(outputs, weights, targets) | {"crps": crps.flatten()}


def ranked_probability_scores(law: PoissonLaw, weights: Tensor, counts: Tensor) -> Tensor:
    """Σ_k (P(Y ≤ k) − 1{y ≤ k})² of a mixture, for counts y [b, ...]; weights: [M], normalised.

    On either side of the count terms are added up to where they do not matter; where there are more than
    ``MOST_TERMS``, in so many cells of equal width, each by the value in its middle.
    """
    levels = torch.tensor([NEGLIGIBLE, 1 - NEGLIGIBLE], dtype=torch.float64, device=counts.device)
    low, high = mixture_quantiles(law, weights, levels)
    total = torch.zeros_like(counts)
    for number, direction in ((counts - low, -1), (high - counts + 1, 1)):
        width = (number / MOST_TERMS).ceil().clamp(min=1)
        for cell in range(int((number / width).nan_to_num(0).ceil().max())):
            middle = counts + direction * (cell + 0.5) * width - 0.5
            cdf = torch.tensordot(weights, law.smooth_cdf(middle), 1)
            total += width * (cdf if direction < 0 else 1 - cdf).square()
    return torch.where(high.isfinite(), total, torch.nan)
