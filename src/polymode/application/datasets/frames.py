"""Files with named columns as data frames: CSV, TSV, Parquet, Feather and Excel, and frames of others."""

import re
import warnings
import xml.parsers.expat
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polymode.data.encoding import number_of, pandas
from polymode.errors import InputError, require, shortened, unknown_name
from polymode.sizes import check_archive, check_memory

SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".parquet", ".feather", ".xlsx")


_CELL = re.compile(r"([A-Za-z]{1,4})(\d{1,12})")
_NAMELESS = re.compile(r"Unnamed: \d+")


def is_frame(value: Any) -> bool:
    """Whether a value is a data frame of pandas or polars."""
    return type(value).__module__.split(".")[0] in ("pandas", "polars") and hasattr(value, "columns")


def as_frame(value: Any, what: str = "The table") -> Any:
    """A frame of pandas or polars as one of pandas with names of text and rows counted from 0."""
    package = pandas()
    if type(value).__module__.split(".")[0] == "polars":
        value = value.collect() if hasattr(value, "collect") else value
        value = package.DataFrame({name: value[name].to_list() for name in value.columns})
    require(isinstance(value, package.DataFrame), f"{what} is a {type(value).__name__}, not a data frame.")
    require(
        value.columns.nlevels == 1,
        f"{what} has {value.columns.nlevels} rows of column names: give each column one name.",
    )
    frame = value.reset_index(drop=True)
    frame.columns = frame.columns.map(str)
    check_different(list(frame.columns), what)
    return _with_rows(frame, what)


def read_frame(
    path: Path,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    sheet: str | int = 0,
) -> Any:
    """A file as a data frame, without rows that are wholly empty; rows keep their numbers in the file.

    separator, decimal, encoding: of a text file, seen in it unless given. sheet: of an Excel file.
    """
    suffix = path.suffix.lower()
    if suffix in SEPARATORS:
        frame = _read_text(path, separator, decimal, encoding)
    elif suffix == ".xlsx":
        frame = _read_excel(path, sheet)
    else:
        frame = _read_arrow(path)
    return _with_rows(frame.dropna(how="all"), str(path))


def _read_text(path: Path, separator: str | None, decimal: str | None, encoding: str | None) -> Any:
    package = pandas()
    require(
        separator is None or (isinstance(separator, str) and len(separator) == 1),
        f"separator={separator!r} must be a character, such as ';'.",
    )
    require(decimal in (None, ".", ","), f"decimal={decimal!r}: allowed are '.' and ','.")
    encoding = encoding or _encoding_of(path)
    try:
        separator = separator or separator_of(path, encoding)
        require(decimal != separator, f"decimal={decimal!r} is what {path} is split at.")
        thousands = {",": ".", ".": ","}.get(decimal or "")
        numbers = {} if decimal is None else {"decimal": decimal}
        if thousands not in (None, separator):
            numbers["thousands"] = thousands
        _check_cells(*_lines_and_columns(path, separator, encoding), str(path))
        # Blank lines are read and dropped, so that row numbers stay line numbers.
        with warnings.catch_warnings():
            warnings.simplefilter("error", package.errors.ParserWarning)  # fewer names than columns
            frame = package.read_csv(
                path,
                sep=separator,
                skip_blank_lines=False,
                index_col=False,
                encoding=encoding,
                low_memory=False,  # one type for all rows of a column
                **numbers,
            )
        # The frame's own names are not those of the file: a second "a" has become "a.1".
        header = package.read_csv(
            path,
            sep=separator,
            skip_blank_lines=False,
            header=None,
            nrows=1,
            dtype=str,
            na_filter=False,
            encoding=encoding,
        )
    except InputError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
        package.errors.ParserError,
        package.errors.ParserWarning,
    ) as error:
        reason = shortened(" ".join(str(error).split()))
        raise InputError(
            f"{path} cannot be read as a table ({reason}). Check its separator (data.separator), its rows "
            "and its encoding (data.encoding)."
        ) from error
    frame.columns = frame.columns.map(str)
    _check_header(list(frame.columns), path, separator)
    check_different([name for name in header.iloc[0] if name], str(path))
    return _without_empty(frame)


