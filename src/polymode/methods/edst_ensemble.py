"""Sparse networks one after another in one training, far apart by exchanges of most connections (EDST).

Liu, Chen, Atashgahi, Chen, Sokar, Mocanu, Pechenizkiy, Wang and Mocanu, "Deep Ensembling with No Overhead for
either Training or Testing: The All-Round Blessings of Dynamic Sparsity", ICLR 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from polymode.errors import require, require_whole
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.training.contract import (
    HIGH,
    KEEP,
    LOW,
    PHASE_EPOCHS,
    RATES,
    Keep,
    Phase,
    Problem,
    Rates,
    SparseDescent,
    State,
    check_rates,
    divide_epochs,
    keep_rule,
    phase_keep,
    phase_schedule,
)


@dataclass(frozen=True)
class EDSTEnsemble(SparseDescent):
    """An exploration at a high rate, then M phases at low ones, each of which ends in a member z_m ∘ θ_m.

    Between two of these phases a share q of the active weights of every layer is exchanged at once; the
    exchanges of a share p every ΔT steps go on all the time.
    """

    name: ClassVar[str] = "edst_ensemble"
    summary: ClassVar[str] = "sparse networks from one training, each after an exchange of most connections"
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with num_members passes"
    best_epoch: ClassVar[str] = "of every phase its own, by the error in its second half, with the mask"
    kept: ClassVar[str] = "active weights and what has no mask, of each member"

    exploration_rate: float = option(
        0.8, "q, the share of a layer's active weights that are exchanged between the phases of two members"
    )
    phase_epochs: int | None = option(None, PHASE_EPOCHS)
    rates: Rates = option("stepwise", RATES)
    high: float = option(0.1, HIGH)
    low: float = option(0.01, LOW)
    keep: Keep = option(
        "last",
        f'{KEEP}, of every member. `"best"` is that of the lowest error in the second half of its phase',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.exploration_rate
        require(0 < rate < 1, f"exploration_rate must be above 0 and below 1, got {rate!r}.")
        if self.phase_epochs is not None:
            require_whole("phase_epochs", self.phase_epochs)
        check_rates(self.rates, self.high, self.low)
        keep_rule(self.keep)

    @property
    def chain_members(self) -> int:
        return self.num_members

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        first_epochs, each = divide_epochs(epochs, self.num_members, self.phase_epochs)

        def explore(state: State) -> None:
            state.common["exchange"].fill_(self.exploration_rate)  # after the first step of the phase

        def finish(state: State) -> None:
            state.finished.append(state.members)

        refine = replace(
            self.phase("refine", each, problem),
            carry=frozenset({"all"}),
            schedule=phase_schedule(self.rates, self.high, self.low, first=True),
            keep=phase_keep(self.keep, each),
            leave=finish,
        )
        schedule = phase_schedule(self.rates, self.high, self.low, first=False)
        again = replace(refine, schedule=schedule, enter=explore)
        return [self.phase("explore", first_epochs, problem), refine, *[again] * (self.num_members - 1)]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs))
