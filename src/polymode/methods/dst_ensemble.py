"""Sparse networks, trained as such, whose connections move: independent ones (DST ensemble).

Liu, Chen, Atashgahi, Chen, Sokar, Mocanu, Pechenizkiy, Wang and Mocanu, "Deep Ensembling with No Overhead for
either Training or Testing: The All-Round Blessings of Dynamic Sparsity", ICLR 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.schedules import Pieces, Schedule
from polymode.training.contract import (
    KEEP,
    SCHEDULE,
    Keep,
    Phase,
    Problem,
    SparseDescent,
    State,
    check_schedule,
    keep_rule,
)


@dataclass(frozen=True)
class DSTEnsemble(SparseDescent):
    """p(y | x) = (1/M) Σ_m p(y | x, z_m ∘ θ_m): every network has its own start, data order and masks z_m.

    Every ΔT steps a layer's ⌈p · active⌉ smallest weights are removed, and as many weights of the largest
    |∂L/∂θ| are activated, from 0.
    """

    name: ClassVar[str] = "dst_ensemble"
    summary: ClassVar[str] = "independent sparse networks, whose connections move in training"
    cost: ClassVar[str] = "num_members member-epochs an epoch; predicts with as many passes"
    best_epoch: ClassVar[str] = "of every network its own, with its mask"
    kept: ClassVar[str] = "active weights and what has no mask, of each member"

    schedule: Schedule = option(
        Pieces(((0, 1.0), (0.6, 1.0), (0.6, 0.1), (0.8, 0.1), (0.8, 0.01), (1, 0.01))), SCHEDULE
    )
    keep: Keep = option("last", KEEP)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self.schedule)
        keep_rule(self.keep)

    @property
    def total_chains(self) -> int:
        return self.num_members

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        phase = self.phase("train", epochs, problem)
        return [replace(phase, schedule=self.schedule, keep=keep_rule(self.keep))]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=[state.members.clone()])

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs / self.num_members))
