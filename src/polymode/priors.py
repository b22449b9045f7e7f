"""Prior terms as penalties: minus log densities, up to a constant, of one member's weights."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.members import Tensors
from polymode.trees import Tree

Penalty = Callable[[Tensors, Tree], Tensor]


def require_positive(name: str, value: float) -> float:
    """Return a value that is positive; otherwise raise an error that names it."""
    if not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{name} must be a positive number, got {value!r}.")
    return value


def gaussian_penalty(parameters: Mapping[str, Tensor], std: float, centre: Tree = None) -> Tensor:
    """Σ_j (θ_j − c_j)² / (2 s²), the N(c, s²) prior of independent scalars; c = 0 unless given.

    The term is that of the whole data set: a loss that is a mean over observations adds it divided
    by the number of training observations, never by the batch.
    """
    squares = [
        (tensor if centre is None else tensor - centre[name]).square().sum()
        for name, tensor in parameters.items()
    ]
    return torch.stack(squares).sum() / (2 * require_positive("prior_std", std) ** 2)


def gaussian_prior(std: float, names: Collection[str]) -> Penalty:
    """Make the penalty of a zero-mean Gaussian prior over the named weights of a member."""
    require_positive("prior_std", std)
    return lambda weights, _: gaussian_penalty({n: weights[n] for n in names}, std)
