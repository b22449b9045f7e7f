"""What is known at the end of an epoch."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Epoch:
    """What an observer is told at the end of every epoch; losses, validation scores and measures are [M].

    measures: what the method shows of its members, such as their sparsity. labels: [M, 3], data set, chain
    and member. rate: the schedule's factor at the last step. learning_rates: of each optimiser, with that
    factor. epochs_done: in all phases. member_epochs: gradient passes over a data set so far, the mean over
    data sets. keeps_best: whether the phase ends with the best epoch of each member. stopped: whether it ends
    now, before its last epoch, as no member has improved for long.
    """

    phase: str
    epoch: int
    losses: Tensor
    validation: dict[str, Tensor]
    measures: dict[str, Tensor]
    labels: Tensor
    rate: float
    learning_rates: dict[str, float]
    epochs_done: int
    member_epochs: float
    restart: bool  # whether it is the first of another training
    keeps_best: bool = False
    stopped: bool = False
