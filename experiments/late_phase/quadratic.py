"""The noisy quadratic problem, late-phase weights beside independent models (von Oswald et al. 2021, Fig. 1).

    python experiments/late_phase/quadratic.py

dim = 100, H_ii = 1/i, Σ = H⁻¹, w* = 1, γ = 1/K, started at w*, over four times the steps in which the slowest
weight forgets its start; the second half is averaged. Their rate, batch and w* are not stated: three
rates are run, the largest also for longer, until the scales of θ and φ are at rest. Results that the table
holds already are not computed again. Losses of the single seeds are in results/quadratic-replicates.csv.
"""

import argparse
import csv
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from noisy_quadratic import NoisyQuadratic
from steady_loss import steady_loss_figure

from polymode.application.comparison import replicates_path

MEMBERS = (1, 2, 5, 10, 15, 20, 25)
RATES = (0.05, 0.01, 0.002)
LONG = (0.05, 100_000)  # a rate, and steps enough for φ² to come to rest
COLUMNS = ("kind", "rate", "num_steps", "num_members", "seeds", "loss", "loss_se", "theory", "times_members")
REPLICATE = ("kind", "rate", "num_steps", "num_members", "seed", "loss")


def jobs(problem: NoisyQuadratic) -> list[tuple[str, float, int]]:
    """Kind, rate and steps of every simulation; independent models first, others are compared to them."""
    found = []
    for rate in RATES:
        steps = 4 * problem.steps_to_rest(rate)
        found += [("independent", rate, steps), ("late phase", rate, steps)]
    return [*found, ("late phase", *LONG)]


def simulate(
    problem: NoisyQuadratic, kind: str, rate: float, steps: int, seeds: int
) -> tuple[list[dict], list[dict]]:
    """Rows of the table for all numbers of members, and those of every seed."""
    run = problem.factored if kind == "independent" else problem.late_phase
    losses = run(rate, MEMBERS, num_steps=steps, num_seeds=seeds)
    errors = losses.std(1) / math.sqrt(seeds)
    rows = []
    for count, loss, error in zip(MEMBERS, losses.mean(1).tolist(), errors.tolist(), strict=True):
        if kind == "independent":
            theory = problem.factored_loss(rate, count)
        else:
            theory = problem.late_phase_loss(
                rate, count, square=math.sqrt(count) if (rate, steps) == LONG else 1.0
            )
        values = (kind, rate, steps, count, seeds, f"{loss:.6g}", f"{error:.2g}", f"{theory:.6g}")
        rows.append(dict(zip(COLUMNS, values, strict=False)))
    each = [
        dict(zip(REPLICATE, (kind, rate, steps, count, seed, loss), strict=True))
        for count, of_count in zip(MEMBERS, losses.tolist(), strict=True)
        for seed, loss in enumerate(of_count)
    ]
    return rows, each


def key(row: dict) -> tuple[str, float, int]:
    """What a row is about."""
    return row["kind"], float(row["rate"]), int(row["num_steps"])


def ones(rows: list[dict]) -> dict[float, float]:
    """The loss of one model at every rate: the mean over all independent ones."""
    chosen = [row for row in rows if row["kind"] == "independent" and int(row["num_members"]) == 1]
    return {float(row["rate"]): float(row["loss"]) for row in chosen}


def draw(rows: list[dict], path: Path) -> None:
    """Write the figure."""
    curves: dict[str, dict[str, dict[str, list[float]]]] = {}
    one = {}
    for row in rows:
        kind, rate, steps = key(row)
        label = f"η = {rate:g}" + (f", {steps:,} steps" if (rate, steps) == LONG else "")
        curve = curves.setdefault(label, {}).setdefault(kind, {"members": [], "loss": [], "error": []})
        one[label] = ones(rows)[rate]
        for name, column in (("members", "num_members"), ("loss", "loss"), ("error", "loss_se")):
            curve[name].append(float(row[column]))
    steady_loss_figure(curves, one=one).write_html(path, include_plotlyjs=True)


def read(path: Path) -> list[dict]:
    """The rows of a table, none where there is none."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(path: Path, columns: Sequence[str], rows: list[dict]) -> None:
    """Write a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Simulate what is not there yet, write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    problem = NoisyQuadratic(100)
    table = options.out / "quadratic.csv"
    rows, each = read(table), read(replicates_path(table))
    for kind, rate, steps in jobs(problem):
        if (kind, rate, steps) not in map(key, rows):
            start = time.perf_counter()
            made = simulate(problem, kind, rate, steps, options.seeds)
            rows, each = rows + made[0], each + made[1]
            print(f"{kind}, rate {rate:g}, {steps:,} steps: {time.perf_counter() - start:.0f} s", flush=True)
        one = ones(rows)
        for row in rows:
            row["times_members"] = (
                f"{int(row['num_members']) * float(row['loss']) / one[float(row['rate'])]:.4f}"
            )
        write(replicates_path(table), REPLICATE, each)
        write(table, COLUMNS, rows)
    draw(rows, options.out / "quadratic.html")


if __name__ == "__main__":
    main()
