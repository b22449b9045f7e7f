"""``polymode compare``: which method is worth its price on this data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from torch import Tensor

from polymode.application.cli.jobs import (
    Job,
    JobOptions,
    check_budget,
    how_to_run,
    load_job,
    load_reference,
    make_methods,
    observer_maker,
    run_folder,
    settled,
    wanted_methods,
)
from polymode.application.cli.options import UsageError, command_line, config_of, option
from polymode.application.cli.output import (
    calibration_table,
    console,
    price_table,
    print_json,
    reporter_of,
    say,
    scores_table,
)
from polymode.application.cli.train import TrainOptions
from polymode.application.comparison import (
    COMPARISON_FILE,
    Comparison,
    Equal,
    Judging,
    alike_texts,
    baselines_for,
    claim,
    compare,
    noise_floor_text,
    require_validation,
    verdict_of,
)
from polymode.application.comparison.baselines import CLASSIFICATION_BASELINES, REGRESSION_BASELINES
from polymode.application.comparison.pilot import meaning_of
from polymode.application.datasets import frames
from polymode.application.recipes import suited, why_not_unasked, with_common
from polymode.application.report import write_page
from polymode.data import Task
from polymode.errors import unknown_name
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.methods import COMPARED, COMPARED_WHERE_SMALL, make_method
from polymode.options import options_of
from polymode.storage import entry, read_document
from polymode.training.contract import Method, describe
from polymode.training.keeping.progress import Reporter

ABOUT = """Train several methods on one data set and network at the same price, and show what each is worth.

