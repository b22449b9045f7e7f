"""``polymode methods``: what there is, and what one of them does."""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn

from polymode.application.cli.jobs import make_methods, wanted_methods
from polymode.application.cli.options import ScreenOptions, UsageError, option
from polymode.application.cli.output import console, print_json
from polymode.errors import unknown_name
from polymode.methods import COMPARED, METHODS, parameter_counts
from polymode.models import MODELS, make_model
from polymode.training.contract import Method, describe

ABOUT = """List the methods, explain one (its equation, cost and options), or count what each keeps."""


@dataclass(frozen=True)
class MethodsOptions(ScreenOptions):
    """Options of ``polymode methods``."""

    name: str = option(
        "", "method to explain; with --count those to count, such as emp,bn=emp", place="argument"
    )
    model: str = option("", "network to count the parameters of: a name, or package.module:callable")
    count: bool = option(False, "with --model: parameters that each method keeps, and the overhead")
    shape: str = option("", "with --count: shape of an example, 3,32,32 for images", metavar="SIZES")
    without_norm: bool = option(
        False,
        "with --count: leave one copy of the normalisation layers out, as Table 3 of Chang et al. (2019)",
    )
    set: dict[str, Any] = option({}, "set an option of the model or of a method; may be repeated")


def run(options: MethodsOptions) -> None:
    """List or explain."""
    if options.count or options.model:
        _count(options)
        return
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


def _count(options: MethodsOptions) -> None:
    if not options.model:
        raise UsageError("--count needs --model: the network to count, such as --model resnet18.")
    wanted = wanted_methods(options.name, tuple(METHODS))
    methods = make_methods(wanted, options.set, {})
    counts = parameter_counts(_network(options), methods, count_norm=not options.without_norm)
    if options.json:
        content = {name: dataclasses.asdict(count) for name, count in counts.items()}
        print_json({"model": options.model, "methods": content})
        return
    table = Table("method", "parameters", "overhead", "", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, count in counts.items():
        number = "–" if count.parameters is None else f"{count.parameters:,}"
        overhead = "–" if count.overhead is None else f"{100 * count.overhead:,.3g} %"
        table.add_row(name, number, overhead, count.note)
    console().print(table)


def _network(options: MethodsOptions) -> nn.Module:
    settings = options.set.get("model", {})
    shape: tuple[int, ...] = ()
    outputs = 10
    if options.model in MODELS:
        architecture = MODELS[options.model]
        shape = {"table": (8,), "images": (3, 32, 32), "tokens": (100,)}[architecture.takes]
        taken = inspect.signature(architecture.build).parameters
        own = [taken[name].default for name in ("num_classes", "num_outputs") if name in taken]
        outputs = next((number for number in own if isinstance(number, int)), outputs)
    if options.shape:
        try:
            shape = tuple(int(size) for size in options.shape.split(","))
        except ValueError:
            raise UsageError(
                f"--shape {options.shape!r}: write sizes with commas, such as 3,32,32."
            ) from None
    made = make_model(options.model, shape, outputs, settings)
    return made if isinstance(made, nn.Module) else made()


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
    parts = re.split(rf"(?:(?<=\s)|^)({names}):\s", text) if names else [text]
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
