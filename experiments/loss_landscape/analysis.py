"""Independent runs, trajectories and subspaces, in numbers: Figures 2, 3, 6, 8 and 9, divergences of §5.

    POLYMODE_DATA=FOLDER python experiments/loss_landscape/analysis.py RUN RUN ... --name smallcnn

Runs are folders of ``polymode train --config smallcnn.yaml --seed 0`` and so on. Ten draws of each subspace
(30 in the published code), steps relative to ‖θ₀‖ unless --steps published; random samples are held to an
accuracy on the validation images of 0.05 below their solution's, with 25 tries each (five in the code).
Foreign images are Fashion-MNIST, as SVHN cannot be had everywhere; corruptions are made (four of nineteen,
on 1,000 images). Tables go to results/NAME-*.csv, a row a run, so that differences can be paired.
"""

import argparse
import csv
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import polymode as pm
from polymode import landscape
from polymode.application.cli.runs import StoredRun
from polymode.application.datasets.corruptions.reading import image_bytes, made_blocks
from polymode.application.datasets.downloads import data_folder
from polymode.application.datasets.images import fashion_mnist
from polymode.data import Preprocessing
from polymode.landscape import subspaces
from polymode.metrics import disagreement, disagreement_matrix, jensen_shannon, js_matrix
from polymode.seeds import derive_seed
from polymode.training.loop.arithmetic import with_threads

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "brightness", "contrast")
SAMPLES = 5  # networks whose divergence is taken, as in the paper
DRAWS = 10
WAYS = ("random", "low rank of random", "diagonal", "low rank", "average")


def drawn(
    runs: Sequence[pm.Particles], validation: Any, statistics: Tensor, *, published: bool
) -> list[dict[str, pm.Particles]]:
    """The subspaces around each run."""
    rules = dict(subspaces.FOR_ENSEMBLES)
    if not published:
        rules = subspaces.relative_to_length(rules)
    found = []
    for place, run in enumerate(runs):
        space = landscape.WeightSpace.of(run)
        solution = landscape.judged(space.network, next(run.last.draw()), *validation)
        least = float(1 - solution.error[0]) - 0.05
        accept = subspaces.Acceptance(pm.ArrayData(*validation), least, tries=25)
        each = {}
        for name, rule in rules.items():
            options = {"accept": accept} if name == "random" else {}
            count = 1 if name == "average" else DRAWS
            seed = derive_seed(place, name)
            each[name] = subspaces.sample(rule, run, count, seed=seed, statistics=statistics, **options)
        low = rules["low rank"]
        assert isinstance(low, subspaces.LowRankGaussian)
        four = replace(low, rank=min(4, each["random"].num_members - 1))  # directions, as the text has it
        each["low rank of random"] = subspaces.sample(
            four, each["random"], DRAWS, recent=None, seed=place, statistics=statistics
        )
        found.append(each)
        print({name: e.num_members for name, e in each.items()})
    return found


def foreign_images(ready: Preprocessing, number: int = 1000) -> Tensor:
    """Fashion-MNIST as images of CIFAR-10: padded to 32×32, three equal channels, scaled like them."""
    split = fashion_mnist(data_folder()).splits[0]
    grey = split.preprocessing.raw(split.test.inputs[:number])
    return ready.inputs(F.pad(grey, (2, 2, 2, 2)).expand(-1, 3, -1, -1))


