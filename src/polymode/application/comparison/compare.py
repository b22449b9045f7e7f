"""``compare``: several methods on one task at one budget, every run resumable, every result kept."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack

import torch
from torch import Tensor

from polymode.application.comparison.baselines import (
    CLASSIFICATION_BASELINES,
    REGRESSION_BASELINES,
    fit_baseline,
    left_out,
)
from polymode.application.comparison.judgement import (
    LOG_PROB,
    Judgement,
    judge,
    judge_baseline,
)
from polymode.application.comparison.learning import learning_of, training_mark
from polymode.application.comparison.results import Comparison, Result
from polymode.data import ArrayData, Data, Split, Task, arrays_of, fingerprint, fingerprints
from polymode.data.familiarity import Familiarity
from polymode.errors import CheckpointError, InputError, require, unknown_name
from polymode.judging.evaluation import evaluate
from polymode.judging.reference import Reference
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.metrics.calibration import BINS, Bins
from polymode.networks.surgery import Model
from polymode.posteriors import Posterior
from polymode.posteriors.calibration import FEWEST_POINTS
from polymode.storage import (
    check_file,
    checksum,
    entry,
    finite,
    inside,
    read_document,
    read_tensors,
    refuse_links,
    well_formed,
    write_document,
    write_tensors,
    write_text,
)
from polymode.training.contract import Epoch, Method, describe
from polymode.training.keeping.folder import hardware, versions
from polymode.training.keeping.progress import Reporter, Silent
from polymode.training.loop.arithmetic import recorded_threads, with_threads
from polymode.training.loop.fit import Fit, prepared, work_ahead
from polymode.training.loop.settings import ComputingSettings, usable_device
from polymode.trees import map_tree

SCORES_FILE, COMPARISON_FILE, TASK_FILE = "scores.json", "comparison.json", "task.json"
CALIBRATION_FILE = "calibration.json"
SHARED_FOLDER = ".shared"  # what the workers of an engine read while they train

# What methods have in common: the member-epochs they spend in all, or the epochs of each chain.
Equal = Literal["budget", "epochs"]


@dataclass(frozen=True)
class Replicate:
    """One split under one seed."""

    split: int
    seed: int
    data: Split


def replicates_of(task: Task, seeds: Sequence[int]) -> list[Replicate]:
    """Every split under every seed."""
    return [Replicate(i, seed, split) for i, split in enumerate(task.splits) for seed in seeds]


class DataOfReplicates(TypedDict):
    """What ``fit`` is given of replicates: a data set, held-out data and a seed for each."""

    data: list[Data]
    validation: list[Data] | None
    seed: list[int]


@dataclass(frozen=True)
class Judging:
    """How posteriors are judged.

    num_draws: networks drawn of posteriors that have no end of them. bins: of confidence, for calibration.
    reference: what a trusted posterior predicts for the test data of the only split; distances to it become
    columns. threads: to compute with; those of the run unless given. calibrate: calibrate posteriors on
    validation data, and judge them once more.
    """

    num_draws: int = 100
    bins: Bins = BINS
    reference: Reference | None = None
    threads: int | None = None
    calibrate: bool = False


class ReplicateOptions(ComputingSettings, total=False):
    """Keywords of ``prepared_replicates``, which explains them."""

    likelihood: Required[Likelihood]
    epochs: Required[int]
    title: Required[str]
    options: Required[Mapping[str, Any]]
    reporter: Required[Reporter]
    observer: Callable[[Epoch], None] | None
    initial: Sequence[Posterior] | None


def compare(
    task: Task,
    model: Model,
    methods: Mapping[str, Method],
    folder: str | Path,
    *,
    budget: float,
    equal: Equal = "budget",
    seeds: Sequence[int] = (0,),
    baselines: Sequence[str] = (),
    judging: Judging = Judging(),
    options: Mapping[str, Any] | None = None,
    run_options: Callable[[Method, int], Mapping[str, Any]] = lambda method, epochs: {},
    network: Mapping[str, Any] | None = None,
    reporter: Reporter | None = None,
    observers: Callable[[Path], Callable[[Epoch], None] | None] = lambda folder: None,
    **computing: Unpack[ComputingSettings],
) -> Comparison:
    """Fit every method with ``budget`` member-epochs to every split and seed, and judge it.

    methods: label -> method. equal: "epochs" gives every chain ``budget`` epochs instead, whatever its method
    costs. baselines: names of ``comparison.baselines``, fitted to the same rows.
    folder: results.json, results.csv, replicates.csv and a run folder a method.
    All splits and seeds of a method are trained side by side. A run that was cut goes on; one that is
    finished is read back. judging: how the posteriors are judged. options: what the comparison depends on,
    kept in its manifest; a folder of another is refused. run_options: the same of a run, from its method and
    epochs. network: what builds the model again. observers: makes the observer of each run. computing:
    device, backend, threads, precision and engine, as ``fit`` has them; the parts of all methods go to one
    engine at once.
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
    if judging.calibrate:
        require_validation(task, "calibrate")
    _check_baselines(baselines, methods, likelihood)
    sizes = {label: sized_for(method, budget, equal) for label, method in methods.items()}
    claim(folder, options or {})
    fits = {
        label: prepared_replicates(
            sized,
            model,
            replicates,
            folder / label,
            likelihood=likelihood,
            epochs=epochs,
            title=label,
            options=run_options(sized, epochs),
            reporter=reporter,
            observer=observers(folder / label),
            **computing,
        )
        for label, (sized, epochs) in sizes.items()
    }
    if all(each.computing.engine is not None for each in fits.values()):
        work_ahead(list(fits.values()), folder / SHARED_FOLDER, reporter, "all methods")
    results = []
    for label, (sized, epochs) in sizes.items():
        others = budget * (1 if equal == "budget" else sized.total_chains)
        if sized.least_budget > others:
            least = f"{sized.least_budget:,.0f} member-epochs, the least that it is of use with"
            reporter.say(f"{label}: it takes {least}, not {others:g} as others would")
        posteriors = fitted_replicates(fits[label], replicates, network)
        known = learned_from(sized, replicates)
        judged = judge_all(posteriors, known, folder / label, task.ood, judging, reporter, label)
        result = _result(label, sized, epochs, posteriors, judged, folder / label, judging.num_draws)
        spent = result.price["member_epochs"]
        if equal == "budget" and spent > 1.1 * max(budget, sized.least_budget):
            reporter.say(f"{label}: it spent {spent:g} member-epochs, the budget is {budget:g}")
        results.append(result)
    for name in baselines:
        reason = left_out(name, min(r.data.train.num_examples for r in replicates))
        if reason is not None:
            reporter.say(f"{name}: left out, {reason}")
            continue
        results.append(_baseline_result(name, replicates, folder / name, likelihood, judging, reporter))
    amount = f"budget {budget:g} member-epochs" if equal == "budget" else f"{budget:g} epochs a chain"
    title = f"{task.name}, {amount}, {_count(len(task.splits), 'split')}"
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


