"""``polymode landscape``: pictures of the networks of runs, or of checkpoints trained elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polymode.application.atlas.making import SHIFT, VIEWS, make_views
from polymode.application.atlas.material import (
    Looking,
    Material,
    Track,
    as_arrays,
    check_same_points,
    first,
)
from polymode.application.atlas.opinions import scores_table
from polymode.application.atlas.probabilities import distinct
from polymode.application.cli.atlas import check_folder, keep_views, show_views, survey_progress
from polymode.application.cli.corruptions import GROUPS
from polymode.application.cli.jobs import JobOptions, load_job, run_folder
from polymode.application.cli.options import ComputingOptions, UsageError, command_line, config_of, option
from polymode.application.cli.output import reporter_of
from polymode.application.cli.runs import StoredRun
from polymode.application.comparison import stated
from polymode.application.datasets.corruptions.making import ALL_CORRUPTIONS, find_frost
from polymode.application.datasets.corruptions.reading import image_bytes
from polymode.application.report import require_plotly
from polymode.application.report.atlas_page import FORMATS
from polymode.data import Preprocessing
from polymode.errors import unknown_name
from polymode.landscape import networks_of
from polymode.likelihoods import make_likelihood
from polymode.posteriors import from_state_dicts
from polymode.posteriors.particles import BlockPosterior
from polymode.training.loop.arithmetic import with_threads
from polymode.trees import map_tree

ABOUT = f"""Look at networks: how they differ, where they lie, what lies between them.

