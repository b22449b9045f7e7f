"""Yes or no, once or for many labels."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polymode.errors import InputError
from polymode.likelihoods.base import (
    Likelihood,
    check_finite_targets,
    check_same_shape,
    first_place,
    match_trailing_one,
)
from polymode.likelihoods.predictive import Accumulator, BernoulliPredictive
from polymode.trees import Tree


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent yes/no outputs (multi-label): logits and targets [B, ...], targets in [0, 1].

    The labels of one example are one observation: their log-probabilities add up.
    """

    kind: ClassVar[str] = "bernoulli"

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

    def result(self) -> BernoulliPredictive:
        return BernoulliPredictive(self.mean("mean"), self.mean("entropy"), self.num_members)
