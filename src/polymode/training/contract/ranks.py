"""Processes that train one run together: each sees a share of every minibatch, and all hold all members."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from polymode.errors import InputError, require, shortened

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """So many processes, of which this is one; a single one has nobody to talk to."""

    size: int = 1
    rank: int = 0

    @classmethod
    def joined(cls) -> "Ranks":
        """Those that torch.distributed knows of; it must have been set up, as ``polymode train`` does."""
        if not distributed.is_available() or not distributed.is_initialized():
            raise InputError(
                "data_parallel=True shares minibatches among the processes of torch.distributed, which is "
                "not set up here: call torch.distributed.init_process_group() in a program that torchrun "
                "starts, or run torchrun --nproc-per-node N -m -- polymode train ...."
            )
        return cls(distributed.get_world_size(), distributed.get_rank())

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and tells."""
        return self.rank == 0

    def share(self, places: slice) -> tuple[slice, bool]:
        """This rank's part of the places of a minibatch; where there is none, one that does not count."""
        count = places.stop - places.start
        first = places.start + count * self.rank // self.size
        last = places.start + count * (self.rank + 1) // self.size
        return (slice(first, last), True) if last > first else (slice(places.start, places.start + 1), False)

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of tensors over all ranks, in one message for each type; the same bits on each."""
        if self.size == 1:
            return list(tensors)
        sums: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[place].flatten() for place in places])
            distributed.all_reduce(flat)
            parts = flat.split([tensors[place].numel() for place in places])
            sums |= {place: p.reshape(tensors[place].shape) for place, p in zip(places, parts, strict=True)}
        return [sums[place] for place in range(len(tensors))]

    def any(self, asked: bool, device: torch.device) -> bool:
        """Whether any rank says so."""
        [total] = self.add([torch.tensor([float(asked)], device=device)])
        return bool(total.item())

    def first(self, value: Value) -> Value:
        """What the first rank has, for all of them."""
        if self.size == 1:
            return value
        held: list[Any] = [value]
        distributed.broadcast_object_list(held, src=0)
        return held[0]

    def agree(self, run: Mapping[str, Any]) -> None:
        """Raise unless all ranks are about to train the same run: one would wait for another for ever."""
        told = self.all_of(dict(run))
        for rank, other in enumerate(told):
            for name in told[0] | other:
                mine, theirs = (shortened(repr(each.get(name))) for each in (told[0], other))
                require(
                    told[0].get(name) == other.get(name),
                    f"The processes of torchrun were told different things: {name} is {mine} on rank 0 and "
                    f"{theirs} on rank {rank}. Start all of them with the same command, data and code.",
                )

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What the first rank makes, for all of them; where it cannot be made, none of them goes on."""
        if self.size == 1:
            return make()
        value: Any = None
        failure: Exception | None = None
        if self.is_first:
            try:
                value = make()
            except Exception as error:
                failure = error
        value, reason = self.first((value, None if failure is None else shortened(str(failure))))
        if failure is not None:
            raise failure
        require(reason is None, f"Rank 0 could not go on: {reason}")
        return value

    def all_of(self, value: Value) -> list[Value]:
        """What every rank has, in their order."""
        if self.size == 1:
            return [value]
        told: list[Any] = [None] * self.size
        distributed.all_gather_object(told, value)
        return told

    def meet(self) -> None:
        """Wait for all of them."""
        if self.size > 1:
            distributed.barrier()

    @contextmanager
    def first_one_first(self) -> Iterator[None]:
        """Do something on the first rank, then on the others, which find what it has left."""
        if not self.is_first:
            self.meet()
        yield
        if self.is_first:
            self.meet()

    def check(self, *, looks_at_batches: bool, draws_globally: bool, replayable: bool, refusal: str) -> None:
        """Raise where a share of a minibatch would not do what the whole one does."""
        if self.size == 1:
            return
        require(
            not looks_at_batches,
            "What the network gives for an example depends on the minibatch around it (BatchNorm, a mean "
            "over examples), which would be a share of one. With data_parallel use layers that look at one "
            "example at a time (GroupNorm, LayerNorm, "
            "polymode.models.FilterResponseNorm), or train in one process.",
        )
        require(
            not draws_globally,
            "The network draws random numbers by itself (F.dropout, torch.rand), which would be others in "
            "every process: with data_parallel use nn.Dropout layers.",
        )
        require(replayable, "An IterableDataset has one order of its own, which cannot be shared out.")
        require(not refusal, f"data_parallel: {refusal}")


ALONE = Ranks()
