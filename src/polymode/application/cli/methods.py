"""``polymode methods``: what there is, and what one of them does."""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from polymode.application.cli.jobs import make_methods, wanted_methods
from polymode.application.cli.options import ScreenOptions, UsageError, option
from polymode.application.cli.output import console, print_json
from polymode.errors import require_whole, unknown_name
from polymode.methods import COMPARED, METHODS, network_count, parameter_counts
from polymode.methods.counting import NetworkCount
from polymode.models import MODELS, make_model
from polymode.networks.surgery import floating_type
from polymode.options import options_of
from polymode.seeds import derive_generator
from polymode.training.contract import Method

ABOUT = """List the methods, explain one (its equation, cost and options), or count what each keeps."""


@dataclass(frozen=True)
class MethodsOptions(ScreenOptions):
    """Options of ``polymode methods``."""

    name: str = option(
        "", "method to explain; with --count those to count, such as emp,bn=emp", place="argument"
    )
    model: str = option("", "network to count the parameters of: a name, or package.module:callable")
    count: bool = option(
        False,
        "with --model: parameters that each method keeps, the overhead, and multiplications of a prediction",
    )
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
    equation = inspect.getdoc(method) or ""
    declared = options_of(method)
    if options.json:
        described = [
            {
                "name": each.name,
                "type": each.type_text,
                "default": as_typed(each.default),
                "explanation": plain(each.meaning),
            }
            for each in declared
        ]
        content = {"name": method.name, "summary": method.summary, "equation": equation, "cost": method.cost}
        content |= {"best_epoch": method.best_epoch}
        print_json(content | {"options": described})
        return
    out = console()
    out.print(f"{method.name}: {method.summary}\n", markup=False)
    out.print(equation, markup=False)
    out.print(f"\ncost: {method.cost}", markup=False)
    out.print(f"best epoch: {plain(method.best_epoch)}\n", markup=False)
    table = Table(
        *("option", "default", "meaning"),
        title=f"options (--set {method.name}.OPTION=VALUE)",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for each in declared:
        table.add_row(*map(escape, (each.name, as_typed(each.default), plain(each.meaning))))
    out.print(table)
    out.print(f"\nexample: polymode train --method {method.name}", markup=False)


def _count(options: MethodsOptions) -> None:
    if not options.model:
        raise UsageError("--count needs --model: the network to count, such as --model resnet18.")
    wanted = wanted_methods(options.name, tuple(METHODS))
    methods = make_methods(wanted, options.set, {})
    module, inputs = _network(options)
    count_norm = not options.without_norm
    network = network_count(module, inputs, count_norm=count_norm)
    runs_on = None if network.multiplications is None else inputs
    counts = parameter_counts(module, methods, inputs=runs_on, count_norm=count_norm)
    if options.json:
        content = {name: dataclasses.asdict(count) for name, count in counts.items()}
        print_json({"model": options.model, "network": _as_json(network), "methods": content})
        return
    table = Table(
        *("method", "parameters", "overhead", "multiplications", ""), box=SIMPLE_HEAD, pad_edge=False
    )
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, count in counts.items():
        overhead = "–" if count.overhead is None else f"{100 * count.overhead:,.3g} %"
        table.add_row(name, _whole(count.parameters), overhead, _whole(count.multiplications), count.note)
    out = console()
    out.print(table)
    for line in _about(network):
        out.print(line, markup=False)


def _whole(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _as_json(network: NetworkCount) -> dict[str, Any]:
    """Of the accounting of Jantre et al. (2022) its sums alone."""
    sums = network.accounting
    of_jantre = sums and {"parameters": sums.parameters, "multiplications": sums.multiplications}
    counted = {"parameters": network.parameters, "multiplications": network.multiplications}
    return counted | {"as_jantre_2022": of_jantre, "note": network.note}


def _about(network: NetworkCount) -> Iterator[str]:
    """What is said of one network below the methods."""
    yield (
        f"one network: {_whole(network.parameters)} parameters, {_whole(network.multiplications)} "
        "multiplications a pass"
    )
    if (sums := network.accounting) is not None:
        yield (
            f"as Jantre et al. (2022) count: {sums.parameters:,} parameters, {sums.multiplications:,} "
            "multiplications"
        )
    if network.multiplications is None:
        yield f"note: {network.note} --shape gives that of an example."
    elif network.note:
        yield f"note: {network.note}"


def _network(options: MethodsOptions) -> tuple[nn.Module, Tensor | None]:
    """The network, and an example for it where its shape is known."""
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
            shape = tuple(require_whole("a size", int(size)) for size in options.shape.split(","))
        except ValueError:
            raise UsageError(
                f"--shape {options.shape!r}: write sizes with commas, such as 3,32,32."
            ) from None
    made = make_model(options.model, shape, outputs, settings)
    module = made if isinstance(made, nn.Module) else made()
    if not shape:
        return module, None
    if options.model in MODELS and MODELS[options.model].takes == "tokens":
        return module, torch.ones(1, *shape, dtype=torch.int64)
    numbers = torch.randn(1, *shape, generator=derive_generator("example"))
    return module, numbers.to(floating_type(module))


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


def plain(meaning: str) -> str:
    """What an option means, without the signs of Markdown."""
    return meaning.replace("`", "")


def as_typed(value: Any) -> str:
    """A value as one would type it; of a method, and of keywords of anything else, what is not the default.

    >>> from polymode.training.contract import Optimizer
    >>> as_typed(Optimizer("SGD", momentum=0.9)), as_typed(("norm", 0.5))
    ('Optimizer(kind="SGD", lr=0.001, momentum=0.9)', '("norm", 0.5)')
    """
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(as_typed, value))}{',' if len(value) == 1 else ''})"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    arguments = {}
    for name, parameter in inspect.signature(type(value)).parameters.items():
        given = getattr(value, name)
        is_optional = isinstance(value, Method) or parameter.kind is parameter.KEYWORD_ONLY
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= given
        elif given != parameter.default or not is_optional:
            arguments[name] = given
    typed = ", ".join(f"{name}={as_typed(given)}" for name, given in arguments.items())
    return f"{type(value).__name__}({typed})"
