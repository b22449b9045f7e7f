"""A stretch of training with one rule: its steps, optimisers, schedules and hooks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from polymode.errors import InputError, require
from polymode.networks.members import Tensors
from polymode.schedules import Constant, Schedule
from polymode.training.contract.batch import Batch
from polymode.training.contract.objective import Objective
from polymode.training.contract.optimizers import MemberOptimizer, Optimizer
from polymode.training.contract.state import State


@dataclass(frozen=True)
class KeepBest:
    """Keep all tensors of each member as they were in the epoch with the lowest validation criterion.

    criterion: "nll", "error" (misclassification, or root mean square), or "objective" (NLL plus
    the penalty divided by N). from_epoch, to_epoch: the window of the phase's epochs, counted from 1,
    in which weights may be kept; the phase's end closes it unless said otherwise.
    What belongs to a chain follows the mean of its members, and members that share weights are judged
    together by it.
    patience: a member is left as it was at its best when it has not improved for so long, a whole number of
    epochs or a fraction of the phase's; when that is so of all members, the phase ends. It counts from the
    window's beginning; what a member has become at the end of a phase does not depend on how long others go
    on. None: no phase ends early.
    """

    criterion: Literal["nll", "error", "objective"] = "nll"
    from_epoch: int = 1
    to_epoch: int | None = None
    patience: float | None = None

    def includes(self, epoch: int) -> bool:
        return self.from_epoch <= epoch and (self.to_epoch is None or epoch <= self.to_epoch)

    def epochs_of_patience(self, epochs: int) -> float:
        """The patience in a phase of so many epochs; infinite where there is none."""
        if self.patience is None:
            return math.inf
        return max(1, math.floor(self.patience * epochs)) if self.patience < 1 else self.patience

    def __post_init__(self) -> None:
        if self.patience is not None:
            epochs_before("patience", self.patience, None)
            require(self.patience > 0, f"KeepBest(patience=...) must be positive, got {self.patience!r}.")
        if self.from_epoch < 1 or (self.to_epoch is not None and self.to_epoch < self.from_epoch):
            raise InputError(
                f"KeepBest needs 1 <= from_epoch <= to_epoch, got {self.from_epoch} and {self.to_epoch}."
            )
        if self.criterion not in ("nll", "error", "objective"):
            raise InputError(
                f"KeepBest criterion {self.criterion!r}: allowed are 'nll', 'error', 'objective'."
            )


Keep = Literal["last", "best"] | KeepBest


def keep_rule(keep: Keep) -> KeepBest | None:
    """Read ``keep="last" | "best"`` or a ``KeepBest``."""
    if isinstance(keep, KeepBest):
        return keep
    if keep not in ("last", "best"):
        raise InputError(f"keep={keep!r}: allowed are 'last', 'best' or a KeepBest.")
    return KeepBest() if keep == "best" else None


def keep_throughout(keep: Keep) -> KeepBest | None:
    """The rule for phases before the one that ``keep`` is about: the same, unless it names a window."""
    rule = keep_rule(keep)
    return rule if rule is not None and rule.from_epoch == 1 and rule.to_epoch is None else None


def epochs_before(name: str, value: float, epochs: int | None) -> int:
    """Read when something begins: a whole number of epochs before it, or a fraction of all epochs.

    epochs: of the whole training; None only checks the value.
    """
    fraction = isinstance(value, float) and value < 1
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value:
        raise InputError(f"{name} must be a number of epochs or a fraction of all below 1, got {value!r}.")
    require(
        fraction or float(value).is_integer(), f"{name}={value!r}: give whole epochs, or a fraction below 1."
    )
    if epochs is None:
        return 0
    if fraction:
        return min(math.floor(value * epochs + 1e-9), epochs - 1)
    if value >= epochs:
        raise InputError(
            f"{name}={value} is not before the end of {epochs} epochs: begin earlier, or train longer."
        )
    return int(value)


Step = Callable[[State, Sequence[Batch], Objective], Tensor]
Hook = Callable[[State], None]
Measure = Callable[[State], Mapping[str, Tensor]]


def descend(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
    """One gradient step of every member on its own batch: θ_m ← θ_m − step(∇L_m). Returns losses [M]."""
    [batch] = batches
    optimizer = state.optimizers["all"]
    if optimizer.needs_closure:
        return _descend_by_closure(state, batch, objective)
    losses, gradients = objective.losses_and_gradients(state, batch)
    optimizer.step(gradients.stacked, batch.cohorts)
    return losses


def _descend_by_closure(state: State, batch: Batch, objective: Objective) -> Tensor:
    """For optimisers that evaluate the loss themselves, as often as they like."""
    losses = torch.full((state.members.num_members,), torch.nan, device=objective.execution.device)

    def evaluate(row: int) -> tuple[Tensor, Tensors]:
        group, member = divmod(row, state.members.group_size)
        each, gradients = objective.losses_and_gradients(state, batch.only(group), member)
        losses[row] = each[row].detach()
        return each[row], {name: tensor[row] for name, tensor in gradients.stacked.items()}

    state.optimizers["all"].step_with_closure(evaluate, batch.cohorts)
    return losses


def descend_together(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
    """One step of all optimisers on the mean loss of each chain's members, as if a batch were tiled for them.

    Gradients are those of the sum over members: what they share gets the mean of theirs, what is a member's
    own the share of its own.
    """
    [batch] = batches
    losses, gradients = objective.losses_and_gradients(state, batch)
    share = 1 / state.members.group_size
    mean = {name: share * gradient for name, gradient in (gradients.shared | gradients.stacked).items()}
    for optimizer in state.optimizers.values():
        optimizer.step(mean, batch.cohorts)
    return losses


def nothing(state: State) -> None:
    """The hook that does nothing."""


@dataclass(frozen=True)
class Over:
    """An optimiser over some weights: all trainable ones, or those named.

    The names are all stacked or all shared weights. separate_members: members of a chain step one at a
    time (late-phase rounds), each with its own moments and step count.
    """

    optimizer: Optimizer
    names: frozenset[str] | None = None
    separate_members: bool = False


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one rule.

    step: what happens with each round of ``batches`` minibatches ("full": the whole data set).
    optimizers: built when the phase begins; those named in ``carry`` go on as they were.
    schedule: multiplies the learning rates. penalty_schedule: multiplies the penalty; None leaves it as it
    is. cost: member-epochs that a chain spends in an epoch. measure: what to show of each member after every
    epoch, {name: [M]}. restarts: whether the phase begins another training, for who draws the loss. enter,
    end_epoch, leave: hooks of the method at the phase's borders.
    """

    name: str
    epochs: int
    objective: Objective
    step: Step = descend
    optimizers: Mapping[str, Over] = field(default_factory=dict)
    carry: frozenset[str] = frozenset()
    schedule: Schedule = Constant()
    penalty_schedule: Schedule | None = None
    batches: int | Literal["full"] = 1
    cost: float = 1.0
    keep: KeepBest | None = None
    measure: Measure | None = None
    restarts: bool = False
    enter: Hook = nothing
    end_epoch: Hook = nothing
    leave: Hook = nothing


