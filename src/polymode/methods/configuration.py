"""Methods from plain values: what ``describe`` writes into a manifest is read back here."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from polymode.errors import InputError, shortened, unknown_name
from polymode.methods.registry import METHODS
from polymode.options import options_of
from polymode.samplers import WALKS, Walk
from polymode.schedules import SCHEDULES, Schedule
from polymode.training.contract import Method, Optimizer, describe

# Annotations that more fits than they name: any function is a schedule, and a walk may be anyone's.
FAMILIES: tuple[tuple[Any, tuple[type, ...]], ...] = ((Schedule, SCHEDULES), (Walk, WALKS))


def _types_in(annotation: Any) -> Iterator[type]:
    """The dataclasses, other than methods, that an annotation is made of."""
    for family, types in FAMILIES:
        if annotation == family:
            yield from types
            return
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if not issubclass(annotation, Method):
            yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _types_in(part)


# What options of methods are made of, by the name that ``describe`` gives them: nothing else is ever built.
OPTION_TYPES: dict[str, type] = {
    kind.__name__: kind
    for method in METHODS.values()
    for each in options_of(method)
    for kind in _types_in(each.annotation)
}

# Words that stand in the place of such a type, such as "last" in that of KeepBest.
OPTION_WORDS: dict[str, set[str]] = {
    name: {
        word
        for method in METHODS.values()
        for each in options_of(method)
        if kind in _types_in(each.annotation)
        for part in typing.get_args(each.annotation)
        if typing.get_origin(part) is typing.Literal
        for word in typing.get_args(part)
    }
    for name, kind in OPTION_TYPES.items()
}


def make_method(method: str | Mapping[str, Any] | Method, options: Mapping[str, Any] | None = None) -> Method:
    """A method from its name, or from a description, with options changed.

    options: nested values under the names of the method's fields, such as
    ``{"num_members": 10, "of": {"optimizer": {"lr": 0.01}}}``; what is not named stays as it is.
    """
    if isinstance(method, str):
        method = {"name": method}
    described = describe(method) if isinstance(method, Method) else method
    if not isinstance(described, Mapping) or "name" not in described:
        raise InputError(
            f"A method is a name, one of {', '.join(METHODS)}, or a description with a name, got "
            f"{shortened(repr(method))}."
        )
    if not isinstance(options, Mapping | None):
        raise InputError(f"Options of a method are names and values, got {shortened(repr(options))}.")
    complete = describe(_read(described, "method"))
    return _read(_changed(complete, options or {}, complete["name"]), "method")


def _read(value: Any, where: str) -> Any:
    """Build what a description stands for."""
    if isinstance(value, list | tuple):
        return tuple(_read(item, where) for item in value)
    if not isinstance(value, Mapping):
        return value
    content = dict(value)
    if "name" in content:
        kind = content.pop("name")
        if not isinstance(kind, str) or kind not in METHODS:
            raise unknown_name("method", kind, METHODS)
        return _build(METHODS[kind], kind, content)
    if "type" in content:
        kind = content.pop("type")
        if not isinstance(kind, str) or kind not in OPTION_TYPES:
            raise unknown_name(f"type of {where}", kind, OPTION_TYPES)
        return _build(OPTION_TYPES[kind], kind, content)
    return {key: _read(item, f"{where}.{key}") for key, item in content.items()}


def _build(part: type, kind: str, content: dict[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(part)]
    read = {key: _read(item, f"{kind}.{key}") for key, item in content.items()}
    if part is Optimizer:  # anything else it is told goes to torch's optimiser
        further = read.pop("options", {})
        if not isinstance(further, Mapping):
            raise InputError(f"The options of {kind} are names and values, got {shortened(repr(further))}.")
        read |= further
    else:
        for key in read:
            if key not in names:
                raise unknown_name(f"option of {kind}", key, names)
    for each in dataclasses.fields(part):
        if each.type is bool and each.name in read and not isinstance(read[each.name], bool):
            raise InputError(f"{each.name} of {kind} must be true or false, got {read[each.name]!r}.")
    try:
        return part(**read)
    except InputError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise InputError(f"{kind} cannot be made of {shortened(repr(read))}: {error}.") from error


def _changed(base: Any, change: Any, where: str) -> Any:
    """The description with some of its values replaced."""
    if not isinstance(base, dict) or not ({"name", "type"} & base.keys()):
        if (
            isinstance(change, Mapping)
            and not ({"name", "type"} & change.keys())
            and not isinstance(base, dict)
        ):
            first = next(iter(change), "")
            raise InputError(
                f"{where} is {base!r} and has no option {first!r}: give all of it, with its type (one of "
                f"{', '.join(OPTION_TYPES)})."
            )
        return dict(change) if isinstance(change, Mapping) else change
    marker = "name" if "name" in base else "type"
    if marker == "type" and isinstance(change, str) and change in OPTION_WORDS.get(base["type"], ()):
        return change
    if isinstance(change, str):  # a name alone stands for the thing with its defaults
        change = {marker: change}
    if not isinstance(change, Mapping):
        return change
    if change.get(marker, base[marker]) != base[marker]:
        return dict(change)
    result = dict(base)
    for key, item in change.items():
        if key not in base and base.get("type") == "Optimizer":
            result["options"] = dict(result["options"]) | {key: item}
        elif key not in base:
            raise unknown_name(f"option of {base[marker]}", key, base.keys() - {marker})
        else:
            result[key] = _changed(base[key], item, f"{where}.{key}")
    return result
