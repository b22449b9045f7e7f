"""NPZ files: arrays of inputs and targets."""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import torch
from torch import Tensor

from polymode.arrays_on_disk import names_of_arrays, opened_array, read_arrays
from polymode.errors import InputError, require

ARRAY_NAMES = (("x", "y"), ("inputs", "targets"))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say what is wrong with a file that is no archive of arrays."""
    try:
        yield
    except Exception as error:  # zip, header and pickle errors are of many classes
        raise InputError(
            f"{path} cannot be read as arrays ({error}). Save it with numpy.savez(path, x=..., y=...) from "
            "arrays of numbers."
        ) from error


def npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an NPZ file, none of them pickled."""
    with _readable(path):
        return read_arrays(path)


def npz_whole(path: Path, name: str) -> np.ndarray:
    """One array of an NPZ file."""
    with _readable(path):
        return read_arrays(path, [name])[name]


def npz_rows(
    path: Path, name: str, rows: int | None = None, *, most_rows: int, most_numbers: int
) -> Iterator[np.ndarray]:
    """An array of an NPZ file, some rows at a time: no more is ever read, or taken out of the archive.

    rows: how many, unless they are to be as many as the limits allow. An array without rows is given whole.
    """
    with _readable(path), opened_array(path, name) as (file, (shape, by_columns, dtype)):
        if dtype.kind not in "biuf" or not shape or 0 in shape:
            yield np.empty(shape, dtype=dtype)
            return
        width = math.prod(shape[1:])
        rows = rows or max(1, min(most_rows, most_numbers // width))
        with _Columns.of(file, shape[0], dtype) if by_columns else nullcontext() as columns:
            for start in range(0, shape[0], rows):
                count = min(rows, shape[0] - start)
                if columns is not None:
                    part = columns.rows(start, count, width).reshape(count, *shape[1:], order="F")
                else:
                    part = _exactly(file, count * width, dtype).reshape(count, *shape[1:])
                yield part
        require(file.read(1) == b"", f"{name} holds more numbers than its shape says")


def _exactly(file: IO[bytes], count: int, dtype: np.dtype) -> np.ndarray:
    content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise ValueError("it ends too early")
    return np.frombuffer(content, dtype=dtype)


@dataclass(frozen=True)
class _Columns:
    """An array that is stored column by column, taken out of its archive into a temporary file."""

    file: IO[bytes]
    num_rows: int
    dtype: np.dtype

    @classmethod
    @contextmanager
    def of(cls, stored: IO[bytes], num_rows: int, dtype: np.dtype) -> Iterator["_Columns"]:
        with TemporaryFile() as file:
            shutil.copyfileobj(stored, file, 2**20)
            yield cls(file, num_rows, dtype)

    def rows(self, start: int, count: int, width: int) -> np.ndarray:
        """Some rows, [count, width] in the order of columns."""
        found = np.empty((count, width), dtype=self.dtype, order="F")
        for column in range(width):
            self.file.seek((column * self.num_rows + start) * self.dtype.itemsize)
            found[:, column] = _exactly(self.file, count, self.dtype)
        return found


def array_names(path: Path, need_target: bool) -> tuple[str, str]:
    """The names of the arrays of inputs and targets in an NPZ file."""
    with _readable(path):
        found = names_of_arrays(path)
    for first, second in ARRAY_NAMES:
        if first in found and (second in found or not need_target):
            return first, second
    raise InputError(
        f"{path} must hold arrays x and y, or inputs and targets; it holds "
        f"{', '.join(sorted(found)) or 'none'}."
    )


def npz_parts(
    path: Path, target: str | None, drop: Sequence[str]
) -> tuple[Tensor, np.ndarray, list[str], str, tuple[Tensor, np.ndarray] | None]:
    """Inputs, raw targets, column names, the target's name and, where the file has them, test arrays."""
    require(
        target is None and not drop,
        f"target={target!r} and drop={drop!r} name columns; the arrays of {path} have none. Leave them out.",
    )
    first, second = array_names(path, need_target=True)
    arrays = npz_arrays(path)
    inputs, raw = _npz_pair(arrays, first, second, path)
    test_names = f"{first}_test", f"{second}_test"
    present = [name for name in test_names if name in arrays]
    require(len(present) != 1, f"{path} has {' '.join(present)}, but not both of {' and '.join(test_names)}.")
    if not present:
        return inputs, raw, [], second, None
    test = _npz_pair(arrays, *test_names, path)
    require(
        test[0].shape[1:] == inputs.shape[1:],
        f"{path}: examples of {first} are {list(inputs.shape[1:])}, those of {test_names[0]} are "
        f"{list(test[0].shape[1:])}; they must be of one shape.",
    )
    return inputs, raw, [], second, test


def _npz_pair(
    arrays: dict[str, np.ndarray], first: str, second: str, path: Path
) -> tuple[Tensor, np.ndarray]:
    inputs = npz_inputs(arrays[first], first, path)
    targets = npz_targets(arrays[second], second, path)
    require(
        len(inputs) == len(targets) > 0,
        f"{path}: {first} has {len(inputs)} rows and {second} has {len(targets)}; they must be equal and not "
        "0.",
    )
    return inputs, targets


def npz_inputs(array: np.ndarray, name: str, path: Path, first: int | None = None) -> Tensor:
    """Inputs as floating-point numbers, checked; first: rows before them, where they are not all."""
    require(array.dtype.kind in "biuf", f"{name} of {path} must be numbers, got the type {array.dtype}.")
    require(array.ndim >= 1, f"{name} of {path} is a single number; one row per example is needed.")
    require(
        array.size > 0, f"{name} of {path} is empty, its shape is {list(array.shape)}: give rows of numbers."
    )
    values = torch.from_numpy(array.astype(np.float64))
    values = values[:, None] if values.ndim == 1 else values
    _check_finite(values.flatten(1).isfinite().all(1).numpy(), name, path, first)
    return values


def npz_targets(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    """Targets [N], checked."""
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    require(
        array.ndim == 1, f"{name} of {path} must be one number a row [N], got the shape {list(array.shape)}."
    )
    if array.dtype.kind == "f":
        _check_finite(np.isfinite(array), name, path)
    return array


def _check_finite(finite: np.ndarray, name: str, path: Path, first: int | None = None) -> None:
    if not finite.all():
        raise InputError(
            f"{name} of {path} has {'' if first is None else 'at least '}{int((~finite).sum())} rows with "
            f"NaN or infinite values, the first in row {(first or 0) + int(np.argmin(finite)) + 1}. Fill "
            "them in, or remove those rows."
        )
