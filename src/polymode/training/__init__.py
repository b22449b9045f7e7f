"""Training: the contract of a method and the one loop that runs it."""

from polymode.training.fit import Epoch, fit
from polymode.training.method import (
    KeepBest,
    Method,
    Over,
    Phase,
    Problem,
    State,
    descend,
    keep_rule,
)
from polymode.training.objective import Objective
from polymode.training.optimizers import MemberOptimizer, Optimizer, clip_each

__all__ = [
    "Epoch",
    "KeepBest",
    "MemberOptimizer",
    "Method",
    "Objective",
    "Optimizer",
    "Over",
    "Phase",
    "Problem",
    "State",
    "clip_each",
    "descend",
    "fit",
    "keep_rule",
]
