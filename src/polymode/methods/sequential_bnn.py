"""Bayesian networks one after another, each from the last one's solution, perturbed.

Jantre et al., "Sequential Bayesian Neural Subnetwork Ensembles", 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError, require, require_whole
from polymode.methods.mean_field import PUBLISHED, MeanField
from polymode.networks.members import Members
from polymode.options import option
from polymode.posteriors import Posterior, Variational
from polymode.schedules import Constant, Progress, Schedule
from polymode.training.contract import (
    HIGH,
    LOW,
    PHASE_EPOCHS,
    RATES,
    Batch,
    Hook,
    Method,
    Objective,
    Over,
    Phase,
    Problem,
    Rates,
    State,
    check_rates,
    divide_epochs,
    phase_keep,
    phase_schedule,
)
from polymode.weights.gaussian import RHO, GaussianWeights

OF = (
    "how each network is trained. Its schedule is that of the exploration, and so is its annealing, whose "
    "last factor holds in the phases; its keep rule is that of the phases, where "
    '`keep="best"` takes the epoch of the lowest validation error in the second half'
)


@dataclass(frozen=True)
class SequentialBNN(Method):
    """Algorithm 1 with dense networks: an exploration at a large rate, then M phases that end in a member.

    Between two phases μ ← μ ± ρ σ, with a fair sign for every scalar, and σ is drawn anew near its beginning.
    """

    name: ClassVar[str] = "sequential_bnn"
    summary: ClassVar[str] = (
        "one mean-field training, whose solution is perturbed and trained on, again and again"
    )
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with as many passes as draws"
    best_epoch: ClassVar[str] = "of every phase its own, by the error in its second half"
    kept: ClassVar[str] = "a mean and a spread of every weight, for each member"

    of: MeanField = option(MeanField(optimizer=PUBLISHED), OF)
    num_members: int = option(3, "M, phases that end in a member")
    at_once: int = option(
        1,
        "members that are trained side by side: the first phase begins at the exploration and at "
        "perturbations of it, every later one at perturbations of the members before",
    )
    phase_epochs: int | None = option(None, PHASE_EPOCHS)
    perturbation: float = option(
        3.0, "ρ: how many standard deviations every mean is moved between two phases"
    )
    reset_rho: float = option(-6.0, "mean of the ρ (of σ = log(1 + e^ρ)) that are drawn after a perturbation")
    reset_spread: float = option(0.05, "standard deviation of them")
    rates: Rates = option("stepwise", RATES)
    high: float = option(0.1, HIGH)
    low: float = option(0.01, LOW)

    def __post_init__(self) -> None:
        self.check_of()
        require_whole("num_members", self.num_members)
        require_whole("at_once", self.at_once)
        if self.num_members % self.at_once:
            raise InputError(
                f"num_members={self.num_members} members cannot be trained {self.at_once} at once: at_once "
                "must divide their number."
            )
        if self.phase_epochs is not None:
            require_whole("phase_epochs", self.phase_epochs)
        require(self.perturbation >= 0, f"perturbation must be at least 0, got {self.perturbation!r}.")
        require(self.reset_spread >= 0, f"reset_spread must be at least 0, got {self.reset_spread!r}.")
        check_rates(self.rates, self.high, self.low)

    def check_of(self) -> None:
        """Raise unless ``of`` is a method that can be trained on in phases."""
        if type(self.of) is not MeanField:
            raise InputError(
                f"of must be a MeanField(...), got {self.of!r}. For sparse networks there is sebays."
            )

    @property
    def chain_members(self) -> None:
        return None

    # --- the algorithm ------------------------------------------------------------------------

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        one = self.of.init(problem, generator).members.stacked | self.extra_tensors(problem)
        return State(Members({name: t.repeat(self.at_once, *[1] * (t.ndim - 1)) for name, t in one.items()}))

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        first_epochs, phase_epochs = divide_epochs(epochs, self._num_rounds, self.phase_epochs)
        exploration = Phase(
            "explore",
            first_epochs,
            self.of.objective(problem),
            self._explore,
            self._optimizers(problem, frozen=False),
            schedule=self.of.schedule,
            penalty_schedule=self.of.annealing,
            end_epoch=State.copy_first_members,  # for validation, which looks at all of them
            measure=self.of.measure(problem),
        )
        annealing = self._last_annealing(first_epochs)
        return [
            exploration,
            *(self._phase(problem, phase_epochs, number, annealing) for number in range(self._num_rounds)),
        ]

    def _phase(self, problem: Problem, epochs: int, number: int, annealing: Schedule | None) -> Phase:
        """Train on from a perturbation, at falling rates; what comes out are ``at_once`` members."""
        optimizers = self._optimizers(problem, frozen=self.is_frozen)
        return Phase(
            f"member {number + 1}" if self.at_once == 1 else f"members, round {number + 1}",
            epochs,
            self.of.objective(problem, frozen=self.is_frozen),
            self._exploit,
            optimizers,
            carry=frozenset(optimizers),
            schedule=phase_schedule(self.rates, self.high, self.low, first=number == 0),
            penalty_schedule=annealing,
            cost=self.at_once,
            keep=phase_keep(self.of.keep, epochs),
            measure=self.of.measure(problem, frozen=self.is_frozen),
            restarts=True,
            enter=self._enter_first(problem) if number == 0 else self._perturb_all(problem),
            leave=lambda state: state.finished.append(state.members),
        )

    def _enter_first(self, problem: Problem) -> Hook:
        """The exploration is over: its first member goes on as it is, others from perturbations of it."""

        def enter(state: State) -> None:
            self.freeze_units(problem, state)
            state.copy_first_members()
            for optimizer in state.optimizers.values():
                optimizer.copy_moments_from(0)
            self._perturb(problem, state, first=1)

        return enter

    def _perturb_all(self, problem: Problem) -> Hook:
        return lambda state: self._perturb(problem, state, first=0)

    @torch.no_grad()
    def _perturb(self, problem: Problem, state: State, first: int) -> None:
        """μ ← μ ± ρ σ, and σ is drawn anew, of all members of a chain but those before ``first``."""
        weights = self.weights_over(problem)
        for group, generator in enumerate(state.generators):
            rows = state.members.rows(slice(group, group + 1))
            stacked = {name: t[rows][first:] for name, t in state.members.stacked.items()}
            rho = stacked[RHO]
            signs = torch.randint(2, rho.shape, generator=generator).to(rho) * 2 - 1
            moves = weights.by_name(self.perturbation * signs * F.softplus(rho))
            for name, move in moves.items():
                stacked[name].add_(move.to(stacked[name].dtype))
            drawn = torch.randn(rho.shape, generator=generator, dtype=torch.float64)
            rho.copy_(self.reset_rho + self.reset_spread * drawn)

    def _explore(self, state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        """One step of the first member of every chain."""
        [batch] = batches
        losses, gradients = objective.losses_and_gradients(state, batch, member=0)
        clipped = self.of.clipped(gradients.stacked)
        for optimizer in state.optimizers.values():
            optimizer.step(clipped, batch.cohorts, member=0)
        each = losses.unflatten(0, (state.members.num_groups, -1))
        return each[:, :1].expand_as(each).flatten()

    def _exploit(self, state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        """One step of all members."""
        [batch] = batches
        losses, gradients = objective.losses_and_gradients(state, batch)
        clipped = self.of.clipped(gradients.stacked)
        for member in range(self.at_once):
            for optimizer in state.optimizers.values():
                optimizer.step(clipped, batch.cohorts, member=member)
        return losses

    def posterior(self, problem: Problem, state: State) -> Posterior:
        blocks = state.finished.blocks or [state.members.clone()]  # before the first member is finished
        weights = self.weights_over(problem)
        return Variational(problem.network, blocks=blocks, weights=weights, frozen=self.is_frozen)

    def num_parameters(self, module: nn.Module) -> int:
        return self.num_members * self.of.num_parameters(module)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        first, each = divide_epochs(max(1, round(member_epochs)), self.num_members, self.phase_epochs)
        return replace(self, phase_epochs=each), first + self._num_rounds * each

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        return self.of.findings(problem, state)

    # --- parts --------------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        """Whether units that were left out in the exploration stay so."""
        return False

    def extra_tensors(self, problem: Problem) -> dict[str, Tensor]:
        """What a member has beside what it is trained with, [1, ...]."""
        return {}

    def freeze_units(self, problem: Problem, state: State) -> None:
        """Fix the units of all members as the exploration has left them, if they are to stay."""

    def weights_over(self, problem: Problem) -> GaussianWeights:
        return self.of.weights_over(problem.network.module, problem.trainable)

    @property
    def _num_rounds(self) -> int:
        return self.num_members // self.at_once

    def _optimizers(self, problem: Problem, *, frozen: bool) -> dict[str, Over]:
        found = self.of.optimizers(problem, frozen=frozen)
        return {name: replace(over, separate_members=True) for name, over in found.items()}

    def _last_annealing(self, epochs: int) -> Schedule | None:
        """The factor of the KL term that an exploration of so many epochs ends with."""
        if self.of.annealing is None:
            return None
        return Constant(self.of.annealing(Progress(10**9 - 1, 10**9, epochs)))
