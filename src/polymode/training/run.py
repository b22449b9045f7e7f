"""A run: phases, epochs and steps over the state, from any position to the end."""

import math
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode._version import __version__
from polymode.errors import InputError, NonFiniteLoss
from polymode.posteriors import Posterior, load_posterior, merge
from polymode.schedules import Progress
from polymode.seeds import derive_seed, global_seed
from polymode.storage import FORMAT_VERSION, read_json, write_json
from polymode.training.backends import AnyBackend, choose_backend
from polymode.training.checkpoint import Checkpoints, check_signature
from polymode.training.method import Phase, build_optimizers
from polymode.training.progress import ProgressBar
from polymode.training.setup import Job, set_up
from polymode.training.validation import keep_better, take_best, validate

# Written last: a folder that holds it is a run that came to its end.
FINISHED = "run.json"


@dataclass(frozen=True)
class Epoch:
    """What an observer is told at the end of every epoch; losses and scores are [M]."""

    phase: str
    epoch: int
    losses: Tensor
    validation: dict[str, Tensor]
    labels: Tensor
    rate: float


@dataclass
class Position:
    """Where a run stands: the next step to take, counted from 0, and epochs done in all phases."""

    phase: int = 0
    epoch: int = 0
    step: int = 0
    epochs_done: int = 0
    entered: bool = False


