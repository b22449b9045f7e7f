"""How the defaults of tables were chosen: one setting after another on the development tables.

    python experiments/tables/choose.py tables '{"hidden": [64, 64], "likelihood": "varying"}'

Of the training rows of a development table (four fifths of its rows; test rows are never looked at) a fifth
is kept to judge by, and of the rest a share validates. The ensemble and the single network of a setting are
fitted to what is left and judged by the NLL of the rows that were kept, in standardised units, and by the
coverage of their 90 % intervals. Rows go to results/trials.csv; what is not named is as in ``SETTING``.
"""

import json
import math
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.datasets import tables
from polymode.data import ArrayData
from polymode.data.division import divided
from polymode.likelihoods import make_likelihood
from polymode.schedules import Constant, Cosine

RESULTS = Path(__file__).parent / "results/trials.csv"
MOST_ROWS = 3000
SETTING: dict[str, Any] = {
    "hidden": [64, 64],
    "likelihood": "steady",  # "steady" (one noise level), "varying" (by the inputs) or "heavy" (tails)
    "lr": 5e-3,
    "weight_decay": 0.01,
    "schedule": "cosine",
    "epochs": 60,
    "patience": 0.25,
    "steps": 8,  # minibatches of an epoch, about
    "share": 0.15,  # of the rows, to validate on
    "bound": 3.0,  # beyond which inputs are pressed together
}
METHODS = ("single", "deep_ensemble")


def parts_of(folder: Path, table: dict[str, Any], setting: dict[str, Any]) -> tuple[Any, ...]:
    """The task of a table, with rows to fit, to validate and to judge by."""
    tables.BOUND = setting["bound"]
    task = tables.table(
        folder / table["file"], target=table["target"], drop=table["drop"], task=table["task"], splits=1
    )
    train = task.splits[0].train
    assert isinstance(train, ArrayData)
    generator = torch.Generator().manual_seed(99)
    if train.num_examples > MOST_ROWS:
        train = train.taken(torch.randperm(train.num_examples, generator=generator)[:MOST_ROWS])
    found = []
    for share in (0.2, setting["share"]):
        labels = None if train.targets.is_floating_point() else train.targets
        first, last = divided(train.num_examples, round(share * train.num_examples), generator, labels=labels)
        found.append(train.taken(last))
        train = train.taken(first)
    size = max(16, 2 ** round(math.log2(max(1, train.num_examples / setting["steps"]))))
    return task, ArrayData(train.inputs, train.targets, batch_size=min(256, size)), found[1], found[0]


def judged(arguments: tuple[Path, dict[str, Any], dict[str, Any]]) -> tuple[str, dict[str, dict[str, float]]]:
    """NLL and coverage of both methods on one table."""
    folder, table, setting = arguments
    warnings.simplefilter("ignore")
    task, train, validation, kept = parts_of(folder, table, setting)
    plain = make_likelihood(task.likelihood)
    kinds = {"heavy": "student_t", "varying": "heteroscedastic"}
    wanted = kinds.get(setting["likelihood"], plain.kind)
    likelihood = next((each for each in task.likelihoods if each.kind.startswith(wanted)), plain)
    ready = task.splits[0].preprocessing
    outputs = len(ready.classes) or (2 if likelihood.kind.startswith("heteroscedastic") else 1)
    schedule = Cosine(final=0.05) if setting["schedule"] == "cosine" else Constant()
    optimizer = pm.Optimizer("AdamW", lr=setting["lr"], weight_decay=setting["weight_decay"], decay_all=False)
    keep = pm.KeepBest(patience=setting["patience"])
    single = pm.methods.Single(optimizer=optimizer, schedule=schedule, keep=keep)
    found = {}
    for name, method in (("single", single), ("deep_ensemble", pm.methods.DeepEnsemble(5, single))):
        posterior = pm.fit(
            method,
            lambda: pm.models.MLP(train.inputs.shape[1], outputs, setting["hidden"]),
            train,
            likelihood=likelihood,
            epochs=setting["epochs"],
            validation=validation,
            progress=False,
            threads=1,
            backend="vmap",
        )
        scores = pm.evaluate(posterior, kept, target_scale=ready.target_scale)
        if "nll" in scores:
            found[name] = {"nll": scores["nll"], "coverage90": math.nan}
        else:
            raw = task.splits[0].train.targets.double() * ready.target_scale
            nll = -scores["log_density"] - math.log(raw.std().item())
            found[name] = {"nll": nll, "coverage90": scores["coverage90"]}
    return table["name"], found


def main() -> None:
    """Judge the setting that was given on all development tables, and keep what came out."""
    folder, setting = Path(sys.argv[1]), SETTING | json.loads(sys.argv[2])
    chosen = [t for t in json.loads((folder / "tables.json").read_text()) if not t["held_out"]]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = dict(pool.imap_unordered(judged, [(folder, table, setting) for table in chosen]))
    for method in METHODS:
        for task in ("regression", "classification"):
            each = {t["name"]: found[t["name"]][method] for t in chosen if t["task"] == task}
            named = {name: json.dumps(value) for name, value in setting.items()}
            row = add_result(RESULTS, named | {"method": method, "task": task}, "table", each)
            print(method, task, row["nll"], row["coverage90"], np.median([s["nll"] for s in each.values()]))


if __name__ == "__main__":
    main()
