"""The page of a landscape: one view below the other, with the numbers that they come to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polymode.application.atlas.view import Number, View
from polymode.application.plots.style import dark
from polymode.application.report.shell import escape, figure, table, write_shell
from polymode.errors import InputError

FORMATS = ("png", "svg")
WIDTH = 1000  # of an exported figure, in pixels


def write_atlas(
    path: str | Path,
    title: str,
    views: Sequence[View],
    *,
    about: str = "",
    rows: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    left_out: Mapping[str, str] | None = None,
    command: str = "",
    details: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page and return where it is.

    rows: a table of the runs. notes: what a reader should know of them. left_out: views that are not here,
    and why.
    """
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="summary">{escape(about)}</p>']
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    if rows:
        head = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_cell(row.get(name)) for name in head] for row in rows]
        parts += ["<h2>Runs</h2>", f'<div class="scroll">{table([escape(h) for h in head], cells)}</div>']
    parts.append(
        '<h2>Figures</h2><p class="note">Hover for numbers, drag to zoom, double-click to reset, click a '
    )
    parts.append('legend entry to hide it.</p><div class="wide">')
    parts += [figure(view.figure, escape(view.caption) + _numbers(view.numbers)) for view in views]
    for name, reason in (left_out or {}).items():
        parts.append(f'<p class="note">{escape(name)} is left out: {escape(reason)}</p>')
    parts.append(f"</div><h2>How this was made</h2><pre>{escape(command or '—')}</pre>")
    if details:
        shown = escape(json.dumps(details, indent=2))
        parts.append(f"<details><summary>Options and versions</summary><pre>{shown}</pre></details>")
    return write_shell(path, title, "\n".join(parts))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else escape(value)


def _numbers(numbers: Sequence[Number]) -> str:
    """The main numbers of a view, folded up below its figure."""
    if not numbers:
        return ""
    rows = [[escape(n.what), number_text(n), escape(n.note)] for n in numbers]
    found = table(["what", "value ± standard error", "of"], rows)
    return f'<details><summary>Numbers</summary><div class="scroll">{found}</div></details>'


def number_text(number: Number) -> str:
    """A number with its standard error, where it has one."""
    error = "" if number.error is None or number.error != number.error else f" ± {number.error:.2g}"
    return f"{number.value:.4g}{error}"


def export_figures(views: Sequence[View], folder: Path, kind: str) -> list[Path]:
    """Write every figure as a file, in light and in dark; returns where they are."""
    if kind not in FORMATS:
        raise InputError(f"Figures can be written as {' or '.join(FORMATS)}, not as {kind!r}.")
    try:
        import kaleido
        from choreographer.errors import ChromeNotFoundError
    except ImportError:
        raise InputError("Figures as files need kaleido: pip install 'polymode[figures]'.") from None
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        folder / f"{view.key}{suffix}.{kind}": figure
        for view in views
        for suffix, figure in (("", view.figure), ("-dark", dark(view.figure)))
    }
    # All at once, as each call starts a browser; without MathJax nothing is fetched from elsewhere.
    jobs = [
        {
            "fig": figure,
            "path": str(path),
            "opts": {"format": kind, "width": WIDTH, "height": figure.layout.height, "scale": 2},
        }
        for path, figure in drawn.items()
    ]
    try:
        kaleido.write_fig_from_object_sync(jobs, kopts={"mathjax": False})
    except ChromeNotFoundError:
        raise InputError(
            "Figures as files are drawn by Chrome or Chromium, and none was found: install one, or name it "
            "in the environment variable BROWSER_PATH. The page is written all the same."
        ) from None
    return list(drawn)
