"""Likelihoods: what a network's outputs mean, for one member.

Each has ``log_prob(outputs, targets)`` per observation, checks for bad input before training, and an
accumulator that turns the outputs of many members into one predictive.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polymode.errors import InputError, unknown_name
from polymode.likelihoods.base import Likelihood
from polymode.likelihoods.bernoulli import Bernoulli
from polymode.likelihoods.categorical import Categorical
from polymode.likelihoods.gaussian import (
    FixedGaussian,
    Gaussian,
    HeteroscedasticGaussian,
    LearnedGaussian,
    NoiseLevel,
)
from polymode.likelihoods.predictive import mixture_quantiles
from polymode.trees import Tree, map_tree

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "FixedGaussian",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LearnedGaussian",
    "Likelihood",
    "NoiseLevel",
    "make_likelihood",
    "member_losses",
    "quantiles_of",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    likelihood.kind: likelihood
    for likelihood in (
        Categorical,
        Bernoulli,
        LearnedGaussian,
        FixedGaussian,
        HeteroscedasticGaussian,
    )
}


def make_likelihood(likelihood: "str | Likelihood | dict") -> Likelihood:
    """Read a likelihood given as an object, a name or a configuration."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str | dict):
        given = likelihood.__name__ if isinstance(likelihood, type) else type(likelihood).__name__
        raise InputError(
            f"likelihood must be a name ({', '.join(LIKELIHOODS)}) or an instance such as Categorical(), "
            f"got {given}."
        )
    options = {"kind": likelihood} if isinstance(likelihood, str) else dict(likelihood)
    kind = options.pop("kind")
    if kind not in LIKELIHOODS:
        raise unknown_name("likelihood", kind, LIKELIHOODS)
    return LIKELIHOODS[kind](**options)


def member_losses(
    likelihood: str | Likelihood, outputs: Tree, targets: Tensor, *, targets_have_members: bool = False
) -> Tensor:
    """Mean negative log-likelihood of each member, [M], from outputs [M, B, ...].

    For one's own loop: sum these losses and step; averaging them would divide every member's gradient by M.
    """
    likelihood = make_likelihood(likelihood)
    in_dims = (0, 0 if targets_have_members else None)
    likelihood.check_outputs(
        map_tree(lambda t: t[0].detach(), outputs), targets[0] if targets_have_members else targets
    )
    return torch.vmap(lambda o, t: likelihood.mean_loss(o, t, None), in_dims=in_dims)(outputs, targets)


def quantiles_of(likelihood: Likelihood, outputs: Tree, weights: Tensor, levels: Sequence[float]) -> Tensor:
    """Quantiles [q, b, ...] of the mixture of all members' outputs [m, b, ...] at some points."""
    if not isinstance(likelihood, Gaussian):
        raise InputError(f"Quantiles need a Gaussian likelihood, this one is {likelihood.kind!r}.")
    means, stds = likelihood.moments(outputs)
    stds = stds if isinstance(stds, Tensor) else torch.full_like(means, stds)
    weights = weights.double() / weights.double().sum()
    at = torch.tensor(list(levels), dtype=torch.float64, device=means.device)
    return mixture_quantiles(means, stds, weights, at)
