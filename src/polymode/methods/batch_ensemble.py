"""BatchEnsemble: a late phase of rank-one factors from the beginning; all members see every minibatch.

Wen, Tran and Ba, "BatchEnsemble: an Alternative Approach to Efficient Ensemble and Lifelong Learning",
ICLR 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import nn

from polymode.errors import require
from polymode.methods.late_phase import LatePhase
from polymode.networks.selection import Where
from polymode.options import option
from polymode.posteriors import Posterior
from polymode.schedules import Constant, Schedule
from polymode.training.contract import (
    KEEP,
    OPTIMIZER,
    PRIOR_STD_OR_FLAT,
    SCHEDULE,
    Keep,
    Method,
    Optimizer,
    Phase,
    Problem,
    State,
    descend_together,
)
from polymode.weights.priors import PriorStd


@dataclass(frozen=True)
class BatchEnsemble(Method):
    """W_k = θ ∘ u_k v_kᵀ for K members from the beginning, u and v ~ N(1, spread²) (Wen et al. 2020).

    All members see each minibatch, and θ, u_k and v_k follow the gradient of the mean of their losses, as if
    the minibatch were tiled K times: of θ the mean of the members' gradients, of u_k and v_k a K-th of their
    own. What remains is an ensemble that shares all but its factors.
    """

    name: ClassVar[str] = "batch_ensemble"
    summary: ClassVar[str] = "K members of shared matrices, each with rank-one factors"
    cost: ClassVar[str] = "num_members member-epochs an epoch; two vectors a matrix and member; K passes"
    best_epoch: ClassVar[str] = "the chain's, by the mean over its members, which share weights"
    kept: ClassVar[str] = "shared weights once and K times the factors"

    num_members: int = option(4, "K, networks that share the matrices")
    spread: float = option(0.5, "standard deviation of the factors when they begin")
    matrices: Where | None = option(
        None, "patterns of the weights that get factors; None takes all but embeddings"
    )
    prior_std: PriorStd | None = option(None, f"{PRIOR_STD_OR_FLAT}. It is about the weights of each member")
    optimizer: Optimizer = option(Optimizer("Adam", lr=1e-3), f"of the shared weights: {OPTIMIZER}")
    late_optimizer: Optimizer | None = option(
        None, "of the factors, which carry no weight decay; None means the same"
    )
    schedule: Schedule = option(Constant(), SCHEDULE)
    keep: Keep = option("last", KEEP)

    def __post_init__(self) -> None:
        require(0 <= self.spread < math.inf, f"spread must be a number of at least 0, got {self.spread!r}.")
        object.__setattr__(self, "matrices", self._late_phase.matrices)  # checks everything else, too

    @property
    def _late_phase(self) -> LatePhase:
        """The same with T₀ = 0, whose members take minibatches in turns."""
        return LatePhase(
            self.num_members,
            start=0,
            weights="rank_one",
            head=False,
            matrices=self.matrices,
            noise=self.spread,
            prior_std=self.prior_std,
            optimizer=self.optimizer,
            late_optimizer=self.late_optimizer,
            schedule=self.schedule,
            keep=self.keep,
            keep_members=True,
        )

    @property
    def can_average(self) -> bool:
        return True

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        return self._late_phase.init(_of_any_length(problem), generator)

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        [phase] = self._late_phase.phases(_of_any_length(problem), epochs)
        optimizers = {name: replace(over, separate_members=False) for name, over in phase.optimizers.items()}
        return [
            replace(
                phase,
                name="train",
                step=descend_together,
                optimizers=optimizers,
                batches=1,
                cost=self.num_members,
            )
        ]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return self._late_phase.posterior(problem, state)

    @property
    def chain_members(self) -> int | None:
        return self.num_members

    def num_parameters(self, module: nn.Module) -> int:
        return self._late_phase.num_parameters(module)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs / self.num_members))


def _of_any_length(problem: Problem) -> Problem:
    """For members that all see every minibatch: any number of minibatches will do."""
    return replace(problem, num_minibatches=None)
