"""Predicting large files: seconds and memory of ``polymode predict`` beside a loop that is written by hand.

python benchmarks/predict.py [--rows 1000000] [--repeats 3]

Files of 20 columns through ten networks (CSV, Parquet, NPZ; numbers and classes), beside a loop that writes
means and deviations, and one that writes the columns that polymode writes; then 2,000 networks, and an
ensemble that is several times as large as what the process holds. Every measurement is a process of its own;
memory is its peak above that of a process that has loaded the run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

COLUMNS, HIDDEN, MEMBERS, CHUNK = 20, [64, 64], 10, 65_536
TASKS = {"numbers": 2, "classes": 3}  # what is predicted, and the outputs that a network has for it


def write_files(folder: Path, rows: int) -> None:
    """A training table of each kind, and the new rows as CSV, Parquet and NPZ."""
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(0)
    new = pd.DataFrame(random.normal(size=(rows, COLUMNS)), columns=[f"x{i}" for i in range(COLUMNS)]).round(
        6
    )
    train = new.iloc[:4000]
    y = np.sin(train["x0"]) + train["x1"] * train["x2"] + 0.1 * random.normal(size=len(train))
    labels = np.select([y > 0.5, y < -0.5], ["high", "low"], "middle")
    for name, target in (("numbers", y), ("classes", labels)):
        train.assign(y=target).to_csv(folder / f"{name}.csv", index=False)
        plain = np.unique(target, return_inverse=True)[1] if name == "classes" else target
        np.savez(folder / f"{name}.npz", x=train.to_numpy(), y=plain)
    new.to_csv(folder / "new.csv", index=False)
    new.to_parquet(folder / "new.parquet", index=False)
    np.savez(folder / "new.npz", x=np.ascontiguousarray(new.to_numpy()))


def by_hand(task: str, source: str, out: str, train: str = "") -> None:
    """What a good user writes: chunks of pandas, a list of modules, to_csv.

    train: training rows, to write the columns that polymode writes: quantiles of the mixture instead of those
    of one Gaussian, and of tables the distance to the nearest training rows and the columns outside of their
    range.
    """
    import numpy as np
    import pandas as pd
    import torch
    from torch import nn

    sizes = [COLUMNS, *HIDDEN]
    modules = [
        nn.Sequential(
            *(each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.ReLU())),
            nn.Linear(sizes[-1], TASKS[task]),
        )
        for _ in range(MEMBERS)
    ]

    def chunks():
        if source.endswith(".csv"):
            yield from pd.read_csv(source, chunksize=CHUNK)
        elif source.endswith(".parquet"):
            from pyarrow import parquet

            for batch in parquet.ParquetFile(source).iter_batches(CHUNK):
                yield batch.to_pandas()
        else:
            with np.load(source) as file:
                array = file["x"]
            for start in range(0, len(array), CHUNK):
                yield array[start : start + CHUNK]

    shift, scale = np.zeros(COLUMNS), np.ones(COLUMNS)
    names = np.array([f"x{i}" for i in range(COLUMNS)])
    if train:
        from sklearn.neighbors import NearestNeighbors

        known = pd.read_csv(train)[names].to_numpy(np.float32)
        neighbours = NearestNeighbors(n_neighbors=5, algorithm="brute").fit(known[:1000])
        threshold = np.quantile(neighbours.kneighbors(known[1000:])[0].mean(1), 0.99)
        lowest, highest = known.min(0), known.max(0)
        beyond = (highest - lowest) / 10

    def quantile(mean: torch.Tensor, std: torch.Tensor, level: float) -> torch.Tensor:
        """Of a mixture of Gaussians, by halving."""
        low, high = (mean - 8 * std).amin(0), (mean + 8 * std).amax(0)
        for _ in range(24):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - mean) / std).mean(0) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    with torch.no_grad():
        for number, chunk in enumerate(chunks()):
            inputs = torch.from_numpy(((np.asarray(chunk) - shift) / scale).astype(np.float32))
            outputs = torch.stack([module(inputs) for module in modules])
            if task == "numbers":
                mean, variance = outputs[..., 0], outputs[..., 1].exp()
                std = (variance.mean(0) + mean.var(0, correction=0)).sqrt()
                found = {"mean": mean.mean(0), "std": std, "member_std": mean.std(0, correction=0)}
                if train:
                    found |= {f"q{level}": quantile(mean, variance.sqrt(), level) for level in (0.05, 0.95)}
                else:
                    found |= {"q0.05": found["mean"] - 1.645 * std, "q0.95": found["mean"] + 1.645 * std}
            else:
                each = outputs.softmax(-1)
                mean = each.mean(0)
                entropy = -(mean * mean.log()).sum(-1)
                mutual = entropy + (each * each.log()).sum(-1).mean(0)
                found = {"label": mean.argmax(-1), "confidence": mean.amax(-1), "entropy": entropy}
                found |= {"mutual_information": mutual} | {f"p_{i}": mean[:, i] for i in range(mean.shape[1])}
            table = pd.DataFrame({name: values.numpy() for name, values in found.items()})
            if train and not source.endswith(".npz"):
                rows = inputs.numpy()
                table["strangeness"] = neighbours.kneighbors(rows)[0].mean(1) / threshold
                outside = (rows < lowest - beyond) | (rows > highest + beyond)
                table["unlike"] = ""
                for row in outside.any(1).nonzero()[0]:
                    table.loc[row, "unlike"] = ", ".join(names[outside[row]])
            table.to_csv(out, mode="w" if number == 0 else "a", header=number == 0, index=False)


def ours(run: str, source: str, out: str) -> None:
    """The command."""
    from polymode.application.cli import main

    assert main(["predict", run, source, "--out", out, "--quiet"]) == 0


def loaded(run: str) -> None:
    """What a process holds that is about to predict."""
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    from polymode.application.cli.runs import StoredRun

    stored = StoredRun.open(run)
    stored.posterior(0)
    stored.familiarity(0)


def enlarge(run: str, members: int) -> None:
    """Give a run many networks, around the first that it has."""
    import shutil
    from dataclasses import replace

    import torch

    from polymode.application.cli.runs import StoredRun
    from polymode.networks.members import Members

    posterior = StoredRun.open(run).posterior(0)
    first = next(posterior.draw(1)).member(0)
    stacked = {
        name: tensor + 0.05 * tensor.std().nan_to_num() * torch.randn(members, *tensor.shape)
        for name, tensor in first.items()
    }
    labels = torch.stack([torch.zeros(members), torch.arange(members), torch.zeros(members)], 1).long()
    block = Members(stacked, log_weights=torch.zeros(members), labels=labels)
    shutil.rmtree(Path(run) / "posterior-0")
    replace(posterior, blocks=[block]).save(Path(run) / "posterior-0")


def measured(*arguments: object) -> tuple[float, float, float]:
    """Seconds, seconds of processors and peak MB of a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments} has failed")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def trained(folder: Path, data: str, run: str, hidden: list[int], members: int) -> str:
    """The folder of a run that was trained for a moment."""
    command = [sys.executable, "-m", "polymode", "train", "--data", str(folder / data), "--epochs", "2"]
    command += ["--method", "deep_ensemble", "--set", f"deep_ensemble.num_members={members}"]
    command += ["--set", f"model.hidden={json.dumps(hidden)}", "--run", str(folder / run), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder / run)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict large files.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the fastest of each counts")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, *arguments = json.loads(options.one)
        {"by_hand": by_hand, "ours": ours, "loaded": loaded, "enlarge": enlarge}[name](*arguments)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, options.rows)
        print(f"{'file':<9}{'task':<9}{'by hand, s':>11}{'same columns':>14}{'polymode, s':>12}", end="")
        print(f"{'ratios':>14}{'processors, s':>22}{'MB above':>10}")
        for task in TASKS:
            for kind in ("csv", "parquet", "npz"):
                data = f"{task}.{'npz' if kind == 'npz' else 'csv'}"
                run = trained(folder, data, f"{task}-{kind}", HIDDEN, MEMBERS)
                base = measured("loaded", run)[2]
                new, out = str(folder / f"new.{kind}"), str(folder / "out.csv")
                rounds = [
                    (
                        measured("by_hand", task, new, out),
                        measured("by_hand", task, new, out, str(folder / f"{task}.csv")),
                        measured("ours", run, new, out),
                    )
                    for _ in range(options.repeats)
                ]
                hand, same, best = (min(each[i] for each in rounds) for i in range(3))
                peak = max(each[2][2] for each in rounds)
                print(
                    f"{kind:<9}{task:<9}{hand[0]:>11.1f}{same[0]:>14.1f}{best[0]:>12.1f}"
                    f"{hand[0] / best[0]:>7.2f}{same[0] / best[0]:>7.2f}"
                    f"{hand[1]:>8.1f}{same[1]:>7.1f}{best[1]:>7.1f}{peak - base:>10.0f}",
                    flush=True,
                )
        few = folder / "few.csv"
        for hidden, members, rows in (([50], 2000, 50_000), ([2048, 2048], 120, 2_000)):
            with (folder / "new.csv").open() as source, few.open("w") as target:
                target.writelines(line for line, _ in zip(source, range(rows + 1), strict=False))
            run = trained(folder, "numbers.csv", f"large-{members}", hidden, 2)
            measured("enlarge", run, members)
            size = sum(path.stat().st_size for path in Path(run).glob("posterior-0/*")) / 2**20
            base = measured("loaded", run)[2]
            seconds, processor, peak = measured("ours", run, str(few), str(folder / "out.csv"))
            print(
                f"{members} networks of {size:.0f} MB, {rows} rows: {seconds:.1f} s ({processor:.1f} s of "
                f"processors), {peak - base:.0f} MB above the model, {peak:.0f} MB in all",
                flush=True,
            )


if __name__ == "__main__":
    main()
