"""``compare``: several methods on one task at one budget, every run resumable, every result kept."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from polymode.application.comparison.judgement import Judgement, judge
from polymode.application.comparison.results import Comparison, Result
from polymode.data import ArrayData, Data, Split, Task, fingerprint, fingerprints
from polymode.errors import CheckpointError, InputError, require
from polymode.judging.reference import Reference
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.metrics.calibration import BINS, Bins
from polymode.networks.surgery import Model
from polymode.posteriors import Posterior
from polymode.storage import (
    check_file,
    entry,
    finite,
    inside,
    read_document,
    refuse_links,
    write_document,
    write_tensors,
    write_text,
)
from polymode.training import epochs_of, fit
from polymode.training.contract import Epoch, Method, describe
from polymode.training.keeping.folder import hardware, versions
from polymode.training.keeping.progress import Reporter, Silent
from polymode.training.loop.arithmetic import recorded_threads, with_threads
from polymode.training.loop.settings import ComputingSettings, usable_device

SCORES_FILE, COMPARISON_FILE, TASK_FILE = "scores.json", "comparison.json", "task.json"


@dataclass(frozen=True)
class Replicate:
    """One split under one seed."""

    split: int
    seed: int
    data: Split


def replicates_of(task: Task, seeds: Sequence[int]) -> list[Replicate]:
    """Every split under every seed."""
    return [Replicate(i, seed, split) for i, split in enumerate(task.splits) for seed in seeds]


@dataclass(frozen=True)
class Judging:
    """How posteriors are judged.

    num_draws: networks drawn of posteriors that have no end of them. bins: of confidence, for calibration.
    reference: what a trusted posterior predicts for the test data of the only split; distances to it become
    columns. threads: to compute with; those of the run unless given.
    """

    num_draws: int = 100
    bins: Bins = BINS
    reference: Reference | None = None
    threads: int | None = None


def compare(
    task: Task,
    model: Model,
    methods: Mapping[str, Method],
    folder: str | Path,
    *,
    budget: float,
    seeds: Sequence[int] = (0,),
    judging: Judging = Judging(),
    options: Mapping[str, Any] | None = None,
    run_options: Callable[[Method, int], Mapping[str, Any]] = lambda method, epochs: {},
    network: Mapping[str, Any] | None = None,
    reporter: Reporter | None = None,
    observers: Callable[[Path], Callable[[Epoch], None] | None] = lambda folder: None,
    **computing: Unpack[ComputingSettings],
) -> Comparison:
    """Fit every method with ``budget`` member-epochs to every split and seed, and judge it.

    methods: label -> method. folder: results.json, results.csv, replicates.csv and a run folder a method.
    All splits and seeds of a method are trained side by side. A run that was cut goes on; one that is
    finished is read back. judging: how the posteriors are judged. options: what the comparison depends on,
    kept in its manifest; a folder of another is refused. run_options: the same of a run, from its method and
    epochs. network: what builds the model again. observers: makes the observer of each run. computing:
    device, backend, threads, precision and processes, as ``fit`` has them.
    """
    require(len(methods) > 0, "There are no methods to compare.")
    require(len(seeds) > 0, "There are no seeds.")
    folder, reporter = Path(folder), reporter or Silent()
    likelihood = make_likelihood(task.likelihood)
    replicates = replicates_of(task, seeds)
    if judging.reference is not None:
        check_reference_for(task, judging.reference)
    # All of them before any is trained: what one cannot be fitted with is told at once.
    for label, method in methods.items():
        require(
            not method.needs_initial,
            f"{label} begins at networks that others have trained, and a comparison trains its own: use "
            "polymode train --initial RUN, or fit(initial=...).",
        )
    sizes = {label: method.for_budget(budget) for label, method in methods.items()}
    _claim(folder, options or {})
    results = []
    for label, (sized, epochs) in sizes.items():
        posteriors = fit_replicates(
            sized,
            model,
            replicates,
            folder / label,
            likelihood=likelihood,
            epochs=epochs,
            title=label,
            options=run_options(sized, epochs),
            reporter=reporter,
            network=network,
            observer=observers(folder / label),
            **computing | {"processes": min(computing.get("processes", 1), sized.total_chains)},
        )
        judged = judge_all(posteriors, replicates, folder / label, task.ood, judging, reporter, label)
        result = _result(label, sized, epochs, posteriors, judged, folder / label, judging.num_draws)
        spent = result.price["member_epochs"]
        if abs(spent - budget) > 0.1 * budget:
            reporter.say(f"{label}: it spent {spent:g} member-epochs, the budget is {budget:g}")
        results.append(result)
    title = f"{task.name}, budget {budget:g} member-epochs, {_count(len(task.splits), 'split')}"
    comparison = Comparison(
        f"{title}, {_count(len(seeds), 'seed')}",
        likelihood,
        results,
        options or {},
        versions(),
        hardware(),
        judging.reference,
    )
    write_document(folder / "results.json", "results", finite(comparison.config()))
    write_text(folder / "results.csv", comparison.csv())
    write_text(folder / "replicates.csv", comparison.replicates_csv())
    return comparison


def fit_replicates(
    method: Method,
    model: Model,
    replicates: Sequence[Replicate],
    folder: Path,
    *,
    likelihood: Likelihood,
    epochs: int,
    title: str,
    options: Mapping[str, Any],
    reporter: Reporter,
    network: Mapping[str, Any] | None = None,
    observer: Callable[[Epoch], None] | None = None,
    initial: Sequence[Posterior] | None = None,
    **computing: Unpack[ComputingSettings],
) -> list[Posterior]:
    """One posterior a replicate, all trained side by side in one resumable run.

    network: what builds the model again; it is left in ``task.json`` with what new examples have to go
    through before they are predicted. initial: a posterior for each to begin at. computing: as ``fit`` has
    it.
    """
    validation = [r.data.validation for r in replicates]
    known: list[Data] = [part for part in validation if part is not None]
    posteriors = fit(
        method,
        model,
        _on_device([r.data.train for r in replicates], computing.get("device")),
        likelihood=likelihood,
        epochs=epochs,
        validation=known if len(known) == len(replicates) else None,
        seed=[r.seed for r in replicates],
        initial=initial,
        run_dir=folder,
        resume=True,
        title=title,
        options=options,
        progress=reporter,
        observer=observer,
        **computing,
    )
    ready = [replicate.data.preprocessing.config() for replicate in replicates]
    write_document(folder / TASK_FILE, "task", {"network": dict(network or {}), "posteriors": ready})
    return posteriors


def judge_all(
    posteriors: Sequence[Posterior],
    replicates: Sequence[Replicate],
    folder: Path,
    ood: Data | None,
    judging: Judging,
    reporter: Reporter,
    label: str,
) -> list[dict[str, Any]]:
    """Scores and curves of every replicate, from the run's folder where they are about the same already."""
    about = {
        "test": fingerprints([replicate.data.test for replicate in replicates]),
        "ood": None if ood is None else fingerprint(ood),
        "num_draws": judging.num_draws,
        "bins": asdict(judging.bins),
        "reference": None if judging.reference is None else judging.reference.digest,
    }
    if (saved := _saved_scores(folder, about)) is not None:
        return saved
    reporter.say(f"{label}: judging {_count(len(replicates), 'posterior')}")
    found, files = [], {}
    for index, (posterior, replicate) in enumerate(zip(posteriors, replicates, strict=True)):
        with with_threads(judging.threads or recorded_threads(posterior.record)):
            judgement: Judgement = judge(
                posterior,
                replicate.data,
                ood,
                judging.reference,
                num_draws=judging.num_draws,
                bins=judging.bins,
            )
        name = f"predictions-{index}.safetensors"
        files[name] = write_tensors(folder / name, judgement.predictions)
        found.append(
            {
                "split": replicate.split,
                "seed": replicate.seed,
                "scores": judgement.scores,
                "curves": judgement.curves,
            }
        )
    content = {"about": about, "replicates": finite(found), "files": files}
    write_document(folder / SCORES_FILE, "scores", content)
    return content["replicates"]


