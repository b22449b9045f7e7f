"""Measure sklearn-contrib-bde, microcanonical Langevin ensembles in JAX, on tables and rows of ``run.py``.

    python -m venv PEERS; PEERS/bin/pip install sklearn-contrib-bde==1.0.2 pandas
    python experiments/tables/peers.py tables --python PEERS/bin/python --part development --out bde.csv
    python experiments/tables/peers.py tables --python PEERS/bin/python --part held_out --out bde-held-out.csv
    python experiments/tables/peers.py ... --settings examples     # those of its examples, in every command

Every table is fitted once, on the first split that ``polymode compare`` makes of it: with all its training
rows, also those that polymode holds out, in polymode's encoding. (``run.py`` tells means over three splits of
tables with fewer than 2,000 rows.) Targets of a regression are standardised by their training rows. There are
two host devices, as its documentation asks for on two cores.

``--settings defaults`` sets nothing but a seed. In version 1.0.2 that means: two networks with two layers
of four units, 50 steps of warm-up and ten samples, of which every second is kept, hence a mixture of ten
networks. As ``patience`` is None, no rows are held out, and the 20 epochs of Adam before the sampling are
without effect: the weights that they find are dropped, and chains begin at random weights. ``--settings
examples`` are those of the package's README for regression and classification, with far larger numbers and a
patience: what somebody would run who has read it.

NLLs are those of the mixture over members and samples, in the units of ``run.py``; the 90 % interval covers
the targets at which the mixture's distribution function is between 0.05 and 0.95. Seconds are those of
fitting and predicting, compilation included and imports not; CPU seconds are those of all threads. A table is
a JSON file in the folder of the runs and is not measured again; one that fails, or takes more than ten
minutes, has a row that says so.
"""

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from run import _cut, _deviation

MOST_SECONDS = 600
EXAMPLES = {
    "regression": {
        "hidden_layers": [16, 16],
        "n_members": 8,
        "epochs": 200,
        "validation_split": 0.15,
        "lr": 1e-3,
        "weight_decay": 1e-4,
        "warmup_steps": 5000,
        "n_samples": 2000,
        "n_thinning": 2,
        "patience": 10,
    },
    "classification": {
        "hidden_layers": [16, 16],
        "n_members": 4,
        "epochs": 1000,
        "validation_split": 0.15,
        "lr": 1e-3,
        "warmup_steps": 400,
        "n_samples": 100,
        "n_thinning": 1,
        "patience": 10,
    },
}
DEVICES = 2
COLUMNS = (
    "table",
    "task",
    "method",
    "nll",
    "nll_se",
    "coverage90",
    "seconds",
    "cpu_seconds",
    "num_train",
    "num_test",
    "num_inputs",
    "versions",
    "failed",
)


def main() -> None:
    """Measure, gather, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what collection.py wrote")
    parser.add_argument("--python", required=True, help="the interpreter that has sklearn-contrib-bde")
    parser.add_argument("--part", choices=("development", "held_out"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="CSV: a row for every table")
    parser.add_argument("--runs", type=Path, default=Path("runs/bde"))
    parser.add_argument("--settings", choices=("defaults", "examples"), default="defaults")
    parser.add_argument("--only", nargs="*", default=[], help="names of tables")
    given = parser.parse_args()
    if shutil.which(given.python) is None:
        parser.error(f"--python {given.python}: there is no such interpreter")
    tables = json.loads((given.folder / "tables.json").read_text())
    chosen = [t for t in tables if t["held_out"] == (given.part == "held_out")]
    chosen = [t for t in chosen if not given.only or t["name"] in given.only]
    rows = [measured(table, given) for table in chosen]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: _written(value) for name, value in row.items()} for row in rows)


def measured(table: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """One table: what its file says, or else what a fresh process finds."""
    kept = given.runs / given.settings / given.part / f"{table['name']}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    kept.parent.mkdir(parents=True, exist_ok=True)
    row = {"table": table["name"], "task": table["task"], "method": "bde"}
    try:
        arrays = prepared(table, given)
        row |= {"num_train": len(arrays["x"]), "num_test": len(arrays["x_test"])}
        row |= {"num_inputs": arrays["x"].shape[1]}
        path = kept.with_suffix(".npz")
        np.savez(path, **arrays)
        row |= _found(path, given.python, given.settings)
    except Exception as error:
        row |= {"failed": f"{type(error).__name__}: {error}".strip().splitlines()[-1][:200]}
    told = row.get("failed") or f"NLL {row['nll']:.4f}, {row['seconds']:.0f} s"
    print(f"{table['name']}: {told}", flush=True)
    unfinished = kept.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(row, indent=1) + "\n")
    unfinished.replace(kept)
    return row


def prepared(table: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Rows to train and to test on, as ``polymode compare`` has them in its first split."""
    from polymode.application.datasets.loading import load_task
    from polymode.data import ArrayData

    path = given.folder / table["file"]
    if given.part == "development":
        path = _cut(path, table, given.runs / "files")
    options = {"target": table["target"], "task": table["task"], "drop": list(table["drop"]), "splits": None}
    split = load_task(str(path), options).splits[0]
    train, test, ready = split.train, split.test, split.preprocessing
    assert isinstance(train, ArrayData)
    assert isinstance(test, ArrayData)
    assert split.validation is None
    arrays: dict[str, Any] = {"x": train.inputs.numpy(), "x_test": test.inputs.numpy()}
    if ready.classes:
        return arrays | {"y": train.targets.numpy(), "y_test": test.targets.numpy()}
    y, y_test = (
        part.targets.double().numpy() * ready.target_scale + ready.target_shift for part in (train, test)
    )
    mean, std = y.mean(), y.std()
    arrays |= {"y": (y - mean) / std, "y_test": (y_test - mean) / std}
    # What a unit of these targets is in the units of scores: deviations of all rows.
    return arrays | {"unit": std / _deviation(path, table)}


