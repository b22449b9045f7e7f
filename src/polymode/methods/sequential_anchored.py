"""Anchored networks one after another, each from the last one's solution.

Delaunoy and Louppe, "SAE: Sequential Anchored Ensembles", 2021.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from polymode.errors import InputError, require_whole
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.samplers import WALKS, GuidedWalk, Walk, draw_prior
from polymode.schedules import Constant, Cosine, Progress, Schedule
from polymode.training.contract import (
    KEEP,
    OPTIMIZER,
    PRIOR_STD,
    SCHEDULE,
    Keep,
    Method,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_optimizer,
    check_schedule,
    keep_rule,
)
from polymode.weights.priors import PriorStd, anchored_prior, check_prior_std

FIRST_EPOCHS = 100  # of the long trainings in Delaunoy and Louppe (2021)


def split_budget(
    member_epochs: float,
    first_epochs: int = FIRST_EPOCHS,
    short_epochs: int = 2,
    num_chains: int | None = None,
) -> tuple[int, int]:
    """Chains and short trainings in each, for a budget: the rule behind Tables 4 and 5.

    ⌊√(budget/first)⌋ chains, at least one, unless their number is given; what the first training of each
    leaves goes into short ones.

    >>> [split_budget(b) for b in (200, 500, 1000, 10_000)]
    [(1, 50), (2, 75), (3, 116), (10, 450)]
    >>> [split_budget(b, short_epochs=10) for b in (200, 500, 1000, 10_000)]
    [(1, 10), (2, 15), (3, 23), (10, 90)]
    """
    if member_epochs < first_epochs * (num_chains or 1):
        of_each = f" of each of {num_chains} chains" if num_chains and num_chains > 1 else " of a chain"
        raise InputError(
            f"A budget of {member_epochs:g} member-epochs is shorter than the first training{of_each}, "
            f"first_epochs={first_epochs}: raise the budget or lower first_epochs."
        )
    chains = num_chains or max(1, math.isqrt(int(member_epochs // first_epochs)))
    return chains, int((member_epochs / chains - first_epochs) // short_epochs)


@dataclass(frozen=True)
class SequentialAnchored(Method):
    """Algorithm 2: a long training at the first anchor, then short ones while the anchor walks the prior.

    θ_i = argmin −Σ_n log p(y_n | x_n, θ) + Σ_j (θ_j − a_ij)²/(2 s²), begun at θ_(i−1); every θ_i is a member.
    """

    name: ClassVar[str] = "sequential_anchored"
    summary: ClassVar[str] = "one long anchored training, then many short ones while the anchor walks"
    kept: ClassVar[str] = "for each training of a chain"
    cost: ClassVar[str] = "num_chains member-epochs an epoch; predicts with a pass for every training"
    best_epoch: ClassVar[str] = "of every training its own: of the long one, and of each short one"

    num_chains: int | None = option(
        None, "run side by side, each from its own start; None means one, or as many as suit a budget"
    )
    prior_std: PriorStd = option(0.3, PRIOR_STD)
    walk: Walk = option(
        GuidedWalk(),
        f"how the anchor moves through the prior: {', '.join(f'`{each.__name__}`' for each in WALKS)}",
    )
    first_epochs: int | None = option(
        None,
        "of the long training; None means 100, or half of a chain's epochs where they are fewer than 200. "
        "Epochs that do not fill a short training are added to it",
    )
    short_epochs: int = option(2, "of each short training")
    optimizer: Optimizer = option(Optimizer("Adam", lr=1e-3), f"of the long training: {OPTIMIZER}")
    schedule: Schedule = option(Cosine(final=0.05), f"of the long training, a {SCHEDULE}")
    short_optimizer: Optimizer | None = option(None, "of the short trainings; None means the same")
    short_schedule: Schedule | None = option(None, "of the short trainings; None means the same")
    restart: bool = option(
        True,
        "every training begins with a fresh optimiser and its schedule from the top; False carries the "
        "optimiser on, at the rate that the first schedule ended with",
    )
    keep: Keep = option("last", f"{KEEP}, for every training")

    def __post_init__(self) -> None:
        if self.num_chains is not None:
            require_whole("num_chains", self.num_chains)
        require_whole("short_epochs", self.short_epochs)
        if self.first_epochs is not None:
            require_whole("first_epochs", self.first_epochs)
        check_prior_std(self.prior_std)
        if not isinstance(self.walk, Walk):
            raise InputError(
                f"walk must be one of polymode.samplers, such as GuidedWalk(), got {self.walk!r}."
            )
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        check_optimizer(self._short_optimizer, "short_optimizer")
        check_schedule(self._short_schedule, "short_schedule")
        keep_rule(self.keep)
        if not self.restart and (self.short_optimizer is not None or self.short_schedule is not None):
            raise InputError(
                "restart=False goes on with the optimiser of the first training: leave short_optimizer and "
                "short_schedule out."
            )

    @property
    def total_chains(self) -> int:
        return self.num_chains or 1

    @property
    def chain_members(self) -> int | None:
        return None  # as many as the epochs suffice for

    @property
    def _short_optimizer(self) -> Optimizer:
        return self.optimizer if self.short_optimizer is None else self.short_optimizer

    @property
    def _short_schedule(self) -> Schedule:
        return self.schedule if self.short_schedule is None else self.short_schedule

    def lengths(self, epochs: int) -> tuple[int, int]:
        """Epochs of the first training, and the number of short ones, for a chain of so many epochs."""
        first = self.first_epochs or min(FIRST_EPOCHS, max(1, epochs // 2))
        if epochs < first:
            raise InputError(
                f"{epochs} epochs are fewer than the first training of a chain takes, first_epochs={first}: "
                "raise epochs or lower first_epochs."
            )
        num_short = (epochs - first) // self.short_epochs
        return epochs - num_short * self.short_epochs, num_short

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        members = problem.initial_members(generator)
        anchor = draw_prior(problem.prior_stds(self.prior_std), members.stacked, generator)
        return State(members, own={"anchor": anchor, "walk": self.walk.begin(anchor, generator)})

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        stds = problem.prior_stds(self.prior_std)
        first_epochs, num_short = self.lengths(epochs)

        def walk(state: State) -> None:
            for group, generator in enumerate(state.generators):
                own = state.chain(group).own
                self.walk.advance(own["anchor"], own["walk"], stds, generator)

        def finish(state: State) -> None:
            state.finished.append(state.members)

        first = Phase(
            "first",
            first_epochs,
            problem.objective(anchored_prior(stds)),
            optimizers={"all": Over(self.optimizer)},
            schedule=self.schedule,
            keep=keep_rule(self.keep),
            restarts=True,
            leave=finish,
        )
        short = replace(
            first,
            name="short",
            epochs=self.short_epochs,
            optimizers={"all": Over(self._short_optimizer)},
            schedule=self._short_schedule,
            enter=walk,
        )
        if not self.restart:
            ending = self.schedule(Progress(10**9 - 1, 10**9, first_epochs))
            short = replace(short, carry=frozenset({"all"}), schedule=Constant(ending))
        return [first, *[short] * num_short]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """How far the anchor has walked, against the steps that crossing the prior takes."""
        steps = max(0, len(state.finished) - 1)
        return {"walk_steps": steps, "traversal_steps": round(self.walk.traversal, 1)}

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        each = member_epochs / (self.num_chains or 1)
        first = self.first_epochs or min(FIRST_EPOCHS, max(1, int(each) // 2))
        chains, num_short = split_budget(member_epochs, first, self.short_epochs, self.num_chains)
        return replace(self, num_chains=chains, first_epochs=first), first + num_short * self.short_epochs

    def remarks(self, epochs: int) -> Iterator[str]:
        _, num_short = self.lengths(epochs)
        if 0 < num_short < self.walk.traversal / 2:
            yield (
                f"A chain's anchor walks {num_short} steps, but crossing the prior takes about "
                f"{self.walk.traversal:.0f}: members of a chain cover less than half of the prior's width "
                f"and are alike. Take longer steps (walk={self.walk}), more short trainings or more chains."
            )
