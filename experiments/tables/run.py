"""Compare all default methods on a collection of real tables, and tell what they reach in one row each.

    python experiments/tables/collection.py tables
    python experiments/tables/run.py tables --part development --out results/development.csv
    python experiments/tables/run.py tables --part held_out --out results/held-out.csv

Development tables, on which defaults were chosen, are cut to four fifths of their rows first, so that no row
that anything was chosen on is ever a test row of somebody else. Every table is a resumable run of
``polymode compare`` with its own options only: target, kind of task, columns that give the target away.
NLLs are in standardised units: of targets divided by the standard deviation of all rows.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas

SHARE = 0.8


def main() -> None:
    """Run, gather, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what collection.py wrote")
    parser.add_argument("--part", choices=("development", "held_out"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="CSV: a row for every table and method")
    parser.add_argument("--runs", type=Path, default=Path("runs/tables"))
    parser.add_argument("--only", nargs="*", default=[], help="names of tables")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--options", default="", help="further options of polymode compare")
    given = parser.parse_args()
    tables = json.loads((given.folder / "tables.json").read_text())
    chosen = [t for t in tables if t["held_out"] == (given.part == "held_out")]
    chosen = [t for t in chosen if not given.only or t["name"] in given.only]
    with ThreadPoolExecutor(given.workers) as pool:
        found = list(pool.map(lambda t: compared(t, given), chosen))
    rows = [row for some in found for row in some]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def compared(table: dict[str, Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    """One table: a row for every method and baseline."""
    path = given.folder / table["file"]
    if given.part == "development":
        path = _cut(path, table, given.runs / "files")
    run = given.runs / given.part / table["name"]
    settings = {"data.target": table["target"], "data.task": table["task"], "data.drop": list(table["drop"])}
    command = [sys.executable, "-m", "polymode", "compare", "--data", str(path), "--run", str(run), "--json"]
    command += [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
    command += ["--threads=1", *given.options.split()]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    print(f"{table['name']}: exit {done.returncode}, {seconds:.0f} s", flush=True)
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
        return [{"table": table["name"], "failed": done.stderr.strip().splitlines()[-1][:200]}]
    result = json.loads(done.stdout)
    return [_row(table, row, result, path, seconds) for row in result["rows"]]


def _row(
    table: dict[str, Any], row: dict[str, Any], result: dict[str, Any], path: Path, seconds: float
) -> dict[str, Any]:
    verdict = result.get("verdict", {})
    kept = {
        "table": table["name"],
        "task": table["task"],
        "method": row["method"],
        "baseline": row["baseline"],
        "recommended": row["method"] == verdict.get("recommended"),
        "rival": row["method"] == verdict.get("baseline"),
        "mark": row["mark"],
        "nll": row["nll"] if "nll" in row else -row["log_density"] - math.log(_deviation(path, table)),
        "nll_se": row.get("nll_se", row.get("log_density_se")),
        "coverage90": row.get("coverage90"),
        "member_epochs": row["member_epochs"],
        "seconds": row["seconds"],
        "table_seconds": round(seconds),
    }
    return {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in kept.items()}


def _deviation(path: Path, table: dict[str, Any]) -> float:
    """The standard deviation of the target, of all rows."""
    from polymode.application.datasets.frames import read_frame
    from polymode.data.encoding import as_numbers

    values = as_numbers(read_frame(path)[table["target"]], table["target"])
    return float(pandas.Series(values).dropna().std(ddof=0))


def _cut(path: Path, table: dict[str, Any], folder: Path) -> Path:
    """Four fifths of the rows of a table, drawn once, as a file in the same form."""
    from polymode.application.datasets.frames import read_frame

    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{table['name']}.parquet"
    if not kept.exists():
        frame = read_frame(path).sample(frac=SHARE, random_state=0).sort_index().reset_index(drop=True)
        for name in frame.columns:  # cells of several types are text in a file of one type
            if frame[name].dtype == object:
                frame[name] = frame[name].where(frame[name].isna(), frame[name].astype(str))
        frame.to_parquet(kept)
    return kept


if __name__ == "__main__":
    main()
