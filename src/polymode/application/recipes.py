"""How tasks are trained unless told otherwise: rows held out, best epochs kept, options that suit."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from polymode.data import Task
from polymode.data.division import with_validation
from polymode.methods import make_method
from polymode.training.contract import Method

# How long a member may go without a better validation score, as a share of its epochs.
PATIENCE = 0.25


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
