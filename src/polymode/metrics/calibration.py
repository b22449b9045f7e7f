"""Calibration of the top label: reliability bins, ECE and MCE."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polymode.errors import InputError, require_whole
from polymode.metrics.ranks import ranks_of
from polymode.metrics.scores import check_labelled

Binning = Literal["width", "mass"]


@dataclass(frozen=True)
class Bins:
    """How calibration is judged: bins of equal width; those of ``min_count`` points or fewer do not count."""

    number: int = 15
    min_count: int = 0

    def __post_init__(self) -> None:
        require_whole("The number of bins", self.number)
        require_whole("min_count of Bins", self.min_count, least=0)


BINS = Bins()


@dataclass(frozen=True)
class CalibrationBins:
    """Bins ((r−1)/R, r/R] of top-label confidence.

    edges: [R+1]; counts, accuracy and confidence: [R], per bin. Accuracy and confidence of empty bins
    are NaN; num_points counts all points, binned or not.
    """

    edges: Tensor
    counts: Tensor
    accuracy: Tensor
    confidence: Tensor
    num_points: int


def calibration_bins(
    probabilities: Tensor, labels: Tensor, num_bins: int = 15, binning: Binning = "width"
) -> CalibrationBins:
    """Sort points into bins of equal width, or of equal mass, by their top-label confidence."""
    probabilities, labels = check_labelled(probabilities, labels)
    if num_bins < 1:
        raise InputError(f"num_bins must be at least 1, got {num_bins}.")
    if binning not in ("width", "mass"):
        raise InputError(f"binning={binning!r}: allowed are 'width' and 'mass'.")
    top, predicted = probabilities.max(-1)
    confidence = top.double()
    correct = (predicted == labels).double()
    if binning == "width":
        edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64, device=confidence.device)
        index = torch.bucketize(confidence, edges[1:-1].contiguous())
    else:
        # Ties have to be divided between bins: by their place in the data, never by rounding.
        order = ranks_of(top).argsort(stable=True)
        index = torch.empty_like(order)
        index[order] = torch.arange(len(order), device=order.device) * num_bins // len(order)
        ordered = confidence[order]
        starts = [ordered[min(-(-r * len(order) // num_bins), len(order) - 1)] for r in range(num_bins)]
        edges = torch.stack([*starts, ordered[-1]])
    counts = torch.bincount(index, minlength=num_bins)

    def sums(values: Tensor) -> Tensor:
        return torch.zeros(num_bins, dtype=torch.float64, device=values.device).index_add_(0, index, values)

    return CalibrationBins(edges, counts, sums(correct) / counts, sums(confidence) / counts, len(labels))


def _gaps(bins: CalibrationBins, min_count: int) -> tuple[Tensor, Tensor]:
    kept = bins.counts > min_count
    return (bins.accuracy - bins.confidence).abs()[kept], bins.counts[kept]


def ece(
    probabilities: Tensor,
    labels: Tensor,
    num_bins: int = 15,
    binning: Binning = "width",
    min_count: int = 0,
) -> float:
    """Expected calibration error: Σ_bins (n_bin/n) |accuracy − confidence|.

    min_count: bins with that many points or fewer are removed (5 in Chang et al. 2019); n stays the
    number of all points.
    """
    bins = calibration_bins(probabilities, labels, num_bins, binning)
    gaps, counts = _gaps(bins, min_count)
    return (gaps * counts / bins.num_points).sum().item()


def mce(
    probabilities: Tensor,
    labels: Tensor,
    num_bins: int = 15,
    binning: Binning = "width",
    min_count: int = 0,
) -> float:
    """Maximum calibration error: the largest gap of the bins kept (0 when none is)."""
    gaps, _ = _gaps(calibration_bins(probabilities, labels, num_bins, binning), min_count)
    return gaps.max().item() if len(gaps) else 0.0
