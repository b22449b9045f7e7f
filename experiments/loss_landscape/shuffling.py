"""Initialisation against shuffling, at several learning rates: Figure S4 of Fort et al. (2019).

    POLYMODE_DATA=FOLDER python experiments/loss_landscape/shuffling.py

SmallCNN on the first 5,000 images of CIFAR-10 (raw pixels, Xavier start), six epochs of Adam at a constant
rate. Three networks for each cell: one start with other orders of the data (and of dropout), other starts
with one order, and both other. Disagreement is on 2,000 test images, the mean over pairs of the three; its
standard error comes from three repetitions with other seeds.
"""

import argparse
import copy
import csv
import math
from pathlib import Path

import numpy as np
import torch

import polymode as pm
from polymode import landscape
from polymode.application.datasets.downloads import data_folder
from polymode.application.datasets.loading import load_task
from polymode.metrics import disagreement
from polymode.networks.surgery import build

RATES = (2e-4, 8e-4, 3.2e-3)
NETWORKS, REPETITIONS, EPOCHS = 3, 3, 6


def network() -> pm.models.SmallCNN:
    """The network, with weights drawn anew."""
    return pm.models.SmallCNN(initialisation="xavier")


def trained(same_start: bool, same_order: bool, rate: float, seed: int, train) -> pm.Particles:
    """Networks side by side; their starts, their orders, or both differ."""
    model = network
    if same_start:
        first = build(network, seed)
        model = lambda: copy.deepcopy(first)  # noqa: E731
    method = pm.methods.DeepEnsemble(NETWORKS, pm.methods.Single(optimizer=pm.Optimizer("Adam", lr=rate)))
    return pm.fit(
        method,
        model,
        train,
        likelihood="categorical",
        epochs=EPOCHS,
        seed=seed,
        shared_order=same_order,
        threads=1,
        progress=False,
    )


def main() -> None:
    """Train all cells and write the table, a row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "shuffling.csv")
    options = parser.parse_args()
    task = load_task("cifar10", {"normalise": "raw", "num_train": 5000}, data_folder())
    split = task.splits[0]
    inputs, labels = split.test.inputs[:2000], split.test.targets[:2000]
    rows = []
    for rate in RATES:
        for same_start, same_order in ((True, False), (False, True), (False, False)):
            apart, right = [], []
            for seed in range(REPETITIONS):
                posterior = trained(same_start, same_order, rate, seed, split.train)
                values = landscape.function_values(posterior, inputs)
                apart.append(disagreement(values))
                right.append(float((values.argmax(-1) == labels).double().mean()))
            rows.append(
                {
                    "rate": rate,
                    "start": "same" if same_start else "other",
                    "order": "same" if same_order else "other",
                    "accuracy": round(float(np.mean(right)), 4),
                    "disagreement": round(float(np.mean(apart)), 4),
                    "disagreement_se": round(float(np.std(apart, ddof=1) / math.sqrt(REPETITIONS)), 4),
                    "replicates": " ".join(f"{value:.4f}" for value in apart),
                }
            )
            print(rows[-1], flush=True)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            with options.results.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
