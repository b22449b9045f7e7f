"""Comparisons: several methods on one task at one price."""

from polymode.application.comparison.compare import (
    COMPARISON_FILE,
    TASK_FILE,
    Judging,
    Replicate,
    check_reference_for,
    compare,
    fit_replicates,
    judge_all,
    replicates_of,
)
from polymode.application.comparison.distances import distances_text, noise_floor_text
from polymode.application.comparison.judgement import Judgement, judge
from polymode.application.comparison.results import Comparison, Result, Summary, stated
from polymode.application.comparison.robustness import Robustness, judge_corrupted
from polymode.application.comparison.tables import add_result, replicates_path

__all__ = [
    "COMPARISON_FILE",
    "TASK_FILE",
    "Comparison",
    "Judgement",
    "Judging",
    "Replicate",
    "Result",
    "Robustness",
    "Summary",
    "add_result",
    "check_reference_for",
    "compare",
    "distances_text",
    "fit_replicates",
    "judge",
    "judge_all",
    "judge_corrupted",
    "noise_floor_text",
    "replicates_of",
    "replicates_path",
    "stated",
]
