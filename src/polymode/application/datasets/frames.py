"""Files with named columns as data frames: CSV, TSV, Parquet, Feather and Excel, and frames of others."""

import re
import warnings
import xml.parsers.expat
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from polymode.data.encoding import number_of, pandas
from polymode.errors import InputError, require, shortened, unknown_name
from polymode.sizes import check_archive, check_memory

SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".parquet", ".feather", ".xlsx")
# Of a frame, where a file is read in several: more rows at once gain nothing, and more cells cost memory.
ROWS, CELLS = 2**16, 2**21
LARGEST_FRAME = 2**31 - 1  # rows of a file that is read at once


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
        [frame] = _text_frames(path, None, _dialect(path, separator, decimal, encoding))
        frame = _without_empty(frame)
    elif suffix == ".xlsx":
        frame = _read_excel(path, sheet)
    else:
        [frame] = _arrow_frames(path, None)
    return _with_rows(frame.dropna(how="all"), str(path))


def frames_of(
    path: Path,
    rows: int | None,
    separator: str | None = None,
    texts: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """The rows of a file as data frames of so many rows (None: one), each with the columns to keep.

    Rows keep their numbers in the file; those that are wholly empty are left out. texts: columns of a text
    file whose cells are read as they are written; those of others may be of another type in every frame.
    """
    suffix = path.suffix.lower()
    kept: Iterator[Any] | None = None
    if suffix in SEPARATORS:
        dialect = _dialect(path, separator, warn=True)
        frames = _text_frames(path, rows, dialect, texts)
        if keep:
            known = _names_in(path, dialect)
            kept = _cells_as_written(path, rows, dialect, known, _known_names(keep, known, path))
    elif suffix == ".xlsx":
        frames = iter([_read_excel(path, 0)])
    else:
        frames = _arrow_frames(path, rows, keep, alike=True)
    some = False
    for frame in frames:
        written = None if kept is None else next(kept)
        frame = frame.dropna(how="all")
        if not len(frame):
            continue
        some = True
        if written is not None:
            yield frame, {name: written[name].loc[frame.index].to_numpy(dtype=str) for name in keep}
        else:
            yield frame, kept_columns(frame, keep, path)
    require(some, f"{path} has no rows below its column names.")


def _dialect(
    path: Path,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    *,
    warn: bool = True,
) -> dict[str, Any]:
    """How pandas has to read a text file."""
    require(
        separator is None or (isinstance(separator, str) and len(separator) == 1),
        f"separator={separator!r} must be a character, such as ';'.",
    )
    require(decimal in (None, ".", ","), f"decimal={decimal!r}: allowed are '.' and ','.")
    encoding = encoding or _encoding_of(path, warn=warn)
    with _readable(path):
        separator = separator or separator_of(path, encoding)
    require(decimal != separator, f"decimal={decimal!r} is what {path} is split at.")
    thousands = {",": ".", ".": ","}.get(decimal or "")
    numbers = {} if decimal is None else {"decimal": decimal}
    if thousands not in (None, separator):
        numbers["thousands"] = thousands
    # Blank lines are read and dropped, so that row numbers stay line numbers.
    return {"sep": separator, "encoding": encoding, "skip_blank_lines": False} | numbers


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say what is wrong with a text file that pandas cannot read."""
    package = pandas()
    try:
        yield
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


def _header(path: Path, dialect: dict[str, Any]) -> list[str]:
    """The names in the first line; pandas' own are others: of a second "a" it makes "a.1"."""
    with _readable(path):
        first = pandas().read_csv(path, header=None, nrows=1, dtype=str, na_filter=False, **dialect)
    return list(first.iloc[0])


def _names_in(path: Path, dialect: dict[str, Any]) -> list[str]:
    """The names of the columns, checked."""
    check_different([name for name in _header(path, dialect) if name], str(path))
    with _readable(path):
        names = pandas().read_csv(path, nrows=0, index_col=False, **dialect).columns
    names = [str(name) for name in names]
    _check_header(names, path, dialect["sep"])
    return names


def _text_frames(
    path: Path, rows: int | None, dialect: dict[str, Any], texts: Sequence[str] = ()
) -> Iterator[Any]:
    package = pandas()
    kinds = dict.fromkeys(texts, object)
    options = dialect | {"index_col": False, "low_memory": False}  # one type for all rows of a column
    with _readable(path):
        _check_cells(rows or _num_lines(path), _num_columns(path, dialect), str(path))
        reader = package.read_csv(path, chunksize=rows or LARGEST_FRAME, dtype=kinds, **options)
    checked = False
    with reader:
        while True:
            with _readable(path), warnings.catch_warnings():
                warnings.simplefilter("error", package.errors.ParserWarning)  # fewer names than columns
                frame = next(reader, None)
            if frame is None:
                break
            frame.columns = frame.columns.map(str)
            if not checked:
                _check_header(list(frame.columns), path, dialect["sep"])
                check_different([name for name in _header(path, dialect) if name], str(path))
                checked = True
            yield frame


def _cells_as_written(
    path: Path, rows: int | None, dialect: dict[str, Any], known: list[str], names: Sequence[str]
) -> Iterator[Any]:
    """Some columns of a text file without any change: 007 is a name, not a number."""
    places = sorted(known.index(name) for name in names)
    options = dialect | {"index_col": False, "dtype": str, "na_filter": False, "usecols": places}
    with _readable(path), pandas().read_csv(path, chunksize=rows or LARGEST_FRAME, **options) as reader:
        for frame in reader:
            frame.columns = [known[place] for place in places]
            yield frame


def may_hold_decimal_commas(path: Path, separator: str | None) -> bool:
    """Whether a cell of a text file can hold a comma, from its bytes."""
    separator = separator or separator_of(path, _encoding_of(path, warn=False))
    sign = b'"' if separator == "," else b","
    with path.open("rb") as file:
        return any(sign in block for block in iter(lambda: file.read(2**24), b""))


def is_nameless(name: str) -> bool:
    """Whether a column has no name in its file, and pandas gave it one."""
    return _NAMELESS.fullmatch(name) is not None


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


def _num_lines(path: Path) -> int:
    """How many lines a text file has, at least."""
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(2**24), b"")
        return 1 + sum(max(block.count(b"\n"), block.count(b"\r")) for block in blocks)


