"""Yes or no, once or for many labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polymode.errors import InputError
from polymode.likelihoods.base import (
    check_finite_targets,
    check_same_shape,
    first_place,
    match_trailing_one,
)
from polymode.likelihoods.predictive import (
    Accumulator,
    LabelsPredictive,
    Observations,
    columns_of_outputs,
    described,
    error_of_mean,
)
from polymode.likelihoods.tempered import Tempered
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.columns import Column, by_key
from polymode.trees import Tree


@dataclass(frozen=True)
class Bernoulli(Tempered):
    """Independent yes/no outputs (multi-label): logits and targets [B, ...], targets in [0, 1].

    The labels of one example are one observation: their log-probabilities add up.
    """

    kind: ClassVar[str] = "bernoulli"
    reads: ClassVar = "labels"
    columns: ClassVar = by_key(
        Column("accuracy", "accuracy", "high", 4, "share of right labels"),
        Column("nll", "NLL", "low", 4, "−log probability of the true labels, in nats"),
    )
    quality: ClassVar[str] = "nll"

    def _logits(self, outputs: Tree, targets: Tensor) -> Tensor:
        return match_trailing_one(self.read(outputs), targets)

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        logits = self._logits(outputs, targets)
        return -F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")

    def errors(self, outputs: Tree, targets: Tensor) -> Tensor:
        wrong = ((self._logits(outputs, targets) > 0) != (targets > 0.5)).float()
        return wrong.flatten(1).mean(1) if wrong.ndim > 1 else wrong

    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        check_finite_targets(targets)
        outside = (targets < 0) | (targets > 1)
        if bool(outside.any()):
            raise InputError(
                f"Bernoulli targets must lie between 0 and 1, got {targets[outside][0].item()}, "
                f"{first_place(outside)}."
            )

    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        check_same_shape("Bernoulli", self._logits(outputs, targets), targets)

    def answers(self, outputs: Tree) -> Tensor:
        return (self.read(outputs) > 0).long()

    def function_values(self, outputs: Tree) -> Tensor:
        return self.read(outputs).sigmoid()

    def accumulator(self, num_points: int) -> Accumulator:
        return _BernoulliAccumulator(self, num_points)


class _BernoulliAccumulator(Accumulator):
    def __init__(self, likelihood: Bernoulli, num_points: int) -> None:
        super().__init__(num_points)
        self.likelihood = likelihood

    def update(self, outputs: Tree, weights: Tensor, rows: slice) -> None:
        probability = self.likelihood.read(outputs).sigmoid()
        both = torch.special.entr(probability) + torch.special.entr(1 - probability)
        self.add("mean", weights, probability, rows)
        self.add("entropy", weights, both, rows)
        self.count(weights, rows)

    def result(self) -> "BernoulliPredictive":
        return BernoulliPredictive(self.mean("mean"), self.mean("entropy"), self.num_members)


@dataclass(frozen=True)
class BernoulliPredictive(LabelsPredictive):
    """Mean probabilities of independent yes/no outputs: mean and expected_entropy [N, ...]."""

    @property
    def entropy(self) -> Tensor:
        return torch.special.entr(self.mean) + torch.special.entr(1 - self.mean)

    def __repr__(self) -> str:
        return described(
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

    def errors(self, observations: Observations, *, target_scale: float = 1.0) -> dict[str, float]:
        right = (self.mean > 0.5) == (
            observations.targets.to(self.mean.device).reshape(self.mean.shape) > 0.5
        )
        each = right.flatten(1).double().mean(1) if right.ndim > 1 else right
        return {"accuracy": error_of_mean(each), "nll": error_of_mean(observations.log_prob)}

    def scores(
        self, observations: Observations, *, target_scale: float = 1.0, bins: Bins = BINS
    ) -> dict[str, float]:
        targets = observations.targets.cpu()
        wrong = self.labels.cpu().reshape(targets.shape) != (targets > 0.5)
        return {
            "accuracy": 1 - wrong.double().mean().item(),
            "nll": -observations.log_prob.double().mean().item(),
        }

    def table(
        self, *, classes: Sequence[str] = (), shift: float = 0.0, scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        return columns_of_outputs(self.tensors())