Runs of polymode train or compare (methods such as trajectory keep checkpoints of a training), or checkpoints
of any other library with --checkpoints, --model and --data. Views: {", ".join((*VIEWS, SHIFT))}."""


@dataclass(frozen=True)
class LandscapeOptions(ComputingOptions):
    """Options of ``polymode landscape``."""

    runs: tuple[str, ...] = option((), "folders of runs of one network on the same data", place="argument")
    checkpoints: tuple[str, ...] = option(
        (),
        "instead of runs: files of state_dicts trained elsewhere (.safetensors, or .pt, which are read as "
        "weights only), a network each",
        metavar="FILE",
    )
    model: str = option(
        "", "the network: needed for checkpoints, and for runs of your own code", metavar="MODEL"
    )
    data: str = option("", "labelled data: needed for checkpoints (default: the run's own)", metavar="DATA")
    likelihood: str = option("", "with checkpoints: meaning of the outputs (default: what suits the data)")
    ood: str = option("", "data set outside the distribution (default: that of the run)")
    set: dict = option({}, "with checkpoints: options of the data (data.…) and of the model (model.…)")
    views: str = option(
        "", f"only these, with commas: {', '.join((*VIEWS, SHIFT))} (default: all there can be)"
    )
    points: int = option(1000, "test points to look at")
    grid: int = option(25, "values along each axis of a plane")
    draws: int = option(10, "networks of each subspace around an end")
    corruptions: str = option(
        "", "for images: corruptions of the view shift, with commas, or standard, or all", metavar="NAMES"
    )
    steps: str = option(
        "relative",
        "lengths of steps in subspaces: relative to the length of a solution, or as published (for raw "
        "pixels)",
        choices=("relative", "published"),
    )
    least_accuracy: float | None = option(
        None, "of random samples on validation data (default: 0.05 below their solution)"
    )
    seed: int = option(0, "of samples and maps")
    figures: str = option("", f"also write figures as files: {' or '.join(FORMATS)}, in light and dark")
    out: str = option("", "folder of the page (default: runs/ and a name made of the options)")
    trust: bool = option(
        False, "import whatever code a run's folder names: only for folders you trust", place="screen"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("points", 2), ("grid", 3), ("draws", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} must be at least {least}, got {getattr(self, name)}.")
        if self.least_accuracy is not None and not 0 <= self.least_accuracy <= 1:
            raise UsageError(f"--least-accuracy lies between 0 and 1, got {self.least_accuracy}.")
        if self.figures and self.figures not in FORMATS:
            raise unknown_name("kind of figures", self.figures, FORMATS)
        for name in self.wanted_views:
            if name not in (*VIEWS, SHIFT):
                raise unknown_name("view", name, (*VIEWS, SHIFT))
        for name in self.wanted_corruptions:
            if name not in ALL_CORRUPTIONS:
                raise unknown_name("corruption", name, (*ALL_CORRUPTIONS, *GROUPS))

    @property
    def wanted_views(self) -> list[str]:
        return [name.strip() for name in self.views.split(",") if name.strip()]

    @property
    def wanted_corruptions(self) -> Sequence[str]:
        if not self.corruptions:
            return ()
        return GROUPS.get(self.corruptions) or [name.strip() for name in self.corruptions.split(",")]


def run(options: LandscapeOptions) -> None:
    """Open the networks, make the views, write the page."""
    require_plotly()
    if bool(options.runs) == bool(options.checkpoints):
        raise UsageError("Name folders of runs, or files with --checkpoints (and --model and --data).")
    if "frost" in options.wanted_corruptions:
        find_frost()
    if options.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {options.seed}.")
    names = [Path(run).resolve().name for run in options.runs]
    names += [Path(file).stem for file in options.checkpoints]
    folder = run_folder(options.out, "landscape", names[:3], config_of(options))
    check_folder(folder, config_of(options))
    reporter = reporter_of(options)
    looking = Looking(
        options.points,
        options.grid,
        options.draws,
        options.steps == "published",
        options.least_accuracy,
        seed=options.seed,
    )
    found = _of_runs(options) if options.runs else _of_checkpoints(options)
    material = Material(
        **found,
        folder=folder,
        looking=looking,
        report=reporter.say,
        progress=survey_progress(reporter),
    )
    if options.wanted_corruptions:
        image_bytes(first(material.test, 1).inputs, material.preprocessing)  # raises unless they are images
    with with_threads(options.threads or 1):
        views = keep_views(make_views(material, options.wanted_views, options.wanted_corruptions), folder)
        rows = []
        if material.is_classes:
            rows = scores_table([material.opinions(track) for track in material.tracks], material.labels)
    if not views:
        reasons = " ".join(f"{name}: {reason}" for name, reason in material.left_out.items())
        raise UsageError(f"These networks allow none of the views {options.views or 'there are'}. {reasons}")
    show_views(
        options,
        views,
        folder,
        title=f"Landscape of {', '.join(names[:5])}{', …' if len(names) > 5 else ''}",
        about=_about(material),
        notes=material.notes,
        left_out=material.left_out,
        rows=rows,
        command=command_line("landscape", options),
        figures=options.figures,
        details=config_of(options),
        reporter=reporter,
    )


def _about(material: Material) -> str:
    networks = sum(track.networks.num_members for track in (*material.tracks, *material.tunnels))
    module = material.space.network.module
    kind = type(getattr(module, getattr(module, "wraps", ""), module)).__name__  # without a likelihood's part
    runs = f"{len(material.tracks)} run{'s'[: len(material.tracks) != 1]}"
    runs += (
        f" and {len(material.tunnels)} tunnel{'s'[: len(material.tunnels) > 1]}" if material.tunnels else ""
    )
    return (
        f"{runs}, {networks} networks ({kind}, {material.space.dimension:,} "
        f"weights), looked at on {material.points.num_examples} test points."
    )


def _of_runs(options: LandscapeOptions) -> dict[str, Any]:
    """The trainings that run folders hold, with the data of the first."""
    tracks, tunnels, tests = [], [], []
    opened = None
    names = distinct([Path(folder).resolve().name for folder in options.runs])
    for place, folder in enumerate(options.runs):
        if Path(folder).is_file():
            raise UsageError(f"{folder} is a file: files of state_dicts are named with --checkpoints.")
        stored = StoredRun.open(
            folder,
            options.model,
            [options.data, options.ood],
            trust=options.trust,
            baseline=place > 0 and not options.model,
            own_data=not options.data,
        )
        opened = opened or stored
        name = names[place]
        method = _innermost(stored.manifest["method"])
        for index in range(stored.num_posteriors):
            if stored.place(index) > 0:  # other splits have other test points
                continue
            if index == 0:
                tests.append((folder, as_arrays(stored.split(options.data, 0).test)))
            suffix = f" seed {index}" if stored.num_posteriors > 1 else ""
            posterior = stored.posterior(index)
            if method["name"] == "trajectory" and not isinstance(posterior, BlockPosterior):
                raise UsageError(
                    f"{folder} is a trajectory of draws ({posterior.kind}), which have no order in a "
                    "training: look at trajectories of methods that train whole networks, such as single."
                )
            chains = networks_of(posterior).chains()
            for (_, chain), networks in chains.items():
                label = f"{name}{suffix}" + (f" chain {chain}" if len(chains) > 1 else "")
                label = stated(label, stored.manifest["method"])
                phases = _phases(posterior.record, method, networks.num_members)
                found = Track(label, networks, method["name"], phases)
                (tunnels if method["name"] == "tunnel" else tracks).append(found)
    tracks, tunnels = _told_apart(tracks), _told_apart(tunnels)
    check_same_points(tests)
    assert opened is not None
    split = opened.split(options.data, 0)
    foreign = None
    if options.ood:
        foreign = opened.with_ood(opened.own_task, options.ood).ood
    elif not options.data:
        foreign = opened.own_ood
    own = split.train if not options.data else None
    return {
        "tracks": tracks,
        "tunnels": tunnels,
        "test": tests[0][1],
        "train": None if own is None else as_arrays(own),
        "validation": None if split.validation is None else as_arrays(split.validation),
        "foreign": None if foreign is None else _some(as_arrays(foreign).inputs, options.points),
        "preprocessing": opened.preprocessing(0),
    }


def _told_apart(tracks: Sequence[Track]) -> list[Track]:
    """The tracks with labels that are all different."""
    labels = distinct([track.label for track in tracks])
    return [replace(track, label=label) for track, label in zip(tracks, labels, strict=True)]


def _innermost(method: Mapping[str, Any]) -> Mapping[str, Any]:
    """The method that each chain of an ensemble runs."""
    while method.get("name") == "deep_ensemble" and isinstance(method.get("of"), Mapping):
        method = method["of"]
    return method


def _phases(record: Mapping[str, Any], method: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """The phase that each checkpoint of a trajectory was kept in; empty where there is one, or no telling."""
    if method.get("name") != "trajectory" or method.get("every_steps"):
        return ()
    history, every, first = record.get("history"), method.get("every"), bool(method.get("initial"))
    if not isinstance(history, list) or not isinstance(every, int) or every < 1:
        return ()
    if not all(isinstance(row, Mapping) for row in history):
        return ()
    kept = [str(row.get("phase", "")) for row in history][::-1][::every][::-1]
    kept = kept[max(0, len(kept) - number + first) :]
    if len(kept) + first != number or len(set(kept)) < 2:
        return ()
    return ("start", *kept) if first else tuple(kept)


def _of_checkpoints(options: LandscapeOptions) -> dict[str, Any]:
    """Networks from files, one training each."""
    if not options.model or not options.data:
        raise UsageError("--checkpoints needs the network and labelled data: --model MODEL --data DATA.")
    job = load_job(
        JobOptions(
            data=options.data,
            model=options.model,
            likelihood=options.likelihood,
            ood=options.ood,
            set=options.set,
        )
    )
    posterior = from_state_dicts(
        job.model, list(options.checkpoints), likelihood=make_likelihood(job.task.likelihood)
    )
    labels = distinct([Path(file).stem for file in options.checkpoints])
    tracks = [Track(label, posterior.only([i]), "checkpoint") for i, label in enumerate(labels)]
    split = job.task.splits[0]
    foreign = job.task.ood
    return {
        "tracks": tracks,
        "tunnels": [],
        "test": as_arrays(split.test),
        "train": as_arrays(split.train),
        "validation": None if split.validation is None else as_arrays(split.validation),
        "foreign": None if foreign is None else _some(as_arrays(foreign).inputs, options.points),
        "preprocessing": split.preprocessing or Preprocessing(),
    }


def _some(inputs: Any, count: int) -> Any:
    return map_tree(lambda t: t[:count], inputs)
