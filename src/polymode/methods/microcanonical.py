"""Chains of microcanonical Langevin dynamics that begin at the optima of an ensemble.

Sommer et al., "Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks", 2025.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require, require_positive, require_whole, unknown_name
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.samplers import EnergyErrors, Spread, as_vectors, correlation_time, microcanonical_step, refresh
from polymode.schedules import Constant, Schedule
from polymode.training.contract import (
    KEEP,
    OPTIMIZER,
    PRIOR_STD,
    SCHEDULE,
    Batch,
    Hook,
    Keep,
    LogDensity,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_optimizer,
    check_samplable,
    check_schedule,
    keep_rule,
    nothing,
    prior_widths,
    start_in_words,
)
from polymode.weights.priors import PriorStd, check_prior_std, gaussian_prior

Scale = Literal["variances", "prior"]

BLOCK = 12  # steps, at most, that nothing can interrupt
# Shares of the warm-up: go from the optimum to where the posterior is, while v falls; find ε and the spread
# of every weight; ε and the spread again, in units of it, and L by that; L by correlations.
PARTS = (0.4, 0.2, 0.2, 0.2)
LEAST_MEASURED = 20  # steps by which a spread is known well enough to measure by
LEAST_MEMORY = 100  # steps by which ε is found; afterwards half of a part of the warm-up
TRACED = (500, 100)  # steps and weights that a correlation time is taken from
LEAST_DRAWS = 10  # independent ones, that a trace must be worth
LENGTH_FACTOR = 0.4  # L in units of the way to an independent draw
# A step whose energy changes by more than this many of the wanted deviations has left its level set.
DIVERGED = 30.0
SHORTER = 0.9  # factor on the step size of a chain that has
MOST_DIVERGENCES = 0.01  # of the steps of a chain that is to be trusted
COUNTS = ("steps", "divergences", "errors")  # of a chain while it samples; errors: sum of ΔE²/D


@dataclass(frozen=True)
class _Rule:
    """What happens beside the steps. trace: so many steps from one state that is followed to the next."""

    memory: int | None = None  # steps that the step size is found by; None: it is fixed
    spread: bool = False  # measure the variance of every weight
    trace: int | None = None


@dataclass(frozen=True)
class Microcanonical(Method):
    """Descend to an optimum, find ε, s and L, then follow u and θ; every so many steps θ is a sample.

    A step has two gradients of ℓ(θ) = (Σ_n log p(y_n | x_n, θ) − Σ_j θ_j²/(2 s²))/T over the whole data set
    and no acceptance test: the error that it leaves is told by the variance of the energy. An epoch is a
    gradient pass. ``State.own``: the momentum u, ∇ℓ and the scale of every weight; ``State.common``: ε, L, ℓ.
    """

    name: ClassVar[str] = "microcanonical"
    summary: ClassVar[str] = "posterior samples around the optima of an ensemble, by microcanonical dynamics"
    kept: ClassVar[str] = "for each sample of a chain"
    cost: ClassVar[str] = (
        "num_chains member-epochs a gradient pass, thousands of passes; predicts with num_chains × "
        "num_samples passes"
    )
    best_epoch: ClassVar[str] = "that of the descent, in which each chain begins; samples are not chosen"
    tempered: ClassVar[bool] = True

    num_chains: int = option(8, "run side by side, each from an optimum and with a step size of its own")
    prior_std: PriorStd = option(0.3, PRIOR_STD)
    num_samples: int = option(
        50, "states kept of each chain, spread evenly over the steps after warm-up (thinning follows from it)"
    )
    passes: int = option(
        4000,
        "gradient passes of each chain, descent included, that a comparison gives it at least; "
        "`fit(epochs=...)` and `fit(budget=...)` say it themselves",
    )
    warm_up: float = option(0.5, "share of the steps in which ε, s and L are found and nothing is kept")
    descent: int = option(
        100,
        "epochs of minibatch descent to the optimum that each chain begins at; at most a third of all passes",
    )
    optimizer: Optimizer = option(Optimizer("Adam", lr=3e-3), f"of the descent: {OPTIMIZER}")
    schedule: Schedule = option(Constant(), f"of the descent: {SCHEDULE}")
    keep: Keep = option("last", f"of the descent: {KEEP}")
    energy_variance: float = option(
        0.01,
        "v, variance of the energy's error in a step, for each weight, that ε is found for; 5e-4 for samples "
        "that are to be judged by",
    )
    first_energy_variance: float = option(
        0.5, "v at the beginning of warm-up, from where it falls; at least `energy_variance`"
    )
    scale: Scale = option(
        "variances",
        'units in which weights move: `"variances"`, the spread of each weight in its own chain, found in '
        'warm-up; `"prior"`, the prior\'s widths',
    )
    step_size: float | None = option(
        None, "ε where the search for it begins, in units of the scale; None takes it from the data"
    )
    length: float | None = option(
        None, "L, in which the momentum is forgotten, in units of the scale; None finds it in warm-up"
    )
    minibatch: bool = option(
        False,
        "take the gradients of a step from a minibatch instead of all data: three looks a step, and samples "
        "that are wider than the posterior",
    )
    temperature: float = option(1.0, "T; below 1 the posterior is sharpened")

    def __post_init__(self) -> None:
        require_whole("num_chains", self.num_chains)
        require_whole("num_samples", self.num_samples)
        require_whole("passes", self.passes, least=3)
        require_whole("descent", self.descent, least=0)
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        keep_rule(self.keep)
        check_prior_std(self.prior_std)
        for name in ("energy_variance", "first_energy_variance", "temperature"):
            require_positive(name, getattr(self, name))
        for name in ("step_size", "length"):
            if (value := getattr(self, name)) is not None:
                require_positive(name, value)
        require(0 <= self.warm_up < 1, f"warm_up must be at least 0 and below 1, got {self.warm_up!r}.")
        require(
            self.first_energy_variance >= self.energy_variance,
            f"The energy variance falls in warm-up: first_energy_variance={self.first_energy_variance} must "
            f"be at least energy_variance={self.energy_variance}.",
        )
        if self.scale not in get_args(Scale):
            raise unknown_name("scale", self.scale, get_args(Scale))

    @property
    def total_chains(self) -> int:
        return self.num_chains

    @property
    def chain_members(self) -> int:
        return self.num_samples

    @property
    def least_budget(self) -> float:
        return float(self.num_chains * self.passes)

    def num_parameters(self, module: nn.Module) -> int:
        return self.num_samples * super().num_parameters(module)

    @property
    def step_cost(self) -> int:
        """Gradients of a step; a minibatch is looked at before it, too."""
        return 3 if self.minibatch else 2

    def lengths(self, epochs: int) -> tuple[int, int, int, int]:
        """Epochs of the descent, steps of warm-up, samples kept, steps between two of them.

        With minibatches, steps are epochs of them.
        """
        least = self.step_cost + (0 if self.minibatch else 1)  # a step, and the gradient it begins with
        if epochs < least:
            raise InputError(
                f"microcanonical needs at least {least} gradient passes, got {epochs}; thousands are usual."
            )
        first = 0 if self.minibatch else 1
        descent = min(self.descent, (epochs - least) // 3)
        steps, rest = divmod(epochs - descent - first, self.step_cost)
        warm_up = min(steps - 1, round(self.warm_up * steps))
        kept = min(self.num_samples, steps - warm_up)
        between = (steps - warm_up) // kept
        if not self.minibatch:
            between -= between % _blocks(between)
        # What cannot be divided goes to where it does no harm; a descent that was not asked for is not made.
        return (descent + rest if descent else 0), steps - kept * between, kept, between

    def kept_samples(self, epochs: int) -> int:
        """States that each chain keeps of so many gradient passes."""
        return self.lengths(epochs)[2]

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        members = problem.initial_members(generator)
        stds = problem.prior_stds(self.prior_std)
        weights = {name: members.stacked[name] for name in stds}
        position = as_vectors(weights)
        widths, num_weights = prior_widths(stds, weights), position.shape[1]
        # A step of half the width that one weight would have, were all of the data about it alone.
        steps = 0.5 * math.sqrt(num_weights / problem.num_observations) / float(widths.max())
        step = torch.tensor([self.step_size or steps], dtype=torch.float64, device=position.device)
        zero = torch.zeros_like(step)
        momentum = torch.randn(position.shape, generator=generator, dtype=position.dtype).to(position.device)
        num_traced, num_followed = TRACED
        return State(
            members,
            own={
                "momentum": momentum / torch.linalg.vector_norm(momentum),
                "gradient": torch.zeros_like(position),
                "scale": widths[None].to(position.dtype),
                "spread": Spread.begin(position),
                "trace": position.new_zeros(1, num_traced, min(num_weights, num_followed)),
            },
            common={
                "step": EnergyErrors.begin(step),
                "length": zero + (self.length or math.sqrt(num_weights)),
                "variance": zero + self.first_energy_variance,
                **{name: zero.clone() for name in ("log_density", "traced", "epochs", *COUNTS)},
            },
        )

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        check_samplable(problem, self.name)
        stds = problem.prior_stds(self.prior_std)
        num_weights = sum(problem.network.module.get_parameter(name).numel() for name in stds)
        if num_weights < 2:
            raise InputError(
                f"microcanonical turns a direction among the weights, and this network has {num_weights} to "
                "train: at least 2 are needed. Use hmc."
            )
        descent, warm_up, kept, between = self.lengths(epochs)
        likelihood = problem.objective()  # the prior's part of the gradient is known in closed form

        def moving(name: str, number: int, size: int, rule: _Rule, **hooks: Any) -> Phase:
            """So many epochs: each of ``size`` steps, or of minibatches with a step each."""

            def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
                return _Chains(self, stds, state, batches, objective, rule).run(size)

            batches, cost = (1, 3) if self.minibatch else ("full", 2 * size)
            return Phase(name, number, likelihood, step, batches=batches, cost=cost, **hooks)

        def warming(number: int, rule: _Rule, leave: Hook = nothing) -> list[Phase]:
            """A part of the warm-up, of so many steps (or epochs of minibatches)."""
            blocks = [(number, 1)] if self.minibatch else [(number // BLOCK, BLOCK), (1, number % BLOCK)]
            blocks = [(count, size) for count, size in blocks if count and size]
            return [
                moving(
                    "warm_up",
                    count,
                    size,
                    rule,
                    enter=_forget if place == 0 else nothing,
                    end_epoch=fall,
                    leave=leave if place == len(blocks) - 1 else nothing,
                )
                for place, (count, size) in enumerate(blocks)
            ]

        def fall(state: State) -> None:
            """Let the wanted variance of the energy fall to its last value, in a straight line."""
            done = (state.common["epochs"].add_(1) / falling).clamp(max=1)
            first, last = self.first_energy_variance, self.energy_variance
            state.common["variance"].copy_(first + (last - first) * done)

        def begin_to_sample(state: State) -> None:
            state.common["variance"].fill_(self.energy_variance)
            for name in ("epochs", *COUNTS):
                state.common[name].zero_()

        def keep(state: State) -> None:
            if int(state.common["epochs"].add_(1)[0]) % blocks == 0:
                state.finished.append(state.members)

        parts = [round(share * warm_up) for share in PARTS[:3]]
        parts.append(warm_up - sum(parts))
        in_epoch = (problem.num_minibatches or 1) if self.minibatch else 1
        falling = max(1, parts[0] if self.minibatch else _blocks(parts[0]))
        memories = [max(LEAST_MEMORY, parts[part] * in_epoch // 2) for part in (1, 2)]
        every = max(1, -(-parts[3] * in_epoch // TRACED[0]))
        blocks = between if self.minibatch else _blocks(between)
        phases = []
        if descent:
            posterior, optimizers = problem.objective(gaussian_prior(stds)), {"all": Over(self.optimizer)}
            best = keep_rule(self.keep)
            phases.append(
                Phase("descent", descent, posterior, optimizers=optimizers, schedule=self.schedule, keep=best)
            )
        if not self.minibatch:
            phases.append(Phase("look", 1, likelihood, partial(_look, self, stds), batches="full"))
        phases += warming(parts[0], _Rule(LEAST_MEMORY))
        rescale = self._scale_by_spread if parts[1] >= LEAST_MEASURED else nothing
        phases += warming(parts[1], _Rule(memories[0], spread=True), rescale)
        phases += warming(parts[2], _Rule(memories[1], spread=True), self._length_by_spread)
        phases += warming(parts[3], _Rule(trace=every), partial(self._length_by_correlation, every))
        sampling = kept * blocks, between // blocks, _Rule()
        return [*phases, moving("sample", *sampling, enter=begin_to_sample, end_epoch=keep)]

    # --- what warm-up finds ---------------------------------------------------------------------

    def _scale_by_spread(self, state: State) -> None:
        """Make s the spread of each weight in its chain; ε keeps its length, and is sought anew."""
        if self.scale == "variances":
            shorter = Spread.rescale(state.own["scale"], state.own["spread"])
            for name, value in EnergyErrors.begin(state.common["step"]["step"] * shorter).items():
                state.common["step"][name].copy_(value)

    def _length_by_spread(self, state: State) -> None:
        """L ← √Σ_j var(θ_j)/s_j²: the size of what is to be crossed."""
        if self.length is None:
            spread = Spread.std(state.own["spread"]) / state.own["scale"]
            size = torch.linalg.vector_norm(spread.double(), dim=1)
            state.common["length"].copy_(torch.where(size > 0, size, state.common["length"]))

    def _length_by_correlation(self, every: int, state: State) -> None:
        """L ← 0.4 of the way from one independent draw to the next, the mean over weights.

        A trace that is worth too few draws does not know that way: then L stays the size of the posterior.
        """
        if self.length is not None:
            return
        for row, count in enumerate(state.common["traced"].div(every, rounding_mode="floor").int().tolist()):
            between = correlation_time(state.own["trace"][row, :count]).mean() if count > 1 else math.inf
            if count >= LEAST_DRAWS * between:
                step = state.common["step"]["step"][row]
                state.common["length"][row] = LENGTH_FACTOR * step * every * between

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """How the chain went: what decides whether it may be trusted."""
        steps, divergences, errors = (float(state.common[name]) for name in COUNTS)
        if steps and divergences > MOST_DIVERGENCES * steps:
            warnings.warn(
                f"{divergences:.0f} of {steps:.0f} steps of a microcanonical chain diverge and were undone: "
                "its samples are not to be trusted. Lower energy_variance, or give it more passes to find a "
                "smaller step.",
                stacklevel=2,
            )
        return {
            "steps": int(steps),
            "divergences": int(divergences),
            "energy_variance": errors / steps if steps else None,
            "step_size": float(state.common["step"]["step"]),
            "length": float(state.common["length"]),
            "start": start_in_words(problem, self.descent),
        }

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(self.step_cost + 1, round(member_epochs / self.num_chains))


def _blocks(steps: int) -> int:
    """Into how many stretches of equal length some steps are divided."""
    return -(-steps // BLOCK)


def _forget(state: State) -> None:
    """Measure spreads and correlations from here on."""
    Spread.forget(state.own["spread"])
    state.common["traced"].zero_()


def _look(method: Microcanonical, stds: Mapping[str, float], state, batches, objective) -> Tensor:
    """Take the gradient that the first step begins with."""
    chains = _Chains(method, stds, state, batches, objective, _Rule())
    return chains.look_here()


class _Chains:
    """All chains at once, on the data of one step or of several."""

    def __init__(
        self,
        method: Microcanonical,
        stds: Mapping[str, float],
        state: State,
        batches: Sequence[Batch],
        objective: Objective,
        rule: _Rule,
    ) -> None:
        self.method, self.state, self.own, self.common, self.rule = (
            method,
            state,
            state.own,
            state.common,
            rule,
        )
        self.density = LogDensity(stds, state, batches, objective, method.temperature)
        self.position, self.momentum = self.density.position, state.own["momentum"]
        self.losses = torch.full_like(self.common["length"], torch.nan)
        self.active = self.density.active
        self.errors = None if rule.memory is None else EnergyErrors(self.position.shape[1], rule.memory)

    def look_here(self) -> Tensor:
        """ℓ and ∇ℓ where the chains are; returns mean losses, [G]."""
        log_density, gradient = self._look()
        self.common["log_density"].copy_(log_density)
        self.own["gradient"].copy_(gradient)
        return self.losses

    def run(self, num_steps: int) -> Tensor:
        """Take so many steps; returns the mean loss of every chain at its last place, [G]."""
        if self.method.minibatch:  # the gradient is of another batch
            self.look_here()
        for _ in range(num_steps):
            self._step()
        self.density.write_back()
        return self.losses

    def _look(self) -> tuple[Tensor, Tensor]:
        self.losses, gradient = self.density.look()
        return self.density.value(self.losses), gradient

    def _step(self) -> None:
        common, own = self.common, self.own
        before, direction, noise = self.position.clone(), self.momentum.clone(), self._noise()
        step = common["step"]["step"]
        refresh(self.momentum, noise, step, common["length"])
        log_density, gradient, change = microcanonical_step(
            self.position,
            self.momentum,
            own["gradient"],
            common["log_density"],
            step=step,
            scale=own["scale"],
            look=self._look,
        )
        num_weights = self.position.shape[1]
        bound = DIVERGED * (num_weights * common["variance"]).sqrt()
        diverged = self.active & ~(change.abs() <= bound)
        moved = self.active & ~diverged
        if not bool(
            moved.all()
        ):  # chains go on from where they were: in a new direction, or when they see data
            drawn = noise / torch.linalg.vector_norm(noise, dim=1, keepdim=True).clamp(min=1e-30)
            self.position.copy_(torch.where(moved[:, None], self.position, before))
            elsewhere = torch.where(diverged[:, None], drawn, direction)
            self.momentum.copy_(torch.where(moved[:, None], self.momentum, elsewhere))
        own["gradient"].copy_(torch.where(moved[:, None], gradient, own["gradient"]))
        common["log_density"].copy_(torch.where(moved, log_density, common["log_density"]))
        common["steps"] += self.active
        common["divergences"] += diverged
        common["errors"] += torch.where(moved, change.square() / num_weights, 0.0)
        if self.errors is not None:
            self.errors.update(common["step"], change, common["variance"], self.active)
        else:  # a place that is stiffer than what warm-up has seen: smaller steps from here on
            step.mul_(torch.where(diverged, SHORTER, 1.0))
        if self.rule.spread:
            Spread.update(own["spread"], self.position, torch.where(moved, step, 0.0))
        if self.rule.trace is not None:
            self._trace(self.rule.trace)

    def _noise(self) -> Tensor:
        """Draw z ~ N(0, 1) from the generator of each chain that moves, [G, D]."""
        drawn = torch.zeros(self.position.shape, dtype=self.position.dtype)
        for row in self.active.nonzero().flatten().tolist():
            torch.randn(drawn.shape[1], generator=self.state.generators[row], out=drawn[row])
        return drawn.to(self.position.device)

    def _trace(self, every: int) -> None:
        """Write down some weights of every so many steps."""
        trace, traced = self.own["trace"], self.common["traced"]
        followed = torch.linspace(0, self.position.shape[1] - 1, trace.shape[2], device=self.position.device)
        values = self.position[:, followed.long()]
        for row, count in enumerate(traced.int().tolist()):
            place, rest = divmod(count, every)
            if rest == 0 and place < trace.shape[1] and self.active[row]:
                trace[row, place] = values[row]
        traced += self.active
