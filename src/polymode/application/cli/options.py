"""Options of a command, declared once as a dataclass: flags, config files and manifests follow from it.

A config file (YAML or JSON) holds the same names; flags override it. The manifest of a run is such a file.
"""

import argparse
import contextlib
import dataclasses
import json
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from polymode.errors import InputError, unknown_name
from polymode.imports import import_only
from polymode.metrics import Bins
from polymode.options import Default, Option, options_of
from polymode.options import option as declare
from polymode.storage import read_document
from polymode.training.loop.arithmetic import MOST_THREADS, recorded_threads
from polymode.training.loop.settings import Computing

MANIFESTS = ("manifest.json", "comparison.json")  # what run folders keep their options in


class UsageError(InputError):
    """A command line or a config file that cannot be followed."""


def option(
    default: Default, meaning: str, *, choices: Sequence[str] = (), metavar: str = "", place: str = "flag"
) -> Default:
    """An option of a command. place: "flag", "argument" (positional) or "screen" (not kept)."""
    return declare(default, meaning, choices=choices, metavar=metavar, place=place)


AVERAGE = "what the mean over members is taken of: their predictions, or their outputs, such as logits"


def same_option(kind: type, name: str, *, choices: Sequence[str] = (), place: str = "flag") -> Any:
    """An option that a class of the library has declared, as an option of a command; "" stands for None."""
    [found] = [each for each in options_of(kind) if each.name == name]
    is_text = found.default is None and str in typing.get_args(found.annotation)
    return option("" if is_text else found.default, found.meaning, place=place, choices=choices)


@dataclass(frozen=True)
class ScreenOptions:
    """What every command understands about its output; not part of a run's identity."""

    quiet: bool = option(False, "print results only, no progress", place="screen")
    json: bool = option(
        False, "results as JSON on standard output, progress as JSON lines on standard error", place="screen"
    )
    debug: bool = option(False, "show the traceback of an error", place="screen")


@dataclass(frozen=True)
class ComputingOptions(ScreenOptions):
    """How a command computes; not part of a run's identity."""

    threads: int | None = same_option(Computing, "threads", place="screen")

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"--threads must be between 1 and {MOST_THREADS}, got {self.threads}.")


@dataclass(frozen=True)
class JudgingOptions(ComputingOptions):
    """How posteriors are judged, wherever they are."""

    num_draws: int = option(100, "networks to draw from a posterior that can draw any number")
    bins: int = option(
        15, "bins of confidence that calibration errors (ECE, MCE) are made of", place="screen"
    )
    bin_min_count: int = option(0, "ignore bins with this many examples or fewer", place="screen")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("num_draws", 1), ("bins", 1), ("bin_min_count", 0)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")

    @property
    def calibration(self) -> Bins:
        return Bins(self.bins, self.bin_min_count)


AnyOptions = TypeVar("AnyOptions", bound=ScreenOptions)


def config_of(options: ScreenOptions, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """The options as a config file holds them."""
    return {
        each.name: getattr(options, each.name)
        for each in options_of(type(options))
        if each.further["place"] != "screen" and each.name not in without
    }


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")


def parse(kind: type[AnyOptions], command: str, about: str, arguments: Sequence[str]) -> AnyOptions:
    """Read a command's options from flags and from the file that ``--config`` names."""
    parser = Parser(
        prog=f"polymode {command}",
        description=about,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    declared = {each.name: each for each in options_of(kind)}
    for each in declared.values():
        _add(parser, each)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON with any of these options, or the manifest of a run"
    )
    known, unknown = parser.parse_known_intermixed_args(list(arguments))
    for argument in unknown:
        if argument.startswith("-"):
            flags = [f for action in parser._actions for f in action.option_strings if f.startswith("--")]
            flags = [flag for flag in flags if flag != "--trust"]  # nobody is led to it by a slip
            raise unknown_name(f"option of polymode {command}", argument.split("=")[0], flags)
        raise UsageError(f"{argument!r} is not expected here. See polymode {command} --help.")
    given = {
        name: _checked(declared[name], value) if name in declared and name != "set" else value
        for name, value in vars(known).items()
    }
    changes = _settings(given.pop("set", []))
    config = {}
    if "config" in given:
        path = Path(given.pop("config"))
        config, is_manifest = _read_config(path, kind, command)
        if is_manifest and not given.get("trust"):
            _import_only_typed(config, path, given, changes)
    values = config | given
    if changes:
        values["set"] = _merged(config.get("set", {}), changes)
    return kind(**values)


def _add(parser: argparse.ArgumentParser, each: Option) -> None:
    name, annotation, further = each.name, each.annotation, each.further
    explanation, shown = each.meaning, each.default
    is_told = isinstance(shown, str | int | float) and not isinstance(shown, bool) and shown != ""
    if is_told and "(default: " not in explanation:  # one that stands for something says for what
        explanation += f" (default: {shown})"
    explanation = explanation.replace("%", "%%")
    if name == "set":
        parser.add_argument("--set", action="append", metavar="PATH=VALUE", help=explanation)
        return
    if annotation is bool:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, action="store_true", default=argparse.SUPPRESS, help=explanation)
        return
    options: dict[str, Any] = {"help": explanation}
    if further["choices"]:
        options["metavar"] = "|".join(filter(None, further["choices"]))
    elif further["metavar"]:
        options["metavar"] = further["metavar"]
    if further["place"] == "argument":
        optional = each.default is not dataclasses.MISSING
        many = typing.get_origin(annotation) is tuple
        nargs = "*" if many else ("?" if optional else None)
        parser.add_argument(name, nargs=nargs, **options)
    else:
        if typing.get_origin(annotation) is tuple:
            options["nargs"] = "+"
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **options)