def _saved_scores(folder: Path, about: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The scores in the folder of a run, if they are about the same and whole, with their predictions."""
    path = folder / SCORES_FILE
    if not path.exists():
        return None
    try:
        saved = read_document(path, "scores")
        for name, digest in saved.get("files", {}).items():  # format 1 has none
            check_file(inside(folder, name), digest)
        replicates = entry(saved, "replicates", list, path)
    except CheckpointError as error:
        warnings.warn(f"{error} The posteriors are judged again.", stacklevel=3)
        return None
    return replicates if saved.get("about") == about else None


def check_reference_for(task: Task, reference: Reference) -> None:
    """Raise, before any training, unless a reference is about the test data of a task."""
    if len(task.splits) > 1:
        raise InputError(
            f"A reference is about one test set, {task.name} has {len(task.splits)} splits: choose one "
            "(--set data.split=0)."
        )
    reference.check(task.splits[0].test, make_likelihood(task.likelihood), task.num_outputs)


def _on_device(sources: Sequence[Data], device: torch.device | str | None) -> list[Data]:
    """Arrays in the device's memory, where batches are gathered and augmented fastest; each once."""
    if device is None or usable_device(device).type == "cpu":
        return list(sources)
    distinct = {id(source): source for source in sources}
    moved = {k: s.to(device) if isinstance(s, ArrayData) else s for k, s in distinct.items()}
    return [moved[id(source)] for source in sources]


def _claim(folder: Path, options: Mapping[str, Any]) -> None:
    """Take a folder for this comparison; one that belongs to another is refused."""
    refuse_links(folder)
    if (folder / COMPARISON_FILE).exists():
        saved = entry(
            read_document(folder / COMPARISON_FILE, "comparison"), "options", dict, folder / COMPARISON_FILE
        )
        # An option that the folder does not know came with a later version: its run tells whether it fits.
        for key in sorted((saved.keys() & options.keys()) - {"methods"}):
            if saved.get(key) != options.get(key):
                raise CheckpointError(
                    f"{folder} belongs to another comparison: its {key} is {saved.get(key)}, now it is "
                    f"{options.get(key)}. Choose another folder."
                )
    elif folder.exists() and any(not p.name.startswith(".") for p in folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty and holds no comparison: choose another folder.")
    content = {"options": dict(options), "versions": versions(), "hardware": hardware()}
    write_document(folder / COMPARISON_FILE, "comparison", content)


def _passes(method: Method, num_members: int) -> int:
    """Forward passes of a prediction: one for each member, unless members share them."""
    members, passes = method.chain_members, method.chain_passes
    return num_members if not members or not passes else num_members * passes // members


def _result(
    label: str,
    method: Method,
    epochs: int,
    posteriors: Sequence[Posterior],
    judged: Sequence[Mapping[str, Any]],
    folder: Path,
    num_draws: int,
) -> Result:
    first = posteriors[0]
    record = first.record
    price = {
        "member_epochs": sum(p.record["member_epochs"] for p in posteriors) / len(posteriors),
        "seconds": record["training_seconds"] / len(posteriors),
        "parameters": first.num_parameters,
        "passes": num_draws if first.num_members is None else _passes(method, first.num_members),
    }
    learning = _learning(folder)
    return Result(label, describe(method), epochs, judged, price, first.num_members, record, learning)


def _learning(folder: Path) -> dict[str, Any]:
    """Means over members after every epoch, by member-epochs: validation NLL, training losses, measures."""
    epochs = epochs_of(folder)
    known = _means(epochs, lambda epoch: epoch["validation"].get("nll", []))
    return {
        "member_epochs": [epoch["member_epochs"] for epoch, _ in known],
        "validation_nll": [mean for _, mean in known],
        "trace": _trace(epochs),
        "measures": _measures(epochs),
    }


def _trace(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean loss of every epoch, and the places where a chain begins a new training.

    sampled: whether there are epochs without an optimiser; their losses leave the prior term out.
    """
    known = _means(epochs, lambda epoch: epoch["losses"])
    return {
        "member_epochs": [epoch["member_epochs"] for epoch, _ in known],
        "loss": [mean for _, mean in known],
        "restarts": [place for place, (epoch, _) in enumerate(known) if epoch.get("restart")],
        "sampled": any(not epoch["learning_rates"] for epoch, _ in known),
    }


def _measures(epochs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Means over members of what a method measures of them, such as their sparsity, by its name."""
    found = {}
    for name in dict.fromkeys(name for epoch in epochs for name in epoch.get("measures", ())):
        known = _means(epochs, lambda epoch, name=name: epoch.get("measures", {}).get(name, []))
        found[name] = {
            "member_epochs": [epoch["member_epochs"] for epoch, _ in known],
            "mean": [mean for _, mean in known],
        }
    return found


def _means(
    epochs: Sequence[Mapping[str, Any]], values: Callable[[Mapping[str, Any]], Sequence[float | None]]
) -> list[tuple[Mapping[str, Any], float]]:
    """Epochs with the mean over members of some values; without those in which no member has one."""
    known = [(epoch, [v for v in values(epoch) if v is not None]) for epoch in epochs]
    return [(epoch, sum(found) / len(found)) for epoch, found in known if found]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
