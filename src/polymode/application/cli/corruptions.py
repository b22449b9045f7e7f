"""``polymode evaluate --corruptions``: the posteriors of a run on corrupted images."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from polymode.application.cli.options import UsageError
from polymode.application.cli.runs import StoredRun
from polymode.application.comparison import Robustness, Summary, judge_corrupted
from polymode.application.comparison.robustness import CORRUPTION_SCORES
from polymode.application.datasets.corruptions.making import ALL_CORRUPTIONS, CORRUPTIONS, find_frost
from polymode.application.datasets.corruptions.reading import (
    Blocks,
    image_bytes,
    made_blocks,
    official_blocks,
)
from polymode.application.datasets.corruptions.severities import NUM_SEVERITIES
from polymode.application.datasets.downloads import data_folder
from polymode.application.datasets.images import Labelled
from polymode.data import Preprocessing, arrays_of
from polymode.errors import InputError, unknown_name
from polymode.metrics import Bins
from polymode.training.keeping.progress import Reporter

GROUPS = {"all": ALL_CORRUPTIONS, "standard": CORRUPTIONS}
OFFICIAL = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}  # where their files lie in the data folder
TITLES = {"accuracy": "accuracy ↑", "nll": "NLL ↓", "ece": "ECE ↓"}
MEANINGS = {
    "corruption_accuracy": ("cAcc", "accuracy over all corruptions and severities"),
    "corruption_nll": ("cNLL", "NLL over all corruptions and severities"),
    "corruption_error": ("mean error", "of standard corruptions and their severities"),
    "mean_corruption_error": (
        "mCE",
        "errors over those of the baseline, mean over standard corruptions, ×100",
    ),
    "relative_corruption_error": ("relative mCE", "the same of errors beyond those on clean images"),
}


@dataclass(frozen=True)
class CorruptedImages:
    """What to judge on: corruptions, severities, the number of images (0: all) and a folder of them."""

    names: tuple[str, ...]
    severities: tuple[int, ...]
    num_images: int
    folder: str

    @classmethod
    def wanted(cls, names: str, severities: str, num_images: int, folder: str) -> "CorruptedImages":
        """Read what was typed."""
        chosen = GROUPS.get(names) or tuple(dict.fromkeys(part.strip() for part in names.split(",")))
        for name in chosen:
            if name not in ALL_CORRUPTIONS:
                raise unknown_name("corruption", name, (*ALL_CORRUPTIONS, *GROUPS))
        try:
            levels = tuple(sorted({int(part) for part in severities.split(",")}))
        except ValueError:
            raise UsageError(f"--severities {severities!r}: write whole numbers, such as 1,3,5.") from None
        if not all(1 <= level <= NUM_SEVERITIES for level in levels):
            raise UsageError(f"--severities {severities!r}: they go from 1 to {NUM_SEVERITIES}.")
        if num_images < 0:
            raise UsageError(f"--corruption-images must be a number of images, got {num_images}.")
        return cls(chosen, levels, num_images, folder)


@dataclass(frozen=True)
class JudgedRun:
    """Scores of every posterior of a run; of the baseline's posteriors on the same images, where given."""

    found: Sequence[Robustness]
    against: Sequence[Sequence[Robustness]]
    source: str
    num_images: int

    def summaries(self) -> list[dict[str, float]]:
        """The numbers over all corruptions, for every posterior."""
        return [
            each.summary | (each.against(below) if below else {})
            for each, below in zip(self.found, self.against, strict=True)
        ]

    def documents(self) -> list[dict[str, Any]]:
        return [each.document() | summary for each, summary in zip(self.found, self.summaries(), strict=True)]


def judge_run(
    stored: StoredRun,
    data: str,
    images: CorruptedImages,
    baseline: StoredRun | None,
    num_draws: int,
    bins: Bins,
    reporter: Reporter,
) -> JudgedRun:
    """Judge the posteriors of all splits and seeds; those of one split see the same corrupted images."""
    spec = data or stored.options["data"]
    if spec == "cifar10_shifted":
        raise UsageError("The test images of cifar10_shifted are corrupted already: add --data cifar10.")
    if baseline is not None and not set(images.names) & set(CORRUPTIONS):
        raise UsageError("--baseline needs one of the fifteen standard corruptions, which mCE is about.")
    found: list[Robustness] = []
    against: list[list[Robustness]] = []
    source, num_images = "", 0
    for indices, others in _by_split(stored, baseline):
        ready = stored.preprocessing(indices[0])
        clean = _clean_images(stored, data, indices[0], ready, images.num_images)
        blocks, source = _blocks(spec, images, ready, clean)
        num_images = len(clean[1])
        pairs = [(stored.posterior(index), stored.preprocessing(index)) for index in indices]
        if baseline is not None:
            pairs += [(baseline.posterior(index), _same_images(baseline, index, ready)) for index in others]
        judged = judge_corrupted(
            pairs,
            clean,
            blocks,
            images.names,
            images.severities,
            num_draws=num_draws,
            bins=bins,
            progress=_Progress(reporter, len(images.names)),
        )
        found += judged[: len(indices)]
        against += [judged[len(indices) :]] * len(indices)
    return JudgedRun(found, against, source, num_images)


