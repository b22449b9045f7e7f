"""Which law the targets of a table have: a short trial of each, judged on validation data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from polymode.data import Data, Split, Task, fingerprints
from polymode.data.task import num_outputs_for
from polymode.errors import CheckpointError, InputError
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.methods import DeepEnsemble
from polymode.networks.surgery import Model
from polymode.storage import entry, read_document, refuse_links, write_document
from polymode.training import fit
from polymode.training.contract import Method
from polymode.training.keeping.progress import Reporter
from polymode.training.loop.settings import ComputingSettings

PILOT_FILE = ".pilot.json"  # a folder with nothing else in it is still free for a run
PILOT_MEMBERS, PILOT_SPLITS = 2, 3


def settle_likelihood(
    task: Task,
    model_for: Callable[[Likelihood], Model],
    member: Method,
    epochs: int,
    folder: Path | None,
    reporter: Reporter,
    **computing: Unpack[ComputingSettings],
) -> Task:
    """The task with that one of its likelihoods whose trial has the best validation score.

    A trial is a small ensemble of ``member`` on each of the first splits. The first likelihood, the plainest,
    stays unless another one is better by more than a standard error over validation rows. What was found is
    kept in the folder, where there is one, so that a run that goes on does not look again.
    """
    if len(task.likelihoods) < 2 or any(split.validation is None for split in task.splits):
        return task
    splits = task.splits[:PILOT_SPLITS]
    rows = fingerprints([part for s in splits for part in (s.train, s.validation) if part is not None])
    saved = None if folder is None else _saved(folder, task.likelihoods, rows)
    if saved is None:
        reporter.say(f"{task.name}: which noise suits it? a short trial of {len(task.likelihoods)} kinds")
        scores = [
            _trial(splits, each, model_for(each), DeepEnsemble(PILOT_MEMBERS, member), epochs, computing)
            for each in task.likelihoods
        ]
        saved = _choice(scores)
        told = [float(each.mean()) for each in scores]
        content = {
            "likelihoods": [each.config() for each in task.likelihoods],
            "data": rows,
            "validation_log_density": told,
            "chosen": saved,
        }
        if folder is not None:
            write_document(folder / PILOT_FILE, "pilot", content)
    chosen = task.likelihoods[saved]
    reporter.say(f"{task.name}: {meaning_of(chosen)}")
    outputs = num_outputs_for(chosen, task.splits[0].train)
    return replace(task, likelihood=chosen, likelihoods=(), num_outputs=outputs)


def meaning_of(likelihood: Likelihood) -> str:
    """What a likelihood says about numbers, in words."""
    noise = {
        "gaussian": "one noise level for all rows",
        "heteroscedastic_gaussian": "noise that depends on the inputs",
        "student_t": "one noise level, with heavy tails",
        "heteroscedastic_student_t": "noise that depends on the inputs, with heavy tails",
    }.get(likelihood.kind, f"likelihood {likelihood.kind}")
    return noise + (" on a logarithmic scale" if getattr(likelihood, "log_scale", None) is not None else "")


def _trial(
    splits: Sequence[Split],
    likelihood: Likelihood,
    model: Model,
    method: Method,
    epochs: int,
    computing: ComputingSettings,
) -> torch.Tensor:
    """Log densities of all validation rows."""
    validation: list[Data] = [split.validation for split in splits if split.validation is not None]
    posteriors = fit(
        method,
        model,
        [split.train for split in splits],
        likelihood=likelihood,
        epochs=epochs,
        validation=validation,
        seed=[0] * len(splits),
        progress=False,
        **computing,
    )
    found = []
    for posterior, data in zip(posteriors, validation, strict=True):
        for examples in data.in_order():
            found.append(posterior.log_prob(examples.inputs, examples.targets).double().cpu())
    return torch.cat(found)


def _choice(scores: Sequence[torch.Tensor]) -> int:
    """The place of the best, unless the first is as good within a standard error of the difference."""
    best = max(range(len(scores)), key=lambda place: float(scores[place].mean()))
    ahead = scores[best] - scores[0]
    error = float(ahead.std()) / len(ahead) ** 0.5 if len(ahead) > 1 else 0.0
    return best if float(ahead.mean()) > error else 0


def _saved(folder: Path, likelihoods: Sequence[Likelihood], rows: Sequence[str]) -> int | None:
    """The choice of an earlier trial of the same likelihoods on the same rows."""
    path = folder / PILOT_FILE
    if not path.exists():
        return None
    refuse_links(folder)
    content: dict[str, Any] = read_document(path, "pilot")
    if content.get("data") != list(rows):
        return None
    configs = entry(content, "likelihoods", list, path)
    chosen = entry(content, "chosen", int, path)
    try:
        same = [make_likelihood(config) for config in configs] == list(likelihoods)
    except InputError:
        same = False
    if not same or not 0 <= chosen < len(likelihoods):
        raise CheckpointError(
            f"{folder} belongs to other data: its trial was about other likelihoods. Choose another folder."
        )
    return chosen