class Run:
    """One run of a job; ``execute`` takes it from its newest checkpoint, or the start, to the end."""

    def __init__(self, job: Job, folder: Path | None) -> None:
        self.job, self.folder = job, folder
        self.began = time.perf_counter()
        made = set_up(job, folder)
        self.made, self.problem, self.batches = made, made.problem, made.batches
        self.phases, self.state = made.phases, made.state
        self.position = Position()
        self.rate = 1.0  # the schedule's factor at the latest step
        self.losses: list[Tensor] = []  # of the epoch's steps so far, [M] each
        self.history: list[dict[str, Any]] = []
        self.record: dict[str, Any] = {}
        self.seconds = 0.0  # of training, in all sessions
        self.signature = {} if folder is None else job.signature(made.problem.network, made.owned)

    def execute(
        self,
        backend: AnyBackend,
        observer: Callable[[Epoch], None] | None,
        *,
        show: bool,
        checkpoint_seconds: float,
    ) -> list[Posterior]:
        checkpoints = None
        if self.folder is not None:
            checkpoints = Checkpoints(self.folder / "checkpoint", self.signature)
            if (self.folder / FINISHED).exists():
                return self._read_back(self.folder)
        if checkpoints is not None and checkpoints.exist:
            self._restore(checkpoints.load())
        else:
            self._choose_backend(backend)
            if checkpoints is not None:
                self._save(checkpoints)
        earlier, began, saved_at = self.seconds, time.perf_counter(), time.monotonic()
        total = sum(phase.epochs for phase in self.phases)
        with ProgressBar(self.job.method.name, total, show=show) as bar:
            for epoch in self._train():
                self.seconds = earlier + time.perf_counter() - began
                try:
                    if epoch is not None:
                        loss = epoch.losses.nanmean().item()
                        bar.update(self.position.epochs_done, f"{epoch.phase} loss {loss:.4g}")
                        if observer is not None:
                            observer(epoch)
                except BaseException:
                    if checkpoints is not None:  # between steps the state is whole: nothing is lost
                        self._save(checkpoints)
                    raise
                if checkpoints is not None and time.monotonic() - saved_at >= checkpoint_seconds:
                    self._save(checkpoints)
                    saved_at = time.monotonic()
        self.record["total_seconds"] = round(earlier + time.perf_counter() - self.began, 3)
        posteriors = self.posteriors()
        if self.folder is not None:
            self._finish(self.folder, posteriors)
        return posteriors

    def _choose_backend(self, wanted: AnyBackend) -> None:
        began = time.perf_counter()
        choice = choose_backend(self.made, self.job.sources[0], wanted)
        self.problem.execution.backend = choice.training
        self.problem.execution.prediction_backend = choice.prediction
        self.record |= {
            "backend": choice.training,
            "prediction_backend": choice.prediction,
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
                self.state.best = self.state.best_scores = None
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
            with global_seed(derive_seed(self.job.seeds[0], "validation", position.epochs_done)):
                scores = validate(self.state, phase.objective, self.batches, self.job.validation)
            if phase.keep is not None and phase.keep.includes(position.epoch):
                keep_better(self.state, scores[phase.keep.criterion])
        losses = torch.stack(self.losses).nanmean(0).cpu()
        self.losses.clear()
        self.history.append(
            {"phase": phase.name, "epoch": position.epoch, "loss": losses.mean().item()}
            | {f"validation_{name}": score.mean().item() for name, score in scores.items()}
        )
        labels = self.state.members.labels
        return Epoch(phase.name, position.epoch, losses, scores, labels, self.rate)

    def _located(self, error: NonFiniteLoss, phase: Phase) -> NonFiniteLoss:
        located = NonFiniteLoss(
            f"In phase {phase.name!r}, epoch {self.position.epoch + 1}, step {self.position.step + 1}: "
            f"{error}. Training stopped; the weights before this step are in this error's `posterior`, and "
            "the last checkpoint is kept. Lower the learning rate, clip gradients "
            "(Optimizer(clip_norm=...)) or check the scale of the inputs."
        )
        posteriors = self.posteriors()
        located.posterior = posteriors if len(posteriors) > 1 else posteriors[0]
        return located

    # --- ending, saving, resuming ---------------------------------------------------------------

    def posteriors(self) -> list[Posterior]:
        """One posterior a data set, in the order the data sets were given."""
        network = self.problem.network
        network.module.eval()
        problem = replace(self.problem, network=replace(network, backend=self.record["prediction_backend"]))
        chains: dict[int, list[Posterior]] = {d: [] for d in range(len(self.job.sources))}
        for index, group in enumerate(self.batches.groups):
            of_chain = replace(problem, chain=group.chain)
            posterior = self.job.method.posterior(of_chain, self.state.chain(index))
            chains[group.data_set].append(posterior)
        return [replace(merge(p), record=self._record_of(d)) for d, p in chains.items()]

    def _record_of(self, data_set: int) -> dict[str, Any]:
        spent = sum(
            int(self.state.gradient_examples[index]) / group.num_examples
            for index, group in enumerate(self.batches.groups)
            if group.data_set == data_set
        )
        return self.record | {
            "method": self.job.method.config(),
            "epochs": self.job.epochs,
            "seed": self.job.seeds[data_set],
            "num_examples": self.job.sources[data_set].num_examples,
            "member_epochs": spent,
            "training_seconds": round(self.seconds, 3),
            "peak_memory_mb": round(peak_memory(self.job.device) / 2**20),
            "precision": self.job.precision,
            "device": str(self.job.device),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "history": self.history,
        }

    def _save(self, checkpoints: Checkpoints) -> None:
        content = {
            "position": asdict(self.position),
            "state": self.state.snapshot(),
            "losses": torch.stack(self.losses) if self.losses else None,
            "rate": self.rate,
            "record": self.record,
            "history": self.history,
            "seconds": self.seconds,
            "threads": torch.get_num_threads(),
        }
        checkpoints.save(self.position.epochs_done * 1_000_000 + self.position.step, content)

    def _restore(self, content: dict[str, Any]) -> None:
        self.position = Position(**content["position"])
        if self.position.entered:
            self._build_optimizers(self.phases[self.position.phase])
        self.state.restore(content["state"])
        losses, self.rate = content["losses"], content["rate"]
        self.losses = [] if losses is None else list(losses.to(self.job.device))
        self.record, self.history = content["record"], content["history"]
        self.seconds = content["seconds"]
        self.problem.execution.backend = self.record["backend"]
        self.problem.execution.prediction_backend = self.record["prediction_backend"]
        if content["threads"] != torch.get_num_threads():
            warnings.warn(
                f"The run began with {content['threads']} threads and goes on with "
                f"{torch.get_num_threads()}: its last bits may differ from an undisturbed run.",
                stacklevel=4,
            )

    def _finish(self, folder: Path, posteriors: Sequence[Posterior]) -> None:
        names = [f"posterior-{index}" for index in range(len(posteriors))]
        for name, posterior in zip(names, posteriors, strict=True):
            posterior.save(folder / name)
        content = {"what": "finished run", "signature": self.signature, "posteriors": names}
        write_json(folder / FINISHED, {"format_version": FORMAT_VERSION} | content)
        shutil.rmtree(folder / "checkpoint")  # all of it is in the posteriors now

    def _read_back(self, folder: Path) -> list[Posterior]:
        """The posteriors of a run that is finished already."""
        content = read_json(folder / FINISHED, "finished run")
        check_signature(content["signature"], self.signature, f"The finished run in {folder}")
        return [load_posterior(folder / name, self.job.model) for name in content["posteriors"]]


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the device, or of this whole process (0 where it cannot be told)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource  # not there on every platform

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {
        "polymode": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
