"""Faults, and what must come of them: the same bits in the end, or an error that says what to do.

Every fault is a function of a folder and a generator of random numbers. It disturbs a training, lets it go on
as a user would (the same call again), and returns how that ended; a lost or wrong result is an
``AssertionError``. Processes that were really killed, not only meant to be, are counted in ``KILLED``.
"""

import contextlib
import functools
import hashlib
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults import jobs
from forks import fork
from polymode.application.datasets.downloads import Download, fetch
from polymode.errors import InputError, PolymodeError
from polymode.methods import METHODS

Fault = Callable[[Path, random.Random], str]

SAME, TOLD = "same bits", "clear error, nothing lost"
TESTS = Path(__file__).parents[1]
SECONDS = 300  # that anything may take
KILLED: Counter[str] = Counter()  # processes, by the method that they trained, or by what they were


# --- trainings that are undisturbed ---------------------------------------------------------------


def bits(folder: Path) -> dict[str, str]:
    """What a finished run leaves behind, as digests."""
    files = sorted((folder / "posterior-0").glob("*.safetensors"))
    assert files, f"{folder} holds no posterior"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@functools.cache
def undisturbed(method: str) -> tuple[Path, dict[str, str]]:
    """A finished run of a method, once for all faults."""
    folder = Path(os.environ["POLYMODE_FAULTS"]) / f"undisturbed-{method}"
    finish(method, folder)
    return folder, bits(folder)


@functools.cache
def span_of(method: str) -> tuple[float, float]:
    """From just before a training writes anything to its end, in seconds after its process was asked for."""
    undisturbed(method)  # so that there is a server of forks
    folder = Path(os.environ["POLYMODE_FAULTS"]) / f"timed-{method}"
    began = time.monotonic()
    process = fork(jobs.train, method, folder)
    while process.is_alive() and not folder.exists():
        time.sleep(0.002)
    first = time.monotonic() - began
    process.join(SECONDS)
    return 0.8 * first, time.monotonic() - began


def kill(process: Any, method: str, after: float) -> None:
    """SIGKILL a training after some seconds, unless it has ended before."""
    process.join(after)
    process.kill()
    process.join()
    KILLED[method] += process.exitcode == -signal.SIGKILL


def finish(method: str, folder: Path) -> None:
    process = fork(jobs.train, method, folder)
    process.join(SECONDS)
    assert process.exitcode == 0, f"{method} did not go on: exit code {process.exitcode}"


def interrupt(method: str, folder: Path, generator: random.Random) -> None:
    """A run that was killed after some checkpoints."""
    process = fork(jobs.train, method, folder)
    wanted, seen = generator.randint(2, 20), set()
    while process.is_alive() and len(seen) < wanted:
        with contextlib.suppress(FileNotFoundError):
            seen |= set(os.listdir(folder / "checkpoint"))
        time.sleep(0.0005)
    kill(process, method, 0)


def any_method(generator: random.Random) -> str:
    return generator.choice(list(METHODS))


# --- one process ----------------------------------------------------------------------------------


def killed(folder: Path, generator: random.Random) -> str:
    """SIGKILL at a random moment of a training, in its set-up and its ending, too."""
    method = any_method(generator)
    _, expected = undisturbed(method)
    for _ in range(generator.randint(1, 2)):
        after = generator.uniform(*span_of(method))
        seconds = generator.choice([0.0, 0.02, 0.1, 60.0])  # from one checkpoint to the next
        kill(fork(jobs.train, method, folder / "run", seconds), method, after)
    finish(method, folder / "run")
    assert bits(folder / "run") == expected, method
    return SAME


def killed_while_writing(folder: Path, generator: random.Random) -> str:
    """SIGKILL in the middle of writing: before any file is made, synchronised, renamed or removed."""
    method = any_method(generator)
    _, expected = undisturbed(method)
    for _ in range(3):
        process = fork(jobs.train_and_die_writing, method, folder / "run", generator.randint(1, 120))
        process.join(SECONDS)
        assert process.exitcode in (0, -signal.SIGKILL), method
        KILLED[method] += process.exitcode == -signal.SIGKILL
    finish(method, folder / "run")
    assert bits(folder / "run") == expected, method
    return SAME


def full_disk(folder: Path, generator: random.Random) -> str:
    """No room from some file on; the same call goes on when there is."""
    method, note = any_method(generator), folder / "note.txt"
    _, expected = undisturbed(method)
    process = fork(jobs.train_without_room, method, folder / "run", generator.randint(1, 60), note)
    process.join(SECONDS)
    assert process.exitcode == 0, method
    assert "No space left on device" in note.read_text()
    assert "Make room" in note.read_text()
    finish(method, folder / "run")
    assert bits(folder / "run") == expected, method
    return SAME


