"""Methods that are made of another one."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polymode.errors import InputError
from polymode.networks.adaptations import Adaptation
from polymode.training.contract.method import Method
from polymode.training.contract.problem import Problem
from polymode.training.contract.state import State


class Wrapper(Method):
    """A method with an option ``of``: whatever it does not say itself is as that method has it."""

    if TYPE_CHECKING:
        of: Method  # declared by each with a default and a meaning of its own

    def __post_init__(self) -> None:
        if not isinstance(self.of, Method):
            given = self.of.__name__ if isinstance(self.of, type) else repr(self.of)
            raise InputError(f"of must be an instance of a method, such as Single(), got {given}.")

    @property
    def total_chains(self) -> int:
        return self.of.total_chains

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
    def needs_initial(self) -> bool:
        return self.of.needs_initial

    @property
    def undivided(self) -> str:
        return self.of.undivided

    @property
    def can_keep_best(self) -> bool:
        return self.of.can_keep_best

    def adaptations(self, module: nn.Module) -> Sequence[Adaptation]:
        return self.of.adaptations(module)

    def num_parameters(self, module: nn.Module) -> int:
        return self.of.num_parameters(module)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        return self.of.init(problem, generator)

    def remarks(self, epochs: int) -> Iterable[str]:
        return self.of.remarks(epochs)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        return self.of.findings(problem, state)
