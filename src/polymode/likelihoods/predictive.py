"""Predictives: what members say together, accumulated in a stream, and how it is judged, drawn and written.

An accumulator sees blocks of member outputs [m, b, ...] with their weights, for the rows they belong
to, and never keeps them: memory grows with points × classes, not with draws.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.ood import Score


@dataclass(frozen=True)
class Observations:
    """Test targets, and what the mixture of all members says of each.

    observed: which of them count. log_prob: log Σ_m w_m p(y | x, θ_m), [N] or [N, T]. more: what a likelihood
    adds for its scores and curves, by name.
    """

    targets: Tensor
    observed: Tensor
    log_prob: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Predictive(ABC):
    """What members say together; the mean of each point comes first in all of them."""

    mean: Tensor

    @abstractmethod
    def scores(
        self, observations: Observations, *, target_scale: float = 1.0, bins: Bins = BINS
    ) -> dict[str, float]:
        """Scores by name. target_scale: what targets were divided by; bins: of confidence."""

    def errors(self, observations: Observations, *, target_scale: float = 1.0) -> dict[str, float]:
        """Standard errors of scores that are means over points: how far other points would move them."""
        return {}

    @abstractmethod
    def table(
        self, *, classes: Sequence[str] = (), shift: float = 0.0, scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        """What is said of each point, a column each: with the classes' names, of ``shift + scale · y``."""

    @abstractmethod
    def tensors(self, target_scale: float = 1.0) -> dict[str, Tensor]:
        """What is kept of each point beside its target, as the network saw it."""

    def curves(
        self, observations: Observations, *, num_bins: int = BINS.number, foreign: "Predictive | None" = None
    ) -> dict[str, Any]:
        """Small lists that figures are drawn from, by name. foreign: of points outside the distribution."""
        return {}

    def ood_scores(self, foreign: "Predictive", observations: Observations) -> dict[str, float]:
        """How well the points of a foreign predictive are told from these."""
        raise self._lacks("scores of foreign points")

    def uncertainty(self, score: Score) -> Tensor:
        """A number per point that is larger where the predictive is less sure."""
        raise self._lacks(f"uncertainty {score!r}")

    def with_quantiles(self, quantiles: Mapping[float, Tensor]) -> Self:
        """The predictive with its quantiles, level -> [N, ...]."""
        raise self._lacks("quantiles")

    # --- corrections -------------------------------------------------------------------------

    def labelled(self, labels: Tensor, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
        """Class probabilities [K, C] in 64 bits and the labels [K] of all observations."""
        raise self._lacks("class probabilities")

    def tempered(self, temperature: float) -> Self:
        """The predictive with p_c^{1/T} / Σ p_c^{1/T} for its probabilities."""
        raise self._lacks("class probabilities")

    def standardised_errors(self, targets: Tensor) -> Tensor:
        """|y − μ| / σ of all targets, flat and in 64 bits."""
        raise self._lacks("standard deviations")

    def interval(self, factor: float) -> tuple[Tensor, Tensor]:
        """Ends of the intervals μ ± factor · σ, in the shape of the mean."""
        raise self._lacks("standard deviations")

    def _lacks(self, what: str) -> InputError:
        return InputError(f"A {type(self).__name__} has no {what}.")


@dataclass(frozen=True)
class LabelsPredictive(Predictive):
    """Probabilities of labels, and how the members' opinions spread.

    mean: the weighted mean of the members' probabilities. expected_entropy: that of their entropies.
    """

    expected_entropy: Tensor
    num_members: int

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """Total uncertainty: the entropy of the mean."""

    @property
    def mutual_information(self) -> Tensor:
        """Disagreement of the members: entropy of the mean minus mean of the entropies, ≥ 0."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    def tensors(self, target_scale: float = 1.0) -> dict[str, Tensor]:
        return {"mean": self.mean, "entropy": self.entropy, "mutual_information": self.mutual_information}


def error_of_mean(values: Tensor) -> float:
    """The standard error of a mean over points; infinite for one point."""
    values = values.double().flatten()
    return (values.std() / len(values) ** 0.5).item() if len(values) > 1 else float("inf")


def described(predictive: object, shape: Sequence[int], *facts: str, **values: Tensor) -> str:
    """A predictive in one line: what it is about, and means over all points."""
    each = "" if len(shape) == 1 else f" of {list(shape[1:])}"
    means = [f"mean {name} {value.double().mean().item():.3g}" for name, value in values.items()]
    return f"{type(predictive).__name__}({', '.join([f'{shape[0]} points{each}', *facts, *means])})"


def columns_of_outputs(columns: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Every column one number a point: outputs beyond the first axis get columns of their own."""
    flat = {}
    for name, values in columns.items():
        rows = values.cpu().numpy().reshape(len(values), -1)
        if rows.shape[1] == 1:
            flat[name] = rows[:, 0]
        else:
            flat |= {f"{name}_{index}": rows[:, index] for index in range(rows.shape[1])}
    return flat


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
