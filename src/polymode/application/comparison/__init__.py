"""Comparisons: several methods on one task at one price."""

from polymode.application.comparison.compare import (
    CALIBRATION_FILE,
    COMPARISON_FILE,
    TASK_FILE,
    Equal,
    Judging,
    Replicate,
    baselines_for,
    check_reference_for,
    claim,
    compare,
    data_of,
    fit_replicates,
    judge_all,
    learned_from,
    replicates_of,
    require_validation,
    sized_for,
    whole,
)
from polymode.application.comparison.distances import alike_texts, distances_text, noise_floor_text
from polymode.application.comparison.judgement import Judgement, judge
from polymode.application.comparison.results import Comparison, Result, Summary, stated, times
from polymode.application.comparison.robustness import Robustness, judge_corrupted
from polymode.application.comparison.tables import add_result, replicates_path
from polymode.application.comparison.verdict import Verdict, verdict_of

__all__ = [
    "CALIBRATION_FILE",
    "COMPARISON_FILE",
    "TASK_FILE",
    "Comparison",
    "Equal",
    "Judgement",
    "Judging",
    "Replicate",
    "Result",
    "Robustness",
    "Summary",
    "Verdict",
    "add_result",
    "alike_texts",
    "baselines_for",
    "check_reference_for",
    "claim",
    "compare",
    "data_of",
    "distances_text",
    "fit_replicates",
    "judge",
    "judge_all",
    "judge_corrupted",
    "learned_from",
    "noise_floor_text",
    "replicates_of",
    "replicates_path",
    "require_validation",
    "sized_for",
    "stated",
    "times",
    "verdict_of",
    "whole",
]
