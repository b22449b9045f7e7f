"""Networks trained independently from different starts and orders (Lakshminarayanan et al. 2017)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from polymode.errors import require_whole
from polymode.methods.single import Single
from polymode.options import option
from polymode.posteriors import Posterior
from polymode.training.contract import Method, Phase, Problem, State, Wrapper


@dataclass(frozen=True)
class DeepEnsemble(Wrapper):
    """p(y | x) = (1/M) Σ_m p(y | x, θ_m), each θ_m from its own initialisation and data order."""

    name: ClassVar[str] = "deep_ensemble"
    summary: ClassVar[str] = "independent networks, averaged"
    cost: ClassVar[str] = (
        "num_members member-epochs an epoch (times those of `of`); predicts with as many passes"
    )
    best_epoch: ClassVar[str] = "that of `of`, of every member by itself"

    num_members: int = option(5, "M, trained side by side")
    of: Method = option(
        Single(), "how each one is trained: any method, and the ensemble is the mixture of its posteriors"
    )

    def __post_init__(self) -> None:
        require_whole("num_members", self.num_members)
        super().__post_init__()

    @property
    def total_chains(self) -> int:
        return self.num_members * self.of.total_chains

    @property
    def can_average(self) -> bool:
        return self.of.can_average

    def num_parameters(self, module: nn.Module) -> int:
        return self.num_members * self.of.num_parameters(module)

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        return self.of.phases(problem, epochs)

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return self.of.posterior(problem, state)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        each, epochs = self.of.for_budget(member_epochs / self.num_members)
        return type(self)(self.num_members, each), epochs
