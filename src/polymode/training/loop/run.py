"""A run: phases, epochs and steps over the state, from any position to the end."""

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode.errors import InputError, NonFiniteLoss
from polymode.posteriors import Posterior, load_posterior, merge
from polymode.schedules import Progress
from polymode.seeds import derive_seed, global_seed
from polymode.storage import well_formed
from polymode.training.contract.epoch import Epoch
from polymode.training.contract.method import Phase, build_optimizers
from polymode.training.keeping.folder import RunFolder, versions
from polymode.training.keeping.interruption import Interruption
from polymode.training.keeping.progress import Reporter
from polymode.training.loop.arithmetic import with_threads, without_denormals
from polymode.training.loop.backends import AnyBackend, choose_execution
from polymode.training.loop.setup import Job, set_up
from polymode.training.loop.validation import keep_better, take_best, validate


@dataclass
class Position:
    """Where a run stands: the next step to take, counted from 0, and epochs done in all phases."""

    phase: int = 0
    epoch: int = 0
    step: int = 0
    epochs_done: int = 0
    entered: bool = False

    @property
    def number(self) -> int:
        """A number that grows with every step."""
        return self.epochs_done * 1_000_000 + self.step


class Run:
    """One run of a job; ``execute`` takes it from its newest checkpoint, or the start, to the end."""

    def __init__(
        self, job: Job, folder: Path | None, title: str = "", options: Mapping[str, Any] | None = None
    ) -> None:
        self.job, self.folder = job, folder
        self.title = title or job.method.name
        self.options = options or {}
        self.began = time.perf_counter()
        made = set_up(job, folder)
        self.made, self.problem, self.batches = made, made.problem, made.batches
        self.phases, self.state = made.phases, made.state
        self.position = Position()
        self.rate = 1.0  # the schedule's factor at the latest step
        self.loss = math.nan  # mean over members of the latest epoch's losses
        self.losses: list[Tensor] = []  # of the epoch's steps so far, [M] each
        self.history: list[dict[str, Any]] = []
        self.record: dict[str, Any] = {}
        self.seconds = self.earlier = 0.0  # of training, in all sessions and in those before this one
        self.num_epochs = sum(phase.epochs * phase.cost for phase in self.phases)
        self.signature = {} if folder is None else job.signature(made.problem.network, made.owned)

    def execute(
        self,
        backend: AnyBackend,
        observer: Callable[[Epoch], None] | None,
        *,
        threads: int | None,
        reporter: Reporter,
        checkpoint_seconds: float,
    ) -> list[Posterior]:
        """Train from wherever the run stands to its end; with a folder, nothing done is ever lost."""
        if self.folder is None:
            with without_denormals():
                return self._run(None, backend, threads, observer, reporter, checkpoint_seconds)
        folder = RunFolder(self.folder, self.signature, self.options)
        with folder.lock(), without_denormals():
            if not folder.is_finished:
                return self._run(folder, backend, threads, observer, reporter, checkpoint_seconds)
            reporter.skip(self.title)
            stored = (load_posterior(path, self.job.model) for path in folder.posteriors())
            return [posterior.to(self.job.device) for posterior in stored]

    def _run(
        self,
        folder: RunFolder | None,
        backend: AnyBackend,
        threads: int | None,
        observer: Callable[[Epoch], None] | None,
        reporter: Reporter,
        checkpoint_seconds: float,
    ) -> list[Posterior]:
        if folder is not None:
            folder.check_processes(1)
        resumed = folder is not None and folder.checkpoints.exist
        if folder is not None and resumed:
            folder.checkpoints.load(self._restore)
            self._go_on_with(threads)
        else:
            self._choose_execution(backend, threads)
        with with_threads(self.record["threads"]):
            if folder is not None and resumed:
                folder.began(self.record, "resume", epochs_done=self.position.epochs_done)
            elif folder is not None:
                folder.began(self.record, "begin")
                folder.save(self.position.number, self._content())
            return self._to_the_end(folder, observer, reporter, checkpoint_seconds)

    def _to_the_end(
        self,
        folder: RunFolder | None,
        observer: Callable[[Epoch], None] | None,
        reporter: Reporter,
        checkpoint_seconds: float,
    ) -> list[Posterior]:
        reporter.begin(self.title, round(self.num_epochs), self._passes_done())
        try:
            # What is asked for during the ending waits until everything is written.
            with Interruption() if folder is not None else nullcontext() as interruption:
                self._train_on(folder, observer, reporter, interruption, checkpoint_seconds)
                self.record["total_seconds"] = round(self.earlier + time.perf_counter() - self.began, 3)
                posteriors = self.posteriors()
                if folder is not None:
                    folder.save(self.position.number, self._content())
                    posteriors = folder.finish(posteriors)
        except BaseException:
            reporter.close()
            raise
        reporter.end(self.title)
        return posteriors

    def _train_on(
        self,
        folder: RunFolder | None,
        observer: Callable[[Epoch], None] | None,
        reporter: Reporter,
        interruption: Interruption | None,
        checkpoint_seconds: float,
    ) -> None:
        self.earlier, began, saved_at = self.seconds, time.perf_counter(), time.monotonic()
        for epoch in self._train():
            self.seconds = self.earlier + time.perf_counter() - began
            try:
                self._report(reporter)
                if epoch is not None:
                    if folder is not None:
                        folder.log_epoch(epoch)
                    if observer is not None:
                        observer(epoch)
                if interruption is not None:
                    interruption.check()
            except BaseException:
                if folder is not None:  # between steps the state is whole: nothing is lost
                    folder.save(self.position.number, self._content())
                raise
            if folder is not None and time.monotonic() - saved_at >= checkpoint_seconds:
                folder.save(self.position.number, self._content())
                saved_at = time.monotonic()

    def _choose_execution(self, backend: AnyBackend, threads: int | None) -> None:
        began = time.perf_counter()
        choice = choose_execution(self.made, self.job.method, self.job.sources[0], backend, threads)
        self.problem.execution.backend = choice.training
        self.problem.execution.prediction_backend = choice.prediction
        self.record |= {
            "backend": choice.training,
            "prediction_backend": choice.prediction,
            "threads": choice.threads,
            "step_seconds": choice.step_seconds,
            "choice_seconds": round(time.perf_counter() - began, 3),
        }

    # --- training -----------------------------------------------------------------------------

    def _train(self) -> Iterator[Epoch | None]:
        """Run all phases from the present position; yields None after a step, an ``Epoch`` after an epoch."""
        position = self.position
        while position.phase < len(self.phases):
            phase = self.phases[position.phase]
            if not position.entered:
                self._build_optimizers(phase)
                phase.enter(self.state)
                self.state.best = None
                position.entered = True
            while position.epoch < phase.epochs:
                for _ in self._steps(phase):
                    yield None
                yield self._end_epoch(phase)
            if phase.keep is not None:
                take_best(self.state)
            phase.leave(self.state)
            position.phase, position.epoch, position.entered = position.phase + 1, 0, False

    def _build_optimizers(self, phase: Phase) -> None:
        build_optimizers(self.state, phase, self.batches.cohorts, self.problem.exempt)

    def _steps(self, phase: Phase) -> Iterator[None]:
        """Take the steps of the present epoch that are still to be taken."""
        position = self.position
        self.problem.network.train()
        rounds = self.batches.epoch(position.epochs_done, phase.batches, position.step)
        per_epoch = [self.batches.steps_per_epoch(c, phase.batches) for c in self.batches.cohorts]
        for batches in rounds:
            factors = [self._rate_factor(phase, steps) for steps in per_epoch]
            for optimizer in self.state.optimizers.values():
                optimizer.set_rates(factors)
            self.rate = factors[0]
            arranged = [self.made.arranged(batch) for batch in batches]
            try:
                self.losses.append(phase.step(self.state, arranged, phase.objective))
            except NonFiniteLoss as error:
                raise self._located(error, phase) from None
            position.step += 1
            yield

    def _rate_factor(self, phase: Phase, steps_per_epoch: int) -> float:
        """The schedule's factor for chains with so many steps an epoch."""
        num_steps = phase.epochs * steps_per_epoch
        step = min(self.position.epoch * steps_per_epoch + self.position.step, num_steps - 1)
        factor = phase.schedule(Progress(step, num_steps, phase.epochs))
        if not isinstance(factor, int | float) or not math.isfinite(factor):
            raise InputError(
                f"The schedule {phase.schedule} gave {factor!r} at step {step}: it must give a finite number "
                "that multiplies the learning rate."
            )
        return factor

    def _end_epoch(self, phase: Phase) -> Epoch:
        position = self.position
        position.epoch, position.step = position.epoch + 1, 0
        position.epochs_done += 1
        phase.end_epoch(self.state)
        scores: dict[str, Tensor] = {}
        if self.job.validation is not None:
            random = self.problem.execution.uses_global_random
            seed = derive_seed(self.job.seeds[0], "validation", position.epochs_done)
            with global_seed(seed) if random else nullcontext():
                scores = validate(self.state, phase.objective, self.batches, self.job.validation)
            if phase.keep is not None and phase.keep.includes(position.epoch):
                keep_better(self.state, scores[phase.keep.criterion])
        losses = torch.stack(self.losses).nanmean(0).cpu()
        self.losses.clear()
        self.history.append(
            {"phase": phase.name, "epoch": position.epoch, "loss": losses.mean().item()}
            | {f"validation_{name}": score.mean().item() for name, score in scores.items()}
        )
        self.loss = losses.nanmean().item()
        return Epoch(
            phase.name,
            position.epoch,
            losses,
            scores,
            self.state.members.labels,
            self.rate,
            {name: optimizer.spec.lr * self.rate for name, optimizer in self.state.optimizers.items()},
            position.epochs_done,
            sum(self._spent(d) for d in range(len(self.job.sources))) / len(self.job.sources),
        )

    def _report(self, reporter: Reporter) -> None:
        """Tell how far the run is: epochs with the fraction of the present one, members, the latest loss."""
        count = self.state.members.num_members
        detail = f"{count} member{'s' if count > 1 else ''}"
        if math.isfinite(self.loss):
            detail += f", loss {self.loss:.4g}"
        reporter.advance(self._passes_done(), detail)

    def _passes_done(self) -> float:
        """Gradient passes of a chain so far, with the fraction of the present epoch."""
        position = self.position
        done = sum(phase.epochs * phase.cost for phase in self.phases[: position.phase])
        if position.phase == len(self.phases):
            return done
        phase, fraction = self.phases[position.phase], 0.0
        if position.step:
            longest = self.batches.steps_per_epoch(self.batches.cohorts[0], phase.batches)
            fraction = min(1.0, position.step / longest)
        return done + (position.epoch + fraction) * phase.cost

    def _located(self, error: NonFiniteLoss, phase: Phase) -> NonFiniteLoss:
        # A method that finishes one member after another may have none yet, in some chains or in all.
        begun = [[chain for chain in chains if chain.num_members != 0] for chains in self._of_chains()]
        posteriors = [self._merged(d, chains) if chains else None for d, chains in enumerate(begun)]
        kept = "the weights before this step are in this error's `posterior`"
        if not any(begun):
            kept = "no member was finished, so this error's `posterior` is None"
        located = NonFiniteLoss(
            f"In phase {phase.name!r}, epoch {self.position.epoch + 1}, step {self.position.step + 1}: "
            f"{error}. Training stopped; {kept}, and the last checkpoint is kept. Lower the learning rate, "
            "clip gradients (Optimizer(clip_norm=...)) or check the scale of the inputs."
        )
        if any(begun):
            located.posterior = posteriors if len(posteriors) > 1 else posteriors[0]
        return located

    # --- ending, saving, resuming ---------------------------------------------------------------

    def posteriors(self) -> list[Posterior]:
        """One posterior a data set, in the order the data sets were given."""
        return [self._merged(data_set, chains) for data_set, chains in enumerate(self._of_chains())]

    def _of_chains(self) -> list[list[Posterior]]:
        """The posterior of every chain on each data set."""
        network = self.problem.network
        network.module.eval()
        problem = replace(self.problem, network=replace(network, backend=self.record["prediction_backend"]))
        chains: list[list[Posterior]] = [[] for _ in self.job.sources]
        for index, group in enumerate(self.batches.groups):
            of_chain = replace(problem, chain=group.chain, group=index)
            posterior = self.job.method.posterior(of_chain, self.state.chain(index))
            chains[group.data_set].append(posterior)
        return chains

    def _merged(self, data_set: int, chains: list[Posterior]) -> Posterior:
        return replace(merge(chains), record=self._record_of(data_set))

    def _spent(self, data_set: int) -> float:
        """Member-epochs that a data set has cost so far."""
        return sum(
            int(self.state.gradient_examples[index]) / group.num_examples
            for index, group in enumerate(self.batches.groups)
            if group.data_set == data_set
        )

    def _record_of(self, data_set: int) -> dict[str, Any]:
        return self.record | {
            "method": self.job.method.config(),
            "epochs": self.job.epochs,
            "seed": self.job.seeds[data_set],
            "num_examples": self.job.sources[data_set].num_examples,
            "member_epochs": self._spent(data_set),
            "training_seconds": round(self.seconds, 3),
            "peak_memory_mb": round(peak_memory(self.job.device) / 2**20),
            "precision": self.job.precision,
            "device": str(self.job.device),
            "versions": versions(),
            "findings": self._findings(data_set),
            "history": self.history,
        }

    def _findings(self, data_set: int) -> list[dict[str, Any]]:
        """What each chain on a data set says about itself."""
        found = [
            self.job.method.findings(
                replace(self.problem, chain=group.chain, group=index), self.state.chain(index)
            )
            for index, group in enumerate(self.batches.groups)
            if group.data_set == data_set
        ]
        return found if any(found) else []

    def _content(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        return {
            "position": asdict(self.position),
            "state": self.state.snapshot(),
            "losses": torch.stack(self.losses) if self.losses else None,
            "rate": self.rate,
            "record": self.record,
            "history": _columns(self.history),
            "seconds": self.seconds,
            "threads": self.record["threads"],
        }

    def _restore(self, content: dict[str, Any]) -> None:
        """Take up the content of a checkpoint; one that does not suffice may be half restored."""
        with well_formed("The checkpoint"):
            self._take_up(content)

    def _take_up(self, content: dict[str, Any]) -> None:
        self.position = Position(**content["position"])
        self.state.optimizers = {}
        if self.position.entered:
            self._build_optimizers(self.phases[self.position.phase])
        self.state.restore(content["state"])
        losses, self.rate = content["losses"], content["rate"]
        self.losses = [] if losses is None else list(losses.to(self.job.device))
        history = content["history"]
        self.record, self.history = (
            content["record"],
            _rows(history) if isinstance(history, dict) else history,
        )
        self.seconds = content["seconds"]
        self.problem.execution.backend = self.record["backend"]
        self.problem.execution.prediction_backend = self.record["prediction_backend"]
        self.record["threads"] = content["threads"]

    def _go_on_with(self, threads: int | None) -> None:
        """Take the number of threads that is wanted, where it is another than the run began with."""
        if threads is not None and threads != self.record["threads"]:
            warnings.warn(
                f"The run began with threads={self.record['threads']} and goes on with threads={threads}: "
                "its last bits may differ from those of an undisturbed run.",
                stacklevel=5,
            )
            self.record["threads"] = threads


def _columns(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The history as a tensor for every column: a checkpoint holds all epochs so far, thousands of them."""
    if not history:
        return {}
    phases = list(dict.fromkeys(row["phase"] for row in history))
    columns = {"phase": torch.tensor([phases.index(row["phase"]) for row in history]), "phases": phases}
    numbers = [name for name in history[0] if name != "phase"]
    return columns | {
        name: torch.tensor([row[name] for row in history], dtype=torch.float64) for name in numbers
    }


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The history of the columns that ``_columns`` made."""
    if not columns:
        return []
    numbers = {name: tensor.tolist() for name, tensor in columns.items() if name not in ("phase", "phases")}
    numbers["epoch"] = list(map(int, numbers["epoch"]))
    return [
        {"phase": columns["phases"][phase]} | {name: values[index] for name, values in numbers.items()}
        for index, phase in enumerate(columns["phase"].tolist())
    ]


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the device, or of this whole process (0 where it cannot be told)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource  # not there on every platform

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes
