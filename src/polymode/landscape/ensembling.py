"""Ensembles of networks from several runs, averaged over all choices of runs (Fort et al. 2019, Figure 8)."""

import math
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from polymode import metrics
from polymode.errors import InputError, require
from polymode.metrics.probabilities import labelled

MOST_SUBSETS = 5000


@dataclass(frozen=True)
class OfSize:
    """Scores of ensembles of ``num_runs`` runs: means over all subsets, and their spread (a deviation)."""

    num_runs: int
    num_subsets: int
    scores: dict[str, float]
    spreads: dict[str, float]


def by_ensemble_size(probabilities: Tensor, labels: Tensor) -> list[OfSize]:
    """Accuracy, NLL and Brier of the mean over m runs, for every m, over all m-subsets of the runs.

    probabilities: [R, N, C], what each run says: the mean over its own networks, where it has several.
    Subsets share runs, so that their spread is no standard error.
    """
    if probabilities.ndim != 3:
        raise InputError(f"Expected probabilities [runs, points, classes], got {list(probabilities.shape)}.")
    number = len(probabilities)
    most = math.comb(number, number // 2)
    require(most <= MOST_SUBSETS, f"{number} runs have {most} subsets of {number // 2}: give fewer runs.")
    found = []
    for size in range(1, number + 1):
        subsets = math.comb(number, size)
        values = [
            scores_of(probabilities[list(s)].mean(0), labels) for s in combinations(range(number), size)
        ]
        each = {key: torch.tensor([v[key] for v in values], dtype=torch.float64) for key in values[0]}
        found.append(
            OfSize(
                size,
                subsets,
                {key: float(v.mean()) for key, v in each.items()},
                {key: float(v.std()) if len(v) > 1 else math.nan for key, v in each.items()},
            )
        )
    return found


def scores_of(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL and Brier of probabilities [N, C]."""
    p, y = labelled(probabilities.double(), labels)
    return {"accuracy": metrics.accuracy(p, y), "nll": metrics.nll(p, y), "brier": metrics.brier(p, y)}
