"""A run: training with a clock, checkpoints, and someone to tell."""

import math
import sys
import time
import warnings
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from polymode.errors import CheckpointError, NonFiniteLoss, require, require_whole, unknown_name
from polymode.networks.members import BACKENDS
from polymode.posteriors import Posterior, load_posterior
from polymode.posteriors.network import Network
from polymode.storage import well_formed
from polymode.training.contract.execution import Execution
from polymode.training.keeping.folder import RunFolder, marked, versions
from polymode.training.keeping.interruption import Interruption
from polymode.training.loop.arithmetic import with_threads, without_denormals
from polymode.training.loop.backends import choose_execution
from polymode.training.loop.material import Request, gather
from polymode.training.loop.settings import Computing, Keeping
from polymode.training.loop.training import Training

PROCESS_STATUS = Path("/proc/self/status")


class Run:
    """One run of a request; ``execute`` takes it from its newest checkpoint, or the start, to the end."""

    def __init__(self, request: Request, folder: Path | None, computing: Computing, keeping: Keeping) -> None:
        self.request, self.computing, self.keeping = request, computing, keeping
        self.title = keeping.title or request.method.name
        self.began = time.perf_counter()
        self.material = gather(request, folder)
        self.network: Network = self.material.problem.network
        self.folder = None
        self.ranks = request.ranks
        if folder is not None or self.ranks.size > 1:
            signature = request.signature(self.network, self.material.owned)
            self.ranks.agree(signature)
            self.folder = None if folder is None else RunFolder(folder, signature, keeping.options or {})
            self._check_shared(folder)
        self.record: dict[str, Any] = {}
        self.seconds = self.earlier = 0.0  # of training, in all sessions and in those before this one
        self.writing = 0.0  # seconds that the latest checkpoint took

    def _check_shared(self, folder: Path | None) -> None:
        """Raise unless all ranks see the folder: they read there what the first one has written."""
        if folder is None or self.ranks.size == 1:
            return
        with marked(folder) if self.ranks.is_first else nullcontext(folder) as mark:
            seen = self.ranks.all_of(self.ranks.first(mark).exists())
        blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
        require(
            not blind,
            f"{folder} is not the same folder for all processes of torchrun: what rank 0 writes there is "
            f"not seen by rank {', '.join(blind)}. Choose a run_dir (--run) that all of them share.",
        )

    def execute(self) -> list[Posterior]:
        """Train from wherever the run stands to its end; with a folder, nothing done is ever lost."""
        if self.folder is None:
            with without_denormals():
                return self._run()
        folder = self.folder
        with ExitStack() as held, without_denormals():

            def taken_and_finished() -> bool:
                held.enter_context(folder.lock())
                return folder.is_finished

            if not self.ranks.from_first(taken_and_finished):
                return self._run()
            self.keeping.reporter.skip(self.title)
            return self._stored(folder)

    def _stored(self, folder: RunFolder) -> list[Posterior]:
        stored = (load_posterior(path, self.request.model) for path in folder.posteriors())
        return [posterior.to(self.request.device) for posterior in stored]

    def _run(self) -> list[Posterior]:
        folder = self.folder
        if folder is not None:
            folder.check_whole()
        resumed = self.ranks.first(folder is not None and folder.checkpoints.exist)
        if folder is not None and resumed:
            with self.ranks.first_one_first():  # it passes over what is damaged, and tells
                folder.checkpoints.load(self._restore)
            self._go_on_with(self.computing.threads)
        else:
            self.begin()
        with with_threads(self.record["threads"]):
            if folder is None or not self.ranks.is_first:
                return self._to_the_end()
            if resumed:
                folder.began(self.record, "resume", epochs_done=self.training.position.epochs_done)
            else:
                folder.began(self.record, "begin")
                self.save()
            return self._to_the_end()

    def begin(self) -> None:
        """Decide how the run is executed, and put the training at its start."""
        began = time.perf_counter()
        execution, step_seconds = self.ranks.from_first(self._chosen)
        execution = replace(self.material.problem.execution, **execution, ranks=self.ranks)
        self.training = Training(self.material, execution, self.folder and self.folder.history)
        self.record |= _told(execution) | {
            "step_seconds": step_seconds,
            "choice_seconds": round(time.perf_counter() - began, 3),
        }

    def _chosen(self) -> tuple[dict[str, Any], dict[str, float]]:
        """What is chosen of an execution, and the seconds of a step each way."""
        chosen, step_seconds = choose_execution(self.material, self.computing, self.ranks)
        names = ("backend", "prediction_backend", "threads")
        return {name: getattr(chosen, name) for name in names}, step_seconds

    def _to_the_end(self) -> list[Posterior]:
        training, reporter = self.training, self.keeping.reporter
        num_epochs = training.passes_before[-1]
        reporter.begin(self.title, round(num_epochs), training.passes_done())
        try:
            # What is asked for during the ending waits until everything is written.
            with Interruption() if self.folder is not None else nullcontext() as interruption:
                self._train(interruption)
                self.record["total_seconds"] = round(self.earlier + time.perf_counter() - self.began, 3)
                posteriors = [
                    replace(posterior, record=self._record_of(data_set))
                    for data_set, posterior in enumerate(training.posteriors())
                ]
                self.ranks.meet()  # what the ending removes is read by nobody any more
                self.save()
                if self.folder is not None and self.ranks.is_first:
                    posteriors = self.folder.finish(posteriors)
                self.ranks.meet()
                if self.folder is not None and not self.ranks.is_first:
                    posteriors = self._stored(self.folder)
        except BaseException as error:
            reporter.close()
            if self.folder is not None:
                with suppress(CheckpointError):  # there is a reason already
                    self.folder.events.flush()
            if isinstance(error, NonFiniteLoss):
                self._describe(error)
            raise
        reporter.end(self.title)
        return posteriors

    def _train(self, interruption: Interruption | None) -> None:
        self.earlier, began = self.seconds, time.perf_counter()
        due = time.monotonic() + self.keeping.seconds_to_next(self.writing)
        folder, observer = self.folder, self.keeping.observer
        if not self.ranks.is_first:
            folder = observer = None
        for epoch in self.training.run():
            self.seconds = self.earlier + time.perf_counter() - began
            try:
                self._report()
                if epoch is not None:
                    if folder is not None:
                        folder.log_epoch(epoch)
                    if observer is not None:
                        observer(epoch)
                if interruption is not None:
                    interruption.check(self._any)
            except BaseException:
                self.save()  # between steps the state is whole: nothing is lost
                raise
            if time.monotonic() >= due:
                self.save()
                due = time.monotonic() + self.keeping.seconds_to_next(self.writing)

    def _report(self) -> None:
        """Tell how far the run is: epochs with the fraction of the present one, members, the latest loss."""
        count = self.training.state.members.num_members
        detail = f"{count} member{'s' if count > 1 else ''}"
        if math.isfinite(loss := self.training.history.loss):
            detail += f", loss {loss:.4g}"
        self.keeping.reporter.advance(self.training.passes_done(), detail)

    # --- the record -----------------------------------------------------------------------------

    def _record_of(self, data_set: int) -> dict[str, Any]:
        request = self.request
        return self.record | {
            "method": request.method.config(),
            "epochs": request.epochs,
            "seed": request.seeds[data_set],
            "num_examples": request.sources[data_set].num_examples,
            "member_epochs": self.training.spent(data_set),
            "training_seconds": round(self.seconds, 3),
            "peak_memory_mb": round(peak_memory(request.device) / 2**20),
            "versions": versions(),
            "findings": self.training.findings(data_set),
            "history": self.training.history.rows,
        }

    def _describe(self, error: NonFiniteLoss) -> None:
        """Give what an error has saved of the training the record of the run."""
        found = error.posterior
        if isinstance(found, list):
            error.posterior = [
                None if each is None else replace(each, record=self._record_of(data_set))
                for data_set, each in enumerate(found)
            ]
        elif isinstance(found, Posterior):
            error.posterior = replace(found, record=self._record_of(0))

    # --- checkpoints ----------------------------------------------------------------------------

    def _any(self, asked: bool) -> bool:
        """Whether any rank is asked to end: all of them end after the same step."""
        return self.ranks.any(asked, self.request.device)

    def save(self) -> None:
        """Write a checkpoint of the training as it is now, where there is a folder."""
        if self.folder is not None and self.ranks.is_first:
            began = time.monotonic()
            content = {"training": self.training.content(), "record": self.record, "seconds": self.seconds}
            self.folder.save(self.training.position.number, content)
            self.writing = time.monotonic() - began

    def _restore(self, content: dict[str, Any]) -> None:
        """Take up the content of a checkpoint, as often as it is called."""
        with well_formed("The checkpoint"):
            self.record, self.seconds = content["record"], float(content["seconds"])
            for key in ("backend", "prediction_backend"):
                if self.record[key] not in BACKENDS:
                    raise unknown_name(f"{key} of the checkpoint", self.record[key], BACKENDS)
            require_whole("threads of the checkpoint", self.record["threads"])
            if self.ranks.size > 1 and self.record["backend"] == "compiled":  # it began in one process
                self.record["backend"] = "vmap"
            execution = Execution(
                self.request.device,
                self.record["backend"],
                self.record["prediction_backend"],
                self.request.precision,
                self.record["threads"],
                self.ranks,
            )
            self.training = Training(self.material, execution, self.folder and self.folder.history)
            self.training.take_up(content["training"])

    def _go_on_with(self, threads: int | None) -> None:
        """Take the number of threads that is wanted, where it is another than the run began with."""
        if threads is not None and threads != self.record["threads"]:
            warnings.warn(
                f"The run began with threads={self.record['threads']} and goes on with threads={threads}: "
                "its last bits may differ from those of an undisturbed run.",
                stacklevel=5,
            )
            self.record["threads"] = threads


def _told(execution: Execution) -> dict[str, Any]:
    """How a run is executed, for its record."""
    return asdict(execution) | {"device": str(execution.device)}


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the device, or of this whole process (0 where it cannot be told)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    try:  # Linux: the other number is that of the process which started this one, where it was larger
        lines = PROCESS_STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    import resource  # not there on every platform

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere
