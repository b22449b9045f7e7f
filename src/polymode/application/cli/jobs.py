"""From options to what a run needs: the task, the network, the methods, the folder."""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from polymode.application.cli.options import (
    JudgingOptions,
    UsageError,
    option,
    read_value,
    same_option,
)
from polymode.application.comparison import check_reference_for
from polymode.application.comparison.pilot import settle_likelihood
from polymode.application.datasets.loading import load_inputs_for_ood, load_task
from polymode.application.recipes import held_out, path_of, suited, with_common
from polymode.data import Task
from polymode.data.encoding import LeftOut
from polymode.data.task import num_outputs_for
from polymode.errors import unknown_name
from polymode.imports import is_import
from polymode.judging.reference import Reference
from polymode.likelihoods import LIKELIHOODS, Likelihood, make_likelihood
from polymode.methods import COMPARED_WHERE_SMALL, METHODS, make_method
from polymode.models import MODELS, make_model
from polymode.networks.members import BACKENDS
from polymode.networks.surgery import Model
from polymode.training.contract import Epoch, Method
from polymode.training.contract.execution import Precision
from polymode.training.keeping.progress import Reporter
from polymode.training.keeping.tracking import TensorBoard
from polymode.training.loop.engine import KINDS, Engine
from polymode.training.loop.settings import AnyBackend, Computing, ComputingSettings

MOST_EPOCHS = 1e9  # a budget beyond it is a slip of the keyboard


def check_budget(budget: float | None) -> None:
    """Raise for a budget that no run could spend."""
    if budget is not None and not 1 <= budget <= MOST_EPOCHS:
        raise UsageError(f"--budget must be from 1 to {MOST_EPOCHS:,.0f} member-epochs, got {budget}.")


@dataclass(frozen=True)
class JobOptions(JudgingOptions):
    """Options that training a network has in every command."""

    data: str = option(
        "digits",
        "data set: a name (see polymode data), a table (.csv, .tsv, .parquet, .feather, .xlsx, .npz), a text "
        "(.txt), a folder of images, or package.module:callable",
        metavar="DATA",
    )
    model: str = option(
        "",
        f"network: {', '.join(MODELS)}, or package.module:callable (default: what suits the data)",
        metavar="MODEL",
    )
    likelihood: str = option(
        "", f"meaning of the outputs: {', '.join(LIKELIHOODS)} (default: what suits the targets)"
    )
    ood: str = option("", "data set outside the distribution (default: the one that belongs to the data)")
    validation: str = option(
        "auto",
        "share of the training rows that are held out to choose epochs by, such as 0.1; none holds nothing "
        "out and trains to the end; auto holds 15 % out of data that have no validation rows of their own",
        metavar="SHARE",
    )
    seeds: int = option(1, "number of seeds: all are trained side by side")
    seed: int = option(0, "first seed")
    set: dict = option(
        {},
        "set an option of the data (data.batch_size=64), the model (model.hidden=[100,100]) or a method "
        "(deep_ensemble.num_members=10, all.optimizer.lr=0.01); may be repeated",
    )
    run: str = option("", "folder of the run (default: runs/ and a name made of the options)", place="screen")
    device: str = same_option(Computing, "device")
    backend: AnyBackend = same_option(Computing, "backend", choices=("auto", *BACKENDS))
    precision: Precision = same_option(Computing, "precision", choices=get_args(Precision))
    engine: str = option(
        "",
        "who works on the parts of runs (some chains on some splits and seeds each): local (processes of "
        "this machine), ray or dask",
        choices=("", *KINDS),
        metavar="ENGINE",
        place="screen",
    )
    address: str = option(
        "",
        "of a cluster: auto or host:6379 for ray, tcp://host:8786 for dask; without one, workers are started "
        "on this machine",
        place="screen",
    )
    workers: int = option(
        0,
        "parts that are worked on at once (default: as many as this machine, or the cluster, has room for)",
        place="screen",
    )
    cores: int = option(0, "that a part needs (default: --threads, or 1)", place="screen")
    memory: float = option(
        0.0, "GB that a part needs (default: what its data and weights take)", place="screen"
    )
    gpus: float = option(-1.0, "that a part needs (default: 1 with --device cuda)", place="screen")
    processes: int = option(1, "the same as --engine local --workers N", metavar="N", place="screen")
    trust: bool = option(
        False,
        "import the code that the manifest given by --config names: only for folders you trust",
        place="screen",
    )
    tensorboard: bool = option(False, "also write TensorBoard files into the run's folder", place="screen")

    def __post_init__(self) -> None:
        super().__post_init__()
        for section, content in self.set.items():
            if not isinstance(content, dict):
                raise UsageError(
                    f"--set {section}={content!r}: say which option of it, {section}.OPTION=VALUE."
                )
        for name, least in (("seeds", self.fewest_seeds), ("processes", 1), ("workers", 0), ("cores", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} must be at least {least}, got {getattr(self, name)}.")
        if self.processes > 1 and (self.engine or self.workers):
            raise UsageError("--processes N is the same as --engine local --workers N: leave one out.")
        if self.address and self.engine not in ("ray", "dask"):
            raise UsageError(
                f"--address {self.address} is that of a cluster: --engine ray or dask goes with it."
            )
        if self.made_engine is not None and self.tensorboard:
            raise UsageError("--tensorboard follows a run in this process: leave the engine out.")
        if self.validation not in ("auto", "none"):
            share = read_value(self.validation)
            if not isinstance(share, float) or not 0 < share < 1:
                raise UsageError(
                    f"--validation {self.validation!r}: give a share between 0 and 1, auto or none."
                )

    @property
    def made_engine(self) -> Engine | None:
        """Who works on runs, where they are divided."""
        kind, workers = self.engine, self.workers
        if self.processes > 1:
            kind, workers = "local", self.processes
        if not kind and not workers:
            return None
        return Engine(
            kind or "local",  # type: ignore[arg-type]  # one of its choices
            self.address,
            workers or None,
            self.cores or None,
            round(self.memory * 2**30) or None,
            None if self.gpus < 0 else self.gpus,
        )

    @property
    def fewest_seeds(self) -> int:
        return 1

    def all_seeds(self, task: Task) -> list[int]:
        """The seeds that every split is trained with."""
        return list(range(self.seed, self.seed + self.seeds))


@dataclass(frozen=True)
class Job:
    """What is trained on what."""

    task: Task
    model: Model
    network: Mapping[str, Any]  # what builds the model again

    @property
    def model_name(self) -> str:
        return self.network["name"]

    def described(self) -> str:
        """What was understood of the data, in a line: a reader sees at once when it is not what was meant."""
        split, task = self.task.splits[0], self.task
        ready = split.preprocessing
        likelihood = make_likelihood(task.likelihood)
        if names := ready.classes or likelihood.class_names(task.num_outputs):
            # Symbols of a text may be line ends and blanks.
            written = [name if name.isprintable() and name.strip() else repr(name) for name in names[:10]]
            shown = ", ".join(written) + (", …" if len(names) > 10 else "")
            meaning = f"{len(names)} classes ({shown})"
        else:
            meaning = f"likelihood {likelihood.kind}"
        target = f" of {ready.target!r}" if ready.target else ""
        counts = f"{split.train.num_examples} to train on, {split.test.num_examples} to test on"
        if split.validation is not None:
            counts += f", {split.validation.num_examples} to validate on"
        splits = f", {len(task.splits)} splits" if len(task.splits) > 1 else ""
        said = "".join(f"; {remark}" for remark in task.remarks)
        return (
            f"{task.name}: {meaning}{target}, {counts}{splits}{self._left_out()}{said}; model "
            f"{self.model_name}"
        )

    def _left_out(self) -> str:
        """The inputs that are constant in the training data of a split, and hence left out."""
        left = [c.name for c in self.task.splits[0].preprocessing.encoding if isinstance(c, LeftOut)]
        if self.task.splits[0].preprocessing.encoding:
            return f"; left out {', '.join(left)} (polymode data describe)" if left else ""
        found = list(dict.fromkeys(name for s in self.task.splits for name in s.preprocessing.constant))
        if not found:
            return ""
        ready = self.task.splits[0].preprocessing
        kind = "channels" if ready.source == "images" else "columns"
        counted = "" if ready.columns else "counted from 0: "
        shown = counted + ", ".join(found[:10]) + (", …" if len(found) > 10 else "")
        number = f"{len(found)} of {len(ready.input_scale)} {kind}"
        return f"; {number} ({shown}) left out, constant in the training data"


def load_job(options: JobOptions) -> Job:
    """Read the data and make the network that the options name."""
    task = load_task(options.data, options.set.get("data", {}), likelihood=options.likelihood)
    if options.likelihood:
        task = _with_likelihood(task, options.likelihood)
    task = held_out(task, options.validation)
    if options.ood:
        task = replace(task, ood=load_inputs_for_ood(options.ood, task))
    name = options.model or task.model
    if is_import(name):
        task = replace(task, likelihoods=())  # nobody knows how many outputs it can have
    return job_of(task, name, options.set.get("model", {}))


def job_of(task: Task, name: str, changes: Mapping[str, Any]) -> Job:
    """A task with the network of a name, as it suits the task but for some changes of its options."""
    settings = (dict(task.model_options) if name == task.model else {}) | dict(changes)
    shape = task.example_shape
    network = {
        "name": name,
        "example_shape": list(shape) if isinstance(shape, tuple) else None,
        "num_outputs": task.num_outputs,
        "options": settings,
    }
    return Job(task, make_model(name, shape, task.num_outputs, settings), network)


def settled(
    job: Job, options: JobOptions, training: Mapping[str, Any], epochs: int, folder: Path, reporter: Reporter
) -> Job:
    """The job with the noise that a trial on validation data finds to suit its numbers."""
    name, changes = job.model_name, options.set.get("model", {})

    def model_for(likelihood: Likelihood) -> Model:
        outputs = num_outputs_for(likelihood, job.task.splits[0].train)
        return job_of(replace(job.task, num_outputs=outputs), name, changes).model

    [member] = make_methods({"single": "single"}, {}, training).values()
    computing: ComputingSettings = {**how_to_run(options), "engine": None}
    task = settle_likelihood(job.task, model_for, member, epochs, folder, reporter, **computing)
    return job if task is job.task else job_of(task, name, changes)


def load_reference(spec: str, task: Task) -> Reference | None:
    """Read the reference that was named, and check it against the task before anything is trained."""
    if not spec:
        return None
    reference = Reference.load(spec)
    check_reference_for(task, reference)
    judged = reference.about.get("verdict", {})
    if judged.get("is_fit") is False:
        warnings.warn(
            f"{spec} was written by force, it is not fit as a reference: {'; '.join(judged['reasons'])}.",
            stacklevel=2,
        )
    return reference


def _with_likelihood(task: Task, likelihood: str) -> Task:
    if likelihood not in LIKELIHOODS:
        raise unknown_name("likelihood", likelihood, LIKELIHOODS)
    classes = task.splits[0].preprocessing.classes
    if classes and LIKELIHOODS[likelihood].reads == "numbers":
        raise UsageError(
            f"--likelihood {likelihood} is about numbers, and the targets of {task.name} are {len(classes)} "
            "classes."
        )
    is_known = make_likelihood(task.likelihood).kind == likelihood
    outputs = task.num_outputs if is_known else num_outputs_for(likelihood, task.splits[0].train)
    return replace(task, likelihood=likelihood, num_outputs=outputs)


# --- methods ----------------------------------------------------------------------------------------


def make_methods(
    wanted: Mapping[str, str | dict], settings: Mapping[str, Any], suggested: Mapping[str, Any]
) -> dict[str, Method]:
    """Methods by label, with what suits the data, then what is set for all, then what is set for each.

    A method that is described in full (in a manifest) takes no suggestions.
    """
    for section in settings:
        if section not in ("data", "model", "all", *wanted):
            raise unknown_name("section of --set", section, ["data", "model", "all", *wanted])
    methods = {}
    for label, method in wanted.items():
        made = make_method(method)
        if isinstance(method, str):
            made = suited(made, suggested)
        methods[label] = with_common(made, settings.get("all", {}))
    for key in settings.get("all", {}):
        if all(path_of(method, key) is None for method in methods.values()):
            known = {f.name for method in methods.values() for f in fields(method)}
            raise unknown_name("option of all methods", key, known)
    return {label: make_method(method, settings.get(label)) for label, method in methods.items()}


def wanted_methods(text: str, default: Sequence[str]) -> dict[str, str]:
    """Labels and names from ``a,b``, ``label=name``, ``all`` or nothing."""
    if not text:
        return {name: name for name in default}
    if text == "all":
        return {name: name for name in METHODS if _is_comparable(name)}
    wanted: dict[str, str] = {}
    for entry in text.split(","):
        label, _, name = entry.strip().partition("=")
        name = name or label
        if name not in METHODS:
            raise unknown_name("method", name, METHODS)
        if not re.fullmatch(r"[\w+-][\w.+-]*", label) or label in ("data", "model", "all"):
            raise UsageError(
                f"The label {label!r} must be of letters, digits, '_', '-', '.' and '+', and must not begin "
                "with a dot."
            )
        if label in wanted:
            raise UsageError(f"The label {label!r} occurs twice: write other={name} to tell them apart.")
        wanted[label] = name
    return wanted


def _is_comparable(name: str) -> bool:
    """Whether a method competes at any size.

    Samplers to judge by, those that begin at others' networks and those for small networks do not.
    """
    unfit = METHODS[name].reference or make_method(name).needs_initial
    return not unfit and name not in COMPARED_WHERE_SMALL


def how_to_run(options: JobOptions) -> ComputingSettings:
    """The keywords of a run that say where and how, not what."""
    return {
        "device": options.device or None,
        "backend": options.backend,
        "threads": options.threads,
        "precision": options.precision,
        "engine": options.made_engine,
    }


# --- folders ----------------------------------------------------------------------------------------


def run_folder(given: str, kind: str, parts: Sequence[str], identity: Mapping[str, Any]) -> Path:
    """The folder that was given, or one whose name follows from the options: the same command goes on."""
    if given:
        return Path(given)
    names = [Path(part).stem if "/" in part or "." in Path(part).name else part for part in parts]
    words = [re.sub(r"[^\w-]+", "-", name).strip("-") for name in names]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:6]
    return Path("runs") / "-".join([kind, *words, digest])


def observer_maker(options: JobOptions) -> Callable[[Path], Callable[[Epoch], None] | None]:
    """What watches a run: a TensorBoard writer, where it is asked for."""
    if not options.tensorboard:
        return lambda folder: None
    return lambda folder: TensorBoard(folder / "tensorboard")