# Columns of a table; each is looked at by itself, so that more would take for ever.
MOST_COLUMNS = 100_000
CELL_BYTES = 8  # of memory, of the smallest cell of a frame
# What a byte of XML takes in memory as cells of a spreadsheet that is being read.
XML_TIMES = 8


def _check_cells(num_rows: int, num_columns: int, what: str) -> None:
    """Raise where a frame of this size is refused: cells that a file leaves out take memory, too."""
    require(
        num_columns <= MOST_COLUMNS,
        f"{what} has {num_columns:,} columns; at most {MOST_COLUMNS:,} can be read. Give fewer, or arrays "
        "(.npz).",
    )
    check_memory(
        CELL_BYTES * num_rows * num_columns, f"{what}, {num_rows:,} rows by {num_columns:,} columns,"
    )


def _lines_and_columns(path: Path, separator: str, encoding: str) -> tuple[int, int]:
    """How many lines a text file has, and how many cells its first one, at most."""
    with path.open(encoding=encoding, errors="replace") as file:
        columns = 1 + file.readline().count(separator)
    ends = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            ends += max(block.count(b"\n"), block.count(b"\r"))
    return ends + 1, columns


def _without_empty(frame: Any) -> Any:
    """The frame without empty columns that have no name, such as separators at the ends of lines make."""
    return frame[[name for name in frame if not (_NAMELESS.fullmatch(name) and frame[name].isna().all())]]


def _encoding_of(path: Path, *, warn: bool = True) -> str:
    """UTF-8, or UTF-16 by its first bytes, or what Windows writes, which a warning says."""
    with path.open("rb") as file:
        start = file.read(4)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return "utf-16"
        file.seek(0)
        try:
            while block := file.read(2**24):
                # A character may be cut by the end of a block: the next line end is a safe place.
                (block + file.readline()).decode("utf-8")
        except UnicodeDecodeError:
            if warn:
                warnings.warn(
                    f"{path} is not UTF-8 and is read as cp1252 (Windows, western Europe): say data.encoding "
                    "if letters look wrong.",
                    stacklevel=5,
                )
            return "cp1252"
    return "utf-8-sig" if start[:3] == b"\xef\xbb\xbf" else "utf-8"


def separator_of(path: Path, encoding: str | None = None) -> str:
    """The usual one of the file's ending, or what its first line is split by instead."""
    usual = SEPARATORS[path.suffix.lower()]
    with path.open(errors="replace", encoding=encoding) as file:
        first = re.sub(r'"[^"]*"', "", file.readline())
    counts = {each: first.count(each) for each in (";", "\t", "|", ",")}
    if counts[";"] > counts[","]:  # a name may hold a comma where they are split by something else
        return ";"
    others = [other for other in ("\t", "|", ";", ",") if counts[other]]
    return usual if usual in first or not others else others[0]


def _read_excel(path: Path, sheet: str | int) -> Any:
    require(
        isinstance(sheet, str | int) and not isinstance(sheet, bool),
        f"sheet={sheet!r} must be the name of a sheet, or its number counted from 0.",
    )
    try:
        import openpyxl  # noqa: F401  # before anything is looked at
    except ImportError:
        raise InputError("Reading Excel files needs openpyxl: pip install 'polymode[data]'.") from None
    try:
        check_archive(path, times=XML_TIMES)
        _check_sheets(path)
        with pandas().ExcelFile(path, engine="openpyxl") as file:
            frame = pandas().read_excel(file, sheet_name=sheet)
            header = pandas().read_excel(file, sheet_name=sheet, header=None, nrows=1)
    except InputError:
        raise
    except Exception as error:  # archives, documents and cells fail in errors of every class
        reason = shortened(" ".join(str(error).split()))
        raise InputError(f"{path} cannot be read as Excel, sheet {sheet!r} ({reason}).") from error
    frame.columns = frame.columns.map(str)
    _with_rows(frame, str(path))
    _check_header(list(frame.columns), path, "")
    check_different([str(name) for name in header.iloc[0].dropna()], str(path))
    return _without_empty(frame)


