"""``polymode data``: the data sets that have a name; fetch and check them."""

import sys
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from polymode.application.cli.compare import CompareOptions
from polymode.application.cli.options import ScreenOptions, UsageError, command_line, option
from polymode.application.cli.output import console, print_json, say
from polymode.application.comparison.pilot import meaning_of
from polymode.application.datasets.catalogue import DATASETS
from polymode.application.datasets.downloads import data_folder
from polymode.application.datasets.loading import check_data, fetch_data, is_ready, load_task
from polymode.data.encoding import listed
from polymode.errors import unknown_name
from polymode.likelihoods import make_likelihood

ABOUT = """List the data sets that have a name, fetch them from their official addresses, or check them.
With describe: say what becomes of every column of a table.

They lie in the folder that POLYMODE_DATA names (default: ~/.cache/polymode/data)."""


ACTIONS = ("list", "fetch", "check", "describe")


@dataclass(frozen=True)
class DataOptions(ScreenOptions):
    """Options of ``polymode data``."""

    action: str = option("list", "list, fetch, check or describe", place="argument")
    names: tuple[str, ...] = option((), "data sets; of describe a table", place="argument")
    set: dict = option(
        {}, "with describe: an option of the table, such as data.target=price; may be repeated"
    )


def run(options: DataOptions) -> None:
    """List, fetch or check."""
    if options.action not in ACTIONS:
        raise unknown_name("action of polymode data", options.action, ACTIONS)
    if options.action == "describe":
        _describe(options)
        return
    for name in options.names:
        if name not in DATASETS:
            raise unknown_name("data set", name, DATASETS)
    if options.action == "list":
        _list(options)
        return
    if not options.names:
        raise UsageError(f"Name the data sets: polymode data {options.action} NAME ...")
    for name in options.names:
        if options.action == "fetch":
            _fetch(name, options)
        else:
            for line in check_data(name):
                say(options, f"{name}: {line}")
    if options.json:
        print_json({"folder": str(data_folder()), options.action: list(options.names), "ok": True})


def _describe(options: DataOptions) -> None:
    """What is done with every column of a table, in a row each."""
    if len(options.names) != 1:
        raise UsageError("Name one table: polymode data describe FILE --set data.target=COLUMN")
    [name] = options.names
    task = load_task(name, options.set.get("data", {}))
    ready = task.splits[0].preprocessing
    if not ready.encoding:
        raise UsageError(f"{name} is not a table with named columns.")
    likelihood = make_likelihood(task.likelihood)
    rows = [(column.name, column.kind, len(column.features), column.about) for column in ready.encoding]
    classes = f"{len(ready.classes)} classes: {listed(ready.classes)}"
    meaning = classes if ready.classes else f"regression, {meaning_of(likelihood)}"
    if task.likelihoods:
        meaning += (
            "; a trial on validation rows decides whether the noise depends on the inputs or has heavy tails"
        )
    if options.json:
        columns = [dict(zip(("name", "kind", "inputs", "about"), row, strict=True)) for row in rows]
        print_json({"table": name, "target": ready.target, "meaning": meaning, "columns": columns})
        return
    split = task.splits[0]
    total = split.train.num_examples + split.test.num_examples
    table = Table("column", "kind", "inputs", "what is done", box=SIMPLE_HEAD, pad_edge=False)
    for column, kind, width, about in rows:
        table.add_row(escape(column), kind, str(width), escape(about))
    table.add_section()
    table.add_row(escape(ready.target), "target", "", escape(meaning))
    console().print(table)
    say(options, f"{total} rows, of which {split.test.num_examples} to test on")
    for remark in task.remarks:
        say(options, remark)
    settings = {"target": ready.target} | options.set.get("data", {})
    again = CompareOptions(data=name, set={"data": settings})
    say(options, f"next     {command_line('compare', again)}")


def _list(options: DataOptions) -> None:
    rows = [
        (
            name,
            dataset.summary,
            "built in" if not dataset.files else "here" if is_ready(dataset) else "to fetch",
        )
        for name, dataset in DATASETS.items()
    ]
    if options.json:
        content = [dict(zip(("name", "summary", "state"), row, strict=True)) for row in rows]
        print_json({"folder": str(data_folder()), "data": content})
        return
    table = Table("data set", "what it is", "state", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console().print(table)
    say(options, f"folder: {data_folder()} (POLYMODE_DATA). polymode data fetch NAME downloads one.")
    say(options, "Tables, texts, folders of images and package.module:callable work wherever a name does.")


def _fetch(name: str, options: DataOptions) -> None:
    show = sys.stderr.isatty() and not (options.quiet or options.json)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        tasks: dict[str, TaskID] = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=None)
            progress.update(tasks[file], completed=done, total=total)

        fetch_data(name, progress=report)
    say(options, f"{name}: ready in {data_folder()}")
