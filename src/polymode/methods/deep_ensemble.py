"""Networks trained independently from different starts and orders (Lakshminarayanan et al. 2017)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from polymode.errors import InputError
from polymode.methods.single import Single
from polymode.networks.adaptations import Adaptation
from polymode.options import option
from polymode.posteriors import Posterior
from polymode.training.contract import Method, Phase, Problem, State


@dataclass(frozen=True)
class DeepEnsemble(Method):
    """p(y | x) = (1/M) Σ_m p(y | x, θ_m), each θ_m from its own initialisation and data order."""

    name: ClassVar[str] = "deep_ensemble"
    summary: ClassVar[str] = "independent networks, averaged"
    cost: ClassVar[str] = (
        "num_members member-epochs an epoch (times those of `of`); predicts with as many passes"
    )

    num_members: int = option(5, "M, trained side by side")
    of: Method = option(
        Single(), "how each one is trained: any method, and the ensemble is the mixture of its posteriors"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.num_members, int) or self.num_members < 1:
            raise InputError(f"num_members must be a whole number of at least 1, got {self.num_members!r}.")
        if not isinstance(self.of, Method):
            given = self.of.__name__ if isinstance(self.of, type) else repr(self.of)
            raise InputError(f"of must be an instance of a method, such as Single(), got {given}.")

    @property
    def total_chains(self) -> int:
        return self.num_members * self.of.total_chains

    @property
    def chain_members(self) -> int | None:
        return self.of.chain_members

    @property
    def chain_passes(self) -> int | None:
        return self.of.chain_passes

    @property
    def num_initial(self) -> int:
        return self.of.num_initial

    @property
    def can_average(self) -> bool:
        return self.of.can_average

    def adaptations(self, module: nn.Module) -> Sequence[Adaptation]:
        return self.of.adaptations(module)

    def num_parameters(self, module: nn.Module) -> int:
        return self.num_members * self.of.num_parameters(module)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        return self.of.init(problem, generator)

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        return self.of.phases(problem, epochs)

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return self.of.posterior(problem, state)

    def remarks(self, epochs: int) -> Iterable[str]:
        return self.of.remarks(epochs)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        return self.of.findings(problem, state)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        each, epochs = self.of.for_budget(member_epochs / self.num_members)
        return type(self)(self.num_members, each), epochs
