"""Tables: files and frames with named columns, and .npz files of arrays.

A text file has a header row of column names. An .npz file holds ``x`` and ``y`` (or ``inputs`` and
``targets``), and may hold test data of its own as ``x_test`` and ``y_test`` (``inputs_test``, ...).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets.arrays import npz_parts
from polymode.application.datasets.frames import as_frame, is_frame, read_frame
from polymode.application.datasets.new_rows import existing_table
from polymode.application.datasets.targets import (
    SCALES,
    TASK_KINDS,
    check_numbers,
    classes_of,
    is_classification,
    kind_of_task,
    meaning_of_targets,
    plain_values,
    targets_of,
)
from polymode.data.division import divided, group_numbers, with_held_out
from polymode.data.encoding import (
    Column,
    DateColumn,
    LeftOut,
    NumberColumn,
    as_dates,
    as_numbers,
    as_texts,
    encoded,
    laid_out,
    pandas,
    unreadable_cells,
)
from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, mean_and_scale, num_outputs_for, standardised
from polymode.errors import require, require_whole, unknown_name
from polymode.likelihoods import (
    Likelihood,
    make_likelihood,
)

# Tables with fewer rows are divided several times: the test rows of one division say too little.
SMALL_TABLE, SMALL_SPLITS = 2000, 3
# The network, and what a method may spend: enough for some thousand steps of five networks.
HIDDEN = (64, 64)
STEPS, LEAST_BUDGET, MOST_BUDGET = 4000, 100, 300
# Inputs beyond so many robust deviations are pressed together.
BOUND = 3.0

Rows = tuple[Tensor, Tensor]


def table(
    source: Any,
    target: str | None = None,
    task: str | None = None,
    test_share: float = 0.2,
    num_validation: int = 0,
    splits: int | None = 1,
    batch_size: int | None = None,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    sheet: str | int = 0,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    group: str | None = None,
    order: str | None = None,
    scale: str = "auto",
    likelihood: str | Likelihood | None = None,
) -> Task:
    """A task from a table: a path, or a data frame of pandas or polars.

    target: the column to predict, the last one where not given. task: "classification" or "regression"; where
    not given, the likelihood says it, and without one text, truth values and integers of at most 20 values
    are classes, other numbers are regressed. likelihood: what the target means (default: "categorical", or
    what suits the numbers). splits: so many random splits, each with ``test_share`` of the rows as test data;
    None means 3 for tables of fewer than 2,000 rows, else 1. num_validation: rows held out of the training
    rows. drop: columns to leave out. categories: columns of numbers that are names, such as postal codes.
    group: a column whose rows stay together. order: a column by which rows are put in order, of which the
    last are tested on. scale: of the target, "linear", "log" or "auto". separator, decimal, encoding, sheet:
    of a file, seen in it unless given. Rows that are wholly empty, or without a target, are skipped.
    """
    require(
        task is None or task in TASK_KINDS, f"task={task!r}: allowed are {', '.join(map(repr, TASK_KINDS))}."
    )
    require(scale in SCALES, f"scale={scale!r}: allowed are {', '.join(map(repr, SCALES))}.")
    task = kind_of_task(task, likelihood)
    if splits is not None:
        require_whole("splits", splits)
    if not is_frame(source) and existing_table(source).suffix.lower() == ".npz":
        return _from_arrays(
            Path(source), target, task, test_share, num_validation, splits, batch_size, drop, likelihood
        )
    if is_frame(source):
        frame, name, what = as_frame(source), "table", "The table"
    else:
        frame = read_frame(existing_table(source), separator, decimal, encoding, sheet)
        name, what = Path(source).stem, str(source)
    plan = _planned(frame, what, target, drop, categories, group, order)
    if decimal is not None and not is_frame(source):  # what was said of this file holds for new ones
        said = [replace(c, decimal=decimal) if isinstance(c, NumberColumn) else c for c in plan.columns]
        plan = replace(plan, columns=tuple(said))
    remarks = list(plan.remarks)
    about_target = f"The target {plan.target!r} of {what}"
    raw = plain_values(plan.frame[plan.target], task)
    classes = classes_of(raw, about_target) if is_classification(raw, task, about_target) else ()
    targets = targets_of(raw, classes, about_target)
    count = len(targets)
    number = splits or (SMALL_SPLITS if count < SMALL_TABLE and order is None else 1)
    require(
        order is None or number == 1,
        f"order={order!r} has one split, the last rows: leave splits={splits} out.",
    )
    num_test = share_of(count, test_share, what)
    divisions = []
    for seed in range(number):
        generator = torch.Generator().manual_seed(seed)
        train, test = divided(
            count,
            num_test,
            generator,
            labels=targets if classes else None,
            groups=plan.groups,
            ordered=order is not None,
        )
        divisions.append((train, test))
    made, others = meaning_of_targets(likelihood, classes, targets, targets[divisions[0][0]], scale)
    if made.reads == "numbers":
        check_numbers(targets, made, about_target)
    found = []
    for train, test in divisions:
        columns = tuple(column.fitted(plan.frame[column.name].iloc[train.numpy()]) for column in plan.columns)
        split = encoded_split(
            plan.frame, columns, plan.target, targets, classes, train, test, made, batch_size
        )
        groups = None if plan.groups is None else plan.groups[train]
        split = replace(split, groups=groups, ordered=plan.ordered)
        found.append(_with_own_validation(split, num_validation, bool(classes), len(found)))
    return Task(
        name,
        found,
        likelihood=made if scale == "log" else likelihood or made,
        num_outputs=len(made.class_names(len(classes))) or num_outputs_for(made, found[0].train),
        likelihoods=others,
        remarks=remarks,
        **recipe(found[0].train.num_examples),
    )


def recipe(num_rows: int) -> dict[str, Any]:
    """The network, the training and the budget that suit a table, found as docs/results.md says."""
    steps = -(-num_rows // batch_size_for(num_rows))
    return {
        "model": "mlp",
        "model_options": {"hidden": list(HIDDEN)},
        "training": {
            "optimizer": {"kind": "AdamW", "lr": 5e-3, "decay_all": False, "weight_decay": 0.01},
            "schedule": {"type": "Cosine", "final": 0.05},
        },
        "budget": float(min(MOST_BUDGET, max(LEAST_BUDGET, round(STEPS / steps)))),
    }


@dataclass(frozen=True)
class _Plan:
    """A table read: its rows with a target, in their order, and what every other column becomes."""

    frame: Any
    target: str
    columns: tuple[Column, ...]
    groups: Tensor | None
    ordered: bool
    remarks: tuple[str, ...]


def _planned(
    frame: Any,
    what: str,
    target: str | None,
    drop: Sequence[str],
    categories: Sequence[str],
    group: str | None,
    order: str | None,
) -> _Plan:
    names = [str(name) for name in frame.columns]
    drop, categories = ([each] if isinstance(each, str) else list(each) for each in (drop, categories))
    drop, categories = list(map(str, drop)), list(map(str, categories))
    target, group, order = (None if name is None else str(name) for name in (target, group, order))
    for kind, some in (
        ("column to drop", drop),
        ("category", categories),
        ("group", [group]),
        ("order", [order]),
    ):
        for name in some:
            if name is not None and name not in names:
                raise unknown_name(f"{kind} of {what}", str(name), names)
    kept = [name for name in names if name not in drop]
    target = kept[-1] if target is None and kept else target
    if target not in kept:
        raise unknown_name(f"target column of {what}", str(target), kept)
    remarks = []
    gaps = frame[target].isna().to_numpy()
    if frame[target].dtype == object or pandas().api.types.is_string_dtype(frame[target].dtype):
        gaps = as_texts(frame[target])[1]
    if gaps.any():
        remarks.append(f"{_rows(int(gaps.sum()))} without {target!r} left out")
        frame = frame[~gaps]
    require(len(frame) > 0, f"No row of {what} has a {target!r}.")
    if order is not None:
        require(order != target, f"order={order!r} is the target.")
        require(
            group is None,
            f"group={group!r} and order={order!r}: the last rows cannot be whole groups. Give one.",
        )
        dated = _in_order(frame, order, what)
        if len(dated) < len(frame):
            remarks.append(f"{_rows(len(frame) - len(dated))} without {order!r} left out")
        frame = dated
    groups = None
    if group is not None:
        require(group != target, f"group={group!r} is the target.")
        groups = group_numbers(as_texts(frame[group])[0].tolist())
    others = [name for name in kept if name not in (target, group)]
    columns = tuple(laid_out(frame[name], name, as_category=name in categories) for name in others)
    remarks += unreadable_cells(columns, frame)  # before dates are read, after which they are gaps
    dates = [column for column in columns if isinstance(column, DateColumn)]  # they take long: read once
    frame = frame.assign(**{each.name: as_dates(frame[each.name], each.day_first) for each in dates})
    if group is not None:
        columns = (*columns, LeftOut(group, "groups the rows"))
    for column in columns:
        if isinstance(column, LeftOut) and column.why.startswith("identifier") and column.name in categories:
            remarks.append(f"{column.name!r} is {column.why}")
    require(
        any(column.features for column in columns),
        f"{what} has no column to predict {target!r} from: "
        + (
            ", ".join(f"{c.name!r} is left out ({c.why})" for c in columns if isinstance(c, LeftOut))
            or "no other"
        )
        + ".",
    )
    if order is not None:
        remarks.append(f"rows in the order of {order!r}, the last ones to test on")
    if group is not None:
        remarks.append(f"rows of one {group!r} stay together")
    return _Plan(frame, target, columns, groups, order is not None, tuple(remarks))


def _in_order(frame: Any, order: str, what: str) -> Any:
    """The rows by a column of numbers or dates, those without one left out."""
    column = laid_out(frame[order], order)
    if column.kind == "date":
        keys = as_dates(frame[order], getattr(column, "day_first", False))
    else:
        keys = pandas().Series(as_numbers(frame[order], order), index=frame.index)
    keys = keys.dropna().sort_values(kind="stable")
    require(
        len(keys) > 0 and column.kind in ("date", "number", "left out"),
        f"order={order!r} of {what} must be a column of dates or numbers, it is of kind {column.kind!r}.",
    )
    return frame.loc[keys.index]


def encoded_split(
    frame: Any,
    columns: tuple[Column, ...],
    target: str,
    targets: Tensor,
    classes: Sequence[str],
    train: Tensor,
    test: Tensor,
    likelihood: Likelihood,
    batch_size: int | None,
) -> Split:
    """Rows of a frame to train and to test on, as fitted columns encode them; targets: of all rows."""
    raw = torch.from_numpy(encoded(columns, frame))
    is_scaled = torch.tensor([each for column in columns for each in column.is_scaled])
    shift, spread = _robust(raw[train], is_scaled)
    ready = Preprocessing(
        source="table",
        input_shift=tuple(shift.tolist()),
        input_scale=tuple(spread.tolist()),
        columns=tuple(column.name for column in columns if column.features),
        target=target,
        classes=tuple(classes),
        encoding=columns,
        bound=BOUND,
    )
    if not classes:
        ready = _with_target_scale(ready, targets[train], likelihood)
    size = batch_size or batch_size_for(len(train))

    def data(rows: Tensor) -> ArrayData:
        some = targets[rows] if classes else ready.targets(targets[rows]).float()
        return ArrayData(ready.inputs(raw[rows]), some, batch_size=size)

    return Split(data(train), data(test), None, ready)


def batch_size_for(num_rows: int) -> int:
    """Rows of a minibatch: about eight steps an epoch, of 32 to 256 rows."""
    return int(min(256, max(32, 2 ** round(math.log2(max(1, num_rows / 8))))))


def _robust(raw: Tensor, is_scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Median and robust deviation of numbers, 0 and 1 of what is a mark already; a constant has scale 0."""
    mean, std = mean_and_scale(raw, [0])
    low, middle, high = mean.clone(), mean.clone(), mean.clone()
    for place in is_scaled.nonzero().flatten().tolist():  # marks are many, and have no use for quartiles
        quartiles = np.quantile(raw[:, place].numpy(), [0.25, 0.5, 0.75])
        low[place], middle[place], high[place] = map(float, quartiles)
    # 1.349 is the distance of a Gaussian's quartiles. Where half of the rows have one value, it is 0.
    robust = (high - low) / 1.349
    spread = torch.where(robust > 0.01 * std, robust, std)
    shift = torch.where(robust > 0.01 * std, middle, mean)
    one = torch.ones_like(std)
    return torch.where(is_scaled, shift, 0.0), torch.where(is_scaled, spread, torch.where(std > 0, one, 0.0))