def _num_columns(path: Path, dialect: dict[str, Any]) -> int:
    """How many cells the first line of a text file has, at most."""
    with path.open(encoding=dialect["encoding"], errors="replace") as file:
        return 1 + file.readline().count(dialect["sep"])


def width_of(source: Any, separator: str | None = None) -> int:
    """How many columns a table has that is read some rows at a time."""
    if is_frame(source) or (path := Path(source)).suffix.lower() == ".xlsx":  # it is there as a whole
        return 0
    if path.suffix.lower() in SEPARATORS:
        return _num_columns(path, _dialect(path, separator, warn=False))
    return _extent_of_arrow(path, 1)[1]


def _without_empty(frame: Any) -> Any:
    """The frame without empty columns that have no name, such as separators at the ends of lines make."""
    return frame[[name for name in frame if not (is_nameless(name) and frame[name].isna().all())]]


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


def _arrow_frames(
    path: Path, rows: int | None, keep: Sequence[str] = (), *, alike: bool = False
) -> Iterator[Any]:
    """The rows of a Parquet or Feather file; alike: a column is of one type, with gaps or without."""
    try:
        import pyarrow
    except ImportError:
        raise InputError("Reading Parquet and Feather needs pyarrow: pip install 'polymode[data]'.") from None
    is_parquet = path.suffix.lower() == ".parquet"
    kinds = {pyarrow.bool_(): pandas().BooleanDtype()}.get if alike else None
    first = 0
    try:
        _check_cells(*_extent_of_arrow(path, rows), str(path))
        with_gaps = _integers_with_gaps(path, keep) if alike else []
        for table in _arrow_tables(path, rows):
            frame = table.to_pandas(types_mapper=kinds).reset_index(drop=True)
            for name in with_gaps:  # as floating-point numbers they would lose digits
                frame[name] = table.column(name).to_pandas(types_mapper=_with_gaps).array
            frame.index += first
            first += len(frame)
            frame.columns = frame.columns.map(str)
            check_different(list(frame.columns), str(path))
            yield frame
    except InputError:
        raise
    except Exception as error:  # what pandas writes beside the columns may be damaged, too
        kind = "Parquet" if is_parquet else "Feather"
        reason = shortened(" ".join(str(error).split()))
        raise InputError(f"{path} cannot be read as {kind} ({reason}). Write it again.") from error
    require(first > 0, f"{path} has no rows below its column names.")


