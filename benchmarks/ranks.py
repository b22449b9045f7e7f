"""One run in two processes of torchrun beside the same run in one: how far losses and predictions differ.

python benchmarks/ranks.py [--csv ranks.csv]

The trainings of tests/training/ranks_worker.py, in double precision on the CPU: 56 steps, the last minibatch
of every epoch smaller than the others, sample weights, dropout; sequences whose tokens are mostly ignored.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1] / "tests"
TOGETHER = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def trained(folder: Path, launcher: list[str], name: str) -> dict[str, Any]:
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(TESTS), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    worker = str(TESTS / "training" / "ranks_worker.py")
    subprocess.run([sys.executable, *launcher, worker, str(folder)], env=environment, check=True)
    return json.loads((folder / f"{name}.json").read_text())


def difference(one: Any, other: Any) -> float:
    """The largest relative one."""
    first, second = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
    there = first.isfinite()
    return float(((first - second).abs() / first.abs().clamp(min=1e-300))[there].max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        alone = trained(Path(temporary) / "one", [], "alone")
        first = trained(Path(temporary) / "two", TOGETHER, "0")
    rows = [
        {
            "run": case,
            "epochs": len(found["losses"]),
            "losses": f"{difference(found['losses'], first[case]['losses']):.1e}",
            "predictions": f"{difference(found['mean'], first[case]['mean']):.1e}" if "mean" in found else "",
        }
        for case, found in alone.items()
        if "losses" in first[case]
    ]
    for row in rows:
        print(row)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
