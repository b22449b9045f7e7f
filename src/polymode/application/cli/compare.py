"""``polymode compare``: which method is worth its price on this data."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from polymode.application.cli.jobs import (
    JobOptions,
    how_to_run,
    load_job,
    load_reference,
    make_methods,
    observer_maker,
    run_folder,
    wanted_methods,
)
from polymode.application.cli.options import UsageError, command_line, config_of, option
from polymode.application.cli.output import console, price_table, print_json, reporter_of, say, scores_table
from polymode.application.comparison import COMPARISON_FILE, Judging, compare, noise_floor_text
from polymode.application.report import write_page
from polymode.methods import COMPARED
from polymode.storage import entry, read_document
from polymode.training.contract import Method, describe

ABOUT = """Train several methods on one data set and network at the same price, and show what each is worth.

With no options: handwritten digits and a small CNN. The same command goes on where it was cut, and
reads finished runs back."""


@dataclass(frozen=True)
class CompareOptions(JobOptions):
    """Options of ``polymode compare``."""

    methods: str = option(
        "",
        f"names with commas (default: {','.join(COMPARED)}); all; label=name to have one method twice",
        metavar="NAMES",
    )
    budget: float | None = option(
        None, "member-epochs (gradient passes over the data) each method spends (default: the data's)"
    )
    reference: str = option(
        "",
        "file of polymode reference, or FILE.npz:NAME with probabilities: adds distances to it to the table",
        metavar="FILE",
        place="screen",
    )
    seeds: int = option(3, "number of seeds: all are trained side by side")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and not 1 <= self.budget < math.inf:
            raise UsageError(f"--budget must be at least 1 member-epoch, got {self.budget}.")


def _earlier_methods(folder: Path) -> dict[str, str]:
    """Methods that a comparison in the folder has already: those that are asked for now join them."""
    path = folder / COMPARISON_FILE
    if not path.exists():
        return {}
    options = entry(read_document(path, "comparison"), "options", dict, path)
    return wanted_methods(str(options.get("methods", "")), ())


def run(options: CompareOptions) -> None:
    """Compare, print the tables, write the page."""
    wanted = wanted_methods(options.methods, COMPARED)
    job = load_job(options)
    reference = load_reference(options.reference, job.task)
    budget = options.budget or job.task.suggested_budget
    without_methods = config_of(options, without=["methods"]) | {"model": job.model_name, "budget": budget}
    folder = run_folder(options.run, "compare", [options.data, job.model_name], without_methods)
    wanted = _earlier_methods(folder) | wanted
    methods = make_methods(wanted, options.set, job.task.training)
    labelled = ",".join(name if name == label else f"{label}={name}" for label, name in wanted.items())
    identity = without_methods | {"methods": labelled}
    reporter = reporter_of(options, num_runs=len(methods))
    reporter.say(job.described())

    def run_options(method: Method, epochs: int) -> dict:
        """The options of ``polymode train`` that make one of the runs again."""
        kept = {k: v for k, v in without_methods.items() if k not in ("budget", "set")}
        own = {k: v for k, v in options.set.items() if k in ("data", "model")}
        return kept | {"method": describe(method), "epochs": epochs, "set": own}

    try:
        comparison = compare(
            job.task,
            job.model,
            methods,
            folder,
            budget=budget,
            seeds=options.all_seeds,
            **how_to_run(options),
            judging=Judging(options.num_draws, options.calibration, reference, options.threads),
            options=identity,
            run_options=run_options,
            network=job.network,
            reporter=reporter,
            observers=observer_maker(options),
        )
    finally:
        reporter.close()
    page = write_page(
        comparison,
        folder / "report.html",
        command=command_line("compare", replace(options, methods=labelled)),
    )
    if options.json:
        print_json(comparison.config() | {"folder": str(folder), "page": str(page)})
        return
    out = console()
    out.print(scores_table(comparison))
    if reference is not None:
        say(options, noise_floor_text(reference))
    if len(comparison.results) > 1:
        out.print(price_table(comparison))
    if comparison.repetitions:
        say(
            options,
            f"± is one standard error over {comparison.repetitions}; * is the best mean; a gain below two "
            "standard errors is undecided.",
        )
    elif len(comparison.results) > 1:
        say(options, "One split, one seed: every gain is undecided. --seeds 3 gives standard errors.")
    say(options, f"results  {folder}/results.csv, {folder}/results.json")
    say(options, f"page     {page}")