def _check_sheets(path: Path) -> None:
    """Raise for sheets whose last row and column make too large a table, however few cells it has."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.startswith("xl/worksheets/") and name.endswith(".xml"):
                with archive.open(name) as file:
                    _check_cells(*_extent_of(file), f"{path} ({name})")


def _extent_of(file: Any) -> tuple[int, int]:
    """The last row and the last column that the cells of a sheet lie in."""
    last = [1, 1]

    def begins(tag: str, attributes: dict[str, str]) -> None:
        place = attributes.get("r", "")
        kind = tag.rpartition(":")[2]
        if kind == "row" and place.isdigit():
            last[0] = max(last[0], int(place[:12]))
        elif kind == "c" and (found := _CELL.fullmatch(place)):
            last[0], last[1] = max(last[0], int(found[2])), max(last[1], _number_of_column(found[1]))

    def declares(*names: object) -> None:
        raise InputError("A sheet that defines words of its own is not read: save it again.")

    parser = xml.parsers.expat.ParserCreate()
    parser.StartElementHandler, parser.StartDoctypeDeclHandler = begins, declares
    parser.ParseFile(file)
    return last[0], last[1]


def _number_of_column(letters: str) -> int:
    number = 0
    for letter in letters.upper():
        number = 26 * number + ord(letter) - ord("A") + 1
    return number


def _read_arrow(path: Path) -> Any:
    try:
        import pyarrow  # noqa: F401  # before anything is looked at
    except ImportError:
        raise InputError("Reading Parquet and Feather needs pyarrow: pip install 'polymode[data]'.") from None
    is_parquet = path.suffix.lower() == ".parquet"
    read = pandas().read_parquet if is_parquet else pandas().read_feather
    try:
        _check_cells(*(_extent_of_parquet(path) if is_parquet else _extent_of_feather(path)), str(path))
        frame = read(path)
    except InputError:
        raise
    except Exception as error:  # what pandas writes beside the columns may be damaged, too
        kind = "Parquet" if is_parquet else "Feather"
        reason = shortened(" ".join(str(error).split()))
        raise InputError(f"{path} cannot be read as {kind} ({reason}). Write it again.") from error
    frame.columns = frame.columns.map(str)
    check_different(list(frame.columns), str(path))
    return frame.reset_index(drop=True)


def _extent_of_parquet(path: Path) -> tuple[int, int]:
    from pyarrow import parquet

    about = parquet.read_metadata(path)
    return about.num_rows, about.num_columns


def _extent_of_feather(path: Path) -> tuple[int, int]:
    """From a table that stays on disk: what is not packed takes no memory."""
    from pyarrow import feather

    table = feather.read_table(path, memory_map=True)
    return table.num_rows, table.num_columns


def _with_rows(frame: Any, what: str) -> Any:
    require(len(frame) > 0, f"{what} has no rows below its column names.")
    return frame


def _check_header(names: list[str], path: Path, separator: str) -> None:
    if names and all(number_of(re.sub(r"\.\d+$", "", name)) is not None for name in names):
        raise InputError(
            f"The first line of {path} holds numbers ({', '.join(names[:3])}); write a line of column names "
            "above it."
        )
    for other in ";\t,":
        if len(names) == 1 and other != separator and other in names[0]:
            raise InputError(
                f"{path} has one column, {names[0]!r}, when split at {separator!r}. Set separator={other!r}."
            )


def check_different(names: Sequence[str], what: str) -> None:
    """Raise an ``InputError`` for names that occur twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    names_twice = ", ".join(map(repr, twice))
    require(
        not twice,
        f"{what} has more than one column named {names_twice}. Give each a name of its own, or remove it.",
    )


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
    names = list(dict.fromkeys(names))
    places = [known.index(name) for name in names]
    encoding = _encoding_of(path, warn=False)
    text = pandas().read_csv(
        path,
        sep=separator or separator_of(path, encoding),
        skip_blank_lines=False,
        index_col=False,
        usecols=places,
        dtype=str,
        na_filter=False,
        encoding=encoding,
    )
    text.columns = [known[place] for place in sorted(places)]
    return {name: text[name].loc[frame.index].to_numpy(dtype=str) for name in names}


def _plain_or_text(column: Any) -> np.ndarray:
    values = column.to_numpy()
    return (
        values
        if values.dtype.kind in "biuf"
        else column.astype(object).fillna("").astype(str).to_numpy(dtype=str)
    )
