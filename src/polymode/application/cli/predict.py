"""``polymode predict``: what a finished run says about new examples, and how sure it is."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from torch import Tensor

from polymode.application.cli.options import AVERAGE, ComputingOptions, UsageError, option
from polymode.application.cli.output import console, print_json, say
from polymode.application.cli.runs import StoredRun, seeded
from polymode.application.datasets.new_rows import ROW, UNLIKE
from polymode.errors import CheckpointError, InputError
from polymode.posteriors.base import Averaged
from polymode.storage import write_bytes, write_text
from polymode.training.loop.arithmetic import with_threads

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
    kind = Path(options.out).suffix
    if options.out and kind not in (".csv", ".npz"):
        raise UsageError(f"--out {options.out!r} must end in .csv or .npz.")
    stored = StoredRun.open(options.run, options.model, [options.data], trust=options.trust)
    posterior = stored.calibrated(
        stored.posterior(options.posterior), options.posterior, options.num_draws, now=options.calibrate
    )
    inputs, about = stored.inputs(options.data, options.posterior, _names(options.keep))
    familiarity = stored.familiarity(options.posterior)
    # Where a predictive has none, the default asks for nothing.
    levels = _levels(options.quantiles) if posterior.network.likelihood.levels else ()
    with with_threads(options.threads or stored.threads):
        predictive = posterior.predict(
            inputs,
            options.num_draws if posterior.num_members is None else None,
            seeded(options.seed),
            quantiles=levels,
            average=options.average,  # type: ignore[arg-type]  # one of its choices
        )
    ready = stored.preprocessing(options.posterior)
    try:
        columns = predictive.table(classes=ready.classes, shift=ready.target_shift, scale=ready.target_scale)
    except InputError as error:
        raise CheckpointError(f"The folder {options.run} is damaged: {error}") from error
    for name in about.keys() & columns.keys():
        raise UsageError(
            f"--keep {name}: the predictions have a column of that name. Rename it in the table."
        )
    unlike = {UNLIKE: about.pop(UNLIKE)} if UNLIKE in about else {}
    if familiarity is not None and isinstance(inputs, Tensor):
        unlike = {STRANGENESS: familiarity.strangeness(inputs).numpy()} | unlike
    columns = about | columns | {name: values for name, values in unlike.items() if name not in about}
    if kind == ".npz":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **columns)  # type: ignore[arg-type]  # names are arrays
        write_bytes(Path(options.out).resolve(), buffer.getvalue())
    elif options.out:
        write_text(Path(options.out).resolve(), _csv(columns))
    elif not options.json:
        print(_csv(columns), end="")
        return
    if options.json:
        print_json({name: values.tolist() for name, values in columns.items()})
    else:
        count = len(next(iter(columns.values())))
        say(options, f"{count} predictions in {options.out}: {', '.join(columns)}")
        doubt = columns.get("entropy", columns.get("std"))
        if doubt is not None:  # several outputs have a column each
            order = np.argsort(doubt)[::-1][:3]
            rows, first = (columns[ROW][order], 1) if ROW in columns else (order, 0)
            console().print(f"least sure: rows {', '.join(map(str, rows.tolist()))} (counted from {first})")
        if STRANGENESS in columns:
            strange = (columns[STRANGENESS] > 1) | (columns[UNLIKE] != "")
            say(
                options,
                f"unlike the training data: {int(strange.sum())} of {count} rows, with a {STRANGENESS} above "
                f"1 (1 % of training rows lie beyond it) or columns named in {UNLIKE!r}",
            )


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if ROW in names:
        raise UsageError(f"--keep {ROW}: the predictions have a column of that name. Rename it in the table.")
    return names


def _levels(text: str) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--quantiles {text!r}: write numbers with commas, such as 0.05,0.95.") from None
    if not all(0 < level < 1 for level in levels):
        raise UsageError(f"--quantiles {text!r}: levels lie between 0 and 1.")
    return levels


def _csv(columns: dict[str, np.ndarray]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_harmless(name) for name in columns])
    for row in zip(*(values.tolist() for values in columns.values()), strict=True):
        writer.writerow([f"{value:.8g}" if isinstance(value, float) else _harmless(value) for value in row])
    return stream.getvalue()


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula, with an apostrophe before it; not so numbers."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