def error_of(values: Sequence[float]) -> float:
    """The standard error of a mean over runs."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def error_of_runs(values: Tensor, statistic: Callable[[Tensor], float]) -> float:
    """The standard error of a statistic of runs [R, ...], leaving each out in turn; NaN below three."""
    number = len(values)
    if number < 3:
        return math.nan
    each = [statistic(values[[i for i in range(number) if i != out]]) for out in range(number)]
    return landscape.jackknife(each)


def gain(values: Tensor, base: Tensor, labels: Tensor, size: int, score: str) -> dict[str, float]:
    """What a way gains over the ends of its runs in ensembles of a size, and its standard error over runs."""

    def mean(both: Tensor) -> float:
        ours, theirs = (landscape.by_ensemble_size(part, labels)[size - 1] for part in both.unbind(1))
        return ours.scores[score] - theirs.scores[score]

    both = torch.stack([values.double(), base.double()], 1)
    error = error_of_runs(both, mean) if size < len(values) else math.nan
    return {f"{score} gain": mean(both), f"{score} gain_se": error}


def js_error(values: Tensor) -> float:
    """The standard error of the divergence of R runs: that of the mean over pairs, scaled to R of them.

    The divergence of fewer runs is smaller: leaving out runs would move its mean; that of pairs it does not.
    """
    pairs = js_matrix(values)
    number = len(values)

    def mean(kept: Sequence[int]) -> float:
        part = pairs[kept][:, kept]
        return float(part.sum() / (len(kept) * (len(kept) - 1)))

    if number < 3:
        return math.nan
    left_out = [mean([i for i in range(number) if i != out]) for out in range(number)]
    return landscape.jackknife(left_out) * jensen_shannon(values) / mean(list(range(number)))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table as CSV, numbers in four or five digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    print("wrote", path)


def main() -> None:
    """Read the runs, draw, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", choices=("relative", "published"), default="relative")
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    with with_threads(1):
        analyse(options)


