"""Tables of numbers: .csv, .tsv and .parquet files with named columns, and .npz files of arrays.

A text file has a header row of column names. An .npz file holds ``x`` and ``y`` (or ``inputs`` and
``targets``), and may hold test data of its own as ``x_test`` and ``y_test`` (``inputs_test``, ...).
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, standardised
from polymode.errors import InputError, require, unknown_name

SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".parquet", ".npz")
KINDS = ("classification", "regression")
# Integers with more values than this are quantities, not labels, unless the user says otherwise.
MOST_INTEGER_CLASSES = 20
ARRAY_NAMES = (("x", "y"), ("inputs", "targets"))

Rows = tuple[Tensor, Tensor]


def table(
    path: Path | str,
    target: str | None = None,
    task: str | None = None,
    test_share: float = 0.2,
    num_validation: int = 0,
    splits: int = 1,
    batch_size: int = 50,
    separator: str | None = None,
    drop: Sequence[str] = (),
) -> Task:
    """A task from a table; features, and the target of a regression, are standardised on training rows.

    target: the column to predict, the last one where not given. task: "classification" or "regression"; where
    not given, text, truth values and integers of at most 20 values are classes, other numbers are regressed.
    splits: so many random splits, each with ``test_share`` of the rows as test data. drop: columns to leave
    out. Rows that are wholly empty are skipped.
    """
    path = _existing(path)
    require(task is None or task in KINDS, f"task={task!r}: allowed are {', '.join(map(repr, KINDS))}.")
    require(isinstance(splits, int) and splits >= 1, f"splits must be a whole number from 1, got {splits!r}.")
    if path.suffix.lower() == ".npz":
        inputs, raw, columns, name, own_test = _npz_parts(path, target, drop)
    else:
        inputs, raw, columns, name = _frame_parts(path, target, separator, drop)
        own_test = None
    what = f"The target {name!r} of {path}"
    labels = raw if own_test is None else np.concatenate([raw, own_test[1]])
    classes = _classes_of(labels, what) if _is_classification(labels, task, what) else ()
    everything = (inputs, _targets(raw, classes, what))
    options = {"batch_size": batch_size, "columns": columns, "target": name, "classes": classes}
    if own_test is not None:
        require(splits == 1, f"{path} has test data of its own, so that splits={splits} is not possible.")
        test = (own_test[0], _targets(own_test[1], classes, what))
        rows, validation, _ = shuffled_parts(len(inputs), 0, num_validation, seed=0)
        found = [table_split(_take(everything, rows), test, _maybe(everything, validation), **options)]
    else:
        num_test = share_of(len(inputs), test_share, str(path))
        found = [_random_split(everything, num_test, num_validation, seed, options) for seed in range(splits)]
    return Task(
        path.stem,
        found,
        likelihood="categorical" if classes else "gaussian",
        num_outputs=len(classes) or 1,
        model="smallcnn" if inputs.ndim == 4 else "mlp",
    )


def read_table(
    path: Path | str,
    preprocessing: Preprocessing,
    need_target: bool = False,
    separator: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Inputs (and targets, where needed) of a new table, prepared as those that a network was trained on.

    Columns are found by their names, in any order; others are ignored.
    """
    path = _existing(path)
    if path.suffix.lower() == ".npz":
        arrays = _npz_arrays(path)
        first, second = _array_names(arrays, path, need_target)
        inputs = _npz_inputs(arrays[first], first, path)
        raw = _npz_targets(arrays[second], second, path) if need_target else None
        name = second
    else:
        frame = _read_frame(path, separator)
        columns = _columns_to_read(frame, preprocessing, path)
        name = preprocessing.target
        wanted = [*columns, name] if need_target else columns
        if need_target and name not in frame.columns:
            raise unknown_name(f"target column of {path}", name, map(str, frame.columns))
        _check_no_gaps(frame[wanted], path)
        inputs = _features(frame, columns, path)
        raw = _plain(frame[name]) if need_target else None
    inputs = preprocessing.inputs(inputs).float()
    if raw is None:
        return inputs, None
    targets = _targets(raw, preprocessing.classes, f"The target {name!r} of {path}")
    return inputs, targets if preprocessing.classes else preprocessing.targets(targets).float()


