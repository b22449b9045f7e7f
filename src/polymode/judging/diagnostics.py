"""Whether chains have mixed, judged by what their networks say rather than by their weights.

Weights have symmetries (hidden units can change places), so that chains may sit in equivalent places and
never meet; their predictions must agree.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.data import Data, arrays_of
from polymode.errors import InputError, require
from polymode.judging.contents import REFERENCE_SEED, contents_for
from polymode.posteriors import Posterior
from polymode.trees import map_tree

MAX_POINTS, MAX_VALUES = 200, 1000
LEAST_SAMPLES = 4  # of a chain: R-hat compares halves of them
MOST_WAYS = 10  # of choosing half of the chains, over which a noise floor is a mean

# What a sample must reach to be called a reference. Half of the proposals accepted, hardly any divergence
# (each marks a place that the chain cannot enter), and chains whose spread between is a small part of that
# within: R-hat 1.1 is the bound of Gelman and Rubin; five per cent of the values may lie above it.
LEAST_ACCEPTANCE, MOST_DIVERGENCES, MOST_RHAT = 0.5, 0.01, 1.1
LEAST_EFFECTIVE = 50.0  # independent samples: probabilities then have an error of at most 0.07
# Of microcanonical chains, which have no acceptance test: variance of the energy's error in a step, for each
# weight. The bias of variances grows with its cube root, 2 % at 5e-4 and 4 % here (of a Gaussian in ten
# dimensions); heavy tails make it a few times what was wanted.
MOST_ENERGY_VARIANCE = 0.005


@dataclass(frozen=True)
class Mixing:
    """R-hat and effective sample size over values of the function that networks compute.

    rhat: exceeded by 5 % of the values. worst_rhat: the largest. effective: median over the values of the
    effective sample size of all chains together. num_values: how many values were looked at.
    """

    rhat: float
    worst_rhat: float
    effective: float
    num_values: int
    num_chains: int
    num_samples: int


def import_arviz() -> Any:
    """ArviZ, which comes with an extra."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it announces its next version
            import arviz
    except ModuleNotFoundError:
        raise InputError("R-hat needs ArviZ: pip install 'polymode[reference]'.") from None
    return arviz


def mixing(posterior: Posterior, data: Data) -> Mixing:
    """Judge the chains of a posterior by their predictions at up to 200 points of some data."""
    values = chain_values(posterior, data)
    if values.shape[0] < 2:
        raise InputError("R-hat compares chains: there is one. Use at least two.")
    if values.shape[1] < LEAST_SAMPLES:
        raise InputError(
            f"R-hat needs at least {LEAST_SAMPLES} samples a chain, there are {values.shape[1]}."
        )
    arviz = import_arviz()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant values give 0/0
        dataset = arviz.convert_to_dataset({"value": values})
        rhat = np.asarray(arviz.rhat(dataset).to_array())[0]  # pyright: ignore  # a Dataset for a Dataset
        effective = np.asarray(arviz.ess(dataset).to_array())[0]  # pyright: ignore
    moving = ~np.isnan(rhat)  # infinite where chains are stuck at different values
    if not moving.any():
        return Mixing(np.inf, np.inf, 0.0, 0, values.shape[0], values.shape[1])
    return Mixing(
        float(np.quantile(rhat[moving], 0.95, method="closest_observation")),  # some may be infinite
        float(rhat[moving].max()),
        float(np.median(np.nan_to_num(effective[moving]))),
        int(moving.sum()),
        values.shape[0],
        values.shape[1],
    )


def chain_values(posterior: Posterior, data: Data) -> np.ndarray:
    """Values of the function that each member computes: [chains, samples, values]."""
    inputs, _ = arrays_of(data)
    num_points = min(MAX_POINTS, data.num_examples)
    chosen = torch.linspace(0, data.num_examples - 1, num_points).long()
    some = map_tree(lambda t: t[chosen.to(t.device)], inputs)
    likelihood = posterior.network.likelihood
    said = [likelihood.function_values(outputs) for _, outputs, _ in posterior.by_points(some)]
    outputs = torch.cat([each.flatten(2) if each.ndim > 2 else each[..., None] for each in said], 1)
    chains = torch.cat([block.labels[:, 1] for block in posterior.draw()])
    by_chain = [outputs[chains == chain] for chain in chains.unique()]
    shortest = min(len(values) for values in by_chain)
    values = torch.stack([chain[:shortest] for chain in by_chain]).flatten(2)
    spread = torch.linspace(0, values.shape[2] - 1, min(MAX_VALUES, values.shape[2])).long()
    return values[:, :, spread].double().cpu().numpy()


