"""Data sources: in-memory arrays and ``DataLoader``s, read by index in any order.

The order of examples is never the source's business: ``fit`` derives it for every chain and epoch
from the seed and asks the source for those rows.
"""

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from polymode.data.augmentation import Augmentation, augmented, check_images
from polymode.errors import InputError
from polymode.seeds import derive_seed, global_seed
from polymode.trees import Tree, filled, leaves, length, map_tree


class Examples(NamedTuple):
    """Rows of a data set: inputs (a tree), targets and, where given, sample weights; all [B, ...].

    A tree itself. What carries examples from the data to the loss of a member is always this.
    """

    inputs: Tree
    targets: Tensor
    weights: Tensor | None = None


class Data(ABC):
    """A data set of known length that yields examples for given indices."""

    num_examples: int
    batch_size: int
    drop_last: bool = False
    replayable: bool = True

    @abstractmethod
    def stream(self, indices: Iterable[Tensor], seeds: Iterable[Tensor]) -> Iterator[Examples]:
        """Yield training examples of each tensor of indices; their seeds fix what is drawn for each."""

    def in_order(self, batch_size: int | None = None) -> Iterator[Examples]:
        """Yield all examples once, in their own order, without what is drawn only to train on them."""
        rows = torch.arange(self.num_examples).split(batch_size or max(self.batch_size, 256))
        return self.stream(rows, rows)