def _with_own_validation(split: Split, num_validation: int, is_labels: bool, number: int) -> Split:
    if not require_whole("num_validation", num_validation, 0):
        return split
    require(
        num_validation < split.train.num_examples,
        f"num_validation={num_validation} leaves nothing of {split.train.num_examples} rows to train on.",
    )
    return with_held_out(split, num_validation, is_labels, torch.Generator().manual_seed(number))


def _with_target_scale(
    ready: Preprocessing, train: Tensor, likelihood: Likelihood, added: float = 0.0
) -> Preprocessing:
    """The preparation with the scale of a regression's targets, from its training rows."""
    mean, std = (value.item() for value in mean_and_scale(train, [0], added))
    require(
        std > 0,
        f"The target{f' {ready.target!r}' if ready.target else ''} is constant ({mean:.6g}) in the "
        f"{len(train)} training rows; there is nothing to learn. Give more rows, or other splits.",
    )
    positive = bool((train > 0).all())
    geometric = math.exp(train.double().log().mean().item()) if positive else math.nan
    shift, scale = likelihood.target_scaling(mean, std, geometric)
    return replace(ready, target_shift=shift, target_scale=scale)


def _from_arrays(
    path: Path,
    target: str | None,
    task: str | None,
    test_share: float,
    num_validation: int,
    splits: int | None,
    batch_size: int | None,
    drop: Sequence[str],
    likelihood: str | Likelihood | None,
) -> Task:
    inputs, raw, columns, name, own_test = npz_parts(path, target, drop)
    what = f"The target {name!r} of {path}"
    labels = raw if own_test is None else np.concatenate([raw, own_test[1]])
    classes = classes_of(labels, what) if is_classification(labels, task, what) else ()
    everything = (inputs, targets_of(raw, classes, what))
    made = make_likelihood(likelihood or ("categorical" if classes else "gaussian"))
    if made.reads == "numbers":
        check_numbers(everything[1], made, what)
    options: dict[str, Any] = {
        "batch_size": batch_size or 50,
        "columns": columns,
        "target": name,
        "classes": classes,
        "likelihood": made,
    }
    if own_test is not None:
        require(
            splits in (None, 1), f"{path} has test data of its own, so that splits={splits} is not possible."
        )
        test = (own_test[0], targets_of(own_test[1], classes, what))
        rows, validation, _ = shuffled_parts(len(inputs), 0, num_validation, seed=0)
        found = [table_split(_take(everything, rows), test, _maybe(everything, validation), **options)]
    else:
        num_test = share_of(len(inputs), test_share, str(path))
        found = [
            _random_split(everything, num_test, num_validation, seed, options) for seed in range(splits or 1)
        ]
    return Task(
        path.stem,
        found,
        likelihood=likelihood or made.kind,
        num_outputs=len(made.class_names(len(classes))) or num_outputs_for(made, found[0].train),
        model="smallcnn" if inputs.ndim == 4 else "mlp",
    )


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
    ready = Preprocessing(
        source="table",
        input_shift=shift,
        input_scale=scale,
        columns=tuple(columns),
        target=target,
        classes=tuple(classes),
    )
    if not classes:
        ready = _with_target_scale(ready, train[1], make_likelihood(likelihood), added)

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


def _rows(number: int) -> str:
    return f"{number} row{'s'[: number != 1]}"
