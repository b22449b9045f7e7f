"""``polymode reference``: sample the posterior itself, and keep what it predicts to judge others by."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from polymode.application.cli.compare import CompareOptions
from polymode.application.cli.jobs import Job, JobOptions, how_to_run, load_job, make_methods, run_folder
from polymode.application.cli.options import UsageError, command_line, config_of, option
from polymode.application.cli.output import console, print_json, reporter_of, say
from polymode.application.comparison import Replicate, distances_text, fit_replicates, noise_floor_text
from polymode.data import Data, arrays_of
from polymode.errors import InputError
from polymode.judging.contents import REFERENCE_SEED, contents_for
from polymode.judging.diagnostics import (
    LEAST_SAMPLES,
    ReferenceCheck,
    check_reference,
    import_arviz,
    noise_floor,
)
from polymode.judging.reference import Reference, row_hashes
from polymode.likelihoods import make_likelihood
from polymode.methods import HMC, Microcanonical
from polymode.posteriors import Posterior
from polymode.training.contract import describe
from polymode.training.loop.arithmetic import recorded_threads, with_threads

ABOUT = """Sample the posterior, by Hamiltonian Monte Carlo unless told otherwise, and keep what it predicts.

polymode compare --reference FILE then tells how close every method comes to it. Chains that have not mixed,
are rejected too often or diverge are not called a reference. With --show FILE: what a reference is about.
The same command goes on where it was cut."""


TITLES = {"hmc": "Hamiltonian Monte Carlo", "microcanonical": "Microcanonical Langevin dynamics"}
SAMPLERS = tuple(TITLES)
# What a sampler needs for others to be judged by it: a small error in a step, and enough samples a chain.
CAREFUL = {"microcanonical": {"energy_variance": 5e-4, "num_samples": 100, "num_chains": 4}}


@dataclass(frozen=True)
class ReferenceOptions(JobOptions):
    """Options of ``polymode reference``."""

    method: str = option(
        "hmc",
        "the sampler: hmc, or microcanonical at an energy variance of 5e-4 (no acceptance test, so a small "
        "bias, and fewer passes where HMC does not mix)",
        choices=SAMPLERS,
    )
    passes: int = option(20_000, "gradient passes over the data of each chain, burn-in included")
    out: str = option("", "file to write (default: reference.npz in the run's folder)", place="screen")
    force: bool = option(
        False, "write the file although the sample is unfit, and say so in it", place="screen"
    )
    show: str = option("", "only tell what is in this file", metavar="FILE", place="screen")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes < 2:
            raise UsageError(f"--passes must be at least 2, got {self.passes}; thousands are usual.")
        if self.tensorboard:
            raise UsageError("--tensorboard: polymode reference shows its progress here only.")
        if self.seeds != 1:
            raise UsageError(
                "--seeds: a reference is one sample; its chains are set with "
                f"--set {self.method}.num_chains=4."
            )
        if self.out and Path(self.out).suffix != ".npz":
            raise UsageError(f"--out {self.out!r} must end in .npz.")


def run(options: ReferenceOptions) -> None:
    """Sample, judge the sample, write the reference."""
    if options.show:
        show(options, Reference.load(options.show))
        return
    options = replace(options, validation="none")  # a posterior is that of all training rows
    job = load_job(options)
    likelihood = make_likelihood(job.task.likelihood)
    if len(job.task.splits) > 1:
        raise UsageError(
            f"A reference is about one test set, {job.task.name} has {len(job.task.splits)} splits: choose "
            "one (--set data.split=0)."
        )
    try:
        contents_for(likelihood).check_task(arrays_of(job.task.splits[0].test)[1])
    except InputError as error:
        raise UsageError(str(error)) from error
    name = options.method
    method = make_methods({name: name}, options.set, CAREFUL.get(name, {}))[name]
    assert isinstance(method, HMC | Microcanonical)
    if method.num_chains < 2 or method.kept_samples(options.passes) < LEAST_SAMPLES:
        raise UsageError(
            f"A reference needs at least 2 chains with {LEAST_SAMPLES} samples each to be judged by: raise "
            f"{name}.num_chains, {name}.num_samples or --passes."
        )
    import_arviz()  # what judges the chains must be there before they are run
    identity = config_of(options, without=("ood", "num_draws", "bins", "bin_min_count")) | {
        "model": job.model_name
    }
    folder = run_folder(options.run, "reference", [options.data, job.model_name], identity)
    reporter = reporter_of(options)
    reporter.say(job.described())
    try:
        [posterior] = fit_replicates(
            method,
            job.model,
            [Replicate(0, options.seed, replace(job.task.splits[0], validation=None))],  # nothing is chosen
            folder,
            likelihood=likelihood,
            epochs=options.passes,
            **how_to_run(options),
            title=name,
            options=identity | {"method": describe(method)},
            network=job.network,
            reporter=reporter,
        )
        reporter.say("judging the chains by what they predict")
        with with_threads(options.threads or recorded_threads(posterior.record)):
            judged = check_reference(posterior, job.task.splits[0].test)
            floor = noise_floor(posterior, job.task.splits[0].test)
            reference = _reference(posterior, job, judged, floor, command_line("reference", options))
    finally:
        reporter.close()
    _report(options, posterior, judged, floor)
    if not judged.is_fit and not options.force:
        raise InputError(
            f"This sample is no reference: {'; '.join(judged.reasons)}. Nothing was written; the run is kept "
            f"in {folder}. --force writes it, marked as unfit."
        )
    path = Path(options.out) if options.out else folder / "reference.npz"
    reference.save(path.resolve() if options.out else path)
    if options.json:
        print_json(
            {"reference": str(path), "verdict": judged.config(), "noise_floor": floor, "folder": str(folder)}
        )
    say(options, f"reference  {path}")
    settings = {key: value for key, value in options.set.items() if key in ("data", "model")}
    again = CompareOptions(
        data=options.data,
        model=options.model,
        likelihood=options.likelihood,
        set=settings | {"all": {"prior_std": describe(method.prior_std)}},
        reference=str(path),
    )
    say(options, f"next       {command_line('compare', again)}")


def _reference(
    posterior: Posterior, job: Job, judged: ReferenceCheck, floor: dict[str, float], command: str
) -> Reference:
    test: Data = job.task.splits[0].test
    inputs, _ = arrays_of(test)
    likelihood = posterior.network.likelihood
    contents = contents_for(likelihood)
    values = contents.kept(contents.predicted(posterior, inputs, seed=REFERENCE_SEED))
    about = {
        "data": job.task.name,
        "model": job.model_name,
        "method": posterior.record["method"],
        "num_samples": posterior.num_members,
        "effective_samples": judged.mixing.effective,
        "effective_per_second": judged.mixing.effective / max(posterior.record["training_seconds"], 1e-9),
        "noise_floor": floor,
        "units": likelihood.units,
        "verdict": judged.config(),
        "chains": posterior.record["findings"],
        "member_epochs": posterior.record["member_epochs"],
        "command": command,
    }
    return Reference(contents.name, values.cpu(), row_hashes(test), about)


def _report(
    options: ReferenceOptions, posterior: Posterior, judged: ReferenceCheck, floor: dict[str, float]
) -> None:
    if options.json:
        return
    mixing, record = judged.mixing, posterior.record
    speed = mixing.effective / max(record["training_seconds"], 1e-9)
    rows = [
        ("samples", f"{posterior.num_members:,}", f"{mixing.num_chains} chains × {mixing.num_samples}"),
        ("gradient passes", f"{record['member_epochs']:,.0f}", "of all chains, warm-up included"),
        ("begun at", record["findings"][0]["start"], ""),
        *_how_it_went(judged, record["findings"]),
        (
            "R-hat",
            f"{mixing.rhat:.3f}",
            f"exceeded by 5 % of the predictions; the worst is {mixing.worst_rhat:.3f}",
        ),
        ("effective samples", f"{mixing.effective:,.0f}", f"median over predictions; {speed:.2g} a second"),
        ("noise floor", distances_text(floor), "between halves of its own chains"),
        ("fit as a reference", "yes" if judged.is_fit else "NO", "; ".join(judged.reasons)),
    ]
    console().print(_table(TITLES[options.method], rows))


def _how_it_went(judged: ReferenceCheck, chains: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """What a sampler has to say about its chains."""
    if judged.acceptance is None:
        steps = sum(chain["steps"] for chain in chains)
        return [
            ("steps", f"{steps:,}", "of all chains after warm-up"),
            ("energy variance", f"{judged.energy_variance:.2g}", "for each weight, of the worst chain"),
            ("divergences", f"{judged.divergences:.1%}", "of all steps, which were undone"),
        ]
    leaps, sizes = ([chain[key] for chain in chains] for key in ("leapfrog_steps", "step_size"))
    return [
        ("transitions", f"{sum(c['transitions'] for c in chains):,}", "trajectories after burn-in"),
        (
            "leapfrog steps",
            f"{min(leaps):,} to {max(leaps):,}",
            f"of {min(sizes):.3g} to {max(sizes):.3g} of a weight's scale each",
        ),
        ("acceptance", f"{judged.acceptance:.1%}", "of the chain that accepts least"),
        ("divergences", f"{judged.divergences:.1%}", "of all trajectories"),
    ]


def show(options: ReferenceOptions, reference: Reference) -> None:
    """Print what a reference is about."""
    about = reference.about
    if options.json:
        print_json({"kind": reference.kind, "shape": list(reference.values.shape), "about": dict(about)})
        return
    judged = about.get("verdict", {})
    fit = {True: "yes", False: "NO: " + "; ".join(judged.get("reasons", []))}.get(
        judged.get("is_fit"), "not known"
    )
    rows = [
        (reference.kind, " × ".join(map(str, reference.values.shape)), ""),
        ("data", str(about.get("data", "not known")), ""),
        ("model", str(about.get("model", "not known")), ""),
        ("sampler", _sampler(about), ""),
        ("samples", str(about.get("num_samples", "not known")), ""),
        ("noise floor", noise_floor_text(reference), ""),
        ("fit as a reference", fit, ""),
        ("made with", str(about.get("command", "not known")), ""),
    ]
    console().print(_table(options.show, rows))


def _sampler(about: Mapping[str, Any]) -> str:
    """Which sampler made a reference, and where its chains began."""
    method, chains = about.get("method"), about.get("chains") or [{}]
    name = method.get("name", "not known") if isinstance(method, dict) else "not known"
    start = chains[0].get("start") if isinstance(chains[0], dict) else None
    return f"{name}, begun at {start}" if start else str(name)


def _table(title: str, rows: list[tuple[str, str, str]]) -> Table:
    table = Table(
        title=escape(title), title_justify="left", show_header=False, box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="left")
    table.add_column("meaning")
    for row in rows:
        table.add_row(*map(escape, row))  # text of a file is text
    return table
