"""Late-phase weights: late in training a few weights become K members, and collapse by averaging.

von Oswald, Kobayashi, Sacramento, Meulemans, Henning and Grewe, "Neural networks with late-phase weights",
ICLR 2021.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, get_args

import torch
from torch import Tensor, nn

from polymode.errors import InputError, NotCollapsible, require, require_whole, unknown_name
from polymode.networks.members import Members, Tensors
from polymode.networks.selection import Where, check_where
from polymode.options import option
from polymode.posteriors import LateMembers, Posterior
from polymode.schedules import Constant, Part, Schedule
from polymode.training.contract import (
    KEEP,
    LAYERS,
    OPTIMIZER,
    PRIOR_STD_OR_FLAT,
    SCHEDULE,
    Batch,
    Keep,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    Step,
    check_optimizer,
    check_schedule,
    epochs_before,
    keep_rule,
    keep_throughout,
)
from polymode.trees import Tree
from polymode.weights.late import Average, Bank, LateWeights, late_weights
from polymode.weights.priors import PriorStd, check_prior_std

MOST = 10  # members, unless told otherwise


@dataclass(frozen=True)
class LatePhase(Method):
    """w_k = h(θ, φ_k), k = 1…K: all minibatches train θ, every K-th one trains φ_k (Algorithm 1).

    For each k: φ_k ← U_φ(φ_k, ∇φ_k L(M_k, θ, φ_k)) at once; after K minibatches θ ← U_θ(θ, γ Σ_k ∇θ L).
    Before the late phase there is one φ, trained as part of θ. In the end the members are averaged into one
    network.
    """

    name: ClassVar[str] = "late_phase"
    summary: ClassVar[str] = "some weights become K members late in training, then one network again"
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with one forward pass (K with keep_members)"
    best_epoch: ClassVar[str] = (
        "of both phases: the late one begins at the best epoch of "
        "the early one and ends at its own, by the mean over members"
    )
    kept: ClassVar[str] = "one network, or shared weights once and K times the late ones with keep_members"

    num_members: int | None = option(
        None,
        "K, networks that share the base; None means 10, or one for each minibatch of an epoch (of the "
        "smallest data set) where there are fewer",
    )
    start: float = option(
        0.6,
        "T₀, epochs before the late phase: a whole number, or a fraction of all; 0 for a module that is "
        "trained already",
    )
    weights: Where | None = option(
        None,
        'what is late: `"batch_norm"` (scale, shift and running statistics), `"rank_one"` (factors of '
        f'matrices, W = θ ∘ u vᵀ), `"hypernetwork"` (embeddings of kernels), or layers {LAYERS}; several are '
        "taken together, `()` takes none. None takes what the network has: BatchNorm, else rank-one factors",
    )
    head: bool | None = option(None, "whether the last layer is late, too; None means that of a classifier")
    matrices: Where | None = option(
        None,
        'patterns of the weights that get rank-one factors, such as `"*weight_hh*"`: any matrix of a Linear, '
        "convolutional or recurrent layer; None takes all but embeddings and the head",
    )
    banks: Sequence[Bank] | None = option(
        None,
        "templates of a hypernetwork, each a `Bank(layers, inputs, templates)`; None makes one for each "
        "shape of kernel",
    )
    noise: float = option(0.0, "σ₀: φ_k = φ₀ + σ₀ · RMS(φ₀) · ε, for each tensor by itself")
    factor_spread: float = option(0.0, "rank-one factors begin uniform within 1 ± this (0.01 in the paper)")
    base_scale: float = option(
        1.0,
        "γ of the base gradient (in the paper 1 for CIFAR, 1/K for ImageNet); 0 leaves the base as it is",
    )
    prior_std: PriorStd | None = option(None, f"{PRIOR_STD_OR_FLAT}. It is about the weights of each member")
    optimizer: Optimizer = option(
        Optimizer("Adam", lr=1e-3),
        f"of the base weights, and of all weights before the late phase: {OPTIMIZER}",
    )
    late_optimizer: Optimizer | None = option(
        None, "of the late weights; None means the same. Factors and embeddings carry no weight decay"
    )
    carry_moments: bool = option(
        False,
        "members begin with the moments of the optimiser that trained φ₀; the paper's begin without. The "
        "base always keeps its own",
    )
    schedule: Schedule = option(
        Constant(), f"{SCHEDULE}. It spans the whole training, so that members enter at the present rate"
    )
    keep: Keep = option(
        "last",
        f"{KEEP}, in the late phase; it begins at the best epoch of the phase before it, unless `keep` names "
        "a window of epochs",
    )
    average: Average = option(
        "weights",
        'of what the collapse takes the mean: the realised `"weights"`, (1/K) Σₖ θ ∘ u_k v_kᵀ, or, as the '
        'paper, the `"factors"`, θ ∘ ū v̄ᵀ',
    )
    keep_members: bool = option(
        False, "leave the ensemble of K, which shares θ and predicts with K passes; do not collapse"
    )
    force: bool = option(False, "collapse without a look at whether the members lie in one basin")

    def __post_init__(self) -> None:
        if self.num_members is not None:
            require_whole("num_members", self.num_members)
        epochs_before("start", self.start, None)
        for name in ("weights", "matrices"):
            entries = getattr(self, name)
            if entries not in (None, (), []):
                object.__setattr__(self, name, check_where(entries))  # one way to say one thing
        for name in ("noise", "factor_spread", "base_scale"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be a number of at least 0, got {value!r}.")
        check_optimizer(self.optimizer)
        check_optimizer(self._late_optimizer, "late_optimizer")
        check_schedule(self.schedule)
        keep_rule(self.keep)
        for optimizer in (self.optimizer, self._late_optimizer):
            if optimizer.needs_closure:
                raise InputError(
                    f"{optimizer.kind} evaluates the loss by itself, for all weights at once, and here "
                    "members share some of them: use an optimiser such as SGD or Adam."
                )
        if self.carry_moments and self.start == 0:
            raise InputError("carry_moments=True needs a phase before the late one: start is 0.")
        if self.carry_moments and self.late_optimizer not in (None, self.optimizer):
            raise InputError(
                "carry_moments=True needs one optimiser for base and late weights, got optimizer="
                f"{self.optimizer} and late_optimizer={self.late_optimizer}. Leave one of them out."
            )
        if self.prior_std is not None:
            check_prior_std(self.prior_std)
        if self.average not in get_args(Average):
            raise unknown_name("average", self.average, get_args(Average))

    @property
    def can_average(self) -> bool:
        return True

    # --- the algorithm ------------------------------------------------------------------------

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        late = self._late(problem)
        if self.keep_members and not late.names:
            raise InputError("keep_members=True, but no weights are late: all members would be the same.")
        start = problem.initial_weights(generator)
        trained = late.begin(start, generator, self.factor_spread)
        base = late.base(problem.trainable)
        shared = {name: tensor[None].clone() for name, tensor in trained.items() if name in base}
        count = self._count(problem)
        stacked = {name: torch.stack([t] * count) for name, t in trained.items() if name not in base}
        common = {
            "begun": torch.zeros(1, dtype=torch.bool),  # whether there are members already
            # Losses of the average and of the members, and how many rounds they were seen in.
            "seen": torch.zeros(1, 3, dtype=torch.float64),
        }
        return State(Members(stacked, shared), common=common)

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        before, count = epochs_before("start", self.start, epochs), self._count(problem)  # T₀, K
        late, objective = self._late(problem), self._objective(problem, self._late(problem))
        early = Phase(
            "early",
            before,
            objective,
            _train_one,
            self._optimizers(problem, late, self.optimizer),
            schedule=Part(self.schedule, 0, epochs),
            keep=keep_throughout(self.keep),
            end_epoch=State.copy_first_members,  # for validation, which looks at all of them
        )
        optimizers = self._optimizers(problem, late, self._late_optimizer)
        carried = optimizers.keys() if self.carry_moments else {"base"} & optimizers.keys()
        later = Phase(
            "late",
            epochs - before,
            objective,
            self._round(count),
            optimizers,
            carry=frozenset(carried if before else ()),
            schedule=Part(self.schedule, before, epochs),
            batches=count,
            keep=keep_rule(self.keep),
            enter=lambda state: self._split(state, late),
        )
        looks = not self.keep_members and not self.force and count > 1
        ending = [self._look(problem, late, objective, count)] if looks else []
        return [*([early] if before else []), later, *ending]

    def _round(self, count: int) -> Step:
        """A round of Algorithm 1: K minibatches M_k, each of which trains φ_k; then θ takes a step."""

        def round_(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
            losses: list[Tensor] = []
            total: Tensors = {}
            for k, batch in enumerate(batches):
                loss, gradients = objective.losses_and_gradients(state, batch, member=k)  # L(M_k, θ, φ_k)
                _step_late(state, gradients.stacked, batch, k)  # φ_k ← U_φ(φ_k, ∇φ_k L)
                _add_to(total, gradients.shared)  # Δθ ← Δθ + ∇θ L
                losses.append(loss)
            if self.base_scale and len(batches) == count:  # a round that the end of the data cuts is dropped
                _step_base(state, total, self.base_scale, batches[-1])  # θ ← U_θ(θ, γ Δθ)
            return torch.stack(losses).nanmean(0)

        return round_

    def _split(self, state: State, late: LateWeights) -> None:
        """φ_k = φ₀ + σ₀ RMS(φ₀) ε, tensor by tensor; running statistics are copied."""
        state.copy_first_members()
        state.common["begun"].fill_(value=True)
        members = state.members
        for name in sorted(late.names) if self.noise else ():
            each = members.stacked[name].unflatten(0, (members.num_groups, -1))
            first = each[:, 0].clone()
            for group, generator in enumerate(state.generators):
                scale = self.noise * first[group].double().square().mean().sqrt()
                drawn = torch.randn(each[group].shape, generator=generator, dtype=torch.float64)
                each[group].add_((scale * drawn.to(scale.device)).to(each.dtype))
        if self.carry_moments:
            for name in {"late", "multipliers"} & state.optimizers.keys():
                state.optimizers[name].copy_moments_from(0)

    def _look(self, problem: Problem, late: LateWeights, objective: Objective, count: int) -> Phase:
        """Look, on one minibatch in K, whether the average explains the data as well as the members do."""
        plain = problem.objective()
        members_alone = replace(objective, penalty=None)

        def look(state: State, batches: Sequence[Batch], _: Objective) -> Tensor:
            averaged = replace(state, members=self._averaged(problem, late, state.members), own={})
            of_average = plain.losses(averaged, batches[0], training=False)
            of_members = members_alone.losses(state, batches[0], training=False)
            means = of_members.unflatten(0, (-1, count)).mean(1)
            # An average whose loss is no number is as bad as can be.
            seen = torch.stack([of_average.nan_to_num(math.inf), means, torch.ones_like(means)], 1)
            for piece in batches[0].pieces:
                state.common["seen"][piece.groups] += seen[piece.groups].double().cpu()
            return of_members

        return Phase("average", 1, objective, look, batches=count, cost=0.0)

    def _averaged(self, problem: Problem, late: LateWeights, members: Members) -> Members:
        """The average of every chain."""
        each = [
            late.average(problem.network.module, members.groups(slice(group, group + 1)), self.average)
            for group in range(members.num_groups)
        ]
        return Members({n: torch.stack([w[n] for w in each]) for n in each[0]}, num_groups=len(each))

    def posterior(self, problem: Problem, state: State) -> Posterior:
        members = state.members
        if not bool(state.common["begun"].all()):  # an error before the late phase: one network is trained
            members = members.between(0, 1)
        ensemble = LateMembers(
            problem.network,
            blocks=[members.clone()],
            late=self._late(problem),
            average=self.average,
            barrier=self._barrier(state),
        )
        if self.keep_members:
            return ensemble
        try:
            return ensemble.averaged(force=self.force or ensemble.barrier is None)
        except NotCollapsible as refusal:  # training is not thrown away
            warnings.warn(f"{refusal} The posterior holds the members.", stacklevel=2)
            # Together they weigh what their average would have among other chains.
            weights = torch.full_like(members.log_weights, -math.log(members.num_members))
            return replace(ensemble, blocks=[replace(members.clone(), log_weights=weights)])

    def _barrier(self, state: State) -> float | None:
        of_average, of_members, rounds = state.common["seen"][0].tolist()
        return (of_average - of_members) / rounds if rounds else None

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        barrier = self._barrier(state)
        return {} if barrier is None or not math.isfinite(barrier) else {"barrier": barrier}

    # --- parts --------------------------------------------------------------------------------

    @property
    def _late_optimizer(self) -> Optimizer:
        return self.optimizer if self.late_optimizer is None else self.late_optimizer

    def _late(self, problem: Problem) -> LateWeights:
        head = not problem.network.likelihood.squared_errors if self.head is None else self.head
        return self._of(problem.network.module, problem.trainable, head=head)

    def _of(self, module: nn.Module, trainable: frozenset[str], *, head: bool) -> LateWeights:
        return late_weights(
            module, trainable, self.weights, head=head, matrices=self.matrices, banks=self.banks
        )

    def _objective(self, problem: Problem, late: LateWeights) -> Objective:
        def realise(weights: Tensors, _: Tree) -> Tensors:
            return late.realise(weights)

        def penalty(weights: Tensors, own: Tree) -> Tensor:
            assert prior is not None
            return prior(late.realise(weights), own)

        prior = problem.prior(self.prior_std)
        return problem.objective(
            None if prior is None else penalty,
            None if late.is_plain else realise,
            late.base(problem.trainable) | late.names,
        )

    def _optimizers(self, problem: Problem, late: LateWeights, of_late: Optimizer) -> dict[str, Over]:
        every = {
            "base": Over(self.optimizer, late.base(problem.trainable)),
            "late": Over(of_late, late.names - late.multipliers, separate_members=True),
            "multipliers": Over(of_late.undecayed, late.multipliers, separate_members=True),
        }
        return {name: over for name, over in every.items() if over.names}

    def _count(self, problem: Problem) -> int:
        """K."""
        available = problem.num_minibatches
        if self.num_members is None:
            return MOST if available is None else min(MOST, available)
        if available is not None and self.num_members > available:
            raise InputError(
                f"num_members={self.num_members} is more than the {available} minibatches of an epoch: some "
                "members would never be trained. Take fewer members or a smaller batch_size."
            )
        return self.num_members

    @property
    def chain_members(self) -> int | None:
        return (self.num_members or MOST) if self.keep_members else 1

    def num_parameters(self, module: nn.Module) -> int:
        trained = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
        if not self.keep_members:
            return sum(trained.values())
        late = self._of(module, frozenset(trained), head=self.head is not False)
        start = {n: torch.empty(p.shape) for n, p in module.named_parameters() if n in trained}
        begun = late.begin(start, torch.Generator(), 0.0)
        own = sum(t.numel() for n, t in begun.items() if n in late.names)
        return sum(t.numel() for t in begun.values()) + ((self.num_members or MOST) - 1) * own

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs))


def _train_one(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
    """Before the late phase: one φ, trained as part of θ."""
    [batch] = batches
    losses, gradients = objective.losses_and_gradients(state, batch, member=0)
    _step_late(state, gradients.stacked, batch, 0)
    _step_base(state, gradients.shared, 1.0, batch)
    each = losses.unflatten(0, (state.members.num_groups, -1))
    return each[:, :1].expand_as(each).flatten()


def _step_late(state: State, gradients: Tensors, batch: Batch, member: int) -> None:
    for name in ("late", "multipliers"):
        if name in state.optimizers:
            state.optimizers[name].step(gradients, batch.cohorts, member=member)


def _step_base(state: State, total: Tensors, scale: float, batch: Batch) -> None:
    if "base" in state.optimizers:
        scaled = total if scale == 1 else {name: scale * gradient for name, gradient in total.items()}
        state.optimizers["base"].step(scaled, batch.cohorts)


def _add_to(total: Tensors, gradients: Tensors) -> None:
    for name, gradient in gradients.items():
        # Copied first: autograd gives one tensor for two weights that are added.
        total[name] = total[name].add_(gradient) if name in total else gradient.clone()
