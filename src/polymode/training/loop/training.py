"""The loop: phases, epochs and steps over the state, from any position to the end."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode.errors import InputError, NonFiniteLoss
from polymode.posteriors import Posterior, merge
from polymode.schedules import Progress, Schedule
from polymode.seeds import derive_seed, global_seed
from polymode.training.contract.epoch import Epoch
from polymode.training.contract.execution import Execution
from polymode.training.contract.phase import Phase, build_optimizers
from polymode.training.contract.problem import Problem
from polymode.training.loop.history import History
from polymode.training.loop.material import Material
from polymode.training.loop.validation import keep_better, take_best, validate


@dataclass
class Position:
    """Where a run stands: the next step to take, counted from 0, and epochs done in all phases."""

    phase: int = 0
    epoch: int = 0
    step: int = 0
    epochs_done: int = 0
    entered: bool = False
    stopped: bool = False  # whether the present phase has ended before its last epoch

    @property
    def number(self) -> int:
        """A number that grows with every step."""
        return self.epochs_done * 1_000_000 + self.step

    def check(self, num_phases: int) -> None:
        """Raise a ``ValueError`` where a file has put what is no place of a run."""
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not each.type or value < 0 or self.phase > num_phases:
                raise ValueError(f"{each.name} of the position is {value!r}")


class Training:
    """The chains of a run in training; between two steps its state is whole.

    epochs_folder: for the history of a long run.
    """

    def __init__(self, material: Material, execution: Execution, epochs_folder: Path | None = None) -> None:
        self.request, self.batches, self.state = material.request, material.batches, material.state
        self.problem = replace(material.problem, execution=execution)
        self.phases = material.phases(execution)
        costs = (phase.epochs * phase.cost for phase in self.phases)
        self.passes_before = list(
            accumulate(costs, initial=0.0)
        )  # gradient passes before each phase, and all
        self.position = Position()
        self.rate = 1.0  # the schedule's factor at the latest step
        self.losses: list[Tensor] = []  # of the epoch's steps so far, [M] each
        self.history = History(epochs_folder)

    def run(self) -> Iterator[Epoch | None]:
        """Run all phases from the present position; yields None after a step, an ``Epoch`` after an epoch."""
        position = self.position
        while position.phase < len(self.phases):
            phase = self.phases[position.phase]
            if not position.entered:
                self.enter(phase)
            while position.epoch < phase.epochs and not position.stopped:
                for _ in self.steps(phase):
                    yield None
                yield self.end_epoch(phase)
            self.leave(phase)
            # Epochs that were left out count: what comes next does not depend on who trained side by side.
            position.epochs_done += phase.epochs - position.epoch
            position.phase, position.epoch = position.phase + 1, 0
            position.entered = position.stopped = False

    def enter(self, phase: Phase) -> None:
        """Begin a phase: build its optimisers and let the method do what it does first."""
        self._build_optimizers(phase)
        phase.enter(self.state)
        self.state.best = None
        self.position.entered = True

    def leave(self, phase: Phase) -> None:
        """End a phase, with its best weights where it keeps them."""
        if phase.keep is not None:
            take_best(self.state)
        phase.leave(self.state)

    def _build_optimizers(self, phase: Phase) -> None:
        problem = self.problem
        build_optimizers(self.state, phase, self.batches.cohorts, problem.exempt, problem.rates)

    def steps(self, phase: Phase) -> Iterator[None]:
        """Take the steps of the present epoch that are still to be taken."""
        position = self.position
        self.problem.network.train()
        # Chains with more minibatches in an epoch take more steps: each cohort has its own progress.
        per_epoch = [self.batches.steps_per_epoch(c, phase.batches) for c in self.batches.cohorts]
        for batches in self.batches.epoch(position.epochs_done, phase.batches, position.step):
            self._set_factors(phase, per_epoch)
            try:
                losses = phase.step(self.state, batches, phase.objective)
            except NonFiniteLoss as error:
                raise self._located(error, phase) from None
            self.losses.append(losses)
            position.step += 1
            yield

    def _set_factors(self, phase: Phase, per_epoch: Sequence[int]) -> None:
        """Set the learning rates and the weight of the penalty, as the schedules say for this step."""
        at, progress = self.position, []
        for each in per_epoch:  # steps that a cohort takes
            step = min(at.epoch * each + at.step, phase.epochs * each - 1)
            progress.append(Progress(step, phase.epochs * each, phase.epochs))
        rates = _factors(phase.schedule, progress, "learning rate")
        self.rate = rates[0]
        for optimizer in self.state.optimizers.values():
            optimizer.set_rates(rates)
        self.state.penalty_factors = None
        if phase.penalty_schedule is not None:
            factors = _factors(phase.penalty_schedule, progress, "penalty")
            sizes = [cohort.stop - cohort.start for cohort in self.batches.cohorts]
            of_cohorts = torch.tensor(factors, dtype=torch.float64)
            self.state.penalty_factors = of_cohorts.repeat_interleave(torch.tensor(sizes))

    def end_epoch(self, phase: Phase) -> Epoch:
        """End the present epoch: the method's hook, validation, a row of the history."""
        position, state = self.position, self.state
        position.epoch, position.step = position.epoch + 1, 0
        position.epochs_done += 1
        phase.end_epoch(state)
        scores: dict[str, Tensor] = {}
        if self.request.validation is not None:
            seed = derive_seed(self.request.first_seed, "validation", position.epochs_done)
            with global_seed(seed) if self.problem.network.draws_globally else nullcontext():
                scores = validate(state, phase.objective, self.batches, self.request.validation)
            scores = self.request.ranks.first(scores)  # which epoch is best may hang on a last bit
            if phase.keep is not None and phase.keep.includes(position.epoch):
                patience = phase.keep.epochs_of_patience(phase.epochs)
                position.stopped = keep_better(state, scores[phase.keep.criterion], patience)
        measures = {} if phase.measure is None else _checked(phase.measure(state), phase, state)
        losses = torch.stack(self.losses).nanmean(0).cpu()
        self.losses.clear()
        epoch = Epoch(
            phase.name,
            position.epoch,
            losses,
            scores,
            measures,
            state.members.labels,
            self.rate,
            {name: optimizer.spec.lr * self.rate for name, optimizer in state.optimizers.items()},
            position.epochs_done,
            sum(map(self.spent, range(len(self.request.sources)))) / len(self.request.sources),
            phase.restarts and position.epoch == 1,
            phase.keep is not None,
            position.stopped,
        )
        self.history.add(epoch)
        return epoch

    # --- how far it is, and what there is so far ------------------------------------------------

    def passes_done(self) -> float:
        """Gradient passes of a chain so far, with the fraction of the present epoch; skipped ones count."""
        position = self.position
        done = self.passes_before[position.phase]
        if position.phase == len(self.phases):
            return done
        phase, fraction = self.phases[position.phase], 0.0
        if position.step:
            longest = self.batches.steps_per_epoch(self.batches.cohorts[0], phase.batches)
            fraction = min(1.0, position.step / longest)
        if position.stopped:
            return done + phase.epochs * phase.cost
        return done + (position.epoch + fraction) * phase.cost

    def spent(self, data_set: int) -> float:
        """Member-epochs that a data set has cost so far."""
        return sum(
            int(self.state.gradient_examples[index]) / group.num_examples
            for index, group in enumerate(self.batches.groups)
            if group.data_set == data_set
        )

    def posteriors(self) -> list[Posterior]:
        """One posterior a data set, in the order the data sets were given."""
        return [merge(chains) for chains in self._of_chains()]

    def findings(self, data_set: int) -> list[dict[str, Any]]:
        """What each chain on a data set says about itself."""
        found = [
            self.request.method.findings(self._of_chain(index), self.state.chain(index))
            for index, group in enumerate(self.batches.groups)
            if group.data_set == data_set
        ]
        return found if any(found) else []

    def _of_chain(self, group: int) -> Problem:
        return replace(self.problem, chain=self.batches.groups[group].chain, group=group)

    def _of_chains(self) -> list[list[Posterior]]:
        """The posterior of every chain on each data set."""
        self.problem.network.module.eval()
        network = replace(self.problem.network, backend=self.problem.execution.prediction_backend)
        chains: list[list[Posterior]] = [[] for _ in self.request.sources]
        for index, group in enumerate(self.batches.groups):
            problem = replace(self._of_chain(index), network=network)
            chains[group.data_set].append(self.request.method.posterior(problem, self.state.chain(index)))
        return chains

    def _located(self, error: NonFiniteLoss, phase: Phase) -> NonFiniteLoss:
        # A method that finishes one member after another may have none yet, in some chains or in all.
        begun = [[chain for chain in chains if chain.num_members != 0] for chains in self._of_chains()]
        kept = "the weights before this step are in this error's `posterior`"
        if not any(begun):
            kept = "no member was finished, so this error's `posterior` is None"
        located = NonFiniteLoss(
            f"In phase {phase.name!r}, epoch {self.position.epoch + 1}, step {self.position.step + 1}: "
            f"{error}. Training stopped; {kept}, and the last checkpoint is kept. Lower the learning rate, "
            "clip gradients (Optimizer(clip_norm=...)) or check the scale of the inputs."
        )
        if any(begun):
            posteriors = [merge(chains) if chains else None for chains in begun]
            located.posterior = posteriors if len(posteriors) > 1 else posteriors[0]
        return located

    # --- checkpoints ----------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """All that a checkpoint needs to know of the training."""
        return {
            "position": asdict(self.position),
            "state": self.state.snapshot(),
            "losses": torch.stack(self.losses) if self.losses else None,
            "rate": self.rate,
            "history": self.history.content(),
        }

    def take_up(self, content: dict[str, Any]) -> None:
        """Go on from what ``content`` gave; where that does not suffice, it may be half taken up."""
        self.position = Position(**content["position"])
        self.position.check(len(self.phases))
        self.state.optimizers = {}
        if self.position.entered:
            phase = self.phases[self.position.phase]
            self._build_optimizers(phase)
        self.state.restore(content["state"])
        losses, self.rate = content["losses"], float(content["rate"])
        self.losses = [] if losses is None else list(losses.to(self.problem.execution.device))
        self.history = History.of_content(content["history"], self.history.folder)


def _factors(schedule: Schedule, progress: Sequence[Progress], what: str) -> list[float]:
    """The factor that a schedule gives for each cohort."""
    factors = [schedule(each) for each in progress]
    for factor, each in zip(factors, progress, strict=True):
        if not isinstance(factor, int | float) or not math.isfinite(factor):
            raise InputError(
                f"The schedule {schedule} gave {factor!r} at step {each.step}: it must give a finite number "
                f"that multiplies the {what}."
            )
    return factors


def _checked(measures: Any, phase: Phase, state: Any) -> dict[str, Tensor]:
    """What a method measures of its members, a number each."""
    found = {name: torch.as_tensor(value).detach().cpu() for name, value in measures.items()}
    for name, value in found.items():
        if value.shape != (state.members.num_members,):
            raise InputError(
                f"The measure {name!r} of phase {phase.name!r} is {list(value.shape)}: it must be a number "
                f"for each of {state.members.num_members} members."
            )
    return found
