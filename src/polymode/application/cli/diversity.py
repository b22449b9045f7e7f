"""``polymode diversity``: how networks differ, from anybody's probabilities; no model is needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polymode.application.atlas.opinions import (
    MOST_IN_MATRIX,
    Opinions,
    map_view,
    pairs_view,
    plane_view,
    scores_table,
    similarity_view,
    sizes_view,
)
from polymode.application.atlas.probabilities import read_predictions
from polymode.application.atlas.view import View
from polymode.application.cli.atlas import check_folder, keep_views, show_views
from polymode.application.cli.jobs import run_folder
from polymode.application.cli.options import ComputingOptions, UsageError, command_line, config_of, option
from polymode.application.cli.output import reporter_of
from polymode.application.report import require_plotly
from polymode.application.report.atlas_page import FORMATS
from polymode.errors import InputError, unknown_name
from polymode.training.loop.arithmetic import with_threads

ABOUT = """Do the members of an ensemble really differ? From saved probabilities of any library.

Files: .npz or .safetensors, each the members of one run: an array [members, points, classes] (named
probabilities, probs, predictions, or anything if it is the only one), or an array [points, classes] for each
member. Labels [points] in one of the files (labels, targets or y), or in --labels."""


@dataclass(frozen=True)
class DiversityOptions(ComputingOptions):
    """Options of ``polymode diversity``."""

    files: tuple[str, ...] = option((), "files of probabilities, one for each run", place="argument")
    labels: str = option("", "file with the labels (.npz, .npy, .safetensors)", metavar="FILE")
    seed: int = option(0, "of the map")
    figures: str = option("", f"also write figures as files: {' or '.join(FORMATS)}, in light and dark")
    out: str = option("", "folder of the page (default: runs/ and a name made of the options)")


def run(options: DiversityOptions) -> None:
    """Read, compare, write the page."""
    require_plotly()
    if not options.files:
        raise UsageError("Name files of probabilities: polymode diversity FILE [FILE …].")
    if options.figures and options.figures not in FORMATS:
        raise unknown_name("kind of figures", options.figures, FORMATS)
    reporter = reporter_of(options)
    read = read_predictions(options.files, options.labels)
    groups = [Opinions(label, values) for label, values in read.runs.items()]
    folder = run_folder(options.out, "diversity", list(read.runs)[:3], config_of(options))
    check_folder(folder, config_of(options))
    if options.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {options.seed}.")
    with with_threads(options.threads or 1):  # more wait for each other where a machine is busy
        left_out: dict[str, str] = {}
        views = keep_views(_views(groups, read.labels, options.seed, left_out), folder)
        rows = scores_table(groups, read.labels)
    networks, (_, points, classes) = sum(g.number for g in groups), groups[0].values.shape
    show_views(
        options,
        views,
        folder,
        title=f"Diversity of {', '.join(list(read.runs)[:5])}",
        about=f"{networks} networks on {points} points of {classes} classes.",
        rows=rows,
        notes=(),
        left_out=left_out,
        command=command_line("diversity", options),
        figures=options.figures,
        details=config_of(options),
        reporter=reporter,
    )


def _views(
    groups: Sequence[Opinions], labels: Tensor | None, seed: int, left_out: dict[str, str]
) -> Iterator[View]:
    shown = [group.thinned(max(2, MOST_IN_MATRIX // len(groups))) for group in groups]
    made: list[View | None] = [similarity_view(shown)]
    if len(groups) > 1:
        made.append(pairs_view(shown, ordered=False))
    try:
        made.append(map_view(shown, seed=seed))
    except InputError as error:  # such as networks that are all the same
        left_out["map"] = str(error)
    if labels is not None:
        first = groups[0]
        apart = [Opinions(f"others of {first.label}", first.values[1:], "end")]
        apart += [Opinions(group.label, group.values, "end") for group in groups[1:]]
        name = f"the first network of {first.label}"
        made.append(plane_view(first.values[0], [g for g in apart if g.number], labels, base_name=name))
        if len(groups) > 1:
            means = torch.stack([group.values.mean(0) for group in groups])
            made.append(sizes_view({"mean of each run": means}, labels))
    return (view for view in made if view is not None)
