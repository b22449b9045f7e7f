"""What the commands that draw views have in common: where results go, and how they are shown."""

import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from polymode.application.atlas.view import View
from polymode.application.cli.options import ScreenOptions, UsageError
from polymode.application.cli.output import console, print_json, say
from polymode.application.report import export_figures, number_text, write_atlas
from polymode.storage import finite, write_bytes, write_text
from polymode.training.keeping.progress import Reporter

PAGE, NUMBERS = "landscape.html", "numbers.json"


def check_folder(folder: Path, options: Mapping[str, Any]) -> None:
    """Raise where a folder holds the results of other options; those of the same ones are made anew."""
    path = folder / NUMBERS
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text()).get("options")
    except (ValueError, AttributeError, OSError):
        before = None
    if before != json.loads(json.dumps(dict(options))):
        raise UsageError(f"{folder} holds results of another command: choose another folder with --out.")


def keep_views(views: Iterable[View], folder: Path) -> list[View]:
    """Write the arrays of every view as soon as it is made."""
    kept = []
    for view in views:
        content = io.BytesIO()
        arrays: dict[str, Any] = dict(view.arrays)
        np.savez_compressed(content, **arrays)
        write_bytes(folder / f"{view.key}.npz", content.getvalue())
        kept.append(view)
    return kept


def show_views(
    options: ScreenOptions,
    views: Sequence[View],
    folder: Path,
    *,
    title: str,
    about: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    left_out: Mapping[str, str],
    command: str,
    figures: str,
    details: Mapping[str, Any],
    reporter: Reporter,
) -> None:
    """Write the page, the numbers and the figures; print the numbers."""
    page = write_atlas(
        folder / PAGE,
        title,
        views,
        about=" ".join([about, *(view.sentence for view in views if view.sentence)]),
        rows=rows,
        notes=notes,
        left_out=left_out,
        command=command,
        details=details,
    )
    numbers = [
        {"view": view.key, "what": n.what, "value": n.value, "standard_error": n.error, "note": n.note}
        for view in views
        for n in view.numbers
    ]
    document = {"runs": list(rows), "numbers": numbers, "notes": list(notes), "left_out": dict(left_out)}
    document = finite(document | {"options": dict(details)})
    write_text(folder / NUMBERS, json.dumps(document, indent=2) + "\n")
    files = []
    if figures:
        reporter.say(f"drawing {2 * len(views)} figures")
        files = [str(path) for path in export_figures(views, folder / "figures", figures)]
    reporter.close()
    if options.json:
        print_json({"folder": str(folder), "page": str(page), "figures": files} | document)
        return
    _print_rows(title, rows)
    _print_numbers(views)
    for view in views:
        if view.sentence:
            say(options, view.sentence)
    for note in notes:
        say(options, f"note     {note}")
    for name, reason in left_out.items():
        say(options, f"without  {name}: {reason}")
    say(options, f"page     {page}")
    say(options, f"arrays   {folder}/*.npz, numbers {folder / NUMBERS}")
    if files:
        say(options, f"figures  {folder / 'figures'} ({len(files)} files)")


def _print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    head = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in head))
    console().print(table)


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _print_numbers(views: Sequence[View]) -> None:
    table = Table(title="numbers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("of", overflow="fold")
    for view in views:
        for number in view.numbers:
            table.add_row(number.what, number_text(number), number.note)
    if table.row_count:
        console().print(table)


def survey_progress(reporter: Reporter) -> Callable[[str], Callable[[int, int], None]]:
    """How a survey tells how far it is: a line every few seconds, with the time that is left."""

    def begin(title: str) -> Callable[[int, int], None]:
        began = time.monotonic()
        told = [began]

        def advance(done: int, total: int) -> None:
            now = time.monotonic()
            if now - told[0] < 5 and done < total:
                return
            told[0] = now
            left = (now - began) / max(done, 1) * (total - done)
            reporter.say(
                f"{title}: {done} of {total} networks" + (f", eta {left:.0f} s" if done < total else "")
            )

        return advance

    return begin
