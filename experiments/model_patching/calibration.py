"""Calibration of model patching on CIFAR-10 with LeNet-5 and BatchNorm: Table 4, Figures 4 and 6 in small.

    python experiments/model_patching/calibration.py --data FOLDER --runs FOLDER

As in Chang et al. (2019): Adam with its defaults, batches of 256, L2 of 0.001/256 on all trained numbers,
K = 5 components in BatchNorm and output layers, dropout of 0.005 before every BatchNorm, final weights,
calibration errors from 20 bins without those of five images or fewer. Unlike it: a small network, CIFAR-10
without augmentation, of which 20,000 images, 20 epochs; three seeds with standard errors. Runs that were cut
go on where they stopped; those that are finished are read back. Scores of the single seeds are in
results/calibration-replicates.csv.
"""

import argparse
import math
from pathlib import Path

import torch

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.datasets.images import cifar10
from polymode.application.plots import draws_figure, reliability_figure

BATCH = 256
L2 = 0.001 / BATCH
DECAY = pm.Optimizer("Adam", lr=1e-3, weight_decay=2 * L2)
ADAM = pm.Optimizer("Adam", lr=1e-3)
METHODS: dict[str, pm.Method] = {
    "vanilla": pm.methods.Single(optimizer=DECAY),
    "dropout": pm.methods.MCDropout(where="norm", rate=0.005, optimizer=DECAY),
    "emp": pm.methods.EMP(l2=L2, optimizer=ADAM),
    "ecmp": pm.methods.ECMP(l2=L2, optimizer=ADAM),
    "emp-norm": pm.methods.EMP(where="norm", l2=L2, optimizer=ADAM),
    "ecmp-norm": pm.methods.ECMP(where="norm", l2=L2, optimizer=ADAM),
}
DRAWS = (1, 2, 5, 10, 20, 50, 100, 200)
SCORES = ("accuracy", "nll", "ece", "mce")


def scores(probabilities: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Accuracy, NLL and the two calibration errors of Chang et al. (2019)."""
    picked = probabilities.gather(1, labels[:, None]).clamp(min=1e-12)
    return [
        pm.metrics.accuracy(probabilities, labels),
        -picked.log().mean().item(),
        pm.metrics.ece(probabilities, labels, 20, min_count=5),
        pm.metrics.mce(probabilities, labels, 20, min_count=5),
    ]


def after_draws(posterior: pm.Posterior, test: pm.ArrayData, draws: tuple[int, ...]) -> list[torch.Tensor]:
    """Mean probabilities [N, C] of the first so many draws, for each entry of draws."""
    number = draws[-1] if posterior.num_members is None else 1
    total = torch.zeros(len(test.targets), 10, dtype=torch.float64)
    sums = {n: total.clone() for n in draws}
    seen: dict[int, int] = {}  # draws seen by each row's batch
    for rows, outputs, _ in posterior.outputs(test.inputs, number, batch_size=500):
        for probabilities in outputs.softmax(-1).double():
            seen[rows.start] = seen.get(rows.start, 0) + 1
            total[rows] += probabilities
            if seen[rows.start] in sums:
                sums[seen[rows.start]][rows] = total[rows] / seen[rows.start]
    return [sums[n] for n in draws[: 1 if number == 1 else None]]


def main() -> None:
    """Train, judge, write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--images", type=int, default=20_000, help="the first so many to train on")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-draws", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    split = cifar10(options.data, batch_size=BATCH, num_train=options.images).splits[0]
    draws = tuple(n for n in DRAWS if n <= options.num_draws)
    by_draws, bins = {}, {}
    for label in options.methods.split(","):
        posteriors = pm.fit(
            METHODS[label],
            lambda: pm.models.LeNet5(),
            [split.train] * options.seeds,
            likelihood="categorical",
            epochs=options.epochs,
            seed=list(range(options.seeds)),
            run_dir=options.runs / f"{label}-{options.epochs}",
            resume=True,
        )
        predicted = [after_draws(posterior, split.test, draws) for posterior in posteriors]
        found = torch.tensor(
            [[scores(p, split.test.targets) for p in of_seed] for of_seed in predicted], dtype=torch.float64
        )  # [seeds, draws, scores]
        mean, error = found.mean(0), found.std(0) / math.sqrt(options.seeds)
        counted = draws[: found.shape[1]]
        for index, number in enumerate(counted):
            settings = {"method": label, "draws": number, "seeds": options.seeds, "epochs": options.epochs}
            settings["parameters"] = posteriors[0].num_parameters
            each = {
                seed: dict(zip(SCORES, values, strict=True))
                for seed, values in enumerate(found[:, index].tolist())
            }
            print(add_result(options.out / "calibration.csv", settings, "seed", each), flush=True)
        by_draws[label] = {
            "draws": list(counted),
            "mean": mean[:, SCORES.index("ece")].tolist(),
            "error": error[:, SCORES.index("ece")].tolist(),
        }
        of_all = torch.cat([of_seed[-1] for of_seed in predicted])
        curve = pm.metrics.calibration_bins(of_all, split.test.targets.repeat(options.seeds), 20)
        bins[label] = {
            "counts": curve.counts.tolist(),
            "accuracy": curve.accuracy.tolist(),
            "confidence": curve.confidence.tolist(),
        }
    for name, drawn in (
        ("calibration-curve", reliability_figure(bins)),
        ("ece-by-draws", draws_figure(by_draws, "ECE")),
    ):
        drawn.write_html(options.out / f"{name}.html", include_plotlyjs=True)


if __name__ == "__main__":
    main()
