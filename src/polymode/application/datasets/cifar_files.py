"""The official files of CIFAR: pickles of Python 2, taken apart without being run.

A pickle is a program for a machine with a stack. This reader knows the few instructions that dictionaries of
lists, texts, numbers and arrays of bytes are written with; names of code stay names, and nothing is called.
"""

import math
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polymode.errors import InputError, require

# Code that the official files (and files that newer versions of NumPy write) name, and what it stands for.
_MEANINGS = {
    "numpy ndarray": "class",
    "numpy dtype": "dtype",
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "_codecs encode": "bytes",
}
_SKIPPED = {"PROTO", "FRAME"}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_BYTE_TYPES = ("u1", "|u1")


@dataclass
class _Name:
    """Code that a file names, which stays a name."""

    meaning: str


@dataclass
class _Type:
    """The type of an array's numbers."""

    code: Any


@dataclass
class _Array:
    """An array, empty until its content follows."""

    content: np.ndarray | None = None


def read_dictionary(path: Path) -> dict[str, Any]:
    """What a file holds: texts, numbers, lists, and arrays of bytes; errors are of every class."""
    content = _Reader().read(path.read_bytes())
    require(isinstance(content, dict), f"it holds a {type(content).__name__}, not a dictionary")
    return {name: value.content if isinstance(value, _Array) else value for name, value in content.items()}


class _Reader:
    """The stack, and what was put aside by number."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.aside: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        for operation, argument, _ in pickletools.genops(content):
            if operation.name == "STOP":
                [result] = self.stack
                return result
            self._follow(operation.name, argument)
        raise InputError("it has no end")

    def _follow(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _SKIPPED:
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in _TUPLES:
            stack.append(tuple(self._last(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("EMPTY_LIST", "LIST"):
            stack.append(self._marked() if name == "LIST" else [])
        elif name in ("EMPTY_DICT", "DICT"):
            pairs = self._marked() if name == "DICT" else []
            stack.append({})
            self._set(pairs)
        elif name in ("APPEND", "APPENDS"):
            added = self._marked() if name == "APPENDS" else self._last(1)
            self._top(list).extend(added)
        elif name in ("SETITEM", "SETITEMS"):
            self._set(self._marked() if name == "SETITEMS" else self._last(2))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.aside[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.aside[len(self.aside)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.aside[argument])
        elif name == "GLOBAL":
            stack.append(_named(argument))
        elif name == "STACK_GLOBAL":
            stack.append(_named(" ".join(self._last(2))))
        elif name == "REDUCE":
            code, arguments = self._last(2)
            stack.append(_called(code, arguments))
        elif name == "BUILD":
            [state] = self._last(1)
            _fill(stack[-1], state)
        else:
            raise InputError(f"it has the instruction {name}, which the official files do not")

    def _last(self, count: int) -> list[Any]:
        require(len(self.stack) >= count, "it takes more than it has put down")
        start = len(self.stack) - count
        taken, self.stack[start:] = self.stack[start:], []
        return taken

    def _marked(self) -> list[Any]:
        return self._last(len(self.stack) - self.marks.pop())

    def _top(self, kind: type) -> Any:
        require(isinstance(self.stack[-1], kind), f"it takes a {type(self.stack[-1]).__name__} for another")
        return self.stack[-1]

    def _set(self, pairs: list[Any]) -> None:
        names, values = pairs[::2], pairs[1::2]
        # Only texts: a tuple of tuples of tuples could be made that takes for ever to hash.
        require(all(isinstance(name, str) for name in names), "its entries are not named by texts")
        self._top(dict).update(zip(names, values, strict=True))


def _named(code: str) -> _Name:
    if code not in _MEANINGS:
        raise InputError(
            f"it refers to {code.replace(' ', '.')}, which the official files do not, and was not read"
        )
    return _Name(_MEANINGS[code])


def _called(code: Any, arguments: Any) -> Any:
    """What a call of the named code would give."""
    require(isinstance(code, _Name) and isinstance(arguments, tuple), "it calls what is no function")
    if code.meaning == "dtype":
        return _Type(arguments[0])
    if code.meaning == "array":
        return _Array()
    require(code.meaning == "bytes" and arguments[1:] == ("latin1",), "it calls what is no function")
    return arguments[0].encode("latin1")


def _fill(target: Any, state: Any) -> None:
    """Give an array its content, of exactly the size that its shape says."""
    if isinstance(target, _Type):  # its byte order and alignment: bytes have none
        return
    require(isinstance(target, _Array), "it fills what is no array")
    _, shape, kind, columns_first, raw = state
    require(isinstance(kind, _Type) and kind.code in _BYTE_TYPES, "it holds an array of other than bytes")
    require(columns_first is False or columns_first == 0, "it holds an array with columns first")
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    sizes = all(type(size) is int and size >= 0 for size in shape)
    require(
        sizes and math.prod(shape) == len(raw), f"it holds {len(raw)} bytes for an array {str(shape)[:100]}"
    )
    target.content = np.frombuffer(raw, np.uint8).reshape(shape).copy()  # torch wants to write to it
