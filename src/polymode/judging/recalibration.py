"""Corrections on top of any predictive, fitted on held-out points."""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from polymode.errors import InputError, require
from polymode.likelihoods import CategoricalPredictive, NumbersPredictive, Predictive

P = TypeVar("P", bound=Predictive)


@dataclass(frozen=True)
class TemperatureScaling:
    """p_c^{1/T} / Σ p_c^{1/T} of the mean probabilities; T minimises the held-out NLL (Guo et al. 2017)."""

    temperature: float

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"The temperature must be positive, got {self.temperature}.")

    @classmethod
    def fit(
        cls, predictive: CategoricalPredictive, labels: Tensor, ignore_index: int | None = None
    ) -> "TemperatureScaling":
        """Find the minimum over held-out labels [N] or tokens [N, T]; in 1/T the NLL is convex."""
        probabilities, labels = _predictive(predictive).labelled(labels, ignore_index)
        logs = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()

        def slope(inverse: float) -> float:
            # d NLL / d(1/T) = E[Σ_c q_c log p_c − log p_y], q the tempered probabilities.
            tempered = (logs * inverse).softmax(-1)
            expected = (tempered * logs).sum(-1)
            return (expected - logs.gather(-1, labels[:, None]).squeeze(-1)).mean().item()

        low, high = 1e-3, 1e3
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)
        return cls(1 / math.sqrt(low * high))

    def apply(self, predictive: CategoricalPredictive) -> CategoricalPredictive:
        """Temper the mean; how far the members disagree (the mutual information) is left as it was."""
        return _predictive(predictive).tempered(self.temperature)


def _predictive(given: P) -> P:
    require(
        isinstance(given, Predictive),
        f"Expected a predictive, as posterior.predict() gives it, got {type(given).__name__}.",
    )
    return given


def _conformal_quantile(scores: Tensor, miscoverage: float) -> float:
    """The ⌈(n+1)(1−α)⌉-th smallest score: a new one lies at or below it with probability ≥ 1 − α."""
    if not 0 < miscoverage < 1:
        raise InputError(f"miscoverage must lie strictly between 0 and 1, got {miscoverage}.")
    rank = math.ceil((len(scores) + 1) * (1 - miscoverage) - 1e-9)  # 10 · (1 − 0.7) is 3, not 4
    if rank > len(scores):
        needed = math.ceil(1 / miscoverage) - 1
        raise InputError(
            f"{len(scores)} calibration points are too few for miscoverage {miscoverage}: "
            f"at least {needed} are needed."
        )
    return scores.double().sort().values[rank - 1].item()


@dataclass(frozen=True)
class ConformalSets:
    """Sets of labels that hold the true one with probability ≥ 1 − miscoverage (split conformal).

    The score is 1 − p_y; a set holds every class with p_c ≥ 1 − threshold.
    """

    threshold: float

    @classmethod
    def fit(
        cls,
        predictive: CategoricalPredictive,
        labels: Tensor,
        miscoverage: float = 0.1,
        ignore_index: int | None = None,
    ) -> "ConformalSets":
        """Find the threshold on held-out labels [N] or tokens [N, T]."""
        probabilities, labels = _predictive(predictive).labelled(labels, ignore_index)
        of_label = probabilities.gather(-1, labels[:, None]).squeeze(-1)
        return cls(_conformal_quantile(1 - of_label, miscoverage))

    def sets(self, predictive: CategoricalPredictive) -> Tensor:
        """Membership [N, C] (or [N, T, C]), boolean."""
        return 1 - predictive.mean.double() <= self.threshold


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals μ ± factor·σ that hold the target with probability ≥ 1 − miscoverage (split conformal)."""

    factor: float

    @classmethod
    def fit(
        cls, predictive: NumbersPredictive, targets: Tensor, miscoverage: float = 0.1
    ) -> "ConformalIntervals":
        """Find the factor on held-out targets, in the shape of the means or without a last axis of one."""
        return cls(_conformal_quantile(_predictive(predictive).standardised_errors(targets), miscoverage))

    def intervals(self, predictive: NumbersPredictive) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, in the shape of the mean."""
        return _predictive(predictive).interval(self.factor)