def analyse(options: argparse.Namespace) -> None:
    """All tables of some runs."""
    stored = [StoredRun.open(folder) for folder in options.runs]
    split, ready = stored[0].split("", 0), stored[0].preprocessing(0)
    runs = [landscape.networks_of(each.posterior(0)) for each in stored]
    inputs, labels = split.test.inputs[: options.points], split.test.targets[: options.points]
    validation = split.validation.inputs, split.validation.targets
    foreign = foreign_images(ready)
    suffix = "" if options.steps == "relative" else "-published-steps"

    # --- accuracies, lengths and similarity of ends and checkpoints -----------------------------------
    rows: list[dict[str, Any]] = []
    latest = [run.only(range(run.num_members - 10, run.num_members)) for run in runs]
    recent = [landscape.function_values(each, inputs) for each in latest]
    ends = torch.cat([landscape.function_values(run.last, inputs) for run in runs])
    method = stored[0].manifest["method"]
    first = 0 if method["initial"] else 1  # the epoch of the first checkpoint
    for place, run in enumerate(runs):
        vectors = landscape.WeightSpace.of(run).vectors(run.only([0, run.num_members - 1]))
        length = vectors.norm(dim=1).tolist()
        row: dict[str, Any] = {
            "run": place,
            "accuracy": float((ends[place].argmax(-1) == labels).double().mean()),
            f"length after epoch {first}": length[0],
            "length at the end": length[1],
            "disagreement of the last ten epochs": disagreement(recent[place]),
        }
        if run.num_members > 10 - first:
            tenth = landscape.function_values(run.only([10 - first]), inputs)[0]
            row["accuracy after epoch 10"] = float((tenth.argmax(-1) == labels).double().mean())
        rows.append(row)
    write(options.results / f"{options.name}-runs.csv", rows)
    cosine = landscape.cosine_matrix([run.last for run in runs])
    apart = disagreement_matrix(ends)
    pairs = [
        {"runs": f"{i}-{j}", "disagreement": float(apart[i, j]), "cosine": float(cosine[i, j])}
        for i, j in itertools.combinations(range(len(runs)), 2)
    ]
    write(options.results / f"{options.name}-pairs.csv", pairs)

    # --- subspaces ------------------------------------------------------------------------------------
    statistics = split.train.inputs[:2000]
    of_runs = drawn(runs, validation, statistics, published=options.steps == "published")
    families = {"baseline": ends}
    rows = []
    for name in WAYS:
        means = []
        for place, each in enumerate(of_runs):
            values = landscape.function_values(each[name], inputs)
            means.append(values.double().mean(0))
            said = values.argmax(-1)
            row = {"way": name, "run": place, "networks": len(values)}
            row["accuracy of one"] = float((said == labels).double().mean())
            row["disagreement with the end"] = float((said != ends[place].argmax(-1)).double().mean())
            scores = landscape.scores_of(means[-1], labels)
            base = landscape.scores_of(ends[place], labels)
            row |= {key: scores[key] for key in scores} | {f"{k} gain": scores[k] - base[k] for k in scores}
            if len(values) >= SAMPLES:
                row["disagreement"] = disagreement(values)
                row["js"] = jensen_shannon(values[:SAMPLES])
                row["js on foreign data"] = jensen_shannon(
                    landscape.function_values(each[name].only(range(SAMPLES)), foreign)
                )
            rows.append(row)
        families[name] = torch.stack(means)
    for place, run in enumerate(runs):
        last = run.only(range(run.num_members - SAMPLES, run.num_members))
        values = landscape.function_values(last, inputs)
        rows.append(
            {
                "way": "trajectory",
                "run": place,
                "networks": SAMPLES,
                "disagreement": disagreement(values),
                "js": jensen_shannon(values),
                "js on foreign data": jensen_shannon(landscape.function_values(last, foreign)),
            }
        )
    write(options.results / f"{options.name}-subspaces{suffix}.csv", rows)

    at_foreign = torch.cat([landscape.function_values(r.last, foreign) for r in runs])
    summary = []
    for name in ("independent", *WAYS, "trajectory"):
        own = [row for row in rows if row["way"] == name]
        if name == "independent":
            summary.append(
                {
                    "way": name,
                    "disagreement": float(np.mean([pair["disagreement"] for pair in pairs])),
                    "disagreement_se": error_of_runs(ends, disagreement),
                    "js": jensen_shannon(ends),
                    "js_se": js_error(ends),
                    "js on foreign data": jensen_shannon(at_foreign),
                    "js on foreign data_se": js_error(at_foreign),
                }
            )
            continue
        row = {"way": name}
        for key in ("disagreement", "js", "js on foreign data", "accuracy gain", "nll gain", "brier gain"):
            found = [each[key] for each in own if key in each]
            if found:
                row |= {key: float(np.mean(found)), f"{key}_se": error_of(found)}
        summary.append(row)
    write(options.results / f"{options.name}-summary{suffix}.csv", summary)

    sizes = []
    for name, values in families.items():
        for each in landscape.by_ensemble_size(values, labels):
            size = {"way": name, "runs": each.num_runs, "subsets": each.num_subsets, **each.scores}
            if name != "baseline" and each.num_runs < len(runs):
                for score in ("accuracy", "nll", "brier"):
                    size |= gain(values, families["baseline"], labels, each.num_runs, score)
            sizes.append(size)
    write(options.results / f"{options.name}-sizes{suffix}.csv", sizes)

    # --- corruptions ----------------------------------------------------------------------------------
    clean = image_bytes(inputs[:1000], ready), labels[:1000].numpy()
    made = made_blocks(clean)
    shifted = []
    for severity in range(6):
        blocks = [clean[0]] if severity == 0 else [made(name, severity)[0] for name in CORRUPTIONS]
        images = [ready.inputs(torch.from_numpy(np.array(block)).float() / 255) for block in blocks]
        ways = {way: [each[way] for each in of_runs] for way in ("random", "low rank", "diagonal")}
        ways["trajectory"] = [r.only(range(r.num_members - SAMPLES, r.num_members)) for r in runs]
        last = [run.last for run in runs[:SAMPLES]]
        ways["independent"] = [pm.Particles(runs[0].network, blocks=[b for p in last for b in p.blocks])]
        ways["baseline"] = last
        for name, samples in ways.items():
            found = [
                landscape.function_values(s.only(range(min(SAMPLES, s.num_members))), x)
                for s in samples
                for x in images
            ]
            scores = [landscape.scores_of(v.double().mean(0), labels[:1000]) for v in found]
            js = [jensen_shannon(v) for v in found if len(v) > 1]
            shifted.append(
                {
                    "way": name,
                    "severity": severity,
                    "accuracy": float(np.mean([s["accuracy"] for s in scores])),
                    "brier": float(np.mean([s["brier"] for s in scores])),
                    "js": float(np.mean(js)) if js else math.nan,
                }
            )
        print("severity", severity)
    write(options.results / f"{options.name}-shift{suffix}.csv", shifted)


if __name__ == "__main__":
    main()