def sized_for(method: Method, budget: float, equal: Equal) -> tuple[Method, int]:
    """The method and its epochs: those that all have in common, or the fewest that it is of use with."""
    if equal == "budget":
        return method.for_budget(max(budget, method.least_budget))
    return method, max(1, round(budget), round(method.least_budget / method.total_chains))


def fit_replicates(
    method: Method,
    model: Model,
    replicates: Sequence[Replicate],
    folder: Path,
    *,
    network: Mapping[str, Any] | None = None,
    **options: Unpack[ReplicateOptions],
) -> list[Posterior]:
    """One posterior a replicate, all trained side by side in one resumable run.

    network: what builds the model again; it is left in ``task.json`` with what new examples have to go
    through before they are predicted.
    """
    fit = prepared_replicates(method, model, replicates, folder, **options)
    return fitted_replicates(fit, replicates, network)


def prepared_replicates(
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
    observer: Callable[[Epoch], None] | None = None,
    initial: Sequence[Posterior] | None = None,
    **computing: Unpack[ComputingSettings],
) -> Fit:
    """The one fit of all replicates.

    initial: a posterior for each to begin at. computing: as ``fit`` has it.
    """
    return prepared(
        method,
        model,
        likelihood=likelihood,
        epochs=epochs,
        **data_of(method, replicates, computing.get("device")),
        initial=initial,
        run_dir=folder,
        resume=True,
        title=title,
        options=options,
        progress=reporter,
        observer=observer,
        **computing,
    )


