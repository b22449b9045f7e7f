"""Weights of members that predict held-out data best together (Yao et al. 2018)."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polymode.data import arrays_of, as_data
from polymode.errors import require, require_whole
from polymode.posteriors import Particles, Posterior

# The gap to the best weights, in nats an example, at which the iteration stops.
TOLERANCE = 1e-6
MOST_STEPS = 10_000


def held_out_weights(log_densities: Tensor) -> Tensor:
    """Weights w [M] on the simplex with the largest (1/N) Σ_n log Σ_m w_m p(y_n | x_n, θ_m).

    log_densities: [M, N]. The problem is convex; w_m ← w_m · (1/N) Σ_n p_mn / Σ_k w_k p_kn climbs to its
    maximum without a step size. It stops when the largest of those factors, which bounds how far the
    maximum can be, is within a millionth of one.
    """
    require(
        log_densities.ndim == 2 and log_densities.numel() > 0,
        f"log_densities must be [members, observations], got {list(log_densities.shape)}.",
    )
    require(bool(log_densities.isfinite().all()), "A member gives a held-out target no density at all.")
    logs = log_densities.double()
    densities = (logs - logs.amax(0)).exp()
    weights = torch.full((len(logs),), 1 / len(logs), dtype=torch.float64, device=logs.device)
    for _ in range(MOST_STEPS):
        factors = (densities / (weights @ densities)).mean(1)
        # log of the best mean density minus ours is at most log max factor, by Jensen's inequality.
        if math.log(float(factors.max())) < TOLERANCE:
            break
        weights = weights * factors
    return weights / weights.sum()


def weigh_members(
    posterior: Posterior,
    data: Any,
    num_draws: int | None = None,
    generator: torch.Generator | None = None,
) -> Particles:
    """Give members (or ``num_draws`` draws) the weights that predict ``data`` best; members without any go.

    data: held-out examples, which the posterior was not fitted to.
    """
    if num_draws is not None:
        require_whole("num_draws", num_draws)
    inputs, targets = arrays_of(as_data(data))
    likelihood = posterior.network.likelihood
    start = None if generator is None else generator.get_state()
    found = []
    for rows, outputs, _ in posterior.by_points(inputs, num_draws, generator):
        chunk = targets[rows].to(posterior.network.device)
        each = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, chunk)
        found.append(each.flatten(2).sum(2) if each.ndim > 2 else each)  # tokens of an example go together
    weights = held_out_weights(torch.cat(found, 1)).cpu()
    if generator is not None and start is not None:
        generator.set_state(start)  # the same draws once more
    blocks, first = [], 0
    for block in posterior.draw(num_draws, generator):
        own = weights[first : first + block.num_members]
        first += block.num_members
        kept = own > 1e-8
        if not bool(kept.any()):
            continue
        rows = kept.nonzero().flatten()
        chosen = replace(
            block,
            stacked={name: tensor[rows.to(tensor.device)].clone() for name, tensor in block.stacked.items()},
            log_weights=own[rows].log().to(block.log_weights),
            labels=block.labels[rows],
        )
        blocks.append(chosen)
    return Particles(posterior.network, blocks=blocks, record=posterior.record)