With no options: handwritten digits and a small CNN. The same command goes on where it was cut, and
reads finished runs back."""


@dataclass(frozen=True)
class CompareOptions(JobOptions):
    """Options of ``polymode compare``."""

    methods: str = option(
        "",
        f"names with commas (default: {','.join(COMPARED)}, and {','.join(COMPARED_WHERE_SMALL)} where "
        "network and data are small and no budget is given); all; label=name to have one method twice",
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
    equal: Equal = option(
        "budget",
        "what methods have in common: the budget, or the epochs of each chain (budget / 5, unless --epochs)",
        choices=get_args(Equal),
    )
    epochs: int | None = option(None, "with --equal epochs: epochs of each chain")
    baselines: str = option(
        "all",
        "scikit-learn's models beside the methods: all that suit the data, names with commas, or none",
        metavar="NAMES",
    )
    calibrate: bool = option(False, "calibrate on validation rows, and show scores before and after")
    seeds: int = option(
        0, "number of seeds, all trained side by side; 0 means 3 for data with one split, 1 for several"
    )

    @property
    def fewest_seeds(self) -> int:
        return 0

    def all_seeds(self, task: Task) -> list[int]:
        number = self.seeds or (3 if len(task.splits) == 1 else 1)
        return list(range(self.seed, self.seed + number))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is not None) and self.equal != "epochs":
            raise UsageError("--epochs is for --equal epochs; --budget says how much all methods spend.")
        if self.epochs is not None and (self.epochs < 1 or self.budget is not None):
            raise UsageError("--epochs must be at least 1, and stands in the place of --budget.")
        check_budget(self.budget)


def _earlier_methods(folder: Path) -> dict[str, str]:
    """Methods that a comparison in the folder has already: those that are asked for now join them."""
    path = folder / COMPARISON_FILE
    if not path.exists():
        return {}
    options = entry(read_document(path, "comparison"), "options", dict, path)
    return wanted_methods(str(options.get("methods", "")), ())


def unasked_methods(options: CompareOptions, job: Job) -> tuple[dict[str, str], list[str]]:
    """Samplers that join the default methods, at a price of their own, where it can be afforded; in words."""
    found: dict[str, str] = {}
    lines: list[str] = []
    if options.methods not in ("", "all") or options.budget is not None or options.equal == "epochs":
        return found, lines
    number = len(options.all_seeds(job.task)) * len(job.task.splits)
    for name in COMPARED_WHERE_SMALL:
        method = with_common(suited(make_method(name), job.task.training), options.set.get("all", {}))
        method = make_method(method, options.set.get(name))
        why_not, can_be_named = why_not_unasked(method, job.model, job.task.splits[0].train, number)
        if why_not is None:
            found[name] = name
        else:
            advice = f"; --methods {name} adds it" if can_be_named else ""
            lines.append(f"{name}: left out, {why_not}{advice}")
    return found, lines


def run(options: CompareOptions) -> None:
    """Compare, print the tables, write the page."""
    wanted = wanted_methods(options.methods, COMPARED)
    options = with_splits(options)
    if options.reference:
        options = replace(options, validation="none")  # a posterior is that of all training rows
    job = load_job(options)
    reference = load_reference(options.reference, job.task)
    if options.calibrate:
        require_validation(job.task, "calibrate")
    _check_names(options.baselines)
    budget = options.budget or job.task.suggested_budget
    amount = budget if options.equal == "budget" else float(options.epochs or max(1, round(budget / 5)))
    without_methods = config_of(options, without=["methods"]) | {"model": job.model_name, "budget": budget}
    folder = run_folder(options.run, "compare", [options.data, job.model_name], without_methods)
    unasked, lines = unasked_methods(options, job)
    wanted = _earlier_methods(folder) | wanted | unasked
    methods = make_methods(wanted, options.set, job.task.training)
    labelled = ",".join(name if name == label else f"{label}={name}" for label, name in wanted.items())
    identity = without_methods | {"methods": labelled}
    divided = options.made_engine is not None  # all parts are worked on before the runs are joined
    reporter = reporter_of(options, num_runs=len(methods) + divided)
    for line in (job.described(), *lines):
        reporter.say(line)
    claim(folder, identity)
    job = settled(job, options, job.task.training, max(1, round(budget / 5)), folder, reporter)
    likelihood = make_likelihood(job.task.likelihood)
    baselines = _baselines(options.baselines, likelihood, job.task, reporter)

    def run_options(method: Method, epochs: int) -> dict:
        """The options of ``polymode train`` that make one of the runs again."""
        known = {each.name for each in options_of(TrainOptions)} - {"budget", "set"}
        kept = {name: value for name, value in without_methods.items() if name in known}
        kept |= {"seeds": len(options.all_seeds(job.task))}
        own = {k: v for k, v in options.set.items() if k in ("data", "model")}
        return kept | {"method": describe(method), "epochs": epochs, "set": own}

    try:
        comparison = compare(
            job.task,
            job.model,
            methods,
            folder,
            budget=amount,
            equal=options.equal,
            seeds=options.all_seeds(job.task),
            baselines=baselines,
            **how_to_run(options),
            judging=Judging(
                options.num_draws, options.calibration, reference, options.threads, options.calibrate
            ),
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
        about=f"{job.described()}; {meaning_of(likelihood)}"
        if likelihood.reads == "numbers"
        else job.described(),
    )
    verdict = verdict_of(comparison)
    if options.json:
        told = {} if verdict is None else {"verdict": verdict.config()}
        print_json(comparison.config() | told | {"folder": str(folder), "page": str(page)})
        return
    out = console()
    out.print(scores_table(comparison))
    if reference is not None:
        for line in (noise_floor_text(reference), *alike_texts(comparison)):
            say(options, line)
    if len(comparison.results) > 1:
        out.print(price_table(comparison))
    if options.calibrate:
        out.print(calibration_table(comparison))
    for line in _footnotes(comparison):
        say(options, line)
    if verdict is None:
        say(options, "no verdict: it is chosen on held-out rows, and there are none.")
    else:
        for line in verdict.lines:
            say(options, line)
    say(options, f"results  {folder}/results.csv, {folder}/results.json")
    say(options, f"page     {page}")
    if verdict is not None and wanted[verdict.recommended.label] == verdict.recommended.label:
        meant = ("data", "model", "all", verdict.recommended.label)
        settings = {name: dict(some) for name, some in options.set.items() if name in meant}
        if settings.get("data", {}).get("splits", 0) is None:
            del settings["data"]["splits"]
        following = TrainOptions(
            data=options.data,
            model=options.model,
            likelihood=options.likelihood,
            validation=options.validation,
            method=verdict.recommended.label,
            set={name: some for name, some in settings.items() if some},
            calibrate=bool(likelihood.learned_by_calibration),
        )
        say(options, f"next     {command_line('train', following)}")


def with_splits(options: CompareOptions) -> CompareOptions:
    """The options with several splits of a small table: the test rows of one say too little."""
    given = options.set.get("data", {})
    if Path(options.data).suffix.lower() not in frames.SUFFIXES or "splits" in given or options.reference:
        return options
    return replace(options, set=options.set | {"data": given | {"splits": None}})


def _check_names(baselines: str) -> None:
    """Refuse baselines that nobody knows before anything is trained."""
    known = {*REGRESSION_BASELINES, *CLASSIFICATION_BASELINES}
    for name in () if baselines in ("all", "none") else baselines.split(","):
        if name.strip() and name.strip() not in known:
            raise unknown_name("baseline", name.strip(), known)


def _baselines(text: str, likelihood: Likelihood, task: Task, reporter: Reporter) -> tuple[str, ...]:
    """The baselines that are wanted and can be had."""
    known = baselines_for(likelihood)
    examples = next(iter(task.splits[0].train.in_order(1)))
    is_flat = (
        isinstance(examples.inputs, Tensor)
        and examples.inputs.ndim == 2
        and examples.inputs.is_floating_point()
        and examples.targets.ndim == 1
    )
    if text == "none":
        return ()
    if text == "all":
        return known if is_flat else ()
    if not known or not isinstance(examples.inputs, Tensor) or examples.targets.ndim != 1:
        reporter.say(f"baselines: none suit the likelihood {likelihood.kind!r} and the inputs of {task.name}")
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise unknown_name(f"baseline for {task.name}", name, known)
    return names


def _footnotes(comparison: Comparison) -> list[str]:
    """How the tables are to be read."""
    lines = []
    if comparison.repetitions:
        lines.append(
            f"± is one standard error over {comparison.repetitions}; * is the best mean; a gain below two "
            "standard errors is undecided."
        )
    elif len(comparison.results) > 1:
        lines.append("One split, one seed: every gain is undecided. --seeds 3 gives standard errors.")
    marked = [result for result in comparison.results if result.mark]
    for mark, advice in (
        ("over-trained", "its validation NLL ends above its best epoch, and it does not go back to that"),
        ("under-trained", "its validation NLL was still falling when the budget was spent: raise --budget"),
    ):
        names = ", ".join(result.label for result in marked if result.mark == mark)
        if names:
            lines.append(f"{mark}: {names} ({advice}).")
    return lines
