"""Tables 12 and 13 of Chang et al. (2019): RMSE and log predictive density on the UCI regression sets.

    python experiments/model_patching/uci.py --data FOLDER --runs FOLDER --sets boston --methods ecmp,emp

Their protocol: one hidden layer of 50 ReLU units (100 for protein), BatchNorm after the input and
the hidden layer with γ = 0.2 at the start, only those patched with K = 5; Adam with its defaults, 4,000
epochs, batches of 100, weight decay 0.01, mean squared error on standardised targets; the densities have the
noise τ = 0.1 in the units of the data. Dropout of 0.005 stands in the place of BatchNorm, the ensemble has
neither. All splits of a set (and the five networks of an ensemble) train side by side. A run that was cut
goes on where it stopped; rows are written to results/uci.csv as they end, those of variants
(--raw-targets, --weight-decay) to results/uci-variants.csv, and beside each those of the single splits.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.datasets.uci import uci
from polymode.data.task import Split
from polymode.likelihoods import FixedGaussian

PRECISION = 0.1  # τ of the output, in the units of the data
PATCHED = {"batch_norm": "after", "input_norm": True, "norm_scale": 0.2}
DROPPED = {"dropout": 0.005, "input_dropout": True}
METHODS = {
    "ecmp": (lambda adam: pm.methods.ECMP(where="norm", num_components=5, optimizer=adam), PATCHED),
    "emp": (lambda adam: pm.methods.EMP(where="norm", num_components=5, optimizer=adam), PATCHED),
    "dropout": (lambda adam: pm.methods.MCDropout(optimizer=adam), DROPPED),
    "ensemble": (lambda adam: pm.methods.DeepEnsemble(5, of=pm.methods.Single(optimizer=adam)), {}),
}
SCORES = ("rmse", "lpd", "draw_rmse", "draw_lpd")
RESULTS = Path(__file__).parent / "results"
SOME = 500  # draws for the scores of single ones


def scores(posterior: pm.Posterior, split: Split, draws: int) -> tuple[float, ...]:
    """RMSE and log density of the predictive in the units of the data, and those of a single draw."""
    scale = split.preprocessing.target_scale
    noise = FixedGaussian(std=1 / math.sqrt(PRECISION) / scale)
    judged = replace(posterior, network=replace(posterior.network, likelihood=noise))
    number = draws if posterior.num_members is None else None
    found = pm.evaluate(judged, split.test, num_draws=number, target_scale=scale)
    some = None if posterior.num_members is not None else SOME
    inputs = split.test.inputs
    blocks = posterior.outputs(inputs, some, batch_size=len(inputs))  # blocks of draws, not of points
    outputs = torch.cat([outputs for _, outputs, _ in blocks])
    errors = scale * (outputs.double().flatten(1) - split.test.targets.flatten())
    each = errors.square().mean(1).sqrt().mean()
    density = (0.5 * math.log(PRECISION / (2 * math.pi)) - 0.5 * PRECISION * errors.square()).mean()
    return found["rmse"], found["log_density"], each.item(), density.item()


def raw(split: Split) -> Split:
    """The split with targets in the units of the data."""
    ready = split.preprocessing

    def back(data: pm.ArrayData) -> pm.ArrayData:
        targets = data.targets * ready.target_scale + ready.target_shift
        return pm.ArrayData(data.inputs, targets, batch_size=data.batch_size)

    changed = replace(ready, target_scale=1.0, target_shift=0.0)
    return replace(split, train=back(split.train), test=back(split.test), preprocessing=changed)


def run(name: str, method: str, options: argparse.Namespace) -> dict[str, object]:
    """Train one method on all splits of one set and judge it."""
    task = uci(options.data, name, splits=options.splits)
    splits = [raw(split) for split in task.splits] if options.raw_targets else task.splits
    inputs = task.splits[0].train.inputs.shape[1]
    width = 100 if name == "protein" else 50
    make, layers = METHODS[method]
    adam = pm.Optimizer("Adam", lr=1e-3, weight_decay=options.weight_decay)
    suffix = "-raw" * options.raw_targets + f"-{options.weight_decay}" * (options.weight_decay != 0.01)

    def network() -> torch.nn.Module:
        return pm.models.MLP(inputs, 1, hidden=(width,), **layers)

    posteriors = pm.fit(
        make(adam),
        network,
        [split.train for split in splits],
        likelihood=FixedGaussian(std=math.sqrt(0.5)),  # −log density is then the squared error
        epochs=options.epochs,
        seed=list(range(len(splits))),
        backend=options.backend,
        run_dir=options.runs / f"{name}-{method}-{options.epochs}{suffix}",
        resume=True,
    )
    found = {
        index: dict(zip(SCORES, scores(posterior, split, options.num_draws), strict=True))
        for index, (posterior, split) in enumerate(zip(posteriors, splits, strict=True))
    }
    settings = {"variant": variant(options)} if variant(options) else {}
    settings |= {"set": name, "method": method, "splits": len(found)}
    settings |= {"epochs": options.epochs, "draws": options.num_draws}
    table = options.results or RESULTS / ("uci-variants.csv" if variant(options) else "uci.csv")
    return add_result(table, settings, "split", found)


def variant(options: argparse.Namespace) -> str:
    """Options that depart from the protocol."""
    decay = options.weight_decay != 0.01
    return " ".join(
        [*["--raw-targets"] * options.raw_targets, *[f"--weight-decay {options.weight_decay:g}"] * decay]
    )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with uci/")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--sets", default="yacht,boston,energy,concrete,wine")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--raw-targets", action="store_true", help="train on targets as they are")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=4000)
    parser.add_argument("--splits", type=int, default=None, help="only the first so many")
    parser.add_argument("--backend", default="auto", help="vmap, where other work would disturb the choice")
    parser.add_argument("--num-draws", type=int, default=10_000)
    parser.add_argument("--results", type=Path, default=None, help="table to write (default: in results/)")
    options = parser.parse_args()
    for name in options.sets.split(","):
        for method in options.methods.split(","):
            print(run(name, method, options), flush=True)


if __name__ == "__main__":
    main()