def table_split(
    train: Rows,
    test: Rows,
    validation: Rows | None = None,
    *,
    batch_size: int,
    columns: Sequence[str] = (),
    target: str = "",
    classes: Sequence[str] = (),
) -> Split:
    """A split standardised with the statistics of its training rows; without classes the targets too."""
    others = [test[0]] if validation is None else [test[0], validation[0]]
    inputs, shift, scale = standardised(train[0], *others, per_channel=train[0].ndim > 2)
    target_shift, target_scale = 0.0, 1.0
    if not classes:
        target_shift = train[1].mean().item()
        # As for the inputs: a constant target divides by 1e-6, not by zero.
        target_scale = train[1].std(correction=0).item() + 1e-6
    ready = Preprocessing(
        source="table",
        input_shift=shift,
        input_scale=scale,
        target_shift=target_shift,
        target_scale=target_scale,
        columns=tuple(columns),
        target=target,
        classes=tuple(classes),
    )

    def data(part: Tensor, targets: Tensor) -> ArrayData:
        targets = targets if classes else ready.targets(targets).float()
        return ArrayData(part, targets, batch_size=batch_size)

    return Split(
        data(inputs[0], train[1]),
        data(inputs[1], test[1]),
        None if validation is None else data(inputs[2], validation[1]),
        ready,
    )


