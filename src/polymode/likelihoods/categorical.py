"""Classes: softmax over the last axis."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polymode.errors import InputError
from polymode.likelihoods.base import Likelihood, first_place
from polymode.likelihoods.predictive import Accumulator, CategoricalPredictive, softmax_and_entropy
from polymode.trees import Tree


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Softmax over the last axis: logits [B, C] with labels [B], or [B, T, C] with tokens [B, T].

    Every token is an observation; those equal to ``ignore_index`` are not.
    """

    kind: ClassVar[str] = "categorical"
    per_token: ClassVar[bool] = True
    ignore_index: int | None = None

    def _ignored(self, targets: Tensor) -> Tensor:
        if self.ignore_index is None:
            return torch.zeros_like(targets, dtype=torch.bool)
        return targets == self.ignore_index

    def num_observations(self, targets: Tensor) -> Tensor | int:
        if self.ignore_index is None:
            return targets.numel()
        return (~self._ignored(targets)).sum().clamp(min=1)

    def observed(self, targets: Tensor) -> Tensor:
        return ~self._ignored(targets)

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        logits, targets = self.read(outputs).movedim(-1, 1), targets.long()
        ignored = -100 if self.ignore_index is None else self.ignore_index
        return -F.cross_entropy(logits, targets, reduction="none", ignore_index=ignored)

    def errors(self, outputs: Tree, targets: Tensor) -> Tensor:
        wrong = self.read(outputs).argmax(-1) != targets
        return (wrong & ~self._ignored(targets)).float()

    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise InputError(
                f"Class labels must be integers, got {targets.dtype}. Use targets.long() for indices, "
                "targets.argmax(-1) for one-hot rows, or likelihood='bernoulli' for yes/no targets."
            )
        negative = (targets < 0) & ~self._ignored(targets)
        if bool(negative.any()):
            raise InputError(
                f"Class labels must be 0 or larger, got {int(targets[negative].min())}, "
                f"{first_place(negative)}. To leave observations out pass Categorical(ignore_index=...)."
            )
        num_classes = self.read(outputs).shape[-1]
        too_large = (targets >= num_classes) & ~self._ignored(targets)
        if bool(too_large.any()):
            raise InputError(
                f"Label {int(targets[too_large].max())} is out of range, {first_place(too_large)}: the "
                f"network has {num_classes} outputs, so labels go from 0 to {num_classes - 1}."
            )

    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        logits = self.read(outputs)
        if logits.ndim < 2 or logits.shape[:-1] != targets.shape:
            advice = ""
            if targets.ndim == logits.ndim and targets.shape[-1] == 1:
                advice = " Use targets.squeeze(-1)."
            elif targets.shape == logits.shape:
                advice = " For one-hot rows use targets.argmax(-1)."
            raise InputError(
                f"Categorical needs logits [B, C] for labels [B], or [B, T, C] for [B, T]; the "
                f"network gives {list(logits.shape)} for labels {list(targets.shape)}.{advice}"
            )
        if bool((logits >= 0).all()) and bool((logits.sum(-1) - 1).abs().max() < 1e-4):
            warnings.warn(
                "The network's outputs are non-negative and sum to 1: it seems to end in a softmax, but "
                "Categorical takes logits. Remove the softmax.",
                stacklevel=2,
            )
        if logits.shape[-1] < 2:
            raise InputError("Categorical needs at least two outputs; for one yes/no output use 'bernoulli'.")

    def accumulator(self, num_points: int) -> Accumulator:
        return _CategoricalAccumulator(self, num_points)


class _CategoricalAccumulator(Accumulator):
    def __init__(self, likelihood: Categorical, num_points: int) -> None:
        super().__init__(num_points)
        self.likelihood = likelihood

    def update(self, outputs: Tree, weights: Tensor, rows: slice) -> None:
        probabilities, entropies = softmax_and_entropy(self.likelihood.read(outputs))
        self.add("mean", weights, probabilities, rows)
        self.add("entropy", weights, entropies, rows)
        self.count(weights, rows)

    def result(self) -> CategoricalPredictive:
        return CategoricalPredictive(self.mean("mean"), self.mean("entropy"), self.num_members)
