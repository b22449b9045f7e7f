"""New rows of a table, prepared as those that a network was trained on."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets import frames
from polymode.application.datasets.arrays import array_names, npz_arrays, npz_inputs, npz_targets
from polymode.application.datasets.frames import as_frame, is_frame, kept_columns, read_frame
from polymode.application.datasets.targets import plain_values, targets_of
from polymode.data.encoding import Column, as_numbers, as_texts, encoded, unreadable_cells
from polymode.data.task import Preprocessing
from polymode.errors import InputError, require, shortened

SUFFIXES = (*frames.SUFFIXES, ".npz")
ROW = "row"  # what the numbers of rows are called


def read_table(
    source: Any,
    preprocessing: Preprocessing,
    need_target: bool = False,
    separator: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Inputs (and targets, where needed) of a new table, prepared as those that a network was trained on.

    Columns are found by their names, in any order; others are ignored.
    """
    return _read(source, preprocessing, need_target, separator)[:2]


def read_rows(
    path: Path | str, preprocessing: Preprocessing, keep: Sequence[str] = (), separator: str | None = None
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Inputs of a new table, with what tells its rows: their numbers, and the columns to keep.

    Rows are counted from 1, the first below the column names; empty ones count, too.
    """
    inputs, _, about = _read(path, preprocessing, False, separator, keep)
    return inputs, about


UNLIKE = "unlike"  # the columns of a row whose values no training row has


def _read(
    source: Any,
    preprocessing: Preprocessing,
    need_target: bool,
    separator: str | None,
    keep: Sequence[str] = (),
) -> tuple[Tensor, Tensor | None, dict[str, np.ndarray]]:
    if is_frame(source):
        frame, path = as_frame(source), Path("the table")
    else:
        path = existing_table(source)
        if path.suffix.lower() == ".npz":
            return _read_arrays(path, preprocessing, need_target, keep)
        frame = read_frame(path, separator)
    # A run that knows no names has its target in the last column, as a table has that is trained on.
    name = preprocessing.target or (str(frame.columns[-1]) if need_target else "")
    if need_target and name not in frame.columns:
        raise InputError(
            f"{path} has no column {name!r}, the target, which scores are about; it has "
            f"{shortened(', '.join(map(str, frame.columns)))}. polymode predict needs none."
        )
    if need_target:
        gaps = as_texts(frame[name])[1]
        require(not gaps.all(), f"No row of {path} has a {name!r}.")
        frame = frame[~gaps]
    raw_inputs = torch.from_numpy(_encode(frame, preprocessing, path, {name, *keep}))
    about: dict[str, np.ndarray] = {ROW: frame.index.to_numpy() + 1}
    if keep:
        about |= kept_columns(frame, keep, path, separator)
    if preprocessing.encoding:
        about |= {UNLIKE: _strange_columns(frame, preprocessing.encoding)}
    inputs = preprocessing.inputs(raw_inputs).float()
    if not need_target:
        return inputs, None, about
    raw = plain_values(frame[name], "classification" if preprocessing.classes else "regression")
    targets = targets_of(raw, preprocessing.classes, f"The target {name!r} of {path}")
    return inputs, targets if preprocessing.classes else preprocessing.targets(targets).float(), about


def _encode(frame: Any, preprocessing: Preprocessing, path: Path, others: set[str]) -> np.ndarray:
    """The raw inputs of a frame; others: columns that are none, where a network knows no names."""
    names = [str(name) for name in frame.columns]
    if not preprocessing.columns and not preprocessing.encoding:
        found = [name for name in names if name not in others]
        warnings.warn(
            f"The network was trained on data without names of columns: those of {path} are taken in their "
            f"order ({shortened(', '.join(found))}).",
            stacklevel=5,
        )
    else:
        found = [column.name for column in preprocessing.encoding if column.features]
        found = found or list(preprocessing.columns)
        missing = [name for name in found if name not in names]
        require(
            not missing,
            f"{path} lacks {len(missing)} of the columns that the network was trained on: "
            f"{', '.join(missing)}. It has {', '.join(names)}.",
        )
    if preprocessing.encoding:
        used = [column for column in preprocessing.encoding if column.features]
        for remark in unreadable_cells(used, frame):
            warnings.warn(f"{path}: {remark}.", stacklevel=5)
        return encoded(used, frame)
    return np.stack([_numbers_without_gaps(frame[name], name, path) for name in found], 1)


def _numbers_without_gaps(values: Any, name: str, path: Path) -> np.ndarray:
    """A column for a network that was trained on plain numbers and knows no gaps."""
    numbers = as_numbers(values, name)
    gaps = np.isnan(numbers)
    if gaps.any():
        place = int(gaps.argmax())
        raise InputError(
            f"The column {name!r} of {path} has {int(gaps.sum())} values that are missing or no numbers, the "
            f"first in row {int(values.index[place]) + 1} ({str(values.iloc[place])!r}). Fill them in, or "
            "remove those rows."
        )
    return numbers


def _strange_columns(frame: Any, columns: Sequence[Column]) -> np.ndarray:
    """For every row the columns whose values are unlike those of training rows, with commas."""
    found = [""] * len(frame)
    for column in columns:
        if column.features:
            for row in np.flatnonzero(column.strange(frame[column.name])).tolist():
                found[row] += f"; {column.name}" if found[row] else column.name
    return np.array(found, dtype=str)


def _read_arrays(
    path: Path, preprocessing: Preprocessing, need_target: bool, keep: Sequence[str]
) -> tuple[Tensor, Tensor | None, dict[str, np.ndarray]]:
    arrays = npz_arrays(path)
    first, second = array_names(arrays, path, need_target)
    require(not preprocessing.encoding, f"The network was trained on a table with names; {path} has arrays.")
    inputs = preprocessing.inputs(npz_inputs(arrays[first], first, path)).float()
    require(not keep, f"The arrays of {path} have no columns to keep ({', '.join(keep)}).")
    about = {ROW: np.arange(1, len(inputs) + 1)}
    if not need_target:
        return inputs, None, about
    targets = targets_of(
        npz_targets(arrays[second], second, path), preprocessing.classes, f"The target {second!r} of {path}"
    )
    return inputs, targets if preprocessing.classes else preprocessing.targets(targets).float(), about


def existing_table(path: Path | str) -> Path:
    """The path of a table that is there, by its ending one that can be read."""
    require(
        isinstance(path, str | Path),
        f"A table is a path or a data frame of pandas or polars, got {type(path).__name__}.",
    )
    path = Path(path)
    require(
        path.suffix.lower() in SUFFIXES,
        f"{path} is not a table: allowed endings are {', '.join(SUFFIXES)}.",
    )
    require(path.is_file(), f"There is no file {path.absolute()}. Check the path of the table.")
    return path
