"""A run in parts, some chains on some data sets each: runs in folders of their own, wherever they are."""

import itertools
import json
import math
import os
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock, Timeout

from polymode.data import ArrayData, Data, fingerprint
from polymode.errors import CheckpointError, PolymodeError
from polymode.posteriors import Posterior, load_posterior, merge
from polymode.posteriors.base import MANIFEST
from polymode.storage import read_document, read_tensors, write_tensors
from polymode.training.keeping.events import epochs_of, read_events
from polymode.training.keeping.folder import PARTS_FOLDER, RunFolder
from polymode.training.keeping.progress import Reporter, Silent
from polymode.training.loop.arithmetic import available_threads, keep_freed_memory
from polymode.training.loop.engine import Crew, Engine, Lost, Needs, crew_of
from polymode.training.loop.material import Material, Request, gather
from polymode.training.loop.memory import bytes_of_a_chain
from polymode.training.loop.run import Run
from polymode.training.loop.settings import Computing, Keeping
from polymode.trees import Tree, filled, leaves

SHARED = "shared"  # folder of what all parts of a run read: data, networks to begin at, orders
BEAT_SECONDS = 1.0  # between two signs of life
PATIENCE = 30.0  # seconds without a sign of life from whoever divided the work, until a part is put down
LOST_PATIENCE = 600.0  # seconds without one from any part, until the work is given up
ATTEMPTS = 5  # in a row that workers may die without having done anything


# --- how a run is divided -----------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """Some chains on some data sets, which are numbered as in the whole."""

    data_sets: range
    chains: range

    def of(self, things: Sequence[Any]) -> list[Any]:
        """Those of some things, one a data set, that belong to the share."""
        return list(things[self.data_sets.start : self.data_sets.stop])


