"""Posteriors on corrupted images: their scores for every corruption and severity."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polymode.application.datasets.corruptions.making import CORRUPTIONS
from polymode.application.datasets.corruptions.reading import Blocks
from polymode.application.datasets.images import Labelled
from polymode.data import ArrayData, Preprocessing
from polymode.errors import InputError
from polymode.judging.evaluation import evaluate
from polymode.metrics import corruption_mean, mean_corruption_error, relative_corruption_error
from polymode.metrics.calibration import BINS, Bins
from polymode.posteriors import Posterior

CORRUPTION_SCORES = ("accuracy", "nll", "ece")


@dataclass(frozen=True)
class Robustness:
    """Scores (accuracy, nll, ece) of one posterior on images, and on each corruption and severity of them."""

    clean: Mapping[str, float]
    corrupted: Mapping[str, Mapping[int, Mapping[str, float]]]

    def values(self, key: str) -> dict[str, list[float]]:
        """One score, by corruption, a number a severity."""
        return {name: [scores[key] for scores in levels.values()] for name, levels in self.corrupted.items()}

    @property
    def errors(self) -> dict[str, list[float]]:
        """Errors with those of the fifteen standard corruptions that were judged."""
        return {
            name: [1 - accuracy for accuracy in row]
            for name, row in self.values("accuracy").items()
            if name in CORRUPTIONS
        }

    @property
    def summary(self) -> dict[str, float]:
        """Accuracy and NLL over all corruptions and severities; the mean error of the standard ones."""
        found = {f"corruption_{key}": corruption_mean(self.values(key)) for key in ("accuracy", "nll")}
        if self.errors:
            found["corruption_error"] = corruption_mean(self.errors)
        return found

    def against(self, baselines: "Sequence[Robustness]") -> dict[str, float]:
        """The mCE and relative mCE over the standard corruptions, relative to the mean errors of baselines.

        NaN where these make no errors to be divided by.
        """
        if not self.errors:
            raise InputError("mCE is about the fifteen standard corruptions, and none of them was judged.")
        below = {
            name: np.mean([baseline.errors[name] for baseline in baselines], 0).tolist()
            for name in self.errors
        }
        below_clean = float(np.mean([1 - baseline.clean["accuracy"] for baseline in baselines]))
        clean = 1 - self.clean["accuracy"]
        return {
            "mean_corruption_error": _or_nan(mean_corruption_error, self.errors, below),
            "relative_corruption_error": _or_nan(
                relative_corruption_error, self.errors, clean, below, below_clean
            ),
        }

    def document(self) -> dict[str, Any]:
        """All scores, as JSON has them."""
        corrupted = {
            name: {str(severity): dict(scores) for severity, scores in levels.items()}
            for name, levels in self.corrupted.items()
        }
        return {"clean": dict(self.clean), "corrupted": corrupted, **self.summary}


def _or_nan(metric: Callable[..., float], *values: Any) -> float:
    try:
        return metric(*values)
    except ZeroDivisionError:
        return math.nan


def judge_corrupted(
    posteriors: Sequence[tuple[Posterior, Preprocessing]],
    clean: Labelled,
    blocks: Blocks,
    names: Sequence[str],
    severities: Sequence[int],
    *,
    num_draws: int = 100,
    bins: Bins = BINS,
    seed: int = 0,
    progress: Callable[[int, str], None] | None = None,
) -> list[Robustness]:
    """Judge posteriors on the same images: clean ones, and each corruption and severity of them.

    clean: bytes [N, C, H, W] and labels. blocks: gives the corrupted ones (``corruptions.reading``). Each
    posterior comes with the preprocessing of its inputs. progress: called before every corruption with the
    number of those done and its name.
    """
    for posterior, _ in posteriors:
        if not posterior.network.likelihood.columns.keys() >= set(CORRUPTION_SCORES):
            raise InputError(
                "Corruptions are judged by classes; this posterior has the likelihood "
                f"{posterior.network.likelihood.kind!r}."
            )

    def judged(block: Labelled) -> list[dict[str, float]]:
        return [_scores(posterior, ready, block, num_draws, bins, seed) for posterior, ready in posteriors]

    without = judged(clean)
    found: list[dict[str, dict[int, dict[str, float]]]] = [{} for _ in posteriors]
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, name)
        for severity in severities:
            for corrupted, scores in zip(found, judged(blocks(name, severity)), strict=True):
                corrupted.setdefault(name, {})[severity] = scores
    return [Robustness(*both) for both in zip(without, found, strict=True)]


def _scores(
    posterior: Posterior, ready: Preprocessing, block: Labelled, num_draws: int, bins: Bins, seed: int
) -> dict[str, float]:
    # Copies, as official arrays lie on disk and torch wants arrays that can be written to.
    images, labels = (torch.from_numpy(np.array(part, order="C")) for part in block)
    data = ArrayData(ready.inputs(images.float() / 255), labels.long())
    scores = evaluate(
        posterior,
        data,
        num_draws=num_draws if posterior.num_members is None else None,
        generator=torch.Generator().manual_seed(seed),  # every block is judged by the same networks
        bins=bins,
    )
    return {key: scores[key] for key in CORRUPTION_SCORES}
