"""Which chain sees which examples when: orders, ragged data sets, batches side by side."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from polymode.data import ArrayData, Data, Examples
from polymode.errors import InputError
from polymode.seeds import derive_generator, derive_seed
from polymode.training.contract.batch import Batch, Piece
from polymode.training.contract.ranks import ALONE, Ranks
from polymode.trees import leaves, map_tree

# A pass over the whole data set takes inputs of so many bytes at once: activations are a multiple of them.
FULL_BYTES = 2**22

Arrange = Callable[[Examples, bool], Examples]


@dataclass(frozen=True)
class Group:
    """One chain on one data set."""

    data_set: int
    chain: int
    num_examples: int
    offset: int
    seed: int


@dataclass(frozen=True)
class _Slot:
    """What some groups see at one place in the plan of an epoch.

    seen: the groups whose orders count, the first one alone where all see the same examples. places: in their
    orders. minibatch: its number in the epoch.
    """

    groups: slice
    seen: slice
    places: slice
    minibatch: int


def as_they_are(examples: Examples, has_groups: bool) -> Examples:
    """Examples without a network that wants them otherwise."""
    return examples


class Batches:
    """The batches of a run: chains of all data sets, ordered so that active ones are neighbours.

    Data sets are sorted by length, longest first: at every step the active groups are a prefix, and
    those with a full batch another. ``shared_order`` lets all chains see one order. arrange: brings examples
    to where and how the network wants them. ranks: who shares every batch.
    """

    def __init__(
        self,
        data: Sequence[Data],
        chains: Sequence[int],
        seeds: Sequence[int],
        *,
        shared_order: bool,
        arrange: Arrange = as_they_are,
        ranks: Ranks = ALONE,
    ) -> None:
        self.arrange, self.ranks = arrange, ranks
        # One data set may be given several times (for several seeds): it is held once.
        distinct = list({id(part): part for part in data}.values())
        self.source = distinct[0] if len(distinct) == 1 else _joined(distinct)
        if not self.source.replayable and len(data) > 1:
            raise InputError(
                "An IterableDataset has one order of its own: it cannot be trained on side by side. Fit it "
                "once for each seed."
            )
        self.batch_size = data[0].batch_size
        self.drop_last = data[0].drop_last
        self.shared_order = shared_order or not self.source.replayable
        offsets, end = {}, 0
        for part in distinct:
            offsets[id(part)], end = end, end + part.num_examples
        longest_first = sorted(range(len(data)), key=lambda d: -data[d].num_examples)
        self.groups = [
            Group(d, chain, data[d].num_examples, offsets[id(data[d])], seeds[d])
            for d in longest_first
            for chain in chains
        ]

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def num_minibatches(self, num_examples: int) -> int:
        full, rest = divmod(num_examples, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    @cached_property
    def cohorts(self) -> list[slice]:
        """Groups with the same number of minibatches in an epoch, as slices."""
        counts = [self.num_minibatches(group.num_examples) for group in self.groups]
        return [groups for _, groups in _neighbours(counts)]

    def steps_per_epoch(self, cohort: slice, batches: int | Literal["full"]) -> int:
        if batches == "full":
            return 1
        return -(-self.num_minibatches(self.groups[cohort.start].num_examples) // batches)

    def num_kinds(self, batches: int | Literal["full"]) -> int:
        """How many pieces of an epoch differ in who sees them or in how many examples they have."""
        slots = (slot for round_ in self._plan(batches) for minibatch in round_ for slot in minibatch)
        return len({(str(s.groups), s.places.stop - s.places.start) for s in slots})

    def epoch(self, epoch: int, batches: int | Literal["full"], first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the rounds of one epoch, from ``first_step`` on.

        "full" is one round of all examples in their own order, which all chains on a data set see together.
        """
        full = batches == "full"
        plan = self._plan(batches)[first_step:]
        orders = self._orders(epoch, shuffled=not full)
        slots = [slot for round_ in plan for minibatch in round_ for slot in minibatch]
        # The whole data set is always the same one: what it draws at random does not change.
        drawn_in = 0 if full else epoch
        stream = self.source.stream(
            ((orders[s.seen, self._own(s)[0]] + self.offsets[s.seen, None]).flatten() for s in slots),
            (self._example_seeds(slot, drawn_in) for slot in slots),
        )
        has_groups = not (self.one_data_set if full else self.one_order)
        for round_ in plan:
            yield [self._batch(minibatch, orders, stream, has_groups) for minibatch in round_]

    def _batch(
        self, minibatch: Sequence[_Slot], orders: Tensor, stream: Iterator[Examples], has_groups: bool
    ) -> Batch:
        pieces = []
        for slot in minibatch:
            places, counts = self._own(slot)
            examples, rows = next(stream, None), orders[slot.seen, places]  # [G, B]
            if examples is None:
                raise InputError(
                    f"The data ended before row {slot.places.start}, although num_examples says there are "
                    f"{self.groups[slot.groups.start].num_examples}. Correct num_examples."
                )
            if has_groups:
                examples = map_tree(lambda t, rows=rows: t.unflatten(0, rows.shape), examples)
            rows = rows if has_groups else rows[0]
            whole = None
            if self.ranks.size > 1:
                whole = (slot.places.stop - slot.places.start, places.start - slot.places.start)
            arranged = self.arrange(examples, has_groups)
            pieces.append(Piece(slot.groups, arranged, rows, has_groups, whole=whole, counts=counts))
        last = minibatch[-1].groups.stop
        return Batch(pieces, [n for n, cohort in enumerate(self.cohorts) if cohort.start < last])

    def _own(self, slot: _Slot) -> tuple[slice, bool]:
        """The places of a slot that this process sees, and whether they count."""
        return self.ranks.share(slot.places)

    def _example_seeds(self, slot: _Slot, epoch: int) -> Tensor:
        """A seed for each example of a slot: a chain's own, so that it sees what it would see alone."""
        bases = [
            derive_seed(group.seed, "examples", self._order_of(group), epoch, slot.minibatch) >> 1
            for group in self.groups[slot.seen]
        ]
        own, _ = self._own(slot)
        places = torch.arange(own.start, own.stop) - slot.places.start
        return (torch.tensor(bases)[:, None] + places).flatten()

    def _order_of(self, group: Group) -> int | str:
        return "shared" if self.shared_order else group.chain

    @cached_property
    def one_order(self) -> bool:
        """Whether all groups see the same examples, so that batches carry no group axis."""
        return self.shared_order and len({(group.seed, group.offset) for group in self.groups}) == 1

    @cached_property
    def _rows_at_once(self) -> int:
        """Examples of a piece of the whole data set."""
        if not isinstance(self.source, ArrayData):
            return self.batch_size
        row = sum(leaf[:1].numel() * leaf.element_size() for leaf in leaves(self.source.inputs))
        return max(self.batch_size, FULL_BYTES // max(1, row))

    @cached_property
    def one_data_set(self) -> bool:
        """Whether all groups are chains on the same examples."""
        return len({group.offset for group in self.groups}) == 1

    @cached_property
    def offsets(self) -> Tensor:
        """Where each group's examples begin in the joint source, [G]."""
        return torch.tensor([group.offset for group in self.groups])

    def _plan(self, batches: int | Literal["full"]) -> list[list[list[_Slot]]]:
        """Rounds of minibatches of slots, each for neighbouring groups with as many rows."""
        longest, full = self.groups[0].num_examples, batches == "full"
        size = min(longest, self._rows_at_once) if full else self.batch_size
        together = self.one_data_set if full else self.one_order
        minibatches: list[list[_Slot]] = []
        for start in range(0, longest, size):
            counts = [max(0, min(size, group.num_examples - start)) for group in self.groups]
            if self.drop_last and not full:
                counts = [rows if rows == size else 0 for rows in counts]
            minibatch = []
            for rows, groups in _neighbours(counts):
                if rows:
                    seen = slice(0, 1) if together else groups
                    minibatch.append(_Slot(groups, seen, slice(start, start + rows), len(minibatches)))
            if minibatch:
                minibatches.append(minibatch)
        count = len(minibatches) if batches == "full" else batches
        return [minibatches[i : i + count] for i in range(0, len(minibatches), count)]

    def _orders(self, epoch: int, *, shuffled: bool) -> Tensor:
        """Row numbers in each group's data set, [G, longest]."""
        orders = torch.zeros(self.num_groups, self.groups[0].num_examples, dtype=torch.int64)
        known: dict[tuple, Tensor] = {}
        for row, group in enumerate(self.groups):
            key = (group.seed, "order", self._order_of(group), epoch, group.num_examples)
            if key not in known:
                known[key] = (
                    torch.randperm(group.num_examples, generator=derive_generator(*key))
                    if shuffled
                    else torch.arange(group.num_examples)
                )
            orders[row, : group.num_examples] = known[key]
        return orders


def _neighbours(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Stretches of equal numbers: each with its slice."""
    first = 0
    for value, run in itertools.groupby(counts):
        last = first + len(list(run))
        yield value, slice(first, last)
        first = last


def _joined(data: Sequence[Data]) -> ArrayData:
    """All rows of several in-memory data sets in one, so that one gather serves all chains."""
    arrays = [part for part in data if isinstance(part, ArrayData)]
    if len(arrays) != len(data):
        raise InputError(
            "Several data sets side by side must all be ArrayData (in memory). Fit DataLoaders one at a time."
        )
    first = arrays[0]
    if len({(part.batch_size, part.drop_last) for part in arrays}) > 1:
        seen = sorted({(part.batch_size, part.drop_last) for part in arrays})
        raise InputError(f"Data sets side by side must agree in (batch_size, drop_last); seen {seen}.")
    if len({part.augment for part in arrays}) > 1:
        raise InputError("Data sets side by side must have the same augmentation.")
    if len({part.weights is None for part in arrays}) > 1:
        raise InputError("Data sets side by side must all have sample weights, or none.")

    def join(*parts: Tensor) -> Tensor:
        return torch.cat(parts)

    weights = [part.weights for part in arrays if part.weights is not None]
    return ArrayData(
        map_tree(join, *(part.inputs for part in arrays)),
        join(*(part.targets for part in arrays)),
        weights=join(*weights) if weights else None,
        batch_size=first.batch_size,
        drop_last=first.drop_last,
        augment=first.augment,
    )
