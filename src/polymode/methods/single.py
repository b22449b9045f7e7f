"""One network at the maximum of its posterior: the baseline of everything else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from polymode.posteriors import Particles, Posterior
from polymode.priors import PriorStd, check_prior_std, gaussian_prior
from polymode.schedules import Constant, Schedule
from polymode.training import Method, Optimizer, Over, Phase, Problem, State, check_options, keep_rule
from polymode.training.method import Keep


@dataclass(frozen=True)
class Single(Method):
    """Maximum a posteriori: minimise −Σ_n log p(y_n | x_n, θ) + Σ_j θ_j²/(2 s²).

    prior_std: s, one number, numbers by pattern of the weights' names, or ``priors.FanIn``; None means a
    flat prior (maximum likelihood). Weight decay of the optimiser is the
    other usual way to regularise. optimizer: any of ``torch.optim``. schedule: a function of
    ``Progress`` that multiplies the learning rate. keep: "last", "best" (by validation) or a ``KeepBest``.
    """

    name: ClassVar[str] = "single"
    summary: ClassVar[str] = "one network (MAP), the baseline"
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with one forward pass"

    prior_std: PriorStd | None = None
    optimizer: Optimizer = Optimizer("Adam", lr=1e-3)
    schedule: Schedule = Constant()
    keep: Keep = "last"

    def __post_init__(self) -> None:
        check_options(self.optimizer, self.schedule, self.keep)
        if self.prior_std is not None:
            check_prior_std(self.prior_std)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        return State(problem.initial_members(generator))

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        prior = None
        if self.prior_std is not None:
            prior = gaussian_prior(problem.prior_stds(self.prior_std))
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

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=[state.members.clone()])

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs))
