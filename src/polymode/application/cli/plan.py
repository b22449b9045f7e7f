"""``polymode plan``: what a comparison will cost, before it is begun."""

import json
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table

from polymode.application.cli.compare import CompareOptions, unasked_methods, with_splits
from polymode.application.cli.jobs import Job, how_to_run, load_job, make_methods, wanted_methods
from polymode.application.cli.options import UsageError, option
from polymode.application.cli.output import console, print_json, reporter_of, say
from polymode.application.comparison import data_of, judge, learned_from, replicates_of, sized_for
from polymode.application.comparison.compare import typical_rows
from polymode.application.comparison.planning import Measured, MethodPlan, Plan, Size, divided
from polymode.errors import InputError, PolymodeError, require
from polymode.likelihoods import make_likelihood
from polymode.methods import COMPARED
from polymode.posteriors import Posterior
from polymode.storage import finite
from polymode.training.contract import Method
from polymode.training.keeping.progress import Reporter
from polymode.training.loop.fit import prepared
from polymode.training.loop.forecast import TRIAL_SECONDS, Judged, forecast
from polymode.training.loop.run import peak_memory
from polymode.training.loop.settings import ComputingSettings

ABOUT = """Measure a few steps of every method, and say what a comparison with the same options will cost:
memory, disk, member-epochs and time, in one process and on any number of workers.

It takes the options of polymode compare, trains nothing and keeps nothing."""


@dataclass(frozen=True)
class PlanOptions(CompareOptions):
    """Options of ``polymode plan``: those of a comparison, and for whom it is planned."""

    workers: int = option(
        0, "a number of workers to tell the times of; 2, 4 and 8 unless given", metavar="N", place="screen"
    )
    trial: float = option(TRIAL_SECONDS, "seconds of steps to time, of each kind of phase", place="screen")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.trial <= 600:
            raise UsageError(f"--trial must be between 0 and 600 seconds, got {self.trial}.")

    @property
    def numbers_of_workers(self) -> list[int]:
        return sorted({1, self.workers} if self.workers else {1, 2, 4, 8})


@dataclass(frozen=True)
class _Subject:
    """What is planned: a job, its methods and what each may spend."""

    job: Job
    methods: dict[str, Method]
    amount: float
    left_out: Sequence[str]


def _subject(options: PlanOptions) -> _Subject:
    given: CompareOptions = with_splits(options)
    if given.reference:
        given = replace(given, validation="none")  # as the comparison would
    job = load_job(given)
    unasked, lines = unasked_methods(given, job)
    wanted = wanted_methods(options.methods, COMPARED) | unasked
    budget = options.budget or job.task.suggested_budget
    amount = budget if options.equal == "budget" else float(options.epochs or max(1, round(budget / 5)))
    return _Subject(job, make_methods(wanted, options.set, job.task.training), amount, lines)


def run(options: PlanOptions) -> None:
    """Measure, print the table."""
    subject, workers = _subject(options), options.numbers_of_workers
    reporter = reporter_of(options, num_runs=len(subject.methods))
    for line in (subject.job.described(), *subject.left_out):
        reporter.say(line)
    plans, refused = [], {}
    try:
        for label, method in subject.methods.items():
            try:
                plans.append(_planned(options, subject, label, method, reporter))
            except (PolymodeError, InputError) as error:
                refused[label] = " ".join(str(error).split())
    finally:
        reporter.close()
    number = len(options.all_seeds(subject.job.task)) * len(subject.job.task.splits)
    unit = "member-epochs" if options.equal == "budget" else "epochs a chain"
    title = f"plan: {subject.job.task.name}, {subject.job.model_name}, {subject.amount:g} {unit}"
    runs = f"{number} runs of each method side by side" if number > 1 else "one run of each method"
    plan = Plan(f"{title}, {runs}", plans, refused, workers)
    if options.json:
        print_json(plan.config())
        return
    for table in (_trainings(plan), _costs(plan)) if plans else ():
        console().print(table)
    for line in _footnotes(plan, subject, options):
        say(options, line)


# --- measuring, in processes of their own -----------------------------------------------------------


