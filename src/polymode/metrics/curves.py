"""Small lists for figures: histograms, reliability of classes, coverage of intervals."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polymode.metrics.calibration import calibration_bins

NUM_BINS = 20  # of histograms
COVERAGES = tuple(round(0.05 * k, 2) for k in range(1, 20))  # nominal coverage of central intervals


def histogram(values: Sequence[Tensor], end: float) -> dict[str, Any]:
    """Counts in equal bins from 0 to ``end``: of ordinary points and, where given, of foreign ones.

    Where the end is infinite, bins end at the largest number, and what lies beyond is not counted.
    """
    known = [v[v.isfinite()].float().cpu() for v in values]
    if not math.isfinite(end):
        end = max((v.max().item() for v in known if len(v)), default=0.0)
    counts = [torch.histc(v, NUM_BINS, 0.0, max(end, 1e-12)).tolist() for v in known]
    return {"end": end} | dict(zip(("ordinary", "foreign"), counts, strict=False))


def reliability_curve(probabilities: Tensor, labels: Tensor, num_bins: int) -> dict[str, list[float]]:
    """Bins of confidence with sums over their points, which add up over replicates."""
    bins = calibration_bins(probabilities, labels, num_bins)
    return {
        "edges": bins.edges.tolist(),
        "counts": bins.counts.tolist(),
        "correct": (bins.accuracy.nan_to_num() * bins.counts).tolist(),
        "confidence": (bins.confidence.nan_to_num() * bins.counts).tolist(),
    }


def coverage_curve(below: Tensor, up_to: Tensor) -> dict[str, list[float]]:
    """Share of targets inside central intervals, from P(Y < y) and P(Y ≤ y) [N] of the predictives.

    A target that has a probability of its own counts with the share of [P(Y < y), P(Y ≤ y)] that lies
    between the levels of the interval (the non-randomised transform of Czado et al. 2009): so a right
    predictive of counts covers what it says, too, rather than more.
    """
    below, up_to = below.double(), up_to.double()
    width = up_to - below
    has_mass = width > 0
    observed = []
    for level in COVERAGES:
        inside = ((up_to - 0.5).abs() <= level / 2).double()
        low, high = 0.5 - level / 2, 0.5 + level / 2
        shared = (up_to.clamp(max=high) - below.clamp(min=low)).clamp(min=0)
        share = torch.where(has_mass, shared / width.masked_fill(~has_mass, 1.0), inside)
        observed.append(share.mean().item())
    return {"nominal": list(COVERAGES), "observed": observed}
