"""Corrections on top of any predictive, fitted on held-out points."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.predictive import CategoricalPredictive, GaussianPredictive


@dataclass(frozen=True)
class TemperatureScaling:
    """p_c^{1/T} / Σ p_c^{1/T} of the mean probabilities; T minimises the held-out NLL (Guo et al. 2017)."""

    temperature: float

    @classmethod
    def fit(cls, predictive: CategoricalPredictive, labels: Tensor) -> "TemperatureScaling":
        """Find the minimum over log T; the NLL is convex in 1/T, so it is the only one."""
        logs = _safe_log(predictive.mean.double())

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
        """Temper the mean; how the members differ (``expected_entropy``) is left as it was."""
        tempered = (_safe_log(predictive.mean) / self.temperature).softmax(-1)
        return replace(predictive, mean=tempered)


def _safe_log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def _conformal_quantile(scores: Tensor, miscoverage: float) -> float:
    """The ⌈(n+1)(1−α)⌉-th smallest score: a new one lies at or below it with probability ≥ 1 − α."""
    if not 0 < miscoverage < 1:
        raise InputError(f"miscoverage must lie strictly between 0 and 1, got {miscoverage}.")
    rank = math.ceil((len(scores) + 1) * (1 - miscoverage))
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
        cls, predictive: CategoricalPredictive, labels: Tensor, miscoverage: float = 0.1
    ) -> "ConformalSets":
        of_label = predictive.mean.double().gather(-1, labels[:, None]).squeeze(-1)
        return cls(_conformal_quantile(1 - of_label, miscoverage))

    def sets(self, predictive: CategoricalPredictive) -> Tensor:
        """Membership [N, C], boolean."""
        return 1 - predictive.mean.double() <= self.threshold


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals μ ± factor·σ that hold the target with probability ≥ 1 − miscoverage (split conformal)."""

    factor: float

    @classmethod
    def fit(
        cls, predictive: GaussianPredictive, targets: Tensor, miscoverage: float = 0.1
    ) -> "ConformalIntervals":
        mean, std = (t.reshape(targets.shape).double() for t in (predictive.mean, predictive.std))
        return cls(_conformal_quantile(((targets - mean) / std).abs().flatten(), miscoverage))

    def intervals(self, predictive: GaussianPredictive) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, in the shape of the mean."""
        margin = self.factor * predictive.std
        return predictive.mean - margin, predictive.mean + margin
