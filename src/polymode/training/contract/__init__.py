"""What a method and the training loop agree on: all that a method's file imports of the training."""

from polymode.training.contract.batch import Batch, Piece
from polymode.training.contract.density import (
    LogDensity,
    check_samplable,
    prior_widths,
    start_in_words,
)
from polymode.training.contract.descent import Descent, MembersInTurn
from polymode.training.contract.epoch import Epoch
from polymode.training.contract.execution import Execution
from polymode.training.contract.method import Method, describe
from polymode.training.contract.objective import Gradients, Objective, next_noise
from polymode.training.contract.optimizers import MemberOptimizer, Optimizer, clip_each
from polymode.training.contract.perturbation import draw_data_seed, perturbed
from polymode.training.contract.phase import (
    Hook,
    Keep,
    KeepBest,
    Measure,
    Over,
    Phase,
    Step,
    descend,
    descend_together,
    epochs_before,
    keep_rule,
    keep_throughout,
    nothing,
)
from polymode.training.contract.problem import Problem
from polymode.training.contract.remaining import Remaining
from polymode.training.contract.sequence import (
    HIGH,
    LOW,
    PHASE_EPOCHS,
    RATES,
    Rates,
    check_rates,
    divide_epochs,
    equal_parts,
    in_blocks,
    num_blocks,
    phase_keep,
    phase_schedule,
)
from polymode.training.contract.shared_options import (
    KEEP,
    LAYERS,
    OPTIMIZER,
    PRIOR_STD,
    PRIOR_STD_OR_FLAT,
    SCHEDULE,
    check_optimizer,
    check_schedule,
    refuse_line_search,
)
from polymode.training.contract.sparse_descent import SparseDescent
from polymode.training.contract.state import State
from polymode.training.contract.statistics import (
    by_chain,
    empty_statistics,
    estimated_statistics,
    re_estimate,
)
from polymode.training.contract.wrapper import Wrapper

__all__ = [
    "HIGH",
    "KEEP",
    "LAYERS",
    "LOW",
    "OPTIMIZER",
    "PHASE_EPOCHS",
    "PRIOR_STD",
    "PRIOR_STD_OR_FLAT",
    "RATES",
    "SCHEDULE",
    "Batch",
    "Descent",
    "Epoch",
    "Execution",
    "Gradients",
    "Hook",
    "Keep",
    "KeepBest",
    "LogDensity",
    "Measure",
    "MemberOptimizer",
    "MembersInTurn",
    "Method",
    "Objective",
    "Optimizer",
    "Over",
    "Phase",
    "Piece",
    "Problem",
    "Rates",
    "Remaining",
    "SparseDescent",
    "State",
    "Step",
    "Wrapper",
    "by_chain",
    "check_optimizer",
    "check_rates",
    "check_samplable",
    "check_schedule",
    "clip_each",
    "descend",
    "descend_together",
    "describe",
    "divide_epochs",
    "draw_data_seed",
    "empty_statistics",
    "epochs_before",
    "equal_parts",
    "estimated_statistics",
    "in_blocks",
    "keep_rule",
    "keep_throughout",
    "next_noise",
    "nothing",
    "num_blocks",
    "perturbed",
    "phase_keep",
    "phase_schedule",
    "prior_widths",
    "re_estimate",
    "refuse_line_search",
    "start_in_words",
]
