"""Gaussian priors over weights: their widths, and penalties that are minus log densities up to a constant."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError, require_positive, unknown_name
from polymode.networks.members import Tensors
from polymode.trees import Tree

Penalty = Callable[[Tensors, Tree], Tensor]


@dataclass(frozen=True)
class FanIn:
    """s = scale/√fan-in for the weights of a layer, s = scale for its bias and all other scalars.

    A layer's fan-in is the number of inputs that each of its outputs is a sum over; a row of an
    embedding is looked up, so its fan-in is one. Outputs of wide layers then have the spread of narrow ones.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        require_positive("FanIn(scale=...)", self.scale)

    def of(self, module: nn.Module, tensor: Tensor) -> float:
        summed = tensor[0].numel() if tensor.ndim > 1 and not isinstance(module, nn.Embedding) else 1
        return self.scale / math.sqrt(summed)


# One value for all scalars; values by pattern of the weights' names, the first that fits counts; by fan-in.
PriorStd = float | Mapping[str, float] | FanIn


def check_prior_std(prior_std: PriorStd) -> None:
    """Raise an ``InputError`` for widths that no prior has; names are checked when the network is known."""
    if isinstance(prior_std, FanIn):
        return
    if not isinstance(prior_std, Mapping):
        require_positive("prior_std", prior_std)
        return
    if not prior_std:
        raise InputError(
            "prior_std has no entry: give a number, or patterns such as {'*.bias': 1.0, '*': 0.3}."
        )
    for pattern, std in prior_std.items():
        require_positive(f"prior_std of {pattern!r}", std)


def prior_stds(prior_std: PriorStd, module: nn.Module, names: frozenset[str]) -> dict[str, float]:
    """The width s of the prior of each named weight, N(0, s²) for all of its scalars."""
    check_prior_std(prior_std)
    found = {}
    for name in sorted(names):
        if isinstance(prior_std, FanIn):
            owner, _, leaf = name.rpartition(".")
            layer = module.get_submodule(owner)
            found[name] = prior_std.of(layer, getattr(layer, leaf))
        elif isinstance(prior_std, Mapping):
            fitting = [std for pattern, std in prior_std.items() if fnmatchcase(name, pattern)]
            if not fitting:
                raise InputError(
                    f"No pattern of prior_std ({', '.join(prior_std)}) fits the weight {name!r}: add '*' as "
                    "the last one."
                )
            found[name] = fitting[0]
        else:
            found[name] = prior_std
    for pattern in prior_std if isinstance(prior_std, Mapping) else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown_name("weight or pattern in prior_std", pattern, names)
    return found


def gaussian_penalty(
    parameters: Mapping[str, Tensor], std: float | Mapping[str, float], centre: Tree = None
) -> Tensor:
    """Σ_j (θ_j − c_j)² / (2 s²), the N(c, s²) prior of independent scalars; c = 0 unless given.

    std: s, one for all or one for each name. The term is that of the whole data set: a loss that is a mean
    over observations adds it divided by the number of training observations, never by the batch.
    """
    stds = std if isinstance(std, Mapping) else dict.fromkeys(parameters, std)
    for name in parameters:
        require_positive("prior_std", stds[name])
    return _penalty(parameters, {name: stds[name] for name in parameters}, centre)


def _penalty(parameters: Mapping[str, Tensor], stds: Mapping[str, float], centre: Tree) -> Tensor:
    terms = []
    for name, s in stds.items():
        tensor = parameters[name]
        # In one kernel: for large embeddings the difference and its square are passes over memory that count.
        squares = (
            tensor.square().sum() if centre is None else F.mse_loss(tensor, centre[name], reduction="sum")
        )
        terms.append(squares / (2 * s**2))
    return torch.stack(terms).sum()


def gaussian_prior(stds: Mapping[str, float]) -> Penalty:
    """Make the penalty of a zero-mean Gaussian prior over the named weights of a member."""
    return lambda weights, _: _penalty(weights, stds, None)


def anchored_prior(stds: Mapping[str, float]) -> Penalty:
    """Make the penalty of a prior that is centred at the member's own anchor, N(a, s²): ``own["anchor"]``."""
    return lambda weights, own: _penalty(weights, stds, own["anchor"])
