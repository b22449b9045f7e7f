"""Working on the parts of runs: what workers are told, and who takes over when one is gone."""

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock, Timeout

from polymode.errors import CheckpointError, PolymodeError
from polymode.posteriors import Posterior
from polymode.training.keeping.progress import Reporter, Silent
from polymode.training.loop.arithmetic import available_threads, keep_freed_memory
from polymode.training.loop.engine import Crew, Engine, Lost, Needs, crew_of
from polymode.training.loop.material import Request
from polymode.training.loop.memory import bytes_of_a_chain
from polymode.training.loop.parts import DividedRun, Part, is_finished
from polymode.training.loop.run import Run
from polymode.training.loop.settings import Computing, Keeping

BEAT_SECONDS = 1.0  # between two signs of life
PATIENCE = 30.0  # seconds without a sign of life from whoever divided the work, until a part is put down
IDLE_PATIENCE = 120.0  # seconds in which nobody has taken up any part, until workers are asked for anew
# Seconds to wait for whoever held a part before: file systems keep the locks of a dead machine for minutes.
HOLDER_PATIENCE = 600.0
ATTEMPTS = 5  # in a row that workers may be lost without having done anything
TAKEN = ".taken"  # held by the worker that has a part, from its first moment


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
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
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

    @property
    def exception(self) -> PolymodeError:
        """The error as the worker met it; its text is whole already."""
        return self.kind.__new__(self.kind, self.error)


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
        with _taken(part.folder, orders):
            torch.set_num_threads(part.cores)
            keep_freed_memory()
            keeping = Keeping(checkpoint_seconds=part.checkpoint_seconds, progress=_Told(part.folder, orders))
            Run(part.whole_request(), part.folder, part.computing, keeping).execute()
    except KeyboardInterrupt:
        return Outcome()
    except PolymodeError as error:
        orders.stop()  # the others need not go on
        return Outcome(f"{part}: {error}", type(error))
    except (Exception, SystemExit) as error:  # code of the user may do anything
        orders.stop()
        return Outcome(f"{part}: {type(error).__name__}: {error}")
    return Outcome()


@contextmanager
def _taken(folder: Path, orders: Orders) -> Iterator[None]:
    """Have a part for oneself; a worker of an earlier session puts it down when it hears of this one."""
    folder.mkdir(parents=True, exist_ok=True)
    lock, began = FileLock(folder / TAKEN), time.monotonic()
    while True:
        if orders.withdrawn():
            raise KeyboardInterrupt
        with suppress(Timeout):
            lock.acquire(timeout=BEAT_SECONDS)
            break
        if time.monotonic() - began > HOLDER_PATIENCE:
            raise CheckpointError(
                f"Another run is working in {folder}: wait for it, or choose another folder."
            )
    try:
        yield
    finally:
        lock.release()


def work_through(
    parts: Sequence[Part],
    crew: Crew,
    shared: Path,
    reporter: Reporter,
    title: str,
    num_epochs: float,
) -> None:
    """Have a crew work on parts until all are finished; a part whose worker dies goes on with another one.

    num_epochs: of all parts together. A request to stop is passed on, and waited for: every part keeps what
    it has done.
    """
    fruitless, before = 0, _done(parts)
    reporter.begin(title, max(1, round(num_epochs)), before)
    try:
        while pending := [part for part in parts if not is_finished(part.folder)]:
            try:
                outcomes = _followed(pending, parts, crew, Orders(shared), reporter)
                reason = "they were put down"
            except Lost as lost:
                outcomes, reason = [], str(lost)
            failed = [outcome for outcome in outcomes if outcome.error]
            if failed:
                raise failed[0].exception
            if all(is_finished(part.folder) for part in pending):
                break
            done = _done(parts)
            fruitless, before = (0 if done > before else fruitless + 1), max(done, before)
            if fruitless >= ATTEMPTS:
                raise PolymodeError(
                    f"Workers were lost {ATTEMPTS} times in a row before they had done anything ({reason}). "
                    "What was done before is kept: the same call goes on with it."
                )
            reporter.say(f"{title}: a worker was lost ({reason}); its work goes on from its last checkpoint")
            crew.recount()  # somebody may be gone for good
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
    ended = threading.Event()  # a join that Ctrl-C interrupts takes the thread for ended

    def dispatch() -> None:
        try:
            tasks = [(part, orders.folder, orders.session, orders.leader) for part in pending]
            found.append(crew.work(work_on, tasks))
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    orders.beat()
    threading.Thread(target=dispatch, daemon=True).start()
    count = min(crew.workers, len(pending))
    detail = f"{count} worker{'s' if count > 1 else ''}"
    done, heard = -1.0, time.monotonic()
    try:
        while not ended.is_set():
            orders.beat()
            now = _done(parts)
            if now != done:
                done, heard = now, time.monotonic()
            reporter.advance(now, detail)
            if time.monotonic() - heard > IDLE_PATIENCE and not any(map(_is_held, pending)):
                # Ray, say, keeps room for those who have done their parts, and has none left to replace one
                # whose machine is gone.
                raise Lost(f"nobody has taken up any part for {IDLE_PATIENCE:.0f} s")
            ended.wait(BEAT_SECONDS)
    except BaseException:
        orders.stop()
        heard = time.monotonic()
        # Whoever holds a part puts it down; who has not begun will not. A second Ctrl-C does not wait.
        while not ended.is_set() and time.monotonic() - heard < PATIENCE:
            orders.beat()
            ended.wait(BEAT_SECONDS)
            if any(map(_is_held, pending)):
                heard = time.monotonic()
        if not ended.is_set():  # waiting for somebody who will not come
            crew.release()
            ended.wait(PATIENCE)
        raise
    if failures:
        raise failures[0]
    return found[0]


def _is_held(part: Part) -> bool:
    """Whether a worker has a part at this moment."""
    lock = FileLock(part.folder / TAKEN)
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
    except (OSError, ValueError, TypeError, RecursionError, OverflowError):
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