def _found(path: Path, python: str, settings: str) -> dict[str, Any]:
    """Scores and costs of a table's arrays, or why there are none."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    command = [python, __file__, "--child", str(path), settings]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"killed after {MOST_SECONDS} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        return {"failed": f"exit {done.returncode}: {said[-1][:200]}"}
    found = json.loads(done.stdout.splitlines()[-1])
    return found if math.isfinite(found["nll"]) else found | {"failed": f"the NLL is {found['nll']}"}


def _written(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


# --- in the other Python --------------------------------------------------------------------------------


def child(path: Path, settings: str) -> None:
    """Fit, predict, and print the scores of one table."""
    from bde import BdeClassifier, BdeRegressor

    arrays = np.load(path)
    is_regression = "unit" in arrays
    options = EXAMPLES["regression" if is_regression else "classification"] if settings == "examples" else {}
    estimator = (BdeRegressor if is_regression else BdeClassifier)(seed=0, **options)
    began, began_cpu = time.perf_counter(), time.process_time()
    estimator.fit(arrays["x"], arrays["y"])
    outputs = np.asarray(estimator.predict(arrays["x_test"], raw=True), dtype=np.float64)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    outputs = outputs.reshape(-1, *outputs.shape[2:])  # members × samples, rows, outputs
    if is_regression:
        found = _scores_of_numbers(outputs, arrays["y_test"], float(arrays["unit"]))
    else:
        found = _scores_of_labels(outputs, arrays["y_test"], estimator.classes_)
    named = ("sklearn-contrib-bde", "jax", "blackjax")
    found |= {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_networks": len(outputs),
        "versions": ", ".join(f"{name} {version(name)}" for name in named),
    }
    print(json.dumps(found))


def _scores_of_numbers(outputs: np.ndarray, targets: np.ndarray, unit: float) -> dict[str, float]:
    """Scores of a mixture of Gaussians, whose scales are as the package's own predictions have them."""
    from scipy.special import logsumexp
    from scipy.stats import norm

    mean, std = outputs[..., 0], np.logaddexp(0, outputs[..., 1]) + 1e-6
    terms = math.log(unit * len(outputs)) - logsumexp(norm.logpdf(targets, mean, std), axis=0)
    below = norm.cdf(targets, mean, std).mean(0)
    return _mean_nll(terms) | {
        "coverage90": float(((below >= 0.05) & (below <= 0.95)).mean()),
        "rmse": unit * float(np.sqrt(np.square(mean.mean(0) - targets).mean())),
    }


def _scores_of_labels(outputs: np.ndarray, targets: np.ndarray, classes: np.ndarray) -> dict[str, float]:
    """Scores of the mean of the members' probabilities; a class without training rows has none."""
    from scipy.special import log_softmax, logsumexp

    logs = logsumexp(log_softmax(outputs, -1), axis=0) - math.log(len(outputs))
    is_target = targets[:, None] == classes
    terms = -np.where(is_target, logs, -np.inf).max(1)
    return _mean_nll(terms) | {"accuracy": float((classes[logs.argmax(1)] == targets).mean())}


def _mean_nll(terms: np.ndarray) -> dict[str, float]:
    return {"nll": float(terms.mean()), "nll_se": float(terms.std(ddof=1) / math.sqrt(len(terms)))}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
