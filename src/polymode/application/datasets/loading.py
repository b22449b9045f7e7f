"""Data sets by name, path or import: fetched, checked, and made into tasks."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode.application.datasets import characters, folders, imdb, new_rows, tables
from polymode.application.datasets.catalogue import DATASETS, DataSet, Expected
from polymode.application.datasets.downloads import data_folder, fetch
from polymode.data.sources import ArrayData, Data
from polymode.data.task import Preprocessing, Task, as_task
from polymode.errors import InputError, UnknownName, require, unknown_name
from polymode.imports import call, import_object, is_import
from polymode.trees import map_tree

FileProgress = Callable[[str, int, int | None], None]


def is_ready(dataset: DataSet, folder: Path | str | None = None) -> bool:
    """Whether all files of a data set are in the data folder."""
    root = data_folder() if folder is None else Path(folder)
    return all((root / file).is_file() for file in dataset.files)


def fetch_data(
    name: str, folder: Path | str | None = None, progress: FileProgress | None = None
) -> list[Path]:
    """Download what a data set lacks, unpack it, and return its files.

    progress: called with the file's name, the bytes done and the bytes in all (None where unknown).
    """
    dataset = _dataset(name)
    root = data_folder() if folder is None else Path(folder)
    if not is_ready(dataset, root):
        for download in dataset.downloads:
            report = None if progress is None else partial(progress, Path(download.file).name)
            fetch(download, root, progress=report)
        if dataset.after is not None:
            dataset.after(root)
    return [root / file for file in dataset.files]


def check_data(name: str, folder: Path | str | None = None) -> list[str]:
    """Read a data set and compare it with what is known of it; returns a line for every fact that holds."""
    dataset = _dataset(name)
    root = data_folder() if folder is None else Path(folder)
    task = load_task(name, {}, folder=root)
    lines = []
    for what, seen, expected in _facts_of(task, dataset.expected, root):
        if not _agree(seen, expected):
            raise InputError(
                f"The data set {name!r} differs from the official one: {what} {_said(seen)}, expected was "
                f"{_said(expected)}. Delete its files in {root.absolute()} and run `polymode data fetch "
                f"{name}`."
            )
        lines.append(f"{what}: {_said(seen)}")
    return lines


def load_task(
    spec: str, options: Mapping[str, Any], folder: Path | str | None = None, *, likelihood: str = ""
) -> Task:
    """The task that a specification names, made with the options of its loader.

    spec: a name of ``DATASETS``; a path to a table (.csv, .tsv, .parquet, .npz), to a text (.txt) or to a
    folder of images; or "package.module:callable" for a function of your own (found from the current folder
    too), whose result ``as_task`` reads. likelihood: what the targets mean, for loaders that read them by it.
    """
    if spec in DATASETS:
        root = data_folder() if folder is None else Path(folder)
        return _load_known(DATASETS[spec], options, root, likelihood)
    if Path(spec).suffix.lower() in new_rows.SUFFIXES:
        meant = {"likelihood": likelihood} if likelihood else {}
        return call(partial(tables.table, spec), {**options, **meant}, f"the table {spec}")
    if Path(spec).suffix.lower() in characters.SUFFIXES:
        return call(partial(characters.text, spec), options, f"the text {spec}")
    if Path(spec).is_dir():
        return call(partial(folders.image_folder, spec), options, f"the image folder {spec}")
    if is_import(spec):
        return as_task(call(_function(spec), options, spec), spec)
    known = str(unknown_name("data set", spec, DATASETS))
    raise UnknownName(
        f"{known} A path to a table ({', '.join(new_rows.SUFFIXES)}), to a text "
        f"({', '.join(characters.SUFFIXES)}) or to an image folder, and package.module:callable for your own "
        "function, work as well."
    )


def load_inputs_for_ood(spec: str, task: Task, folder: Path | str | None = None) -> ArrayData:
    """Test inputs of another data set, prepared as those of the task, to be its foreign data.

    Its own standardisation is undone and the task's applied; image files and tables are read as the task's.
    """
    ready = task.splits[0].preprocessing
    path = Path(spec)
    if spec not in DATASETS and ready.source == "images" and path.is_dir():
        inputs, _ = folders.read_images(path, ready)
    elif spec not in DATASETS and ready.source == "table" and path.suffix.lower() in new_rows.SUFFIXES:
        inputs, _ = new_rows.read_table(path, ready)
    elif spec not in DATASETS and ready.symbols and path.suffix.lower() in characters.SUFFIXES:
        inputs, _ = characters.read_text(path, ready)
    else:
        inputs = _foreign_inputs(load_task(spec, {}, folder), ready, task)
    _check_task_shape(inputs, spec, task)
    return ArrayData(
        inputs, torch.zeros(len(inputs), dtype=torch.int64), batch_size=task.splits[0].train.batch_size
    )


def load_labelled(
    spec: str, ready: Preprocessing, folder: Path | str | None = None, *, likelihood: str = ""
) -> ArrayData:
    """Labelled examples from a table, a text, a folder of images or a data set, prepared as ``ready`` says.

    Of a data set or a function the test data are taken; their own standardisation is undone first.
    likelihood: as ``load_task`` has it.
    """
    path = Path(spec)
    if spec not in DATASETS and path.suffix.lower() in new_rows.SUFFIXES:
        inputs, targets = new_rows.read_table(path, ready, need_target=True)
        assert targets is not None
        return ArrayData(inputs, targets)
    if spec not in DATASETS and path.suffix.lower() in characters.SUFFIXES:
        return ArrayData(*characters.read_text(path, ready))
    if spec not in DATASETS and path.is_dir():
        return folders.labelled_images(path, ready)
    split = load_task(spec, {}, folder, likelihood=likelihood).splits[0]
    theirs, examples = split.preprocessing, list(split.test.in_order())
    inputs = map_tree(lambda *t: torch.cat(t), *(part.inputs for part in examples))
    if isinstance(inputs, Tensor):  # several inputs are the user's own, and taken as they are
        inputs = ready.inputs(theirs.raw(inputs))
    targets = torch.cat([part.targets for part in examples])
    if targets.is_floating_point():
        return ArrayData(inputs, ready.targets(targets * theirs.target_scale + theirs.target_shift))
    if theirs.classes and ready.classes and theirs.classes != ready.classes:
        for name in theirs.classes:
            if name not in ready.classes:
                raise unknown_name(f"class of {spec}", name, ready.classes)
        targets = torch.tensor([ready.classes.index(name) for name in theirs.classes])[targets]
    return ArrayData(inputs, targets)


# Loaders and their options.


def _dataset(name: str) -> DataSet:
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    return DATASETS[name]


def _function(spec: str) -> Callable[..., Any]:
    found = import_object(spec, "The data")
    require(callable(found), f"{spec} is a {type(found).__name__}: name a function that returns the data.")
    return found


def _load_known(dataset: DataSet, options: Mapping[str, Any], folder: Path, likelihood: str) -> Task:
    parameters = inspect.signature(dataset.load).parameters
    load = partial(dataset.load, folder=folder) if "folder" in parameters else dataset.load
    if likelihood and "likelihood" in parameters:
        options = {**options, "likelihood": likelihood}
    return call(load, options, f"the data set {dataset.name}")


# Foreign data.


def _foreign_inputs(other: Task, ready: Preprocessing, task: Task) -> Tensor:
    parts = [part.inputs for part in other.splits[0].test.in_order()]
    require(
        all(isinstance(part, Tensor) for part in parts),
        f"The inputs of {other.name} are several arrays; foreign data for {task.name} must be one.",
    )
    inputs = torch.cat(parts)
    _check_task_shape(inputs, other.name, task)
    return ready.inputs(other.splits[0].preprocessing.raw(inputs))


def _check_task_shape(inputs: Tensor, name: str, task: Task) -> None:
    seen, expected = inputs.shape[1:], task.example_shape
    require(
        seen == expected,
        f"Examples of {name} are {list(seen)}, those of {task.name} are "
        f"{list(expected) if isinstance(expected, torch.Size) else expected}; foreign data must have the "
        "task's shape.",
    )


# Facts.


def _facts_of(task: Task, expected: Expected, folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """What a fact is about, what the data say, and what they should say."""
    split = task.splits[0]
    train, test = _arrays(split.train), _arrays(split.test)
    validation = 0 if split.validation is None else split.validation.num_examples
    yield "training examples", train.num_examples + validation, expected.num_train
    yield "test examples", test.num_examples, expected.num_test
    yield "splits", len(task.splits), expected.num_splits
    classes = range(task.num_outputs)
    for part, data, counts, first in (
        ("training", train, expected.train_counts, expected.first_train),
        ("test", test, expected.test_counts, expected.first_test),
    ):
        if counts:
            yield (
                f"{part} examples of each class",
                tuple(int((data.targets == c).sum()) for c in classes),
                counts,
            )
        if first:
            yield f"first {part} labels", tuple(data.targets[: len(first)].tolist()), first
    if expected.channel_means:
        means = split.preprocessing.raw(train.inputs.mean((0, 2, 3))[None])[0]
        yield "channel means of the training images", tuple(means.tolist()), expected.channel_means
    if expected.num_features is not None:
        yield "features", train.inputs.shape[1], expected.num_features
    if expected.target is not None:
        targets = torch.cat([train.targets, test.targets]).double()
        targets = targets * split.preprocessing.target_scale + split.preprocessing.target_shift
        seen = (targets.mean().item(), targets.std(correction=0).item())
        yield "mean and standard deviation of the target", seen, expected.target
    if expected.text:
        text = _first_text(train, split.preprocessing, folder)
        yield "start of the first training text", text[: len(expected.text)], expected.text


def _first_text(train: ArrayData, ready: Preprocessing, folder: Path) -> str:
    if ready.symbols:
        return "".join(ready.classes[number] for number in train.inputs[0].tolist())
    return imdb.read_reviews(folder, "train")[0][0]


def _arrays(data: Data) -> ArrayData:
    assert isinstance(data, ArrayData)  # all loaders of the catalogue make arrays
    return data


def _agree(seen: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return len(seen) == len(expected) and all(map(_agree, seen, expected))
    # Published means and deviations have four digits.
    return abs(seen - expected) <= 6e-4 * abs(expected) if isinstance(expected, float) else seen == expected


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        parts = [_said(part) for part in value]
        # One number where a hundred classes are equal.
        return f"{parts[0]} each" if len(parts) > 1 == len(set(parts)) else ", ".join(parts)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