def short_files(folder: Path, generator: random.Random) -> str:
    """Room for a part of a file only: writes end in the middle; the same call goes on when there is room."""
    method, note = any_method(generator), folder / "note.txt"
    source, expected = undisturbed(method)
    longest = max(path.stat().st_size for path in source.rglob("*.safetensors"))
    process = fork(
        jobs.train_with_short_files, method, folder / "run", generator.randint(100, 2 * longest), note
    )
    process.join(SECONDS)
    assert process.exitcode == 0, method
    told = note.read_text()
    assert told == "it ended well" or ("cannot be written" in told and "Make room" in told), told
    finish(method, folder / "run")
    assert bits(folder / "run") == expected, method
    return SAME


def jumping_clock(folder: Path, generator: random.Random) -> str:
    """The time of day jumps by years, and the run is killed on top of it."""
    method = any_method(generator)
    _, expected = undisturbed(method)
    after = generator.uniform(*span_of(method))
    kill(
        fork(jobs.train_with_jumping_clock, method, folder / "run", generator.randint(0, 9999)), method, after
    )
    process = fork(jobs.train_with_jumping_clock, method, folder / "run", generator.randint(0, 9999))
    process.join(SECONDS)
    assert process.exitcode == 0, method
    assert bits(folder / "run") == expected, method
    return SAME


def two_in_one_folder(folder: Path, generator: random.Random) -> str:
    """A second process on the folder of a run is refused, and disturbs nothing."""
    method = any_method(generator)
    _, expected = undisturbed(method)
    first = fork(jobs.train, method, folder / "run")
    while first.is_alive() and not (folder / "run" / "checkpoint").exists():
        time.sleep(0.002)
    os.kill(first.pid, signal.SIGSTOP)  # until the others are through: it might end before them
    try:
        assert first.exitcode is None, method
        for _ in range(2):
            told = _told(method, folder / "run")
            assert told, f"{method}: a second process worked in the folder of the first"
            assert "Another run is working in" in told, told
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.join(SECONDS)
    assert first.exitcode == 0, method
    assert bits(folder / "run") == expected, method
    return SAME


# --- damaged files --------------------------------------------------------------------------------


def torn_file(folder: Path, generator: random.Random) -> str:
    """A file of an interrupted run is cut short."""
    return _damaged(folder, generator, lambda path: path.write_bytes(_cut(path, generator)))


def flipped_bit(folder: Path, generator: random.Random) -> str:
    """One bit of a file of an interrupted run is another one."""
    return _damaged(folder, generator, lambda path: path.write_bytes(_flipped(path, generator)))


def missing_file(folder: Path, generator: random.Random) -> str:
    """A file of an interrupted run is gone."""
    return _damaged(folder, generator, Path.unlink)


def damaged_result(folder: Path, generator: random.Random) -> str:
    """A file of a finished run is torn, changed or gone: it is refused, or makes no difference."""
    method = any_method(generator)
    source, expected = undisturbed(method)
    shutil.copytree(source, folder / "run")
    path = generator.choice(_files(folder / "run"))
    damage = generator.choice(["torn", "flipped", "missing"])
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(_cut(path, generator) if damage == "torn" else _flipped(path, generator))
    left = _contents(folder / "run")
    told = _told(method, folder / "run")
    if told is None:
        assert bits(folder / "run") == expected, (method, path, damage)
        for document in sorted((source / "posterior-0").glob("*.json")):
            again = folder / "run" / "posterior-0" / document.name
            assert _lasting(again) == _lasting(document), (method, path, damage)
        return SAME
    _check_told(told, folder / "run", path, left)
    return TOLD


def _lasting(document: Path) -> Any:
    """What a document of a posterior says, without what differs from run to run."""
    content = json.loads(document.read_text())
    return {name: value for name, value in content.items() if name not in ("record", "sha256")}


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in _files(folder)}


def _check_told(told: str, folder: Path, damaged: Path, left: dict[Path, bytes]) -> None:
    """One line that says where and what to do; whatever was finished is there as it was."""
    assert "\n" not in told, told
    assert str(folder) in told, told
    assert any(word in told.lower() for word in ("put", "remove", "resume", "choose", "again", "name the")), (
        told
    )
    for path, content in left.items():
        if path != damaged:
            assert path.exists(), f"{path} is gone: {told}"
            assert path.read_bytes().startswith(content), f"{path} has changed: {told}"  # logs grow


