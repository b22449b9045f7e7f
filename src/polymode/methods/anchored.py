"""Networks trained towards random anchors, whose optima spread like the posterior (Pearce et al. 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from polymode.errors import InputError, require, require_whole, unknown_name
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.samplers import draw_prior
from polymode.schedules import Cosine, Schedule
from polymode.training.contract import (
    KEEP,
    OPTIMIZER,
    PRIOR_STD,
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
    check_optimizer,
    check_schedule,
    descend,
    draw_data_seed,
    keep_rule,
    perturbed,
)
from polymode.weights.priors import PriorStd, anchored_prior, check_prior_std


@dataclass(frozen=True)
class Anchored(Method):
    """θ_m = argmin −Σ_n log p(y_n | x_n, θ) + Σ_j (θ_j − a_mj)²/(2 s²), with anchors a_m ~ N(0, s²)."""

    name: ClassVar[str] = "anchored"
    summary: ClassVar[str] = "networks pulled towards random anchors, roughly posterior samples"
    cost: ClassVar[str] = "num_members member-epochs an epoch; predicts with as many passes"
    best_epoch: ClassVar[str] = "of every member its own"

    num_members: int = option(5, "M, trained side by side")
    prior_std: PriorStd = option(0.3, PRIOR_STD)
    begin_at: Literal["network", "anchor"] = option(
        "network",
        'where a member begins: at the `"network"`\'s own initialisation (Delaunoy and Louppe 2021) or at '
        'its `"anchor"` (Pearce et al. 2020)',
    )
    perturb_data: bool = option(
        False,
        "randomise the data of each member, too: targets of a Gaussian likelihood with known noise are drawn "
        "again with that noise, examples of any other likelihood get weights w ~ Exp(1)",
    )
    optimizer: Optimizer = option(Optimizer("Adam", lr=1e-3), OPTIMIZER)
    schedule: Schedule = option(Cosine(final=0.05), SCHEDULE)
    keep: Keep = option("last", KEEP)

    def __post_init__(self) -> None:
        require_whole("num_members", self.num_members)
        check_prior_std(self.prior_std)
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        keep_rule(self.keep)
        if self.begin_at not in ("network", "anchor"):
            raise unknown_name("begin_at", self.begin_at, ("network", "anchor"))

    @property
    def total_chains(self) -> int:
        return self.num_members

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        require(
            not problem.initial or self.begin_at == "network",
            "begin_at='anchor' and initial= are two places to begin at: leave one of them out.",
        )
        members = problem.initial_members(generator)
        anchor = draw_prior(problem.prior_stds(self.prior_std), members.stacked, generator)
        if self.begin_at == "anchor":
            members.stacked.update({name: tensor.clone() for name, tensor in anchor.items()})
        return State(
            members,
            own={"anchor": anchor},
            common={"data_seed": draw_data_seed(generator)} if self.perturb_data else {},
        )

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        likelihood = problem.network.likelihood
        if self.perturb_data and not problem.replayable:
            raise InputError(
                "perturb_data=True gives every example randomness of its own: an IterableDataset does not "
                "tell them apart. Use ArrayData or a map-style data set."
            )

        def descend_on_own_data(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
            own = [perturbed(batch, state.common["data_seed"], likelihood) for batch in batches]
            return descend(state, own, objective)

        return [
            Phase(
                "train",
                epochs,
                problem.objective(anchored_prior(problem.prior_stds(self.prior_std))),
                step=descend_on_own_data if self.perturb_data else descend,
                optimizers={"all": Over(self.optimizer)},
                schedule=self.schedule,
                keep=keep_rule(self.keep),
            )
        ]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=[state.members.clone()])

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs / self.num_members))
