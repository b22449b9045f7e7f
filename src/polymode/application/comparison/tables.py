"""Tables of experiments of one's own: a row of means a setting, and beside it a row a replicate."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polymode.application.comparison.results import Summary
from polymode.errors import InputError, require
from polymode.storage import write_text


def replicates_path(table: Path) -> Path:
    """Where the replicates of a table are: TABLE-replicates.csv beside TABLE.csv."""
    return table.with_name(f"{table.stem}-replicates.csv")


def add_result(
    table: Path,
    settings: Mapping[str, Any],
    unit: str,
    replicates: Mapping[Any, Mapping[str, float]],
    *,
    cost: Mapping[str, Any] = MappingProxyType({}),
    digits: int = 4,
) -> dict[str, Any]:
    """Put a result into a table: a row of means with standard errors there, its replicates beside it.

    settings: what the result is of, the first columns of both tables; rows of the same settings are replaced,
    so that an experiment may be repeated. unit: what replicates differ in, "seed" or "split". replicates: the
    scores of each. cost: what it took, such as seconds, which are others every time. digits: of means and
    errors, after the point; replicates keep all of theirs. Returns the row of means.
    """
    require(len(replicates) > 0, f"There are no replicates to put into {table}.")
    names = list(next(iter(replicates.values())))
    means: dict[str, Any] = {**settings, **cost}
    for name in names:
        summary = Summary.of([scores[name] for scores in replicates.values()])
        error = math.nan if summary.standard_error is None else summary.standard_error
        means |= {name: f"{summary.mean:.{digits}f}", f"{name}_se": f"{error:.{digits}f}"}
    each = [{**settings, **cost, unit: key, **scores} for key, scores in replicates.items()]
    _replace_rows(replicates_path(table), list(settings), each)  # first: a mean never lacks what it is of
    _replace_rows(table, list(settings), [means])
    return means


def _replace_rows(path: Path, key: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows into a CSV file in the place of those with the same key."""
    columns = list(rows[0])
    kept: list[Mapping[str, Any]] = []
    if path.exists():
        reader = csv.DictReader(path.read_text().splitlines())
        if reader.fieldnames != columns:
            raise InputError(
                f"{path} has the columns {', '.join(reader.fieldnames or ())}; the new rows have "
                f"{', '.join(columns)}. Choose another file."
            )
        same = [str(rows[0][name]) for name in key]
        kept = [row for row in reader if [row[name] for name in key] != same]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows([*kept, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, stream.getvalue())
