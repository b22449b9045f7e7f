"""NPZ files: arrays of inputs and targets."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polymode.arrays_on_disk import read_arrays
from polymode.errors import InputError, require

ARRAY_NAMES = (("x", "y"), ("inputs", "targets"))


def npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an NPZ file, none of them pickled."""
    try:
        return read_arrays(path)
    except (InputError, OSError) as error:
        raise InputError(
            f"{path} cannot be read as arrays ({error}). Save it with numpy.savez(path, x=..., y=...) from "
            "arrays of numbers."
        ) from error


def array_names(arrays: dict[str, np.ndarray], path: Path, need_target: bool) -> tuple[str, str]:
    """The names of the arrays of inputs and targets."""
    for first, second in ARRAY_NAMES:
        if first in arrays and (second in arrays or not need_target):
            return first, second
    raise InputError(
        f"{path} must hold arrays x and y, or inputs and targets; it holds "
        f"{', '.join(sorted(arrays)) or 'none'}."
    )


def npz_parts(
    path: Path, target: str | None, drop: Sequence[str]
) -> tuple[Tensor, np.ndarray, list[str], str, tuple[Tensor, np.ndarray] | None]:
    """Inputs, raw targets, column names, the target's name and, where the file has them, test arrays."""
    require(
        target is None and not drop,
        f"target={target!r} and drop={drop!r} name columns; the arrays of {path} have none. Leave them out.",
    )
    arrays = npz_arrays(path)
    first, second = array_names(arrays, path, need_target=True)
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


def npz_inputs(array: np.ndarray, name: str, path: Path) -> Tensor:
    """Inputs as floating-point numbers, checked."""
    require(array.dtype.kind in "biuf", f"{name} of {path} must be numbers, got the type {array.dtype}.")
    require(array.ndim >= 1, f"{name} of {path} is a single number; one row per example is needed.")
    require(
        array.size > 0, f"{name} of {path} is empty, its shape is {list(array.shape)}: give rows of numbers."
    )
    values = torch.from_numpy(array.astype(np.float64))
    values = values[:, None] if values.ndim == 1 else values
    _check_finite(values.flatten(1).isfinite().all(1).numpy(), name, path)
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


def _check_finite(finite: np.ndarray, name: str, path: Path) -> None:
    if not finite.all():
        raise InputError(
            f"{name} of {path} has {int((~finite).sum())} rows with NaN or infinite values, the first in row "
            f"{int(np.argmin(finite)) + 1}. Fill them in, or remove those rows."
        )
