"""Likelihoods: what a network's outputs mean, for one member.

Each has ``log_prob(outputs, targets)`` per observation, checks for bad input before training, and an
accumulator that turns the outputs of many members into one predictive. Both say how they are judged: its
scores and columns, its curves, its reference, what is written of it.
"""

import math
import types
import typing
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from polymode.errors import InputError, shortened, unknown_name
from polymode.likelihoods.base import Likelihood
from polymode.likelihoods.bernoulli import Bernoulli, BernoulliPredictive
from polymode.likelihoods.categorical import Categorical, CategoricalPredictive
from polymode.likelihoods.gaussian import (
    FixedGaussian,
    Gaussian,
    GaussianPredictive,
    HeteroscedasticGaussian,
    LearnedGaussian,
)
from polymode.likelihoods.location_scale import NoiseLevel
from polymode.likelihoods.numbers import Numbers, NumbersPredictive
from polymode.likelihoods.poisson import Poisson
from polymode.likelihoods.predictive import Predictive
from polymode.likelihoods.student_t import HeteroscedasticStudentT, StudentT
from polymode.trees import Tree, map_tree

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "BernoulliPredictive",
    "Categorical",
    "CategoricalPredictive",
    "FixedGaussian",
    "Gaussian",
    "GaussianPredictive",
    "HeteroscedasticGaussian",
    "HeteroscedasticStudentT",
    "LearnedGaussian",
    "Likelihood",
    "NoiseLevel",
    "Numbers",
    "NumbersPredictive",
    "Poisson",
    "Predictive",
    "StudentT",
    "make_likelihood",
    "member_losses",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    likelihood.kind: likelihood
    for likelihood in (
        Categorical,
        Bernoulli,
        LearnedGaussian,
        FixedGaussian,
        HeteroscedasticGaussian,
        Poisson,
        StudentT,
        HeteroscedasticStudentT,
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
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in LIKELIHOODS:
        raise unknown_name("likelihood", str(kind), LIKELIHOODS)
    known: dict[str, Any] = {each.name: each.type for each in fields(LIKELIHOODS[kind])}
    for name, value in options.items():
        if name not in known:
            raise unknown_name(f"option of {kind}", name, known)
        if not _fits(value, known[name]):
            wanted = getattr(known[name], "__name__", None) or str(known[name])
            raise InputError(f"{name} of {kind} is {shortened(repr(value))}, it must be of type {wanted}.")
    return LIKELIHOODS[kind](**options)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value, perhaps from a file, is of the type that an option is declared with."""
    if isinstance(wanted, types.UnionType):
        return any(_fits(value, part) for part in wanted.__args__)
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, typing.get_args(wanted)[0]) for v in value)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, wanted)


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
