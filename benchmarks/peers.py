"""Time polymode beside its peers, plain PyTorch loops and JAX by hand: a league table of ratios.

    python benchmarks/peers.py                                       # everything
    python benchmarks/peers.py --jobs 'mlp*,hmc3' --peers loop,jax-scan,blackjax --out results.json
    python benchmarks/peers.py --quick --repeats 1                   # does everything run? Times mean nothing

Peers get virtual environments of their own, with pinned versions, which are made when they are first needed
and used again later. What cannot be made or done is told in its cell.

Each measurement is a fresh process, held to as many cores as threads, that warms up (polymode with the whole
job, most others with an epoch of it, Pyro with one short chain) and then times the job; one that takes less
than a second is timed up to five times. Contenders take turns, and the best time counts. Ratios are the
contender's seconds over those of polymode: above 1 polymode is faster. Its seconds are whole calls of
``fit``, which choose a backend each time and read compiled graphs from PyTorch's cache on disk; those of the
training alone and of the first call of all, with an empty cache, stand beside them. JAX compiles ahead, which
is counted apart; whole calls of Lightning's trainers are timed, with logging, checkpoints and progress off.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from league.contenders import CONTENDERS, OWN
from league.environments import NotMade, default_folder, interpreter
from league.jobs import JOBS, Job

FOLDER = Path(__file__).resolve().parent
TIME_LIMIT = 3600  # seconds of a process
TOLERANCE = 1e-4  # between values of one potential that different libraries compute in single precision


class Failed(Exception):
    """A process that did not do its job; the message is the reason."""


def start(
    python: Path | str, contender: str, job: str, options: argparse.Namespace, cache: str, cold: bool = False
) -> dict:
    """What a fresh process reports of a contender at a job; cache: where PyTorch keeps compiled graphs."""
    threads = str(options.threads)
    paths = [str(FOLDER)]
    if CONTENDERS[contender].environment is None and "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    environment = os.environ | {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_CACHE_DIR": cache,
    }
    command = [str(python), "-m", "league.worker", contender, job, "--threads", threads]
    command += ["--quick"] * options.quick + ["--cold"] * cold
    with TemporaryDirectory() as folder:  # some peers write files where they are started
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {TIME_LIMIT} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Failed(f"failed: {lines[-1] if lines else f'ended with {done.returncode}'}")
    return json.loads(done.stdout.splitlines()[-1])


def reason_against(contender: str, name: str, job: Job) -> str | None:
    cannot = CONTENDERS[contender].cannot
    return cannot.get(name) or cannot.get(job.kind)


def measure(
    name: str,
    contenders: list[str],
    pythons: dict[str, Path | str],
    missing: dict[str, str],
    options: argparse.Namespace,
) -> dict:
    """All contenders at one job: what their processes reported, or why there is nothing."""
    job = JOBS[name]
    sizes = job.quick if options.quick else job.sizes
    cells: dict[str, dict] = {}
    for contender in contenders:
        reason = reason_against(contender, name, job) or missing.get(contender)
        cells[contender] = {"turns": []} if reason is None else {"reason": reason}
    with TemporaryDirectory() as cache:
        for turn in range(-1, options.repeats):
            for contender, cell in cells.items():
                cold = turn < 0
                if "reason" in cell or (cold and contender != OWN):
                    continue
                print(f"{name}: {contender}, {'first call' if cold else f'turn {turn + 1}'}", file=sys.stderr)
                try:
                    found = start(pythons[contender], contender, name, options, cache, cold)
                except Failed as failed:
                    cell["reason"] = str(failed)
                    print(f"{contender} {failed}", file=sys.stderr)
                    continue
                if cold:
                    cell["cold_seconds"] = found["first_seconds"]
                else:
                    cell["turns"].append(found)
    for cell in cells.values():
        if "reason" not in cell:
            summarise(cell)
            if job.work is not None:
                amount, unit = job.work(sizes)
                cell[f"{unit}_per_second"] = amount / cell["seconds"]
    check_potentials(cells)
    if "reason" not in cells[OWN]:
        for cell in cells.values():
            if "reason" not in cell:
                cell["ratio"] = cell["seconds"] / cells[OWN]["seconds"]
    return {"job": name, "title": job.title, "cells": cells}


def summarise(cell: dict) -> None:
    """The best of all turns, beside the list of them."""
    calls = [call for turn in cell["turns"] for call in turn["calls"]]
    cell["seconds"] = min(call["seconds"] for call in calls)
    cell["versions"] = cell["turns"][0]["versions"]
    if any("training_seconds" in call for call in calls):
        cell["training_seconds"] = min(call["training_seconds"] for call in calls)
    if "acceptance" in calls[0]:
        cell["acceptance"] = calls[0]["acceptance"]
    compilations = [turn["compilation_seconds"] for turn in cell["turns"]]
    if None not in compilations:
        cell["compilation_seconds"] = min(compilations)


def check_potentials(cells: dict[str, dict]) -> None:
    """Samplers of one posterior must agree on its potential; who does not agree with polymode is left out."""
    found = {
        contender: cell["turns"][0]["facts"]["potential"]
        for contender, cell in cells.items()
        if "seconds" in cell and "potential" in cell["turns"][0]["facts"]
    }
    for contender, potential in found.items():
        if abs(potential - found.get(OWN, potential)) > TOLERANCE * abs(potential):
            cells[contender]["reason"] = f"another potential: {potential:g} instead of {found[OWN]:g}"


# --- showing -------------------------------------------------------------------------------------------


def cell_text(contender: str, cell: dict) -> str:
    if "reason" in cell:
        return cell["reason"]
    if contender != OWN:
        compiled = cell.get("compilation_seconds")
        ratio = f"{cell['ratio']:.2f}" if "ratio" in cell else f"{cell['seconds']:.3g} s"
        return ratio if compiled is None else f"{ratio} (compiles {compiled:.1f} s)"
    facts = []
    if "training_seconds" in cell:
        facts = [f"training {cell['training_seconds']:.3g}", f"first {cell['cold_seconds']:.3g}"]
    return f"{cell['seconds']:.3g} s" + (f" ({', '.join(facts)})" if facts else "")


def markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def ratios(results: list[dict], contenders: list[str]) -> str:
    """The league table: a job a row, a contender a column."""
    rows = [["job", *(CONTENDERS[contender].title for contender in contenders)]]
    for result in results:
        cells = result["cells"]
        rows.append([result["title"], *(cell_text(contender, cells[contender]) for contender in contenders)])
    return markdown(rows)


def seconds(results: list[dict]) -> str:
    """What was measured, a line each."""
    rows = [["job", "contender", "seconds", "a second", "compilation, s", "acceptance"]]
    for result in results:
        for contender, cell in result["cells"].items():
            if "reason" in cell:
                continue
            rates = [f"{cell[key]:,.4g} {key.removesuffix('_per_second')}" for key in cell if "_per_" in key]
            facts = ("compilation_seconds", "acceptance")
            known = [f"{cell[fact]:.3g}" if fact in cell else "" for fact in facts]
            title = CONTENDERS[contender].title
            rows.append([result["job"], title, f"{cell['seconds']:.4g}", "".join(rates), *known])
    return markdown(rows)


def versions(results: list[dict]) -> str:
    found: dict[str, dict[str, str]] = {}
    for result in results:
        for contender, cell in result["cells"].items():
            found |= {contender: cell["versions"]} if "versions" in cell else {}
    lines = (
        f"- {CONTENDERS[contender].title}: {', '.join(f'{name} {v}' for name, v in packages.items())}"
        for contender, packages in found.items()
    )
    return "\n".join(lines)


# --- the command ---------------------------------------------------------------------------------------


def chosen(given: str, known: list[str], what: str, parser: argparse.ArgumentParser) -> list[str]:
    patterns = given.split(",")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            parser.error(f"unknown {what} {pattern!r}; known: {', '.join(known)}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def find_pythons(jobs: list[str], contenders: list[str], folder: Path) -> tuple[dict, dict[str, str]]:
    """Interpreters of contenders that have something to do, and why others have none."""
    pythons: dict[str, Path | str] = {}
    missing: dict[str, str] = {}
    failures: dict[str, str] = {}  # of environments, each of which is tried once
    for contender in contenders:
        environment = CONTENDERS[contender].environment
        if environment is None:
            pythons[contender] = sys.executable
        elif all(reason_against(contender, name, JOBS[name]) for name in jobs):
            continue
        elif environment in failures:
            missing[contender] = failures[environment]
        else:
            try:
                pythons[contender] = interpreter(environment, folder)
            except NotMade as failed:
                missing[contender] = failures[environment] = f"no environment: {failed}"
                print(f"{contender}: {missing[contender]}", file=sys.stderr)
    return pythons, missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", default="*", help="comma-separated, * for any: " + ", ".join(JOBS))
    parser.add_argument("--peers", default="*", help="comma-separated, * for any: " + ", ".join(CONTENDERS))
    parser.add_argument("--environments", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads, and cores, of every process")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every contender")
    parser.add_argument("--quick", action="store_true", help="tiny jobs, to see that all of them run")
    parser.add_argument("--out", type=Path, help="also write everything that was measured to this file")
    options = parser.parse_args()
    names = chosen(options.jobs, list(JOBS), "job", parser)
    contenders = chosen(options.peers, list(CONTENDERS), "peer", parser)
    contenders = [OWN, *(contender for contender in contenders if contender != OWN)]
    pythons, missing = find_pythons(names, contenders, options.environments)
    setting = {
        "command": " ".join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        "threads": options.threads,
        "repeats": options.repeats,
        "quick": options.quick,
        "python": platform.python_version(),
    }
    results = []
    for name in names:
        results.append(measure(name, contenders, pythons, missing, options))
        if options.out:
            options.out.write_text(json.dumps(setting | {"results": results}, indent=2))
    print(f"\n`{setting['command']}`: {options.threads} thread(s), best of {options.repeats} turn(s).")
    print("Tiny sizes, not those of the titles: times mean nothing.\n" if options.quick else "")
    print(ratios(results, contenders), seconds(results), versions(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
