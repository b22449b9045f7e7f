"""Options of a dataclass, each declared once: ``name: type = option(default, "meaning")``.

The command line, the pages of the methods and the files of a run read what is declared.
"""

import copy
import dataclasses
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar

Default = TypeVar("Default")

MODULES = re.compile(r"\b(?:[A-Za-z_]\w*\.)+")  # that the parts of a type come from


def option(default: Default, meaning: str, **further: Any) -> Default:
    """A field of a dataclass: its default, and its meaning in the words and signs of the docs (Markdown).

    further: what some reader wants to know beside it, such as its place on the command line.

    >>> @dataclass(frozen=True)
    ... class Walk:
    ...     step: float = option(0.2, "standard deviation of a step")
    >>> Walk(), [(each.name, each.default, each.meaning, each.type_text) for each in options_of(Walk)]
    (Walk(step=0.2), [('step', 0.2, 'standard deviation of a step', 'float')])
    """
    metadata = {"meaning": meaning, **further}
    if type(default).__hash__ is None:  # a dictionary or a list: every instance gets one of its own
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """What is known of an option; its default is ``dataclasses.MISSING`` where a value has to be given."""

    name: str
    default: Any
    meaning: str
    annotation: Any
    further: Mapping[str, Any]

    @property
    def type_text(self) -> str:
        """The type in words, without the modules that its parts come from."""
        return MODULES.sub("", inspect.formatannotation(self.annotation))


def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a dataclass in their order; a field that ``option`` has not made has no meaning."""
    annotations = typing.get_type_hints(kind)
    found = []
    for each in dataclasses.fields(kind):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        further = {key: value for key, value in each.metadata.items() if key != "meaning"}
        meaning = each.metadata.get("meaning", "")
        found.append(Option(each.name, default, meaning, annotations[each.name], further))
    return tuple(found)
