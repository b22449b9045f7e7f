"""Scores of predictives and distances between them. Definitions follow docs/metrics.md."""

from polymode.metrics.calibration import Bins, CalibrationBins, calibration_bins, ece, mce
from polymode.metrics.corruption import (
    corruption_mean,
    mean_corruption_error,
    relative_corruption_error,
)
from polymode.metrics.diversity import (
    cosine_similarity,
    disagreement,
    disagreement_matrix,
    jensen_shannon,
    js_matrix,
    kl_matrix,
    pairwise_kl,
)
from polymode.metrics.fidelity import agreement, total_variation, wasserstein1, wasserstein2
from polymode.metrics.ood import OodScores, ood_scores
from polymode.metrics.scores import (
    accuracy,
    aurc,
    bits_per_character,
    brier,
    interval_coverage,
    nll,
    risk_coverage,
    rmse,
)

__all__ = [
    "Bins",
    "CalibrationBins",
    "OodScores",
    "accuracy",
    "agreement",
    "aurc",
    "bits_per_character",
    "brier",
    "calibration_bins",
    "corruption_mean",
    "cosine_similarity",
    "disagreement",
    "disagreement_matrix",
    "ece",
    "interval_coverage",
    "jensen_shannon",
    "js_matrix",
    "kl_matrix",
    "mce",
    "mean_corruption_error",
    "nll",
    "ood_scores",
    "pairwise_kl",
    "relative_corruption_error",
    "risk_coverage",
    "rmse",
    "total_variation",
    "wasserstein1",
    "wasserstein2",
]