def build_optimizers(
    state: State,
    phase: Phase,
    cohorts: Sequence[slice],
    exempt: frozenset[str],
    rates: Mapping[str, float] | None = None,
) -> None:
    """Build the optimisers a phase begins with; cohorts are slices of chains that step together.

    exempt, rates: as ``MemberOptimizer`` has them.
    """
    members = state.members
    state.optimizers = {n: o for n, o in state.optimizers.items() if n in phase.carry}
    for name, over in phase.optimizers.items():
        if name in state.optimizers:
            continue
        wanted = phase.objective.trainable if over.names is None else over.names
        tensors = {n: t for n, t in members.stacked.items() if n in wanted}
        if tensors and not wanted.isdisjoint(members.shared):
            raise InputError(
                f"The optimiser {name!r} of phase {phase.name!r} is over stacked and shared weights at once: "
                "name one kind in Over(names=...) and give the other an optimiser of its own."
            )
        rows = [members.rows(cohort) for cohort in cohorts]
        group_size = members.group_size if over.separate_members else None
        if not tensors:
            tensors = {n: t for n, t in members.shared.items() if n in wanted}
            rows, group_size = list(cohorts), None
        state.optimizers[name] = MemberOptimizer(over.optimizer, tensors, exempt, rows, group_size, rates)
