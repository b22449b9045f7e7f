"""Telling out-of-distribution points from ordinary ones by the predictive's uncertainty."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.metrics.ranks import ranks_of

Score = Literal["max_probability", "entropy", "mutual_information"]
OOD_SCORES: tuple[Score, ...] = ("max_probability", "entropy", "mutual_information")


@dataclass(frozen=True)
class OodScores:
    """Out-of-distribution points are the positives.

    auroc: probability that one of them scores above an ordinary point. Scores that are equal up to rounding
    are ties (``metrics.ranks``) and count half: where all members agree, mutual information tells nothing and
    its auroc is 0.5.
    aupr: average precision. fpr95: share of ordinary points above the threshold that catches 95 %.
    """

    auroc: float
    aupr: float
    fpr95: float


def ood_scores(ordinary: Tensor, foreign: Tensor) -> OodScores:
    """Compare uncertainties [N] of ordinary points with those [K] of out-of-distribution points."""
    from torchmetrics.functional.classification import (
        binary_auroc,
        binary_average_precision,
        binary_roc,
    )

    if not len(ordinary) or not len(foreign):
        raise InputError(
            f"Both sets need points: {len(ordinary)} ordinary, {len(foreign)} out-of-distribution."
        )
    # Ranks, because torchmetrics takes any score outside [0, 1] for a logit and squashes it, which
    # can merge large scores.
    ranks = ranks_of(torch.cat([ordinary, foreign])).double()
    ranks = ranks / max(1.0, ranks.max().item())
    labels = torch.cat([torch.zeros(len(ordinary)), torch.ones(len(foreign))]).long().to(ranks.device)
    false_positive, true_positive, _ = binary_roc(ranks, labels)
    caught = true_positive >= 0.95
    return OodScores(
        binary_auroc(ranks, labels).item(),
        binary_average_precision(ranks, labels).item(),
        false_positive[caught].min().item(),
    )