def shares_of(num_data_sets: int, chains: range, workers: int) -> list[Share]:
    """Shares for so many workers, as even as can be: of the data sets first, then of the chains.

    >>> shares_of(1, range(4), 2)
    [Share(data_sets=range(0, 1), chains=range(0, 2)), Share(data_sets=range(0, 1), chains=range(2, 4))]
    """
    by_data = min(workers, num_data_sets)
    by_chains = min(max(1, workers // by_data), len(chains))
    return [
        Share(data_sets, some)
        for data_sets in _even(range(num_data_sets), by_data)
        for some in _even(chains, by_chains)
    ]


def _even(numbers: range, count: int) -> list[range]:
    """Neighbouring numbers in so many stretches."""
    borders = [numbers.start + len(numbers) * index // count for index in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(borders)]


@dataclass(frozen=True)
class ArrayFile:
    """An ``ArrayData`` in a file that every worker sees: data travel by its name."""

    path: Path
    checksum: str
    form: Tree  # of the inputs, with tensors of no rows
    batch_size: int
    drop_last: bool
    augment: tuple[Any, ...]

    def read(self) -> ArrayData:
        tensors = read_tensors(self.path, self.checksum)
        inputs = (tensors[f"inputs/{index}"] for index in range(len(list(leaves(self.form)))))
        return ArrayData(
            filled(self.form, inputs),
            tensors["targets"],
            weights=tensors.get("weights"),
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            augment=self.augment,
        )


@dataclass(frozen=True)
class PosteriorFolder:
    """A posterior in a folder that every worker sees."""

    path: Path

    def read(self, request: Request) -> Posterior:
        return load_posterior(self.path, request.model).to(request.device)


def put_down(data: Data, folder: Path, written: dict[Path, str]) -> Data | ArrayFile:
    """Write arrays where every worker sees them, once for all that need them; loaders travel as they are.

    written: files of this session, with their checksums; those of an earlier one may have been damaged since.
    """
    if not isinstance(data, ArrayData):
        return data
    tensors = {f"inputs/{index}": leaf for index, leaf in enumerate(leaves(data.inputs))}
    tensors["targets"] = data.targets
    if data.weights is not None:
        tensors["weights"] = data.weights
    path = folder / f"data-{fingerprint(data)[:32]}.safetensors"
    if path not in written:
        written[path] = write_tensors(path, tensors)
    form = filled(data.inputs, (torch.empty(0) for _ in leaves(data.inputs)))
    return ArrayFile(path, written[path], form, data.batch_size, data.drop_last, data.augment)


@dataclass(frozen=True)
class Part:
    """What one worker does: a request of its own, whose data and networks to begin at stand in files."""

    request: Request
    sources: Sequence[Data | ArrayFile]
    validation: Sequence[Data | ArrayFile] | None
    initial: Sequence[PosteriorFolder] | None
    folder: Path
    computing: Computing
    checkpoint_seconds: float | None
    cores: int

    def whole_request(self) -> Request:
        """The request with everything in it, as a run needs it."""
        initial = self.initial
        return replace(
            self.request,
            sources=_each_once(self.sources),
            validation=None if self.validation is None else _each_once(self.validation),
            initial=None if initial is None else [each.read(self.request) for each in initial],
        )

    def __str__(self) -> str:
        chains, data_sets = self.request.chains, self.request.data_sets
        sets = f" on data sets {data_sets.start} to {data_sets.stop - 1}" if data_sets.stop > 1 else ""
        return f"{self.request.method.name}, chains {chains.start} to {chains.stop - 1}{sets}"


def _is_finished(folder: Path) -> bool:
    """Whether the part in a folder has come to its end."""
    path = folder / MANIFEST
    return path.exists() and read_document(path, "run").get("status") == "finished"


def _each_once(data: Sequence[Data | ArrayFile]) -> list[Data]:
    """What stands in one file is one data set, however often it is named."""
    known: dict[Any, Data] = {}
    found = []
    for each in data:
        key = each.path if isinstance(each, ArrayFile) else id(each)
        if key not in known:
            known[key] = each.read() if isinstance(each, ArrayFile) else each
        found.append(known[key])
    return found


class DividedRun:
    """A run whose shares are worked on apart, each with checkpoints of its own, and joined when all are done.

    shared: a folder for what several such runs read.
    """

    def __init__(
        self,
        request: Request,
        folder: Path,
        computing: Computing,
        keeping: Keeping,
        shared: Path | None = None,
    ) -> None:
        self.request, self.folder, self.keeping = request, folder, keeping
        self.material: Material = gather(request, None)  # finds bad input before any work begins
        signature = request.signature(self.material.problem.network, self.material.owned)
        self.run_folder = RunFolder(folder, signature, keeping.options or {})
        self.shared = shared or folder / PARTS_FOLDER / SHARED
        self.computing = replace(computing, processes=1, engine=None)
        self.shares: list[Share] = []

    @property
    def title(self) -> str:
        return self.keeping.title or self.request.method.name

    @property
    def num_epochs(self) -> float:
        """Gradient passes of each chain."""
        phases = self.material.phases(self.material.problem.execution)
        return sum(phase.epochs * phase.cost for phase in phases)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left but to join the parts, or not even that."""
        if self.run_folder.is_finished:
            return True
        self.shares = [Share(range(*sets), range(*chains)) for sets, chains in self.run_folder.shares()]
        return bool(self.shares) and all(map(_is_finished, self.folders))

    def begin(self, workers: int) -> None:
        """Divide the run, as it was divided before if it goes on, and write down how."""
        self.run_folder.check_undivided()
        event = "resume" if self.shares else "begin"
        self.shares = self.shares or shares_of(len(self.request.sources), self.request.chains, workers)
        self.run_folder.began(self.division, event)

    @property
    def division(self) -> dict[str, Any]:
        """From and to of the data sets and of the chains of each part."""
        ranges = [(share.data_sets, share.chains) for share in self.shares]
        return {"shares": [[[each.start, each.stop] for each in both] for both in ranges]}

    @property
    def folders(self) -> list[Path]:
        """Of the parts, in the order of the shares."""
        return [self.folder / PARTS_FOLDER / f"{number:03d}" for number in range(len(self.shares))]

    def parts(self, cores: int, written: dict[Path, str]) -> list[Part]:
        """The work, with data and networks put down where all see them; written: what stands there."""
        request = self.request
        files = {
            id(data): put_down(data, self.shared, written)
            for data in (*request.sources, *(request.validation or ()))
        }
        begin_at = None
        if request.initial is not None:
            known = {id(each): each for each in request.initial}
            places = {key: self._put_posterior(each, n) for n, (key, each) in enumerate(known.items())}
            begin_at = [places[id(each)] for each in request.initial]
        return [
            Part(
                replace(
                    request,
                    sources=(),
                    validation=None,
                    initial=None,
                    seeds=share.of(request.seeds),
                    chains=share.chains,
                    data_sets=share.data_sets,
                ),
                [files[id(data)] for data in share.of(request.sources)],
                None if request.validation is None else [files[id(d)] for d in share.of(request.validation)],
                None if begin_at is None else share.of(begin_at),
                folder,
                self.computing,
                self.keeping.checkpoint_seconds,
                cores,
            )
            for share, folder in zip(self.shares, self.folders, strict=True)
        ]

    def _put_posterior(self, posterior: Posterior, place: int) -> PosteriorFolder:
        path = self.shared / f"initial-{place}"
        shutil.rmtree(path, ignore_errors=True)  # of a run that was cut: perhaps not whole
        posterior.save(path)
        return PosteriorFolder(path)

    def joined(self) -> list[Posterior]:
        """One posterior a data set, of all parts, kept in the folder of the whole; theirs are removed."""
        self._join_events()
        manifests = [read_document(folder / MANIFEST, "run") for folder in self.folders]
        spent = [manifest["spent"][0] for manifest in manifests]
        posteriors = [self._joined(index, spent) for index in range(len(self.request.sources))]
        parts = [manifest["record"] for manifest in manifests]  # the backend that each has chosen, say
        self.run_folder.finish(posteriors, self.division | {"parts": parts})
        return self.stored()

    def stored(self) -> list[Posterior]:
        paths = self.run_folder.posteriors()
        return [load_posterior(path, self.request.model).to(self.request.device) for path in paths]

    def _joined(self, index: int, spent: Sequence[Mapping[str, Any]]) -> Posterior:
        """All chains on a data set, with what they cost; spent: what each part did."""
        found, sizes = [], []
        for share, folder in zip(self.shares, self.folders, strict=True):
            if index in share.data_sets:
                path = folder / f"posterior-{index - share.data_sets.start}"
                found.append(load_posterior(path, self.request.model).to(self.request.device))
                sizes.append(len(share.chains))
        records = [posterior.record for posterior in found]
        record = records[0] | {
            "member_epochs": sum(r["member_epochs"] for r in records),
            "training_seconds": max(part["training_seconds"] for part in spent),
            "total_seconds": max(r["total_seconds"] for r in records),
            "peak_memory_mb": sum(part["peak_memory_mb"] for part in spent),
            "findings": [finding for r in records for finding in r["findings"]],
            "history": _mean_history([r["history"] for r in records], sizes),
            "parts": len(self.shares),
        }
        return replace(merge(found), record=record)

    def _join_events(self) -> None:
        """The epochs of all parts in the log of the run: losses side by side, costs added up.

        Where some parts ended before others, theirs stay as they were at their ends.
        """
        logs = [_log_of(folder) for folder in self.folders]
        if not all(labels and epochs for labels, epochs in logs):
            warnings.warn(
                f"The log of a part of the run in {self.folder} is damaged or missing: the log of the run "
                "has no epochs. Its posteriors have everything.",
                stacklevel=2,
            )
            return
        self.run_folder.events.write("members", labels=[row for labels, _ in logs for row in labels])
        epochs: list[dict[str, Any]] = [{} for _ in logs]
        for done in sorted({number for _, of_part in logs for number in of_part}):
            epochs = [of_part.get(done, before) for (_, of_part), before in zip(logs, epochs, strict=True)]
            if not all(epochs):  # the first lines of a part are damaged
                continue
            longest = max(epochs, key=lambda epoch: float(epoch["epochs_done"]))
            joined = {name: value for name, value in longest.items() if name not in ("event", "time")}
            # An epoch tells what a data set has cost so far, the mean over those of its part.
            costs = [e["member_epochs"] * len(s.data_sets) for e, s in zip(epochs, self.shares, strict=True)]
            joined["member_epochs"] = sum(costs) / len(self.request.sources)
            joined["stopped"] = all(epoch["stopped"] for epoch in epochs)
            joined["losses"] = [loss for epoch in epochs for loss in epoch["losses"]]
            for kind in ("validation", "measures"):
                names = [name for name in longest[kind] if all(name in epoch[kind] for epoch in epochs)]
                joined[kind] = {n: [value for epoch in epochs for value in epoch[kind][n]] for n in names}
            self.run_folder.events.write("epoch", **joined)


def _log_of(folder: Path) -> tuple[list[list[int]], dict[float, dict[str, Any]]]:
    """The labels of a part's members, and its epochs by the number of those done; what is whole of them."""
    try:
        labels = next((e["labels"] for e in read_events(folder) if e["event"] == "members"), [])
        return labels, {epoch["epochs_done"]: epoch for epoch in epochs_of(folder)}
    except CheckpointError:  # it is missing
        return [], {}


def _mean_history(histories: Sequence[list[dict[str, Any]]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of means over the members of all parts, of so many chains each; as many as the longest has."""
    longest = max(histories, key=len)
    rows = []
    for number, row in enumerate(longest):
        others = [history[min(number, len(history) - 1)] for history in histories]
        means = {
            name: sum(size * other.get(name, math.nan) for size, other in zip(sizes, others, strict=True))
            / sum(sizes)
            for name, value in row.items()
            if isinstance(value, float)
        }
        rows.append(row | means)
    return rows


# --- working on parts ---------------------------------------------------------------------------


class Orders:
    """What whoever divided the work tells those who do it, through a folder that all of them see.

    A beat that goes on says that there is still someone to work for. It is counted, not timed: clocks of
    machines differ and jump.
    """

    def __init__(self, folder: Path, session: str = "", leader: int | None = None) -> None:
        self.folder, self.session = folder, session or uuid.uuid4().hex
        self.leader = os.getpid() if leader is None else leader  # the process that divided the work
        self.number = 0
        self._heard, self._latest = time.monotonic(), ""
        self._parent = os.getppid()

    def beat(self) -> None:
        self.number += 1
        _swap(self.folder / "orders.json", json.dumps([self.session, self.number]))

    def stop(self) -> None:
        """Ask all of this session to put their work down between two steps."""
        with suppress(OSError):  # a full disk: they hear no beat soon, or find it full themselves
            (self.folder / f"stop-{self.session}").touch()

    @property
    def is_stopped(self) -> bool:
        return (self.folder / f"stop-{self.session}").exists()

    @property
    def is_orphaned(self) -> bool:
        """Whether the process that started this one is gone; the one that divided the work needs none."""
        return os.getpid() != self.leader and os.getppid() != self._parent

    def withdrawn(self) -> bool:
        """Whether the work is wanted no longer: someone stopped it, took it over, or is gone."""
        if self.is_stopped or self.is_orphaned:
            return True
        try:
            latest = (self.folder / "orders.json").read_text()
            if latest and json.loads(latest)[0] != self.session:
                return True
        except (OSError, ValueError, LookupError):
            latest = ""  # not to be read at this moment: as if nothing had been said
        now = time.monotonic()
        if latest and latest != self._latest:
            self._latest, self._heard = latest, now
        return now - self._heard > PATIENCE


def _swap(path: Path, text: str) -> None:
    """Write a file that others read at any moment; it need not survive a power cut."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:  # a full disk, a folder that is gone: what is told is missed, the work is not
        temporary.unlink(missing_ok=True)


class _Told(Silent):
    """The reporter of a part: writes how far it is, and puts the work down when it is withdrawn."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self.folder, self.orders, self._next = folder, orders, 0.0

    def advance(self, epochs: float, detail: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BEAT_SECONDS / 4
        _swap(self.folder / "progress.json", json.dumps(epochs))
        if self.orders.withdrawn():
            raise KeyboardInterrupt  # honoured as Ctrl-C is: a checkpoint is written first


@dataclass(frozen=True)
class Outcome:
    """How a worker left a part: error says what went wrong; without one, it is finished or was put down."""

    error: str = ""
    kind: type[PolymodeError] = PolymodeError


def work_on(part: Part, shared: Path, session: str, leader: int) -> Outcome:
    """Take a part to its end, from wherever it stands; run by a worker (one alone may be its leader)."""
    orders = Orders(shared, session, leader)
    outcome = Outcome() if orders.withdrawn() else _work_on(part, shared, orders)
    if orders.is_orphaned:
        os._exit(1)  # nobody waits for the outcome, and nobody would end this process
    return outcome


def _work_on(part: Part, shared: Path, orders: Orders) -> Outcome:
    try:
        if not shared.is_dir():
            raise CheckpointError(f"{shared} is not seen here: choose a folder that all machines share.")
        _wait_for(part.folder)
        torch.set_num_threads(part.cores)
        keep_freed_memory()
        keeping = Keeping(checkpoint_seconds=part.checkpoint_seconds, progress=_Told(part.folder, orders))
        Run(part.whole_request(), part.folder, part.computing, keeping).execute()
    except KeyboardInterrupt:
        return Outcome()
    except PolymodeError as error:
        orders.stop()  # the others need not go on
        return Outcome(f"{part}: {error}", type(error))
    except Exception as error:
        orders.stop()
        return Outcome(f"{part}: {type(error).__name__}: {error}")
    return Outcome()


def _wait_for(folder: Path) -> None:
    """Wait for a worker of an earlier session, which puts its work down as soon as it hears of this one."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=2 * PATIENCE)
    except Timeout:
        raise CheckpointError(
            f"Another run is working in {folder}: wait for it, or choose another folder."
        ) from None
    lock.release()


def work_through(
    parts: Sequence[Part], crew: Crew, shared: Path, reporter: Reporter, title: str, num_epochs: float
) -> None:
    """Have a crew work on parts until all are finished; a part whose worker dies goes on with another one.

    num_epochs: of all parts together. A request to stop is passed on, and waited for: every part keeps what
    it has done.
    """
    fruitless, before = 0, _done(parts)
    reporter.begin(title, max(1, round(num_epochs)), before)
    try:
        while pending := [part for part in parts if not _is_finished(part.folder)]:
            try:
                outcomes = _followed(pending, parts, crew, Orders(shared), reporter)
                reason = "they were put down"
            except Lost as lost:
                outcomes, reason = [], str(lost)
            failed = [outcome for outcome in outcomes if outcome.error]
            if failed:
                raise failed[0].kind(failed[0].error)
            if all(_is_finished(part.folder) for part in pending):
                break
            done = _done(parts)
            fruitless, before = (0 if done > before else fruitless + 1), max(done, before)
            if fruitless >= ATTEMPTS:
                raise PolymodeError(
                    f"Workers ended {ATTEMPTS} times in a row before they had done anything ({reason}). What "
                    "was done before is kept: the same call goes on with it."
                )
            reporter.say(f"{title}: a worker was lost ({reason}); its work goes on from its last checkpoint")
    except BaseException:
        reporter.close()
        raise
    reporter.end(title)


def _followed(
    pending: Sequence[Part], parts: Sequence[Part], crew: Crew, orders: Orders, reporter: Reporter
) -> list[Outcome]:
    """The outcomes of parts; meanwhile this thread gives signs of life and tells how far they are."""
    found: list[list[Outcome]] = []
    failures: list[BaseException] = []

    def dispatch() -> None:
        try:
            tasks = [(part, orders.folder, orders.session, orders.leader) for part in pending]
            found.append(crew.work(work_on, tasks))
        except BaseException as error:
            failures.append(error)

    orders.beat()
    thread = threading.Thread(target=dispatch, daemon=True)
    thread.start()
    count = min(crew.workers, len(pending))
    detail = f"{count} worker{'s' if count > 1 else ''}"
    done, heard = -1.0, time.monotonic()
    try:
        while thread.is_alive():
            orders.beat()
            now = _done(parts)
            if now != done:
                done, heard = now, time.monotonic()
            reporter.advance(now, detail)
            if time.monotonic() - heard > LOST_PATIENCE and not any(map(_is_held, pending)):
                raise PolymodeError(
                    f"Nobody has worked on any part for {LOST_PATIENCE:.0f} s. What was done is kept: the "
                    "same call goes on with it, once there are workers."
                )
            thread.join(BEAT_SECONDS)
    except BaseException:
        orders.stop()
        heard = time.monotonic()
        # Whoever holds a part puts it down; who has not begun will not. A second Ctrl-C does not wait.
        while thread.is_alive() and time.monotonic() - heard < PATIENCE:
            orders.beat()
            thread.join(BEAT_SECONDS)
            if any(map(_is_held, pending)):
                heard = time.monotonic()
        raise
    if failures:
        raise failures[0]
    return found[0]


def _is_held(part: Part) -> bool:
    """Whether someone has a part's folder at this moment."""
    lock = FileLock(part.folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return True
    lock.release()
    return False


def _done(parts: Sequence[Part]) -> float:
    """Epochs that parts have done, as their workers tell."""
    return sum(_progress(part) for part in parts)


def _progress(part: Part) -> float:
    try:
        return float(json.loads((part.folder / "progress.json").read_text()))
    except (OSError, ValueError, TypeError):
        return 0.0


# --- runs with an engine ------------------------------------------------------------------------


def run_apart(
    request: Request, folder: Path | None, computing: Computing, keeping: Keeping
) -> list[Posterior]:
    """Run the chains of a request where its engine says; a posterior a data set, as ``Run.execute`` does."""
    if folder is None:
        with TemporaryDirectory(prefix="polymode-") as temporary:
            run = DividedRun(request, Path(temporary), computing, keeping)
            work_apart([run], computing, keeping.reporter, run.title)
            return [posterior.in_memory() for posterior in run.joined()]
    run = DividedRun(request, folder, computing, keeping)
    with run.run_folder.lock():
        if run.run_folder.is_finished:
            keeping.reporter.skip(run.title)
            return run.stored()
        work_apart([run], computing, keeping.reporter, run.title)
        return run.joined()


def work_apart(runs: Sequence[DividedRun], computing: Computing, reporter: Reporter, title: str) -> None:
    """Have one engine work on what is left of some runs, which share a folder."""
    engine = computing.engine
    assert engine is not None
    runs = [run for run in runs if not run.is_done]
    if not runs:
        return
    with crew_of(engine, _needs_of(engine, computing, runs)) as crew:
        shared = runs[0].shared
        for run in runs:
            run.begin(crew.workers)
        crew.check_folder(shared)
        parts, num_epochs = [], 0.0
        written: dict[Path, str] = {}
        for run in runs:
            some = run.parts(_cores(engine, computing, crew.workers), written)
            parts += some
            num_epochs += len(some) * run.num_epochs
        work_through(parts, crew, shared, reporter, title, num_epochs)


def _cores(engine: Engine, computing: Computing, workers: int) -> int:
    """Threads that a part may choose from."""
    asked = engine.cores or computing.threads
    if asked is None and engine.kind == "local":
        return max(1, available_threads() // workers)
    return asked or 1


def _needs_of(engine: Engine, computing: Computing, runs: Sequence[DividedRun]) -> Needs:
    """What a part asks for, unless the engine says so: at least what one chain has to hold."""
    least = max(bytes_of_a_chain(run.material.state, run.request.sources) for run in runs)
    on_cuda = any(run.request.device.type == "cuda" for run in runs)
    return Needs(
        cores=engine.cores or computing.threads or 1,
        memory=engine.memory or least,
        gpus=(1 if on_cuda else 0) if engine.gpus is None else engine.gpus,
    )
