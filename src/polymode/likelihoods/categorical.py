"""Classes: softmax over the last axis."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polymode import metrics
from polymode.errors import InputError, require, unknown_name
from polymode.likelihoods.base import first_place
from polymode.likelihoods.predictive import (
    Accumulator,
    LabelsPredictive,
    Observations,
    Predictive,
    columns_of_outputs,
    described,
    error_of_mean,
)
from polymode.likelihoods.tempered import Tempered
from polymode.metrics.calibration import BINS, Bins
from polymode.metrics.columns import TO_PROBABILITIES, Column, by_key
from polymode.metrics.curves import histogram, reliability_curve
from polymode.metrics.ood import OOD_SCORES, Score
from polymode.metrics.probabilities import entropy, labelled
from polymode.trees import Tree


@dataclass(frozen=True)
class Categorical(Tempered):
    """Softmax over the last axis: logits [B, C] with labels [B], or [B, T, C] with tokens [B, T].

    Every token is an observation; those equal to ``ignore_index`` are not.
    """

    kind: ClassVar[str] = "categorical"
    per_token: ClassVar[bool] = True
    reads: ClassVar = "labels"
    columns: ClassVar = by_key(
        Column("accuracy", "accuracy", "high", 4, "share of test points whose most probable label is right"),
        Column("nll", "NLL", "low", 4, "−log probability of the true label, in nats"),
        Column("bits_per_character", "BPC", "low", 4, "NLL in bits a token: bits per character of a text"),
        Column("brier", "Brier", "low", 4, "squared error of the probabilities, 0 to 2"),
        Column("ece", "ECE", "low", 4, "gap between confidence and accuracy, in bins of confidence"),
        Column("ood_auroc", "OOD AUROC", "high", 4, "how well entropy tells foreign points, 0.5 is chance"),
        Column(
            "disagreement",
            "disagree",
            None,
            4,
            "share of points on which two members differ, mean over pairs",
        ),
        *TO_PROBABILITIES,
    )
    quality: ClassVar[str] = "nll"
    reference_kind: ClassVar = "probabilities"
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

    @property
    def of_baseline(self) -> "Categorical":
        return self.uncalibrated

    def num_outputs(self, targets: Iterable[Tensor]) -> int:
        return 1 + max(int(part.max()) for part in targets)

    def class_names(self, num_outputs: int) -> tuple[str, ...]:
        return tuple(map(str, range(num_outputs)))

    def answers(self, outputs: Tree) -> Tensor:
        return self.read(outputs).argmax(-1)

    def function_values(self, outputs: Tree) -> Tensor:
        return self.read(outputs).softmax(-1)

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

    def result(self) -> "CategoricalPredictive":
        return CategoricalPredictive(self.mean("mean"), self.mean("entropy"), self.num_members)


@dataclass(frozen=True)
class CategoricalPredictive(LabelsPredictive):
    """Mean class probabilities and how the members' opinions spread.

    mean: [N, ..., C], the weighted mean of the members' probabilities.
    expected_entropy: [N, ...], the weighted mean of the members' entropies.
    """

    @property
    def entropy(self) -> Tensor:
        return entropy(self.mean)

    def __repr__(self) -> str:
        return described(
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

    def _observed(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Probabilities [K, C] and labels [K] of all observations."""
        kept = observations.observed
        return labelled(self.mean[kept.to(self.mean.device)], observations.targets[kept])

    def errors(self, observations: Observations, *, target_scale: float = 1.0) -> dict[str, float]:
        probabilities, labels = self._observed(observations)
        right = probabilities.gather(-1, labels[:, None]).squeeze(-1)
        # Σ_c (p_c − 1{c = y})² of each observation.
        squares = probabilities.square().sum(-1) + 1 - 2 * right
        return {
            "accuracy": error_of_mean(probabilities.argmax(-1) == labels),
            "nll": error_of_mean(observations.log_prob[observations.observed]),
            "brier": error_of_mean(squares),
        }

    def scores(
        self, observations: Observations, *, target_scale: float = 1.0, bins: Bins = BINS
    ) -> dict[str, float]:
        probabilities, labels = self._observed(observations)
        wrong = (probabilities.argmax(-1) != labels).double()
        scores = {
            "accuracy": metrics.accuracy(probabilities, labels),
            "brier": metrics.brier(probabilities, labels),
            "ece": metrics.ece(probabilities, labels, bins.number, min_count=bins.min_count),
            "mce": metrics.mce(probabilities, labels, bins.number, min_count=bins.min_count),
            "aurc": metrics.aurc(probabilities.amax(-1), wrong),
            "mutual_information": self.mutual_information.double().mean().item(),
        }
        if probabilities.shape[-1] > 5:
            scores["top5"] = metrics.accuracy(probabilities, labels, top=5)
        log_prob = observations.log_prob.double()
        kept = observations.observed.to(log_prob.device)
        scores["nll"] = -log_prob[kept].mean().item()  # in logarithms: no underflow
        if observations.targets.ndim > 1:
            scores["bits_per_character"] = scores["nll"] / math.log(2)
        return scores

    def uncertainty(self, score: Score) -> Tensor:
        if score == "max_probability":
            return 1 - self.confidence
        if score == "entropy":
            return self.entropy
        if score == "mutual_information":
            return self.mutual_information
        raise unknown_name("uncertainty score", score, OOD_SCORES)

    def ood_scores(self, foreign: Predictive, observations: Observations) -> dict[str, float]:
        scores = {}
        for score in OOD_SCORES:
            ordinary = self.uncertainty(score)
            ordinary = ordinary[observations.observed.to(ordinary.device)]
            found = metrics.ood_scores(ordinary, foreign.uncertainty(score).flatten())
            scores |= {f"ood_{score}_{key}": value for key, value in vars(found).items()}
        return scores

    def curves(
        self, observations: Observations, *, num_bins: int = BINS.number, foreign: Predictive | None = None
    ) -> dict[str, Any]:
        probabilities, labels = self._observed(observations)
        both: list[Any] = [self] if foreign is None else [self, foreign]
        ends = {
            "confidence": 1.0,
            "entropy": torch.tensor(float(probabilities.shape[-1])).log().item(),
        }
        histograms = {
            name: histogram([getattr(p, name).flatten() for p in both], end) for name, end in ends.items()
        }
        return {"reliability": reliability_curve(probabilities, labels, num_bins)} | histograms

    def table(
        self, *, classes: Sequence[str] = (), shift: float = 0.0, scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        """Of [N, C] a row a point; of [N, T, C] a row a token, told by its ``sequence`` and ``place``."""
        if self.mean.ndim not in (2, 3):
            return columns_of_outputs(self.tensors())
        mean = self.mean.cpu().numpy()
        tokens: dict[str, np.ndarray] = {}
        if mean.ndim == 3:
            sequence, place = np.indices(mean.shape[:2]).reshape(2, -1)
            tokens = {"sequence": sequence, "place": place}
            mean = mean.reshape(-1, mean.shape[-1])
        names = classes or [str(index) for index in range(mean.shape[-1])]
        require(
            len(names) == mean.shape[-1],
            f"{len(names)} names of classes are given, and the network tells {mean.shape[-1]} apart.",
        )
        columns = tokens | {"label": np.array(names)[mean.argmax(-1)], "confidence": mean.max(-1)}
        for name in ("entropy", "mutual_information"):
            columns[name] = getattr(self, name).cpu().numpy().flatten()
        return columns | {f"p_{name}": mean[:, index] for index, name in enumerate(names)}

    def labelled(self, labels: Tensor, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
        return labelled(self.mean.double(), labels, ignore_index)

    def tempered(self, temperature: float) -> "CategoricalPredictive":
        """Temper the mean; how far the members disagree (the mutual information) is left as it was."""
        logs = self.mean.clamp(min=torch.finfo(self.mean.dtype).tiny).log()
        tempered = (logs / temperature).softmax(-1)
        within = (entropy(tempered) - self.mutual_information).clamp(min=0)
        return replace(self, mean=tempered, expected_entropy=within)


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
