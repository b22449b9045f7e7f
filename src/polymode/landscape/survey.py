"""Networks at many points of weight space, judged on one data set: in blocks, resumable, kept as arrays."""

import hashlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.arrays_on_disk import read_arrays
from polymode.data import arrays_of, as_data
from polymode.errors import InputError, require
from polymode.landscape.networks import WeightSpace
from polymode.networks.members import Members
from polymode.networks.surgery import structure_of
from polymode.posteriors import Particles
from polymode.posteriors.network import Network
from polymode.posteriors.statistics import estimated_names, in_batches, with_statistics
from polymode.storage import digest_of, write_bytes
from polymode.trees import Tree, leaves, length, map_tree

KEEP_SECONDS = 5.0  # between two writings of what is done so far
STATISTICS_BATCH = 256
BATCH = 256  # activations of a small convolutional network then stay in a processor's cache

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Judged:
    """What members say of a data set: mean loss and error of each [M], and their answers [M, N]."""

    loss: Tensor
    error: Tensor
    answers: Tensor


def judged(network: Network, members: Members, inputs: Tree, targets: Tensor) -> Judged:
    """Judge members one by one; the loss is −log p(y | x, θ), the error a share of labels or a deviation."""
    likelihood = network.likelihood
    loss, error = (torch.zeros(members.num_members, dtype=torch.float64) for _ in range(2))
    count, answers, entries = 0, [], 0
    for rows, outputs, _ in Particles(network, blocks=[members]).by_points(inputs, batch_size=BATCH):
        chunk, first = targets[rows].to(network.device), map_tree(lambda t: t[0], outputs)
        likelihood.check_outputs(first, chunk)
        likelihood.check_targets(chunk, first)
        each = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, chunk).double()
        loss -= each.flatten(1).sum(1).cpu()  # ignored tokens have 0
        wrong = torch.vmap(likelihood.errors, in_dims=(0, None))(outputs, chunk).double()
        error += wrong.flatten(1).sum(1).cpu()
        observed = likelihood.observed(chunk)
        count += int(observed.sum())
        entries += int(observed.sum()) * (wrong[0].numel() // observed.numel())
        answers.append(likelihood.answers(outputs)[:, observed].flatten(1).cpu())
    require(count > 0, "There are no observations to take a loss of: all are ignored.")
    error = error / entries
    return Judged(loss / count, error.sqrt() if likelihood.squared_errors else error, torch.cat(answers, 1))


@dataclass(frozen=True)
class Points:
    """Points of a space, made when they are needed: ``at(start, stop)`` gives [stop − start, D]."""

    count: int
    at: Callable[[int, int], Tensor]
    identity: str  # a digest of what they are made of

    @staticmethod
    def of(vectors: Tensor) -> "Points":
        """Points that are there already, [P, D]."""
        return Points(len(vectors), lambda start, stop: vectors[start:stop], digest_of({"points": vectors}))


@dataclass(frozen=True)
class Survey:
    """Loss and error at P points, [P], and how far answers are from those of R networks, [P, R]."""

    loss: Tensor
    error: Tensor
    difference: Tensor


def survey(
    space: WeightSpace,
    points: Points,
    data: Any,
    *,
    references: Tensor | None = None,
    statistics: Any = None,
    keep: Path | str | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Judge the network at every point.

    references: answers [R, N] to compare with (``judged(...).answers``). statistics: data or inputs from
    which running statistics are estimated at every point; a network with BatchNorm needs them. keep: an .npz
    file with what is done so far, from which the same survey goes on. progress: called with points done and
    all.
    """
    inputs, targets = arrays_of(as_data(data))
    batches = statistics_batches(space.network, statistics)
    references = _checked(references, space.network, targets)
    signature = _signature(space, points, (inputs, targets), references, batches)
    path = None if keep is None else Path(keep)
    kept = _read(path, signature, points.count, len(references))
    next_write = time.monotonic() + KEEP_SECONDS
    for start in range(kept.done, points.count, space.at_once):
        stop = min(start + space.at_once, points.count)
        vectors = points.at(start, stop)
        if vectors.shape[-1] != space.dimension:
            raise InputError(
                f"Points have {vectors.shape[-1]} weights, networks of this space {space.dimension}."
            )
        members = space.members(vectors)
        if batches is not None:
            members = with_statistics(space.network, members, batches)
        found = judged(space.network, members, inputs, targets)
        kept.loss[start:stop], kept.error[start:stop] = found.loss.numpy(), found.error.numpy()
        if len(references):
            both = torch.cat([found.answers, references.to(found.answers.dtype)])
            differences = space.network.likelihood.difference(both, targets)
            kept.difference[start:stop] = differences[: stop - start, stop - start :].numpy()
        kept.done = stop
        if path is not None and (time.monotonic() > next_write or stop == points.count):
            kept.write(path)
            next_write = time.monotonic() + KEEP_SECONDS
        if progress is not None:
            progress(stop, points.count)
    return Survey(*(torch.from_numpy(a) for a in (kept.loss, kept.error, kept.difference)))


def _checked(references: Tensor | None, network: Network, targets: Tensor) -> Tensor:
    """The answers to compare with, [R, N] for N observations."""
    if references is None:
        return torch.zeros(0, 1)
    observed = int(network.likelihood.observed(targets).sum())
    if references.ndim != 2 or references.shape[1] % max(1, observed):
        raise InputError(
            f"references must be answers [networks, {observed}], as judged(...).answers gives them for the "
            f"same data; got {list(references.shape)}."
        )
    return references


def statistics_batches(network: Network, statistics: Any) -> list[Tree] | None:
    """Inputs in batches to estimate running statistics from; None where the network has none."""
    if not estimated_names(network):
        return None
    if statistics is None:
        raise InputError(
            f"This {type(network.module).__name__} has BatchNorm, and between trained networks their running "
            "statistics are wrong: pass statistics= (training data or inputs), from which they are estimated."
        )
    given = isinstance(statistics, Tensor | tuple | dict)
    inputs = statistics if given else arrays_of(as_data(statistics))[0]
    require(length(inputs) > 1, "statistics= needs at least two examples to estimate a variance from.")
    return list(in_batches(inputs, STATISTICS_BATCH))


@dataclass
class _Kept:
    """What is done of a survey, as arrays."""

    signature: str
    loss: np.ndarray
    error: np.ndarray
    difference: np.ndarray
    done: int = 0

    @property
    def digest(self) -> str:
        """Of all numbers: a file that was changed is not believed."""
        parts = (self.loss, self.error, self.difference, np.array(self.done))
        return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()

    def write(self, path: Path) -> None:
        content = io.BytesIO()
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in vars(self).items()}
        np.savez(content, digest=self.digest, **arrays)
        write_bytes(path, content.getvalue())


def _read(path: Path | None, signature: str, count: int, num_references: int) -> _Kept:
    """What a file holds of this very survey; nothing where it holds another one, or is damaged."""
    shapes = {"loss": (count,), "error": (count,), "difference": (count, num_references)}
    nothing = [np.full(shape, np.nan) for shape in shapes.values()]
    fresh = _Kept(signature, nothing[0], nothing[1], nothing[2])
    if path is None or not path.is_file():
        return fresh
    try:
        found = read_arrays(path)
        if str(found["signature"]) != signature:
            return fresh
        arrays = {name: np.array(found[name], dtype=np.float64) for name in shapes}
        done, digest = int(found["done"]), str(found["digest"])
    except Exception:  # damaged and foreign files raise errors of every class
        return fresh
    whole = all(arrays[name].shape == shape for name, shape in shapes.items()) and 0 <= done <= count
    found = _Kept(signature, arrays["loss"], arrays["error"], arrays["difference"], done)
    return found if whole and found.digest == digest else fresh


def _signature(
    space: WeightSpace, points: Points, data: Tree, references: Tensor, batches: Sequence[Tree] | None
) -> str:
    network = space.network
    parts: list[Any] = [
        points.identity,
        digest_of({"references": references.double()}),
        digest_of(space.like),
    ]
    parts += [digest_of(network.constants(space.like)), structure_of(network.module), network.adaptations]
    parts.append(network.likelihood.config())
    for each in (data, *(batches or ())):
        parts += [(t.dtype, t.shape, digest_of({"": t})) for t in leaves(each)]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