def _by_split(stored: StoredRun, baseline: StoredRun | None) -> Iterator[tuple[list[int], list[int]]]:
    """The posteriors of each split, with those of the baseline for it."""
    ours, theirs = (
        [] if run is None else [run.place(index) for index in range(run.num_posteriors)]
        for run in (stored, baseline)
    )
    if baseline is not None and set(ours) != set(theirs):
        raise UsageError(
            f"{baseline.folder} has {len(set(theirs))} splits of its data and {stored.folder} has "
            f"{len(set(ours))}: a baseline is trained on the same splits."
        )
    for place in sorted(set(ours)):
        yield (
            [index for index, other in enumerate(ours) if other == place],
            [index for index, other in enumerate(theirs) if other == place],
        )


def _clean_images(
    stored: StoredRun, data: str, index: int, ready: Preprocessing, num_images: int
) -> Labelled:
    inputs, labels = arrays_of(stored.split(data, index).test)
    if not isinstance(inputs, Tensor):
        raise InputError("Corruptions are for images; these examples are several arrays.")
    rows = slice(num_images or None)
    return image_bytes(inputs[rows], ready), labels[rows].cpu().numpy()


def _blocks(spec: str, images: CorruptedImages, ready: Preprocessing, clean: Labelled) -> tuple[Blocks, str]:
    """Where corrupted images come from, with a word for it: official files if there, or else made."""
    folder = Path(images.folder)
    if not images.folder and spec in OFFICIAL:
        folder = data_folder() / OFFICIAL[spec]
        if not all((folder / f"{name}.npy").is_file() for name in (*images.names, "labels")):
            folder = Path()
    if folder != Path():
        return official_blocks(folder, ready, clean), f"from {folder}"
    if "frost" in images.names:
        find_frost()  # before hours of other corruptions
    return made_blocks(clean), "made"


def _same_images(baseline: StoredRun, index: int, ready: Preprocessing) -> Preprocessing:
    theirs = baseline.preprocessing(index)
    if (theirs.image_shape, theirs.classes) != (ready.image_shape, ready.classes):
        raise UsageError(
            f"{baseline.folder} was trained on other images or classes: {list(theirs.image_shape)} and "
            f"{len(theirs.classes)} classes, not {list(ready.image_shape)} and {len(ready.classes)}."
        )
    return theirs


class _Progress:
    """A line for every corruption, with the time that is left."""

    def __init__(self, reporter: Reporter, total: int) -> None:
        self.reporter, self.total = reporter, total
        self.began = time.monotonic()

    def __call__(self, done: int, name: str) -> None:
        self.began = self.began if done else time.monotonic()
        left = (time.monotonic() - self.began) / max(done, 1) * (self.total - done)
        self.reporter.say(
            f"{name}: corruption {done + 1} of {self.total}" + (f", eta {left:.0f} s" if done else "")
        )


def corruption_table(title: str, judged: JudgedRun) -> Table:
    """Scores of each corruption, means over severities, and the accuracy at each of them."""
    found = judged.found
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("corruption", no_wrap=True)
    for key in CORRUPTION_SCORES:
        table.add_column(TITLES[key], justify="right")
    severities = list(next(iter(found[0].corrupted.values())))
    for severity in severities:
        table.add_column(f"accuracy at {severity}", justify="right", overflow="fold")
    table.add_row(
        "none", *(Summary.of([each.clean[key] for each in found]).text(4) for key in CORRUPTION_SCORES)
    )
    for name in found[0].corrupted:
        means = [
            Summary.of([float(np.mean(each.values(key)[name])) for each in found])
            for key in CORRUPTION_SCORES
        ]
        levels = [
            Summary.of([each.corrupted[name][severity]["accuracy"] for each in found])
            for severity in severities
        ]
        table.add_row(name, *(mean.text(4) for mean in (*means, *levels)))
    return table


def summary_lines(judged: JudgedRun) -> list[str]:
    """The numbers over all corruptions, a line each."""
    summaries, lines = judged.summaries(), []
    for key in summaries[0]:
        title, meaning = MEANINGS[key]
        summary = Summary.of([each[key] for each in summaries])
        shown = summary.text(4)
        if key not in ("corruption_accuracy", "corruption_nll"):
            meaning += f" ({len(judged.found[0].errors)} of {len(CORRUPTIONS)} were judged)"
        if math.isnan(summary.mean):
            shown, meaning = "–", "not defined: the baseline makes no errors, or none beyond clean images"
        lines.append(f"{title:<13} {shown:<16} {meaning}")
    return lines
