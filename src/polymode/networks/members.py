"""The member axis: many networks as one dictionary of tensors.

The weights of member m are what it owns (``stacked``, member axis first) and what it shares with
the other members of its group (``shared``, group axis first). A group is one chain of a method on
one data set: nothing is ever shared or averaged across groups.
"""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from polymode.errors import CannotCompile, CannotVectorise, InputError, PolymodeError, unknown_name
from polymode.networks.recording import Recording, compiled, form_of
from polymode.trees import Tree, filled, leaves, map_tree

Tensors = dict[str, Tensor]
Backend = Literal["vmap", "loop", "compiled"]

BACKENDS: tuple[Backend, ...] = ("vmap", "loop", "compiled")
LABELS = ("data_set", "chain", "member")
DRAW = "draw/seed"  # the entry of a member with the seed of its draw; no module has a name with a slash


@dataclass(frozen=True)
class Members:
    """M networks in G groups of equal size, under the names of one module.

    stacked: tensors [M, ...], each member's own.
    shared: tensors [G, ...], one for the M/G members of a group, which stand side by side.
    log_weights: [M], unnormalised; zeros unless given.
    labels: [M, 3] integers (data set, chain, member); counted up unless given.
    """

    stacked: Tensors
    shared: Tensors = field(default_factory=dict)
    num_groups: int = 1
    log_weights: Tensor = None  # type: ignore[assignment]  # filled in __post_init__
    labels: Tensor = None  # type: ignore[assignment]  # filled in __post_init__

    def __post_init__(self) -> None:
        sizes = {name: tensor.shape[0] for name, tensor in self.stacked.items()}
        if len(set(sizes.values())) != 1:
            raise InputError(
                f"Stacked tensors must share a leading member axis; seen {sizes or 'no tensor'}."
            )
        num_members = next(iter(sizes.values()))
        if num_members < 1 or num_members % self.num_groups:
            raise InputError(f"{num_members} members do not divide into {self.num_groups} equal groups.")
        wrong = [n for n, tensor in self.shared.items() if tensor.shape[0] != self.num_groups]
        if wrong:
            raise InputError(f"Shared tensors lead with a group axis of {self.num_groups}; not so: {wrong}.")
        device = next(iter(self.stacked.values())).device
        if self.log_weights is None:
            object.__setattr__(self, "log_weights", torch.zeros(num_members, device=device))
        if self.labels is None:
            labels = torch.zeros(num_members, 3, dtype=torch.int64)
            labels[:, 2] = torch.arange(num_members)
            object.__setattr__(self, "labels", labels)

    @property
    def num_members(self) -> int:
        return self.labels.shape[0]

    @property
    def group_size(self) -> int:
        return self.num_members // self.num_groups

    @property
    def largest_log_weight(self) -> float:
        return float(self.log_weights.max())

    @property
    def num_bytes(self) -> int:
        tensors = (*self.stacked.values(), *self.shared.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def rows(self, groups: slice, member: int | None = None) -> slice:
        """Rows of the member axis that belong to some groups: all, or the ``member``-th of each."""
        size = self.group_size
        start, stop, _ = groups.indices(self.num_groups)
        if member is None:
            return slice(start * size, stop * size)
        return slice(start * size + member, stop * size, size)

    def groups(self, groups: slice, member: int | None = None) -> "Members":
        """View some groups: all of their members, or the ``member``-th of each."""
        rows = self.rows(groups, member)
        start, stop, _ = groups.indices(self.num_groups)
        return Members(
            {name: tensor[rows] for name, tensor in self.stacked.items()},
            {name: tensor[groups] for name, tensor in self.shared.items()},
            stop - start,
            self.log_weights[rows],
            self.labels[rows],
        )

    def between(self, start: int, stop: int) -> "Members":
        """View some members of one group."""
        if (start, stop) == (0, self.num_members):
            return self
        return Members(
            {name: tensor[start:stop] for name, tensor in self.stacked.items()},
            self.shared,
            log_weights=self.log_weights[start:stop],
            labels=self.labels[start:stop],
        )

    def member(self, index: int) -> Tensors:
        """View the weights of one member as a plain dictionary."""
        group = index // self.group_size
        shared = {name: tensor[group] for name, tensor in self.shared.items()}
        return shared | {name: tensor[index] for name, tensor in self.stacked.items()}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Members":
        """Apply a function to each tensor of weights."""
        return replace(
            self,
            stacked={name: function(tensor) for name, tensor in self.stacked.items()},
            shared={name: function(tensor) for name, tensor in self.shared.items()},
        )

    def clone(self) -> "Members":
        return replace(
            self,
            stacked={name: tensor.clone() for name, tensor in self.stacked.items()},
            shared={name: tensor.clone() for name, tensor in self.shared.items()},
            log_weights=self.log_weights.clone(),
            labels=self.labels.clone(),
        )

    def to(self, device: torch.device | str) -> "Members":
        if self.log_weights.device == torch.device(device):
            return self
        return replace(self.map(lambda t: t.to(device)), log_weights=self.log_weights.to(device))


def concatenate(parts: Sequence[Members]) -> Members:
    """Put groups side by side; members that share nothing may come in groups of any size."""
    first = parts[0]
    equal = all(part.group_size == first.group_size for part in parts)
    if first.shared and not equal:
        raise InputError("Members that share weights can only be joined in groups of equal size.")
    return Members(
        {name: join([part.stacked[name] for part in parts]) for name in first.stacked},
        {name: join([part.shared[name] for part in parts]) for name in first.shared},
        sum(part.num_groups for part in parts) if equal else 1,
        torch.cat([part.log_weights for part in parts]),
        torch.cat([part.labels for part in parts]),
    )


def stack(states: Sequence[Tensors]) -> Members:
    """Stack the weights of several networks, each slice keeping its memory format."""
    return Members({name: join([s[name][None] for s in states]) for name in states[0]})


def unstack(members: Members) -> list[Tensors]:
    """Give each member's weights as a dictionary of its own, copied."""
    return [
        {name: tensor.clone() for name, tensor in members.member(index).items()}
        for index in range(members.num_members)
    ]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first axis; slices that are ``channels_last`` stay so.

    ``torch.cat`` would give every slice the default layout, and a convolution in the loop backend
    would then convert its kernel on every call.
    """
    if parts[0].ndim == 5 and parts[0][0].is_contiguous(memory_format=torch.channels_last):
        return torch.cat([part.permute(0, 1, 3, 4, 2) for part in parts]).permute(0, 1, 4, 2, 3)
    return torch.cat(list(parts))


def copied_module(module: nn.Module) -> nn.Module:
    """Copy a module's structure; parameters and buffers are the module's own."""
    own = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in own})


class _Runner:
    """A copy of a module that one call at a time may use.

    While ``functional_call`` runs, the weights in the module's place are those of one caller, and dropout
    layers count their calls: two threads in one module would predict with each other's weights. The mode of
    the original's parts is followed from call to call; everything else of them begins every call as it was
    when the copy was made, so whoever wants a module to behave otherwise changes a ``copied_module``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = copied_module(module)
        self.ties: list[tuple[str, str]] = []  # (other name, first name) of tensors under several names
        first: dict[int, str] = {}
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name:
                    self.ties.append((name, first[id(tensor)]))
        pairs = zip(module.modules(), self.module.modules(), strict=True)
        self.pairs = [(ref(original), part) for original, part in pairs]
        self.attributes = [(vars(part), dict(vars(part))) for part in self.module.modules()]
        kept = (value for _, before in self.attributes for key, value in before.items() if key[0] != "_")
        self.containers = [(value, copy.copy(value)) for value in kept if type(value) in (dict, list, set)]

    def begin(self) -> None:
        """Forget what an earlier call has left in the module, and take the mode that its original is in now.

        What a module remembers of its weights (a product of two of them, say) is about another member.
        """
        for now, before in self.attributes:
            now.clear()
            now.update(before)
        for value, before in self.containers:
            value.clear()
            if isinstance(value, list):
                value.extend(before)
            else:
                value.update(before)
        for original, part in self.pairs:
            part.training = original().training  # type: ignore[union-attr]  # alive: the caller holds it


# Runners that nobody uses at the moment: as many are made as calls have ever run at once. The modules
# themselves are never run, so that they can be copied while others predict.
_IDLE: "WeakKeyDictionary[nn.Module, deque[_Runner]]" = WeakKeyDictionary()


@contextmanager
def _runner_of(module: nn.Module) -> Iterator[_Runner]:
    idle = _IDLE.setdefault(module, deque())
    try:
        runner = idle.pop()
    except IndexError:
        runner = _Runner(module)
    try:
        yield runner
    finally:
        idle.append(runner)


def call_module(module: nn.Module, weights: Tensors, inputs: Tree) -> Tree:
    """Call ``module`` with other weights: a tuple is passed as ``*args``, a dictionary as ``**kwargs``.

    Any number of threads may do so at once.
    """
    with _runner_of(module) as runner:
        runner.begin()
        for name, first in runner.ties:
            if first in weights:
                weights = weights | {name: weights[first]}
        if isinstance(inputs, dict):
            return functional_call(runner.module, weights, (), inputs, tie_weights=False)
        arguments = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        return functional_call(runner.module, weights, arguments, tie_weights=False)


def map_members(
    function: Callable[[Tensors, Tree, Tree], Any],
    members: Members,
    own: Tree = (),
    of_group: Tree = (),
    *,
    backend: Backend,
) -> Any:
    """Evaluate ``function(weights, own, of_group)`` for every member; results lead with [M].

    own: a tree of tensors [M, ...]; of_group: a tree of tensors [G, ...], one slice a group. What is compiled
    is a recording of what vmap does: here both are the same.
    """
    if backend == "loop":
        return _loop(function, members, own, of_group)
    if backend in ("vmap", "compiled"):
        return _vmap(function, members, own, of_group)
    raise unknown_name("backend", backend, BACKENDS)


def _loop(function: Callable, members: Members, own: Tree, of_group: Tree) -> Any:
    results = []
    for index in range(members.num_members):
        group = index // members.group_size
        results.append(
            function(
                members.member(index),
                map_tree(lambda t, i=index: t[i], own),
                map_tree(lambda t, g=group: t[g], of_group),
            )
        )
    return map_tree(lambda *parts: torch.stack(parts), *results)


def _vmap(function: Callable, members: Members, own: Tree, of_group: Tree) -> Any:
    size, groups = members.group_size, members.num_groups
    scattered = {name: t for name, t in members.stacked.items() if _is_scattered(t)}
    packed = {name: tensor.contiguous() for name, tensor in scattered.items()}
    # Tensors go through vmap as a flat list: its own flattening is far slower.
    of_member, of_chain = (members.stacked | packed, own), (members.shared, of_group)
    each, shared = list(leaves(of_member)), list(leaves(of_chain))

    def one_member(*tensors: Tensor) -> Any:
        stacked, own = filled(of_member, tensors)
        shared, of_group = filled(of_chain, tensors[len(each) :])
        return function(shared | stacked, own, of_group)

    try:
        if size == 1:
            results = vmap(one_member, randomness="error")(*each, *shared)
            for name, tensor in scattered.items():
                tensor.copy_(packed[name])
            return results
        # What a group shares is not mapped inside it: vmap folds such a layer into one large batch
        # and computes everything before the first stacked layer once.
        in_dims = (0,) * len(each) + (None,) * len(shared)
        one_group = vmap(one_member, in_dims=in_dims, randomness="error")
        if groups == 1:
            return one_group(*each, *(t[0] for t in shared))
        folded = [t.unflatten(0, (groups, size)) for t in each]
        outputs = vmap(one_group, randomness="error")(*folded, *shared)
        return map_tree(lambda t: t.flatten(0, 1), outputs)
    except PolymodeError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise CannotVectorise((str(error) or type(error).__name__).splitlines()[0]) from error


def _is_scattered(tensor: Tensor) -> bool:
    """Whether a buffer's rows lie apart, as those of the k-th member of every group do.

    BatchNorm under vmap reshapes running statistics to update them: of scattered rows that is a copy, and the
    update would be lost without a word.
    """
    rows = tensor.shape[0]
    return not tensor.requires_grad and rows > 1 and tensor.stride(0) != tensor.numel() // rows


def forward_members(
    module: nn.Module,
    members: Members,
    inputs: Tree,
    *,
    inputs_have_members: bool = False,
    backend: Backend = "vmap",
    first_example: int = 0,
) -> Tree:
    """Run every member on the inputs and return outputs [M, B, ...].

    inputs: a tree of tensors [B, ...], or [M, B, ...] with ``inputs_have_members``.
    first_example: position of the first input in its data set; noise per example depends on it, so
        that predictions do not depend on how the inputs are cut into chunks.
    The module decides the mode (``train()`` or ``eval()``); in training mode the members' buffers
    are updated in place, the module itself never is.
    """
    offset = {
        name: torch.full_like(buffer, first_example)
        for name, buffer in (module.named_buffers() if first_example else ())
        if name.endswith("first_example")
    }
    if inputs_have_members:
        sizes = {leaf.shape[0] for leaf in leaves(inputs)}
        if sizes != {members.num_members}:
            raise InputError(
                f"inputs_have_members=True, but the inputs lead with {sorted(sizes)} and there are "
                f"{members.num_members} members."
            )

    def forward(stacked: Tensors, shared: Tensors, inputs: Tree, offset: Tensors) -> Tree:
        now, own = replace(members, stacked=stacked, shared=shared), inputs if inputs_have_members else ()
        return map_members(
            lambda weights, own, _: call_module(
                module, weights | offset, own if inputs_have_members else inputs
            ),
            now,
            own,
            backend=backend,
        )

    arguments = (members.stacked, members.shared, inputs, offset)
    if backend != "compiled":
        return forward(*arguments)
    return compiled_pass(module, forward, arguments, (members.num_groups, inputs_have_members))


# Compiled passes of every module in evaluation mode, by the forms of what they take.
_PASSES: "WeakKeyDictionary[nn.Module, dict[Any, Recording | None]]" = WeakKeyDictionary()
MOST_PASSES = 32  # of a module; who asks for more forms of inputs has them run under vmap
_TOLD: "WeakSet[nn.Module]" = WeakSet()  # modules whose predictions cannot be compiled, as was said


def compiled_pass(
    module: nn.Module, forward: Callable[..., Tree], arguments: tuple[Tree, ...], key: tuple[Any, ...]
) -> Tree:
    """``forward(*arguments)``, which runs a module in evaluation mode; compiled from the second call on.

    key: tells such functions of the module apart. They run as they are in training mode, for gradients, in
    mixed precision, and where too many forms of arguments were compiled or this one cannot be.
    """
    as_it_is = torch.is_grad_enabled() or any(part.training for part in module.modules())
    if as_it_is or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return forward(*arguments)
    known, key = _PASSES.setdefault(module, {}), (*key, form_of(arguments))
    if key in known:
        recording = known[key]
        return forward(*arguments) if recording is None else recording.bind()(*arguments)
    result = forward(*arguments)  # arguments that are wrong say so here, and nothing is kept of them
    if len(known) < MOST_PASSES:
        known[key] = None
        try:
            known[key] = compiled(forward, arguments)
        except CannotCompile as error:
            if module not in _TOLD:
                _TOLD.add(module)
                warnings.warn(f"Predictions run under vmap, not compiled: {error.reason}", stacklevel=2)
    return result