def _checked(each: Option, value: Any) -> Any:
    """A value for an option, from a flag (text) or from a config, as the option's annotation says."""
    name, annotation, choices = each.name, each.annotation, each.further["choices"]
    if choices:
        if value not in choices:
            raise unknown_name(name, str(value), filter(None, choices))
        return value
    if typing.get_origin(annotation) is tuple and isinstance(value, list | tuple):
        return tuple(map(str, value))
    allowed = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if str in allowed and isinstance(value, list):  # a config may hold names as a list
        return ",".join(map(str, value))
    if any(isinstance(value, plain) for plain in (bool, dict, str, type(None)) if plain in allowed):
        return value
    for number, words in ((int, "a whole number"), (float, "a number")):
        if number in allowed:
            try:
                if isinstance(value, bool) or (number is int and isinstance(value, float)):
                    raise ValueError
                return number(typing.cast(str, value))
            except (TypeError, ValueError):
                raise UsageError(f"{name} must be {words}, got {value!r}.") from None
    wanted = " or ".join(getattr(plain, "__name__", str(plain)) for plain in allowed)
    raise UsageError(f"{name} must be of type {wanted}, got {value!r}.")


# --- config files -------------------------------------------------------------------------------


def _import_only_typed(
    config: Mapping[str, Any], path: Path, given: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    """Keep what a manifest names from being imported, but for what was typed."""
    options = {config[name]: f"--{name}" for name in ("data", "model", "ood") if name in config}
    typed = {
        "The data": [given.get("data"), given.get("ood")],
        "The model": [given.get("model")],
        "The optimiser": [leaf for _, leaf in _leaves(changes)],
    }
    import_only(typed, path, options)


def _read_config(path: Path, kind: type, command: str) -> tuple[dict[str, Any], bool]:
    """The options in a file, and whether it is part of a run's folder, which others may have written."""
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"The config {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The config {path} is not a text file.") from None
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # the last: nested without end
        reason = " ".join(str(error).split())
        raise UsageError(
            f"The config {path} is not valid {path.suffix.lstrip('.') or 'YAML'}: {reason}."
        ) from None
    # By its name, too: whoever made a folder could leave the version out, to be taken for the user's own.
    is_manifest = path.name.lower() in MANIFESTS or (
        isinstance(content, dict) and "format_version" in content
    )
    record: Any = {}
    if is_manifest:
        if path.suffix != ".json":
            raise UsageError(
                f"The config {path} has a format_version, which manifests (.json) have: remove it."
            )
        kind_of_document = content.get("what", "run") if isinstance(content, dict) else "run"
        document = read_document(path, str(kind_of_document), "Options of yours go into a file of your own.")
        record, content = document.get("record", {}), document.get("options", {})
    if content is None:
        return {}, is_manifest
    if not isinstance(content, dict):
        raise UsageError(f"The config {path} must hold names and values, got {type(content).__name__}.")
    known = {
        each.name: each
        for each in options_of(kind)
        if not (is_manifest and each.further["place"] == "screen")  # no manifest has them: none says --trust
    }
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise unknown_name(f"option in {path} for polymode {command}", str(key), known)
        values[name] = _checked(known[name], value)
    if is_manifest and issubclass(kind, ComputingOptions):
        values["threads"] = recorded_threads(record)  # those that were chosen then
    return values, is_manifest


def _settings(entries: Sequence[str]) -> dict[str, Any]:
    """Nested values from ``a.b=value`` entries; values are read as YAML."""
    nested: dict[str, Any] = {}
    for entry in entries:
        path, equals, text = entry.partition("=")
        if not equals or not all(path.split(".")):
            raise UsageError(f"--set {entry!r}: write PATH=VALUE, such as deep_ensemble.num_members=10.")
        value = read_value(text)
        for key in reversed(path.split(".")):
            value = {key: value}
        nested = _merged(nested, value)
    return nested


def read_value(text: str) -> Any:
    """A value as JSON or YAML reads it; numbers such as 1e-3, which YAML takes for words, are numbers."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)  # what command_line prints; YAML takes some of its characters for others
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]  # both are mappings
    return result


def command_line(command: str, options: ScreenOptions) -> str:
    """What a reader types to run a command with these options: those that are not the defaults."""
    words = ["polymode", command]
    for each in options_of(type(options)):
        value = getattr(options, each.name)
        if each.name == "set":
            words += [f"--set={path}={json.dumps(leaf)}" for path, leaf in _leaves(value)]
        elif isinstance(value, tuple) and each.further["place"] == "argument":
            words += value
        elif isinstance(value, tuple) and value:
            words += [f"--{each.name.replace('_', '-')}", *value]
        elif value != each.default and value is True:
            words.append(f"--{each.name.replace('_', '-')}")
        elif value != each.default:
            words.append(f"--{each.name.replace('_', '-')}={value}")
    return shlex.join(words)


def _leaves(nested: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
