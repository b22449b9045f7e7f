"""Sensitivity of sequential Bayesian networks on a small problem: Tables 5–10, Figure 3.

    python experiments/sebays/sensitivity.py

A perceptron with 100 hidden units on 300 of scikit-learn's digits in batches of 50; an exploration of 60
epochs at 0.1, then phases of 40; prior N(0, 0.5²); sparse networks begin at an inclusion of 0.95, and their
KL term weighs a fiftieth (a tempered posterior): at full weight all units are left out. Five seeds. One of
ρ = 3, M = 3, one draw of each member and stepwise rates is varied at a time. "single" is a network of 150
epochs, whose rate falls tenfold at 60 and 80 %, "one" the same with a distribution over its weights. Scores
of the single seeds are in results/sensitivity-replicates.csv.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.datasets.embedded import digits
from polymode.metrics.diversity import disagreement, pairwise_kl

EXPLORATION_EPOCHS, PHASE_EPOCHS, SEEDS = 60, 40, 5
SGD = pm.Optimizer("SGD", lr=0.1, momentum=0.9, clip_norm=1.0)
FALLING = pm.schedules.Pieces(((0, 1.0), (0.6, 1.0), (0.6, 0.1), (0.8, 0.1), (0.8, 0.01)))
DENSE: dict[str, Any] = {"prior_std": 0.5, "optimizer": SGD}
SPARSE = DENSE | {
    "inclusion": 0.95,
    "annealing": pm.schedules.Constant(0.02),
}  # T = 0.02: at 1 no unit is left


def sequence(kind: str, **options: Any) -> tuple[pm.Method, int]:
    """A sequence and the epochs that it is fitted for."""
    known = pm.methods
    shared: dict[str, Any] = {"num_members": 3, "phase_epochs": PHASE_EPOCHS} | options
    epochs = EXPLORATION_EPOCHS + shared["num_members"] * PHASE_EPOCHS
    if kind == "dense":
        return known.SequentialBNN(known.MeanField(**DENSE), **shared), epochs
    return known.SeBayS(known.SpikeSlab(**SPARSE), freeze=kind == "freeze", **shared), epochs


def settings() -> Iterator[tuple[dict[str, Any], pm.Method, int, int]]:
    """What is varied, the method, its epochs, and the draws of each member."""
    known = pm.methods
    single = known.Single(optimizer=pm.Optimizer("SGD", lr=0.1, momentum=0.9), schedule=FALLING)
    yield {"varied": "single", "kind": "", "value": ""}, single, 150, 1
    for kind, one in (
        ("dense", known.MeanField(schedule=FALLING, **DENSE)),
        ("sparse", known.SpikeSlab(schedule=FALLING, **SPARSE)),
    ):
        for draws in (1, 5):
            yield {"varied": "one", "kind": kind, "value": draws}, one, 150, draws
    for kind in ("dense", "freeze", "no-freeze"):
        for value in (0.0, 2.0, 3.0, 5.0):
            yield (
                {"varied": "perturbation", "kind": kind, "value": value},
                *sequence(kind, perturbation=value),
                1,
            )
        for value in (1, 3, 5, 10):
            yield {"varied": "members", "kind": kind, "value": value}, *sequence(kind, num_members=value), 1
        for value in (1, 5, 20):
            yield {"varied": "draws", "kind": kind, "value": value}, *sequence(kind), value
        for value in ("stepwise", "cosine", "linear-fge", "linear-1"):
            yield {"varied": "rates", "kind": kind, "value": value}, *sequence(kind, rates=value), 1


def scores(posterior: pm.Posterior, split: Any, draws: int) -> dict[str, float]:
    """Accuracy and NLL, alone and together, and how members differ."""
    count = posterior.num_components * draws if isinstance(posterior, pm.Variational) else None
    seeded = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    found = pm.evaluate(posterior, split.test, num_draws=count, generator=seeded())
    outputs = [out for _, out, _ in posterior.by_points(split.test.inputs, count, seeded())]
    probabilities = torch.cat(outputs, 1).double().softmax(-1)
    alone = (probabilities.argmax(-1) == split.test.targets).double().mean()
    several = len(probabilities) > 1
    last = posterior.record["history"][-1]
    return {
        "accuracy": found["accuracy"],
        "nll": found["nll"],
        "member_accuracy": alone.item(),
        "disagreement": disagreement(probabilities) if several else float("nan"),
        "kl": pairwise_kl(probabilities) if several else float("nan"),
        "units_remaining": last.get("measure_units_remaining", 1.0),
    }


def main() -> None:
    """Run the grid and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "sensitivity.csv")
    parser.add_argument("--kinds", default=",dense,sparse,freeze,no-freeze", help="of those in the table")
    options = parser.parse_args()
    split = digits(num_train=300, batch_size=50).splits[0]
    fitted: dict[str, list[pm.Posterior]] = {}
    for setting, method, epochs, draws in settings():
        if setting["kind"] not in options.kinds.split(","):
            continue
        if repr(method) not in fitted:
            fitted[repr(method)] = pm.fit(
                method,
                lambda: pm.models.MLP(64, 10, (100,)),
                [split.train] * SEEDS,
                likelihood="categorical",
                epochs=epochs,
                seed=list(range(SEEDS)),
                backend="vmap",
                threads=1,
            )
        found = {seed: scores(posterior, split, draws) for seed, posterior in enumerate(fitted[repr(method)])}
        print(add_result(options.results, setting, "seed", found), flush=True)


if __name__ == "__main__":
    main()
