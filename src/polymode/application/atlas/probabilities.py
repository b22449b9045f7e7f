"""Probabilities that anybody saved: read, and checked before they are believed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from polymode.arrays_on_disk import read_array, read_arrays
from polymode.errors import InputError, require

SUFFIXES = (".npz", ".npy", ".safetensors")
NAMES = ("probabilities", "probs", "predictions", "p")
LABELS = ("labels", "label", "targets", "target", "y")
SUM = 1e-3  # how far the probabilities of a point may be from one in all


@dataclass(frozen=True)
class Predictions:
    """What the networks of each run say, [M, N, C] by label; labels: [N], where they are known."""

    runs: dict[str, Tensor]
    labels: Tensor | None


def read_predictions(files: Sequence[str], labels_file: str = "") -> Predictions:
    """Read one run from each file; all are about the same points."""
    runs: dict[str, Tensor] = {}
    labels: Tensor | None = None
    came_from = ""
    for name, file in zip(distinct([Path(file).stem for file in files]), files, strict=True):
        arrays = _arrays(Path(file))
        runs[name] = _members(arrays, file)
        found = next((arrays[n] for n in LABELS if n in arrays), None)
        if found is not None and not labels_file:
            read = _checked_labels(found, file)
            if labels is not None and not torch.equal(read, labels):
                raise InputError(
                    f"{file} and {came_from} hold different labels: they are about other points."
                )
            labels, came_from = read, file
    if labels_file:
        arrays = _arrays(Path(labels_file))
        chosen = next((arrays[n] for n in LABELS if n in arrays), None)
        if chosen is None:
            require(len(arrays) == 1, f"{labels_file} holds {sorted(arrays)}: name the labels 'labels'.")
            [chosen] = arrays.values()
        labels = _checked_labels(chosen, labels_file)
    _check_together(runs, labels)
    return Predictions(runs, labels)


def distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where they are not different."""
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({place})" for place, name in enumerate(names)]


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path} is not one of {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise InputError(f"{path} is missing.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return {path.stem: read_array(path)} if path.suffix == ".npy" else read_arrays(path)
    except Exception as error:  # damaged files raise errors of every class
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read: {reason}.") from error


def _members(arrays: Mapping[str, np.ndarray], file: str) -> Tensor:
    """The probabilities of a file, [M, N, C]."""
    candidates = {n: a for n, a in arrays.items() if n not in LABELS and a.dtype.kind == "f"}
    named = [candidates[n] for n in NAMES if n in candidates]
    chosen = named[:1] or list(candidates.values())
    shapes = {name: list(a.shape) for name, a in arrays.items()}
    if len(chosen) == 1 and chosen[0].ndim in (2, 3):
        values = chosen[0] if chosen[0].ndim == 3 else chosen[0][None]
    elif len(chosen) > 1 and all(a.ndim == 2 and a.shape == chosen[0].shape for a in chosen):
        values = np.stack(chosen)  # a network each
    else:
        raise InputError(
            f"{file} holds {shapes}: probabilities are an array [members, points, classes], or an array "
            "[points, classes] for each member, all of one shape."
        )
    kind = np.float32 if values.dtype.itemsize <= 4 else np.float64  # of this machine's byte order
    return _checked(torch.from_numpy(np.ascontiguousarray(values, dtype=kind)), file)


def _checked(values: Tensor, file: str) -> Tensor:
    if not values.numel() or values.shape[-1] < 2:
        raise InputError(f"{file}: probabilities {list(values.shape)} need points, and at least two classes.")
    bad = ~values.isfinite()
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise InputError(
            f"{file}: {int(bad.sum())} probabilities are NaN or infinite, first at (member, point, class) "
            f"{place}."
        )
    off = (values.sum(-1, dtype=torch.float64) - 1).abs()
    if bool((values < 0).any()) or float(off.max()) > SUM:
        place = tuple((off == off.max()).nonzero()[0].tolist())
        raise InputError(
            f"{file}: probabilities must be at least 0 and sum to 1 over classes; those of (member, point) "
            f"{place} sum to {float(values[place].double().sum()):.4g} and the smallest of all is "
            f"{float(values.min()):.4g}. Logits go through a softmax first."
        )
    return values


def _checked_labels(found: np.ndarray, file: str) -> Tensor:
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InputError(
            f"{file}: labels must be whole numbers [points], got {found.dtype} {list(found.shape)}."
        )
    return torch.from_numpy(found.astype(np.int64))


def _check_together(runs: Mapping[str, Tensor], labels: Tensor | None) -> None:
    (first, one), *others = runs.items()
    for name, other in others:
        if other.shape[1:] != one.shape[1:]:
            raise InputError(
                f"{first} has {one.shape[1]} points of {one.shape[2]} classes, {name} has {other.shape[1]} "
                f"of {other.shape[2]}: networks are compared on the same points."
            )
    if labels is not None:
        if len(labels) != one.shape[1]:
            raise InputError(f"There are {len(labels)} labels for {one.shape[1]} points.")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= one.shape[2]:
            raise InputError(
                f"Labels go from {low} to {high}; {one.shape[2]} classes, counted from 0, end at "
                f"{one.shape[2] - 1}."
            )
    if sum(len(values) for values in runs.values()) < 2:
        raise InputError("There is one network: diversity needs at least two.")
