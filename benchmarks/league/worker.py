"""One contender at one job in a process of its own: ``python -m league.worker CONTENDER JOB --threads 1``.

The last line that it prints is JSON: the seconds of every timed call, those of the first call and of
compilation, what the contender reports of itself, and versions.
"""

import argparse
import json
import os
import time
from importlib import import_module
from importlib.metadata import version

from league.contenders import CONTENDERS, Contender
from league.jobs import JOBS, Sizes, Timed

LEAST_SECONDS, MOST_CALLS = 1.0, 5  # a short job is timed several times, and each time is reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cold", action="store_true", help="stop after the first call")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # XLA takes as many threads as it may use cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    contender, job = CONTENDERS[options.contender], JOBS[options.job]
    print(json.dumps(measure(contender, job.kind, job.quick if options.quick else job.sizes, options.cold)))


def measure(contender: Contender, kind: str, sizes: Sizes, cold: bool) -> dict:
    if contender.environment not in (None, "jax"):
        from league.torchvision_operators import define_missing_operators

        define_missing_operators()
    began = time.perf_counter()
    timed: Timed = getattr(import_module(f"league.by_{contender.module}"), kind)(sizes, **contender.options)
    built = time.perf_counter()
    (timed.warm_up or timed.run)()
    first = time.perf_counter()
    calls = []
    while not cold and (
        not calls or (sum(c["seconds"] for c in calls) < LEAST_SECONDS and len(calls) < MOST_CALLS)
    ):
        start = time.perf_counter()
        facts = timed.run() or {}
        calls.append({"seconds": time.perf_counter() - start, **facts})
    return {
        "calls": calls,
        "build_seconds": built - began,
        "first_seconds": first - built,
        "compilation_seconds": timed.compilation,
        "facts": timed.facts,
        "versions": {name: version(name) for name in contender.packages},
    }


if __name__ == "__main__":
    main()