def _damaged(folder: Path, generator: random.Random, damage: Callable[[Path], Any]) -> str:
    method = any_method(generator)
    _, expected = undisturbed(method)
    interrupt(method, folder / "run", generator)
    files = _files(folder / "run")
    if not files:
        return SAME  # it was killed before it had written anything
    path = generator.choice(files)
    damage(path)
    left = _contents(folder / "run")
    told = _told(method, folder / "run")
    if told is None:
        assert bits(folder / "run") == expected, (method, path)
        return SAME
    _check_told(told, folder / "run", path, left)
    return TOLD


def _told(method: str, folder: Path) -> str | None:
    """What the same call says of a folder; None where it ends well."""
    note = folder.parent / "told.txt"
    process = fork(_try, method, folder, note)
    process.join(SECONDS)
    assert process.exitcode == 0, f"{method}: an error that is none of ours, exit code {process.exitcode}"
    return note.read_text() if note.exists() else None


def _try(method: str, folder: Path, note: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            jobs.train(method, folder)
        except PolymodeError as error:
            note.write_text(str(error))


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size and p.name != ".lock")


def _cut(path: Path, generator: random.Random) -> bytes:
    content = path.read_bytes()
    return content[: generator.randrange(len(content))]


def _flipped(path: Path, generator: random.Random) -> bytes:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return bytes(content)


# --- downloads ------------------------------------------------------------------------------------

CONTENT = random.Random(0).randbytes(300_000)


class _Cutting(http.server.BaseHTTPRequestHandler):
    """A server that ends some answers before their time, or changes a byte."""

    generator: random.Random

    def do_GET(self) -> None:
        content, how = CONTENT, self.generator.choice(["cut", "changed", "whole"])
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if how == "cut":
            content = content[: self.generator.randrange(len(content))]
        elif how == "changed":
            content = b"x" + content[1:]
        with contextlib.suppress(OSError):
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None: ...


def cut_download(folder: Path, generator: random.Random) -> str:
    """Answers that are cut or changed are told, nothing of them stays, and another try has the whole file."""
    _Cutting.generator = generator
    wanted = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Cutting) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            download = Download(f"http://127.0.0.1:{server.server_port}/a.bin", "a.bin", wanted)
            for _ in range(40):
                try:
                    path = fetch(download, folder)
                except InputError:
                    assert not (folder / "a.bin").exists()
                    continue
                assert path.read_bytes() == CONTENT
                return SAME
        finally:
            server.shutdown()
            thread.join()
    raise AssertionError("no try in forty was whole")


# --- engines --------------------------------------------------------------------------------------


def _start(folder: Path, kind: str = "local", address: str = "") -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "faults.jobs", str(folder), kind, address]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "errors.txt").open("ab") as errors:
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )


