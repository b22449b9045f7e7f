"""``polymode data``: the data sets that have a name; fetch and check them."""

import sys
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from polymode.application.cli.options import ScreenOptions, UsageError, option
from polymode.application.cli.output import console, print_json, say
from polymode.application.datasets.catalogue import DATASETS
from polymode.application.datasets.downloads import data_folder
from polymode.application.datasets.loading import check_data, fetch_data, is_ready
from polymode.errors import unknown_name

ABOUT = """List the data sets that have a name, fetch them from their official addresses, or check them.

They lie in the folder that POLYMODE_DATA names (default: ~/.cache/polymode/data)."""


@dataclass(frozen=True)
class DataOptions(ScreenOptions):
    """Options of ``polymode data``."""

    action: str = option("list", "list, fetch or check", place="argument")
    names: tuple[str, ...] = option((), "data sets", place="argument")


def run(options: DataOptions) -> None:
    """List, fetch or check."""
    if options.action not in ("list", "fetch", "check"):
        raise unknown_name("action of polymode data", options.action, ("list", "fetch", "check"))
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