def shuffled_parts(
    num_examples: int, num_test: int, num_validation: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to train on, to validate on and to test on, in the order of a permutation fixed by the seed."""
    require(
        isinstance(num_validation, int) and num_validation >= 0,
        f"num_validation must be a whole number from 0, got {num_validation!r}.",
    )
    num_train = num_examples - num_test - num_validation
    require(
        num_train >= 1,
        f"num_validation={num_validation} and {num_test} test examples leave nothing of {num_examples} to "
        "train on.",
    )
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(seed))
    train, validation, test = order.split([num_train, num_validation, num_test])
    return train, validation, test


def share_of(num_examples: int, test_share: float, what: str) -> int:
    """The number of test examples of a share, checked to leave some on either side."""
    require(
        isinstance(test_share, int | float) and 0 < test_share < 1,
        f"test_share must lie between 0 and 1, got {test_share!r}.",
    )
    num_test = round(num_examples * test_share)
    require(
        0 < num_test < num_examples,
        f"test_share={test_share} of the {num_examples} examples of {what} gives {num_test} test examples; "
        "give more data or another share.",
    )
    return num_test


def _random_split(
    everything: Rows, num_test: int, num_validation: int, seed: int, options: dict[str, Any]
) -> Split:
    train, validation, test = shuffled_parts(len(everything[0]), num_test, num_validation, seed)
    return table_split(
        _take(everything, train), _take(everything, test), _maybe(everything, validation), **options
    )


def _take(rows: Rows, index: Tensor) -> Rows:
    return rows[0][index], rows[1][index]


def _maybe(rows: Rows, index: Tensor) -> Rows | None:
    return _take(rows, index) if len(index) else None


def _existing(path: Path | str) -> Path:
    path = Path(path)
    require(
        path.suffix.lower() in SUFFIXES,
        f"{path} is not a table: allowed endings are {', '.join(SUFFIXES)}.",
    )
    require(path.is_file(), f"There is no file {path.absolute()}. Check the path of the table.")
    return path


# Files with named columns.


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise InputError("Reading tables needs pandas: pip install 'polymode[data]'.") from None
    return pandas


def _read_frame(path: Path, separator: str | None) -> Any:
    pandas = _pandas()
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, pandas)
    separator = separator or _separator_of(path)
    try:
        # Blank lines are read and dropped, so that row numbers stay line numbers.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # fewer names than columns
            frame = pandas.read_csv(path, sep=separator, skip_blank_lines=False, index_col=False)
    except (ValueError, pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        raise InputError(
            f"{path} cannot be read as a table ({error}). Check its separator and rows."
        ) from error
    _check_header([str(name) for name in frame.columns], path, separator)
    return _with_rows(frame.dropna(how="all"), path)


def _separator_of(path: Path) -> str:
    """The usual one of the file's ending, or what its first line is split by instead."""
    usual = SEPARATORS[path.suffix.lower()]
    with path.open(errors="replace") as file:
        first = file.readline()
    others = [other for other in (";", "\t", "|", ",") if other in first]
    return usual if usual in first or not others else others[0]


def _read_parquet(path: Path, pandas: Any) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError("Reading Parquet needs pyarrow: pip install 'polymode[data]'.") from None
    try:
        frame = pandas.read_parquet(path, engine="pyarrow")
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet ({error}). Write it again.") from error
    frame.columns = frame.columns.map(str)
    return _with_rows(frame.reset_index(drop=True), path)


def _with_rows(frame: Any, path: Path) -> Any:
    require(len(frame) > 0, f"{path} has no rows below its column names.")
    return frame


def _check_header(names: list[str], path: Path, separator: str) -> None:
    if all(_is_number(name) for name in names):
        raise InputError(
            f"The first line of {path} holds numbers ({', '.join(names[:3])}); write a line of column names "
            "above it."
        )
    for other in ";\t,":
        if len(names) == 1 and other != separator and other in names[0]:
            raise InputError(
                f"{path} has one column, {names[0]!r}, when split at {separator!r}. Set separator={other!r}."
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _frame_parts(
    path: Path, target: str | None, separator: str | None, drop: Sequence[str]
) -> tuple[Tensor, np.ndarray, list[str], str]:
    frame = _read_frame(path, separator)
    names = [str(name) for name in frame.columns]
    drop = [drop] if isinstance(drop, str) else list(drop)
    for name in drop:
        if name not in names:
            raise unknown_name(f"column to drop from {path}", name, names)
    kept = [name for name in names if name not in drop]
    require(
        len(kept) >= 2, f"{path} needs a target and at least one feature; its columns are {', '.join(kept)}."
    )
    target = kept[-1] if target is None else target
    if target not in kept:
        raise unknown_name(f"target column of {path}", target, kept)
    columns = [name for name in kept if name != target]
    _check_no_gaps(frame[kept], path)
    return _features(frame, columns, path), _plain(frame[target]), columns, target


def _columns_to_read(frame: Any, preprocessing: Preprocessing, path: Path) -> list[str]:
    names = [str(name) for name in frame.columns]
    if not preprocessing.columns:  # trained on arrays: the order is all there is
        return [name for name in names if name != preprocessing.target]
    missing = [name for name in preprocessing.columns if name not in names]
    require(
        not missing,
        f"{path} lacks {len(missing)} of the columns that the network was trained on: {', '.join(missing)}. "
        f"It has {', '.join(names)}.",
    )
    return list(preprocessing.columns)


def _check_no_gaps(frame: Any, path: Path) -> None:
    for name in frame.columns:
        gaps = frame[name].isna()
        if gaps.any():
            raise InputError(
                f"The column {name!r} of {path} has {int(gaps.sum())} missing values, the first in "
                f"{_place(gaps.idxmax(), path)}. Fill them in, remove those rows, or leave the column out "
                f"with data.drop=[{name!r}]."
            )


def _place(row: int, path: Path) -> str:
    """How a reader finds the row: the header is line 1 of a text file."""
    return f"line {row + 2}" if path.suffix.lower() in SEPARATORS else f"row {row + 1}"


def _features(frame: Any, columns: Sequence[str], path: Path) -> Tensor:
    values = np.stack([_feature(frame[name], name, path) for name in columns], axis=1)
    infinite = ~np.isfinite(values)
    if infinite.any():
        row, column = np.argwhere(infinite)[0]
        raise InputError(
            f"The column {columns[column]!r} of {path} holds an infinite value in "
            f"{_place(frame.index[row], path)}. Replace it, or leave the column out with "
            f"data.drop=[{columns[column]!r}]."
        )
    return torch.from_numpy(values)


def _feature(column: Any, name: str, path: Path) -> np.ndarray:
    types = _pandas().api.types
    if types.is_bool_dtype(column.dtype) or types.is_numeric_dtype(column.dtype):
        return column.to_numpy(dtype=np.float64)
    bad = column.map(lambda value: not _is_number(str(value)))
    row = bad.idxmax() if bad.any() else column.index[0]
    raise InputError(
        f"The column {name!r} of {path} is not numeric: {str(column[row])!r} in {_place(row, path)}. Encode "
        f"it as numbers, or leave it out with data.drop=[{name!r}]."
    )


def _plain(column: Any) -> np.ndarray:
    """Values of a target column; pandas' own types of numbers become NumPy's."""
    types = _pandas().api.types
    for has_type, kind in (
        (types.is_bool_dtype, np.bool_),
        (types.is_integer_dtype, np.int64),
        (types.is_float_dtype, np.float64),
    ):
        if has_type(column.dtype):
            return column.to_numpy(dtype=kind)
    return column.to_numpy()


# Files of arrays.


def _npz_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # zip, header and pickle errors are of many classes
        raise InputError(
            f"{path} cannot be read as arrays ({error}). Save it with numpy.savez(path, x=..., y=...) from "
            "arrays of numbers."
        ) from error


def _array_names(arrays: dict[str, np.ndarray], path: Path, need_target: bool) -> tuple[str, str]:
    for first, second in ARRAY_NAMES:
        if first in arrays and (second in arrays or not need_target):
            return first, second
    raise InputError(
        f"{path} must hold arrays x and y, or inputs and targets; it holds "
        f"{', '.join(sorted(arrays)) or 'none'}."
    )


def _npz_parts(
    path: Path, target: str | None, drop: Sequence[str]
) -> tuple[Tensor, np.ndarray, list[str], str, tuple[Tensor, np.ndarray] | None]:
    require(
        target is None and not drop,
        f"target={target!r} and drop={drop!r} name columns; the arrays of {path} have none. Leave them out.",
    )
    arrays = _npz_arrays(path)
    first, second = _array_names(arrays, path, need_target=True)
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
    inputs = _npz_inputs(arrays[first], first, path)
    targets = _npz_targets(arrays[second], second, path)
    require(
        len(inputs) == len(targets) > 0,
        f"{path}: {first} has {len(inputs)} rows and {second} has {len(targets)}; they must be equal and not "
        "0.",
    )
    return inputs, targets


def _npz_inputs(array: np.ndarray, name: str, path: Path) -> Tensor:
    require(array.dtype.kind in "biuf", f"{name} of {path} must be numbers, got the type {array.dtype}.")
    require(array.ndim >= 1, f"{name} of {path} is a single number; one row per example is needed.")
    values = torch.from_numpy(array.astype(np.float64))
    values = values[:, None] if values.ndim == 1 else values
    _check_finite(values.flatten(1).isfinite().all(1).numpy(), name, path)
    return values


def _npz_targets(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    require(
        array.ndim == 1, f"{name} of {path} must be one number a row [N], got the shape {list(array.shape)}."
    )
    if array.dtype.kind == "f":
        _check_finite(np.isfinite(array), name, path)
    return array


def _check_finite(finite: np.ndarray, name: str, path: Path) -> None:
    require(
        bool(finite.all()),
        f"{name} of {path} has {int((~finite).sum())} rows with NaN or infinite values, the first in row "
        f"{int(np.argmin(finite)) + 1}. Fill them in, or remove those rows.",
    )


# Targets.


def _is_classification(raw: np.ndarray, task: str | None, what: str) -> bool:
    require(
        raw.dtype.kind in "biufUO",
        f"{what} has the type {raw.dtype}; allowed are numbers, truth values and text. Convert it.",
    )
    distinct = len(set(raw.tolist()))
    require(distinct > 1, f"{what} is constant ({raw.tolist()[0]!r}); there is nothing to learn.")
    if task is not None:
        return task == "classification"
    if raw.dtype.kind == "f":
        return False
    return raw.dtype.kind not in "iu" or distinct <= MOST_INTEGER_CLASSES


def _classes_of(raw: np.ndarray, what: str) -> tuple[str, ...]:
    values = set(raw.tolist())
    numeric = raw.dtype.kind in "biuf"
    require(
        numeric or len(values) < len(raw),
        f"{what} is text with {len(values)} different values in {len(raw)} rows, which is a name rather than "
        "a class. Choose another target.",
    )
    return tuple(_class_name(value) for value in (sorted(values) if numeric else sorted(values, key=str)))


def _class_name(value: Any) -> str:
    """The name of a class: the same for 1 and 1.0, as a column of integers may be read as either."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _targets(raw: np.ndarray, classes: Sequence[str], what: str) -> Tensor:
    if not classes:
        if raw.dtype.kind not in "biuf":
            raise InputError(
                f"{what} is not numeric ({str(raw[0])!r}); a regression needs numbers. Set "
                "task='classification', or choose another target."
            )
        values = torch.from_numpy(raw.astype(np.float64))
        require(bool(values.isfinite().all()), f"{what} holds infinite values. Remove those rows.")
        return values
    number = {name: index for index, name in enumerate(classes)}
    names = [_class_name(value) for value in raw.tolist()]
    for name in names:
        if name not in number:
            raise unknown_name(f"class in {what[0].lower() + what[1:]}:", name, classes)
    return torch.tensor([number[name] for name in names])
