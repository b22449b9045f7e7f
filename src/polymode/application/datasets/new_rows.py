"""New rows of a table, prepared as those that a network was trained on."""

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets import frames
from polymode.application.datasets.arrays import array_names, npz_inputs, npz_rows, npz_targets, npz_whole
from polymode.application.datasets.frames import (
    CELLS,
    ROWS,
    as_frame,
    frames_of,
    is_frame,
    is_nameless,
    kept_columns,
    may_hold_decimal_commas,
)
from polymode.application.datasets.targets import plain_values, targets_of
from polymode.data.encoding import (
    CategoryColumn,
    Column,
    DateColumn,
    NumberColumn,
    UnreadableCells,
    as_dates,
    as_numbers,
    as_texts,
    decimal_of,
    encoded,
    pandas,
    plain_text,
)
from polymode.data.task import Preprocessing
from polymode.errors import InputError, require, shortened

SUFFIXES = (*frames.SUFFIXES, ".npz")
ROW = "row"  # what the numbers of rows are called
UNLIKE = "unlike"  # the columns of a row whose values no training row has
_INFINITE = re.compile(r"(?i)[+-]?inf(inity)?")  # among numbers pandas takes it for one

Rows = tuple[Tensor, dict[str, np.ndarray]]  # inputs, and what tells rows apart


