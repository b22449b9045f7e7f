"""What a run will cost: a few steps of every kind of phase, really taken, and what follows from them."""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from polymode.errors import NonFiniteLoss
from polymode.networks.members import Members
from polymode.posteriors import Posterior
from polymode.posteriors.base import CONSTANTS, MANIFEST
from polymode.posteriors.particles import MemberStore
from polymode.storage import finite
from polymode.training.contract.execution import Execution
from polymode.training.contract.phase import Phase, nothing
from polymode.training.keeping.checkpoint import NAMES
from polymode.training.keeping.events import EVENTS
from polymode.training.keeping.folder import MEMBERS
from polymode.training.loop.arithmetic import with_threads, without_denormals
from polymode.training.loop.material import Request
from polymode.training.loop.run import Run, peak_memory
from polymode.training.loop.settings import Computing, Keeping

TRIAL_SECONDS = 2.0  # of steps that are timed, of each kind of phase
HOOK_SECONDS = 0.5  # of hooks at the ends of a phase's epochs that are called to count what they keep
KEPT = 4  # times that a trial keeps finished members; the files of further ones are removed
REPEATED = 8  # times that they are judged at once, to find what more of them cost


@dataclass(frozen=True)
class PhaseForecast:
    """What the phases of one kind cost.

    phases: how many there are. epochs: of all of them. steps: in an epoch, of the longest data set.
    step_seconds: the mean over an epoch. end_seconds: of the end of an epoch with its validation.
    border_seconds: of beginning and ending one phase. measured: steps that were timed; 0 where the time is
    that of the kind before.
    """

    name: str
    phases: int
    epochs: int
    steps: int
    step_seconds: float
    end_seconds: float
    border_seconds: float
    measured: int

    @property
    def seconds(self) -> float:
        each = self.steps * self.step_seconds + self.end_seconds
        return self.phases * self.border_seconds + self.epochs * each


@dataclass(frozen=True)
class Judged:
    """What judging posteriors takes, and what it leaves on disk."""

    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Forecast:
    """What a run will cost.

    num_chains, num_data_sets: that train side by side. num_members: that a posterior will have; None where
    it can draw any number. epochs: of a chain, in all phases. member_epochs: of one data set.
    setup_seconds: what is done once, from reading the input over choosing how to compute (and compiling) to
    writing the posteriors. judging: as it was told, its seconds for as many members as there will be.
    memory_bytes: most that the process, or the device, held in the trial.
    checkpoint_bytes: of a checkpoint at the end of an epoch of the costliest phase; first_checkpoint_bytes,
    last_checkpoint_bytes: of those that a run begins and ends with. members_bytes: of members that are
    finished before the run is. posterior_bytes: of all posteriors. log_bytes: of events and the manifest.
    """

    execution: Execution
    num_data_sets: int
    num_chains: int
    num_members: int | None
    epochs: int
    member_epochs: float
    phases: tuple[PhaseForecast, ...]
    setup_seconds: float
    save_seconds: float
    judging: Judged
    memory_bytes: int
    first_checkpoint_bytes: int
    checkpoint_bytes: int
    last_checkpoint_bytes: int
    members_bytes: int
    posterior_bytes: int
    log_bytes: int

    @property
    def checkpoint_seconds(self) -> float:
        """From one checkpoint to the next, unless a run is told another time."""
        return Keeping().seconds_to_next(self.save_seconds)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return sum(phase.epochs * phase.steps for phase in self.phases)

    @property
    def step_seconds(self) -> float:
        """The mean over all steps."""
        return sum(p.epochs * p.steps * p.step_seconds for p in self.phases) / self.steps

    @property
    def num_saves(self) -> int:
        """Checkpoints between the first and the last."""
        return int(sum(phase.seconds for phase in self.phases) / self.checkpoint_seconds)

    @property
    def training_seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases) + self.num_saves * self.save_seconds

    @property
    def seconds(self) -> float:
        return self.setup_seconds + self.training_seconds

    @property
    def disk_running(self) -> int:
        """Most bytes on disk at once: two checkpoints, and a third or the posteriors being written."""
        between = [self.checkpoint_bytes] * min(self.num_saves, 3)
        saved = [self.first_checkpoint_bytes, *between, self.last_checkpoint_bytes]
        at_once = [sum(saved[n : n + 3]) for n in range(len(saved) - 2)]
        most = max([*at_once, sum(saved[-2:]) + self.posterior_bytes])
        return most + self.members_bytes + self.log_bytes

    @property
    def disk_finished(self) -> int:
        return self.posterior_bytes + self.log_bytes + self.judging.bytes

    def config(self) -> dict[str, Any]:
        """All of it as JSON values."""
        own = asdict(self) | {"execution": asdict(self.execution) | {"device": str(self.execution.device)}}
        derived = ("steps", "step_seconds", "training_seconds", "seconds", "disk_running", "disk_finished")
        return finite(own | {name: getattr(self, name) for name in derived})


