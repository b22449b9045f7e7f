"""Training: the contract of a method and the one loop that runs it."""

from polymode.training.descent import Descent
from polymode.training.epoch import Epoch
from polymode.training.events import epochs_of, read_events
from polymode.training.fit import fit
from polymode.training.method import (
    KeepBest,
    Method,
    Over,
    Phase,
    Problem,
    check_options,
    descend,
    keep_rule,
)
from polymode.training.objective import Objective
from polymode.training.optimizers import MemberOptimizer, Optimizer, clip_each
from polymode.training.state import State

__all__ = [
    "Descent",
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
    "check_options",
    "clip_each",
    "descend",
    "epochs_of",
    "fit",
    "keep_rule",
    "read_events",
]
