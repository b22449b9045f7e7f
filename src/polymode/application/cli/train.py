"""``polymode train``: one method on one data set and network."""

from collections.abc import Sequence
from dataclasses import dataclass

from polymode.application.cli.jobs import (
    Job,
    JobOptions,
    check_budget,
    how_to_run,
    load_job,
    make_methods,
    observer_maker,
    run_folder,
    settled,
)
from polymode.application.cli.options import UsageError, config_of, option
from polymode.application.cli.output import (
    console,
    findings_lines,
    posterior_table,
    print_json,
    reporter_of,
    say,
)
from polymode.application.cli.ranks import joined, local_device
from polymode.application.cli.runs import StoredRun
from polymode.application.comparison import (
    Judging,
    Replicate,
    fit_replicates,
    judge_all,
    learned_from,
    replicates_of,
    require_validation,
    stated,
)
from polymode.imports import is_import
from polymode.likelihoods import make_likelihood
from polymode.methods import make_method
from polymode.posteriors import Posterior
from polymode.posteriors.particles import BlockPosterior
from polymode.training.contract import describe
from polymode.training.keeping.progress import Silent
from polymode.training.loop.settings import Keeping

ABOUT = """Train one method and keep its posterior in a run folder.

The same command goes on where it was cut. polymode evaluate and polymode predict take the folder."""


@dataclass(frozen=True)
class TrainOptions(JobOptions):
    """Options of ``polymode train``."""

    method: str | dict = option("deep_ensemble", "method: see polymode methods", metavar="METHOD")
    epochs: int | None = option(None, "epochs of each chain")
    budget: float | None = option(None, "member-epochs in all, instead of epochs")
    initial: str = option(
        "",
        "folder of a finished run: begin at its networks, with a fresh optimiser and schedule",
        metavar="RUN",
    )

    calibrate: bool = option(
        False, "calibrate on validation rows: evaluate and predict then take the calibrated posterior"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.budget is not None:
            raise UsageError("--epochs and --budget are two ways to say one thing: give one.")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"--epochs must be at least 1, got {self.epochs}.")
        check_budget(self.budget)


def run(options: TrainOptions) -> None:
    """Train, judge, say where everything is."""
    name = make_method(options.method).name
    job = load_job(options)
    method = make_methods({name: options.method}, options.set, job.task.training)[name]
    if options.epochs is None:
        suggested = max(job.task.suggested_budget, method.least_budget)
        method, epochs = method.for_budget(options.budget or suggested)
    else:
        epochs = options.epochs
    identity = config_of(options, without=("budget",)) | {
        "model": job.model_name,
        "method": describe(method),
        "epochs": epochs,
        "set": {k: v for k, v in options.set.items() if k in ("data", "model")},
    }
    if options.calibrate:
        require_validation(job.task, "calibrate")
        if method.reference:
            raise UsageError(f"--calibrate takes held-out rows, and {method.name} is trained on all of them.")
    folder = run_folder(options.run, "train", [options.data, job.model_name, method.name], identity)
    Keeping(run_dir=folder, resume=True).folder()  # a folder of something else is refused before any work
    trial = max(1, round((options.budget or job.task.suggested_budget) / 5))
    with joined() as ranks:
        reporter = reporter_of(options) if ranks.is_first else Silent()
        reporter.say(job.described())
        with ranks.first_one_first():
            job = settled(job, options, job.task.training, trial, folder, reporter)
        replicates = replicates_of(job.task, options.all_seeds(job.task))
        initial = _posteriors_of(options, job, replicates) if options.initial else None
        how = how_to_run(options)
        how["data_parallel"] = ranks.size > 1
        if ranks.size > 1 and options.device == "cuda":
            how["device"] = local_device()
        try:
            posteriors = fit_replicates(
                method,
                job.model,
                replicates,
                folder,
                likelihood=make_likelihood(job.task.likelihood),
                epochs=epochs,
                **how,
                title=method.name,
                options=identity,
                network=job.network,
                reporter=reporter,
                observer=observer_maker(options)(folder) if ranks.is_first else None,
                initial=initial,
            )
        finally:
            reporter.close()
    if not ranks.is_first:
        return  # the first one judges and tells
    try:
        judging = Judging(
            options.num_draws, options.calibration, threads=options.threads, calibrate=options.calibrate
        )
        known = learned_from(method, replicates)
        judged = judge_all(posteriors, known, folder, job.task.ood, judging, reporter, method.name)
    finally:
        reporter.close()
    if options.json:
        print_json({"folder": str(folder), "epochs": epochs, "replicates": [r["scores"] for r in judged]})
        return
    spent = sum(p.record["member_epochs"] for p in posteriors)
    title = (
        f"{stated(method.name, describe(method))} on {job.task.name}: {spent:g} member-epochs, test scores"
    )
    scores = [replicate["scores"] for replicate in judged]
    after = [replicate["calibrated"] for replicate in judged] if options.calibrate else []
    console().print(posterior_table(title, make_likelihood(job.task.likelihood), scores, after))
    for line in findings_lines(posteriors[0].record["findings"]):
        say(options, line)
    say(options, f"run      {folder} (all scores: {folder}/scores.json)")
    own = f" --model {job.model_name}" if is_import(job.model_name) else ""
    if method.name in ("trajectory", "tunnel") and isinstance(posteriors[0], BlockPosterior):
        say(options, f"next     polymode landscape {folder}{own}")
        return
    say(options, f"next     polymode predict {folder} NEW_DATA{own} --out predictions.csv")


def _posteriors_of(options: TrainOptions, job: Job, replicates: Sequence[Replicate]) -> list[Posterior]:
    """The posteriors of the run to go on from, one for each split and seed."""
    given = [options.data, options.ood]
    stored = StoredRun.open(options.initial, job.model_name, given, trust=options.trust)
    if stored.num_posteriors != len(replicates):
        raise UsageError(
            f"--initial {options.initial} has {stored.num_posteriors} posteriors, one for each of its splits "
            f"and seeds, and there are {len(replicates)} here: train with the same --data and --seeds."
        )
    for index, replicate in enumerate(replicates):
        before, now = stored.preprocessing(index).config(), replicate.data.preprocessing.config()
        differ = [name for name in now if before[name] != now[name]]
        if differ:
            raise UsageError(
                f"--initial {options.initial} was trained on examples that were prepared otherwise (their "
                f"{differ[0]} differs): its networks would see other numbers. Train on the same data."
            )
    return [stored.posterior(index) for index in range(len(replicates))]
