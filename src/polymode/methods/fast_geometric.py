"""Networks on a path of low loss from one solution.

Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", 2018.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from polymode.errors import InputError, require, require_whole
from polymode.options import option
from polymode.schedules import Pieces, Schedule, Triangle
from polymode.training.contract import (
    OPTIMIZER,
    PRIOR_STD_OR_FLAT,
    SCHEDULE,
    MembersInTurn,
    Optimizer,
    Over,
    Phase,
    Problem,
    check_optimizer,
    check_schedule,
)
from polymode.weights.priors import PriorStd, check_prior_std

# The first four fifths of the published training: a constant rate for a half of it, then a straight line.
PUBLISHED = Pieces(((0, 1.0), (0.625, 1.0), (1, 0.26)))


@dataclass(frozen=True)
class FastGeometric(MembersInTurn):
    """A training, then short cycles in which the rate rises and falls linearly; each low is a member."""

    name: ClassVar[str] = "fast_geometric"
    summary: ClassVar[str] = "one training, then short cycles of the rate that end in a network each"
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with num_members passes"
    best_epoch: ClassVar[str] = "none: every cycle ends with a member, where its rate is lowest"

    num_members: int = option(5, "networks, each at the lowest rate of a cycle")
    cycle_epochs: int = option(
        2,
        "from one member to the next, an even number (2 for VGG and 4 for ResNets in the paper); the first "
        "half cycle leads to the first member",
    )
    high: float = option(0.5, "the highest rate of a cycle, as a share of that of the first training")
    low: float = option(0.005, "the lowest one")
    prior_std: PriorStd | None = option(None, PRIOR_STD_OR_FLAT)
    optimizer: Optimizer = option(Optimizer("SGD", lr=0.1, momentum=0.9), OPTIMIZER)
    schedule: Schedule = option(
        PUBLISHED, f"of the first training, which takes what cycles leave: {SCHEDULE}"
    )

    def __post_init__(self) -> None:
        require_whole("num_members", self.num_members)
        require_whole("cycle_epochs", self.cycle_epochs, least=2)
        require(self.cycle_epochs % 2 == 0, f"cycle_epochs must be even, got {self.cycle_epochs}.")
        if not 0 < self.low <= self.high:
            raise InputError(
                f"The rates of a cycle need 0 < low <= high, got {self.low!r} and {self.high!r}."
            )
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        if self.prior_std is not None:
            check_prior_std(self.prior_std)

    @property
    def _epochs_of_cycles(self) -> int:
        return self.cycle_epochs // 2 + (self.num_members - 1) * self.cycle_epochs

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        first = epochs - self._epochs_of_cycles
        if first < 1:
            raise InputError(
                f"{epochs} epochs are too few: {self.num_members} members in cycles of {self.cycle_epochs} "
                f"take {self._epochs_of_cycles} after a first training. Raise epochs (or the budget), or "
                "ask for fewer members or shorter cycles."
            )
        prior = problem.prior(self.prior_std)

        def phase(name: str, length: int, schedule: Schedule, *, ends_in_member: bool = True) -> Phase:
            return Phase(
                name,
                length,
                problem.objective(prior),
                optimizers={"all": Over(self.optimizer)},
                carry=frozenset({"all"} if ends_in_member else ()),
                schedule=schedule,
                leave=lambda state: state.finished.append(state.members) if ends_in_member else None,
            )

        down = Pieces(((0, self.high), (1, self.low)))
        up_and_down = Triangle(self.low, self.high)
        return [
            phase("train", first, self.schedule, ends_in_member=False),
            phase("member 1", self.cycle_epochs // 2, down),
            *(
                phase(f"member {number}", self.cycle_epochs, up_and_down)
                for number in range(2, self.num_members + 1)
            ),
        ]

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1 + self._epochs_of_cycles, round(member_epochs))
