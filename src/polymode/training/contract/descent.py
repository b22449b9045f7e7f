"""Methods that train one network by plain gradient descent; what they leave behind differs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import nn

from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.schedules import Constant, Schedule
from polymode.training.contract.method import Method
from polymode.training.contract.optimizers import Optimizer
from polymode.training.contract.phase import Keep, Over, Phase, keep_rule
from polymode.training.contract.problem import Problem
from polymode.training.contract.shared_options import (
    KEEP,
    OPTIMIZER,
    PRIOR_STD_OR_FLAT,
    SCHEDULE,
    check_optimizer,
    check_schedule,
)
from polymode.training.contract.state import State
from polymode.weights.priors import PriorStd, check_prior_std


class MembersInTurn(Method):
    """One network in training, kept ``num_members`` times on its way: what it leaves behind are these."""

    if TYPE_CHECKING:
        num_members: int  # declared by each with a default and a meaning of its own

    @property
    def chain_members(self) -> int:
        return self.num_members

    def num_parameters(self, module: nn.Module) -> int:
        return self.num_members * super().num_parameters(module)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        return State(problem.initial_members(generator))

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)


@dataclass(frozen=True)
class Descent(Method):
    """Minimise −Σ_n log p(y_n | x_n, θ) + Σ_j θ_j²/(2 s²) over the weights of one network."""

    best_epoch: ClassVar[str] = "of every network its own, by its validation NLL"

    prior_std: PriorStd | None = option(None, PRIOR_STD_OR_FLAT)
    optimizer: Optimizer = option(Optimizer("Adam", lr=1e-3), OPTIMIZER)
    schedule: Schedule = option(Constant(), SCHEDULE)
    keep: Keep = option("last", KEEP)

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        keep_rule(self.keep)
        if self.prior_std is not None:
            check_prior_std(self.prior_std)

    @property
    def can_average(self) -> bool:
        return True

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        return State(problem.initial_members(generator))

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        prior = problem.prior(self.prior_std)
        return [
            Phase(
                "train",
                epochs,
                problem.objective(prior),
                optimizers={"all": Over(self.optimizer)},
                schedule=self.schedule,
                keep=keep_rule(self.keep),
            )
        ]

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs))
