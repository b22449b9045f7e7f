"""The laws of ``docs/scaling.md`` at three sizes each: made from the outer ones, checked at the middle one.

    python benchmarks/scaling.py --json scaling.json       # ten minutes on a busy machine
    python benchmarks/scaling.py --laws checkpoint,posterior

Everything is what ``polymode.training.loop.forecast`` finds in a fresh process, with one thread. Seconds are
those of the processor (``time.process_time``), the best of ``--repeats``, so that what else the machine does
counts little.
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from polymode.networks.members import Backend
from polymode.training.contract.phase import Keep

BYTES = 4  # of a weight


@dataclass(frozen=True)
class Job:
    """A training whose cost is told: so many members of an MLP with two layers of so many units."""

    members: int = 10
    width: int = 100
    rows: int = 1000
    method: str = "deep_ensemble"
    backend: Backend = "vmap"
    keep: Keep = "last"

    @property
    def parameters(self) -> int:
        return 20 * self.width + self.width + self.width**2 + self.width + 2 * self.width + 2


def measured(job: Job) -> dict[str, float]:
    """What a fresh process finds."""
    import polymode as pm
    from polymode.training.loop.fit import request_for
    from polymode.training.loop.forecast import forecast
    from polymode.training.loop.run import peak_memory
    from polymode.training.loop.settings import Computing

    torch.set_num_threads(1)
    time.perf_counter = time.process_time
    methods = {
        "deep_ensemble": lambda: pm.methods.DeepEnsemble(job.members, of=pm.methods.Single(keep=job.keep)),
        "anchored": lambda: pm.methods.Anchored(job.members, prior_std=1.0, keep=job.keep),
        "sequential_anchored": lambda: pm.methods.SequentialAnchored(1, prior_std=1.0, short_epochs=1),
        "mean_field": lambda: pm.methods.DeepEnsemble(job.members, of=pm.methods.MeanField(prior_std=1.0)),
    }
    method = methods[job.method]()
    generator = torch.Generator().manual_seed(0)
    base = peak_memory(torch.device("cpu"))
    inputs = torch.randn(job.rows, 20, generator=generator)
    data = pm.ArrayData(inputs, (inputs.sum(1) > 0).long(), batch_size=100)
    computing = Computing(backend=job.backend, threads=1)
    width = job.width
    request = request_for(
        method,
        lambda: pm.models.MLP(20, 2, (width, width)),
        data,
        computing,
        likelihood="categorical",
        epochs=2 * job.members - 1 if job.method == "sequential_anchored" else 5,
        validation=data,
    )
    if job.method == "sequential_anchored":
        request = replace(request, method=replace(method, first_epochs=job.members))
    found = forecast(request, computing, trial_seconds=1.0)
    return {
        "step": found.step_seconds,
        "end": sum(phase.end_seconds for phase in found.phases),
        "epoch": sum(phase.steps * phase.step_seconds for phase in found.phases[:1]),
        "memory": found.memory_bytes - base,
        "checkpoint": found.checkpoint_bytes,
        "posterior": found.posterior_bytes,
        "members": found.num_members or 0,
    }


def in_fresh_processes(job: Job, repeats: int) -> dict[str, float]:
    """The least of every number that so many processes find."""
    found = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(measured, job).result())
    return {name: min(each[name] for each in found) for name in found[0]}


@dataclass(frozen=True)
class Law:
    """``quantity`` = fixed + slope·x at three sizes of a job; unit: what a slope is counted in."""

    name: str
    quantity: str
    jobs: tuple[Job, Job, Job]
    of: str  # what x is: members, weights (members times parameters) or rows

    def x(self, job: Job) -> float:
        kinds = {"members": job.members, "weights": job.members * job.parameters * BYTES, "rows": job.rows}
        return float(kinds[self.of])


JOB = Job()


def sizes(field: str, values: tuple[int, int, int], job: Job = JOB) -> tuple[Job, Job, Job]:
    first, second, third = (replace(job, **{field: value}) for value in values)
    return first, second, third


K, W, N = ("members", (2, 20, 60)), ("width", (100, 500, 1000)), ("rows", (1000, 10_000, 30_000))
MEMORY = ("members", (2, 10, 30))
LAWS = [
    Law("a step of K members, vmap", "step", sizes(*K), "members"),
    Law("a step of K members, loop", "step", sizes(*K, Job(backend="loop")), "members"),
    Law("validation and the end of an epoch, K members", "end", sizes(*K), "members"),
    Law("an epoch of N rows", "epoch", sizes(*N), "rows"),
    Law("memory, K members of two layers of 500, vmap", "memory", sizes(*MEMORY, Job(width=500)), "weights"),
    Law(
        "memory, K members of two layers of 500, loop",
        "memory",
        sizes(*MEMORY, Job(width=500, backend="loop")),
        "weights",
    ),
    Law("a checkpoint, deep_ensemble with Adam", "checkpoint", sizes(*K), "weights"),
    Law("a checkpoint, keep='best'", "checkpoint", sizes(*K, Job(keep="best")), "weights"),
    Law("a checkpoint, anchored", "checkpoint", sizes(*K, Job(method="anchored")), "weights"),
    Law("a checkpoint, mean_field", "checkpoint", sizes(*K, Job(method="mean_field")), "weights"),
    Law("a checkpoint, wider networks", "checkpoint", sizes(*W), "weights"),
    Law("a posterior, deep_ensemble", "posterior", sizes(*K), "weights"),
    Law("a posterior, mean_field", "posterior", sizes(*K, Job(method="mean_field")), "weights"),
]


def checked(law: Law, known: dict[Job, dict[str, float]], repeats: int) -> dict[str, Any]:
    """The law through the outer sizes, and how far from the middle one it is."""
    for job in law.jobs:
        if job not in known:
            known[job] = in_fresh_processes(job, repeats)
    x = [law.x(job) for job in law.jobs]
    y = [known[job][law.quantity] for job in law.jobs]
    slope = (y[2] - y[0]) / (x[2] - x[0])
    fixed = y[0] - slope * x[0]
    told = fixed + slope * x[1]
    return {
        "law": law.name,
        "of": law.of,
        "x": x,
        "measured": y,
        "fixed": fixed,
        "slope": slope,
        "told": told,
        "ratio": told / y[1],
    }


def gigaflops(size: int = 1024) -> float:
    """What one thread reaches in a large product of matrices, by the processor's clock."""
    torch.set_num_threads(1)
    a = torch.randn(size, size)
    best = math.inf
    for _ in range(10):
        began = time.process_time()
        torch.mm(a, a)
        best = min(best, time.process_time() - began)
    return 2 * size**3 / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", default="", help="file for all numbers")
    parser.add_argument("--laws", default="", help="quantities with commas (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    wanted = options.laws.split(",") if options.laws else {law.quantity for law in LAWS}
    known: dict[Job, dict[str, float]] = {}
    found = []
    for law in (law for law in LAWS if law.quantity in wanted):
        found.append(checked(law, known, options.repeats))
        each = found[-1]
        print(
            f"{law.name:50} {each['fixed']:12.4g} + {each['slope']:10.4g} x   "
            f"told / measured {each['ratio']:.3f}   {[float(f'{y:.4g}') for y in each['measured']]}",
            flush=True,
        )
    reached = gigaflops()
    print(f"{reached:.0f} GFLOP/s in a product of matrices with one thread")
    if options.json:
        content = {"laws": found, "gigaflops": reached, "load": os.getloadavg()[2]}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
