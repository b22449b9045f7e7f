"""How near ``polymode plan`` comes to the truth: plans and runs of the same comparison, one after the other.

    python benchmarks/plan.py --json plan.json             # the cases that the planning was not made with
    python benchmarks/plan.py --cases digits --repeats 1
    python benchmarks/plan.py --development                # those it was made with

Each repeat plans a case, then trains and judges every method of it by ``polymode compare`` in a fresh
process, so that what else the machine does falls on both. Seconds are those of a run with its set-up;
memory is the most that the process held above what importing polymode takes; disk is the largest sum of
file sizes that was seen every ten milliseconds, and the sum at the end. The median of the repeats counts,
and every ratio planned / true is kept; of seconds also the ratio of the best, which neighbours disturb
least.

On a machine where others compute, the wall clock of a plan and of a run a minute later differ by whatever
they do in between. ``--clock cpu`` lets both count the processor's seconds of their process instead, by a
``sitecustomize`` that puts ``time.process_time`` in the place of ``time.perf_counter``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUANTITIES = ("seconds", "memory", "disk_running", "disk_finished", "member_epochs")


@dataclass(frozen=True)
class Case:
    """A comparison to plan.

    methods: with what is set where they take part. arguments: others of ``polymode compare`` and ``plan``.
    """

    title: str
    methods: Mapping[str, Sequence[str]]
    arguments: Sequence[str]

    def words(self, methods: Iterable[str], folder: Path) -> list[str]:
        """The arguments for some of the methods."""
        names = list(methods)
        settings = dict.fromkeys(setting for name in names for setting in self.methods[name])
        words = [word.format(folder=folder) for word in self.arguments]
        return [*words, "--methods", ",".join(names), *(f"--set={setting}" for setting in settings)]


TABLE = ("--data", "{folder}/table.csv", "--set=data.target=y", "--set=data.splits=1", "--model", "mlp")
TABLE += ("--likelihood", "fixed_gaussian")
LAST = ("all.keep=last",)  # what stops early is told as the most that it may cost

DEVELOPMENT = {
    "moons": Case(
        "two moons, MLP 2-50-50-2",
        dict.fromkeys(("single", "deep_ensemble", "mean_field", "snapshot"), ()),
        ("--data", "two_moons", "--budget", "400", "--seeds", "2", "--validation", "none"),
    ),
    "digits_small": Case(
        "digits, small CNN",
        dict.fromkeys(("deep_ensemble", "sequential_anchored", "mc_dropout"), LAST),
        ("--budget", "150", "--seeds", "1"),
    ),
}

HELD_OUT = {
    "table": Case(
        "a table of 2,000 rows, MLP with two layers of 100",
        {"deep_ensemble": LAST, "anchored": LAST, "hmc": ("hmc.num_samples=50",)},
        (*TABLE, "--set=model.hidden=[100,100]", "--budget", "600", "--seeds", "2"),
    ),
    "digits": Case(
        "handwritten digits, small CNN",
        dict.fromkeys(("single", "batch_ensemble", "swag", "mean_field"), LAST),
        ("--data", "digits", "--budget", "150", "--seeds", "3"),
    ),
    "wide": Case(
        "a table of 2,000 rows, MLP with two layers of 1,000",
        {"sequential_anchored": LAST, "late_phase": (*LAST, "late_phase.head=True"), "deep_ensemble": LAST},
        (*TABLE, "--set=model.hidden=[1000,1000]", "--budget", "60", "--seeds", "1"),
    ),
}


# --- the truth ----------------------------------------------------------------------------------------


def polymode(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polymode", *arguments]
    paths = [str(folder / "clock"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment)


CPU_CLOCK = "import time\n\ntime.perf_counter = time.process_time\n"


def size_of(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(place, name))
            except OSError:  # it was removed in between
                continue
    return total


def truth(case: Case, method: str, folder: Path) -> dict[str, float]:
    """What a comparison of one method costs in a fresh process."""
    run, most, ended = folder / "run", [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            most[0] = max(most[0], size_of(run / method))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        words = case.words([method], folder)
        polymode(["compare", *words, "--baselines", "none", "--run", str(run), "--quiet"], folder)
    finally:
        wall = time.perf_counter() - began
        ended.set()
        watcher.join()
    manifest = json.loads((run / method / "manifest.json").read_text())
    spent = manifest["spent"]
    record = json.loads((run / method / "posterior-0" / "posterior.json").read_text())["record"]
    finished = size_of(run / method)
    subprocess.run(["rm", "-r", str(run)], check=True)
    return {
        "seconds": record["total_seconds"],
        "training_seconds": record["training_seconds"],
        "wall_seconds": wall,
        "peak_bytes": spent[0]["peak_memory_mb"] * 2**20,
        "disk_running": most[0],
        "disk_finished": finished,
        "member_epochs": sum(each["member_epochs"] for each in spent),
        "backend": record["backend"],
        "threads": record["threads"],
    }


# --- the plan -----------------------------------------------------------------------------------------


def planned(case: Case, folder: Path, workers: str) -> dict[str, Any]:
    words = case.words(case.methods, folder)
    said = polymode(["plan", *words, "--workers", workers, "--json", "--quiet"], folder)
    return json.loads(said.stdout)


def compared(plan: dict[str, Any], true: dict[str, float]) -> dict[str, Any]:
    """What was planned and what was true of one method, and the ratios."""
    found, base = plan["forecast"], plan["base_bytes"]
    told = {
        "seconds": found["seconds"],
        "memory": found["memory_bytes"] - base,
        "disk_running": found["disk_running"],
        "disk_finished": found["disk_finished"],
        "member_epochs": found["member_epochs"] * found["num_data_sets"],
    }
    seen = true | {"memory": true["peak_bytes"] - base}
    return {
        "planned": told | {"backend": found["execution"]["backend"], "setup": found["setup_seconds"]},
        "true": seen,
        "ratio": {name: told[name] / seen[name] for name in QUANTITIES},
    }


def write_table(path: Path) -> None:
    """Friedman's first function with noise."""
    import numpy as np

    chance = np.random.default_rng(0)
    inputs = chance.uniform(size=(2000, 10))
    signal = 10 * np.sin(np.pi * inputs[:, 0] * inputs[:, 1]) + 20 * (inputs[:, 2] - 0.5) ** 2
    y = signal + 10 * inputs[:, 3] + 5 * inputs[:, 4] + chance.normal(size=2000)
    names = [*(f"x{i}" for i in range(10)), "y"]
    lines = [",".join(f"{value:.6f}" for value in row) for row in np.column_stack([inputs, y])]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")


