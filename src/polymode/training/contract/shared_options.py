"""Options that many methods have: what they mean, and whether a value will do."""

from typing import Any

from polymode.errors import InputError
from polymode.schedules import SCHEDULES
from polymode.training.contract.optimizers import Optimizer

PRIOR_STD = (
    "s of the prior N(0, s²) over the weights: one number; numbers by pattern of the weights' names, of "
    'which the first that fits counts (`{"*.bias": 1.0, "*": 0.3}`); or `priors.FanIn(scale)`, scale/√fan-in '
    "for weights and scale for everything else"
)
PRIOR_STD_OR_FLAT = f"{PRIOR_STD}. None means a flat prior (maximum likelihood)"
OPTIMIZER = (
    "any of `torch.optim`; `decay_all=False` spares normalisation and biases from weight decay, `clip_norm` "
    "bounds the gradient of each member"
)
SCHEDULE = (
    f"factor on the learning rate: {', '.join(f'`{each.__name__}`' for each in SCHEDULES)} or any "
    "function of `Progress`"
)
KEEP = (
    'weights to end with: the `"last"`, the `"best"` by validation, or those that '
    "`KeepBest(criterion, from_epoch, to_epoch)` chooses"
)
LAYERS = (
    'by kind (`"norm"`, `"input"`, `"output"`, `"hidden"`, `"all"`), by type (`"Linear"`) or by pattern of '
    'their names (`"stage3.*"`)'
)


def check_optimizer(value: Any, name: str = "optimizer") -> None:
    """Check it when the method is made rather than when it is fitted."""
    if not isinstance(value, Optimizer):
        raise InputError(f"{name} must be a description such as Optimizer('AdamW', lr=1e-3), got {value!r}.")


def check_schedule(value: Any, name: str = "schedule") -> None:
    """Check it when the method is made rather than when it is fitted."""
    if not callable(value) or isinstance(value, type):
        raise InputError(
            f"{name} must be an instance such as schedules.Cosine(), or a function of Progress that gives "
            f"a factor, got {value!r}."
        )


def refuse_line_search(optimizer: Optimizer, method: str) -> None:
    """Refuse optimisers that compare losses along a line, for a method whose losses are of random draws."""
    if optimizer.needs_closure:
        raise InputError(
            f"{optimizer.kind} looks for the best step along a line, and the loss of {method} is another one "
            "at every look, that of another draw. Use Adam or SGD."
        )
