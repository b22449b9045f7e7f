"""One network at the maximum of its posterior: the baseline of everything else."""

from dataclasses import dataclass
from typing import ClassVar

from polymode.posteriors import Particles, Posterior
from polymode.training.contract import Descent, Problem, State


@dataclass(frozen=True)
class Single(Descent):
    """Maximum a posteriori: minimise −Σ_n log p(y_n | x_n, θ) + Σ_j θ_j²/(2 s²)."""

    name: ClassVar[str] = "single"
    summary: ClassVar[str] = "one network (MAP), the baseline"
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with one forward pass"

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=[state.members.clone()])