def as_tree(value: Any, what: str = "Inputs") -> Tree:
    """Tensors of arrays, lists and numbers; NumPy's float64 becomes float32, tensors stay as they are."""
    if isinstance(value, dict):
        return {key: as_tree(item, what) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(as_tree(item, what) for item in value)
    if isinstance(value, Tensor):
        return value.detach()
    try:
        tensor = torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        kind = getattr(value, "dtype", type(value).__name__)
        raise InputError(
            f"{what} must be numbers; a tensor cannot be made of {kind}. Encode text and categories as "
            "integers first."
        ) from None
    return tensor.float() if tensor.dtype == torch.float64 else tensor


# Batches gathered at once: few, and small enough to be in the cache still when they are used.
GATHER_BATCHES, GATHER_BYTES = 16, 2**20
# What PyTorch aligns tensors to on a CPU.
ALIGNMENT = 64


def check_finite(inputs: Tree) -> None:
    """Raise an ``InputError`` that counts and locates rows with NaN or infinite inputs."""
    for leaf in leaves(inputs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            rows = (~leaf.isfinite()).flatten(1).any(1) if leaf.ndim > 1 else ~leaf.isfinite()
            raise InputError(
                f"{int(rows.sum())} of {len(leaf)} examples hold NaN or infinite inputs, first in row "
                f"{int(rows.nonzero()[0])}. Remove or impute them."
            )


class ArrayData(Data):
    """Arrays in memory: inputs (a tensor, NumPy array, or tuple or dictionary of them) and targets.

    weights: [N], non-negative multiplicities; the loss of an example counts that often.
    augment: steps of ``polymode.data.augmentation`` that change images while they are trained on.
    NumPy's float64 becomes float32 (the networks' default); tensors stay as they are until a network sees
    them, in the type of its weights.
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        *,
        weights: Any = None,
        batch_size: int = 128,
        drop_last: bool = False,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        self.inputs = as_tree(inputs)
        self.targets: Tensor = as_tree(targets, "Targets")
        self.weights: Tensor | None = None if weights is None else as_tree(weights, "Sample weights")
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.augment = tuple(augment)
        if self.augment:
            check_images(self.inputs)
        parts = {"inputs": self.inputs, "targets": self.targets, "weights": self.weights}
        lengths = {name: length(tree) for name, tree in parts.items() if tree is not None}
        if len(set(lengths.values())) > 1:
            raise InputError(f"Inputs, targets and weights differ in length: {lengths}.")
        self.num_examples = lengths["targets"]
        self._check()

    def _check(self) -> None:
        if self.num_examples == 0:
            raise InputError("The data set is empty: it has 0 examples.")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise InputError(f"batch_size must be a whole number of at least 1, got {self.batch_size!r}.")
        if self.drop_last and self.batch_size > self.num_examples:
            raise InputError(
                f"drop_last=True with batch_size={self.batch_size} leaves nothing of "
                f"{self.num_examples} examples."
            )
        check_finite(self.inputs)
        if self.weights is not None:
            bad = ~((self.weights >= 0) & self.weights.isfinite())
            if bool(bad.any()):
                raise InputError(
                    "Sample weights must be finite and not negative, got "
                    f"{self.weights[bad][0].item()} in row {int(bad.nonzero()[0, 0])}."
                )

    def __repr__(self) -> str:
        shapes = map_tree(lambda t: list(t.shape), self.inputs)
        return f"ArrayData(inputs {shapes}, targets {list(self.targets.shape)}, batch_size={self.batch_size})"

    def taken(self, rows: Tensor) -> "ArrayData":
        """Some of the examples, with the same batch size and augmentation."""
        inputs, targets, weights = map_tree(lambda t: t[rows.to(t.device)], self._examples)
        return ArrayData(
            inputs,
            targets,
            weights=weights,
            batch_size=min(self.batch_size, len(rows)) if self.drop_last else self.batch_size,
            drop_last=self.drop_last,
            augment=self.augment,
        )

    def stream(self, indices: Iterable[Tensor], seeds: Iterable[Tensor]) -> Iterator[Examples]:
        if not self.augment:
            return self._plain(indices)
        return map(self._augmented, self._plain(indices), seeds)

    def in_order(self, batch_size: int | None = None) -> Iterator[Examples]:
        size = batch_size or max(self.batch_size, 256)
        return self._plain(torch.arange(self.num_examples).split(size))

    def _augmented(self, examples: Examples, seeds: Tensor) -> Examples:
        return examples._replace(inputs=augmented(examples.inputs, self.augment, seeds))

    @property
    def _examples(self) -> Examples:
        """All of them."""
        return Examples(self.inputs, self.targets, self.weights)

    def _plain(self, indices: Iterable[Tensor]) -> Iterator[Examples]:
        examples = self._examples
        # Every batch begins at a multiple of ALIGNMENT bytes, as a tensor of its own does: some kernels round
        # by that, and a batch must not depend on those before it, which a resumed run does not gather.
        smallest = min(tensor.element_size() for tensor in leaves(examples))
        whole = max(1, ALIGNMENT // smallest)
        for some in self._in_chunks(indices):
            fillings = [index.new_zeros(-len(index) % whole) for index in some]
            alternating = [part for pair in zip(some, fillings, strict=True) for part in pair]
            rows, sizes = torch.cat(alternating).to(self.targets.device), list(map(len, alternating))
            columns = [t.index_select(0, rows).split(sizes)[::2] for t in leaves(examples)]
            for batch in zip(*columns, strict=True):
                yield filled(examples, batch)

    def _in_chunks(self, indices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Batches of small examples are gathered several at a time: one call serves them all."""
        each = sum(t[:1].numel() * t.element_size() for t in leaves(self.inputs))
        source = iter(indices)
        for first in source:
            ahead = min(GATHER_BATCHES, GATHER_BYTES // max(1, each * len(first))) - 1
            yield [first, *itertools.islice(source, max(0, ahead))]

    def to(self, device: torch.device | str) -> "ArrayData":
        """Move all arrays, so that batches are gathered on the device."""
        return self._like(*map_tree(lambda t: t.to(device), self._examples))

    def subset(self, indices: Tensor | Sequence[int]) -> "ArrayData":
        """The data set of some rows."""
        [rows] = self._plain([torch.as_tensor(indices)])
        return self._like(*rows)

    def _like(self, inputs: Tree, targets: Tensor, weights: Tensor | None) -> "ArrayData":
        return ArrayData(
            inputs,
            targets,
            weights=weights,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            augment=self.augment,
        )


class _Seeded(Dataset):
    """A data set whose examples are read under a seed of their own: (row, seed)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        row, seed = key
        with global_seed(derive_seed(seed)):  # first of all: it keeps other threads out
            python_state, numpy_state = random.getstate(), np.random.get_state()
            random.seed(derive_seed(seed, "python"))
            np.random.seed(derive_seed(seed, "numpy") % 2**32)
            try:
                return self.dataset[row]
            finally:
                random.setstate(python_state)
                np.random.set_state(numpy_state)


class LoaderData(Data):
    """A ``DataLoader``: batch size, workers and collation are kept, the order becomes ours.

    What the data set draws at random (augmentation) is seeded for each example, so that it replays.

    Batches are (inputs, targets), (inputs, targets, weights), or for several inputs
    ((x1, x2), targets). An ``IterableDataset`` has an order of its own and no known length: say
    ``num_examples``; all chains then see the same batches, and no bits are promised on resume.
    """

    def __init__(self, loader: DataLoader, num_examples: int | None = None) -> None:
        self.loader = loader
        self.drop_last = bool(loader.drop_last)
        self.replayable = not isinstance(loader.dataset, IterableDataset)
        if self.replayable:
            if type(loader.sampler) not in (SequentialSampler, RandomSampler):
                raise InputError(
                    f"The DataLoader has a {type(loader.sampler).__name__}; fit derives the order of "
                    "examples itself and would not follow it. Use torch.utils.data.Subset for a part of the "
                    "data, or sample weights for unequal shares."
                )
            self.num_examples = len(loader.dataset)  # type: ignore[arg-type]  # map-style: it has one
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
        if self.drop_last and self.batch_size > self.num_examples:
            raise InputError(
                f"drop_last=True with batch_size={self.batch_size} leaves nothing of {self.num_examples} "
                "examples."
            )

    def stream(self, indices: Iterable[Tensor], seeds: Iterable[Tensor]) -> Iterator[Examples]:
        if not self.replayable:
            return map(_examples, self.loader)
        workers = self.loader.num_workers
        rebuilt = DataLoader(
            _Seeded(self.loader.dataset),
            batch_sampler=(  # type: ignore[arg-type]  # pairs: _Seeded takes them
                list(zip(index.tolist(), seed.tolist(), strict=True))
                for index, seed in zip(indices, seeds, strict=False)
            ),
            num_workers=workers,
            collate_fn=self.loader.collate_fn,
            pin_memory=self.loader.pin_memory,
            worker_init_fn=self.loader.worker_init_fn,
            multiprocessing_context=self.loader.multiprocessing_context if workers else None,
            prefetch_factor=self.loader.prefetch_factor if workers else None,
            generator=torch.Generator(),  # it draws a seed for its workers, and not from the user's generator
        )
        return map(_examples, rebuilt)


def _examples(batch: Any) -> Examples:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise InputError(
            "A DataLoader must yield (inputs, targets) or (inputs, targets, weights); it yields "
            f"{type(batch).__name__}"
            + (f" of length {len(batch)}." if isinstance(batch, tuple | list) else ".")
            + " Several inputs go into one entry: ((x1, x2), targets)."
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
        f"Data must be ArrayData(inputs, targets) or a torch DataLoader, got {type(data).__name__}. Put "
        "arrays x and y together as ArrayData(x, y); a list is taken for several data sets."
    )


def arrays_of(data: Data) -> tuple[Tree, Tensor]:
    """All inputs and targets of a data set, in their own order."""
    if isinstance(data, ArrayData):
        return data.inputs, data.targets
    parts = list(data.in_order())
    inputs = map_tree(lambda *t: torch.cat(t), *(part.inputs for part in parts))
    return inputs, torch.cat([part.targets for part in parts])
