"""One line registers a method: lists, exports and what a document may name follow from it."""

import dataclasses
import inspect
import pkgutil
from importlib import import_module

import pytest

import polymode as pm
from polymode import methods
from polymode.errors import InputError, UnknownName
from polymode.methods import METHODS, make_method
from polymode.methods.configuration import OPTION_TYPES
from polymode.options import options_of
from polymode.training.contract import Method
from polymode.weights.late import Bank


def test_every_method_of_every_file_is_registered_and_exported():
    found = {}
    for entry in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
        for name, kind in inspect.getmembers(import_module(entry.name), inspect.isclass):
            is_own = kind.__module__ == entry.name and issubclass(kind, Method)
            if is_own and not inspect.isabstract(kind) and not name.startswith("_"):
                found[kind.name] = kind
                assert getattr(pm.methods, name) is kind
    assert found == METHODS


def test_what_options_are_made_of_may_be_named_and_nothing_else():
    parts = [pm.Optimizer, pm.KeepBest, pm.priors.FanIn, *pm.samplers.WALKS, *pm.schedules.SCHEDULES]
    parts.append(Bank)
    assert {part.__name__: part for part in parts} == OPTION_TYPES


@pytest.mark.parametrize("kind", ["Part", "Progress", "Walk", "Single", "PosixPath", "Members"])
def test_other_types_are_refused(kind):
    with pytest.raises(UnknownName, match=f"Unknown type of single.schedule '{kind}'"):
        make_method("single", {"schedule": {"type": kind}})


@pytest.mark.parametrize("name", METHODS)
def test_parts_of_defaults_can_be_named(name):
    """A type that its annotation hides would be written into a manifest that nobody can read."""
    for each in options_of(METHODS[name]):
        if dataclasses.is_dataclass(each.default) and not isinstance(each.default, Method):
            assert type(each.default) in OPTION_TYPES.values(), each.name


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (None, None, "A method is a name, one of .* got None"),
        (["single"], None, "A method is a name"),
        ({}, None, "A method is a name, .* got {}"),
        ({"name": ["single"]}, None, r"Unknown method \['single'\]"),
        ("single", [1], r"names and values, got \[1\]"),
        ("single", {"schedule": {"type": []}}, r"Unknown type of single.schedule \[\]"),
        ("single", {"optimizer": {"type": "Optimizer", "options": 3}}, "options of Optimizer .* got 3"),
        ("single", {"schedule": {"type": "Constant", "factor": "x" * 5000}}, "characters left out"),
    ],
)
def test_values_that_are_no_methods_are_refused(method, options, message):
    with pytest.raises(InputError, match=message) as caught:
        make_method(method, options)
    assert len(str(caught.value)) < 2500
