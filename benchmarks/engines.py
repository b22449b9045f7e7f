"""Eight chains through every engine; then clusters of two nodes, one of them killed.

python benchmarks/engines.py [--epochs 500] [--repeats 2] [--only dask] [--json engines.json]

A measurement is the wall-clock time of a fresh process, imports and whatever it starts included. Local
arrangements to be compared with: one process that chooses everything for itself, and two plain processes of
four chains and one thread each. Then a cluster that runs already (a scheduler and two nodes on the loopback,
each with room for the whole work), undisturbed and with the busier node killed in mid-run, checkpoints every
ten seconds. Bits are compared among all that divide the chains in the same way.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

CHAINS, WORKERS = 8, 2
CHECKPOINT_SECONDS = 10.0


def network() -> Any:
    import polymode as pm

    return pm.models.MLP(40, 2, (128, 128))


def train(folder: Path, epochs: int, kind: str, address: str, chains: int, threads: int) -> None:
    """In a process of its own: what is measured."""
    import torch

    import polymode as pm

    x = torch.randn(10_000, 40, generator=torch.Generator().manual_seed(0))
    y = (x[:, :20].sin().sum(1) > x[:, 20:].tanh().sum(1)).long()
    pm.fit(
        pm.methods.SequentialAnchored(chains, first_epochs=epochs // 2, short_epochs=2),
        network,
        pm.ArrayData(x, y, batch_size=100),
        likelihood="categorical",
        epochs=epochs,
        engine=pm.Engine(kind, address, workers=WORKERS) if kind else None,  # type: ignore[arg-type]
        threads=threads or None,
        backend="compiled",  # what auto takes here; measured by each part, it might once not be
        run_dir=folder,
        checkpoint_seconds=CHECKPOINT_SECONDS if address else None,
        progress=False,
    )


def start(
    folder: Path, epochs: int, kind: str = "", address: str = "", chains: int = CHAINS, threads: int = 0
):
    command = [sys.executable, __file__, "--train", str(folder), str(epochs), kind, address]
    return subprocess.Popen([*command, str(chains), str(threads)])


def end(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"{process.args} ended with {process.returncode}")


def bits(folder: Path) -> str:
    """Of the members; digests of files would hold their order, too."""
    import torch

    import polymode as pm

    found = hashlib.sha256()
    for members in pm.load_posterior(folder / "posterior-0", network).draw():
        for name, tensor in sorted(members.stacked.items()):
            found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# --- on this machine --------------------------------------------------------------------------------


def one_process(folder: Path, epochs: int) -> None:
    end(start(folder, epochs))


def two_plain_processes(folder: Path, epochs: int) -> None:
    folder.mkdir()
    running = [start(folder / str(i), epochs, chains=CHAINS // 2, threads=1) for i in range(2)]
    for each in running:
        end(each)


def through(kind: str) -> Callable[[Path, int], None]:
    return lambda folder, epochs: end(start(folder, epochs, kind))


LOCAL = {"one process": one_process, "two plain processes": two_plain_processes}
ENGINES = {f"engine={kind!r}": through(kind) for kind in ("local", "ray", "dask")}


# --- clusters ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def ray_cluster() -> Iterator[tuple[str, dict[str, list[int]], Callable[[str], None]]]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = {name: cluster.add_node(num_cpus=2) for name in ("one", "two")}
        roots = {name: [node.all_processes["raylet"][0].process.pid] for name, node in nodes.items()}
        yield cluster.address, roots, lambda name: cluster.remove_node(nodes[name], allow_graceful=False)
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def dask_cluster() -> Iterator[tuple[str, dict[str, list[int]], Callable[[str], None]]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    quiet: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "start_new_session": True,
    }
    scheduler = ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port)]
    worker = ["distributed.cli.dask_worker", address, "--nworkers", "2", "--nthreads", "1", "--no-dashboard"]
    running = {"scheduler": subprocess.Popen([sys.executable, "-m", *scheduler, "--no-dashboard"], **quiet)}
    for name in ("one", "two"):
        running[name] = subprocess.Popen([sys.executable, "-m", *worker, "--name", name], **quiet)
    try:
        roots = {name: [running[name].pid] for name in ("one", "two")}
        yield address, roots, lambda name: os.killpg(running[name].pid, signal.SIGKILL)
    finally:
        for each in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def busiest(roots: dict[str, list[int]]) -> str:
    """The node whose processes have computed most."""

    def seconds(name: str) -> float:
        total = 0.0
        for root in roots[name]:
            for each in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += sum(each.cpu_times()[:2])
        return total

    return max(roots, key=seconds)


def on_cluster(open_cluster: Any, kind: str, folder: Path, epochs: int, kill_after: float | None) -> float:
    """Seconds; the cluster runs before they begin. kill_after: seconds since the first checkpoint."""
    with open_cluster() as (address, roots, kill):
        time.sleep(10)  # until its nodes have joined
        began = time.monotonic()
        process = start(folder, epochs, kind, address)
        if kill_after is not None:
            while len({p.parts[-3] for p in folder.glob("parts/*/checkpoint/state-*")}) < WORKERS:
                if process.poll() is not None:
                    raise RuntimeError("it ended before it was killed")
                time.sleep(0.1)
            time.sleep(kill_after)
            kill(busiest(roots))
        end(process)
        return time.monotonic() - began


CLUSTERS = {"ray": ray_cluster, "dask": dask_cluster}


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        folder, epochs, kind, address, chains, threads = sys.argv[2:]
        train(Path(folder), int(epochs), kind, address, int(chains), int(threads))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="", help="arrangements whose names hold this word")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    digests: dict[str, set[str]] = {}

    def note(name: str, taken: float, folder: Path) -> None:
        seconds.setdefault(name, []).append(round(taken, 1))
        if name not in LOCAL:
            digests.setdefault(name, set()).add(bits(folder))
        print(f"{name}: {taken:.1f} s", flush=True)
        if options.json:
            options.json.write_text(
                json.dumps(
                    {
                        "epochs": options.epochs,
                        "seconds": seconds,
                        "bits": {key: sorted(found) for key, found in digests.items()},
                    },
                    indent=1,
                )
            )

    with tempfile.TemporaryDirectory() as temporary:
        for repeat in range(options.repeats):
            for name, arrangement in (LOCAL | ENGINES).items():
                if options.only not in name:
                    continue
                folder = Path(temporary) / f"{name}-{repeat}"
                began = time.monotonic()
                arrangement(folder, options.epochs)
                note(name, time.monotonic() - began, folder)
        for kind, open_cluster in CLUSTERS.items():
            if options.only not in f"two nodes, {kind}":
                continue
            for how, kill_after in (("undisturbed", None), ("a node killed", 15.0)):
                for repeat in range(options.repeats if kill_after else 1):
                    folder = Path(temporary) / f"{kind}-{how}-{repeat}"
                    taken = on_cluster(open_cluster, kind, folder, options.epochs, kill_after)
                    note(f"two nodes, {kind}, {how}", taken, folder)
    best = min(min(taken) for name, taken in seconds.items() if name in LOCAL or options.only)
    print("\n| arrangement | seconds | of the best local one | bits |\n| --- | ---: | ---: | --- |")
    for name, taken in seconds.items():
        same = ", ".join(sorted(digests.get(name, ())))
        print(f"| {name} | {' '.join(map(str, taken))} | {min(taken) / best:.2f} | {same} |")


if __name__ == "__main__":
    main()
