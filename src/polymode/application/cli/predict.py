"""``polymode predict``: what a finished run says about new examples, and how sure it is."""

import contextvars
import queue
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from torch import Tensor

from polymode.application.cli.options import AVERAGE, ComputingOptions, UsageError, option
from polymode.application.cli.output import console, reporter_of, say
from polymode.application.cli.predictions import csv_on_screen, json_on_screen, predictions_file
from polymode.application.cli.runs import StoredRun, seeded
from polymode.application.datasets.new_rows import ROW, UNLIKE
from polymode.data.familiarity import Familiarity
from polymode.errors import CheckpointError, InputError
from polymode.posteriors import Posterior
from polymode.posteriors.base import Averaged
from polymode.training.keeping.progress import LINE_SECONDS
from polymode.training.loop.arithmetic import with_threads
from polymode.trees import length

Item = TypeVar("Item")
LEAST_SURE = 3  # rows that are named in the end
STRANGENESS = "strangeness"  # how far a row is from training rows

ABOUT = """Predict new examples with a finished run: what is predicted and how sure it is.

Classes: label, confidence, entropy (all doubt), mutual_information (disagreement of the members), and the
probability of every class; where tokens are predicted, a row each. Regressions: mean, std (all doubt),
member_std (disagreement), quantiles. Predictions of a table begin with the number of the row (from 1, the
first below the column names) and the columns that --keep names, and end with what tells rows unlike the
training data: strangeness, the distance to the nearest training rows over that which 1 % of them exceed
(above 1 a row is unlike them), and unlike, the columns whose values no training row has (new categories, gaps
where there were none, numbers and dates more than a tenth of the range outside of it)."""


@dataclass(frozen=True)
class PredictOptions(ComputingOptions):
    """Options of ``polymode predict``."""

    run: str = option("", "folder of the run", place="argument")
    data: str = option(
        "",
        "examples: a table (.csv, .tsv, .parquet, .feather, .xlsx, .npz), an image or a folder of them, a "
        "data set's name (its test inputs), or package.module:callable",
        place="argument",
    )
    out: str = option("", "file to write: .csv or .npz (default: CSV on standard output)")
    keep: str = option("", "columns of the new table to pass on, in front, with commas: id,name")
    quantiles: str = option("0.05,0.95", "levels of the quantiles of a regression, with commas")
    posterior: int = option(0, "which posterior of a run over several splits or seeds, counted from 0")
    model: str = option(
        "", "the network of the run, where it is your own code: package.module:callable", metavar="MODEL"
    )
    trust: bool = option(
        False, "import whatever code the run's folder names: only for folders you trust", place="screen"
    )
    num_draws: int = option(100, "networks to draw from a posterior that can draw any number")
    seed: int = option(0, "seed of these draws")
    average: str = option("predictions", AVERAGE, choices=get_args(Averaged))
    calibrate: bool = option(
        False, "calibrate on the run's own validation rows, unless it was trained with --calibrate"
    )


def run(options: PredictOptions) -> None:
    """Predict and write one row an example."""
    if not options.run or not options.data:
        raise UsageError("Name the folder of a run and the examples: polymode predict RUN DATA.")
    if options.num_draws < 1:
        raise UsageError(f"--num-draws must be at least 1, got {options.num_draws}.")
    if not 0 <= options.seed < 2**64:
        raise UsageError(f"--seed must be from 0 to 2**64 − 1, got {options.seed}.")
    if options.out and Path(options.out).suffix not in (".csv", ".npz"):
        raise UsageError(f"--out {options.out!r} must end in .csv or .npz.")
    out = _out(options)
    keep = _names(options.keep)
    stored = StoredRun.open(options.run, options.model, [options.data], trust=options.trust)
    posterior = stored.calibrated(
        stored.posterior(options.posterior), options.posterior, options.num_draws, now=options.calibrate
    ).held()
    summary, clock = _Summary(), _Clock(options)
    with ExitStack() as stack:
        writers = []
        if out is not None:
            writers.append(stack.enter_context(predictions_file(out, Path(options.out).suffix, keep)))
        if options.json:
            writers.append(stack.enter_context(json_on_screen()))
        elif not options.out:
            writers.append(stack.enter_context(csv_on_screen(keep)))
        # Reading, computing and writing go on side by side: each is bound by another part of the machine.
        for columns in stack.enter_context(closing(ahead(_predicted(options, stored, posterior, keep)))):
            for write in writers:
                write(columns)
            summary.add(columns)
            clock.tell(summary.count)
    if options.out and not options.json:
        summary.say(options)


