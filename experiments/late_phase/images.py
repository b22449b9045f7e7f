"""Late-phase weights and their baselines on CIFAR-10 with small networks: Tables 1, 3 and 4 in small.

    python experiments/late_phase/images.py --data FOLDER --runs FOLDER --network lenet5
    python experiments/late_phase/images.py --data FOLDER --runs FOLDER --network resnet8

As in von Oswald et al. (2021): SGD with Nesterov momentum 0.9, rate 0.1 for a batch of 128, weight decay
0.0005, crops and flips; the rate falls linearly to a hundredth (to half of it for SWA and SWAG) between half
and four fifths of the training; LeNet-5 with BatchNorm has T₀ at a quarter, σ₀ = 0.5 and no late head, the
residual network T₀ at 60 %, σ₀ = 0 and a late head; γ = 1. Unlike it: K = 5, an ensemble of three, fewer
images and epochs and smaller batches, so that a short training has rounds enough. Foreign images are
Fashion-MNIST, in the middle of 32×32 pixels. Runs that were cut go on where they stopped; those that are
finished are read back. Rows are written as they end, and those of the single seeds to
results/images-replicates.csv.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.datasets.images import cifar10, fashion_mnist
from polymode.data.task import Preprocessing, Split
from polymode.landscape import flatness

SCALES = (0.1, 0.2, 0.3)  # of the noise that measures flatness
SCORES = ("accuracy", "nll", "ece", "ood_entropy_auroc", "train_nll", *(f"flatness_{s}" for s in SCALES))
NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "lenet5": lambda: pm.models.LeNet5(),
    "resnet8": lambda: pm.models.resnet8(),
}


def methods(network: str, epochs: int, batch_size: int) -> dict[str, pm.Method]:
    """Every method with the schedule that von Oswald et al. give it."""
    rate = 0.1 * batch_size / 128
    sgd = pm.Optimizer("SGD", lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    falling = pm.schedules.Linear(0.5 * epochs, 0.8 * epochs, 0.01)
    high = pm.schedules.Linear(0.4 * epochs, 0.72 * epochs, 0.5)
    late = {"start": 0.25, "noise": 0.5, "head": False} if network == "lenet5" else {"start": 0.6}
    late |= {"num_members": 5, "weights": "batch_norm"}

    def base(schedule: pm.schedules.Schedule) -> pm.Method:
        return pm.methods.Single(optimizer=sgd, schedule=schedule)

    def late_phase(schedule: pm.schedules.Schedule, **options) -> pm.Method:
        return pm.methods.LatePhase(optimizer=sgd, schedule=schedule, **(late | options))

    return {
        "base": base(falling),
        "late_phase": late_phase(falling),
        "late_phase-kept": late_phase(falling, keep_members=True),
        "swa": pm.methods.SWA(base(high), start=0.8),
        "late_phase+swa": pm.methods.SWA(late_phase(high), start=0.8),
        "swag": pm.methods.SWAG(base(high), start=0.8, num_draws=20),
        "batch_ensemble": pm.methods.BatchEnsemble(3, optimizer=sgd, schedule=falling),
        "deep_ensemble": pm.methods.DeepEnsemble(3, of=base(falling)),
        "accumulation": late_phase(falling, weights=(), head=False, noise=0.0),
        "late_phase-noise0": late_phase(falling, noise=0.0),
        "late_phase-start0": late_phase(falling, start=0),
        "late_phase-start60": late_phase(falling, start=0.6),
        "late_phase-k2": late_phase(falling, num_members=2),
        "late_phase-k10": late_phase(falling, num_members=10),
        "late_phase-head": late_phase(falling, head=True),
    }


def foreign_images(folder: Path, ready: Preprocessing, number: int = 5000) -> torch.Tensor:
    """Fashion-MNIST as images of CIFAR-10: padded to 32×32, three equal channels, scaled like them."""
    split = fashion_mnist(folder).splits[0]
    own = split.preprocessing
    grey = split.test.inputs[:number] * own.input_scale[0] + own.input_shift[0]
    return ready.inputs(F.pad(grey, (2, 2, 2, 2)).expand(-1, 3, -1, -1))


def scores(posterior: pm.Posterior, split: Split, foreign: torch.Tensor, seen: pm.ArrayData) -> list[float]:
    """What SCORES names."""
    found = pm.evaluate(posterior, split.test, ood=foreign)
    on_train = -float(posterior.log_prob(seen.inputs, seen.targets).mean())
    values = [found[s] for s in SCORES[:4]] + [on_train]
    if posterior.num_members != 1:  # the flatness of one network
        return values + [math.nan] * len(SCALES)
    return values + flatness(posterior, seen, scales=SCALES, num_draws=10).mean.tolist()


def main() -> None:
    """Train, judge, write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, default="lenet5")
    parser.add_argument("--methods", default="base,late_phase,swa")
    parser.add_argument("--images", type=int, default=20_000, help="the first so many to train on")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "images.csv")
    options = parser.parse_args()
    split = cifar10(
        options.data, batch_size=options.batch_size, num_train=options.images, augment=options.augment
    ).splits[0]
    plain = cifar10(options.data, num_train=options.images).splits[0].train
    seen = pm.ArrayData(plain.inputs[:5000], plain.targets[:5000], batch_size=500)
    foreign = foreign_images(options.data, split.preprocessing)
    chosen = methods(options.network, options.epochs, options.batch_size)
    for label in options.methods.split(","):
        posteriors = pm.fit(
            chosen[label],
            NETWORKS[options.network],
            [split.train] * options.seeds,
            likelihood="categorical",
            epochs=options.epochs,
            seed=list(range(options.seeds)),
            run_dir=options.runs
            / f"{options.network}-{label}-{options.images}-{options.augment}-{options.epochs}",
            resume=True,
        )
        judged: dict[str, dict[Any, pm.Posterior]] = {label: dict(enumerate(posteriors))}
        if label == "base" and options.seeds > 1:
            judged["base, ensemble"] = {"all": pm.merge(posteriors)}  # of all seeds: one, no error
        for row_label, of_label in judged.items():
            settings = {"network": options.network, "method": row_label, "seeds": len(of_label)}
            settings |= {"images": options.images, "augment": options.augment, "epochs": options.epochs}
            settings |= {"batch_size": options.batch_size}
            settings |= {"members": next(iter(of_label.values())).num_members}
            cost = {"seconds": round(posteriors[0].record["training_seconds"])}
            found = {
                seed: dict(zip(SCORES, scores(posterior, split, foreign, seen), strict=True))
                for seed, posterior in of_label.items()
            }
            print(add_result(options.results, settings, "seed", found, cost=cost), flush=True)


if __name__ == "__main__":
    main()
