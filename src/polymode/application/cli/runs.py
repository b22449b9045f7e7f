"""Run folders as commands read them: posteriors, and new examples brought into the shape they know."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.application.cli.options import UsageError
from polymode.application.comparison import CALIBRATION_FILE, TASK_FILE, stated, whole
from polymode.application.datasets import characters
from polymode.application.datasets.folders import read_images
from polymode.application.datasets.loading import load_inputs_for_ood, load_labelled, load_task
from polymode.application.datasets.new_rows import SUFFIXES, read_rows
from polymode.application.recipes import held_out
from polymode.data import Data, Preprocessing, Split, Task, arrays_of, as_tree, fingerprint
from polymode.data.familiarity import Familiarity
from polymode.errors import CheckpointError, InputError, require, shortened
from polymode.imports import import_object, import_only, is_import
from polymode.likelihoods import make_likelihood
from polymode.models import make_model
from polymode.networks.surgery import build, tensors_of
from polymode.posteriors import Posterior, load_posterior
from polymode.posteriors.base import MANIFEST
from polymode.sizes import said
from polymode.storage import entry, inside, read_document, read_tensors, refuse_links, well_formed
from polymode.training.loop.arithmetic import recorded_threads
from polymode.trees import Tree

# A network may be so many times larger than the files that hold its weights; small ones are not looked at.
LARGER, LEAST_BYTES = 4, 2**20


@dataclass(frozen=True)
class StoredRun:
    """A finished run that ``polymode train`` or ``compare`` made."""

    folder: Path
    manifest: dict[str, Any]
    task: dict[str, Any]

    @classmethod
    def open(
        cls,
        folder: str,
        model: str = "",
        given: Sequence[str] = (),
        *,
        trust: bool = False,
        baseline: bool = False,
        own_data: bool = False,
    ) -> "StoredRun":
        """Read what a folder says; from here on nothing that it names is imported unless it may be.

        model, given: the network and data that the user has named. trust: import whatever it names. baseline:
        the run beside the one that they were named for, which may have another network. own_data: whether the
        data that the run was made with are wanted.
        """
        path = Path(folder)
        if not path.is_dir():
            raise CheckpointError(f"{folder} is not a folder: name the folder of a run.")
        refuse_links(path)
        if (path / "comparison.json").exists():
            runs = sorted(p.parent.name for p in path.glob(f"*/{MANIFEST}"))
            raise UsageError(f"{folder} is a comparison; name one of its runs: {', '.join(runs)}.")
        manifest = read_document(path / MANIFEST, "run")
        if manifest.get("status") != "finished":
            raise CheckpointError(
                f"{folder} holds a run that has not ended: repeat the command that began it."
            )
        if not (path / TASK_FILE).exists():
            raise CheckpointError(
                f"{folder} has no {TASK_FILE}: it was made by fit() in Python, where load_posterior reads "
                "it, or the file was removed."
            )
        task = read_document(
            path / TASK_FILE, "task", "Repeat the command that trained the run: it writes it again."
        )
        stored = cls(path, manifest, task)
        stored._check()
        if model and model != stored.network["name"] and not baseline:
            raise UsageError(
                f"--model {model}: {folder} was trained with {stored.network['name']}, and its weights are "
                "those of that network."
            )
        if not trust:
            import_only(
                {"The model": [model], "The data": given},
                f"The run folder {folder}",
                ({} if baseline else {stored.network["name"]: "--model"})
                | ({stored.spec("data"): "--data", stored.spec("ood"): "--ood"} if own_data else {}),
            )
        stored.model  # noqa: B018  # one that may not be imported is told before any work
        return stored

    def _check(self) -> None:
        """Raise unless all is there that the commands look for, and of its type."""
        path, task_path = self.folder / MANIFEST, self.folder / TASK_FILE
        entry(self.manifest, "options", dict, path)
        method = entry(entry(self.manifest, "method", dict, path), "name", str, path)
        if not re.fullmatch(r"[\w.+-]+", method):
            raise CheckpointError(
                f"{path} is damaged: {shortened(repr(method))} is not the name of a method."
            )
        names = entry(self.manifest, "posteriors", list, path)
        network, ready = (
            entry(self.task, "network", dict, task_path),
            entry(self.task, "posteriors", list, task_path),
        )
        if not network:
            raise CheckpointError(
                f"{task_path} names no network: the run was made by compare() in Python, where "
                "load_posterior reads it."
            )
        entry(network, "name", str, task_path)
        entry(network, "options", dict, task_path)
        entry(network, "num_outputs", int, task_path)
        if network.get("example_shape") is not None:
            entry(network, "example_shape", list, task_path)
        if len(names) != len(ready):
            raise CheckpointError(f"{path} names {len(names)} posteriors, {task_path} prepares {len(ready)}.")

    @property
    def stated(self) -> str:
        """The method's name for a table of results."""
        return stated(self.manifest["method"]["name"], self.manifest["method"])

    @property
    def network(self) -> dict[str, Any]:
        """What builds the network again."""
        return self.task["network"]

    @cached_property
    def model(self) -> Any:
        config = self.network
        shape = None if config.get("example_shape") is None else tuple(config["example_shape"])
        return make_model(config["name"], shape, config["num_outputs"], config["options"])

    @property
    def threads(self) -> int | None:
        """Threads that the run trained with, but no more than there are here."""
        return recorded_threads(self.manifest.get("record"))

    @property
    def num_posteriors(self) -> int:
        return len(self.manifest["posteriors"])

    def posterior(self, index: int) -> Posterior:
        if not 0 <= index < self.num_posteriors:
            raise UsageError(
                f"--posterior {index}: {self.folder} holds {self.num_posteriors}, counted from 0 (one for "
                "every split and seed)."
            )
        folder = inside(self.folder, self.manifest["posteriors"][index])
        if not is_import(self.network["name"]):
            self._check_size(folder)
        return load_posterior(folder, self.model)

    def _check_size(self, folder: Path) -> None:
        """Raise, before memory is taken, where the network is larger than the weights that are stored."""
        path = self.folder / TASK_FILE
        try:
            with well_formed(path), torch.device("meta"):
                module = build(self.model, seed=0)
        except InputError as error:
            raise CheckpointError(
                f"{path} is damaged: its network cannot be built ({shortened(str(error))})."
            ) from error
        claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(module).values())
        held = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
        if claimed > LARGER * held + LEAST_BYTES:
            raise CheckpointError(
                f"{path} is damaged: it names a network of {said(claimed)} of weights, and {folder} holds "
                f"{said(held)}."
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether the run was made with --calibrate."""
        if (self.folder / CALIBRATION_FILE).exists():
            return True
        if self.options.get("calibrate"):
            raise CheckpointError(
                f"{self.folder} was made with --calibrate, but has no {CALIBRATION_FILE}: repeat the command "
                "that made it, which writes it again."
            )
        return False

    def calibrated(self, posterior: Posterior, index: int, num_draws: int, *, now: bool = False) -> Posterior:
        """The posterior as it was calibrated; now: on the run's own validation rows, if it was not."""
        path = self.folder / CALIBRATION_FILE
        if self.is_calibrated:
            likelihoods = entry(read_document(path, "calibration"), "likelihoods", list, path)
            try:
                with well_formed(path):
                    likelihood = make_likelihood(likelihoods[index])
            except InputError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
            if likelihood.uncalibrated != posterior.network.likelihood.uncalibrated:
                raise CheckpointError(f"{path} is damaged: it is about another likelihood than the run's.")
            return posterior.with_likelihood(likelihood)
        if not now:
            return posterior
        validation = self._own_split(index).validation
        if validation is None:
            raise UsageError(
                f"--calibrate takes validation rows, and {self.folder} held none out. Train it again without "
                "--validation none."
            )
        return posterior.calibrated(
            validation, num_draws if posterior.num_members is None else None, seeded(0)
        )

    def familiarity(self, index: int) -> Familiarity | None:
        """Typical training rows of a posterior, by which strange ones are told; None where there are none."""
        path = self.folder / TASK_FILE
        files = self.task.get("typical") or [None] * self.num_posteriors
        with well_formed(path):
            found = files[index]
            if found is None:
                return None
            tensors = read_tensors(inside(self.folder, found["file"]), found["checksum"])
        return Familiarity.from_tensors(tensors)

    def place(self, index: int) -> int:
        """The split that a posterior belongs to; its seeds follow each other."""
        return index // max(1, entry(self.options, "seeds", int, self.folder / MANIFEST))

    def preprocessing(self, index: int) -> Preprocessing:
        """How examples are prepared for a posterior."""
        path, shape = self.folder / TASK_FILE, self.network.get("example_shape")
        try:
            ready = Preprocessing.from_config(self.task["posteriors"][index])
        except InputError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if ready.input_shift and shape and len(ready.input_shift) != shape[0]:
            raise CheckpointError(
                f"{path} is damaged: input_shift is for {len(ready.input_shift)} columns or channels, but "
                f"examples of the network are {shape}."
            )
        return ready

    @property
    def options(self) -> dict[str, Any]:
        return self.manifest["options"]

    def spec(self, name: str) -> str:
        """What an option of the command that made the run named, such as its data; "" for nothing."""
        value = self.options.get(name, "")
        return value if isinstance(value, str) else ""

    def inputs(
        self, spec: str, index: int, keep: Sequence[str] = ()
    ) -> Iterator[tuple[Tree, dict[str, np.ndarray]]]:
        """New examples as the network wants them, with what tells them apart: numbers of rows, or names.

        Those of a table come some at a time. keep: columns of it that are passed on as they are.
        """
        ready, path = self.preprocessing(index), Path(spec)
        if path.suffix.lower() in SUFFIXES:
            yield from read_rows(path, ready, keep)
            return
        require(not keep, f"{spec} is not a table: it has no columns to keep ({', '.join(keep)}).")
        if path.suffix.lower() in characters.SUFFIXES:
            yield characters.read_text(path, ready)[0], {}
        elif path.exists():
            inputs, names = read_images(path, ready)
            yield inputs, {"name": np.array(names)}
        elif self.is_own(spec):
            yield arrays_of(self._own_split(index).test)[0], {}
        elif is_import(spec) and (array := _imported_array(spec)) is not None:
            yield ready.inputs(array), {}
        else:
            yield load_labelled(spec, ready, likelihood=self.spec("likelihood")).inputs, {}

    def split(self, spec: str, index: int) -> Split:
        """Labelled examples to judge a posterior on; the run's own test data where nothing is named."""
        if not spec or self.is_own(spec):
            return self._own_split(index)
        ready = self.preprocessing(index)
        data = load_labelled(spec, ready, likelihood=self.spec("likelihood"))
        return Split(data, data, preprocessing=ready)

    def is_own(self, spec: str) -> bool:
        """Whether a name or function is what the run was made with; a file of that name has all its rows."""
        return spec == self.spec("data") and not Path(spec).exists()

    @cached_property
    def own_task(self) -> Task:
        """The data the run was made with, read again."""
        settings: Any = {"data": {}} | entry({"set": {}} | self.options, "set", dict, self.folder / MANIFEST)
        options = entry(settings, "data", dict, self.folder / MANIFEST)
        task = load_task(self.spec("data"), options, likelihood=self.spec("likelihood"))
        return held_out(task, self.spec("validation") or "none")  # earlier versions held nothing out

    @property
    def own_ood(self) -> Data | None:
        """The data outside the distribution that the run was made with."""
        ood = self.spec("ood")
        return self.with_ood(self.own_task, ood).ood if ood else self.own_task.ood

    def with_ood(self, task: Task, spec: str) -> Task:
        return replace(task, ood=load_inputs_for_ood(spec, task))

    def _own_split(self, index: int) -> Split:
        place, spec = self.place(index), self.spec("data")
        task = self.own_task
        with well_formed(self.folder / MANIFEST):
            trained_on = self.manifest["signature"]["data"][index]
        # Samplers of the posterior train on the rows that are held out, too.
        splits = [task.splits[place], whole(task.splits[place])] if place < len(task.splits) else []
        for split in splits:
            if trained_on == fingerprint(split.train):
                return split
        raise CheckpointError(
            f"{spec} has changed since the run was trained on it, or this version of polymode reads it "
            "otherwise: test rows may have been trained on. Give labelled rows of their own: --data FILE."
        )


def _imported_array(spec: str) -> Tensor | None:
    """The array that a name stands for or that a function returns, if it is one."""
    found = import_object(spec, "The data")
    value = found() if callable(found) else found
    return as_tree(value) if isinstance(value, np.ndarray | Tensor) else None


def seeded(seed: int) -> torch.Generator:
    """A generator for the draws of a command."""
    return torch.Generator().manual_seed(seed)
