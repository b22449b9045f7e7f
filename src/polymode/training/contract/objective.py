"""The objective of one member, and its losses and gradients for all of them at once."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from polymode.errors import NonFiniteLoss
from polymode.networks.members import Backend, Members, Tensors, call_module, map_members
from polymode.networks.recording import Recording, record
from polymode.networks.surgery import seed_buffers
from polymode.posteriors.network import Network
from polymode.seeds import global_seed
from polymode.training.contract.batch import Batch, Piece
from polymode.trees import Tree, leaves, map_tree
from polymode.weights.priors import Penalty

if TYPE_CHECKING:
    from polymode.training.contract.state import State

Precision = Literal["full", "bfloat16", "double"]  # double is a matter of the weights and the data

# Constants of the 64-bit linear congruential generator of Knuth (MMIX): the next noise seed.
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


def next_noise(noise: Tensor) -> Tensor:
    """The seeds that follow on seeds [M]."""
    return noise * _MULTIPLIER + _INCREMENT


@dataclass
class Execution:
    """How ``fit`` runs the members; set once at the start of a run.

    uses_global_random: the module draws from the global random state by itself (``F.dropout``);
    num_observations: [G], training observations of each chain's data set.
    """

    device: torch.device
    num_observations: Tensor
    backend: Backend = "loop"
    prediction_backend: Backend = "loop"  # in evaluation mode some modules take other kernels
    precision: Precision = "full"
    uses_global_random: bool = False


@dataclass(frozen=True)
class Gradients:
    """Gradients of all rows: stacked [M, ...], shared [G, ...]; rows of idle members are undefined."""

    stacked: Tensors
    shared: Tensors


@dataclass(frozen=True)
class Objective:
    """L_m = −(1/n) Σ_batch log p(y | x, θ_m) + penalty(θ_m)/N, each member on its own.

    penalty: minus the log prior (or the KL term) of one member, given its trained tensors and its
        part of ``State.own``; divided by N, the number of training observations, never by the batch.
    realise: makes the module's weights from what is trained and ``State.own``; the identity by default.
    noise: stacked entries that ``realise`` draws from; each gets its member's new seed at every gradient.
    """

    network: Network
    trainable: frozenset[str]
    execution: Execution
    penalty: Penalty | None = None
    realise: Callable[[Tensors, Tree], Tensors] | None = None
    noise: tuple[str, ...] = ()
    _seeds: tuple[str, ...] = field(init=False)
    _recordings: dict[Any, Recording | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seeds", (*self.noise, *seed_buffers(self.network.module)))

    def loss(self, weights: Tensors, own: Tree, of_group: Tree) -> Tensor:
        """The loss of one member on one batch."""
        examples = of_group["examples"]
        with self._autocast():
            outputs = call_module(self.network.module, self.realised(weights, own), examples["inputs"])
        loss = self.network.likelihood.mean_loss(
            map_tree(Tensor.float, outputs) if self.execution.precision == "bfloat16" else outputs,
            examples["targets"],
            examples.get("weights"),
        )
        if self.penalty is not None:
            loss = loss + self.penalty(weights, own) / of_group["num_observations"]
        return loss

    @property
    def reads_own(self) -> bool:
        """Whether the loss depends on ``State.own``; vmap is spared tensors that nobody reads."""
        return self.penalty is not None or self.realise is not None

    def realised(self, weights: Tensors, own: Tree) -> Tensors:
        return weights if self.realise is None else self.realise(weights, own)

    def _autocast(self) -> AbstractContextManager:
        if self.execution.precision == "bfloat16":
            return torch.autocast(self.execution.device.type, torch.bfloat16)
        return nullcontext()

    def losses_and_gradients(
        self, state: "State", batch: Batch, member: int | None = None, *, check: bool = True
    ) -> tuple[Tensor, Gradients]:
        """Losses [M] (NaN for idle members) and gradients of the members on their chain's batch.

        member: only the member-th of each chain; None means all of them. check: raise where a loss is not
        finite.
        """
        members = state.members
        whole = slice(0, members.num_groups)
        complete = member is None and len(batch.pieces) == 1 and batch.pieces[0].groups == whole
        losses: Tensor | None = None
        gathered: Gradients | None = None
        for piece in batch.pieces:
            part = members if complete else members.groups(piece.groups, member)
            rows = members.rows(piece.groups, member)
            self._advance_noise(state, rows)
            own = {name: tensor[rows] for name, tensor in state.own.items()} if self.reads_own else {}
            part_losses, part_gradients = self._evaluate(part, own, piece, state.noise[rows])
            if check:
                _check_finite(part_losses, part)
            state.gradient_examples[piece.groups].add_(piece.batch_size * part.group_size)
            if complete:
                return part_losses, part_gradients
            if losses is None or gathered is None:
                losses = part_losses.new_full((members.num_members,), torch.nan)
                gathered = Gradients(self._unfilled(members), {})
            losses[rows] = part_losses
            for name, tensor in part_gradients.stacked.items():
                gathered.stacked[name][rows] = tensor
            if piece.groups == whole:  # of one member of every chain: nothing to put together
                return losses, Gradients(gathered.stacked, part_gradients.shared)
            for name, tensor in part_gradients.shared.items():
                if name not in gathered.shared:
                    gathered.shared[name] = torch.zeros_like(members.shared[name])
                gathered.shared[name][piece.groups] = tensor
        assert losses is not None
        assert gathered is not None
        return losses, gathered

    @torch.no_grad()
    def losses(self, state: "State", batch: Batch, *, training: bool) -> Tensor:
        """Losses [M] of the members on their chain's batch, without gradients; NaN for idle ones.

        training: as in a step, so that running statistics move; otherwise as in prediction, and nothing does.
        """
        execution, members = self.execution, state.members
        # Prediction has no mixed precision, and neither has what is to be compared with it.
        loss = (self if training else replace(self, execution=replace(execution, precision="full"))).loss
        seen: list[tuple[slice, Tensor]] = []
        if training:
            self.network.train()
        else:
            self.network.module.eval()
        for piece in batch.pieces:
            rows = members.rows(piece.groups)
            if training:
                self._advance_noise(state, rows)
            own = {name: tensor[rows] for name, tensor in state.own.items()} if self.reads_own else {}
            examples = {"inputs": piece.inputs, "targets": piece.targets}
            if piece.weights is not None:
                examples["weights"] = piece.weights
            of_group = {"num_observations": execution.num_observations[piece.groups]}
            same = {} if piece.has_groups else {"examples": examples}
            with self._randomness(state.noise[rows][0]):
                found = map_members(
                    lambda weights, own, of_group, same=same: loss(weights, own, of_group | same),
                    members.groups(piece.groups),
                    own,
                    of_group | ({"examples": examples} if piece.has_groups else {}),
                    backend=execution.backend if training else execution.prediction_backend,
                )
            seen.append((rows, found))
        self.network.train()
        losses = seen[0][1].new_full((members.num_members,), torch.nan)
        for rows, found in seen:
            losses[rows] = found
        return losses

    def observations(self, batches: Sequence[Batch], state: "State") -> Tensor:
        """Observations of each member in each of some batches, [len(batches), M]; 0 where it is idle."""
        members, count = state.members, self.network.likelihood.num_observations
        found = torch.zeros(len(batches), members.num_members, dtype=torch.float64)
        for row, batch in zip(found, batches, strict=True):
            for piece in batch.pieces:
                each = (
                    [int(count(t)) for t in piece.targets] if piece.has_groups else int(count(piece.targets))
                )
                groups = row.unflatten(0, (members.num_groups, members.group_size))[piece.groups]
                groups.copy_(torch.as_tensor(each, dtype=torch.float64).reshape(-1, 1))
        return found.to(self.execution.device)

    def means(self, state: "State", batches: Sequence[Batch], observations: Tensor) -> tuple[Tensor, Tensors]:
        """Mean losses [M] and stacked gradients over the observations of several batches, unchecked.

        observations: what ``observations`` gives for the batches. For networks without noise and running
        statistics.
        """
        if len(batches) == 1:
            losses, gradients = self._without_side_effects(state, batches[0])
            return losses, gradients.stacked
        shares = observations / observations.sum(0)
        total = torch.zeros_like(observations[0])
        sums: Tensors = {}
        for batch, share in zip(batches, shares, strict=True):
            losses, gradients = self._without_side_effects(state, batch)
            total += torch.where(share > 0, share * losses, 0.0)
            for name, gradient in gradients.stacked.items():
                rows = share.to(gradient.dtype).reshape(-1, *[1] * (gradient.ndim - 1))
                weighted = torch.where(rows > 0, rows * gradient, 0.0)
                sums[name] = sums[name] + weighted if name in sums else weighted
        return total, sums

    def _without_side_effects(self, state: "State", batch: Batch) -> tuple[Tensor, Gradients]:
        """As ``losses_and_gradients``, unchecked; of a network without noise and running statistics.

        What vmap and autograd do for it is recorded at the first call and replayed from then on: over the
        thousands of passes of a sampler their bookkeeping costs as much as the arithmetic of a small network.
        """
        members, [piece, *others] = state.members, batch.pieces
        everything = piece.groups == slice(0, members.num_groups) and not others and not members.shared
        if self.execution.backend != "vmap" or not everything or self.reads_own or self._seeds:
            return self.losses_and_gradients(state, batch, check=False)
        examples = {"inputs": piece.inputs, "targets": piece.targets}
        if piece.weights is not None:
            examples["weights"] = piece.weights
        counts = self.execution.num_observations

        def evaluate(stacked: Tensors, examples: Tree) -> tuple[Tensor, Tensors]:
            now = replace(members, stacked=stacked)
            losses, gradients = self._vectorised(now, {}, examples, counts, has_groups=piece.has_groups)
            return losses, gradients.stacked

        arguments = (members.stacked, examples)
        key = (piece.has_groups, *((t.shape, t.dtype, t.device) for t in leaves(arguments)))
        if key not in self._recordings:
            self._recordings[key] = record(evaluate, arguments)
        recording = self._recordings[key]
        if recording is None:
            return self.losses_and_gradients(state, batch, check=False)
        state.gradient_examples.add_(piece.batch_size * members.group_size)
        losses, gradients = recording(arguments)
        return losses, Gradients(gradients, {})

    def _unfilled(self, members: Members) -> Tensors:
        return {n: torch.empty_like(t) for n, t in members.stacked.items() if n in self.trainable}

    def _empty(self, members: Members) -> Gradients:
        shared = {n: torch.zeros_like(t) for n, t in members.shared.items() if n in self.trainable}
        return Gradients(self._unfilled(members), shared)

    def _advance_noise(self, state: "State", rows: slice) -> None:
        """New noise for the members that are evaluated; that of the others stays."""
        if self._seeds or self.execution.uses_global_random:
            noise = state.noise[rows]
            noise.copy_(next_noise(noise))
            for name in self._seeds:
                state.members.stacked[name][rows].copy_(noise)

    def _evaluate(
        self, members: Members, own: Tensors, piece: Piece, noise: Tensor
    ) -> tuple[Tensor, Gradients]:
        examples = {"inputs": piece.inputs, "targets": piece.targets}
        if piece.weights is not None:
            examples["weights"] = piece.weights
        counts = self.execution.num_observations[piece.groups]
        if self.execution.backend == "vmap":
            return self._vectorised(members, own, examples, counts, has_groups=piece.has_groups)
        return self._one_by_one(members, own, examples, counts, noise, has_groups=piece.has_groups)

    def _vectorised(
        self, members: Members, own: Tensors, examples: Tree, counts: Tensor, *, has_groups: bool
    ) -> tuple[Tensor, Gradients]:
        stacked = {n: _leaf(t) for n, t in members.stacked.items() if n in self.trainable}
        shared = {n: _leaf(t) for n, t in members.shared.items() if n in self.trainable}
        leaves = replace(members, stacked=members.stacked | stacked, shared=members.shared | shared)
        of_group = {"examples": examples} if has_groups else {}
        same = {} if has_groups else {"examples": examples}
        if self.penalty is not None:
            of_group["num_observations"] = counts
        losses = map_members(
            lambda weights, own, of_group: self.loss(weights, own, of_group | same),
            leaves,
            own,
            of_group,
            backend="vmap",
        )
        tensors = [*stacked.values(), *shared.values()]
        gradients = _gradients(losses.sum(), tensors)
        first = len(stacked)
        return losses.detach(), Gradients(
            dict(zip(stacked, gradients[:first], strict=True)),
            dict(zip(shared, gradients[first:], strict=True)),
        )

    def _one_by_one(
        self,
        members: Members,
        own: Tensors,
        examples: Tree,
        counts: Tensor,
        noise: Tensor,
        *,
        has_groups: bool,
    ) -> tuple[Tensor, Gradients]:
        """Members one after another: each graph is freed before the next one is built."""
        result = self._empty(members) if members.num_members > 1 else Gradients({}, {})
        losses = []
        for index in range(members.num_members):
            group = index // members.group_size
            weights = members.member(index)
            names = [name for name in weights if name in self.trainable]
            leaves = {name: _leaf(weights[name]) for name in names}
            row = map_tree(lambda t, g=group: t[g], examples) if has_groups else examples
            of_group = {"examples": row, "num_observations": counts[group]}
            mine = {name: tensor[index] for name, tensor in own.items()}
            with self._randomness(noise[index]):
                loss = self.loss(weights | leaves, mine, of_group)
            gradients = _gradients(loss, list(leaves.values()))
            losses.append(loss.detach())
            for name, gradient in zip(names, gradients, strict=True):
                if members.num_members == 1:
                    kind = result.stacked if name in members.stacked else result.shared
                    kind[name] = gradient[None]
                elif name in members.stacked:
                    result.stacked[name][index] = gradient
                else:
                    result.shared[name][group] += gradient
        return torch.stack(losses), result

    def _randomness(self, seed: Tensor) -> AbstractContextManager[None]:
        if not self.execution.uses_global_random:
            return nullcontext()
        return global_seed(int(seed) & (2**62 - 1))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


def _check_finite(losses: Tensor, members: Members) -> None:
    # One number to read on the fast path: a finite sum has finite terms.
    if not math.isfinite(losses.sum().item()) and not bool(losses.isfinite().all()):
        row = int((~losses.isfinite()).nonzero()[0])
        data_set, chain, member = members.labels[row].tolist()
        raise NonFiniteLoss(
            f"the loss of member {member} (data set {data_set}, chain {chain}) is {losses[row].item()}"
        )