def _planned(
    options: PlanOptions, subject: _Subject, label: str, method: Method, reporter: Reporter
) -> MethodPlan:
    require(
        not method.needs_initial,
        f"{label} begins at networks that others have trained, and a comparison trains its own.",
    )
    sized, _ = sized_for(method, subject.amount, options.equal)
    number = len(options.all_seeds(subject.job.task)) * len(subject.job.task.splits)
    whole = number, sized.total_chains
    most = options.numbers_of_workers[-1]
    parts = [size for n in options.numbers_of_workers for size in divided(whole, n)]
    smallest = min(parts, key=lambda size: size[0] * size[1])
    found = []
    for size in dict.fromkeys([whole, smallest]):
        share = 1 if size == whole else most
        reporter.say(f"{label}: measuring {size[0]} x {size[1]} chains")
        found.append(_in_fresh_process(options, label, size, share))
    members = found[0].forecast.num_members
    passes = options.num_draws if members is None else members
    if members and sized.chain_members and sized.chain_passes:
        passes = members * sized.chain_passes // sized.chain_members
    return MethodPlan(label, passes, *found)


def _in_fresh_process(options: PlanOptions, label: str, size: Size, share: int) -> Measured:
    """What a process finds that has done nothing else: memory that was used before is not used again."""
    threads = max(1, torch.get_num_threads() // share)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            found = pool.submit(_measured, options, label, size, threads, time.time()).result()
        except BrokenProcessPool:
            raise PolymodeError(
                "the process that measured it was ended, as systems do when there is no memory left"
            ) from None
    if isinstance(found, str):
        raise PolymodeError(found)
    return found


def _measured(options: PlanOptions, label: str, size: Size, threads: int, asked: float) -> Measured | str:
    """What a method costs, or why that cannot be told."""
    start_seconds, base = time.time() - asked, peak_memory(torch.device("cpu"))
    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the comparison itself will warn
        try:
            subject = _subject(options)
            job, method = subject.job, subject.methods[label]
            replicates = replicates_of(job.task, options.all_seeds(job.task))
            number, replicates = len(replicates), replicates[: size[0]]
            sized, epochs = sized_for(method, subject.amount, options.equal)
            computing: ComputingSettings = {**how_to_run(options), "engine": None}
            fit = prepared(
                sized,
                job.model,
                likelihood=make_likelihood(job.task.likelihood),
                epochs=epochs,
                **data_of(sized, replicates, computing.get("device")),
                **computing,
            )
            is_whole = size == (number, sized.total_chains)
            request = replace(fit.request, chains=range(size[1]))

            def judged(posteriors: Sequence[Posterior]) -> Judged:
                """The first posterior counts once, as it loads what is needed, the second for all others."""
                seconds, written = [], 0
                for posterior, each in zip(posteriors[:2], learned_from(sized, replicates), strict=False):
                    began = time.perf_counter()
                    found = judge(posterior, each.data, job.task.ood, num_draws=options.num_draws)
                    seconds.append(time.perf_counter() - began)
                    told = {"scores": found.scores, "errors": found.errors, "curves": found.curves}
                    written = sum(t.numel() * t.element_size() for t in found.predictions.values())
                    written += len(json.dumps({"replicates": [finite(told)]}, indent=2))
                written *= len(posteriors)
                with TemporaryDirectory(prefix="polymode-plan-") as folder:
                    typical_rows(replicates, Path(folder))
                    written += sum(file.stat().st_size for file in Path(folder).iterdir())
                return Judged(seconds[0] + (len(posteriors) - 1) * seconds[-1], written)

            found = forecast(
                request,
                fit.computing,
                judge=judged if is_whole else None,
                trial_seconds=options.trial,
            )
        except (PolymodeError, InputError, RuntimeError, MemoryError) as error:
            return f"{error}" or type(error).__name__
    return Measured(found, 0 if request.device.type == "cuda" else base, start_seconds)


# --- the table --------------------------------------------------------------------------------------


def _trainings(plan: Plan) -> Table:
    """What will be done."""
    kinds = ("chains", "members", "epochs", "member-\nepochs", "backend,\nthreads", "ms a\nstep")
    table = _table(plan.title, (*kinds, "passes to\npredict"))
    for method in plan.methods:
        found = method.whole.forecast
        table.add_row(
            escape(method.label),
            f"{found.num_data_sets} x {found.num_chains}"
            if found.num_data_sets > 1
            else f"{found.num_chains}",
            "any" if found.num_members is None else f"{found.num_members:,}",
            f"{found.epochs:,}",
            f"{found.member_epochs * found.num_data_sets:,.0f}",
            f"{found.execution.backend}, {found.execution.threads}",
            f"{1000 * found.step_seconds:,.3g}{'' if all(p.measured for p in found.phases) else '†'}",
            f"{method.passes:,}",
        )
    table.add_section()
    table.add_row("all", "", "", "", f"{plan.config()['total']['member_epochs']:,.0f}", "", "", "")
    return table


def _costs(plan: Plan) -> Table:
    """What it will take."""
    last = plan.workers[-1]
    several = [f"{n}\nworkers" for n in plan.workers if n > 1]
    memory = ["memory"] if last == 1 else ["memory,\n1 worker", f"each of\n{last}"]
    first = "time,\n1 worker" if several else "time"
    table = _table("", (first, *several, *memory, "disk,\nrunning", "disk,\nfinished"))
    for method in plan.methods:
        found = method.whole.forecast
        table.add_row(
            escape(method.label),
            *(duration(method.seconds_on(n)) for n in plan.workers),
            *(size(method.memory_on(n)) for n in dict.fromkeys((1, last))),
            size(found.disk_running),
            size(found.disk_finished),
        )
    total = plan.config()["total"]
    table.add_section()
    table.add_row(
        "all, judged",
        *(duration(plan.seconds_on(n)) for n in plan.workers),
        *(size(max(m.memory_on(n) for m in plan.methods)) for n in dict.fromkeys((1, last))),
        size(total["disk_running"]),
        size(total["disk_finished"]),
    )
    return table


def _table(title: str, titles: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for each in ("method", *titles):
        justify: JustifyMethod = "left" if each == "method" else "right"
        table.add_column(each, justify=justify, vertical="bottom", no_wrap=True)
    return table


def _footnotes(plan: Plan, subject: _Subject, options: PlanOptions) -> list[str]:
    """What was measured, what was not, and what could not be."""
    lines = [f"{label}: not planned, {why}" for label, why in plan.refused.items()]
    if not plan.methods:
        return lines
    base = max(method.whole.base_bytes for method in plan.methods)
    lines.append(
        f"measured: {options.trial:g} s of steps of each kind of phase, with ends of epochs and validation; "
        "setting up, a checkpoint, the posteriors and their judging; in a fresh process for each method "
        f"({size(base)} of its memory is there before any data are read; what judging holds is not counted)."
    )
    if any(method.part for method in plan.methods):
        lines.append(
            "workers: the smallest part was measured, too; others lie on a line in between. A worker is "
            "taken to compute as this machine does with its share of threads, undisturbed by the others; "
            "judging follows in one process."
        )
    if any(not phase.measured for m in plan.methods for phase in m.whole.forecast.phases):
        lines.append("† some phase could not be begun by itself: its steps count as those before it.")
    if subject.job.task.splits[0].validation is not None:
        lines.append("Trainings that stop early, when held-out rows no longer improve, cost less than this.")
    left_out = ["starting Python", "the page (some 5 MB)"]
    if subject.job.task.likelihoods:
        left_out.append("the trial that chooses the noise model of a regression by training one network")
    if options.baselines != "none":
        left_out.append("scikit-learn's baselines beside a table")
    lines.append(f"Not counted: {', '.join(left_out)}.")
    return lines


def duration(seconds: float) -> str:
    """Seconds in words, to two or three figures."""
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 99.5:
        return f"{minutes:.2g} min" if minutes < 9.95 else f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.2g} h" if hours < 9.95 else f"{hours:,.0f} h"


def size(number: float) -> str:
    """Bytes in words, to two or three figures."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError
