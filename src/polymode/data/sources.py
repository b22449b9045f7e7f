"""Data sources: in-memory arrays and ``DataLoader``s, read by index in any order.

The order of examples is never the source's business: ``fit`` derives it for every chain and epoch
from the seed and asks the source for those rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from polymode.errors import InputError
from polymode.trees import Tree, leaves, length, map_tree


@dataclass(frozen=True)
class Examples:
    """Rows of a data set: inputs (a tree), targets and, where given, sample weights; all [B, ...]."""

    inputs: Tree
    targets: Tensor
    weights: Tensor | None = None

    def map(self, function: Any) -> "Examples":
        weights = None if self.weights is None else function(self.weights)
        return Examples(map_tree(function, self.inputs), function(self.targets), weights)


class Data(ABC):
    """A data set of known length that yields examples for given indices."""

    num_examples: int
    batch_size: int
    drop_last: bool = False
    replayable: bool = True

    @abstractmethod
    def stream(self, indices: Iterable[Tensor]) -> Iterator[Examples]:
        """Yield the examples of each tensor of indices."""

    def in_order(self, batch_size: int | None = None) -> Iterator[Examples]:
        """Yield all examples once, in their own order."""
        size = batch_size or max(self.batch_size, 256)
        return self.stream(torch.arange(self.num_examples).split(size))


def _as_tree(value: Any) -> Tree:
    if isinstance(value, dict):
        return {key: _as_tree(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_tree(item) for item in value)
    if isinstance(value, Tensor):
        return value.detach()
    try:
        tensor = torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise InputError(f"Cannot make a tensor of {type(value).__name__}: {error}.") from error
    return tensor.float() if tensor.dtype == torch.float64 else tensor


class ArrayData(Data):
    """Arrays in memory: inputs (a tensor, NumPy array, or tuple or dictionary of them) and targets.

    weights: [N], non-negative multiplicities; the loss of an example counts that often.
    NumPy's float64 becomes float32 (the networks' default); tensors stay as they are.
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        *,
        weights: Any = None,
        batch_size: int = 128,
        drop_last: bool = False,
    ) -> None:
        self.inputs = _as_tree(inputs)
        self.targets: Tensor = _as_tree(targets)
        self.weights: Tensor | None = None if weights is None else _as_tree(weights)
        self.batch_size = batch_size
        self.drop_last = drop_last
        parts = {"inputs": self.inputs, "targets": self.targets, "weights": self.weights}
        lengths = {name: length(tree) for name, tree in parts.items() if tree is not None}
        if len(set(lengths.values())) > 1:
            raise InputError(f"Inputs, targets and weights differ in length: {lengths}.")
        self.num_examples = lengths["targets"]
        self._check()

    def _check(self) -> None:
        if self.num_examples == 0:
            raise InputError("The data set is empty: it has 0 examples.")
        if self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {self.batch_size}.")
        if self.drop_last and self.batch_size > self.num_examples:
            raise InputError(
                f"drop_last=True with batch_size={self.batch_size} leaves nothing of "
                f"{self.num_examples} examples."
            )
        for leaf in leaves(self.inputs):
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                rows = (~leaf.isfinite()).flatten(1).any(1) if leaf.ndim > 1 else ~leaf.isfinite()
                raise InputError(
                    f"{int(rows.sum())} of {self.num_examples} examples hold NaN or infinite inputs, "
                    f"first in row {int(rows.nonzero()[0])}. Remove or impute them."
                )
        if self.weights is not None and not bool(((self.weights >= 0) & self.weights.isfinite()).all()):
            raise InputError("Sample weights must be finite and not negative.")

    def stream(self, indices: Iterable[Tensor]) -> Iterator[Examples]:
        examples = Examples(self.inputs, self.targets, self.weights)
        device = self.targets.device
        for index in indices:
            rows = index.to(device)
            yield examples.map(lambda t, rows=rows: t.index_select(0, rows))

    def to(self, device: torch.device | str) -> "ArrayData":
        """Move all arrays, so that batches are gathered on the device."""
        weights = None if self.weights is None else self.weights.to(device)
        return self._like(map_tree(lambda t: t.to(device), self.inputs), self.targets.to(device), weights)

    def subset(self, indices: Tensor | Sequence[int]) -> "ArrayData":
        """The data set of some rows."""
        [rows] = self.stream([torch.as_tensor(indices)])
        return self._like(rows.inputs, rows.targets, rows.weights)

    def _like(self, inputs: Tree, targets: Tensor, weights: Tensor | None) -> "ArrayData":
        return ArrayData(
            inputs, targets, weights=weights, batch_size=self.batch_size, drop_last=self.drop_last
        )


class LoaderData(Data):
    """A ``DataLoader``: batch size, workers and collation are kept, the order becomes ours.

    Batches are (inputs, targets), (inputs, targets, weights), or for several inputs
    ((x1, x2), targets). An ``IterableDataset`` has an order of its own and no known length: say
    ``num_examples``; all chains then see the same batches, and no bits are promised on resume.
    """

    def __init__(self, loader: DataLoader, num_examples: int | None = None) -> None:
        self.loader = loader
        self.drop_last = bool(loader.drop_last)
        self.replayable = not isinstance(loader.dataset, IterableDataset)
        if self.replayable:
            self.num_examples = len(loader.dataset)  # type: ignore[arg-type]
            batch_sampler_size = getattr(loader.batch_sampler, "batch_size", None)
            self.batch_size = loader.batch_size or batch_sampler_size or 1
        else:
            if num_examples is None:
                raise InputError(
                    "An IterableDataset has no length: pass LoaderData(loader, num_examples=...), "
                    "the number of examples of one epoch."
                )
            self.num_examples = num_examples
            self.batch_size = loader.batch_size or 1
        if self.num_examples == 0:
            raise InputError("The data set is empty: it has 0 examples.")

    def stream(self, indices: Iterable[Tensor]) -> Iterator[Examples]:
        if not self.replayable:
            return map(_examples, self.loader)
        workers = self.loader.num_workers
        rebuilt = DataLoader(
            self.loader.dataset,
            batch_sampler=(index.tolist() for index in indices),  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=self.loader.collate_fn,
            pin_memory=self.loader.pin_memory,
            worker_init_fn=self.loader.worker_init_fn,
            multiprocessing_context=self.loader.multiprocessing_context if workers else None,
            prefetch_factor=self.loader.prefetch_factor if workers else None,
        )
        return map(_examples, rebuilt)


def _examples(batch: Any) -> Examples:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise InputError(
            "A DataLoader must yield (inputs, targets) or (inputs, targets, weights); it yields "
            f"{type(batch).__name__}"
            + (f" of length {len(batch)}." if isinstance(batch, tuple | list) else ".")
        )
    inputs = tuple(batch[0]) if isinstance(batch[0], list) else batch[0]
    return Examples(inputs, *batch[1:])


def as_data(data: Any) -> Data:
    """Read a data source given as ``ArrayData``, another ``Data`` or a ``DataLoader``."""
    if isinstance(data, Data):
        return data
    if isinstance(data, DataLoader):
        return LoaderData(data)
    raise InputError(
        f"Data must be ArrayData(inputs, targets) or a torch DataLoader, got {type(data).__name__}."
    )
