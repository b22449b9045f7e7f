"""Files with named columns: CSV, TSV and Parquet, checked column by column."""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.data.task import Preprocessing
from polymode.errors import InputError, require, shortened, unknown_name

SEPARATORS = {".csv": ",", ".tsv": "\t"}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise InputError("Reading tables needs pandas: pip install 'polymode[data]'.") from None
    return pandas


def read_frame(path: Path, separator: str | None) -> Any:
    """A file as a data frame, without rows that are wholly empty."""
    pandas = _pandas()
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, pandas)
    separator = separator or _separator_of(path)
    try:
        # Blank lines are read and dropped, so that row numbers stay line numbers.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # fewer names than columns
            frame = pandas.read_csv(path, sep=separator, skip_blank_lines=False, index_col=False)
        # The frame's own names are not those of the file: a second "a" has become "a.1".
        header = pandas.read_csv(
            path, sep=separator, skip_blank_lines=False, header=None, nrows=1, dtype=str, na_filter=False
        )
    except (ValueError, pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        raise InputError(
            f"{path} cannot be read as a table ({error}). Check its separator and rows."
        ) from error
    _check_header([str(name) for name in frame.columns], path, separator)
    _check_different([name for name in header.iloc[0] if name], path)
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
    _check_different(list(frame.columns), path)
    return _with_rows(frame.reset_index(drop=True), path)


def _with_rows(frame: Any, path: Path) -> Any:
    require(len(frame) > 0, f"{path} has no rows below its column names.")
    return frame


def _check_header(names: list[str], path: Path, separator: str) -> None:
    if all(is_number(name) for name in names):
        raise InputError(
            f"The first line of {path} holds numbers ({', '.join(names[:3])}); write a line of column names "
            "above it."
        )
    for other in ";\t,":
        if len(names) == 1 and other != separator and other in names[0]:
            raise InputError(
                f"{path} has one column, {names[0]!r}, when split at {separator!r}. Set separator={other!r}."
            )


def _check_different(names: Sequence[str], path: Path) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    names_twice = ", ".join(map(repr, twice))
    require(
        not twice,
        f"{path} has more than one column named {names_twice}. Give each a name of its own, or remove it.",
    )


def is_number(text: str) -> bool:
    """Whether text can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def frame_parts(
    path: Path, target: str | None, separator: str | None, drop: Sequence[str]
) -> tuple[Tensor, np.ndarray, list[str], str]:
    """Features, raw targets, names of the features and of the target."""
    frame = read_frame(path, separator)
    names = [str(name) for name in frame.columns]
    drop = [drop] if isinstance(drop, str) else list(drop)
    for name in drop:
        if name not in names:
            raise unknown_name(f"column to drop from {path}", name, names)
    kept = [name for name in names if name not in drop]
    kept = _named(frame, kept, target, path)
    require(
        len(kept) >= 2, f"{path} needs a target and at least one feature; its columns are {', '.join(kept)}."
    )
    target = kept[-1] if target is None else target
    if target not in kept:
        raise unknown_name(f"target column of {path}", target, kept)
    columns = [name for name in kept if name != target]
    check_no_gaps(frame[kept], path)
    return features(frame, columns, path), plain_column(frame[target]), columns, target


# What a column is called that has no name, here and in files that were written with these names.
_UNNAMED = re.compile(r"Unnamed: \d+(\.\d+)*|\s*")


def _named(frame: Any, names: Sequence[str], target: str | None, path: Path) -> list[str]:
    """Those of the columns that have a name: row numbers are left out, other nameless columns refused."""
    nameless = [name for name in names if _UNNAMED.fullmatch(name) and name != target]
    for name in nameless:
        place = f"Column {list(frame.columns).index(name) + 1} of {path} has no name"
        if not _counts_rows(frame[name]):
            raise InputError(
                f'{place}. Write one into the header, or leave it out with --set "data.drop=[{name!r}]".'
            )
        warnings.warn(f"{place} and numbers the rows: it is left out.", stacklevel=4)
    return [name for name in names if name not in nameless]


def _counts_rows(column: Any) -> bool:
    types = _pandas().api.types
    if not types.is_numeric_dtype(column.dtype) or types.is_bool_dtype(column.dtype) or column.isna().any():
        return False
    values = column.to_numpy(dtype=np.float64)
    return bool((values == values.round()).all() and (np.diff(values) == 1).all())


def columns_to_read(
    frame: Any, preprocessing: Preprocessing, path: Path, others: Collection[str]
) -> list[str]:
    """The columns that a network was trained on, in its order.

    others: columns that are no inputs, where a network was trained on arrays without names.
    """
    names = [str(name) for name in frame.columns]
    if not preprocessing.columns:
        found = [name for name in names if name not in others]
        warnings.warn(
            f"The network was trained on data without names of columns: those of {path} are taken in their "
            f"order ({shortened(', '.join(found))}).",
            stacklevel=5,
        )
        return found
    missing = [name for name in preprocessing.columns if name not in names]
    require(
        not missing,
        f"{path} lacks {len(missing)} of the columns that the network was trained on: {', '.join(missing)}. "
        f"It has {', '.join(names)}.",
    )
    return list(preprocessing.columns)


def kept_columns(
    frame: Any, names: Sequence[str], path: Path, separator: str | None
) -> dict[str, np.ndarray]:
    """Columns as the file has them: in a text file 007 is a name, not a number."""
    known = [str(name) for name in frame.columns]
    for name in names:
        if name not in known:
            raise unknown_name(f"column to keep of {path}", name, known)
    if not names or path.suffix.lower() not in SEPARATORS:
        return {name: _plain_or_text(frame[name]) for name in names}
    places = [known.index(name) for name in names]
    text = _pandas().read_csv(
        path,
        sep=separator or _separator_of(path),
        skip_blank_lines=False,
        index_col=False,
        usecols=places,
        dtype=str,
        na_filter=False,
    )
    return {name: text[name].loc[frame.index].to_numpy(dtype=str) for name in names}


def _plain_or_text(column: Any) -> np.ndarray:
    values = plain_column(column)
    return values.astype(str) if values.dtype == object else values


def check_no_gaps(frame: Any, path: Path) -> None:
    """Raise an ``InputError`` that names the first column with missing values."""
    for name in frame.columns:
        gaps = frame[name].isna()
        if gaps.any():
            raise InputError(
                f"The column {name!r} of {path} has {int(gaps.sum())} missing values, the first in "
                f"{_place(gaps.idxmax(), path)}. Fill them in, remove those rows, or leave the column out "
                f'with --set "data.drop=[{name!r}]".'
            )


def _place(row: int, path: Path) -> str:
    """How a reader finds the row: the header is line 1 of a text file."""
    return f"line {row + 2}" if path.suffix.lower() in SEPARATORS else f"row {row + 1}"


def features(frame: Any, columns: Sequence[str], path: Path) -> Tensor:
    """Columns of numbers as one tensor [N, D]."""
    values = np.stack([_feature(frame[name], name, path) for name in columns], axis=1)
    infinite = ~np.isfinite(values)
    if infinite.any():
        row, column = np.argwhere(infinite)[0]
        raise InputError(
            f"The column {columns[column]!r} of {path} holds an infinite value in "
            f"{_place(frame.index[row], path)}. Replace it, or leave the column out with "
            f'--set "data.drop=[{columns[column]!r}]".'
        )
    return torch.from_numpy(values)


def _feature(column: Any, name: str, path: Path) -> np.ndarray:
    types = _pandas().api.types
    if types.is_bool_dtype(column.dtype) or types.is_numeric_dtype(column.dtype):
        return column.to_numpy(dtype=np.float64)
    bad = column.map(lambda value: not is_number(str(value)))
    row = bad.idxmax() if bad.any() else column.index[0]
    raise InputError(
        f"The column {name!r} of {path} is not numeric: {str(column[row])!r} in {_place(row, path)}. Encode "
        f'it as numbers, or leave it out with --set "data.drop=[{name!r}]".'
    )


def plain_column(column: Any) -> np.ndarray:
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
