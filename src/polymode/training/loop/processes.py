"""Chains in several processes: each runs some of them as a run of its own, and the posteriors are joined."""

import itertools
import pickle
import queue
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import multiprocessing

from polymode.errors import InputError, PolymodeError
from polymode.posteriors import Posterior, load_posterior, merge
from polymode.training.keeping.events import epochs_of, read_events
from polymode.training.keeping.folder import PARTS_FOLDER, RunFolder
from polymode.training.keeping.progress import BAR_SECONDS, Reporter, Silent
from polymode.training.loop.arithmetic import available_threads
from polymode.training.loop.material import Request, gather
from polymode.training.loop.run import Run
from polymode.training.loop.settings import Computing, Keeping


@dataclass(frozen=True)
class _Part:
    """What one process does."""

    number: int
    request: Request
    folder: Path
    computing: Computing
    checkpoint_seconds: float | None
    most_threads: int  # to choose from, where ``fit`` was told no number


class _Messages(Silent):
    """A reporter that sends how far a part is to the process that waits for it."""

    def __init__(self, number: int, outbox: Any) -> None:
        self.number, self.outbox, self.next = number, outbox, 0.0

    def advance(self, epochs: float, detail: str = "") -> None:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + BAR_SECONDS
            self.outbox.put((self.number, "at", epochs))


def check_processes(processes: int, request: Request) -> None:
    """Raise an ``InputError`` unless the chains of a job can be divided among processes."""
    if processes > len(request.chains):
        raise InputError(
            f"processes={processes}, but {request.method.name} has {len(request.chains)} chain(s): a process "
            "needs at least one of its own."
        )
    if processes > 1:
        try:
            pickle.dumps((request.method, request.model, request.likelihood, request.initial))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"With processes={processes} method and model travel to other processes, and these cannot: "
                f"{error}. Pass a module, or functions that are defined at the top of a file."
            ) from error


