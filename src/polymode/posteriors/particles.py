"""A finite set of networks, in memory or in files that are read when they are drawn."""

import copy
import itertools
import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, Self
from weakref import finalize

import torch
from torch import Tensor, nn

from polymode.errors import CheckpointError, InputError, NotCollapsible, require
from polymode.networks.members import Members, Tensors, concatenate
from polymode.networks.surgery import as_plain_module, set_tensors
from polymode.posteriors.base import (
    BLOCK_BYTES,
    CONSTANTS,
    Posterior,
    register_posterior,
)
from polymode.posteriors.network import Network, check_fingerprint, check_tensors
from polymode.storage import (
    CheckedFile,
    entry,
    fingerprint_of,
    read_document,
    read_some,
    tensor_bytes,
    write_tensors,
)

# More members than this at once gain nothing from the member axis and cost memory for activations.
BLOCK_MEMBERS = 128
WAITING_BYTES, WAITING_ENTRIES = 2**26, 128  # of finished members that go to a file together, at most
MEMORY_BYTES = 2**30  # of finished members that are kept in memory where a run has no folder


def members_to_tensors(members: Members) -> Tensors:
    """Flatten members into one dictionary of tensors for a file."""
    stacked = {f"stacked/{name}": tensor for name, tensor in members.stacked.items()}
    shared = {f"shared/{name}": tensor for name, tensor in members.shared.items()}
    return stacked | shared | {"log_weights": members.log_weights, "labels": members.labels}


def members_from_tensors(tensors: Tensors) -> Members:
    """Read one group of members back from the dictionary of a file."""

    def part(prefix: str) -> Tensors:
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    return Members(
        part("stacked/"),
        part("shared/"),
        log_weights=tensors["log_weights"],
        labels=tensors["labels"],
    )


@dataclass(frozen=True)
class StoredMembers:
    """One group of members in a file, of several alike, that is written once and read when it is needed."""

    file: CheckedFile
    num_members: int
    group: int = 0
    num_groups: int = 1  # in the file

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.file.check()) // self.num_groups

    @property
    def largest_log_weight(self) -> float:
        return float(self.read("log_weights").max())

    def read(self, wanted: str) -> Tensor:
        """One tensor of all members, and nothing else."""
        rows = slice(self.group * self.num_members, (self.group + 1) * self.num_members)
        return read_some(self.file.check(), lambda name: rows if name == wanted else None)[wanted]

    def rows(self, start: int, stop: int) -> Members:
        first = self.group * self.num_members

        def wanted(name: str) -> slice:
            if name.startswith("shared/"):
                return slice(self.group, self.group + 1)
            return slice(first + start, first + stop)

        return members_from_tensors(read_some(self.file.check(), wanted))


@dataclass(frozen=True)
class SomeMembers:
    """Neighbours in a block of members: those of one chain, say."""

    block: Members | StoredMembers
    first: int
    num_members: int

    @property
    def num_bytes(self) -> int:
        return self.block.num_bytes * self.num_members // self.block.num_members

    @property
    def largest_log_weight(self) -> float:
        found = self.block.log_weights if isinstance(self.block, Members) else self.block.read("log_weights")
        return float(found[self.first : self.first + self.num_members].max())

    def rows(self, start: int, stop: int) -> Members:
        return rows_of(self.block, self.first + start, self.first + stop)


Block = Members | StoredMembers | SomeMembers


def rows_of(block: Block, start: int, stop: int) -> Members:
    """Some members of one group, read if they are in a file."""
    return block.between(start, stop) if isinstance(block, Members) else block.rows(start, stop)


def labels_of(block: Block) -> Tensor:
    """The labels of a block's members, [M, 3]; nothing else is read."""
    if isinstance(block, SomeMembers):
        return labels_of(block.block)[block.first : block.first + block.num_members]
    return block.labels if isinstance(block, Members) else block.read("labels")


class _Overflow:
    """A temporary folder, removed when nobody holds it any more."""

    def __init__(self) -> None:
        self.folder = Path(mkdtemp(prefix="polymode-"))
        finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