def _predicted(
    options: PredictOptions, stored: StoredRun, posterior: Posterior, keep: Sequence[str]
) -> Iterator[dict[str, np.ndarray]]:
    """The columns of all examples, some rows at a time."""
    familiarity = stored.familiarity(options.posterior)
    ready = stored.preprocessing(options.posterior)
    # Where a predictive has none, the default asks for nothing.
    levels = _levels(options.quantiles) if posterior.network.likelihood.levels else ()
    first = 0
    with (
        ThreadPoolExecutor(1) as beside,
        with_threads(options.threads or stored.threads),
        closing(ahead(stored.inputs(options.data, options.posterior, keep))) as examples,
    ):
        for inputs, about in examples:
            distances = None
            if familiarity is not None and isinstance(inputs, Tensor):
                distances = beside.submit(_strangeness, familiarity, inputs)
            predictive = posterior.predict(
                inputs,
                options.num_draws if posterior.num_members is None else None,
                seeded(options.seed),  # every part is predicted with the same draws
                quantiles=levels,
                average=options.average,  # type: ignore[arg-type]  # one of its choices
                first_example=first,
            )
            first += length(inputs)
            try:
                columns = predictive.table(
                    classes=ready.classes, shift=ready.target_shift, scale=ready.target_scale
                )
            except InputError as error:
                raise CheckpointError(f"The folder {options.run} is damaged: {error}") from error
            for name in about.keys() & columns.keys():
                raise UsageError(
                    f"--keep {name}: the predictions have a column of that name. Rename it in the table."
                )
            unlike = {UNLIKE: about.pop(UNLIKE)} if UNLIKE in about else {}
            if distances is not None:
                unlike = {STRANGENESS: distances.result()} | unlike
            yield about | columns | unlike


def _strangeness(familiarity: Familiarity, inputs: Tensor) -> np.ndarray:
    with with_threads(1):  # it runs beside the networks, in blocks that are too small to be shared
        return familiarity.strangeness(inputs).numpy()


class _Summary:
    """What is said of all predictions in the end."""

    def __init__(self) -> None:
        self.count = self.num_strange = 0
        self.names: list[str] = []
        self._doubt, self._rows = np.zeros(0), np.zeros(0, dtype=np.int64)

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        self.names = list(columns)
        number = len(next(iter(columns.values())))
        rows = columns.get(ROW, np.arange(self.count, self.count + number))
        self.count += number
        doubt = columns.get("entropy", columns.get("std"))
        if doubt is not None:  # several outputs have a column each
            self._doubt, self._rows = np.append(self._doubt, doubt), np.append(self._rows, rows)
            order = np.argsort(self._doubt, kind="stable")[::-1][:LEAST_SURE]
            self._doubt, self._rows = self._doubt[order], self._rows[order]
        if STRANGENESS in columns:
            is_strange = columns[STRANGENESS] > 1
            if UNLIKE in columns:
                is_strange = is_strange | (columns[UNLIKE] != "")
            self.num_strange += int(is_strange.sum())

    def say(self, options: PredictOptions) -> None:
        say(options, f"{self.count} predictions in {options.out}: {', '.join(self.names)}")
        if len(self._rows):
            rows, first = ", ".join(map(str, self._rows.tolist())), 1 if ROW in self.names else 0
            console().print(f"least sure: rows {rows} (counted from {first})")
        if STRANGENESS in self.names:
            say(
                options,
                f"unlike the training data: {self.num_strange} of {self.count} rows, with a {STRANGENESS} "
                f"above 1 (1 % of training rows lie beyond it) or columns named in {UNLIKE!r}",
            )


class _Clock:
    """Tells every few seconds how far it has come."""

    def __init__(self, options: PredictOptions) -> None:
        self.reporter = reporter_of(options)
        self.began = self.told = time.monotonic()

    def tell(self, count: int) -> None:
        now = time.monotonic()
        if now - self.told >= LINE_SECONDS:
            self.told = now
            self.reporter.say(f"{count:,} rows predicted, {count / (now - self.began):,.0f} a second")


def ahead(items: Iterator[Item], number: int = 2) -> Generator[Item, None, None]:
    """The same items, made in a thread of their own, a few before they are asked for."""
    made: queue.Queue[tuple[bool, Any]] = queue.Queue(number)
    ended = threading.Event()

    def hand_over(more: bool, value: Any) -> None:
        while not ended.is_set():
            with suppress(queue.Full):
                made.put((more, value), timeout=0.1)
                return

    def make() -> None:
        try:
            for item in items:
                hand_over(True, item)
                if ended.is_set():
                    break
            hand_over(False, None)
        except BaseException as error:
            hand_over(False, error)

    context = contextvars.copy_context()  # what may be imported, for one
    maker = threading.Thread(target=context.run, args=(make,), daemon=True)
    maker.start()
    try:
        while True:
            more, value = made.get()
            if not more:
                break
            yield value
    finally:
        ended.set()
        maker.join()
        if isinstance(items, Generator):
            items.close()
    if value is not None:
        raise value


def _out(options: PredictOptions) -> Path | None:
    """The file to write, wherever links lead; not the one that is read."""
    if not options.out:
        return None
    try:
        out = Path(options.out).resolve()
        is_read = out.exists() and Path(options.data).exists() and out.samefile(options.data)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"--out {options.out!r} cannot be written: {error}. Choose another name.") from None
    if is_read:
        raise UsageError(f"--out {options.out} is the file with the examples: choose another name.")
    if out.exists() and not out.is_file():  # a folder, a device, a pipe: it would be replaced
        raise UsageError(f"--out {options.out} is there, and is no ordinary file: choose another name.")
    return out


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in (ROW, STRANGENESS, UNLIKE):
        if name in names:
            raise UsageError(
                f"--keep {name}: the predictions have a column of that name. Rename it in the table."
            )
    return names


def _levels(text: str) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--quantiles {text!r}: write numbers with commas, such as 0.05,0.95.") from None
    if not all(0 < level < 1 for level in levels):
        raise UsageError(f"--quantiles {text!r}: levels lie between 0 and 1.")
    return levels