def divided(chains: range, processes: int) -> list[range]:
    """Neighbouring chains for each process, as evenly as can be."""
    borders = [chains.start + len(chains) * p // processes for p in range(processes + 1)]
    return [range(a, b) for a, b in itertools.pairwise(borders)]


def run_in_processes(
    request: Request, folder: Path | None, computing: Computing, keeping: Keeping
) -> list[Posterior]:
    """Run the chains of a request in several processes; one posterior a data set, as ``Run.execute`` gives.

    A chain's result depends on its number, not on where it runs. Each part is a run in a folder of its own,
    so that what was cut goes on.
    """
    processes = computing.processes
    if folder is None:
        with TemporaryDirectory(prefix="polymode-") as temporary:
            parts = _run_parts(request, Path(temporary), computing, keeping)
            return [posterior.in_memory() for posterior in _joined(request, parts, processes)]
    material = gather(request, None)  # finds bad input before any process begins
    signature = request.signature(material.problem.network, material.owned)
    run_folder = RunFolder(folder, signature, keeping.options or {})
    with run_folder.lock():
        if run_folder.is_finished:
            keeping.reporter.skip(keeping.title or request.method.name)
            return _stored(request, run_folder)
        run_folder.check_processes(processes)
        run_folder.began({"processes": processes}, "begin")
        parts = _run_parts(request, folder / PARTS_FOLDER, computing, keeping)
        _join_events(run_folder, parts)
        run_folder.finish(_joined(request, parts, processes))
        shutil.rmtree(folder / PARTS_FOLDER)  # all of it is in the posteriors now
        return _stored(request, run_folder)


def _join_events(run_folder: RunFolder, parts: Sequence[_Part]) -> None:
    """The epochs of all parts in the log of the run: losses side by side, costs added up."""
    logs = [epochs_of(part.folder) for part in parts]
    run_folder.events.write("members", labels=[row for part in parts for row in _labels_of(part.folder)])
    for epochs in zip(*logs, strict=False):
        joined = dict(epochs[0])
        joined["member_epochs"] = sum(epoch["member_epochs"] for epoch in epochs)
        joined["losses"] = [loss for epoch in epochs for loss in epoch["losses"]]
        joined["validation"] = {
            name: [value for epoch in epochs for value in epoch["validation"][name]]
            for name in epochs[0]["validation"]
        }
        joined["measures"] = {
            name: [value for epoch in epochs for value in epoch["measures"][name]]
            for name in epochs[0]["measures"]
        }
        run_folder.events.write("epoch", **{k: v for k, v in joined.items() if k not in ("event", "time")})


def _labels_of(folder: Path) -> list[list[int]]:
    return next(event["labels"] for event in read_events(folder) if event["event"] == "members")


def _stored(request: Request, run_folder: RunFolder) -> list[Posterior]:
    return [load_posterior(path, request.model).to(request.device) for path in run_folder.posteriors()]


def _run_parts(request: Request, folder: Path, computing: Computing, keeping: Keeping) -> list[_Part]:
    processes, reporter = computing.processes, keeping.reporter
    title = keeping.title or request.method.name
    parts = [
        _Part(
            number,
            replace(request, chains=chains),
            folder / f"{number:02d}",
            replace(computing, processes=1),
            keeping.checkpoint_seconds,
            max(1, available_threads() // processes),
        )
        for number, chains in enumerate(divided(request.chains, processes))
    ]
    material = gather(request, None)
    num_epochs = sum(phase.epochs * phase.cost for phase in material.phases(material.problem.execution))
    context = multiprocessing.get_context("spawn")
    outbox = context.Queue()
    workers = [context.Process(target=_work, args=(part, outbox), daemon=False) for part in parts]
    reporter.begin(title, round(num_epochs), 0)
    try:
        for worker in workers:
            worker.start()
        _wait(workers, outbox, reporter, processes)
    except BaseException:
        _stop(workers)  # also where this process alone was told to end
        raise
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.join()  # an interrupted one writes its checkpoint first
        reporter.close()
    reporter.end(title)
    return parts


def _wait(workers: Sequence[Any], outbox: Any, reporter: Reporter, processes: int) -> None:
    """Follow the parts to their ends; the first that fails ends the others."""
    at, running = dict.fromkeys(range(processes), 0.0), set(range(processes))
    while running:
        try:
            number, kind, content = outbox.get(timeout=1.0)
        except queue.Empty:
            dead = [n for n in running if workers[n].exitcode is not None]
            if dead:
                raise PolymodeError(
                    f"Process {dead[0]} ended with exit code {workers[dead[0]].exitcode}; what it had done "
                    "is kept."
                ) from None
            continue
        if kind == "at":
            at[number] = content
            reporter.advance(sum(at.values()) / processes, f"{processes} processes")
        elif kind == "done":
            running.discard(number)
        else:
            raise content


def _stop(workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.pid is not None:
            worker.terminate()  # SIGTERM: a run writes its checkpoint between two steps


def _work(part: _Part, outbox: Any) -> None:
    torch.set_num_threads(part.most_threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends between two steps, as Ctrl-C does
    try:
        told = _Messages(part.number, outbox)
        keeping = Keeping(checkpoint_seconds=part.checkpoint_seconds, progress=told)
        Run(part.request, part.folder, part.computing, keeping).execute()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        outbox.put((part.number, "failed", PolymodeError(f"In process {part.number}: {error}")))
        return
    outbox.put((part.number, "done", None))


def _joined(request: Request, parts: Sequence[_Part], processes: int) -> list[Posterior]:
    """The chains of every part, one posterior a data set, with what all of them cost."""
    joined = []
    for index in range(len(request.sources)):
        found = [
            load_posterior(part.folder / f"posterior-{index}", request.model).to(request.device)
            for part in parts
        ]
        records = [posterior.record for posterior in found]
        record = records[0] | {
            "member_epochs": sum(r["member_epochs"] for r in records),
            "training_seconds": max(r["training_seconds"] for r in records),
            "total_seconds": max(r["total_seconds"] for r in records),
            "peak_memory_mb": sum(r["peak_memory_mb"] for r in records),
            "findings": [finding for r in records for finding in r["findings"]],
            "processes": processes,
        }
        joined.append(replace(merge(found), record=record))
    return joined