def measure(case: Case, repeats: int, clock: str) -> dict[str, Any]:
    """All repeats of a case, and the median ratio of every method and quantity."""
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="polymode-plan-benchmark-") as temporary:
        folder = Path(temporary)
        write_table(folder / "table.csv")
        if clock == "cpu":
            (folder / "clock").mkdir()
            (folder / "clock" / "sitecustomize.py").write_text(CPU_CLOCK)
        for _ in range(repeats):
            plan = planned(case, folder, "1")
            of_methods = {each["label"]: each for each in plan["methods"]}
            found = {m: compared(of_methods[m], truth(case, m, folder)) for m in case.methods}
            rounds.append({"methods": found, "total": plan["total"], "refused": plan["refused"]})
            for method, each in found.items():
                told = ", ".join(f"{name} {value:.2f}" for name, value in each["ratio"].items())
                print(f"  {method}: {told}; {each['true']['seconds']:.1f} s", flush=True)
    medians = {
        method: {
            name: statistics.median(r["methods"][method]["ratio"][name] for r in rounds)
            for name in QUANTITIES
        }
        | {"best_seconds": _best(rounds, method, "planned") / _best(rounds, method, "true")}
        for method in case.methods
    }
    load = os.getloadavg()[2]
    return {
        "title": case.title,
        "clock": clock,
        "load": load,
        "arguments": list(case.arguments),
        "median_ratio": medians,
        "rounds": rounds,
    }


def _best(rounds: Sequence[dict[str, Any]], method: str, kind: str) -> float:
    return min(each["methods"][method][kind]["seconds"] for each in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default="", help="names with commas (default: all that were held out)")
    parser.add_argument("--development", action="store_true", help="the cases the planning was made with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", default="", help="file for all numbers")
    options = parser.parse_args()
    known = DEVELOPMENT if options.development else HELD_OUT
    results = {}
    for name in options.cases.split(",") if options.cases else known:
        print(f"{name}: {known[name].title}", flush=True)
        results[name] = measure(known[name], options.repeats, options.clock)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    for name, result in results.items():
        for method, ratios in result["median_ratio"].items():
            print(
                f"{name:14}{method:22}"
                + "".join(f"{ratios[q]:>16.2f}" for q in (*QUANTITIES, "best_seconds"))
            )


if __name__ == "__main__":
    main()
