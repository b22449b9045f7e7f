"""What a posterior over a network keeps and multiplies, method by method, before anything is trained."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from polymode.errors import InputError
from polymode.networks.adaptations import adapt
from polymode.networks.costs import Accounting, multiplications
from polymode.networks.surgery import NORMALISATIONS, prepare
from polymode.seeds import derive_seed
from polymode.training.contract import Method
from polymode.trees import Tree


@dataclass(frozen=True)
class NetworkCount:
    """What one network holds, and multiplies in one pass for one example.

    accounting: the same as Jantre et al. (2022) count it. note: why there are no multiplications.
    """

    parameters: int
    multiplications: int | None = None
    accounting: Accounting | None = None
    note: str = ""


@dataclass(frozen=True)
class ParameterCount:
    """Numbers that a method keeps, and how many more that is than one network has, as a share of it.

    multiplications: of one prediction, all its passes; None where their number is not known beforehand. note:
    where a method refuses the network, why; where the count is of something else, of what.
    """

    parameters: int | None
    overhead: float | None
    note: str = ""
    multiplications: int | None = None


def network_count(module: nn.Module, inputs: Tree, *, count_norm: bool = True) -> NetworkCount:
    """Count a network; of one that cannot run on the inputs [B, ...], or without inputs, parameters alone."""
    count = NetworkCount(_trained(module) - (0 if count_norm else _of_norms(module)))
    if inputs is None:
        return replace(count, note="Multiplications depend on the shape of an example, which is not known.")
    try:
        count = replace(count, multiplications=multiplications(module, inputs))
        return replace(count, accounting=Accounting.of(module, inputs))
    except InputError as error:
        return replace(count, note=str(error))


def parameter_counts(
    module: nn.Module, methods: Mapping[str, Method], *, inputs: Tree = None, count_norm: bool = True
) -> dict[str, ParameterCount]:
    """Count what each method keeps of a network, and what its predictions multiply.

    inputs: [B, ...], to count multiplications with. count_norm: False leaves one copy of the normalisation
    layers' parameters out for every network, as Table 3 of Chang et al. (2019) does for its fully connected
    one; further components are always counted.
    """
    uncounted = 0 if count_norm else _of_norms(module)
    base = _trained(module) - uncounted
    found, template = {}, module if inputs is None else prepare(module)
    for label, method in methods.items():
        try:
            number = method.num_parameters(module) - uncounted * method.total_chains
            multiplied = None if inputs is None else _of_prediction(template, method, inputs)
        except InputError as error:
            found[label] = ParameterCount(None, None, str(error))
            continue
        found[label] = ParameterCount(number, number / base - 1, method.kept, multiplied)
    return found


def _of_prediction(template: nn.Module, method: Method, inputs: Tree) -> int | None:
    """Multiplications of all passes of a prediction, each through what the method makes of the network."""
    if method.chain_passes is None:
        return None
    if adaptations := method.adaptations(template):
        template = adapt(copy.deepcopy(template), adaptations, derive_seed("count"))
    return method.total_chains * method.chain_passes * multiplications(template, inputs)


def _trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _of_norms(module: nn.Module) -> int:
    norms = [part for part in module.modules() if isinstance(part, NORMALISATIONS)]
    return sum(p.numel() for part in norms for p in part.parameters(recurse=False))
