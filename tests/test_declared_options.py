"""Options of a dataclass, declared once."""

import typing
from collections.abc import Mapping
from dataclasses import MISSING, FrozenInstanceError, dataclass

import pytest

from polymode.options import option, options_of


@dataclass(frozen=True)
class Base:
    size: int = option(3, "how large")
    names: dict[str, int] = option({"a": 1}, "who", place="screen")


@dataclass(frozen=True)
class Kind(Base):
    needed: typing.Any = None
    width: float | Mapping[str, float] | None = option(None, "how wide")
    size: int = option(4, "how large it is here")


def test_instances_are_made_as_those_of_any_dataclass():
    assert Kind() == Kind(4, {"a": 1}, None, None)
    assert Kind(5, {}, width=2.0) == Kind(size=5, names={}, width=2.0)
    with pytest.raises(FrozenInstanceError):
        Kind().size = 1  # type: ignore[misc]


def test_defaults_that_can_change_are_not_shared():
    one, other = Kind(), Kind()
    one.names["b"] = 2
    assert other.names == Kind().names == {"a": 1}


def test_what_is_declared_is_read_back():
    size, names, needed, width = options_of(Kind)
    assert (size.name, size.default, size.meaning, size.type_text) == (
        "size",
        4,
        "how large it is here",
        "int",
    )
    assert (names.default, names.meaning, names.further) == ({"a": 1}, "who", {"place": "screen"})
    assert (needed.default, needed.meaning) == (None, "")
    assert (width.annotation, width.type_text) == (
        float | Mapping[str, float] | None,
        "float | Mapping[str, float] | None",
    )


def test_an_option_that_has_to_be_given_has_no_default():
    @dataclass
    class Needed:
        value: int

    [value] = options_of(Needed)
    assert value.default is MISSING
