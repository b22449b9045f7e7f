"""``polymode methods``: what there is, and what one of them does."""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from polymode.cli.options import ScreenOptions, option
from polymode.cli.output import console, print_json
from polymode.errors import unknown_name
from polymode.methods import COMPARED, METHODS
from polymode.training import Method
from polymode.training.method import describe

ABOUT = """List the methods, or explain one: its equation, its cost and its options."""


@dataclass(frozen=True)
class MethodsOptions(ScreenOptions):
    """Options of ``polymode methods``."""

    name: str = option("", "method to explain", place="argument")


def run(options: MethodsOptions) -> None:
    """List or explain."""
    if not options.name:
        _list(options)
        return
    if options.name not in METHODS:
        raise unknown_name("method", options.name, METHODS)
    method = METHODS[options.name]
    equation, explanations = explained(method)
    rows = [(f.name, _default(f), explanations.get(f.name, "")) for f in dataclasses.fields(method)]
    if options.json:
        keys = ("name", "default", "explanation")
        described = [dict(zip(keys, row, strict=True)) for row in rows]
        content = {"name": method.name, "summary": method.summary, "equation": equation, "cost": method.cost}
        print_json(content | {"options": described})
        return
    out = console()
    out.print(f"{method.name}: {method.summary}\n", markup=False)
    out.print(equation, markup=False)
    out.print(f"\ncost: {method.cost}\n", markup=False)
    table = Table(
        *("option", "default", "meaning"),
        title=f"options (--set {method.name}.OPTION=VALUE)",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print(f"\nexample: polymode train --method {method.name}", markup=False)


def _list(options: MethodsOptions) -> None:
    rows = [(name, method.summary, method.cost) for name, method in METHODS.items()]
    if options.json:
        content = [{"name": n, "summary": s, "cost": c, "compared": n in COMPARED} for n, s, c in rows]
        print_json({"methods": content})
        return
    table = Table("method", "what it is", "cost", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    out = console()
    out.print(table)
    out.print("polymode methods NAME explains one of them.")


def explained(method: type[Method]) -> tuple[str, dict[str, str]]:
    """The sentence and equation of a method's docstring, and the explanation of each option in it."""
    text = inspect.getdoc(method) or ""
    names = "|".join(f.name for f in dataclasses.fields(method))
    parts = re.split(rf"(?:(?<=\s)|^)({names}): ", text) if names else [text]
    explanations = {
        name: " ".join(part.replace("``", "").split())
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    }
    return parts[0].strip(), explanations


def _default(field: dataclasses.Field) -> str:
    value: Any = field.default
    if value is dataclasses.MISSING:
        value = field.default_factory() if callable(field.default_factory) else "(needed)"
    if isinstance(value, Method):
        return f"{type(value).__name__}()"
    described = describe(value)
    return repr(value) if isinstance(described, dict) else str(described)