def forecast(
    request: Request,
    computing: Computing,
    *,
    judge: Callable[[Sequence[Posterior]], Judged] | None = None,
    trial_seconds: float = TRIAL_SECONDS,
    folder: Path | None = None,
) -> Forecast:
    """Begin a run as ``fit`` does, take some steps of every kind of its phases, and say what all will cost.

    The run works on chains of its own, in a temporary folder (inside ``folder``) that is removed. A phase of
    a kind that came before is not repeated, only begun and ended. judge: called with the posteriors as the
    trial leaves them; tells what judging them takes. Memory is that of the whole process: only in a fresh one
    is it that of the run.
    """
    with TemporaryDirectory(prefix="polymode-plan-", dir=folder) as temporary, without_denormals():
        return _Trial(request, computing, Path(temporary) / "run", trial_seconds).forecast(judge)


class _CountingStore(MemberStore):
    """A store that keeps the first members it is given only; the others are written, and removed.

    counting: further members are counted alone.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.count, self.counting = 0, False
        self._others = _ForgettingStore(folder.with_name("others"))

    def append(self, members: Members) -> None:
        self.count += 1
        if len(self) < KEPT:
            super().append(members)
        elif not self.counting:
            self._others.append(members)

    def repeat(self, times: int) -> None:
        """Let the members that are there stand for more."""
        self._entries = self.entries * times


class _ForgettingStore(MemberStore):
    """A store that takes the time of writing, and removes its files."""

    def _write(self) -> None:
        super()._write()
        for file in self._files:
            file.path.unlink()
        self._entries, self._files = [], []


class _Trial:
    """The beginning of a run, and of each of its phases."""

    def __init__(self, request: Request, computing: Computing, folder: Path, seconds: float) -> None:
        self.request, self.folder, self.seconds = request, folder, seconds
        self.once = 0.0  # seconds of what a run does once
        self.checkpoints: dict[tuple[Any, ...], int] = {}  # bytes, in phases of each kind
        self.save_seconds = 0.0  # of the latest
        self.kept_in_trial, self.kept_by_steps = 0, 0.0  # members that steps finish, and in the whole run
        with self._once():
            self.run = Run(request, folder, computing, Keeping(progress=False))
        self.store = self.run.material.state.finished = _CountingStore(folder / MEMBERS)

    def forecast(self, judge: Callable[[Sequence[Posterior]], Judged] | None) -> Forecast:
        run, request = self.run, self.request
        assert run.folder is not None  # a trial has one
        with run.folder.lock():
            with self._once():
                run.begin()
            with with_threads(run.record["threads"]):
                with self._once():
                    run.folder.began(run.record, "begin")
                    first_bytes = self._save()
                manifest_bytes, began_bytes = _size(self.folder / MANIFEST), _size(self.folder / EVENTS)
                phases = tuple(self._walk())
                run.folder.events.flush()
                trial_epochs = len(run.training.history.rows)
                epoch_bytes = (_size(self.folder / EVENTS) - began_bytes) / trial_epochs
                kept = self._count_kept() + round(self.kept_by_steps)
                growth = kept / len(self.store) if len(self.store) else 1.0
                epochs = sum(phase.epochs for phase in phases)
                posteriors, seconds = self._posteriors()
                posterior_bytes = self._posterior_bytes(growth, epochs - trial_epochs)
                self.once += self.save_seconds + growth * seconds
                memory_bytes = peak_memory(request.device)
                members_bytes = round(kept * self._member_bytes())
                judging = Judged() if judge is None else self._judging(judge, posteriors, growth)
        first = posteriors[0]
        share = len(request.chains) / request.method.total_chains
        return Forecast(
            execution=run.training.problem.execution,
            num_data_sets=len(request.sources),
            num_chains=len(request.chains),
            num_members=None if first.num_members is None else round(first.num_members * growth),
            epochs=epochs,
            member_epochs=share * request.method.declared_budget(run.material.problem, request.epochs),
            phases=phases,
            setup_seconds=self.once,
            save_seconds=self.save_seconds,
            judging=judging,
            memory_bytes=memory_bytes,
            first_checkpoint_bytes=first_bytes,
            checkpoint_bytes=max(self.checkpoints.values()),
            last_checkpoint_bytes=self.checkpoints[_kind(run.training.phases[-1])],
            members_bytes=members_bytes,
            posterior_bytes=posterior_bytes,
            log_bytes=manifest_bytes + began_bytes + round(epochs * epoch_bytes),
        )

    # --- the phases -----------------------------------------------------------------------------

    def _walk(self) -> Iterator[PhaseForecast]:
        """Begin and end all phases in turn, but the same one twice, and take steps of the first of a kind."""
        found: dict[tuple[Any, ...], PhaseForecast] = {}
        for phase, number in _runs_of_one(self.run.training.phases):
            key = _kind(phase)
            if key in found:
                self.run.training.enter(phase)
                phase.leave(self.run.training.state)
                known = found[key]
                epochs = known.epochs + number * phase.epochs
                found[key] = replace(known, phases=known.phases + number, epochs=epochs)
            else:
                latest = next(reversed(found.values()), None)
                measured = self._measured(phase, latest)
                found[key] = replace(measured, phases=number, epochs=number * phase.epochs)
        yield from found.values()

    def _measured(self, phase: Phase, latest: PhaseForecast | None) -> PhaseForecast:
        training = self.run.training
        steps = training.batches.steps_per_epoch(training.batches.cohorts[0], phase.batches)
        borders = self._seconds_of(lambda: training.enter(phase))
        try:
            step_seconds, end_seconds, measured = self._times(phase, steps)
        except NonFiniteLoss:  # training itself will meet and locate it
            if latest is None:
                raise
            step_seconds, end_seconds, measured = latest.step_seconds, latest.end_seconds, 0
        self.checkpoints[_kind(phase)] = self._save()
        if phase.keep is None or training.state.best is not None:
            borders += self._seconds_of(lambda: training.leave(phase))
        return PhaseForecast(phase.name, 1, phase.epochs, steps, step_seconds, end_seconds, borders, measured)

    def _times(self, phase: Phase, steps: int) -> tuple[float, float, int]:
        """Mean seconds of a step and of an epoch's end, and how many steps were timed.

        The first and the last step of an epoch come first, cold: they import, compile and touch memory, and
        what they take longer than others is done once. Then come whole epochs, as far as the time goes.
        """
        self.kept_in_trial = 0
        cold = self._steps(phase, 0, 1)
        if steps > 1:
            cold += self._steps(phase, steps - 1, 1)
        cold_end = self._end(phase)
        if max(cold) > self.seconds:  # so long that what is done once is little beside it
            return max(cold), cold_end, len(cold)
        [last], number = self._steps(phase, steps - 1, 1), 1
        ends, epochs, began = [self._end(phase)], [], time.perf_counter()
        while not epochs or time.perf_counter() - began < self.seconds:
            times = self._steps(phase, 0, steps, self.seconds - (time.perf_counter() - began))
            whole = sum(times)
            if len(times) < steps:  # the first step makes the order of the epoch, too
                rest = times[1:] or times
                whole = times[0] + (steps - 2) * sum(rest) / len(rest) + last
            epochs.append((len(times), whole / steps))
            ends.append(self._end(phase))
            number += len(times)
        mean = sum(weight * each for weight, each in epochs) / sum(weight for weight, _ in epochs)
        end = sum(ends) / len(ends)
        self.once += max(0.0, sum(cold) - len(cold) * mean) + max(0.0, cold_end - end)
        self.kept_by_steps += self.kept_in_trial * steps * phase.epochs / (number + len(cold))
        return mean, end, number

    def _steps(self, phase: Phase, first: int, number: int, seconds: float = math.inf) -> list[float]:
        """Seconds of steps of an epoch from ``first`` on: one, and up to ``number`` while there is time."""
        training, found = self.run.training, []
        training.position.epoch = 0 if phase.keep is None else phase.keep.from_epoch - 1
        training.position.step = first
        count, began = self.store.count, self._now()
        before = began
        for _ in training.steps(phase):
            now = self._now()
            found.append(now - before)
            before = now
            if len(found) == number or now - began > seconds:
                break
        self.kept_in_trial += self.store.count - count
        return found

    def _end(self, phase: Phase) -> float:
        folder = self.run.folder
        assert folder is not None
        return self._seconds_of(lambda: folder.log_epoch(self.run.training.end_epoch(phase)))

    def _count_kept(self) -> int:
        """Members that all hooks of the run finish, found by calling them without any steps.

        A phase's ends of epochs are called as long as there is time, then counted in proportion.
        """
        training, store, kept = self.run.training, self.store, 0.0
        store.counting = True
        for phase, number in _runs_of_one(training.phases):
            count, began, calls = store.count, time.perf_counter(), 0
            training.enter(phase)
            at_borders, count = store.count - count, store.count
            while phase.end_epoch is not nothing and calls < phase.epochs:
                phase.end_epoch(training.state)
                calls += 1
                if time.perf_counter() - began > HOOK_SECONDS:
                    break
            at_ends, count = (store.count - count) * phase.epochs / max(calls, 1), store.count
            phase.leave(training.state)
            kept += number * (at_borders + at_ends + store.count - count)
        return round(kept)

    # --- what is on disk ------------------------------------------------------------------------

    def _save(self) -> int:
        """Write a checkpoint, and tell its bytes."""
        self.run.training.position.epochs_done += 1  # a file of its own
        self.save_seconds = self._seconds_of(self.run.save)
        newest = max((self.folder / "checkpoint").glob("state-*"), key=lambda path: path.name)
        return _size(newest) + _size(self.folder / "checkpoint" / NAMES[0])

    def _posteriors(self) -> tuple[list[Posterior], float]:
        """The posteriors as the trial leaves them, and the seconds of making and writing them."""
        began = self._now()
        record = self.run.record | {"history": self.run.training.history.rows}
        posteriors = [replace(each, record=record) for each in self.run.training.posteriors()]
        for index, posterior in enumerate(posteriors):
            posterior.save(self.folder / f"posterior-{index}")
        return posteriors, self._now() - began

    def _judging(
        self, judge: Callable[[Sequence[Posterior]], Judged], posteriors: Sequence[Posterior], growth: float
    ) -> Judged:
        """Of posteriors with so many times the members: a line through two sizes."""
        found = judge(posteriors)
        if growth <= 1:
            return found
        few = judge(posteriors).seconds  # once more: the first one imports, and touches memory
        self.store.repeat(REPEATED)
        many = judge(self.run.training.posteriors()).seconds
        slope = max(0.0, many - few) / (REPEATED - 1)
        return replace(found, seconds=found.seconds + slope * (growth - 1))

    def _posterior_bytes(self, growth: float, more: int) -> int:
        """Of all posteriors with so many times the members, and so many more rows of history (or fewer)."""
        rows = self.run.training.history.rows
        total = 0.0
        for folder in self.folder.glob("posterior-*"):
            members = sum(_size(path) for path in folder.glob("*.safetensors") if path.name != CONSTANTS)
            manifest = _size(folder / "posterior.json") + more * len(json.dumps(rows)) / len(rows)
            total += growth * members + _size(folder / CONSTANTS) + manifest
        return round(total)

    def _member_bytes(self) -> float:
        entries = self.store.entries  # all of them in files now
        return sum(map(_size, (self.folder / MEMBERS).glob("*"))) / len(entries) if entries else 0.0

    # --- the clock ------------------------------------------------------------------------------

    def _now(self) -> float:
        if self.request.device.type == "cuda":
            torch.cuda.synchronize(self.request.device)
        return time.perf_counter()

    def _seconds_of(self, work: Callable[[], object]) -> float:
        began = self._now()
        work()
        return self._now() - began

    @contextmanager
    def _once(self) -> Iterator[None]:
        began = self._now()
        yield
        self.once += self._now() - began


def _kind(phase: Phase) -> tuple[Any, ...]:
    """What phases have in common whose steps take the same time."""
    step = phase.step.func if isinstance(phase.step, partial) else phase.step
    name = phase.name.rstrip("0123456789 ")
    ends = (phase.keep is None, phase.measure is None, phase.end_epoch is nothing)
    return name, phase.batches, phase.cost, getattr(step, "__code__", step), *sorted(phase.optimizers), *ends


def _runs_of_one(phases: Sequence[Phase]) -> Iterator[tuple[Phase, int]]:
    """Each phase with the number of times that it stands there in a row."""
    for _, same in itertools.groupby(phases, key=id):
        found = list(same)
        yield found[0], len(found)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
