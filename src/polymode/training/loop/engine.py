"""Where work is done: in processes of this machine, or on a cluster of Ray or Dask; joblib drives them."""

import logging
import math
import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from joblib import Parallel, delayed, parallel_config

from polymode.errors import InputError, PolymodeError, require, require_whole, shortened, unknown_name
from polymode.sizes import said, whole_memory
from polymode.training.keeping.folder import marked
from polymode.training.loop.arithmetic import MOST_THREADS, available_threads

Kind = Literal["local", "ray", "dask"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KNOCK_SECONDS = 10  # that a cluster may take to answer at all
ANSWER_SECONDS = 300  # that a node of a cluster may take to start a process and answer
RETRIES = 5  # of a task that Ray begins again by itself, before its loss is told
GUARD = (
    "In a script that Dask starts workers for, put what is done under if __name__ == '__main__':, as each of "
    "them imports the script."
)
TOKEN = " Where it asks for a token, as Ray does by default, set RAY_AUTH_MODE=token here, too."
IDLE_SECONDS = 10  # that a worker of this machine waits for more to do, also where nobody is left to ask it


@dataclass(frozen=True)
class Engine:
    """Who works on the parts of a run.

    kind: "local" (processes of this machine), "ray" or "dask". address: of a cluster that runs already, such
    as "auto" or "host:6379" for Ray and "tcp://host:8786" for Dask; without one, some workers are started on
    this machine and ended afterwards. workers: parts that are worked on at once; as many as there are cores
    unless given. cores, memory, gpus: what each part needs; a cluster gives it a place that has as much.
    cores: one unless given, or the threads of ``fit``. memory: in bytes. gpus: one where it trains on CUDA.
    """

    kind: Kind = "local"
    address: str = ""
    workers: int | None = None
    cores: int | None = None
    memory: int | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("engine", self.kind, KINDS)
        require(
            self.kind != "local" or not self.address,
            f"address={self.address!r} is that of a cluster: engine='ray' or 'dask' goes with it.",
        )
        for name in ("workers", "cores", "memory"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        require(
            self.gpus is None or (isinstance(self.gpus, int | float) and self.gpus >= 0),
            f"gpus must be a number of at least 0, got {self.gpus!r}.",
        )


@dataclass(frozen=True)
class Needs:
    """What one task asks for."""

    cores: int = 1
    memory: int | None = None
    gpus: float = 0


class Lost(PolymodeError):
    """Whoever worked on a task is gone, and so is its result; what it has written is not."""


class Crew:
    """The workers of an engine, as long as the context lasts.

    workers: how many parts they work on at once; least: how many joblib is told of at least.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        count: Callable[[], tuple[int, int | None]],
        ask_all: Callable[..., dict[str, Any]],
        release: Callable[[], Any] = lambda: None,
    ) -> None:
        """count: parts that are worked on at once, and those that there is room for, where that is counted.

        release: ends whoever works, so that ``work`` ends where a task would wait for ever.
        """
        self.config, self._count, self._ask_all, self.release = config, count, ask_all, release
        self.recount()

    def recount(self) -> None:
        """See how many there are now; what no machine could give is an error."""
        self.workers, places = self._count()
        # joblib sends nothing away where it may do one thing at a time. So a second worker, which gets no
        # work, is allowed where there is room for it.
        self.least = min(2, places or 2)

    def work(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of a function for the arguments of every task; ``Lost`` where a worker has died.

        A function is not expected to raise: whatever arrives as an exception is about the way there.
        """
        count = max(1, min(self.workers, len(tasks)))
        try:
            with parallel_config(**self.config, n_jobs=max(count, self.least)):
                parallel = Parallel(batch_size=1, pre_dispatch=count)  # type: ignore[arg-type]  # numbers, too
                return list(parallel(delayed(function)(*task) for task in tasks) or ())
        except Exception as error:
            reason = shortened(f"{type(error).__name__}: {str(error).split('. ')[0]}")
            told = f"{error} {error.__cause__ or ''}".lower()
            if "pickl" in told or "serializ" in told:
                raise InputError(
                    f"What travels to other processes (method, model, data) cannot: {reason} Pass a module, "
                    "or functions that are defined at the top of a file."
                ) from error
            raise Lost(reason) from error

    def check_folder(self, folder: Path) -> None:
        """Raise unless every machine sees what this one writes to a folder."""
        with marked(folder) as mark:
            blind = sorted(where for where, seen in self._ask_all(sees, str(mark)).items() if not seen)
        if blind:
            raise InputError(
                f"{folder} is not the same folder on every machine: what {socket.gethostname()} writes "
                f"there is not seen on {', '.join(blind)}. Choose a run_dir (--run) on a file system that "
                "all of them share."
            )


def sees(path: str) -> bool:
    """Whether a file is there, for whoever is asked."""
    return Path(path).exists()


def is_there() -> bool:
    """Whoever is asked is."""
    return True


@contextmanager
def crew_of(engine: Engine, needs: Needs) -> Iterator[Crew]:
    """The workers of an engine, started or found; what no machine of it could give is said now."""
    require(
        not getattr(multiprocessing.current_process(), "_inheriting", False),
        f"A worker has imported the script that calls fit, and come to the call itself. {GUARD}",
    )
    open_crew = {"local": _local, "ray": _ray, "dask": _dask}[engine.kind]
    with open_crew(engine, needs) as crew:
        yield crew


@contextmanager
def _local(engine: Engine, needs: Needs) -> Iterator[Crew]:
    places = _places_here(engine, needs)
    workers = engine.workers or max(1, min(available_threads() // needs.cores, places))
    config: dict[str, Any] = {"backend": "loky", "inner_max_num_threads": needs.cores}
    config["idle_worker_timeout"] = IDLE_SECONDS
    # A worker that ends in the moment it is given something is replaced; nobody else needs to know. Where
    # warnings are errors, this one would end the thread that replaces it.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
    futures = logging.getLogger("concurrent.futures")
    futures.addFilter(_is_about_work)
    try:
        here = socket.gethostname()
        yield Crew(config, lambda: (workers, None), lambda ask, *arguments: {here: ask(*arguments)})
    finally:
        futures.removeFilter(_is_about_work)


def _is_about_work(record: logging.LogRecord) -> bool:
    """Whether a line of the log is worth reading: not that nobody is left to be given more, after Ctrl-C."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ShutdownExecutorError"


def _places_here(engine: Engine, needs: Needs) -> int:
    """Parts that this machine has room for at once, at least one."""
    wanted = {"CPU": needs.cores, "GPU": needs.gpus, "memory": needs.memory or 0}
    has = {
        # Threads may outnumber cores, which is slow, not wrong; cores that are asked for may not.
        "CPU": MOST_THREADS if engine.cores is None else os.cpu_count() or 1,
        "GPU": torch.cuda.device_count(),
        "memory": whole_memory() or math.inf,
    }
    places = _places(has, wanted)
    _require_places(engine, places, wanted)
    return places


@contextmanager
def _ray(engine: Engine, needs: Needs) -> Iterator[Crew]:
    try:
        import ray
        from ray.exceptions import RayError
        from ray.util.joblib.ray_backend import RayBackend
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise InputError(f"engine='ray' needs Ray ({error}): pip install 'polymode[ray]'.") from None
    started = not ray.is_initialized()
    if started:
        _knock(engine)
        own: dict[str, Any] = {}  # of a new one; whatever else runs here is found by "auto" alone
        if not engine.address:
            cores = (engine.workers or max(1, available_threads() // needs.cores)) * needs.cores
            own = {"num_cpus": cores, "include_dashboard": False}
        try:
            ray.init(
                engine.address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                # What is imported by name here is imported by the same name there.
                runtime_env={"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}},
                **own,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise _unreachable(engine, error) from error
    try:
        wanted = {"CPU": needs.cores, "GPU": needs.gpus, "memory": needs.memory or 0}

        def alive() -> dict[str, Any]:
            return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}

        def asked(nodes: Iterable[str], ask: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
            """What every node answers; one that has just died is listed for a while, and never does."""
            on = {each: NodeAffinitySchedulingStrategy(each, soft=False) for each in nodes}
            answers = {
                each: ray.remote(num_cpus=0, max_retries=0)(ask)
                .options(scheduling_strategy=where)
                .remote(*arguments)
                for each, where in on.items()
            }
            began, waiting, ready = time.monotonic(), True, []
            while waiting and time.monotonic() - began < ANSWER_SECONDS:
                ready, rest = ray.wait(list(answers.values()), num_returns=len(answers), timeout=1)
                there = alive()
                waiting = any(answer in rest and each in there for each, answer in answers.items())
            found = {}
            for each, answer in answers.items():
                if answer in ready:
                    with suppress(RayError):
                        found[each] = ray.get(answer)
            return found

        def count() -> tuple[int, int]:
            nodes = alive()
            places = sum(_places(nodes[each]["Resources"], wanted) for each in asked(nodes, is_there))
            _require_places(engine, places, wanted)
            return min(engine.workers or places, places), places  # more would wait for ever for room

        def ask_all(ask: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
            nodes = alive()
            names = {each: f"{node['NodeManagerHostname']} ({each[:6]})" for each, node in nodes.items()}
            return {names[each]: answer for each, answer in asked(nodes, ask, *arguments).items()}

        # A worker or node that dies is replaced by Ray, and its task begins again: it goes on from its files.
        each: dict[str, Any] = {"num_cpus": needs.cores, "max_restarts": RETRIES}
        each["max_task_retries"] = RETRIES
        each |= {"num_gpus": needs.gpus} if needs.gpus else {}
        each |= {"memory": needs.memory} if needs.memory else {}
        backend = RayBackend(ray_remote_args=each)
        yield Crew({"backend": backend}, count, ask_all, backend.terminate)
    finally:
        if started:
            ray.shutdown()


@contextmanager
def _dask(engine: Engine, needs: Needs) -> Iterator[Crew]:
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise InputError(f"engine='dask' needs Dask ({error}): pip install 'polymode[dask]'.") from None
    with ExitStack() as stack:
        where: Any = engine.address
        if engine.address:
            _knock(engine)
        else:
            places = _places_here(engine, needs)
            try:
                where = stack.enter_context(
                    LocalCluster(
                        n_workers=engine.workers or max(1, min(available_threads() // needs.cores, places)),
                        threads_per_worker=1,
                        dashboard_address=None,  # type: ignore[arg-type]  # none is wanted
                        resources={"GPU": needs.gpus} if needs.gpus else None,
                    )
                )
            except (RuntimeError, OSError) as error:
                reason = shortened(str(error).split("\n")[0])
                raise InputError(f"Dask could not start its workers here ({reason}). {GUARD}") from error
        try:
            client: Any = stack.enter_context(Client(where, timeout=30, set_as_default=False))
        except (OSError, ValueError) as error:
            raise _unreachable(engine, error) from error
        client.register_plugin(_paths(list(filter(None, sys.path))))
        wanted = {"CPU": 1, "GPU": needs.gpus, "memory": needs.memory or 0}

        def count() -> tuple[int, int]:
            places = 0
            for worker in client.scheduler_info(n_workers=-1)["workers"].values():
                # A worker's memory is shared by its threads; 0 stands for no limit.
                has = {"CPU": worker["nthreads"], "memory": worker["memory_limit"] or float("inf")}
                places += _places(has | worker.get("resources", {}), wanted)
            _require_places(engine, places, wanted)
            return min(engine.workers or places, places), places

        config: dict[str, Any] = {"backend": "dask", "client": client}
        config |= {"resources": {"GPU": needs.gpus}} if needs.gpus else {}
        yield Crew(config, count, client.run)


def _paths(paths: list[str]) -> Any:
    """What is imported by name here is imported by the same name by workers of Dask."""
    from distributed import WorkerPlugin

    class Paths(WorkerPlugin):
        name = "polymode-paths"

        def setup(self, worker: Any) -> None:
            sys.path.extend(path for path in paths if path not in sys.path)

    return Paths()


def _places(has: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """Tasks that a machine has room for at once."""
    return int(min(has.get(name, 0) // amount for name, amount in wanted.items() if amount))


def _require_places(engine: Engine, places: int, wanted: Mapping[str, float]) -> None:
    amounts = {name: said(int(a)) if name == "memory" else f"{a:g}" for name, a in wanted.items() if a}
    asked = ", ".join(f"{amount} {name}" for name, amount in amounts.items())
    where = f" at {engine.address}" if engine.address else ""
    who = (
        "This machine does not have"
        if engine.kind == "local"
        else f"No machine of the {engine.kind} cluster{where} has"
    )
    require(
        places > 0,
        f"{who} what a part needs ({asked}): ask for less "
        "(cores, memory or gpus of the engine), or add a machine that has it.",
    )


def _knock(engine: Engine) -> None:
    """Raise where nobody listens at the address of a cluster: Ray and Dask would try for a minute."""
    host, _, port = engine.address.rpartition("://")[2].rpartition(":")
    if not engine.address or (engine.kind == "ray" and engine.address == "auto"):
        return
    try:
        if not host or not port.isdigit():
            raise ValueError("it is not HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        raise _unreachable(engine, error) from error


def _unreachable(engine: Engine, error: Exception) -> InputError:
    reason = shortened(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return InputError(
        f"No {engine.kind} cluster was reached at {engine.address!r} ({reason}): start one there, or leave "
        f"the address out to start workers on this machine.{TOKEN if engine.kind == 'ray' else ''}"
    )
