"""How tasks are trained unless told otherwise: rows held out, best epochs kept, options that suit."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn

from polymode.data import ArrayData, Data, Task
from polymode.data.division import with_validation
from polymode.methods import make_method
from polymode.networks.costs import multiplications
from polymode.networks.surgery import (
    Model,
    batch_norms,
    build,
    floating_type,
    match_precision,
    prepare,
    random_layers,
)
from polymode.training.contract import Method
from polymode.training.loop.initialiser import probe
from polymode.trees import map_tree

# How long a member may go without a better validation score, as a share of its epochs.
PATIENCE = 0.25

# Multiplications of a training that a comparison begins unasked: two or three minutes on a core.
AFFORDABLE = 2e12


def held_out(task: Task, validation: str) -> Task:
    """The task with rows to validate on, by which methods keep their best epoch; "none" leaves it alone.

    validation: "auto", "none" or a share of the training rows.
    """
    if validation == "none":
        return task
    task = with_validation(task, None if validation == "auto" else float(validation))
    if any(split.validation is None for split in task.splits):
        return task
    keep = {"keep": {"type": "KeepBest", "patience": PATIENCE}}
    return replace(task, training=keep | dict(task.training))


def why_not_unasked(method: Method, model: Model, data: Data, num_runs: int) -> tuple[str | None, bool]:
    """Why a comparison does not run a sampler unless it is named, and whether naming it would help.

    No reason where it does. data: to train on; num_runs: splits times seeds.
    """
    module = prepare(model if isinstance(model, nn.Module) else build(model, 0))
    if not isinstance(data, ArrayData) or data.augment:
        return "as the data are not all in memory, or are augmented", False
    inputs = map_tree(lambda t: t[:1], match_precision(floating_type(module), data.inputs))
    if batch_norms(module) or random_layers(module) or probe(module, inputs).uses_global_random:
        return "as the network has BatchNorm, or is random itself", False
    of_pass = 3 * multiplications(module, inputs) * data.num_examples  # forwards, and twice that back
    needed = of_pass * method.least_budget * num_runs
    if needed > AFFORDABLE:
        times = f"{needed / AFFORDABLE:.1f} times" if needed < 9.5 * AFFORDABLE else "more than ten times"
        return f"as its thousands of passes would take {times} what is begun unasked", True
    return None, True


def suited(method: Method, suggested: Mapping[str, Any]) -> Method:
    """The method with those suggestions that are meant for it."""
    meant = {name: value for name, value in suggested.items() if _suits(method, name, value)}
    return with_common(method, meant)


def _suits(method: Method, name: str, value: Any) -> bool:
    """Whether a suggestion is meant for a method: a rate is for Adam, unless it names another optimiser."""
    if name == "keep" and not method.can_keep_best:
        return False
    path = path_of(method, name)
    if path is None or name != "optimizer" or "kind" in value:
        return True
    for step in path:
        method = getattr(method, step)
    return getattr(method, "kind", None) == "Adam"


def with_common(method: Method, options: Mapping[str, Any]) -> Method:
    """The method with those options that it, or the method it is made of, has."""
    for name, value in options.items():
        path = path_of(method, name)
        if path is not None:
            change: Any = value
            for step in reversed(path):
                change = {step: change}
            method = make_method(method, change)
    return method


def path_of(method: Method, name: str) -> tuple[str, ...] | None:
    """Where a method, or the method it is made of, has an option."""
    names = [each.name for each in fields(method)]
    if name in names:
        return (name,)
    inner = getattr(method, "of", None) if "of" in names else None
    if isinstance(inner, Method) and (below := path_of(inner, name)) is not None:
        return ("of", *below)
    return None
