"""The user's own code by name: ``package.module:callable``."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from polymode.errors import InputError, UntrustedImport, unknown_name


@dataclass(frozen=True)
class _Limit:
    """Names that may be imported, by what they are, where a file of a run might name others.

    options: of the command, by the names that they stand for.
    """

    given: Mapping[str, Collection[str]]
    source: str
    options: Mapping[str, str]


_LIMIT: ContextVar[_Limit | None] = ContextVar("limit", default=None)


def import_only(given: Mapping[str, Collection[str]], source: object, options: Mapping[str, str]) -> None:
    """From here on, and in this context, import nothing but what the user has named.

    given: names by what the user has named them as, such as "The model". source: the file or folder that may
    name other things. options: of the command, by the names in it that they stand for.
    """
    _LIMIT.set(_Limit(given, str(source), options))


def is_import(spec: str) -> bool:
    """Whether a string looks like ``package.module:name``."""
    module, _, name = spec.partition(":")
    return bool(module) and bool(name) and all(part.isidentifier() for part in (*module.split("."), name))


def import_object(spec: str, what: str) -> Any:
    """Import ``package.module:name``, from the current folder too, as ``python -m`` does.

    what: what it is, such as "The model". Everything that is imported by name is imported here.
    """
    limit = _LIMIT.get()
    if limit is not None and spec not in limit.given.get(what, ()):
        given = {name for names in limit.given.values() for name in names}
        wanted = {
            name: option for name, option in limit.options.items() if is_import(name) and name not in given
        }
        again = [word for name, option in wanted.items() for word in (option, name)]
        raise UntrustedImport(spec, limit.source, again if spec in limit.options else [])
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
