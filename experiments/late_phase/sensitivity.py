"""Sensitivity of late-phase weights to T₀, K and σ₀, and gradient accumulation: Tables 8 and 10–12 in small.

    python experiments/late_phase/sensitivity.py

A perceptron with BatchNorm on 200 of scikit-learn's digits in batches of ten, 40 epochs of SGD with Nesterov
momentum whose rate falls linearly to a hundredth between half and four fifths; ten seeds side by side. One of
T₀ = 60 %, K = 10, σ₀ = 0 is varied at a time. Two minutes on one core. Scores of
the single seeds are in results/sensitivity-replicates.csv.
"""

import argparse
from pathlib import Path

import torch

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.datasets.embedded import digits

EPOCHS, SEEDS = 40, 10
SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
FALLING = pm.schedules.Linear(0.5 * EPOCHS, 0.8 * EPOCHS, 0.01)
SETTINGS, SCORES = ("start", "members", "noise"), ("accuracy", "nll", "gain")


def late(start: float = 0.6, members: int = 10, noise: float = 0.0, **options) -> pm.Method:
    """A late phase of BatchNorm and head."""
    return pm.methods.LatePhase(
        members, start, noise=noise, optimizer=SGD, schedule=FALLING, force=True, **options
    )


def scores(method: pm.Method) -> torch.Tensor:
    """Accuracy and NLL of every seed, [seeds, 2]."""
    split = digits(num_train=200, batch_size=10).splits[0]
    posteriors = pm.fit(
        method,
        lambda: pm.models.MLP(64, 10, (100, 100), batch_norm=True),
        [split.train] * SEEDS,
        likelihood="categorical",
        epochs=EPOCHS,
        seed=list(range(SEEDS)),
    )
    found = [pm.evaluate(posterior, split.test) for posterior in posteriors]
    return torch.tensor([[s["accuracy"], s["nll"]] for s in found], dtype=torch.float64)


def main() -> None:
    """Run the grid and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "sensitivity.csv")
    options = parser.parse_args()
    base = scores(pm.methods.Single(optimizer=SGD, schedule=FALLING))
    settings = [
        *(("start", (start, 10, 0.0)) for start in (0, 0.2, 0.4, 0.6, 0.8)),
        *(("members", (0.6, members, 0.0)) for members in (1, 2, 5, 10, 20)),
        *(("noise", (0.6, 10, noise)) for noise in (0.0, 0.25, 0.5, 0.75, 1.0)),
    ]
    nothing = {"weights": (), "head": False}
    methods = {("base", ("", "", "")): None} | {setting: late(*setting[1]) for setting in settings}
    methods["accumulation", (0.6, 10, "")] = late(**nothing)
    methods["accumulation, mean", (0.6, 10, "")] = late(base_scale=0.1, **nothing)
    for (varied, setting), method in methods.items():
        each = base if method is None else scores(method)
        columns = torch.cat([each, each[:, :1] - base[:, :1]], 1)  # seeds are paired: same start and order
        settings = {"varied": varied, **dict(zip(SETTINGS, setting, strict=True))}
        found = {seed: dict(zip(SCORES, row, strict=True)) for seed, row in enumerate(columns.tolist())}
        print(add_result(options.results, settings, "seed", found), flush=True)


if __name__ == "__main__":
    main()
