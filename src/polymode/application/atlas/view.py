"""One view of some networks: a figure with its caption, the arrays behind it, and its main numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from polymode.landscape import Pairs


@dataclass(frozen=True)
class Number:
    """A main result: what it is, its value, its standard error (None where there is none)."""

    what: str
    value: float
    error: float | None = None
    note: str = ""

    @staticmethod
    def of(what: str, pairs: Pairs | None, note: str = "") -> "list[Number]":
        """The number of a mean over pairs; none where there are no pairs."""
        if pairs is None:
            return []
        error = None if math.isnan(pairs.standard_error) else pairs.standard_error
        return [Number(what, pairs.mean, error, note)]


@dataclass(frozen=True)
class View:
    """A figure for the page; key: its name in files. arrays: what it was drawn from."""

    key: str
    title: str
    caption: str
    figure: Any
    arrays: Mapping[str, np.ndarray]
    numbers: Sequence[Number] = field(default_factory=tuple)
    sentence: str = ""  # its answer in one sentence, for the top of the page


def array(value: Tensor | Sequence[Any] | np.ndarray) -> np.ndarray:
    """A NumPy array for a file or a figure."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
