"""The objective of one member, and its losses and gradients for all of them at once."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polymode.data import Examples
from polymode.errors import NonFiniteLoss
from polymode.networks.members import Backend, Members, Tensors, call_module, map_members
from polymode.networks.recording import Recording, form_of
from polymode.networks.surgery import seed_buffers
from polymode.posteriors.network import Network
from polymode.seeds import global_seed
from polymode.training.contract.batch import Batch, Piece
from polymode.training.contract.execution import Execution
from polymode.training.contract.recordings import Recordings
from polymode.trees import Tree, map_tree
from polymode.weights.priors import Penalty

if TYPE_CHECKING:
    from polymode.training.contract.state import State

# Constants of the 64-bit linear congruential generator of Knuth (MMIX): the next noise seed.
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


def next_noise(noise: Tensor) -> Tensor:
    """The seeds that follow on seeds [M]."""
    return noise * _MULTIPLIER + _INCREMENT


# From stacked and shared weights, what members own beside them, divisors and examples to losses [M] and the
# gradients of the stacked and the shared weights.
Evaluate = Callable[[Tensors, Tensors, Tree, Tensor, Examples], tuple[Tensor, Tensors, Tensors]]


@dataclass(frozen=True)
class Gradients:
    """Gradients of all rows: stacked [M, ...], shared [G, ...]; rows of idle members are undefined."""

    stacked: Tensors
    shared: Tensors


NONE = Gradients({}, {})


@dataclass(frozen=True)
class _Part:
    """Members whose batches have one size, with all that their losses depend on.

    rows: theirs on the member axis. divisors: [G], N over the factor of the penalty. seeds: [M].
    """

    piece: Piece
    rows: slice
    members: Members
    own: Tree
    divisors: Tensor
    seeds: Tensor

    @property
    def num_examples(self) -> int:
        """That a group sees, counted once for each of its members; those of one pass are one."""
        return self.piece.num_passes * self.members.group_size


@dataclass(frozen=True)
class Objective:
    """L_m = −(1/n) Σ_batch log p(y | x, θ_m) + penalty(θ_m)/N, each member on its own.

    num_observations: N, training observations of each chain's data set, [G].
    penalty: minus the log prior (or the KL term) of one member, given its trained tensors and its
        part of ``State.own``; divided by N, never by the batch.
    realise: makes the module's weights from what is trained and ``State.own``; the identity by default.
    noise: stacked entries that ``realise`` draws from; each gets its member's new seed at every gradient.
    drawn: makes a tree [M, ...] of the members before they are mapped, such as random numbers of their seeds,
        which ``realise`` and ``penalty`` find in their own["drawn"].
    """

    network: Network
    trainable: frozenset[str]
    execution: Execution
    num_observations: Tensor
    penalty: Penalty | None = None
    realise: Callable[[Tensors, Tree], Tensors] | None = None
    noise: tuple[str, ...] = ()
    drawn: Callable[[Members], Tree] | None = None
    # What was recorded of it and of others of the same problem.
    recordings: Recordings = field(default_factory=Recordings, compare=False, repr=False)
    _seeds: tuple[str, ...] = field(init=False)
    # Replays of recordings with the tensors that they are about, as long as these are the same.
    _bound: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seeds", (*self.noise, *seed_buffers(self.network.module)))

    def loss(self, weights: Tensors, own: Tree, examples: Examples, divisor: Tensor) -> Tensor:
        """The loss of one member on one batch; everything else maps this over members."""
        mixed = self.execution.precision == "bfloat16"
        realised = weights if self.realise is None else self.realise(weights, own)
        with torch.autocast(self.execution.device.type, torch.bfloat16) if mixed else nullcontext():
            outputs = call_module(self.network.module, realised, examples.inputs)
        if mixed:
            outputs = map_tree(Tensor.float, outputs)
        loss = self.network.likelihood.mean_loss(outputs, examples.targets, examples.weights)
        return loss if self.penalty is None else loss + self.penalty(weights, own) / divisor

    def losses_and_gradients(
        self, state: "State", batch: Batch, member: int | None = None, *, check: bool = True
    ) -> tuple[Tensor, Gradients]:
        """Losses [M] (NaN for idle members) and gradients of the members on their chain's batch.

        member: only the member-th of each chain; None means all of them. check: raise where a loss is not
        finite.
        """
        ways = {"loop": self._one_by_one, "vmap": self._together, "compiled": self._compiled}
        evaluate = ways[self.execution.backend]
        losses, stacked, shared = None, {}, {}
        for part in self._parts(state, batch, member):
            found, gradients = self._of_all_ranks(part, *self._placed(part, evaluate))
            if check:
                _check_finite(found, part.members)
            state.gradient_examples[part.piece.groups] += part.num_examples
            if part.members is state.members:  # all of them at once: nothing to put together
                return found, gradients
            if losses is None:
                losses = found.new_full((state.members.num_members,), torch.nan)
            losses[part.rows] = found
            _put(gradients.stacked, stacked, state.members.stacked, part.rows)
            _put(gradients.shared, shared, state.members.shared, part.piece.groups)
        assert losses is not None
        return losses, Gradients(stacked, shared)

    @torch.no_grad()
    def losses(self, state: "State", batch: Batch, *, training: bool) -> Tensor:
        """Losses [M] of the members on their chain's batch, without gradients; NaN for idle ones.

        training: as in a step, so that running statistics move; otherwise as in prediction, and nothing does.
        """
        objective, backend = self, self.execution.backend
        if training:
            self.network.train()
        else:  # prediction has no mixed precision, and neither has what is to be compared with it
            objective = replace(self, execution=replace(self.execution, precision="full"))
            backend = self.execution.prediction_backend
            self.network.module.eval()
        losses = None
        for part in self._parts(state, batch, None, advance=training):
            with self._randomness(part.seeds[0]):
                mapped = self._placed(part, lambda p: (objective._mapped(p, p.members, backend), NONE))
                found, _ = self._of_all_ranks(part, *mapped)
            if losses is None:
                losses = found.new_full((state.members.num_members,), torch.nan)
            losses[part.rows] = found
        self.network.train()
        assert losses is not None
        return losses

    def _placed(
        self, part: _Part, evaluate: Callable[[_Part], tuple[Tensor, Gradients]]
    ) -> tuple[Tensor, Gradients]:
        """Evaluate a part; noise knows the places of its examples in the batch that ranks share."""
        if part.piece.whole is None:
            return evaluate(part)
        places = [b for name, b in self.network.module.named_buffers() if name.endswith("first_example")]
        for place in places:
            place.fill_(part.piece.whole[1])
        try:
            return evaluate(part)
        finally:
            for place in places:
                place.zero_()

    def _of_all_ranks(self, part: _Part, losses: Tensor, gradients: Gradients) -> tuple[Tensor, Gradients]:
        """Losses and gradients of the whole batch, from those of the shares: Σ_r n_r L_r / Σ_r n_r."""
        piece, ranks = part.piece, self.execution.ranks
        if piece.whole is None or ranks.size == 1:
            return losses, gradients
        observed, targets = self.network.likelihood.observed, piece.examples.targets
        each = [int(observed(t).sum()) for t in (targets if piece.has_groups else [targets])]
        seen = losses.new_tensor(each if piece.counts else [0] * len(each)).expand(part.members.num_groups)

        def weighted(tensor: Tensor, of_rows: Tensor) -> Tensor:
            of_rows = of_rows.to(tensor.dtype).reshape(-1, *[1] * (tensor.ndim - 1))
            return torch.where(of_rows > 0, of_rows * tensor, 0.0)

        rows = seen.repeat_interleave(part.members.group_size)
        stacked, shared = gradients.stacked, gradients.shared
        total, summed, *sums = ranks.add(
            [
                seen,
                weighted(losses, rows),
                *(weighted(gradient, rows) for gradient in stacked.values()),
                *(weighted(gradient, seen) for gradient in shared.values()),
            ]
        )
        of_rows, found = total.repeat_interleave(part.members.group_size), iter(sums)

        def mean(tensor: Tensor, of_rows: Tensor, own: Tensor) -> Tensor:
            of_rows = of_rows.to(tensor.dtype).reshape(-1, *[1] * (tensor.ndim - 1))
            # Where no rank has observed anything, each has the penalty alone, and the same.
            return torch.where(of_rows > 0, tensor / of_rows.clamp(min=1), own)

        return mean(summed, of_rows, losses), Gradients(
            {name: mean(next(found), of_rows, own) for name, own in stacked.items()},
            {name: mean(next(found), total, own) for name, own in shared.items()},
        )

    def _parts(
        self, state: "State", batch: Batch, member: int | None, *, advance: bool = True
    ) -> Iterator[_Part]:
        """What is evaluated at once; the noise of the members in it moves on."""
        members, reads_own = state.members, self.penalty is not None or self.realise is not None
        for piece in batch.pieces:
            rows = members.rows(piece.groups, member)
            complete = member is None and rows == slice(0, members.num_members)
            part = members if complete else members.groups(piece.groups, member)
            seeds = state.noise[rows]
            if advance and (self._seeds or self.network.draws_globally):
                seeds.copy_(next_noise(seeds))
                for name in self._seeds:
                    part.stacked[name].copy_(seeds)
            own = {}  # vmap is spared tensors that nobody reads
            if reads_own:
                own = state.own if complete else map_tree(lambda t, rows=rows: t[rows], state.own)
                own = self.own_of(part, own)
            divisors = self.num_observations[piece.groups]
            if state.penalty_factors is not None:
                divisors = divisors / state.penalty_factors[piece.groups].to(divisors.device)
                divisors = divisors.to(self.network.dtype)
            yield _Part(piece, rows, part, own, divisors, seeds)

    @torch.no_grad()
    def own_of(self, members: Members, own: Tree) -> Tree:
        """What ``realise`` and ``penalty`` are given beside the weights: own, and what is drawn for it."""
        return own if self.drawn is None else own | {"drawn": self.drawn(members)}

    def _mapped(self, part: _Part, members: Members, backend: Backend) -> Tensor:
        """The loss of every member of a part, [M]."""
        examples = part.piece.examples
        if part.piece.has_groups:
            return map_members(
                lambda weights, own, of_group: self.loss(weights, own, *of_group),
                members,
                part.own,
                (examples, part.divisors),
                backend=backend,
            )
        return map_members(
            lambda weights, own, divisor: self.loss(weights, own, examples, divisor),
            members,
            part.own,
            part.divisors,
            backend=backend,
        )

    def _together(self, part: _Part) -> tuple[Tensor, Gradients]:
        """All members in one graph: each gradient of the sum of losses is what it would be alone."""
        stacked, shared = (
            {n: t.detach().requires_grad_() for n, t in tensors.items() if n in self.trainable}
            for tensors in (part.members.stacked, part.members.shared)
        )
        members = replace(
            part.members,
            stacked=part.members.stacked | stacked,
            shared=part.members.shared | shared,
        )
        losses = self._mapped(part, members, "vmap")
        gradients = iter(_gradients(losses.sum(), [*stacked.values(), *shared.values()]))
        return losses.detach(), Gradients(
            {name: next(gradients) for name in stacked}, {name: next(gradients) for name in shared}
        )

    def _one_by_one(self, part: _Part) -> tuple[Tensor, Gradients]:
        """Members one after another: each graph is freed before the next one is built."""
        members, result, losses = part.members, Gradients({}, {}), []
        alone = members.num_members == 1
        for index in range(members.num_members):
            group = index // members.group_size
            weights = members.member(index)
            leaves = {n: t.detach().requires_grad_() for n, t in weights.items() if n in self.trainable}
            own = map_tree(lambda t, index=index: t[index], part.own)
            examples = part.piece.examples
            if part.piece.has_groups:
                examples = map_tree(lambda t, group=group: t[group], examples)
            with self._randomness(part.seeds[index]):
                loss = self.loss(weights | leaves, own, examples, part.divisors[group])
            losses.append(loss.detach())
            for name, gradient in zip(leaves, _gradients(loss, list(leaves.values())), strict=True):
                if name in members.stacked:
                    _add(gradient, result.stacked, members.stacked, name, index, alone=alone)
                else:
                    _add(gradient, result.shared, members.shared, name, group, alone=alone)
        return torch.stack(losses), result

    def _randomness(self, seed: Tensor) -> AbstractContextManager[None]:
        """For networks that draw from the global random state by themselves."""
        return global_seed(int(seed) & (2**62 - 1)) if self.network.draws_globally else nullcontext()

    # --- the whole data set in a gradient -------------------------------------------------------

    def observations(self, batches: Sequence[Batch], state: "State") -> Tensor:
        """Observations of each member in each of some batches, [len(batches), M]; 0 where it is idle."""
        members, count = state.members, self.network.likelihood.num_observations
        found = torch.zeros(len(batches), members.num_members, dtype=torch.float64)
        for row, batch in zip(found, batches, strict=True):
            for piece in batch.pieces:
                targets = piece.examples.targets
                each = [int(count(t)) for t in targets] if piece.has_groups else int(count(targets))
                groups = row.unflatten(0, (members.num_groups, members.group_size))[piece.groups]
                groups.copy_(torch.as_tensor(each, dtype=torch.float64).reshape(-1, 1))
        return found.to(self.execution.device)

    def means(self, state: "State", batches: Sequence[Batch], observations: Tensor) -> tuple[Tensor, Tensors]:
        """Mean losses [M] and stacked gradients over the observations of several batches, unchecked.

        observations: what ``observations`` gives for the batches. For networks without noise and running
        statistics.
        """
        if len(batches) == 1:
            return self._replayed(state, batches[0])
        shares = observations / observations.sum(0)
        total = torch.zeros_like(observations[0])
        sums: Tensors = {}
        for batch, share in zip(batches, shares, strict=True):
            losses, gradients = self._replayed(state, batch)
            total += torch.where(share > 0, share * losses, 0.0)
            for name, gradient in gradients.items():
                rows = share.to(gradient.dtype).reshape(-1, *[1] * (gradient.ndim - 1))
                weighted = torch.where(rows > 0, rows * gradient, 0.0)
                sums[name] = sums[name] + weighted if name in sums else weighted
        return total, sums

    def _replayed(self, state: "State", batch: Batch) -> tuple[Tensor, Tensors]:
        """``losses_and_gradients``, recorded at the first call and replayed from then on.

        Over the thousands of passes of a sampler the bookkeeping of vmap and autograd costs as much as the
        arithmetic of a small network. Between two passes a sampler moves weights in place: as long as members
        and batch are the same objects, what is replayed is about the same tensors.
        """
        members, piece = state.members, batch.pieces[0]
        bound = self._bound.get("latest")
        if bound is not None and bound[0] is members and bound[1] is piece:
            state.gradient_examples[piece.groups] += piece.num_passes * members.group_size
            return bound[2]()[:2]
        found = None if self.execution.backend == "loop" else self.evaluation(state, batch)
        if found is None:
            losses, gradients = self.losses_and_gradients(state, batch, check=False)
            return losses, gradients.stacked
        evaluate, arguments = found
        recording = self.recorded((), evaluate, arguments)
        replay = partial(evaluate, *arguments) if recording is None else recording.bind(*arguments)
        self._bound["latest"] = (members, piece, replay)
        state.gradient_examples[piece.groups] += piece.num_passes * members.group_size
        return replay()[:2]

    # --- recordings -----------------------------------------------------------------------------

    def evaluation(self, state: "State", batch: Batch) -> tuple[Evaluate, tuple[Tree, ...]] | None:
        """Losses and gradients of all members as a function of tensors, and these tensors, to be recorded.

        None where members see batches of different sizes, draw noise, or have a penalty.
        """
        whole = len(batch.pieces) == 1 and len(batch.groups) == state.members.num_groups
        if not whole or self._seeds or self.penalty is not None:
            return None
        [part] = self._parts(state, batch, None)
        return self._evaluation(part)

    def recorded(
        self, key: tuple[Any, ...], function: Callable[..., Any], arguments: tuple[Tree, ...]
    ) -> Recording | None:
        """What was recorded of a function of ``evaluation``, for tensors of the same forms.

        It is compiled, if the run is; None where it cannot be recorded or compiled. key: tells such functions
        apart.
        """
        done = (self.penalty, self.realise)
        return self.recordings.of(
            function,
            arguments,
            (*map(id, done), self.trainable, *key, form_of(arguments)),
            kept=done,
            compiling=self.execution.backend == "compiled",
        )

    def _compiled(self, part: _Part) -> tuple[Tensor, Gradients]:
        """All members in one compiled graph; under vmap, where there is none."""
        changing = (part.own, part.divisors, part.piece.examples)
        place = (str(part.rows), part.piece.has_groups, form_of(changing))
        members, replay = self._bound.get(place, (None, None))
        if members is not part.members:
            evaluate, arguments = self._evaluation(part)
            groups = (part.members.num_groups, part.piece.has_groups)
            recording = self.recorded(groups, evaluate, arguments)
            replay = None if recording is None else recording.bind(*arguments[:2])
            self._bound[place] = (part.members, replay)
        if replay is None:
            return self._together(part)
        losses, stacked, shared = replay(*changing)
        # What a CUDA graph gives lies where its next replay will write: losses are kept for longer.
        return losses.clone() if losses.is_cuda else losses, Gradients(stacked, shared)

    def _evaluation(self, part: _Part) -> tuple[Evaluate, tuple[Tree, ...]]:
        def evaluate(
            stacked: Tensors, shared: Tensors, own: Tree, divisors: Tensor, examples: Examples
        ) -> tuple[Tensor, Tensors, Tensors]:
            members = replace(part.members, stacked=stacked, shared=shared)
            piece = replace(part.piece, examples=examples)
            now = replace(part, piece=piece, members=members, own=own, divisors=divisors)
            losses, gradients = self._together(now)
            return losses, gradients.stacked, gradients.shared

        members = part.members
        return evaluate, (members.stacked, members.shared, part.own, part.divisors, part.piece.examples)


def _gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


def _add(gradient: Tensor, to: Tensors, like: Tensors, name: str, row: int, *, alone: bool) -> None:
    """Add the gradient of one member to the row of its own, or of its group; ``alone``: no other one comes.

    It may not become the sum itself otherwise: autograd gives one tensor for two weights that are added.
    """
    if alone:
        to[name] = gradient[None]
        return
    if name not in to:
        to[name] = torch.zeros_like(like[name])
    to[name][row] += gradient


def _put(gradients: Tensors, to: Tensors, like: Tensors, rows: slice) -> None:
    """Put the gradients of some rows in their places among those of all."""
    for name, gradient in gradients.items():
        if gradient.shape == like[name].shape:  # of all rows already
            to[name] = gradient
            continue
        if name not in to:
            to[name] = torch.zeros_like(like[name])
        to[name][rows] = gradient


def _check_finite(losses: Tensor, members: Members) -> None:
    # One number to read on the fast path: a finite sum has finite terms.
    if not math.isfinite(losses.sum().item()) and not bool(losses.isfinite().all()):
        row = int((~losses.isfinite()).nonzero()[0])
        data_set, chain, member = members.labels[row].tolist()
        raise NonFiniteLoss(
            f"the loss of member {member} (data set {data_set}, chain {chain}) is {losses[row].item()}"
        )