def read_table(
    source: Any,
    preprocessing: Preprocessing,
    need_target: bool = False,
    separator: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Inputs (and targets, where needed) of a new table, prepared as those that a network was trained on.

    Columns are found by their names, in any order; others are ignored.
    """
    path = Path("the table") if is_frame(source) else existing_table(source)
    if path.suffix.lower() == ".npz":
        return _whole_arrays(path, preprocessing, need_target)
    # A run that knows no names has its target in the last column, as a table has that is trained on.
    name = preprocessing.target
    table = _NewTable(path, preprocessing, {name}, need_target=need_target)
    [(frame, _)] = _frames(source, table, None, separator)
    name = name or (str(frame.columns[-1]) if need_target else "")
    if need_target and name not in frame.columns:
        raise InputError(
            f"{path} has no column {name!r}, the target, which scores are about; it has "
            f"{shortened(', '.join(map(str, frame.columns)))}. polymode predict needs none."
        )
    if need_target:
        gaps = as_texts(frame[name])[1]
        require(not gaps.all(), f"No row of {path} has a {name!r}.")
        frame = frame[~gaps]
    inputs, _ = table.rows(frame)
    table.say()
    if not need_target:
        return inputs, None
    raw = plain_values(frame[name], "classification" if preprocessing.classes else "regression")
    targets = targets_of(raw, preprocessing.classes, f"The target {name!r} of {path}")
    return inputs, targets if preprocessing.classes else preprocessing.targets(targets).float()


def read_rows(
    source: Any,
    preprocessing: Preprocessing,
    keep: Sequence[str] = (),
    separator: str | None = None,
    rows: int | None = None,
) -> Iterator[Rows]:
    """Inputs of a new table, some rows at a time, with their numbers, and the columns to keep.

    Rows are counted from 1, the first below the column names; empty ones count, too. What a row becomes does
    not depend on the others. rows: how many at a time, unless they are to fit into bounded memory.
    """
    path = Path("the table") if is_frame(source) else existing_table(source)
    if path.suffix.lower() == ".npz":
        yield from _array_rows(path, preprocessing, keep, rows)
        return
    table = _NewTable(path, preprocessing, {preprocessing.target, *keep})
    if rows is None:
        widths = [len(preprocessing.columns or preprocessing.features), frames.width_of(source, separator)]
        rows = max(1, min(ROWS, CELLS // max(1, *widths)))
    last: list[Rows] = []
    for frame, kept in _frames(source, table, rows, separator, keep):
        yield from last
        inputs, about = table.rows(frame)
        last = [(inputs, {ROW: about.pop(ROW)} | kept | about)]
    table.say()  # before the last rows: of a short table nothing is seen if all of it is wrong
    yield from last


def _frames(
    source: Any, table: "_NewTable", rows: int | None, separator: str | None, keep: Sequence[str] = ()
) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    if is_frame(source):
        frame = as_frame(source)
        return iter([(frame, kept_columns(frame, keep, table.path))])
    return frames_of(table.path, rows, separator, table.texts(separator, rows), keep)


class _NewTable:
    """What the frames that a table comes in have in common: its columns, and what was seen of them."""

    def __init__(
        self, path: Path, preprocessing: Preprocessing, others: set[str], *, need_target: bool = False
    ) -> None:
        """others: columns that are no inputs, where a network knows no names."""
        self.path, self.preprocessing, self.others = path, preprocessing, others
        self.need_target = need_target
        self.columns = [column for column in preprocessing.encoding if column.features]
        self.unreadable = UnreadableCells(self.columns)
        self._names: list[str] = []  # of inputs that have no encoding
        self._decimals: dict[str, str] = {}  # of those that are text
        self._dates: dict[str, str] = {}  # the first of a column, which tells how the others are written

    def texts(self, separator: str | None, rows: int | None = None) -> list[str]:
        """The columns whose cells are to be read as they are written."""
        if self.preprocessing.encoding:
            return [column.name for column in self.columns if column.reads_text]
        if rows is None:  # what is read at once is seen at once
            return []
        is_text = self.path.suffix.lower() in frames.SEPARATORS
        if is_text and not may_hold_decimal_commas(self.path, separator):
            return []
        self._decimals = self._seen_decimals(separator, rows)
        return [name for name, decimal in self._decimals.items() if decimal == ","]

    def _seen_decimals(self, separator: str | None, rows: int) -> dict[str, str]:
        """What stands before decimals in all rows: 1,234 is one number in all frames."""
        found: dict[str, str] = {}
        for frame, _ in frames_of(self.path, rows, separator):
            for name in frame.columns:
                if found.get(name) != "," and _is_text(frame[name]):
                    texts, gaps = as_texts(frame[name])
                    found[name] = decimal_of(pandas().unique(texts[~gaps]).tolist())
        return found

    def rows(self, frame: Any) -> Rows:
        """The inputs of a frame, with the numbers of its rows and what is strange about them."""
        about: dict[str, np.ndarray] = {ROW: frame.index.to_numpy() + 1}
        self._check_names(frame)
        if self.columns:
            frame = frame.assign(
                **{each.name: self._settled(frame[each.name], each) for each in self.columns}
            )
            self.unreadable.add(frame)
            raw = encoded(self.columns, frame)
            about |= {UNLIKE: _strange_columns(frame, self.columns)}
        else:
            numbers = [self._numbers_without_gaps(frame[name], name) for name in self._names]
            raw = np.stack(numbers, 1)
        return self.preprocessing.inputs(torch.from_numpy(raw)).float(), about

    def say(self) -> None:
        """Warn of what was seen in all rows."""
        for remark in self.unreadable.remarks():
            warnings.warn(f"{self.path}: {remark}.", stacklevel=4)

    def _check_names(self, frame: Any) -> None:
        names = [str(name) for name in frame.columns]
        if self.preprocessing.columns or self.preprocessing.encoding:
            found = [column.name for column in self.columns] or list(self.preprocessing.columns)
            missing = [name for name in found if name not in names]
            require(
                not missing,
                f"{self.path} lacks {len(missing)} of the columns that the network was trained on: "
                f"{', '.join(missing)}. It has {', '.join(names)}.",
            )
            self._names = found
            return
        target = {names[-1]} if self.need_target and not self.preprocessing.target else set()
        # Separators at the ends of lines make a column that is empty and has no name.
        found = [
            name
            for name in names
            if name not in self.others | target and not (is_nameless(name) and frame[name].isna().all())
        ]
        if not self._names:
            self._names = found
            warnings.warn(
                f"The network was trained on data without names of columns: those of {self.path} are taken "
                f"in their order ({shortened(', '.join(found))}).",
                stacklevel=5,
            )
        for name in found:
            if name not in self._names:
                raise InputError(f"The column {name!r} of {self.path} is empty in some rows. Give it a name.")

    def _settled(self, values: Any, column: Column) -> Any:
        """Cells so that what each becomes depends on no other one."""
        if isinstance(column, DateColumn):
            return self._as_dates(values, column)
        if isinstance(column, NumberColumn):
            if self.path.suffix.lower() in frames.SEPARATORS and values.dtype == bool:
                return values.astype(str).astype(object)  # beside a number it would be text
            if _is_text(values):
                _refuse_infinite(values, column.name)
            return values
        return _as_known(values, column) if _is_text(values) else values

    def _as_dates(self, values: Any, column: DateColumn) -> Any:
        """Dates in the way that the first of the table is written in, if they can be read in it."""
        if pandas().api.types.is_datetime64_any_dtype(values.dtype):
            return values
        texts, gaps = as_texts(values)
        if gaps.all():
            return values
        first = self._dates.setdefault(column.name, texts[~gaps][0])
        written = pandas().Series([first, *texts], dtype=object).mask([False, *gaps])
        dates = as_dates(written, column.day_first).iloc[1:].set_axis(values.index)
        unreadable = dates.isna().to_numpy() & ~gaps
        return dates.astype(object).where(~unreadable, texts) if unreadable.any() else dates

    def _numbers_without_gaps(self, values: Any, name: str) -> np.ndarray:
        """A column for a network that was trained on plain numbers and knows no gaps."""
        numbers = as_numbers(values, name, self._decimals.get(name))
        gaps = np.isnan(numbers)
        if gaps.any():
            place = int(gaps.argmax())
            raise InputError(
                f"The column {name!r} of {self.path} has values that are missing or no numbers, the first in "
                f"row {int(values.index[place]) + 1} ({str(values.iloc[place])!r}). Fill them in, or remove "
                "those rows."
            )
        return numbers


def _is_text(values: Any) -> bool:
    return values.dtype == object or pandas().api.types.is_string_dtype(values.dtype)


def _as_known(values: Any, column: Column) -> Any:
    """Text in the form that training rows had it in, where it is a number: 3 for 3.0, unless 3.0 was one."""
    known = set(column.values) if isinstance(column, CategoryColumn) else set()
    texts, gaps = as_texts(values)
    codes, distinct = pandas().factorize(texts)
    forms = [text if text in known else plain_text(text) for text in distinct]
    settled = np.array([*forms, None], dtype=object)[np.where(gaps, len(forms), codes)]
    return pandas().Series(settled, index=values.index, dtype=object)


def _refuse_infinite(values: Any, name: str) -> None:
    texts = as_texts(values)[0]
    found = [text for text in pandas().unique(texts) if _INFINITE.fullmatch(text)]
    if found:
        place = int(np.isin(texts, found).argmax())
        raise InputError(
            f"The column {name!r} holds an infinite value in row {int(values.index[place]) + 1}. Replace it, "
            "or remove the row."
        )


def _strange_columns(frame: Any, columns: Sequence[Column]) -> np.ndarray:
    """For every row the columns whose values are unlike those of training rows, with semicolons."""
    found = np.full(len(frame), "", dtype=object)
    for column in columns:
        places = np.flatnonzero(column.strange(frame[column.name]))
        if len(places):
            before = found[places]
            found[places] = before + np.where(before == "", "", "; ").astype(object) + column.name
    return found.astype(str)


def _whole_arrays(
    path: Path, preprocessing: Preprocessing, need_target: bool
) -> tuple[Tensor, Tensor | None]:
    names = array_names(path, need_target)
    _check_arrays(path, preprocessing)
    inputs = preprocessing.inputs(npz_inputs(npz_whole(path, names[0]), names[0], path)).float()
    if not need_target:
        return inputs, None
    targets = targets_of(
        npz_targets(npz_whole(path, names[1]), names[1], path),
        preprocessing.classes,
        f"The target {names[1]!r} of {path}",
    )
    return inputs, targets if preprocessing.classes else preprocessing.targets(targets).float()


def _array_rows(
    path: Path, preprocessing: Preprocessing, keep: Sequence[str], rows: int | None
) -> Iterator[Rows]:
    name, _ = array_names(path, need_target=False)
    _check_arrays(path, preprocessing)
    require(not keep, f"The arrays of {path} have no columns to keep ({', '.join(keep)}).")
    first = 0
    for part in npz_rows(path, name, rows, most_rows=ROWS, most_numbers=CELLS):
        inputs = preprocessing.inputs(npz_inputs(part, name, path, first)).float()
        yield inputs, {ROW: np.arange(first + 1, first + len(part) + 1)}
        first += len(part)


def _check_arrays(path: Path, preprocessing: Preprocessing) -> None:
    require(not preprocessing.encoding, f"The network was trained on a table with names; {path} has arrays.")


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
