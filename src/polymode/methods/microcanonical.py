"""Chains of microcanonical Langevin dynamics that begin at the optima of an ensemble.

Sommer et al., "Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks", 2025.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
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
    in_blocks,
    keep_rule,
    nothing,
    num_blocks,
    prior_widths,
    start_in_words,
)
from polymode.trees import Tree
from polymode.weights.priors import PriorStd, check_prior_std

Scale = Literal["variances", "prior"]

BLOCK = 12  # steps, at most, that nothing can interrupt
# Shares of the warm-up: go from the optimum to where the posterior is, while v falls; find ε and the spread
# of every weight; ε and the spread again, in units of it, and L by that; L by correlations.
PARTS = (0.4, 0.2, 0.2, 0.2)
LEAST_MEASURED = 100  # steps by which a spread is known well enough to measure by
LEAST_MEMORY = 100  # steps by which ε is found; afterwards half of a part of the warm-up
TRACED = (500, 100)  # steps and weights that a correlation time is taken from
LEAST_DRAWS = 10  # independent ones, that a trace must be worth
LENGTH_FACTOR = 0.4  # L in units of the way to an independent draw
# A step whose energy changes by more than this many of the wanted deviations has left its level set.
DIVERGED = 30.0
SHORTER = 0.9  # factor on the step size of a chain that has
# Of a chain that is to be trusted: divergences as a share of its steps, and how much shorter these became.
MOST_DIVERGENCES, MOST_SHORTENED = 0.01, 0.5
FAR_OFF = 30.0  # factor between the variance of the energy that was wanted and one that is not it
COUNTS = ("steps", "divergences", "errors")  # of a chain while it samples; errors: sum of ΔE²/D


@dataclass(frozen=True)
class _Rule:
    """What happens beside the steps."""

    adapt: bool = False  # the step size; else it is fixed
    spread: bool = False  # measure the variance of every weight
    trace: bool = False  # write down where some weights are


@dataclass(frozen=True)
class Microcanonical(Method):
    """Descend to an optimum, find ε, σ and L, then follow u and θ; every so many steps θ is a sample.

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
    warm_up: float = option(0.5, "share of the steps in which ε, σ and L are found and nothing is kept")
    descent: int = option(
        100,
        "epochs of minibatch descent, of the likelihood alone, to the optimum that each chain begins at; at "
        "most about a third of all passes",
    )
    optimizer: Optimizer = option(Optimizer("Adam", lr=3e-3), f"of the descent: {OPTIMIZER}")
    schedule: Schedule = option(Constant(), f"of the descent: {SCHEDULE}")
    keep: Keep = option("last", f"of the descent: {KEEP}")
    energy_variance: float = option(
        0.01,
        "v, variance of the energy's error in a step, for each weight, that ε is found for; 5e-4 for samples "
        "that others are judged by",
    )
    first_energy_variance: float = option(
        0.5, "v at the beginning of warm-up, from where it falls; at least `energy_variance`"
    )
    scale: Scale = option(
        "variances",
        'σ, units in which weights move: `"variances"`, the spread of each weight in its own chain, found in '
        'warm-up; `"prior"`, the prior\'s widths',
    )
    step_size: float | None = option(
        None, "ε where the search for it begins, in units of the prior's widths; None takes it from the data"
    )
    length: float | None = option(
        None,
        "L, in which the momentum is forgotten, in units of σ (of the prior's widths until that is known); "
        "None finds it in warm-up",
    )
    minibatch: bool = option(
        False,
        "take the gradients of a step from a minibatch instead of all data: three gradients a step, and "
        "samples of another width than the posterior's",
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
        is_share = isinstance(self.warm_up, int | float) and 0 <= self.warm_up < 1
        require(is_share, f"warm_up must be at least 0 and below 1, got {self.warm_up!r}.")
        require(
            self.first_energy_variance >= self.energy_variance,
            f"The energy variance falls in warm-up: first_energy_variance={self.first_energy_variance} must "
            f"be at least energy_variance={self.energy_variance}.",
        )
        if self.scale not in get_args(Scale):
            raise unknown_name("scale", self.scale, get_args(Scale))

    @property
    def undivided(self) -> str:
        return (
            "microcanonical records its steps as a whole: give each process chains of its own (engine=...)."
        )

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
            between -= between % num_blocks(between, BLOCK)
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
        narrow = 0.5 * math.sqrt(num_weights / problem.num_observations) / float(widths.max())
        step = torch.tensor([self.step_size or narrow], dtype=torch.float64, device=position.device)
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
                **{name: zero.clone() for name in ("log_density", "planned", "traced", "epochs")},
                **{name: zero.clone() for name in ("first_step", "descent", *COUNTS)},
                "given": zero + bool(problem.initial),
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
        parts = [round(share * warm_up) for share in PARTS[:3]]
        parts.append(warm_up - sum(parts))
        # A clock of epochs, each of some steps or of the minibatches of the data.
        falling = max(1, parts[0] if self.minibatch else num_blocks(parts[0], BLOCK))
        blocks = between if self.minibatch else num_blocks(between, BLOCK)
        likelihood = problem.objective()  # the prior's part of the gradient is known in closed form

        def moving(name: str, number: int, size: int, rule: _Rule, **hooks: Any) -> Phase:
            """So many epochs: each of ``size`` steps, or of minibatches with a step each."""

            def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
                return _Chains(self, stds, state, batches, objective, rule).run(size)

            batches, cost = (1, 3) if self.minibatch else ("full", 2 * size)
            return Phase(name, number, likelihood, step, batches=batches, cost=cost, **hooks)

        def warming(number: int, rule: _Rule, leave: Hook = nothing) -> list[Phase]:
            """A part of the warm-up, of so many steps (or epochs of minibatches)."""
            lengths = [(number, 1)] if self.minibatch and number else in_blocks(number, BLOCK)
            return [
                moving(
                    "warm_up",
                    count,
                    size,
                    rule,
                    enter=partial(self._begin_part, number) if place == 0 else nothing,
                    end_epoch=fall,
                    leave=leave if place == len(lengths) - 1 else nothing,
                )
                for place, (count, size) in enumerate(lengths)
            ]

        def fall(state: State) -> None:
            """Let the wanted variance of the energy fall to its last value, in a straight line."""
            done = (state.common["epochs"].add_(1) / falling).clamp(max=1)
            first, last = self.first_energy_variance, self.energy_variance
            state.common["variance"].copy_(first + (last - first) * done)

        def begin_to_sample(state: State) -> None:
            state.common["variance"].fill_(self.energy_variance)
            state.common["first_step"].copy_(state.common["step"]["step"])
            for name in ("epochs", *COUNTS):
                state.common[name].zero_()

        def keep(state: State) -> None:
            if int(state.common["epochs"].add_(1)[0]) % blocks == 0:
                state.finished.append(state.members)

        phases = []
        if descent:
            phases.append(
                Phase(
                    "descent",
                    descent,
                    likelihood,  # with the prior, the optimum may be a collapsed network, far from the bulk
                    optimizers={"all": Over(self.optimizer)},
                    schedule=self.schedule,
                    keep=keep_rule(self.keep),
                    leave=lambda state: state.common["descent"].fill_(descent),
                )
            )
        if not self.minibatch:
            phases.append(Phase("look", 1, likelihood, partial(_look, self, stds), batches="full"))
        phases += warming(parts[0], _Rule(adapt=True))
        phases += warming(parts[1], _Rule(adapt=True, spread=True), self._scale_by_spread)
        phases += warming(parts[2], _Rule(adapt=True, spread=True), self._length_by_spread)
        phases += warming(parts[3], _Rule(trace=True), self._length_by_correlation)
        sampling = kept * blocks, between // blocks, _Rule()
        return [*phases, moving("sample", *sampling, enter=begin_to_sample, end_epoch=keep)]

    # --- what warm-up finds ---------------------------------------------------------------------

    def _begin_part(self, number: int, state: State) -> None:
        """Measure from here on; ``planned`` are the steps of each chain in this part of the warm-up."""
        common = state.common
        steps = torch.full_like(common["planned"], number)
        if self.minibatch:  # so many epochs, each of as many steps as those before it
            steps *= (common["steps"] / common["epochs"].clamp(min=1)).round().clamp(min=1)
        common["planned"].copy_(steps)
        common["traced"].zero_()
        Spread.forget(state.own["spread"])

    def _scale_by_spread(self, state: State) -> None:
        """Make σ the spread of each weight in its chain; ε keeps its length, and is sought anew."""
        if self.scale == "variances":
            known = state.common["planned"] >= LEAST_MEASURED
            shorter = Spread.rescale(state.own["scale"], state.own["spread"], known)
            for name, value in EnergyErrors.begin(state.common["step"]["step"] * shorter).items():
                state.common["step"][name].copy_(value)

    def _length_by_spread(self, state: State) -> None:
        """L ← √Σ_j var(θ_j)/s_j²: the size of what is to be crossed."""
        if self.length is None:
            spread = Spread.std(state.own["spread"]) / state.own["scale"]
            size = torch.linalg.vector_norm(spread.double(), dim=1)
            state.common["length"].copy_(torch.where(size > 0, size, state.common["length"]))

    def _length_by_correlation(self, state: State) -> None:
        """L ← 0.4 of the way from one independent draw to the next, the mean over weights.

        A trace that is worth too few draws does not know that way: then L stays the size of the posterior.
        """
        if self.length is not None:
            return
        every = _between_traced(state)
        for row, count in enumerate((state.common["traced"] / every).ceil().int().tolist()):
            between = correlation_time(state.own["trace"][row, :count]).mean() if count > 1 else math.inf
            if count >= LEAST_DRAWS * between:
                step = state.common["step"]["step"][row]
                state.common["length"][row] = LENGTH_FACTOR * step * every[row] * between

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """How the chain went: what decides whether it may be trusted."""
        steps, divergences, errors = (float(state.common[name]) for name in COUNTS)
        variance = errors / (steps - divergences) if steps > divergences else None
        if steps >= LEAST_MEASURED and (why := self._why_untrusted(problem.trainable, state, variance)):
            warnings.warn(f"A microcanonical chain is not to be trusted: {why}.", stacklevel=2)
        return {
            "steps": int(steps),
            "divergences": int(divergences),
            "energy_variance": variance,
            "step_size": float(state.common["step"]["step"]),
            "first_step_size": float(state.common["first_step"]),
            "length": float(state.common["length"]),
            "start": start_in_words(bool(state.common["given"]), int(state.common["descent"])),
        }

    def _why_untrusted(self, names: Iterable[str], state: State, variance: float | None) -> str | None:
        """What is wrong with the samples of a chain, and what to do. names: of the weights it moves."""
        steps, divergences, _ = (float(state.common[name]) for name in COUNTS)
        first, last = float(state.common["first_step"]), float(state.common["step"]["step"])
        more = "lower energy_variance, or give it more passes to find a smaller step"
        if variance is None or divergences > MOST_DIVERGENCES * steps or last < MOST_SHORTENED * first:
            return (
                f"{divergences:.0f} of {steps:.0f} steps diverged and were undone, and the step size fell "
                f"from {first:.3g} to {last:.3g}; {more}"
            )
        scale, weights = state.own["scale"], as_vectors({name: state.members.stacked[name] for name in names})
        move = last * scale.double().square().mean().sqrt() / math.sqrt(scale.shape[1])
        if move < torch.finfo(scale.dtype).eps * weights.double().square().mean().sqrt():
            return (
                "its steps are smaller than the rounding of its weights; use precision='double', and bring "
                "inputs and targets to a scale of about one"
            )
        wanted = f"the variance of its energy is {variance:.2g} for each weight, not {self.energy_variance:g}"
        if variance > FAR_OFF * self.energy_variance:
            return f"{wanted}; {more}"
        if variance < self.energy_variance / FAR_OFF**3:
            return (
                f"{wanted}: steps are far smaller than they could be; leave step_size to be found, or give "
                "it a longer warm-up"
            )
        return None

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(self.step_cost + 1, round(member_epochs / self.num_chains))


def _between_traced(state: State) -> Tensor:
    """Steps of each chain from one state that is traced to the next, [G]."""
    return (state.common["planned"] / TRACED[0]).ceil().clamp(min=1)


def _look(
    method: Microcanonical,
    stds: Mapping[str, float],
    state: State,
    batches: Sequence[Batch],
    objective: Objective,
) -> Tensor:
    """Take the gradient that the first step begins with."""
    return _Chains(method, stds, state, batches, objective, _Rule()).look_here()


def _move(
    density: LogDensity, own: Tree, common: Tree, active: Tensor, rule: Mapping[str, Tensor], noise: Tensor
) -> Tensor:
    """A step of every chain, undone where it fails, and what is learned of it.

    active: the chains that move, [G]. rule: what of ``_Rule`` holds, as numbers: one graph serves all.
    noise: z ~ N(0, 1), [G, D]. Returns the mean losses of the data at the new place, [G].
    """
    position, momentum, step = density.position, own["momentum"], common["step"]["step"]
    before, direction, num_weights = position.clone(), momentum.clone(), position.shape[1]
    refresh(momentum, noise, step, common["length"])
    turned, latest = momentum.clone(), [active]

    def look() -> tuple[Tensor, Tensor]:
        latest[0], gradient = density.look()
        return density.value(latest[0]), gradient

    log_density, gradient, change = microcanonical_step(
        position,
        momentum,
        own["gradient"],
        common["log_density"],
        step=step,
        scale=own["scale"],
        look=look,
    )
    bound = DIVERGED * (num_weights * common["variance"]).sqrt()
    diverged = active & ~(change.abs() <= bound)
    moved = active & ~diverged
    # A step that fails is undone and turned back, which leaves the law as it is: its way back fails, too.
    # Chains without data in this minibatch stay as they are.
    elsewhere = torch.where(diverged[:, None], -turned, direction)
    position.copy_(torch.where(moved[:, None], position, before))
    momentum.copy_(torch.where(moved[:, None], momentum, elsewhere))
    _arrive(own, common, log_density, gradient, moved)
    common["steps"] += active
    common["divergences"] += diverged
    common["errors"] += torch.where(moved, change.square() / num_weights, 0.0)
    Spread.update(own["spread"], position, torch.where(moved & rule["spread"], step, 0.0))
    errors = EnergyErrors(num_weights, (common["planned"] / 2).clamp(min=LEAST_MEMORY))
    errors.update(common["step"], change, common["variance"], active & rule["adapt"])
    # A place that is stiffer than all that warm-up has seen: smaller steps from here on.
    step.mul_(torch.where(diverged & ~rule["adapt"], SHORTER, 1.0))
    return latest[0]


def _arrive(own: Tree, common: Tree, log_density: Tensor, gradient: Tensor, where: Tensor) -> None:
    """Write down ℓ and ∇ℓ of the chains that are at a new place."""
    own["gradient"].copy_(torch.where(where[:, None], gradient, own["gradient"]))
    common["log_density"].copy_(torch.where(where, log_density, common["log_density"]))


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
        self.method, self.rule = method, rule
        self.state, self.own, self.common = state, state.own, state.common
        whole = not method.minibatch
        self.density = LogDensity(stds, state, batches, objective, method.temperature, whole=whole)
        self.position, self.momentum = self.density.position, state.own["momentum"]
        self.num_weights = self.position.shape[1]
        self.losses = torch.full_like(self.common["length"], torch.nan)
        self.active = self.density.active
        self.moving_own = {name: self.own[name] for name in ("momentum", "gradient", "scale", "spread")}
        self.rule_now = {
            name: torch.tensor(value, device=self.position.device)
            for name, value in (("spread", rule.spread), ("adapt", rule.adapt))
        }

    def look_here(self) -> Tensor:
        """ℓ and ∇ℓ where the chains are; returns mean losses, [G]."""
        self.losses, gradient = self.density.look()
        _arrive(self.own, self.common, self.density.value(self.losses), gradient, self.active)
        return self.losses

    def run(self, num_steps: int) -> Tensor:
        """Take so many steps; returns the mean loss of every chain at its last place, [G]."""
        if self.method.minibatch:  # the gradient is of another batch
            self.look_here()
        for _ in range(num_steps):
            self._step()
        self.density.write_back()
        return self.losses

    def _step(self) -> None:
        moving = (self.moving_own, self.common, self.active, self.rule_now)
        self.losses = self.density.advance(_move, *moving, then=(self._noise(),), looks=2)
        if self.rule.trace:
            self._trace()

    def _noise(self) -> Tensor:
        """Draw z ~ N(0, 1) from the generator of each chain that moves, [G, D]."""
        drawn = torch.zeros(self.position.shape, dtype=self.position.dtype)
        for row in self.active.nonzero().flatten().tolist():
            torch.randn(drawn.shape[1], generator=self.state.generators[row], out=drawn[row])
        return drawn.to(self.position.device)

    def _trace(self) -> None:
        """Write down some weights of every so many steps."""
        trace, traced, every = self.own["trace"], self.common["traced"], _between_traced(self.state)
        followed = torch.linspace(0, self.num_weights - 1, trace.shape[2], device=self.position.device)
        values = self.position[:, followed.long()]
        due = self.active & (traced % every == 0)
        for row in due.nonzero().flatten().tolist():
            place = int(traced[row] / every[row])
            if place < trace.shape[1]:
                trace[row, place] = values[row]
        traced += self.active
