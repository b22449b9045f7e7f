"""An LSTM on real text with rank-one late-phase weights: Table 6 in small.

    python experiments/late_phase/text.py --data FOLDER --runs FOLDER

As in von Oswald et al. (2021): factors u, v of the recurrent matrix that begin uniform within 1 ± 0.01, Adam
without decay, T₀ at 60 %, σ₀ = 0.35, γ = 1, no late head. "rank_one" has the factors from the beginning and
one member. Unlike it: film reviews (the training texts of IMDB, in their order, every character beyond ASCII
left out) in place of enwik8, 128 units in place of 500, K = 5, sequences of 64 characters in batches of 32,
far fewer of them and fewer epochs, and so that something is learned in them a rate of 0.005 in place of 0.001
and weights that begin as usual in place of ±0.01. Runs that were cut go on where they stopped; rows are
written as they end, and those of the single seeds to results/text-replicates.csv.
"""

import argparse
import gzip
import json
import math
from pathlib import Path

import torch

import polymode as pm
from polymode.application.comparison import add_result
from polymode.application.datasets.characters import text

ADAM = pm.Optimizer("Adam", lr=5e-3)
FACTORS = {
    "weights": "rank_one",
    "matrices": "lstm.weight_hidden",
    "head": False,
    "factor_spread": 0.01,
    "optimizer": ADAM,
}
METHODS: dict[str, pm.Method] = {
    "base": pm.methods.Single(optimizer=ADAM),
    "rank_one": pm.methods.LatePhase(1, 0, **FACTORS),
    "late_phase": pm.methods.LatePhase(5, 0.6, noise=0.35, **FACTORS),
    "late_phase-noise0": pm.methods.LatePhase(5, 0.6, noise=0.0, **FACTORS),
    "base+swa": pm.methods.SWA(pm.methods.Single(optimizer=ADAM), start=0.8),
    "late_phase+swa": pm.methods.SWA(pm.methods.LatePhase(5, 0.6, noise=0.35, **FACTORS), start=0.8),
}
SCORES = ("train_bpc", "test_bpc")


def reviews(folder: Path, target: Path, characters: int = 3_000_000) -> Path:
    """The beginning of all reviews as one file of text."""
    if not target.exists():
        with gzip.open(folder / "imdb" / "train.jsonl.gz", "rt") as file:
            parts, total = [], 0
            for line in file:
                parts.append(json.loads(line)["text"].encode("ascii", "ignore").decode())
                total += len(parts[-1])
                if total > characters:
                    break
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(parts))
    return target


def main() -> None:
    """Train, judge, write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--methods", default="base,rank_one,late_phase")
    parser.add_argument("--sequences", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "text.csv")
    options = parser.parse_args()
    path = reviews(options.data, options.runs / "reviews.txt")
    task = text(path, length=64, num_train=options.sequences, num_test=1500, batch_size=32)
    [split] = task.splits

    def network() -> torch.nn.Module:
        return pm.models.CharacterLSTM(task.num_outputs, 64, options.hidden)

    for label in options.methods.split(","):
        posteriors = pm.fit(
            METHODS[label],
            network,
            [split.train] * options.seeds,
            likelihood=task.likelihood,
            epochs=options.epochs,
            seed=list(range(options.seeds)),
            run_dir=options.runs / f"text-{label}-{options.sequences}-{options.epochs}-{options.hidden}",
            resume=True,
        )
        seen = pm.ArrayData(split.train.inputs[:1500], split.train.targets[:1500])
        found = {
            seed: {
                score: -float(posterior.log_prob(data.inputs, data.targets).mean()) / math.log(2)
                for score, data in zip(SCORES, (seen, split.test), strict=True)
            }
            for seed, posterior in enumerate(posteriors)
        }
        settings = {"method": label, "seeds": options.seeds, "sequences": options.sequences}
        settings |= {"epochs": options.epochs, "hidden": options.hidden}
        print(add_result(options.results, settings, "seed", found), flush=True)


if __name__ == "__main__":
    main()
