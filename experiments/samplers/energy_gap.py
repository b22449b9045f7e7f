"""Why samples of the energy-gap posterior do not mix: chains from several optima, and chains from one.

    python experiments/samplers/energy_gap.py --passes 60000 --out energy-gap.csv

The posterior is that of ``experiments/sequential_anchored/energy-gap-hmc.yaml``: an MLP of 50 units for the
energy data, of which the middle third in the first feature is held out, with noise that the network tells.
R-hat and effective samples are of predictions at test points, which lie in that gap, and at training points.
Where chains that begin at one optimum agree and those of several do not, modes that no chain leaves are the
reason; where even the former disagree, chains are too slow. A row is written when it is known; rows that the
file has are not computed again.
"""

import argparse
import csv
from pathlib import Path

import polymode as pm
from polymode.application.datasets.loading import load_task
from polymode.judging.diagnostics import check_reference, mixing, noise_floor

PRIOR_STD, NUM_CHAINS = 0.182574, 4
DESCENT = pm.Optimizer("Adam", lr=3e-3)
SAMPLERS = {
    "hmc": lambda: pm.methods.HMC(NUM_CHAINS, PRIOR_STD, num_samples=200, descent=0),
    "hmc, trajectory 3": lambda: pm.methods.HMC(
        NUM_CHAINS, PRIOR_STD, num_samples=200, descent=0, trajectory=3.0
    ),
    "microcanonical": lambda: pm.methods.Microcanonical(
        NUM_CHAINS, PRIOR_STD, num_samples=200, descent=0, energy_variance=0.002
    ),
}


def main() -> None:
    """Train the optima, sample from them, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=100_000, help="of each chain")
    parser.add_argument("--descent", type=int, default=2000, help="epochs to the optima that chains begin at")
    parser.add_argument("--samplers", nargs="*", default=list(SAMPLERS))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    known = {(row["sampler"], row["begun_at"], row["passes"]) for row in rows}
    split = load_task("uci-energy", {"gap": True, "split": 0, "batch_size": 58}).splits[0]

    def fit(method, epochs, **options):
        return pm.fit(
            method,
            lambda: pm.models.MLP(split.train.inputs.shape[1], 2, (50,)),
            split.train,
            likelihood="heteroscedastic_gaussian",
            epochs=epochs,
            progress=False,
            threads=1,
            backend="vmap",
            **options,
        )

    single = pm.methods.Single(prior_std=PRIOR_STD, optimizer=DESCENT)
    optima = fit(pm.methods.DeepEnsemble(NUM_CHAINS, of=single), given.descent)
    begun_at = {"several optima": optima, "one optimum": optima.only([0] * NUM_CHAINS)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.samplers:
        for where, initial in begun_at.items():
            if (name, where, str(given.passes)) in known:
                continue
            posterior = fit(SAMPLERS[name](), given.passes, initial=initial)
            rows.append(
                {"sampler": name, "begun_at": where, "passes": given.passes} | judged(posterior, split)
            )
            print(rows[-1], flush=True)
            with given.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)


def judged(posterior: pm.Posterior, split) -> dict[str, str]:
    """What chains agree on, in the gap and where the data are, and how they went."""
    here, there = mixing(posterior, split.test), mixing(posterior, split.train)
    check, record = check_reference(posterior, split.test), posterior.record
    found = {
        "rhat_in_gap": here.rhat,
        "effective_in_gap": here.effective,
        "rhat_on_training_rows": there.rhat,
        "effective_on_training_rows": there.effective,
        "wasserstein1_between_halves": noise_floor(posterior, split.test)["wasserstein1"],
        "acceptance": check.acceptance,
        "energy_variance": check.energy_variance,
        "divergences": check.divergences,
        "seconds": record["training_seconds"],
    }
    return {key: "" if value is None else f"{value:.4g}" for key, value in found.items()}


if __name__ == "__main__":
    main()
