"""The path of a training: its networks, epoch by epoch.

Fort et al., "Deep Ensembles: A Loss Landscape Perspective", 2019, §4.1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from polymode.errors import InputError, require, require_whole
from polymode.methods.single import Single
from polymode.options import option
from polymode.posteriors import Posterior, merge
from polymode.posteriors.particles import BlockPosterior, MemberStore, rows_of
from polymode.training.contract import (
    Batch,
    Hook,
    Method,
    Objective,
    Phase,
    Problem,
    State,
    Step,
    Wrapper,
    epochs_before,
)


@dataclass(frozen=True)
class Trajectory(Wrapper):
    """θ_1, θ_2, …: the networks that another method has in training, as members in their order.

    ``State.common["trajectory"]`` counts "epochs" and "steps" of each chain. Members that ``of`` itself
    finishes (one after another, or draws) are not kept: each of them is the end of a stretch of the path.
    """

    name: ClassVar[str] = "trajectory"
    summary: ClassVar[str] = "the networks that another method passes through in training"
    cost: ClassVar[str] = "that of `of`; predicts with a pass for every checkpoint"
    best_epoch: ClassVar[str] = "none: every checkpoint is kept"
    kept: ClassVar[str] = "for each checkpoint"

    of: Method = option(Single(), "whose training is followed: any method")
    every: int = option(1, "epochs from one checkpoint to the next, counted from the end")
    every_steps: int | None = option(
        None, "steps from one checkpoint to the next, counted from the beginning, instead of epochs"
    )
    start: float = option(
        0, "epochs before the first checkpoint may be kept: a whole number, or a fraction of all"
    )
    initial: bool = option(False, "keep the weights before the first step, too")

    @property
    def can_keep_best(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not _follows(self.of), "A trajectory of a trajectory counts every epoch twice: take one.")
        require_whole("every", self.every)
        if self.every_steps is not None:
            require_whole("every_steps", self.every_steps)
            require(self.every == 1, "every and every_steps are two ways to say one thing: give one of them.")
        epochs_before("start", self.start, None)

    @property
    def chain_members(self) -> None:
        return None

    @property
    def chain_passes(self) -> None:
        return None

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        state = self.of.init(problem, generator)
        state.common["trajectory"] = {name: torch.zeros(1, dtype=torch.int64) for name in ("epochs", "steps")}
        return state

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        phases = list(self.of.phases(problem, epochs))
        trained = [index for index, phase in enumerate(phases) if phase.optimizers]
        total = sum(phases[index].epochs for index in trained)
        start = epochs_before("start", self.start, epochs)
        if self.every_steps is not None:
            self._check_steps(problem, [phases[index] for index in trained])

        def checkpoint_after_epoch(state: State) -> None:
            done = int(state.common["trajectory"]["epochs"].add_(1)[0])
            if self.every_steps is None and done > start and (total - done) % self.every == 0:
                state.finished.append(state.members)

        def checkpoint_after_step(state: State, *, first_alone: bool) -> None:
            clock = state.common["trajectory"]
            clock["steps"].add_(1)
            if self.every_steps is None:  # nothing is read from a device at every step
                return
            if int(clock["epochs"][0]) >= start and int(clock["steps"][0]) % self.every_steps == 0:
                if first_alone:
                    state.copy_first_members()
                state.finished.append(state.members)

        before = 0
        for index, phase in enumerate(phases):
            # A phase that trains the first member alone gives its weights to the others after every epoch.
            first_alone = phase.end_epoch is State.copy_first_members
            phases[index] = phase = _unfinished(phase)
            if index in trained:
                phases[index] = replace(
                    phase,
                    enter=_both(phase.enter, partial(_count_from, epochs=before)),
                    step=_with(phase.step, partial(checkpoint_after_step, first_alone=first_alone)),
                    end_epoch=_both(phase.end_epoch, checkpoint_after_epoch),
                )
                before += phase.epochs
        if self.initial:
            first = phases[0]
            phases[0] = replace(
                first, enter=_both(first.enter, lambda state: state.finished.append(state.members))
            )
        return phases

    def _check_steps(self, problem: Problem, trained: Sequence[Phase]) -> None:
        """Raise where the steps of all chains are not one count that only goes forward, or too few."""
        steps = sum(phase.epochs for phase in trained) * (problem.num_minibatches or math.inf)
        if self.every_steps is not None and self.every_steps > steps:
            raise InputError(
                f"every_steps={self.every_steps} is more than the {steps:g} steps of this training: no "
                "checkpoint would be kept."
            )
        sizes = problem.observations.unique().tolist()
        if len(sizes) > 1:
            raise InputError(
                f"every_steps={self.every_steps} counts the steps of all data sets together, and these have "
                f"{sizes} observations, hence epochs of different lengths: count epochs (every=...), or fit "
                "them one by one."
            )
        if any(phase.keep is not None for phase in trained[:-1]):
            raise InputError(
                f"keep='best' of {self.of.name} takes its trainings back to an earlier step, and every_steps="
                f"{self.every_steps} counts them on: count epochs (every=...), or take keep='last'."
            )

    def posterior(self, problem: Problem, state: State) -> Posterior:
        alone = replace(state, finished=MemberStore())
        latest, blocks = self.of.posterior(problem, alone), state.finished.blocks
        if not blocks:  # training was cut short, or has not begun
            return latest
        if isinstance(latest, BlockPosterior) and _are_of_one_form(latest, state):
            return replace(latest, blocks=blocks)  # which stay where they are, in files or in memory
        checkpoints = (rows_of(block, 0, block.num_members) for block in blocks)
        return merge([self.of.posterior(problem, replace(alone, members=each)) for each in checkpoints])

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        each, epochs = self.of.for_budget(member_epochs)
        return replace(self, of=each), epochs


def _follows(method: Method) -> bool:
    """Whether a method, or one that it is made of, is a trajectory itself."""
    return isinstance(method, Trajectory) or (isinstance(method, Wrapper) and _follows(method.of))


def _are_of_one_form(posterior: BlockPosterior, state: State) -> bool:
    """Whether a posterior's members hold the tensors that members in training have."""

    def form(members) -> tuple:
        return set(members.stacked), set(members.shared), members.num_members

    return all(form(rows_of(b, 0, b.num_members)) == form(state.members) for b in posterior.blocks)


def _unfinished(phase: Phase) -> Phase:
    """The phase, whose own finished members are forgotten."""

    def quietly(hook: Hook) -> Hook:
        return lambda state: hook(replace(state, finished=MemberStore()))

    def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        return phase.step(replace(state, finished=MemberStore()), batches, objective)

    return replace(
        phase,
        step=step,
        enter=quietly(phase.enter),
        end_epoch=quietly(phase.end_epoch),
        leave=quietly(phase.leave),
    )


def _count_from(state: State, epochs: int) -> None:
    """Set the clock at the beginning of a phase; the best epoch of the phase before has set it back."""
    state.common["trajectory"]["epochs"].fill_(epochs)


def _both(first: Hook, second: Hook) -> Hook:
    def hook(state: State) -> None:
        first(state)
        second(state)

    return hook


def _with(step: Step, after: Callable[[State], None]) -> Step:
    def both(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        losses = step(state, batches, objective)
        after(state)
        return losses

    return both
