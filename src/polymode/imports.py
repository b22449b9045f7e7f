"""The user's own code by name: ``package.module:callable``."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from polymode.errors import InputError, UntrustedImport, unknown_name


@dataclass(frozen=True)
class _Refusal:
    """A name that a file wants imported. given_as: what the user has named it as, and may have it."""

    source: str
    option: str
    given_as: frozenset[str]


_REFUSED: ContextVar[Mapping[str, _Refusal]] = ContextVar("refused", default=MappingProxyType({}))


def refuse_imports(
    content: Any, source: object, options: Mapping[str, str], given: Mapping[str, Collection[str]]
) -> None:
    """From here on, and in this context, import nothing that a file of a run names.

    content: of the file, with names at any place. options: the option of the command that stands for some
    of the names. given: names that the user has given, by what they are, such as "The model".
    """
    refused = {
        spec: _Refusal(
            str(source), options.get(spec, ""), frozenset(w for w, names in given.items() if spec in names)
        )
        for spec in _texts(content)
        if ":" in spec
    }
    _REFUSED.set({**_REFUSED.get(), **refused})


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _texts(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _texts(value)


def is_import(spec: str) -> bool:
    """Whether a string looks like ``package.module:name``."""
    module, _, name = spec.partition(":")
    return bool(module) and bool(name) and all(part.isidentifier() for part in (*module.split("."), name))


def import_object(spec: str, what: str) -> Any:
    """Import ``package.module:name``, from the current folder too, as ``python -m`` does.

    what: what it is, such as "The model". Everything that is imported by name is imported here.
    """
    refusal = _REFUSED.get().get(spec)
    if refusal is not None and what not in refusal.given_as:
        raise UntrustedImport(spec, refusal.source, refusal.option)
    module_name, _, name = spec.partition(":")
    folder = os.getcwd()
    if module_name not in sys.modules and folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{what} {spec!r}: there is no module {error.name!r}. It is looked for in the installed packages "
            "and in the current folder."
        ) from None
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown_name(f"name in {module_name}", name, names)
    return getattr(module, name)


def check_keywords(function: Callable[..., Any], keywords: Iterable[str], what: str) -> None:
    """Raise, with the nearest name, for a keyword that a function does not take (or a partial has fixed)."""
    parameters = inspect.signature(function).parameters
    fixed = function.keywords if isinstance(function, partial) else {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    allowed = [name for name, p in parameters.items() if p.kind in named and name not in fixed]
    for keyword in keywords:
        if not allowed:
            raise InputError(f"Unknown option {keyword!r}: {what} has no options.")
        if keyword not in allowed:
            raise unknown_name(f"option of {what}", keyword, allowed)


def call(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """Call a function with options, having checked that it knows them and needs no others."""
    check_keywords(function, options, what)
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise InputError(f"The options of {what} do not suffice: {error}.") from error
    return function(**options)
