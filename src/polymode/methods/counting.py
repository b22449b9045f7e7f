"""What a posterior over a network keeps, method by method, before anything is trained."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from polymode.errors import InputError
from polymode.networks.surgery import NORMALISATIONS
from polymode.training.contract import Method


@dataclass(frozen=True)
class ParameterCount:
    """Numbers that a method keeps, and how many more that is than one network has, as a share of it.

    note: where a method refuses the network, why; where the count is of something else, of what.
    """

    parameters: int | None
    overhead: float | None
    note: str = ""


def parameter_counts(
    module: nn.Module, methods: Mapping[str, Method], *, count_norm: bool = True
) -> dict[str, ParameterCount]:
    """Count what each method keeps of a network.

    count_norm: False leaves one copy of the normalisation layers' parameters out for every network, as Table
    3 of Chang et al. (2019) does for its fully connected one; further components are always counted.
    """
    norms = [part for part in module.modules() if isinstance(part, NORMALISATIONS)]
    uncounted = 0 if count_norm else sum(p.numel() for part in norms for p in part.parameters(recurse=False))
    base = sum(p.numel() for p in module.parameters() if p.requires_grad) - uncounted
    found = {}
    for label, method in methods.items():
        try:
            number = method.num_parameters(module) - uncounted * method.total_chains
        except InputError as error:
            found[label] = ParameterCount(None, None, str(error))
            continue
        found[label] = ParameterCount(number, number / base - 1, method.kept)
    return found
