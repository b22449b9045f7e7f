"""Run folders as commands read them: posteriors, and new examples brought into the shape they know."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.cli.options import UsageError
from polymode.comparison import TASK
from polymode.data import Preprocessing, Split, Task, as_tree, characters
from polymode.data.folders import read_images
from polymode.data.loading import load_inputs_for_ood, load_labelled, load_task
from polymode.data.tables import SUFFIXES, read_rows
from polymode.errors import CheckpointError, require
from polymode.evaluation import arrays_of
from polymode.imports import import_object, is_import
from polymode.models import make_model
from polymode.posteriors import Posterior, load_posterior
from polymode.posteriors.base import MANIFEST
from polymode.storage import read_document
from polymode.training.setup import fingerprint
from polymode.trees import Tree


@dataclass(frozen=True)
class StoredRun:
    """A finished run that ``polymode train`` or ``compare`` made."""

    folder: Path
    manifest: dict[str, Any]
    task: dict[str, Any]

    @classmethod
    def open(cls, folder: str) -> "StoredRun":
        path = Path(folder)
        if not path.is_dir():
            raise CheckpointError(f"{folder} is not a folder: name the folder of a run.")
        if (path / "comparison.json").exists():
            runs = sorted(p.parent.name for p in path.glob(f"*/{MANIFEST}"))
            raise UsageError(f"{folder} is a comparison; name one of its runs: {', '.join(runs)}.")
        manifest = read_document(path / MANIFEST, "run")
        if manifest.get("status") != "finished":
            raise CheckpointError(
                f"{folder} holds a run that has not ended: repeat the command that began it."
            )
        if not (path / TASK).exists():
            raise CheckpointError(
                f"{folder} has no {TASK}: it was made by fit() in Python, where load_posterior reads it, or "
                "the file was removed."
            )
        return cls(path, manifest, read_document(path / TASK, "task"))

    @cached_property
    def model(self) -> Any:
        config = self.task["network"]
        shape = None if config["example_shape"] is None else tuple(config["example_shape"])
        return make_model(config["name"], shape, config["num_outputs"], config["options"])

    @property
    def num_posteriors(self) -> int:
        return len(self.manifest["posteriors"])

    def posterior(self, index: int) -> Posterior:
        if not 0 <= index < self.num_posteriors:
            raise UsageError(
                f"--posterior {index}: {self.folder} holds {self.num_posteriors}, counted from 0 (one for "
                "every split and seed)."
            )
        return load_posterior(self.folder / self.manifest["posteriors"][index], self.model)

    def place(self, index: int) -> int:
        """The split that a posterior belongs to; its seeds follow each other."""
        return index // self.options["seeds"]

    def preprocessing(self, index: int) -> Preprocessing:
        return Preprocessing.from_config(self.task["posteriors"][index])

    @property
    def options(self) -> dict[str, Any]:
        return self.manifest["options"]

    def inputs(self, spec: str, index: int, keep: Sequence[str] = ()) -> tuple[Tree, dict[str, np.ndarray]]:
        """New examples as the network wants them, with what tells them apart: numbers of rows, or names.

        keep: columns of a table that are passed on as they are.
        """
        ready, path = self.preprocessing(index), Path(spec)
        if path.suffix.lower() in SUFFIXES:
            return read_rows(path, ready, keep)
        require(not keep, f"{spec} is not a table: it has no columns to keep ({', '.join(keep)}).")
        if path.suffix.lower() in characters.SUFFIXES:
            return characters.read_text(path, ready)[0], {}
        if path.exists():
            inputs, names = read_images(path, ready)
            return inputs, {"name": np.array(names)}
        if self._is_own(spec):
            return arrays_of(self._own_split(index).test)[0], {}
        if is_import(spec) and (array := _imported_array(spec)) is not None:
            return ready.inputs(array), {}
        return load_labelled(spec, ready).inputs, {}

    def split(self, spec: str, index: int) -> Split:
        """Labelled examples to judge a posterior on; the run's own test data where nothing is named."""
        if not spec or self._is_own(spec):
            return self._own_split(index)
        ready = self.preprocessing(index)
        data = load_labelled(spec, ready)
        return Split(data, data, preprocessing=ready)

    def _is_own(self, spec: str) -> bool:
        """Whether a name or function is what the run was made with; a file of that name has all its rows."""
        return spec == self.options["data"] and not Path(spec).exists()

    @cached_property
    def own_task(self) -> Task:
        """The data the run was made with, read again."""
        task = load_task(self.options["data"], self.options["set"].get("data", {}))
        return self.with_ood(task, self.options["ood"]) if self.options["ood"] else task

    def with_ood(self, task: Task, spec: str) -> Task:
        return replace(task, ood=load_inputs_for_ood(spec, task))

    def _own_split(self, index: int) -> Split:
        place, spec = self.place(index), self.options["data"]
        task = self.own_task
        trained_on = self.manifest["signature"]["data"][index]
        if place >= len(task.splits) or fingerprint(task.splits[place].train) != trained_on:
            raise CheckpointError(
                f"{spec} has changed since the run was trained on it: test rows may have been trained on. "
                "Give labelled rows of their own: --data FILE."
            )
        return task.splits[place]


def _imported_array(spec: str) -> Tensor | None:
    """The array that a name stands for or that a function returns, if it is one."""
    found = import_object(spec, "The data")
    value = found() if callable(found) else found
    return as_tree(value) if isinstance(value, np.ndarray | Tensor) else None


def seeded(seed: int) -> torch.Generator:
    """A generator for the draws of a command."""
    return torch.Generator().manual_seed(seed)