def _arrow_tables(path: Path, rows: int | None) -> Iterator[Any]:
    """The rows of a Parquet or Feather file as tables of so many rows, however the file is cut."""
    import pyarrow

    waiting: list[Any] = []
    number = 0
    for batch in _arrow_batches(path, rows):
        while len(batch):
            part = batch if rows is None else batch[: rows - number]
            waiting, number, batch = [*waiting, part], number + len(part), batch[len(part) :]
            if number == rows:
                yield pyarrow.Table.from_batches(waiting)
                waiting, number = [], 0
    if waiting:
        yield pyarrow.Table.from_batches(waiting)


def _arrow_batches(path: Path, rows: int | None, names: Sequence[str] | None = None) -> Iterator[Any]:
    """Rows as the file is cut; names: columns of a Parquet file, if not all."""
    from pyarrow import ipc, memory_map, parquet

    if path.suffix.lower() == ".parquet":
        with parquet.ParquetFile(path) as file:
            known = None if names is None else [n for n in names if n in file.schema_arrow.names]
            yield from file.iter_batches(batch_size=rows or LARGEST_FRAME, columns=known)
        return
    with memory_map(str(path)) as source, ipc.open_file(source) as file:
        for index in range(file.num_record_batches):
            yield file.get_batch(index)


def _extent_of_arrow(path: Path, rows: int | None) -> tuple[int, int]:
    """The rows that are read at once, all unless it is said how many, and the columns."""
    from pyarrow import ipc, memory_map, parquet

    if path.suffix.lower() == ".parquet":
        about = parquet.read_metadata(path)
        return rows or about.num_rows, about.num_columns
    with memory_map(str(path)) as source, ipc.open_file(source) as file:
        batches = range(0 if rows else file.num_record_batches)
        return rows or sum(file.get_batch(index).num_rows for index in batches), len(file.schema)


def _integers_with_gaps(path: Path, names: Sequence[str]) -> list[str]:
    """Those of the columns that are integers and have gaps somewhere in the file."""
    import pyarrow

    found: set[str] = set()
    for batch in _arrow_batches(path, ROWS, names) if names else ():
        for name in set(batch.schema.names).intersection(names):
            column = batch.column(name)
            if pyarrow.types.is_integer(column.type) and column.null_count:
                found.add(name)
    return sorted(found)


def _with_gaps(kind: Any) -> Any:
    """The type that pandas has for integers of which some are missing."""
    return pandas().api.types.pandas_dtype(str(kind).replace("uint", "UInt").replace("int", "Int"))


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


def kept_columns(frame: Any, names: Sequence[str], path: Path) -> dict[str, np.ndarray]:
    """Columns to keep of a frame that has types: its numbers, and all else as text."""
    names = _known_names(names, [str(name) for name in frame.columns], path)
    return {name: _plain_or_text(frame[name]) for name in names}


def _known_names(names: Sequence[str], known: Sequence[str], path: Path) -> list[str]:
    for name in names:
        if name not in known:
            raise unknown_name(f"column to keep of {path}", name, known)
    return list(dict.fromkeys(names))


def _plain_or_text(column: Any) -> np.ndarray:
    values = column.to_numpy()
    # Integers of which some may be missing would become floating-point numbers, and lose digits.
    if values.dtype.kind in "biuf" and not str(column.dtype).startswith(("Int", "UInt")):
        return values
    return column.astype(object).fillna("").astype(str).to_numpy(dtype=str)
