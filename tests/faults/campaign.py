"""Many faults of every kind: a table of what was done, how often, and what came of it.

PYTHONPATH=tests python -m faults.campaign RESULTS.jsonl [--times 10] [--kills 60] [--only FAULT ...]

Every fault is a line of the results when it has ended; the same command goes on where it was cut. The exit
code is 1 where anything was lost or wrong.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from faults.catalogue import ENGINES, FAULTS, KILLED

OFTEN = ("killed", "killed_while_writing")  # the moments matter: many of them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--times", type=int, default=10, help="of each fault; engines half as often")
    parser.add_argument("--kills", type=int, default=60, help="times that trainings are killed in two ways")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    options = parser.parse_args()
    done = {(each["fault"], each["seed"]) for each in read(options.results)}
    with tempfile.TemporaryDirectory(prefix="polymode-faults-") as temporary:
        os.environ["POLYMODE_FAULTS"] = temporary
        for fault in options.only:
            half = max(1, options.times // 2)
            times = options.kills if fault in OFTEN else half if fault in ENGINES else options.times
            for seed in range(times):
                if (fault, seed) not in done:
                    found = tried(fault, seed, Path(temporary) / f"{fault}-{seed}")
                    with options.results.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    print(f"{fault} {seed}: {found['outcome']}, {found['seconds']} s", flush=True)
    lines = read(options.results)
    print(table(lines))
    return int(any(each["outcome"] == "LOST OR WRONG" for each in lines))


def tried(fault: str, seed: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    KILLED.clear()
    began, reason = time.monotonic(), ""
    try:
        outcome = FAULTS[fault](folder, random.Random(seed))
    except Exception:
        outcome, reason = "LOST OR WRONG", traceback.format_exc()
    seconds = round(time.monotonic() - began, 1)
    return {
        "fault": fault,
        "seed": seed,
        "outcome": outcome,
        "killed": dict(+KILLED),
        "seconds": seconds,
        "reason": reason,
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """Faults, what they did, and how often each ended in what, as Markdown."""
    outcomes = sorted({each["outcome"] for each in lines})
    rows = [["fault", "times", "processes killed", *outcomes], ["---", *["---:"] * (2 + len(outcomes))]]
    for fault, function in FAULTS.items():
        mine = [each for each in lines if each["fault"] == fault]
        if mine:
            counts = Counter(each["outcome"] for each in mine)
            about = (function.__doc__ or "").split("\n")[0].rstrip(".")
            cells = [len(mine), _killed(mine), *(counts[outcome] for outcome in outcomes)]
            rows.append([about, *map(str, cells)])
    total = Counter(each["outcome"] for each in lines)
    rows.append(["**all**", str(len(lines)), str(_killed(lines)), *(str(total[each]) for each in outcomes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _killed(lines: list[dict[str, Any]]) -> int:
    return sum(sum(each["killed"].values()) for each in lines)


if __name__ == "__main__":
    sys.exit(main())
