"""The folder of a run: manifest, event log, checkpoints, finished posteriors. All JSON and safetensors.

``manifest.json`` is written when the run begins and again when it ends (``status``: running, finished);
``events.jsonl`` only grows; ``checkpoint/`` and what it rests on, ``members/`` and ``history/``, are removed
when all of it is in the posteriors.
"""

import os
import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from polymode._version import __version__
from polymode.errors import CheckpointError
from polymode.posteriors import Posterior
from polymode.posteriors.base import MANIFEST
from polymode.storage import (
    FORMAT_VERSION,
    entry,
    inside,
    read_document,
    refuse_links,
    well_formed,
    write_document,
    writing,
)
from polymode.training.contract.epoch import Epoch
from polymode.training.keeping.checkpoint import Checkpoints, SignatureError, check_signature
from polymode.training.keeping.events import EventLog

MEMBERS = "members"  # folder of the members that are finished before the run is
HISTORY = "history"  # folder of the epochs that are over
PARTS_FOLDER = "parts"  # folder of the parts of a run that is divided


class RunFolder:
    """One run on disk.

    signature: what must be the same for the run to go on. options: what the caller was asked to do, kept in
    the manifest as it is.
    """

    def __init__(self, path: Path, signature: dict[str, Any], options: Mapping[str, Any]) -> None:
        self.path, self.signature, self.options = path, signature, dict(options)
        self.checkpoints = Checkpoints(path / "checkpoint", signature)
        self.events = EventLog(path)
        self.history = path / HISTORY
        self._record: dict[str, Any] = {}
        self._labels: Tensor | None = None  # those in the log, which stay the same for many epochs

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of the folder; the system lets go of it however this process ends."""
        refuse_links(self.path)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise CheckpointError(
                    f"Another run is working in {self.path}: wait for it, or choose another folder."
                ) from None
        try:
            yield
        finally:
            lock.release()

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end; a folder of another run is an error."""
        if not (self.path / MANIFEST).exists():
            return False
        path = self.path / MANIFEST
        manifest = read_document(path, "run")
        try:
            check_signature(
                entry(manifest, "signature", dict, path), self.signature, f"The run in {self.path}"
            )
        except SignatureError as error:
            if manifest["format_version"] == FORMAT_VERSION or manifest.get("status") != "finished":
                raise
            raise SignatureError(
                f"{error} (It was made by an earlier version of polymode, which called some options "
                "otherwise. What it holds can be read with load_posterior, evaluate and predict.)"
            ) from None
        if entry(manifest, "status", str, path) != "finished":
            return False
        self._remove_unfinished()  # where the ending was cut
        return True

    def shares(self) -> list[list[list[int]]]:
        """How a run that goes on was divided: from and to of the data sets and of the chains of each part."""
        path = self.path / MANIFEST
        if not path.exists():
            return []
        record = entry(read_document(path, "run"), "record", dict, path)
        found = record.get("shares", [])
        with well_formed(path):
            return [[[int(a), int(b)] for a, b in share] for share in found]

    def check_undivided(self) -> None:
        """Raise where a run that is to be divided has begun in one piece: its work would be lost."""
        if self.checkpoints.exist:
            raise CheckpointError(
                f"The run in {self.path} was begun without an engine: go on without one, or choose another "
                "folder."
            )

    def check_whole(self) -> None:
        """Raise where a run that is to go on in one piece was divided."""
        if number := len(self.shares()):
            raise CheckpointError(
                f"The run in {self.path} was begun in {number} parts: go on with an engine (processes=... or "
                "engine=...; any number of workers will do), or choose another folder."
            )

    def posteriors(self) -> Iterator[Path]:
        """The folders of the finished posteriors, one a data set."""
        path = self.path / MANIFEST
        names, expected = entry(read_document(path, "run"), "posteriors", list, path), self.signature["data"]
        if len(names) != len(expected):
            raise CheckpointError(
                f"{path} is damaged: it names {len(names)} posteriors of {len(expected)} data sets."
            )
        for name in names:
            yield inside(self.path, name)

    def began(self, record: dict[str, Any], event: str, **content: Any) -> None:
        """Write down that the run begins or goes on, with what is known of it so far."""
        self._record = record
        self._write_manifest(status="running")
        self.events.write(event, versions=versions(), hardware=hardware(), **content)

    def save(self, number: int, content: dict[str, Any]) -> None:
        self.events.flush()  # the log has every epoch that a checkpoint has
        self.checkpoints.save(number, content)

    def log_epoch(self, epoch: Epoch) -> None:
        if epoch.labels is not self._labels:  # which data set, chain and member each number below belongs to
            self._labels = epoch.labels
            self.events.gather("members", labels=epoch.labels.tolist())
        self.events.gather(
            "epoch",
            epochs_done=epoch.epochs_done,
            phase=epoch.phase,
            epoch=epoch.epoch,
            restart=epoch.restart,
            keeps_best=epoch.keeps_best,
            stopped=epoch.stopped,
            member_epochs=epoch.member_epochs,
            learning_rates=epoch.learning_rates,
            losses=epoch.losses.tolist(),
            validation={name: scores.tolist() for name, scores in epoch.validation.items()},
            measures={name: values.tolist() for name, values in epoch.measures.items()},
        )

    def finish(
        self, posteriors: Sequence[Posterior], record: dict[str, Any] | None = None
    ) -> list[Posterior]:
        """Write the posteriors and return them, no longer resting on files of the training.

        record: what is known of the run now, where that is more than when it began.
        """
        self._record = record or self._record
        names = [f"posterior-{index}" for index in range(len(posteriors))]
        for name, posterior in zip(names, posteriors, strict=True):
            shutil.rmtree(self.path / name, ignore_errors=True)  # of an ending that was cut
            posterior.save(self.path / name)
        spent = [
            {key: posterior.record[key] for key in ("member_epochs", "training_seconds", "peak_memory_mb")}
            for posterior in posteriors
        ]
        self._write_manifest(status="finished", posteriors=names, spent=spent)
        self.events.write("end", spent=spent)
        saved = [p.read_from(self.path / name) for name, p in zip(names, posteriors, strict=True)]
        self._remove_unfinished()
        return saved

    def _remove_unfinished(self) -> None:
        """Remove what a run needs to go on: all of it is in the posteriors now."""
        for name in ("checkpoint", MEMBERS, HISTORY, PARTS_FOLDER):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _write_manifest(self, **content: Any) -> None:
        manifest = {
            "options": self.options,
            "method": self.signature["method"],
            "seeds": self.signature["seeds"],
            "record": self._record,
            "versions": versions(),
            "hardware": hardware(),
            "signature": self.signature,
        }
        write_document(self.path / MANIFEST, "run", manifest | content)


@contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """A file in a folder, as long as the context lasts: whoever sees it sees the same folder."""
    mark = folder / f".seen-{uuid.uuid4().hex}"
    with writing(mark):
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {
        "polymode": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def hardware() -> dict[str, Any]:
    """The machine, in a few words."""
    # A name is asked for only where CUDA is in use: asking would start it up.
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": [torch.cuda.get_device_name(device) for device in devices],
    }