def noise_floor(posterior: Posterior, data: Data) -> dict[str, float]:
    """Distances between what half of the chains predicts for some data and what the other half predicts.

    Classes: agreement and total_variation of the halves' mean probabilities. Numbers: wasserstein1 and
    wasserstein2 between the reference's samples that come from either half. Half of the chains, one fewer
    than the rest where their number is odd, against the rest: the mean over up to ten ways of choosing them.
    A single chain's first half against its second.

    Errors of independent halves with the variance 2σ²/S each differ by 4σ²/S, four times the variance of all
    S samples together: all of them are about half as far from the truth as the halves are from each other.
    """
    likelihood = posterior.network.likelihood
    contents = contents_for(likelihood, "A noise floor")
    inputs, _ = arrays_of(data)
    halves = _halves(torch.cat([block.labels[:, 1] for block in posterior.draw()]))
    noise = torch.Generator().manual_seed(REFERENCE_SEED)
    sums: dict[str, float] = {}
    for rows, outputs, weights in posterior.by_points(inputs):
        found = contents.between_halves(likelihood, outputs, weights, halves, noise)
        for distances in found:
            for name, value in distances.items():  # means over the points of this chunk
                sums[name] = sums.get(name, 0.0) + value * (rows.stop - rows.start)
    return {name: total / (len(halves) * data.num_examples) for name, total in sums.items()}


def _halves(chains: Tensor) -> list[Tensor]:
    """Ways to take half of the members: for each, which ones, [M]. chains: that of every member, [M]."""
    names = chains.unique().tolist()
    if len(names) == 1:
        require(len(chains) > 1, "A noise floor needs at least two samples, there is one.")
        return [torch.arange(len(chains)) < len(chains) // 2]
    # With an even number every choice and its complement are one way: the first chain is in the chosen half.
    size, even = len(names) // 2, len(names) % 2 == 0
    choices = [c for c in combinations(names, size) if not even or names[0] in c]
    # Neighbours in the list have most of their chains in common: those that are taken lie apart.
    some = torch.linspace(0, len(choices) - 1, min(MOST_WAYS, len(choices))).round().int().tolist()
    return [torch.isin(chains, torch.tensor(choices[place])) for place in some]


@dataclass(frozen=True)
class ReferenceCheck:
    """Whether a sample may be called a reference, with every reason against it.

    acceptance: of the chain that accepts least; energy_variance: the largest of a chain's, for each weight.
    Which of them there is depends on the sampler. divergences: a share of trajectories, or steps.
    """

    mixing: Mixing
    divergences: float
    reasons: Sequence[str]
    acceptance: float | None = None
    energy_variance: float | None = None

    @property
    def is_fit(self) -> bool:
        return not self.reasons

    def config(self) -> dict[str, Any]:
        return asdict(self) | {"reasons": list(self.reasons), "is_fit": self.is_fit}


def check_reference(posterior: Posterior, data: Data) -> ReferenceCheck:
    """Judge a finished run of ``hmc`` or ``microcanonical`` as a reference for some test data."""
    chains = posterior.record.get("findings", [])
    if not chains or not {"acceptance", "energy_variance"} & set(chains[0]):
        raise InputError(
            "A reference is made of a finished run of hmc or microcanonical, which report how their chains "
            "went."
        )
    found = mixing(posterior, data)
    acceptance = energy_variance = None
    reasons = []
    if "acceptance" in chains[0]:
        what, moves = "trajectories", sum(chain["transitions"] for chain in chains)
        advice = "raise target_acceptance"
        acceptance = min(chain["acceptance"] or 0.0 for chain in chains)
        if acceptance < LEAST_ACCEPTANCE:
            reasons.append(
                f"a chain accepts {acceptance:.0%} of its proposals, at least {LEAST_ACCEPTANCE:.0%} are "
                f"needed: {advice} or give it more passes to find a smaller step"
            )
    else:
        what, moves = "steps", sum(chain["steps"] for chain in chains)
        advice = "lower energy_variance"
        found_variances = [chain["energy_variance"] for chain in chains]
        energy_variance = max(math.inf if v is None or math.isnan(v) else v for v in found_variances)
        if energy_variance > MOST_ENERGY_VARIANCE:
            reasons.append(
                f"the energy's error in a step of a chain has the variance {energy_variance:.2g} for each "
                f"weight, {MOST_ENERGY_VARIANCE:g} is allowed: {advice} or give it a longer warm-up"
            )
    divergences = sum(chain["divergences"] for chain in chains) / max(1, moves)
    if divergences > MOST_DIVERGENCES:
        reasons.append(
            f"{divergences:.1%} of the {what} diverge, at most {MOST_DIVERGENCES:.0%} may: {advice}"
        )
    if not found.rhat <= MOST_RHAT:
        reasons.append(
            f"R-hat exceeds {found.rhat:.4g} at 5 % of the predictions, {MOST_RHAT} is allowed: the chains "
            "do not agree; give them more passes"
        )
    if found.effective < LEAST_EFFECTIVE:
        reasons.append(
            f"all samples are worth {found.effective:.0f} independent ones, at least {LEAST_EFFECTIVE:.0f} "
            "are needed: give them more passes"
        )
    return ReferenceCheck(found, divergences, reasons, acceptance, energy_variance)