@functools.cache
def undisturbed_apart() -> dict[str, str]:
    folder = Path(os.environ["POLYMODE_FAULTS"]) / "undisturbed-apart"
    _end(_start(folder), folder)
    return bits(folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.wait(timeout=2 * SECONDS)
    assert process.returncode == 0, (folder.parent / "errors.txt").read_text()[-2000:]


def _until_it_trains(process: subprocess.Popen[bytes], folder: Path, parts: int = 2) -> None:
    """Wait until so many parts have written a checkpoint of a step."""
    deadline = time.monotonic() + SECONDS
    while len({path.parts[-3] for path in folder.glob("parts/*/checkpoint/state-*")}) < parts:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            said = (folder.parent / "errors.txt").read_text()[-2000:]
            raise AssertionError(f"{parts} parts were never trained at once: {said}")
        time.sleep(0.02)


def _processes(pattern: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False).stdout
    return [int(each) for each in found.split()]


def _children(parent: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout
    return [int(each) for each in found.split()]


def killed_parent(folder: Path, generator: random.Random) -> str:
    """Whoever divided the work is killed; workers put their parts down, and the same call goes on."""
    expected = undisturbed_apart()
    process = _start(folder / "run")
    _until_it_trains(process, folder / "run")
    time.sleep(generator.uniform(0, 1))
    workers = [each for each in _children(process.pid) if each in _processes("popen_loky_posix")]
    process.kill()
    process.wait()
    KILLED["the process that was started"] += 1
    _end(_start(folder / "run"), folder / "run")
    assert bits(folder / "run") == expected
    deadline = time.monotonic() + SECONDS  # they notice between two epochs
    while any(_is_alive(each) for each in workers):
        assert time.monotonic() < deadline, "workers are left behind"
        time.sleep(0.05)
    return SAME


def _is_alive(process: int) -> bool:
    """Whether it runs; one that ended is there as a zombie until whoever inherited it looks."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def killed_worker(folder: Path, generator: random.Random) -> str:
    """A worker on this machine is killed; its part goes on with another one."""
    expected = undisturbed_apart()
    process = _start(folder / "run")
    _until_it_trains(process, folder / "run")
    time.sleep(generator.uniform(0, 1))
    workers = [each for each in _children(process.pid) if each in _processes("popen_loky_posix")]
    os.kill(generator.choice(workers), signal.SIGKILL)
    KILLED["a worker of joblib"] += 1
    _end(process, folder / "run")
    assert bits(folder / "run") == expected
    return SAME


@contextlib.contextmanager
def dask_cluster() -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers with nannies, which begin them anew, on the loopback."""
    from distributed import Client

    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    quiet: dict[str, Any] = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    port = _free_port()
    address = f"tcp://127.0.0.1:{port}"
    scheduler = [
        "distributed.cli.dask_scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-dashboard",
    ]
    running = [subprocess.Popen([sys.executable, "-m", *scheduler], **quiet)]
    worker = ["distributed.cli.dask_worker", address, "--nthreads", "1", "--no-dashboard"]
    running += [
        subprocess.Popen([sys.executable, "-m", *worker, "--name", name], start_new_session=True, **quiet)
        for name in ("one", "two")
    ]
    try:
        with Client(address, timeout=SECONDS) as client:
            client.wait_for_workers(2, timeout=SECONDS)  # with one alone, parts come one after the other
        yield address, running[1:]
    finally:
        for each in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL) if each is not running[0] else each.kill()
            each.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def killed_dask_worker(folder: Path, generator: random.Random) -> str:
    """A worker of Dask is killed; its nanny begins another one, which goes on."""
    expected = undisturbed_apart()
    with dask_cluster() as (address, nannies):
        process = _start(folder / "run", "dask", address)
        _until_it_trains(process, folder / "run")
        victims = [
            child for nanny in nannies for child in _children(nanny.pid) if child in _processes("spawn_main")
        ]
        os.kill(generator.choice(victims), signal.SIGKILL)
        KILLED["a worker of Dask"] += 1
        _end(process, folder / "run")
    assert bits(folder / "run") == expected
    return SAME


def killed_dask_node(folder: Path, generator: random.Random) -> str:
    """A machine of Dask, its nanny and its worker, is gone for good; the other one does its work."""
    expected = undisturbed_apart()
    with dask_cluster() as (address, nannies):
        process = _start(folder / "run", "dask", address)
        _until_it_trains(process, folder / "run")
        os.killpg(generator.choice(nannies).pid, signal.SIGKILL)
        KILLED["a node of Dask"] += 1
        _end(process, folder / "run")
    assert bits(folder / "run") == expected
    return SAME


@contextlib.contextmanager
def ray_cluster(room: int = 2) -> Iterator[tuple[Any, list[Any]]]:
    """Two nodes of Ray on the loopback, with room for so many parts each, and a head that does no work."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster, [cluster.add_node(num_cpus=room) for _ in range(2)]
    finally:
        cluster.shutdown()


def killed_ray_worker(folder: Path, generator: random.Random) -> str:
    """A worker process of Ray is killed; Ray begins another one, which goes on."""
    expected = undisturbed_apart()
    with ray_cluster() as (cluster, _):
        process = _start(folder / "run", "ray", cluster.address)
        _until_it_trains(process, folder / "run")
        os.kill(generator.choice(_processes("ray::PoolActor")), signal.SIGKILL)
        KILLED["a worker of Ray"] += 1
        _end(process, folder / "run")
    assert bits(folder / "run") == expected
    return SAME


def _without_a_node(folder: Path, generator: random.Random, room: int) -> str:
    """A node is gone, of two with room for so many parts each."""
    expected = undisturbed_apart()
    with ray_cluster(room) as (cluster, nodes):
        process = _start(folder / "run", "ray", cluster.address)
        _until_it_trains(process, folder / "run")
        cluster.remove_node(generator.choice(nodes), allow_graceful=False)
        KILLED["a node of Ray"] += 1
        _end(process, folder / "run")
    assert bits(folder / "run") == expected
    return SAME


def killed_ray_node(folder: Path, generator: random.Random) -> str:
    """A node of Ray is gone for good; the other one does its work."""
    return _without_a_node(folder, generator, room=2)


def killed_node_of_a_full_cluster(folder: Path, generator: random.Random) -> str:
    """A node of Ray is gone for good, and the others have no room until their own work is done."""
    return _without_a_node(folder, generator, room=1)


ONE_PROCESS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        killed,
        killed_while_writing,
        full_disk,
        short_files,
        jumping_clock,
        two_in_one_folder,
        torn_file,
        flipped_bit,
        missing_file,
        damaged_result,
        cut_download,
    )
}
ENGINES: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        killed_parent,
        killed_worker,
        killed_dask_worker,
        killed_dask_node,
        killed_ray_worker,
        killed_ray_node,
        killed_node_of_a_full_cluster,
    )
}
FAULTS = ONE_PROCESS | ENGINES
