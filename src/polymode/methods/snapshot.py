"""Networks at the ends of cycles of one training.

Huang et al., "Snapshot Ensembles: Train 1, get M for free", 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from polymode.errors import InputError, require_whole
from polymode.options import option
from polymode.schedules import Cosine
from polymode.training.contract import (
    OPTIMIZER,
    PRIOR_STD_OR_FLAT,
    MembersInTurn,
    Optimizer,
    Over,
    Phase,
    Problem,
    check_optimizer,
    equal_parts,
)
from polymode.weights.priors import PriorStd, check_prior_std


@dataclass(frozen=True)
class Snapshot(MembersInTurn):
    """The rate falls as ½ (1 + cos πt) in each of M cycles and begins anew; each cycle's end is a member."""

    name: ClassVar[str] = "snapshot"
    summary: ClassVar[str] = "one training in cycles of the learning rate, a network at the end of each"
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with num_members passes"
    best_epoch: ClassVar[str] = "none: every cycle ends with a member, where its rate is lowest"

    num_members: int = option(5, "M, cycles that end in a member")
    prior_std: PriorStd | None = option(None, PRIOR_STD_OR_FLAT)
    optimizer: Optimizer = option(
        Optimizer("SGD", lr=0.1, momentum=0.9), f"{OPTIMIZER}; its moments go on from cycle to cycle"
    )

    def __post_init__(self) -> None:
        require_whole("num_members", self.num_members)
        check_optimizer(self.optimizer)
        if self.prior_std is not None:
            check_prior_std(self.prior_std)

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        if epochs < self.num_members:
            raise InputError(
                f"{epochs} epochs are too few for {self.num_members} cycles of at least one: raise epochs "
                "(or the budget), or ask for fewer members."
            )
        prior = problem.prior(self.prior_std)
        return [
            Phase(
                f"member {number + 1}",
                length,
                problem.objective(prior),
                optimizers={"all": Over(self.optimizer)},
                carry=frozenset({"all"} if number else ()),
                schedule=Cosine(),
                restarts=True,
                leave=lambda state: state.finished.append(state.members),
            )
            for number, length in enumerate(equal_parts(epochs, self.num_members))
        ]

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(self.num_members, round(member_epochs))
