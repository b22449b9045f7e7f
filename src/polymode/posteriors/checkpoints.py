"""Networks that were trained elsewhere, as a posterior: their ``state_dict``s, in memory or in files."""

import copy
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polymode.errors import CheckpointError, InputError, require, shortened
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.networks.members import Backend, Members, Tensors, join
from polymode.networks.surgery import Model, build, prepare, tensors_of
from polymode.posteriors.network import Network
from polymode.posteriors.particles import Particles
from polymode.sizes import check_archive

# Where trainers put a network's weights in a larger file, and what wrappers put before names.
PLACES = ("state_dict", "model_state_dict", "model", "net", "network", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")


def from_state_dicts(
    model: Model,
    states: Iterable[Mapping[str, Tensor] | str | Path],
    *,
    likelihood: str | Likelihood,
    backend: Backend = "loop",
    calibrate: Any = None,
) -> Particles:
    """A posterior of networks that were trained elsewhere, each with the same weight.

    model: the module (or its factory) that the states belong to; its own weights are not used. states: each a
    ``state_dict`` or the path of a file: ``.safetensors``, or else what ``torch.save`` wrote, which is read
    with ``weights_only=True`` only. A file may hold the state under a usual name
    ("state_dict", "model"), and names may have the usual prefixes ("module.", "_orig_mod."). likelihood: what
    the outputs mean; one that learns a noise level needs networks that were trained with it, or calibrate:
    held-out data to calibrate the posterior on, from which networks that were trained with squared errors
    learn their noise level.
    """
    likelihood = make_likelihood(likelihood)
    if isinstance(states, str | Path | Mapping):
        raise InputError("from_state_dicts takes a list of states or paths: put yours into a list.")
    module = model if isinstance(model, nn.Module) else build(model, seed=0)
    if any(is_lazy(p) for p in module.parameters()):
        raise InputError("This module has lazy layers, whose shapes are not known yet: call it once first.")
    whole, added = _with_noise(module, likelihood)
    expected = {name: tensor for name, tensor in tensors_of(whole).items() if name in whole.state_dict()}
    found: list[Tensors] = []
    for number, state in enumerate(states):
        where = str(state) if isinstance(state, str | Path) else f"State {number}"
        if not isinstance(state, str | Path | Mapping):
            raise InputError(
                f"{where} is a {type(state).__name__}: states are dictionaries of tensors, "
                "module.state_dict(), or paths of files."
            )
        given = read_state_dict(state) if isinstance(state, str | Path) else state
        given = {str(name): tensor for name, tensor in given.items()}
        if calibrate is not None and not added <= _without_prefixes(given, expected).keys():
            given = _with_places(_without_prefixes(given, tensors_of(module)), added, whole)
        given = _without_prefixes(given, expected)
        if not added <= given.keys():
            raise InputError(
                f"The likelihood {likelihood.kind!r} learns {', '.join(sorted(added))!r} beside the network, "
                f"and {where} does not hold it: a network that was trained with squared errors has no noise "
                "level. Pass calibrate=data with held-out examples, which it is learned of, or use "
                "'heteroscedastic_gaussian' where the network gives one."
            )
        found.append(_matched(_untied(given, where, whole), expected, where, whole))
    require(bool(found), "from_state_dicts needs at least one state.")
    stacked = {name: join([_laid_out(state[name])[None] for state in found]) for name in found[0]}
    posterior = Particles(Network(prepare(whole), likelihood, backend), blocks=[Members(stacked)])
    return posterior if calibrate is None else posterior.calibrated(calibrate)


def _with_noise(module: nn.Module, likelihood: Likelihood) -> tuple[nn.Module, frozenset[str]]:
    """The module with what a likelihood learns beside it, and the names of that."""
    try:
        likelihood.check_prepared(module)
    except InputError:
        whole = likelihood.prepare(copy.deepcopy(module))
        inner: str = getattr(whole, "wraps", "")
        return whole, frozenset(n for n, _ in whole.named_parameters() if not n.startswith(f"{inner}."))
    return module, frozenset()


def _with_places(given: Mapping[str, Any], added: frozenset[str], whole: nn.Module) -> dict[str, Any]:
    """A state of the user's network as part of the whole, with what it lacks as the whole begins with it."""
    inner: str = getattr(whole, "wraps", "")
    begun = {name: whole.get_parameter(name).detach() for name in added}
    return begun | {f"{inner}.{name}": tensor for name, tensor in given.items()}


def read_state_dict(path: str | Path) -> Tensors:
    """The tensors of a file by name; nothing in it is executed."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: name a .safetensors or .pt file.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        if zipfile.is_zipfile(path):  # as torch.save writes it; an older kind takes what the file holds
            check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}).") from error
    except InputError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:  # damaged files raise errors of every class
        if type(error).__name__ == "UnpicklingError":  # by its name: its module is not imported anywhere
            raise CheckpointError(
                f"{path} is damaged, or holds more than tensors, and reading the rest could run code: it is "
                "not read. Save module.state_dict() alone, best with safetensors."
            ) from error
        reason = shortened(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is not a readable file of torch.save ({reason}).") from error
    return _state_in(content, path)


def _state_in(content: Any, path: Path) -> Tensors:
    """The dictionary of tensors in what a trainer wrote."""
    if isinstance(content, Mapping):
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return {str(name): tensor for name, tensor in content.items()}
        for place in PLACES:
            inside = content.get(place)
            if isinstance(inside, Mapping) and inside:
                return {str(n): t for n, t in inside.items() if isinstance(t, Tensor)}
        shown = ", ".join(map(str, list(content)[:10]))
        raise CheckpointError(
            f"{path} holds {shortened(shown)}, and none of {', '.join(PLACES)} is a dictionary of tensors."
        )
    raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors.")


def _untied(given: Mapping[str, Any], where: str, module: nn.Module) -> dict[str, Any]:
    """The state with every tensor that a module has under several names under the first of them, too."""
    named = (*module.named_parameters(), *module.named_buffers())  # each once
    first, state = {id(tensor): name for name, tensor in named}, dict(given)
    for name, tensor in module.state_dict(keep_vars=True).items():
        known = first.get(id(tensor), name)
        if known == name or name not in state:
            continue
        one, other = state.setdefault(known, state[name]), state[name]
        if isinstance(one, Tensor) and isinstance(other, Tensor) and not _same(one, other):
            raise CheckpointError(
                f"{where} belongs to another network: {known!r} and {name!r} differ there, and are one "
                f"tensor in this {type(module).__name__}."
            )
    return state


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _matched(given: Mapping[str, Any], expected: Tensors, where: str, module: nn.Module) -> Tensors:
    """The tensors of a state under the module's names, compared with what the module has."""
    for name in sorted(given.keys() | expected.keys()):
        if name not in expected:
            if name.rpartition(".")[2] == "_extra_state":
                raise CheckpointError(
                    f"{where} holds {name!r}, which only the module itself can read: load it with "
                    "module.load_state_dict and pass what its layers then hold as parameters and buffers."
                )
            if name in module.state_dict():  # a tied tensor under its other name
                continue
            raise CheckpointError(
                f"{where} belongs to another network: it holds {name!r}, which this {type(module).__name__} "
                "does not have."
            )
        if name not in given:
            raise CheckpointError(
                f"{where} belongs to another network: it lacks {name!r}, which this {type(module).__name__} "
                "has."
            )
        tensor = given[name]
        if not isinstance(tensor, Tensor) or tensor.shape != expected[name].shape:
            seen = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(
                f"{where} belongs to another network: {name!r} is {seen} there and "
                f"{list(expected[name].shape)} in this {type(module).__name__}."
            )
        if tensor.is_floating_point() != expected[name].is_floating_point() or tensor.is_complex():
            raise CheckpointError(
                f"{where} belongs to another network: {name!r} is {tensor.dtype} there and "
                f"{expected[name].dtype} in this {type(module).__name__}."
            )
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "has no values (a meta tensor)" if tensor.is_meta else f"is {tensor.layout}"
            raise CheckpointError(f"{where}: {name!r} {kind}; plain tensors are needed.")
        tensor = tensor.to(expected[name].dtype)
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{where}: {name!r} holds numbers that are NaN, infinite or too large for "
                f"{str(expected[name].dtype).removeprefix('torch.')}."
            )
    return {name: given[name].detach().to(kind).clone() for name, kind in expected.items()}


def _without_prefixes(given: Mapping[str, Any], expected: Tensors) -> dict[str, Any]:
    """The names that wrappers (data-parallel, compiled, Lightning) have put something before."""
    names = dict(given)
    while not names.keys() & expected.keys():
        for prefix in PREFIXES:
            if names and all(name.startswith(prefix) for name in names):
                names = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
                break
        else:
            break
    return names


def _laid_out(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