def fitted_replicates(
    fit: Fit, replicates: Sequence[Replicate], network: Mapping[str, Any] | None
) -> list[Posterior]:
    """Run the fit of all replicates, and leave in its folder what new examples have to go through."""
    posteriors = fit.run()
    assert isinstance(posteriors, list)
    assert fit.folder is not None
    if not fit.request.ranks.is_first:
        return posteriors
    ready = [replicate.data.preprocessing.config() for replicate in replicates]
    typical = typical_rows(replicates, fit.folder)
    content = {"network": dict(network or {}), "posteriors": ready, "typical": typical}
    write_document(fit.folder / TASK_FILE, "task", content)
    return posteriors


def data_of(
    method: Method, replicates: Sequence[Replicate], device: torch.device | str | None
) -> DataOfReplicates:
    """The keywords of ``fit`` that say what a method sees of some replicates."""
    parts = [replicate.data for replicate in learned_from(method, replicates)]
    known: list[Data] = [part.validation for part in parts if part.validation is not None]
    return {
        "data": _on_device([part.train for part in parts], device),
        "validation": known if len(known) == len(replicates) else None,
        "seed": [replicate.seed for replicate in replicates],
    }


def typical_rows(replicates: Sequence[Replicate], folder: Path) -> list[dict[str, str] | None]:
    """Files with typical training rows of tables, one for each replicate, by which strange rows are told."""
    files: dict[int, dict[str, str] | None] = {}
    for replicate in replicates:
        if replicate.split in files:
            continue
        data = replicate.data
        inputs = data.train.inputs if isinstance(data.train, ArrayData) else None
        files[replicate.split] = None
        if data.preprocessing.encoding and isinstance(inputs, Tensor):
            name = f"typical-{replicate.split}.safetensors"
            digest = write_tensors(folder / name, Familiarity.of(inputs).tensors())
            files[replicate.split] = {"file": name, "checksum": digest}
    return [files[replicate.split] for replicate in replicates]


def whole(split: Split) -> Split:
    """The split with its validation rows among those to train on: a sampler of the posterior loses none."""
    if split.validation is None:
        return split
    parts = [arrays_of(split.train), arrays_of(split.validation)]
    inputs = map_tree(lambda *t: torch.cat(t), *(part[0] for part in parts))
    targets = torch.cat([part[1] for part in parts])
    weights = [getattr(part, "weights", None) for part in (split.train, split.validation)]
    often = None
    if any(each is not None for each in weights):
        ones = [torch.ones(len(part[1])) for part in parts]
        often = torch.cat([one if w is None else w for w, one in zip(weights, ones, strict=True)])
    train = ArrayData(inputs, targets, weights=often, batch_size=split.train.batch_size)
    return replace(split, train=train, validation=None)