class _Waiting:
    """Copies of finished members that go to a file together, in room that is taken at once.

    Copies in places of their own would come to lie between the large tensors of the steps before and after
    them, and split the memory of the process up: it would grow with every one.
    """

    def __init__(self, first: Members, room: int) -> None:
        self.num_groups, self.group_size = first.num_groups, first.group_size
        self.room, self.count = room, 0
        self._tensors = {
            name: torch.empty((room * len(tensor), *tensor.shape[1:]), dtype=tensor.dtype)
            for name, tensor in members_to_tensors(first).items()
        }

    def append(self, members: Members) -> None:
        for name, tensor in members_to_tensors(members).items():
            self._tensors[name].narrow(0, self.count * len(tensor), len(tensor)).copy_(tensor)
        self.count += 1

    @property
    def is_full(self) -> bool:
        return self.count == self.room

    def tensors(self) -> Tensors:
        """Of all that wait, side by side."""
        return {name: t[: len(t) // self.room * self.count] for name, t in self._tensors.items()}


class MemberStore:
    """Members that are finished: written once to files of a folder, or kept in memory as far as they fit.

    What goes to files waits for company, up to ``WAITING_BYTES`` and ``WAITING_ENTRIES``, until a checkpoint
    or a posterior needs it: small members would spend more time on their files than on training.
    Without a folder, what is beyond ``MEMORY_BYTES`` goes to a temporary one, which is removed when nobody
    holds its members any more. writes: False leaves a folder as another process has it, and keeps what is
    appended as if there were none.
    """

    def __init__(self, folder: Path | None = None, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self._entries: list[list[Block]] = []  # one an ``append``, one block a group; of what is waiting none
        self._files: list[CheckedFile] = []
        self._waiting: _Waiting | None = None
        self._in_memory = 0  # bytes
        self._overflow: _Overflow | None = None

    def __len__(self) -> int:
        """How often members were appended."""
        return len(self._entries) + (0 if self._waiting is None else self._waiting.count)

    def append(self, members: Members) -> None:
        """Keep a copy of the members as they are now; their labels go on from those kept before."""
        num_bytes = members.num_bytes
        labels = members.labels.clone()
        labels[:, 2] += len(self) * members.group_size
        kept_apart = self.folder is None or not self.writes
        if kept_apart and self._in_memory + num_bytes <= MEMORY_BYTES:
            self._in_memory += num_bytes
            copy_ = replace(members.clone(), labels=labels)
            self._entries.append([copy_.groups(slice(g, g + 1)) for g in range(members.num_groups)])
            return
        if self._waiting is None:
            room = max(1, min(WAITING_ENTRIES, WAITING_BYTES // num_bytes))
            self._waiting = _Waiting(members, room)
        self._waiting.append(replace(members, labels=labels))
        if self._waiting.is_full:
            self._write()

    def _write(self) -> None:
        """Write what waits to a file of its own."""
        if self._waiting is None:
            return
        path = self._path(len(self._files), self.folder if self.writes else None)
        digest = write_tensors(path, self._waiting.tensors())
        num_groups, group_size = self._waiting.num_groups, self._waiting.group_size
        self._waiting = None
        self._add(CheckedFile(path, digest, self._overflow), num_groups, group_size)

    def _add(self, file: CheckedFile, num_groups: int, group_size: int) -> None:
        """Take up the entries of a file."""
        count = len(read_some(file.check(), lambda name: slice(None) if name == "labels" else None)["labels"])
        total = count // group_size
        blocks: list[Block] = [StoredMembers(file, group_size, g, total) for g in range(total)]
        self._files.append(file)
        self._entries += [blocks[start : start + num_groups] for start in range(0, total, num_groups)]

    def digests(self) -> Tensor:
        """The SHA-256 of every file, [n, 32] bytes, after writing what waits; none where all is in memory."""
        self._write()
        digests = [list(bytes.fromhex(file.checksum)) for file in self._files]
        return torch.tensor(digests, dtype=torch.uint8).reshape(-1, 32)

    def restore(self, digests: Tensor, num_groups: int, group_size: int) -> None:
        """Take up the first files that an interrupted run has written, if they are as they were.

        digests: what ``digests`` gave.
        """
        self._entries, self._files, self._waiting = [], [], None
        for index, digest in enumerate(digests.numpy()):
            self._add(
                CheckedFile(self._path(index, self.folder), digest.tobytes().hex()), num_groups, group_size
            )

    def of_group(self, group: int) -> "MemberStore":
        """The finished members of one group; what is finished later belongs to it, too."""
        return _OfGroup(self, group)

    @property
    def entries(self) -> list[list[Block]]:
        """What every ``append`` has left, one block a group; where it goes to files, it is there now."""
        self._write()
        return self._entries

    @property
    def blocks(self) -> list[Block]:
        return [block for entry in self.entries for block in entry]

    def _path(self, index: int, folder: Path | None) -> Path:
        if folder is None:
            self._overflow = self._overflow or _Overflow()
            folder = self._overflow.folder
        return folder / f"members-{index:05d}.safetensors"


class _OfGroup(MemberStore):
    """A view of one group: nothing is copied until its members are asked for."""

    def __init__(self, whole: MemberStore, group: int) -> None:
        super().__init__(whole.folder)
        self._whole, self._group = whole, group

    def __len__(self) -> int:
        return len(self._whole)

    @property
    def entries(self) -> list[list[Block]]:
        return [[entry[self._group]] for entry in self._whole.entries]


@dataclass(frozen=True, repr=False)
class BlockPosterior(Posterior):
    """A posterior whose tensors are members, in memory or in files that are read when they are needed.

    What members hold may be the weights of a network, or something that networks are made of.
    """

    blocks: Sequence[Block] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        for index, block in enumerate(self.blocks):
            yield f"members-{index:05d}.safetensors", members_to_tensors(self.whole(block))

    def whole(self, block: Block) -> Members:
        """All members of a block, on the network's device."""
        return rows_of(block, 0, block.num_members).to(self.network.device)

    @property
    def weight_offset(self) -> float:
        return max(block.largest_log_weight for block in self.blocks)

    def in_memory(self) -> Self:
        return replace(self, blocks=[self.whole(block).clone() for block in self.blocks])

    def held(self) -> Self:
        return self if sum(block.num_bytes for block in self.blocks) > BLOCK_BYTES else self.in_memory()

    def read_from(self, folder: Path) -> Self:
        if not any(isinstance(block, StoredMembers) for block in self.blocks):
            return self
        path = folder / "posterior.json"
        digests = entry(read_document(path, "posterior"), "files", dict, path)
        files = [CheckedFile(folder / name, d) for name, d in digests.items() if name != CONSTANTS]
        return replace(self, blocks=_stored(files))

    @classmethod
    def from_files(
        cls, network: Network, files: Sequence[CheckedFile], constants: Tensors, options: Mapping[str, Any]
    ) -> Self:
        for file in files:
            cls.check_members(file.path, network, constants, options)
        return cls(network, blocks=_stored(files))

    @classmethod
    def check_members(
        cls, path: Path, network: Network, constants: Tensors, options: Mapping[str, Any]
    ) -> None:
        """Raise unless the members of a file, with what they have in common, are whole networks."""
        found = fingerprint_of(path)
        count = found.get("labels", [None, 0])[1]
        if count < 1:
            raise CheckpointError(f"{path} holds no members.")
        kind = "float64" if found.get("log_weights", [""])[0] == "float64" else "float32"
        expected = {"labels": ["int64", count, 3], "log_weights": [kind, count]}
        for name, (kind, *shape) in cls.trained_in(network, options).items():
            stored = [n for n in (f"stacked/{name}", f"shared/{name}") if n in found]
            if name not in constants or stored:
                leading = 1 if stored == [f"shared/{name}"] else count
                expected[stored[0] if len(stored) == 1 else f"stacked/{name}"] = [kind, leading, *shape]
        check_tensors(found, expected, path)

    @classmethod
    def trained_in(cls, network: Network, options: Mapping[str, Any]) -> Mapping[str, list]:
        """Types and shapes of what members and constants hold together: the network's tensors."""
        return network.fingerprint


@register_posterior
@dataclass(frozen=True, repr=False)
class Particles(BlockPosterior):
    """Networks with weights: Σ_m w_m δ(θ − θ_m). ``draw()`` gives all of them in order.

    Fewer than all are spread evenly over the order they were made in, so that a thinned chain still
    spans its whole length.
    """

    kind: ClassVar[str] = "particles"

    @property
    def num_members(self) -> int:
        return sum(block.num_members for block in self.blocks)

    def __repr__(self) -> str:
        module = type(self.network.module).__name__
        return f"Particles({self.num_members} × {module}, {self.network.likelihood.kind})"

    def draw(
        self, num_draws: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Members]:
        self.check_num_draws(num_draws)
        total = self.num_members
        count = total if num_draws is None else num_draws
        wanted = range(total) if count == total else [(index * total) // count for index in range(count)]
        return _in_blocks(self._parts(wanted))

    def _parts(self, wanted: Sequence[int]) -> Iterator[Members]:
        """Yield the wanted members in runs small enough for a block."""
        first = 0
        for block in self.blocks:
            beyond = first + block.num_members
            if isinstance(wanted, range):  # all of them
                inside = range(block.num_members)
            else:
                inside = wanted[bisect_left(wanted, first) : bisect_left(wanted, beyond)]
                inside = [index - first for index in inside]
            first = beyond
            each = max(1, block.num_bytes // block.num_members)
            for start, stop in _runs(inside, max(1, min(BLOCK_MEMBERS, BLOCK_BYTES // each))):
                part = rows_of(block, start, stop).to(self.network.device)
                yield replace(part, log_weights=part.log_weights - self._largest_log_weight)

    @cached_property
    def _largest_log_weight(self) -> float:
        """Subtracted from all, so that weights can be exponentiated."""
        return max(block.largest_log_weight for block in self.blocks)

    def held(self) -> Self:
        held = super().held()
        return held if held is self else replace(held, blocks=_joined(held.blocks))

    @property
    def labels(self) -> Tensor:
        """Data set, chain and member of every network, [M, 3]."""
        return torch.cat([labels_of(block) for block in self.blocks])

    def only(self, indices: Sequence[int]) -> "Particles":
        """Some of the networks, in the order given; what is in files stays there."""
        places = [(block, row) for block in self.blocks for row in range(block.num_members)]
        indices = list(indices)
        for index in indices:
            if isinstance(index, bool) or not isinstance(index, int):
                raise InputError(f"Networks are named by whole numbers, got {index!r}.")
            if not -len(places) <= index < len(places):
                raise InputError(f"Networks are numbered from 0 to {len(places) - 1}, got {index}.")
        require(bool(indices), "Name at least one network.")
        blocks: list[Block] = []
        for index in indices:
            block, row = places[index]
            inner, first = (block.block, block.first) if isinstance(block, SomeMembers) else (block, 0)
            blocks.append(SomeMembers(inner, first + row, 1))
        return replace(self, blocks=blocks)

    @property
    def last(self) -> "Particles":
        """The last network alone: of a trajectory its end."""
        return self.only([self.num_members - 1])

    def chains(self) -> "dict[tuple[int, int], Particles]":
        """The networks of every chain, by its data set and number, in the order they were made."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        labels = [tuple(label) for label in self.labels.tolist()]
        if len(set(labels)) < len(labels):
            raise InputError(
                "Labels of these networks repeat, so that nobody can tell which chain they belong to: they "
                "come from several fits that were merged. Take the chains of each posterior by itself."
            )
        for index, (data_set, chain, member) in enumerate(labels):
            found.setdefault((data_set, chain), []).append((member, index))
        return {key: self.only([i for _, i in sorted(each)]) for key, each in sorted(found.items())}

    def collapse(self) -> nn.Module:
        if self.num_members != 1:
            raise NotCollapsible(
                f"This posterior is {self.num_members} different networks; their average is not a "
                "network. Predict with it, or fit a method that collapses (one member)."
            )
        module = copy.deepcopy(self.network.module)
        [members] = self.draw()
        weights = members.member(0)
        set_tensors(module, weights)
        return as_plain_module(module, weights)

    def merged(self, others: Sequence[Posterior]) -> "Particles":
        blocks = list(self.blocks)
        for other in others:
            if not isinstance(other, Particles):
                raise InputError(f"Particles cannot be merged with a posterior of kind {other.kind!r}.")
            self.check_joinable(other.network)
            blocks += (other if other.kind == self.kind else other.as_particles()).blocks
        return replace(self, blocks=_joined(blocks))

    def as_particles(self) -> "Particles":
        """The same networks, each whole."""
        return self

    def check_joinable(self, network: Network) -> None:
        """Raise unless members of another network, alike in all that is common, can stand beside these."""
        check_fingerprint(self.network.fingerprint, network.fingerprint, "The posterior")
        if network.adaptations != self.network.adaptations:
            raise InputError(
                f"The posteriors cannot be joined: the network of one is changed by "
                f"{list(self.network.adaptations)}, that of another by {list(network.adaptations)}."
            )
        [first] = self.draw(1)
        owned = first.stacked.keys() | first.shared.keys()
        theirs = network.constants(owned)
        for name, tensor in self.network.constants(owned).items():
            if not torch.equal(tensor, theirs[name].to(tensor.device)):
                raise InputError(
                    f"The posteriors cannot be joined: {name!r}, which their members have in common, differs."
                )

    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        for index, members in enumerate(self.draw()):
            yield f"members-{index:05d}.safetensors", members_to_tensors(members)


def _joined(blocks: Sequence[Block]) -> list[Block]:
    """What is in memory lies side by side from now on, instead of being put there at every prediction."""
    joined: list[Block] = []
    for _, neighbours in itertools.groupby(blocks, type):
        some = list(neighbours)
        here = [block for block in some if isinstance(block, Members)]
        joined += _in_blocks(here) if here else some
    return joined


def _stored(files: Sequence[CheckedFile]) -> list[Block]:
    """The members of files, in the order of their names."""

    def count(file: CheckedFile) -> int:
        labels = read_some(file.check(), lambda name: slice(None) if name == "labels" else None)
        return len(labels["labels"])

    return [StoredMembers(file, count(file)) for file in sorted(files, key=lambda file: file.path)]


def _in_blocks(parts: Iterable[Members]) -> Iterator[Members]:
    """Put members side by side in blocks of bounded size."""
    gathered: list[Members] = []
    size = number = 0
    for part in parts:
        size, number = size + part.num_bytes, number + part.num_members
        if gathered and (part.shared or size > BLOCK_BYTES or number > BLOCK_MEMBERS):
            yield _side_by_side(gathered)
            gathered, size, number = [], part.num_bytes, part.num_members
        gathered.append(part)
    yield _side_by_side(gathered)


def _side_by_side(parts: Sequence[Members]) -> Members:
    """Join members into one group: a draw is a set of networks, whatever chains they came from."""
    joined = parts[0] if len(parts) == 1 else concatenate(parts)
    return joined if joined.shared else replace(joined, num_groups=1)


def _runs(indices: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Cut sorted indices into (start, stop) runs of neighbours."""
    if isinstance(indices, range):
        for start in range(0, len(indices), longest):
            yield start, min(start + longest, len(indices))
        return
    run: list[int] = []
    for index in indices:
        if run and (index != run[-1] + 1 or len(run) == longest):
            yield run[0], run[-1] + 1
            run = []
        run.append(index)
    if run:
        yield run[0], run[-1] + 1
