"""What keeping a long run costs: memory, bytes and seconds of writing, at default settings.

python benchmarks/long_runs.py [--case ensemble ...] [--json long_runs.json]

Each case is a fresh process with a run folder. ensemble: 10 small MLPs with validation over 10,000 epochs;
sequential: 1,000 members of one chain, one after another; trajectory: a member after each of 1,000 epochs;
large: 2 networks of 18 million parameters with Adam. Seconds of writing are those of the manifest, the event
log, the checkpoints and the finished members while the run trains; the finished posterior is not among them.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import polymode as pm
from polymode.posteriors.particles import MemberStore
from polymode.training.keeping.folder import RunFolder

# What writes while a run trains; the time of one inside another counts once.
WRITERS = {
    "manifest": (RunFolder, "began"),
    "events": (RunFolder, "log_epoch"),
    "checkpoints": (RunFolder, "save"),
    "members": (MemberStore, "append"),
}
CASES = {  # epochs
    "ensemble": 10_000,
    "sequential": 2_098,
    "trajectory": 1_000,
    "large": 250,
}


def fit(case: str, epochs: int, folder: Path, observer: Callable) -> pm.Posterior:
    generator = torch.Generator().manual_seed(0)
    rows, width = (200, 3_000) if case == "large" else (500, 8)
    x = torch.randn(rows, width, generator=generator)
    data, held_out = (pm.ArrayData(x, x[:, :1].sin(), batch_size=100) for _ in range(2))
    single = pm.methods.Single()
    methods = {
        "ensemble": lambda: pm.methods.DeepEnsemble(10, of=single),
        "sequential": lambda: pm.methods.SequentialAnchored(),
        "trajectory": lambda: pm.methods.Trajectory(single),
        "large": lambda: pm.methods.DeepEnsemble(2, of=single),
    }
    hidden = (3_000, 3_000) if case == "large" else (16,)
    return pm.fit(
        methods[case](),
        lambda: pm.models.MLP(width, 1, hidden),
        data,
        likelihood="gaussian",
        epochs=epochs,
        validation=held_out,
        run_dir=folder,
        observer=observer,
        progress=False,
    )


def measure(case: str, epochs: int, marks: list[int], answers: Any) -> None:
    seconds, calls, inside = dict.fromkeys(WRITERS, 0.0), dict.fromkeys(WRITERS, 0), [""]
    cpu, cpu_at = [0.0], {}  # seconds of this thread: a busy machine changes them little

    def timed(kind: str, function: Callable) -> Callable:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            outer, inside[0] = inside[0], kind
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                inside[0] = outer
                calls[kind] += 1
                if not outer:
                    seconds[kind] += time.perf_counter() - began
                    cpu[0] += time.thread_time() - cpu_began

        return call

    for kind, (owner, name) in WRITERS.items():
        setattr(owner, name, timed(kind, getattr(owner, name)))
    resident: dict[int, float] = {}
    written: list[int] = []  # at the end of the first and of the latest epoch

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        largest = {"state": 0, "document": 0}

        def observe(epoch: Any) -> None:
            if epoch.epochs_done in (1, epochs):
                cpu_at[epoch.epochs_done == 1] = time.thread_time(), cpu[0]
            written.append(_written())
            del written[1:-1]
            if epoch.epochs_done in marks:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                resident[epoch.epochs_done] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            if epoch.epochs_done % 100 == 0:
                for kind, pattern in (("state", "state-*"), ("document", "checkpoint.json")):
                    sizes = [path.stat().st_size for path in (folder / "checkpoint").glob(pattern)]
                    largest[kind] = max(largest[kind], *sizes, 0)

        posterior = fit(case, epochs, folder, observe)
        answers.put(
            {
                "case": case,
                "epochs": epochs,
                "resident_mb": resident,
                "training_seconds": posterior.record["training_seconds"],
                "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
                "calls": calls,
                "share_percent": round(100 * sum(seconds.values()) / posterior.record["training_seconds"], 2),
                "cpu_share_percent": _share(cpu_at[True], cpu_at[False]),
                "written_mb": round((written[-1] - written[0]) / 1e6, 2),
                "log_mb": round((folder / "events.jsonl").stat().st_size / 1e6, 3),
                "checkpoint_kb": {kind: round(size / 1e3, 1) for kind, size in largest.items()},
            }
        )


def _share(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Percent that writing takes of the CPU seconds between two moments."""
    return round(100 * (last[1] - first[1]) / (last[0] - first[0]), 2)


def _written() -> int:
    """Bytes that this process has written so far."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(dict(lines)["wchar"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--epochs", type=int, help="instead of those of the case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context, found = multiprocessing.get_context("spawn"), []
    for case in options.case:
        epochs = options.epochs or CASES[case]
        marks = sorted({epochs // 100, epochs // 10, epochs // 2, epochs} - {0})
        answers = context.SimpleQueue()
        process = context.Process(target=measure, args=(case, epochs, marks, answers))
        process.start()
        found.append(answers.get())
        process.join()
        print(json.dumps(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