def learned_from(method: Method, replicates: Sequence[Replicate]) -> list[Replicate]:
    """The replicates as a method sees them: what a sampler has learned from is not held out for it."""
    return [replace(r, data=whole(r.data)) if method.reference else r for r in replicates]


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
        "validation": fingerprints([r.data.validation for r in replicates if r.data.validation is not None]),
        "calibrate": judging.calibrate,
    }
    if (saved := _saved_scores(folder, about)) is not None:
        return saved
    reporter.say(f"{label}: judging {_count(len(replicates), 'posterior')}")
    found, files, likelihoods = [], {}, []
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
            after = {}
            if judging.calibrate and replicate.data.validation is not None:
                calibrated, after = _judge_calibrated(posterior, replicate.data, judging)
                likelihoods.append(calibrated.network.likelihood.config())
        found.append(_kept(judgement, replicate, index, folder, files) | {"calibrated": after})
    if likelihoods:
        write_document(folder / CALIBRATION_FILE, "calibration", {"likelihoods": likelihoods})
        files[CALIBRATION_FILE] = checksum(folder / CALIBRATION_FILE)
    return _save_scores(folder, about, found, files)


def _judge_calibrated(
    posterior: Posterior, split: Split, judging: Judging
) -> tuple[Posterior, dict[str, float]]:
    """The posterior calibrated on the validation data of a split, and its scores on the test data."""
    count = judging.num_draws if posterior.num_members is None else None
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]  # of the same networks
    calibrated = posterior.calibrated(split.validation, count, draws[0])
    scores = evaluate(
        calibrated,
        split.test,
        num_draws=count,
        generator=draws[1],
        target_scale=split.preprocessing.target_scale,
        bins=judging.bins,
    )
    return calibrated, scores | calibrated.network.likelihood.learned_by_calibration


def _kept(
    judgement: Judgement, replicate: Replicate, index: int, folder: Path, files: dict[str, str]
) -> dict[str, Any]:
    """What is kept of a judgement; its predictions go to a file, which is noted in ``files``."""
    name = f"predictions-{index}.safetensors"
    files[name] = write_tensors(folder / name, judgement.predictions)
    return {
        "split": replicate.split,
        "seed": replicate.seed,
        "scores": judgement.scores,
        "errors": judgement.errors,
        "curves": judgement.curves,
        "file": name,
        "test_ratio": _test_ratio(replicate.data),
    }


def _test_ratio(split: Split) -> float:
    """Test rows over all others of a split."""
    others = split.train.num_examples + (0 if split.validation is None else split.validation.num_examples)
    return split.test.num_examples / others


def _save_scores(
    folder: Path, about: Mapping[str, Any], found: list[dict[str, Any]], files: Mapping[str, str]
) -> list[dict[str, Any]]:
    content = {"about": dict(about), "replicates": finite(found), "files": dict(files)}
    write_document(folder / SCORES_FILE, "scores", content)
    return _with_rows(content["replicates"], folder)


