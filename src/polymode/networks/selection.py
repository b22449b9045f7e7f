"""Select layers of a module: by kind, by type, or by pattern of their names."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from polymode.errors import InputError, UnknownName, unknown_name
from polymode.networks.surgery import NORMALISATIONS

# Layers that are a table of numbers and a formula, whose weights can be exchanged one by one.
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
SELECTABLE = (*WEIGHTED, *NORMALISATIONS)
LAYER_KINDS = {
    "norm": "every normalisation layer",
    "input": "the first layer with weights, as the module lists them",
    "output": "the last one",
    "hidden": "every Linear and convolutional layer but the last",
    "all": "every layer that can be selected",
}

Where = str | Sequence[str]


def selectable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Layers with weights of their own of a type that can be selected, in the order of the module."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, SELECTABLE) and list(layer.parameters(recurse=False))
    }


def is_normalisation(layer: nn.Module) -> bool:
    """Whether a layer only normalises, scales and shifts."""
    return isinstance(layer, NORMALISATIONS)


def check_where(where: Where) -> tuple[str, ...]:
    """The entries of ``where``; what they select is checked when the network is known."""
    entries: tuple[Any, ...] = tuple(where) if isinstance(where, list | tuple) else (where,)
    if not entries or not all(isinstance(entry, str) and entry for entry in entries):
        raise InputError(
            f"where={where!r}: name layers by kind ({', '.join(LAYER_KINDS)}), by type such as 'Linear', or "
            "by a pattern of their names such as 'head.*'."
        )
    return entries


def select_layers(module: nn.Module, where: Where) -> list[str]:
    """Names of the layers that ``where`` selects, in the order of the module.

    A kind that the module does not have is passed over as long as another entry selects something; a type
    or a pattern must select at least one layer.
    """
    if (inner := getattr(module, "wraps", None)) is not None:  # a likelihood's own part beside the network
        return [f"{inner}.{name}".rstrip(".") for name in select_layers(module.get_submodule(inner), where)]
    candidates = selectable_layers(module)
    weighted = [name for name, layer in candidates.items() if isinstance(layer, WEIGHTED)]
    chosen: set[str] = set()
    for entry in check_where(where):
        if entry == "norm":
            chosen |= {name for name, layer in candidates.items() if is_normalisation(layer)}
        elif entry == "input":
            chosen |= set(weighted[:1])
        elif entry == "output":
            chosen |= set(weighted[-1:])
        elif entry == "hidden":
            chosen |= {name for name in weighted[:-1] if not isinstance(candidates[name], nn.Embedding)}
        elif entry == "all":
            chosen |= candidates.keys()
        else:
            found = {
                name
                for name, layer in candidates.items()
                if fnmatchcase(name, entry) or type(layer).__name__ == entry
            }
            if not found:
                raise _matches_nothing(module, candidates, entry)
            chosen |= found
    if not chosen:
        raise InputError(
            f"where={where!r} selects no layer of this {type(module).__name__}: it has {_listed(candidates)}."
        )
    return [name for name in candidates if name in chosen]


def _matches_nothing(module: nn.Module, candidates: dict[str, nn.Module], entry: str) -> InputError:
    for name, layer in module.named_modules():
        if name and (fnmatchcase(name, entry) or type(layer).__name__ == entry):
            inside = [n for n in candidates if n.startswith(f"{name}.")]
            if inside:
                return InputError(f"{entry!r} is a {type(layer).__name__}: say '{entry}.*' for its layers.")
            return InputError(
                f"The layer {name!r} is a {type(layer).__name__} and has no weights that could be exchanged "
                "one to one. BatchNorm, LayerNorm, GroupNorm, RMSNorm, Linear, Conv1d, Conv2d, Conv3d and "
                f"Embedding with weights can be; here {_listed(candidates)}."
            )
    types = {type(layer).__name__ for layer in candidates.values()}
    error = unknown_name(
        "layer, type or pattern in where", entry, candidates.keys() | types | LAYER_KINDS.keys()
    )
    assert isinstance(error, UnknownName)
    return error


def _listed(candidates: dict[str, nn.Module]) -> str:
    if not candidates:
        return "none that can be selected"
    shown = [f"{name or 'itself'} ({type(layer).__name__})" for name, layer in candidates.items()]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")
