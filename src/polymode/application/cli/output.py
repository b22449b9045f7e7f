"""What a command shows: results on standard output, progress and messages on standard error."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from polymode.application.cli.options import ScreenOptions
from polymode.application.comparison import Comparison, Result, Summary, times
from polymode.likelihoods import Likelihood
from polymode.storage import finite
from polymode.training.keeping.progress import Bars, JsonLines, Lines, Reporter, Silent

PIPE_WIDTH = 160  # a table in a log is not folded


def console() -> Console:
    """Standard output, as wide as the terminal, or wide enough for a table where there is none."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def reporter_of(options: ScreenOptions, num_runs: int = 0) -> Reporter:
    """Bars on a terminal, plain lines elsewhere, JSON lines or silence where asked for."""
    if options.quiet:
        return Silent()
    if options.json:
        return JsonLines()
    return Bars(num_runs) if sys.stderr.isatty() else Lines()


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON document on standard output."""
    print(json.dumps(finite(content), indent=2))


def say(options: ScreenOptions, message: str) -> None:
    """A line on standard output, unless results are wanted as JSON alone."""
    if not options.json:
        console().print(message, markup=False, soft_wrap=True)


def _cell(summary: Summary | None, digits: int, *, best: bool) -> str:
    if summary is None:
        return "–"
    text = summary.text(digits)
    return f"[bold green]{text}*[/]" if best else f"{text} "


def scores_table(comparison: Comparison) -> Table:
    """Means with standard errors; the best of each column carries a star."""
    table = Table(title=comparison.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    columns = comparison.shown_columns()
    for column in columns:
        arrow = {"high": " ↑", "low": " ↓"}.get(str(column.better), "")
        table.add_column(column.title + arrow, justify="right", overflow="fold")
    for result in comparison.results:
        cells = [
            _cell(result.summary(column.key), column.digits, best=result.label in comparison.best(column))
            for column in columns
        ]
        if result is next(iter(comparison.baselines), None):
            table.add_section()
        table.add_row(_marked(result), *cells)
    return table


def _marked(result: Result) -> str:
    """The label of a result, with what its training did wrong; baselines are scikit-learn's."""
    if result.is_baseline:
        return f"[dim]{result.stated}[/]"
    return f"{result.stated} [yellow]{result.mark}[/]" if result.mark else result.stated


def calibration_table(comparison: Comparison) -> Table:
    """Scores before and after calibration, means over splits and seeds."""
    table = Table(
        title="before and after calibration on validation rows",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    titles, rows = comparison.before_and_after()
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right")
    for row in rows:
        table.add_row(*row)
    return table


def price_table(comparison: Comparison) -> Table:
    """What each method gains over the first one, beside what it costs; coloured where it is decided."""
    first = comparison.results[0]
    table = Table(
        title=f"gain over {first.label}, and price", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("method", no_wrap=True)
    table.add_column(f"{comparison.quality.title} gain", justify="right", overflow="fold")
    for title in ("member-epochs", "seconds", "parameters", "passes to predict"):
        table.add_column(title, justify="right", overflow="fold")
    for result in comparison.results:
        gain = comparison.gain(result)
        if result is next(iter(comparison.baselines), None):
            table.add_section()
        table.add_row(
            _marked(result),
            "–" if gain is None else _signed(gain, comparison.quality.digits),
            f"{result.price['member_epochs']:,.0f}",
            f"{result.price['seconds']:,.1f} ({_ratio(result, first, 'seconds')})",
            f"{result.price['parameters']:,.0f} ({_ratio(result, first, 'parameters')})",
            f"{result.price['passes']:,.0f}",
        )
    return table


def _signed(gain: Summary, digits: int) -> str:
    text = f"{'+' if gain.mean > 0 else ''}{gain.text(digits)}"
    if not gain.is_decided:
        return f"{text} undecided"
    return f"[{'green' if gain.mean > 0 else 'red'}]{text}[/]"


def _ratio(result: Result, first: Result, key: str) -> str:
    return times(result.price[key], first.price[key])


def _found(value: Any) -> str:
    """What a chain says about itself, in words: a number, how many of how many, or that for each layer."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_found(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return " of ".join(map(_found, value))
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def findings_lines(chains: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the chains of a posterior said about themselves: a line for each thing, a number a chain."""
    lines = []
    for name in chains[0] if chains else ():
        values = [_found(chain[name]) for chain in chains]
        shown = (
            values[0] if len(set(values)) == 1 else ", ".join(values[:10]) + (", …" if values[10:] else "")
        )
        lines.append(f"{name.replace('_', ' '):<16} {shown}{' of each chain' if len(chains) > 1 else ''}")
    return lines


def posterior_table(
    title: str,
    likelihood: Likelihood,
    scores: Sequence[Mapping[str, float]],
    calibrated: Sequence[Mapping[str, float]] = (),
) -> Table:
    """The scores that a comparison shows, the mean over posteriors with its standard error.

    calibrated: the scores after calibration, where there was one.
    """
    table = Table(
        title=title, title_justify="left", show_header=bool(calibrated), box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("score", no_wrap=True)
    table.add_column("value", justify="right")
    if calibrated:
        table.add_column("calibrated", justify="right")
    table.add_column("meaning")
    for column in likelihood.columns.values():
        if all(column.key in each for each in scores):
            cells = [Summary.of([each[column.key] for each in scores]).text(column.digits)]
            if calibrated:
                after = [each[column.key] for each in calibrated if column.key in each]
                cells.append(Summary.of(after).text(column.digits) if after else "–")
            table.add_row(column.title, *cells, column.explanation)
    return table