def _with_rows(replicates: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Replicates with the log probability of every test row, which gains are paired over."""
    for replicate in replicates:
        if isinstance(name := replicate.get("file"), str):
            replicate["log_prob"] = read_tensors(inside(folder, name)).get(LOG_PROB)
    return replicates


def _baseline_result(
    name: str,
    replicates: Sequence[Replicate],
    folder: Path,
    likelihood: Likelihood,
    judging: Judging,
    reporter: Reporter,
) -> Result:
    """Fit one of scikit-learn's models to the rows of every replicate, and judge it as a method is."""
    about = {
        "baseline": name,
        "scikit-learn": package_version("scikit-learn"),
        "train": fingerprints([replicate.data.train for replicate in replicates]),
        "test": fingerprints([replicate.data.test for replicate in replicates]),
        "validation": fingerprints([r.data.validation for r in replicates if r.data.validation is not None]),
        "likelihood": likelihood.config(),
        "seeds": [replicate.seed for replicate in replicates],
        "bins": asdict(judging.bins),
    }
    judged = _saved_scores(folder, about)
    if judged is None:
        reporter.say(f"{name}: fitting {_count(len(replicates), 'baseline')}")
        found, files = [], {}
        for index, replicate in enumerate(replicates):
            inputs, targets = arrays_of(replicate.data.train)
            num_classes = None
            if likelihood.reads == "labels":
                num_classes = max(len(replicate.data.preprocessing.classes), 1 + int(targets.max()))
            fitted = fit_baseline(
                name,
                inputs.flatten(1),
                likelihood.latent(targets),
                num_classes,
                seed=replicate.seed,
                weights=getattr(replicate.data.train, "weights", None),
            )
            if fitted.remark and index == 0:
                reporter.say(f"{name}: {fitted.remark}")
            judgement = judge_baseline(fitted, replicate.data, likelihood, bins=judging.bins)
            price = {"seconds": fitted.seconds, "parameters": fitted.num_parameters}
            found.append(_kept(judgement, replicate, index, folder, files) | {"price": price})
        judged = _save_scores(folder, about, found, files)
    price = {
        "member_epochs": 0.0,
        "seconds": sum(each["price"]["seconds"] for each in judged) / len(judged),
        "parameters": sum(each["price"]["parameters"] for each in judged) / len(judged),
        "passes": 1,
    }
    return Result(name, {"name": name}, 0, judged, price, 1, is_baseline=True)


def _check_baselines(names: Sequence[str], methods: Mapping[str, Method], likelihood: Likelihood) -> None:
    known = baselines_for(likelihood)
    for name in names:
        if name not in known:
            raise unknown_name(f"baseline for the likelihood {likelihood.kind!r}", name, known)
        require(
            name not in methods, f"{name!r} is the label of a method and of a baseline: rename the method."
        )


def baselines_for(likelihood: Likelihood) -> tuple[str, ...]:
    """The baselines that a likelihood's scores can judge: of classes, or of numbers with a Gaussian."""
    if likelihood.of_baseline is None:
        return ()
    return CLASSIFICATION_BASELINES if likelihood.reads == "labels" else REGRESSION_BASELINES


def require_validation(task: Task, what: str) -> None:
    """Raise, before anything is trained, unless every split has data enough to calibrate on."""
    likelihood = make_likelihood(task.likelihood)
    require(
        bool(likelihood.learned_by_calibration),
        f"The likelihood {likelihood.kind!r} has nothing to {what}: leave it out.",
    )
    fewest = min((s.validation.num_examples for s in task.splits if s.validation is not None), default=0)
    require(
        fewest >= FEWEST_POINTS or any(split.validation is None for split in task.splits),
        f"{fewest} held-out rows are too few to {what} on: give at least {FEWEST_POINTS}, with more rows or "
        "a larger --validation share.",
    )
    require(
        all(split.validation is not None for split in task.splits),
        f"To {what} takes held-out rows, and {task.name} has none: leave --validation none out, or give the "
        "data validation rows of their own (data.num_validation=...).",
    )


def _saved_scores(folder: Path, about: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The scores in the folder of a run, if they are about the same and whole, with their predictions."""
    path = folder / SCORES_FILE
    if not path.exists():
        return None
    try:
        saved = read_document(path, "scores", advice="")
        if saved.get("about") != about:
            return None
        with well_formed(path):
            for name, digest in saved.get("files", {}).items():  # format 1 has none
                check_file(inside(folder, name), digest)
            return _with_rows(entry(saved, "replicates", list, path), folder)
    except CheckpointError as error:
        warnings.warn(f"{error} The posteriors are judged again.", stacklevel=3)
        return None


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


def claim(folder: Path, options: Mapping[str, Any]) -> None:
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
    learning = learning_of(folder)
    after = [replicate["calibrated"] for replicate in judged if replicate.get("calibrated")]
    return Result(
        label,
        describe(method),
        epochs,
        judged,
        price,
        first.num_members,
        record,
        learning,
        mark=training_mark(learning["validation_nll"], stopped=learning["stopped"], keeps=learning["keeps"]),
        calibrated=after,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
