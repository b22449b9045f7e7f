"""Tables of numbers: .csv, .tsv and .parquet files with named columns, and .npz files of arrays.

A text file has a header row of column names. An .npz file holds ``x`` and ``y`` (or ``inputs`` and
``targets``), and may hold test data of its own as ``x_test`` and ``y_test`` (``inputs_test``, ...).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets.arrays import array_names, npz_arrays, npz_inputs, npz_parts, npz_targets
from polymode.application.datasets.columns import (
    SEPARATORS,
    check_no_gaps,
    columns_to_read,
    features,
    frame_parts,
    is_number,
    kept_columns,
    plain_column,
    read_frame,
)
from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, mean_and_scale, num_outputs_for, standardised
from polymode.errors import InputError, require, require_whole, unknown_name
from polymode.likelihoods import Likelihood, make_likelihood

SUFFIXES = (*SEPARATORS, ".parquet", ".npz")
TASK_KINDS = ("classification", "regression")
ROW = "row"  # what the numbers of rows are called
# Integers with more values than this are quantities, not labels, unless the user says otherwise.
MOST_INTEGER_CLASSES = 20

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
    likelihood: str | Likelihood | None = None,
) -> Task:
    """A task from a table; features, and the target of a regression, are standardised on training rows.

    target: the column to predict, the last one where not given. task: "classification" or "regression"; where
    not given, the likelihood says it, and without one text, truth values and integers of at most 20 values
    are classes, other numbers are regressed. likelihood: what the target means (default: "categorical" or
    "gaussian"); targets are standardised as far as it allows, counts are not. splits: so many random splits,
    each with ``test_share`` of the rows as test data. drop: columns to leave out. Rows that are wholly empty
    are skipped.
    """
    path = _existing(path)
    require(
        task is None or task in TASK_KINDS, f"task={task!r}: allowed are {', '.join(map(repr, TASK_KINDS))}."
    )
    task = _kind_of_task(task, likelihood)
    require_whole("splits", splits)
    if path.suffix.lower() == ".npz":
        inputs, raw, columns, name, own_test = npz_parts(path, target, drop)
    else:
        inputs, raw, columns, name = frame_parts(path, target, separator, drop)
        own_test = None
    what = f"The target {name!r} of {path}"
    labels = raw if own_test is None else np.concatenate([raw, own_test[1]])
    classes = _classes_of(labels, what) if _is_classification(labels, task, what) else ()
    everything = (inputs, _targets(raw, classes, what))
    made = make_likelihood(likelihood or ("categorical" if classes else "gaussian"))
    if made.reads == "numbers":
        _check_numbers(everything[1], made, what)
    options = {
        "batch_size": batch_size,
        "columns": columns,
        "target": name,
        "classes": classes,
        "likelihood": made,
    }
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
        likelihood=likelihood or made.kind,
        num_outputs=len(made.class_names(len(classes))) or num_outputs_for(made, found[0].train),
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
    return _read(path, preprocessing, need_target, separator)[:2]


def read_rows(
    path: Path | str, preprocessing: Preprocessing, keep: Sequence[str] = (), separator: str | None = None
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Inputs of a new table, with what tells its rows: their numbers, and the columns to keep.

    Rows are counted from 1, the first below the column names; empty ones count, too.
    """
    inputs, _, about = _read(path, preprocessing, False, separator, keep)
    return inputs, about


def _read(
    path: Path | str,
    preprocessing: Preprocessing,
    need_target: bool,
    separator: str | None,
    keep: Sequence[str] = (),
) -> tuple[Tensor, Tensor | None, dict[str, np.ndarray]]:
    path = _existing(path)
    if path.suffix.lower() == ".npz":
        arrays = npz_arrays(path)
        first, second = array_names(arrays, path, need_target)
        inputs = npz_inputs(arrays[first], first, path)
        raw = npz_targets(arrays[second], second, path) if need_target else None
        name = second
        require(not keep, f"The arrays of {path} have no columns to keep ({', '.join(keep)}).")
        about = {ROW: np.arange(1, len(inputs) + 1)}
    else:
        frame = read_frame(path, separator)
        # A run that knows no names has its target in the last column, as a table has that is trained on.
        name = preprocessing.target or (str(frame.columns[-1]) if need_target else "")
        columns = columns_to_read(frame, preprocessing, path, {name, *keep})
        wanted = [*columns, name] if need_target else columns
        if need_target and name not in frame.columns:
            raise unknown_name(f"target column of {path}", name, map(str, frame.columns))
        check_no_gaps(frame[wanted], path)
        inputs = features(frame, columns, path)
        raw = plain_column(frame[name]) if need_target else None
        about = {ROW: frame.index.to_numpy() + 1} | kept_columns(frame, keep, path, separator)
    inputs = preprocessing.inputs(inputs).float()
    if raw is None:
        return inputs, None, about
    targets = _targets(raw, preprocessing.classes, f"The target {name!r} of {path}")
    return inputs, targets if preprocessing.classes else preprocessing.targets(targets).float(), about


def table_split(
    train: Rows,
    test: Rows,
    validation: Rows | None = None,
    *,
    batch_size: int,
    columns: Sequence[str] = (),
    target: str = "",
    classes: Sequence[str] = (),
    added: float = 0.0,
    likelihood: str | Likelihood = "gaussian",
) -> Split:
    """A split standardised with the statistics of its training rows; without classes the targets too.

    added: what a published protocol adds to every standard deviation. likelihood: says how far targets that
    are no classes may be standardised.
    """
    others = [test[0]] if validation is None else [test[0], validation[0]]
    inputs, shift, scale = standardised(train[0], *others, per_channel=train[0].ndim > 2, added=added)
    target_shift, target_scale = 0.0, 1.0
    if not classes:
        mean, std = (value.item() for value in mean_and_scale(train[1], [0], added))
        require(
            std > 0,
            f"The target{f' {target!r}' if target else ''} is constant ({mean:.6g}) in the "
            f"{len(train[1])} training rows; there is nothing to learn. Give more rows, or other splits.",
        )
        target_shift, target_scale = make_likelihood(likelihood).target_scaling(mean, std)
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
    require_whole("num_validation", num_validation, 0)
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


def _kind_of_task(task: str | None, likelihood: str | Likelihood | None) -> str | None:
    """The kind of task that was asked for, by its name or by a likelihood; None where neither was."""
    if likelihood is None:
        return task
    made = make_likelihood(likelihood)
    meant = {"labels": "classification", "numbers": "regression"}[made.reads]
    require(
        task is None or task == meant,
        f"task={task!r}, but the likelihood {made.kind!r} is of a {meant}: leave one of them out.",
    )
    return meant


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


def _check_numbers(targets: Tensor, likelihood: Likelihood, what: str) -> None:
    """Raise for numbers that a likelihood cannot have, before rows are drawn for splits."""
    try:
        likelihood.check_targets(targets, None)
    except InputError as error:
        raise InputError(f"{what}: {error} Positions are rows, counted from 0.") from error


def _targets(raw: np.ndarray, classes: Sequence[str], what: str) -> Tensor:
    if not classes:
        if raw.dtype.kind not in "biuf":
            row = next((i for i, value in enumerate(raw) if not is_number(str(value))), 0)
            raise InputError(
                f"{what} is not numeric ({str(raw[row])!r} in row {row + 1}); a regression needs numbers. "
                "Set task='classification', or choose another target."
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
