"""Sequential Bayesian subnetworks: sparse networks found in one training, one after another.

Jantre et al., "Sequential Bayesian Neural Subnetwork Ensembles", 2022.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.methods.sequential_bnn import OF, SequentialBNN
from polymode.methods.spike_slab import SpikeSlab
from polymode.networks.members import DRAW
from polymode.options import option
from polymode.training.contract import Problem, State
from polymode.weights.gaussian import INCLUSION, MASK, RHO


@dataclass(frozen=True)
class SeBayS(SequentialBNN):
    """Algorithm 1: an exploration that leaves units out, then M phases that end in a sparse network each.

    freeze: z is fixed after the exploration; otherwise every phase goes on learning which units to leave out.
    """

    name: ClassVar[str] = "sebays"
    summary: ClassVar[str] = "sequential Bayesian subnetworks: sparse members of one training"
    kept: ClassVar[str] = "a mean and a spread of every weight and a number for each unit, for each member"

    of: SpikeSlab = option(SpikeSlab(), OF)
    freeze: bool = option(
        True, "units that the exploration has left out stay so; False lets every member find its own"
    )

    def check_of(self) -> None:
        if not isinstance(self.of, SpikeSlab):
            raise InputError(
                f"of must be a SpikeSlab(...), got {self.of!r}. For dense networks: sequential_bnn."
            )

    @property
    def is_frozen(self) -> bool:
        return self.freeze

    def extra_tensors(self, problem: Problem) -> dict[str, Tensor]:
        if not self.freeze:
            return {}
        units = sum(self.weights_over(problem).counts)
        like = torch.empty((), dtype=problem.network.dtype, device=problem.execution.device)
        return {MASK: like.new_ones(1, units)}

    @torch.no_grad()
    def freeze_units(self, problem: Problem, state: State) -> None:
        if self.freeze:  # those of the last draw, which validation saw, too
            stacked, weights = state.members.stacked, self.weights_over(problem)
            noise = weights.noise(stacked[DRAW], stacked[RHO])
            stacked[MASK].copy_(weights.included({INCLUSION: stacked[INCLUSION]}, noise))
