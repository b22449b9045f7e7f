"""Predictions as they are written: CSV, NPZ or JSON, some rows at a time."""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from polymode.application.cli.output import print_json
from polymode.storage import replaced, writing

Columns = Mapping[str, np.ndarray]  # of some rows
Write = Callable[[Columns], None]


@contextmanager
def predictions_file(path: Path, suffix: str, exact: Collection[str] = ()) -> Iterator[Write]:
    """What writes rows as .csv or .npz; until all are written, the file is as it was.

    suffix: of the name that was given, which may be that of a link. exact: columns whose numbers are written
    with all their digits.
    """
    kind = _npz if suffix == ".npz" else partial(_csv, exact=exact)
    with replaced(path) as temporary, kind(path, temporary) as write:
        yield write


@contextmanager
def csv_on_screen(exact: Collection[str] = ()) -> Iterator[Write]:
    """What writes rows to standard output."""
    begun = False

    def write(columns: Columns) -> None:
        nonlocal begun
        sys.stdout.write(csv_text(columns, with_names=not begun, exact=exact))
        begun = True

    yield write
    sys.stdout.flush()


@contextmanager
def json_on_screen() -> Iterator[Write]:
    """What gathers all rows, and prints them as one document in the end."""
    parts: dict[str, list] = defaultdict(list)

    def write(columns: Columns) -> None:
        for name, values in columns.items():
            parts[name] += values.tolist()

    yield write
    print_json(parts)


@contextmanager
def _csv(path: Path, temporary: Path, exact: Collection[str]) -> Iterator[Write]:
    with temporary.open("w", encoding="utf-8", newline="") as file:

        def write(columns: Columns) -> None:
            text = csv_text(columns, with_names=not file.tell(), exact=exact)
            with writing(path):
                file.write(text)
                file.flush()

        yield write


@contextmanager
def _npz(path: Path, temporary: Path) -> Iterator[Write]:
    """Columns wait in files of their own: how many rows there are, and how long text is, the end tells."""
    with ExitStack() as stack:
        waiting: dict[str, IO[bytes]] = {}
        parts: dict[str, list[tuple[np.dtype, int]]] = defaultdict(list)

        def write(columns: Columns) -> None:
            with writing(path):
                for name, values in columns.items():
                    if name not in waiting:
                        waiting[name] = stack.enter_context(TemporaryFile(dir=path.parent))
                    parts[name].append((values.dtype, len(values)))
                    waiting[name].write(np.ascontiguousarray(values).data)

        yield write
        with writing(path), ZipFile(temporary, "w", ZIP_DEFLATED) as archive:
            for name, file in waiting.items():
                file.seek(0)
                kind = np.result_type(*{dtype for dtype, _ in parts[name]})
                shape = (sum(count for _, count in parts[name]),)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False}
                    np.lib.format.write_array_header_1_0(member, header | {"shape": shape})
                    for dtype, count in parts[name]:
                        values = np.frombuffer(file.read(count * dtype.itemsize), dtype=dtype)
                        member.write(np.ascontiguousarray(values.astype(kind)).data)


def csv_text(columns: Columns, *, with_names: bool, exact: Collection[str] = ()) -> str:
    """Rows as lines: numbers with 8 digits, or all they have; text so that no spreadsheet runs it."""
    columns = {
        name: _digits(v) if name in exact and v.dtype.kind == "f" else v for name, v in columns.items()
    }
    names = ",".join(_cell(name) for name in columns) + "\n" if with_names else ""
    # One format for a whole row: a writer that looks at every cell takes several times as long.
    row = ",".join({"f": "%.8g", "i": "%d", "u": "%d"}.get(v.dtype.kind, "%s") for v in columns.values())
    cells = [_texts(v) if v.dtype.kind in "UO" else v.tolist() for v in columns.values()]
    return names + "".join(map(f"{row}\n".__mod__, zip(*cells, strict=True)))


def _digits(values: np.ndarray) -> np.ndarray:
    """The shortest text that is the same number; nothing where there is none."""
    return np.where(np.isnan(values), "", values.astype(str))


def _texts(values: np.ndarray) -> list[str]:
    texts = values.tolist()
    written = {text: _cell(text) for text in set(texts)}
    return [written[text] for text in texts]


def _cell(value: Any) -> str:
    text = str(_harmless(value))
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\r\n') else text


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula, with an apostrophe before it; not so numbers."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
