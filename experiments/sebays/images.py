"""Sequential Bayesian subnetworks and their baselines on CIFAR-10 at small scale: Tables 1, 3, 4, 6.

    python experiments/sebays/images.py --data FOLDER --runs FOLDER --methods single,sebays-freeze

As in Jantre et al. (2022): SGD with momentum 0.9 at 0.1, batches of 128, crops and flips; the rate of single
networks falls tenfold at 60 and at 80 % of the training, sequences explore at 0.1 and then have phases at
0.01 and 0.001; prior N(0, 0.2²), λ = 1e-4, gradients clipped at 1 (mean_field and what is made of it); weight
decay 0.0005 (the others; 0.0002 of the shared weights of rank_one_bnn); the best epoch by validation error is
kept; one draw of each member. Budgets have the paper's ratios: single networks train for 25 epochs, sequences
of three members for 21 + 3 · 8 (1.8 times as long, as 450 is of 250), ensembles for 3 · 25. The first chain
of the ensemble is the single network. mimo repeats no examples; dst and edst exchange weights every 70 steps,
three epochs, as 1,000 steps are with 45,000 images.
Unlike it: ResNet-8 with ReLU everywhere and PyTorch's initial weights, 3,000 training and 500 validation
images (not augmented), an exploration of 21 epochs, 200 test images for corruptions, Fashion-MNIST as foreign
images. Methods that end in -95 begin with an inclusion of 0.95 instead of 0.99, about four times as fast.
Runs that were cut go on where they stopped; finished ones are read back.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.comparison.robustness import judge_corrupted
from polymode.application.datasets.corruptions.making import ALL_CORRUPTIONS
from polymode.application.datasets.corruptions.reading import Blocks, image_bytes, made_blocks
from polymode.application.datasets.images import Labelled, cifar10, fashion_mnist
from polymode.data.task import Preprocessing, Split
from polymode.metrics.diversity import disagreement, pairwise_kl
from polymode.networks.compaction import Sizes
from polymode.networks.costs import Accounting
from polymode.trees import map_tree

EPOCHS, EXPLORATION_EPOCHS, PHASE_EPOCHS = 25, 21, 8  # of a single network, and of a sequence
BEST = pm.KeepBest("error")
FALLING = pm.schedules.Pieces(((0, 1.0), (0.6, 1.0), (0.6, 0.1), (0.8, 0.1), (0.8, 0.01)))


def methods() -> dict[str, tuple[pm.Method, int]]:
    """Every method, and the epochs that it is fitted for."""
    known, kinds = pm.methods, pm.Optimizer
    sgd = kinds("SGD", lr=0.1, momentum=0.9, weight_decay=5e-4)
    light = kinds("SGD", lr=0.1, momentum=0.9, weight_decay=2e-4)
    clipped = kinds("SGD", lr=0.1, momentum=0.9, clip_norm=1.0)
    single = known.Single(optimizer=sgd, schedule=FALLING, keep=BEST)
    dense: dict[str, Any] = {"optimizer": clipped, "schedule": FALLING, "keep": BEST}
    each: dict[str, Any] = {"optimizer": clipped, "keep": "best"}
    sequence: dict[str, Any] = {"num_members": 3, "phase_epochs": PHASE_EPOCHS}
    long = EXPLORATION_EPOCHS + 3 * PHASE_EPOCHS
    found: dict[str, tuple[pm.Method, int]] = {
        "dense_ensemble": (known.DeepEnsemble(3, of=single), EPOCHS),
        "mimo": (known.MIMO(3, repetitions=1, optimizer=sgd, schedule=FALLING, keep=BEST), EPOCHS),
        "rank_one_bnn": (known.RankOneBNN(3, optimizer=light, schedule=FALLING, keep=BEST), EPOCHS),
        "dst_ensemble": (known.DSTEnsemble(3, update_every=70, schedule=FALLING, keep=BEST), EPOCHS),
        "edst_ensemble": (known.EDSTEnsemble(update_every=70, keep="best", **sequence), long),
        "mean_field": (known.MeanField(**dense), EPOCHS),
        "sequential_bnn": (known.SequentialBNN(known.MeanField(**each), **sequence), long),
    }
    for suffix, inclusion in (("", 0.99), ("-95", 0.95)):
        units = known.SpikeSlab(inclusion=inclusion, **each)
        found |= {
            f"spike_slab{suffix}": (known.SpikeSlab(inclusion=inclusion, **dense), EPOCHS),
            f"sebays-freeze{suffix}": (known.SeBayS(units, **sequence), long),
            f"sebays-no-freeze{suffix}": (known.SeBayS(units, freeze=False, **sequence), long),
        }
    return found


def foreign_images(folder: Path, ready: Preprocessing, number: int = 5000) -> torch.Tensor:
    """Fashion-MNIST as images of CIFAR-10: padded to 32×32, three equal channels, scaled like them."""
    split = fashion_mnist(folder).splits[0]
    own = split.preprocessing
    grey = split.test.inputs[:number] * own.input_scale[0] + own.input_shift[0]
    return ready.inputs(F.pad(grey, (2, 2, 2, 2)).expand(-1, 3, -1, -1))


def kept_blocks(clean: Labelled, folder: Path) -> Blocks:
    """Corrupted images, made once and then read."""
    make = made_blocks(clean)

    def blocks(name: str, severity: int) -> Labelled:
        path = folder / f"{name}-{severity}-{len(clean[1])}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            np.save(path, make(name, severity)[0])
        return np.load(path), clean[1]

    return blocks


def draws_of(posterior: pm.Posterior, each: int) -> int | None:
    """``each`` networks of every member that networks are drawn of."""
    return posterior.num_components * each if isinstance(posterior, pm.Variational) else None


def scores(
    posterior: pm.Posterior, split: Split, foreign: torch.Tensor, clean: Labelled, blocks: Blocks, each: int
) -> dict[str, float]:
    """Accuracy, NLL and ECE; those of corrupted images; how foreign ones are told; how members differ."""
    count = draws_of(posterior, each)
    found = pm.evaluate(posterior, split.test, ood=foreign, num_draws=count, generator=seeded())
    kept = {name: found[name] for name in ("accuracy", "nll", "ece")}
    kept["ood_auroc"] = found["ood_max_probability_auroc"]
    probabilities = torch.cat(list(_member_probabilities(posterior, split, count)), 1)
    several = len(probabilities) > 1
    kept["disagreement"] = disagreement(probabilities) if several else float("nan")
    kept["kl"] = pairwise_kl(probabilities) if several else float("nan")
    judged = [(posterior, split.preprocessing)]
    robust = judge_corrupted(judged, clean, blocks, ALL_CORRUPTIONS, range(1, 6), num_draws=count or 1)[0]
    kept["corrupted_accuracy"] = robust.summary["corruption_accuracy"]
    kept["corrupted_nll"] = robust.summary["corruption_nll"]
    return kept


def first_of(posterior: pm.Posterior) -> pm.Posterior:
    """The first of several networks."""
    first = next(iter(posterior.draw())).between(0, 1)
    return pm.Particles(posterior.network, blocks=[first], record=posterior.record)


def seeded() -> torch.Generator:
    """The same networks for every score."""
    return torch.Generator().manual_seed(0)


def _member_probabilities(posterior: pm.Posterior, split: Split, count: int | None) -> Iterator[torch.Tensor]:
    for _, outputs, _ in posterior.by_points(split.test.inputs, count, seeded()):
        yield map_tree(lambda logits: logits.double().softmax(-1), outputs)


def remaining(posterior: pm.Posterior, example: torch.Tensor, each: int) -> dict[str, float]:
    """The shares of the network that its members, or draws of them, still have: the mean over these."""
    found: dict[str, list[float]] = {"parameters": [], "multiplications": [], "computed": []}
    for block in posterior.draw(draws_of(posterior, each), seeded()):
        for index in range(block.num_members):
            shares = _shares(posterior.network.module, block.member(index), example)
            for name, values in found.items():
                values.append(shares[name])
    return {f"{name}_remaining": sum(values) / len(values) for name, values in found.items()}


def _shares(
    module: torch.nn.Module, weights: dict[str, torch.Tensor], example: torch.Tensor
) -> dict[str, float]:
    """As Jantre et al. count them, and what a compact network really multiplies."""
    kernels = {name: t for name, t in weights.items() if t.ndim == 4}
    if all(bool((kernel != 0).all()) for kernel in kernels.values()):
        return {"parameters": 1.0, "multiplications": 1.0, "computed": 1.0}
    active = {name: (kernel != 0).sum() for name, kernel in kernels.items()}
    units = {n.rpartition(".")[0]: (kernel != 0).flatten(1).any(1) for n, kernel in kernels.items()}
    shares = {n: float(t) for n, t in Accounting.of(module, example).shares({}, active).items()}
    return shares | {"computed": Sizes(module, example).share(units)}


def main() -> None:
    """Train, judge, write rows."""
    chosen = methods()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(chosen))
    parser.add_argument("--images", type=int, default=3000, help="the first so many to train on")
    parser.add_argument("--corrupted-images", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1, help="networks of every member with a distribution")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "images.csv")
    options = parser.parse_args()
    split = cifar10(options.data, augment=True, num_validation=500, num_train=options.images).splits[0]
    foreign = foreign_images(options.data, split.preprocessing)
    some = slice(0, options.corrupted_images)
    clean = (image_bytes(split.test.inputs[some], split.preprocessing), split.test.targets[some].numpy())
    blocks = kept_blocks(clean, options.runs / "corrupted")
    for label in options.methods.split(","):
        method, epochs = chosen[label]
        posteriors = [
            pm.fit(
                method,
                pm.models.resnet8,
                split.train,
                likelihood="categorical",
                epochs=epochs,
                seed=seed,
                validation=split.validation,
                run_dir=options.runs / f"{label}-{options.images}-{seed}",
                resume=True,
                threads=1,
            )
            for seed in range(options.seeds)
        ]
        judged = {label: posteriors}
        if label == "dense_ensemble":  # whose first chain is what it would be alone
            judged["single"] = [first_of(posterior) for posterior in posteriors]
        for row_label, of_label in judged.items():
            found = {
                seed: scores(posterior, split, foreign, clean, blocks, options.draws)
                | remaining(posterior, split.test.inputs[:1], options.draws)
                for seed, posterior in enumerate(of_label)
            }
            settings = {"method": row_label, "seeds": options.seeds, "images": options.images}
            settings |= {"draws": options.draws}
            share = of_label[0].num_members / posteriors[0].num_members if of_label is not posteriors else 1
            cost = {"seconds": round(share * posteriors[0].record["training_seconds"])}
            print(add_result(options.results, settings, "seed", found, cost=cost), flush=True)


if __name__ == "__main__":
    main()
