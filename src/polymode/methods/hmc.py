"""Full-batch Hamiltonian Monte Carlo: samples of the posterior itself, to judge everything else by."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from polymode.errors import InputError, require_positive, require_whole, unknown_name
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.samplers import DualAveraging, Spread, as_vectors, draw_prior, views_of
from polymode.training.contract import (
    OPTIMIZER,
    PRIOR_STD,
    Batch,
    Hook,
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
    in_blocks,
    nothing,
    num_blocks,
    prior_widths,
    start_in_words,
)
from polymode.weights.priors import PriorStd, check_prior_std, gaussian_prior

# A trajectory whose energy has changed by more than this has left the level set it should follow.
DIVERGED = 1000.0
# A state whose energy is off by less may tell how wide the posterior is. (Between two decisions momenta are
# half a step ahead: what that changes is of the order of the step.)
PLAUSIBLE = 20.0
BLOCK = 25  # gradient passes, at most, that nothing can interrupt
LEAST_TRANSITIONS = 40  # of a burn-in: while the step size is unknown, trajectories are cut to allow them
# Shares of the burn-in: find ε; and the spread of every weight; then ε again, in units of that spread.
PARTS = (0.3, 0.4, 0.3)
BETWEEN_LOOKS = 5  # passes from one state that the spread is measured by to the next

Start = Literal["optimum", "prior"]
Scale = Literal["variances", "prior"]


@dataclass(frozen=True)
class HMC(Method):
    """Leapfrog along ∇ℓ, ℓ(θ) = (Σ_n log p(y_n | x_n, θ) − Σ_j θ_j²/(2 s²))/T, then Metropolis (Neal 2011).

    An epoch is a gradient pass over the whole data set.
    """

    name: ClassVar[str] = "hmc"
    summary: ClassVar[str] = "full-batch Hamiltonian Monte Carlo, the reference"
    kept: ClassVar[str] = "for each sample of a chain"
    cost: ClassVar[str] = (
        "num_chains member-epochs a gradient pass; thousands of passes; predicts with num_chains × "
        "num_samples passes"
    )
    best_epoch: ClassVar[str] = "none: a sampler keeps what it visits, and choosing would no longer sample"
    reference: ClassVar[bool] = True
    tempered: ClassVar[bool] = True

    num_chains: int = option(3, "run side by side, each with a step size of its own")
    prior_std: PriorStd = option(0.3, PRIOR_STD)
    num_samples: int = option(
        100,
        "states kept of each chain, spread evenly over the passes after burn-in (thinning follows from it)",
    )
    burn_in: float = option(
        0.3, "share of the passes in which step size and scale are found and nothing is kept"
    )
    start: Start = option(
        "optimum",
        'where chains begin: `"optimum"`, what `descent` epochs reach from the network\'s initialisation; '
        '`"prior"`, a draw from the prior, so that nothing but the sampler finds the posterior',
    )
    descent: int = option(
        100,
        "epochs at the beginning of burn-in, at most a third of it, in which minibatch descent brings each "
        "chain near a mode; 0 begins at the network's initialisation",
    )
    optimizer: Optimizer = option(Optimizer("Adam", lr=3e-3), f"of the descent: {OPTIMIZER}")
    target_acceptance: float = option(
        0.8, "rate of acceptance that the step size is found for (dual averaging, in each chain)"
    )
    scale: Scale = option(
        "variances",
        'units of each weight, the root of the inverse mass matrix\'s diagonal: `"variances"`, its spread in '
        'its own chain, found in burn-in if that has 134 passes beside the descent; `"prior"`, the prior\'s '
        "width s",
    )
    step_size: float | None = option(
        None, "where the search for it begins, in units of s; None takes it from the number of observations"
    )
    trajectory: float | None = option(
        None,
        "length in units of the scale (of the prior's widths until the spread is known); None means a "
        "quarter of the period that a Gaussian of this scale has: π/2, and (π/2)√T in units of the prior",
    )
    jitter: float = option(
        0.2, "trajectories vary by this share, so that no direction's period fits into them"
    )
    temperature: float = option(1.0, "T; below 1 the posterior is sharpened")

    def __post_init__(self) -> None:
        require_whole("num_chains", self.num_chains)
        require_whole("num_samples", self.num_samples)
        require_whole("descent", self.descent, least=0)
        check_optimizer(self.optimizer)
        check_prior_std(self.prior_std)
        for name, known in (("start", get_args(Start)), ("scale", get_args(Scale))):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        for name in ("step_size", "trajectory", "temperature"):
            if (value := getattr(self, name)) is not None:
                require_positive(name, value)
        for name in ("burn_in", "target_acceptance"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"{name} lies between 0 and 1, got {getattr(self, name)!r}.")
        if not 0 <= self.jitter < 1:
            raise InputError(f"jitter must be at least 0 and below 1, got {self.jitter!r}.")

    @property
    def undivided(self) -> str:
        return "hmc moves by the gradient of all data: give each process chains of its own (engine=...)."

    @property
    def total_chains(self) -> int:
        return self.num_chains

    def trajectory_length(self, scale: Scale) -> float:
        """A quarter of the period that a weight of this scale has, unless it is given."""
        if self.trajectory is not None:
            return self.trajectory
        return math.pi / 2 * (math.sqrt(self.temperature) if scale == "prior" else 1.0)

    @property
    def chain_members(self) -> int | None:
        return self.num_samples

    def lengths(self, epochs: int) -> tuple[int, int, int]:
        """Passes of the burn-in, samples kept, passes between two of them."""
        if epochs < 2:
            raise InputError(f"hmc needs at least 2 gradient passes, got {epochs}; thousands are usual.")
        rest = epochs - max(1, round(self.burn_in * epochs))
        kept = min(self.num_samples, max(1, rest))
        between = max(1, rest // kept)
        between -= between % num_blocks(between, BLOCK)
        return epochs - kept * between, kept, between

    def kept_samples(self, epochs: int) -> int:
        """States that each chain keeps of so many gradient passes."""
        return self.lengths(epochs)[1]

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        members = problem.initial_members(generator)
        stds = problem.prior_stds(self.prior_std)
        weights = {name: members.stacked[name] for name in stds}
        if self.start == "prior" and not problem.initial:
            for name, drawn in draw_prior(stds, weights, generator).items():
                weights[name].copy_(drawn)
        position = as_vectors(weights)
        widths = prior_widths(stds, weights)
        # A step of half the width that one weight would have, were all of the data about it alone.
        widest = float(widths.max()) * math.sqrt(problem.num_observations)
        step = torch.tensor([self.step_size or 0.5 / widest], dtype=torch.float64, device=position.device)
        zero = torch.zeros_like(step)
        return State(
            members,
            own={
                **{name: torch.zeros_like(position) for name in ("momentum", "gradient", "kept_gradient")},
                "kept": position,
                "scale": widths[None].to(position.dtype),
                "spread": Spread.begin(position),
            },
            common={
                "step": DualAveraging.begin(step),
                "trajectory": zero + self.trajectory_length("prior"),
                **{name: zero.clone() for name in ("log_density", "kept_log_density", "energy")},
                **{name: zero.clone() for name in ("left", "passes", "blocks", *COUNTS)},
                **{name: zero.clone() for name in ("descent", "rescaled")},
                "given": zero + bool(problem.initial),
            },
        )

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        check_samplable(problem, self.name)
        stds = problem.prior_stds(self.prior_std)
        burn_in, kept, between = self.lengths(epochs)
        descent = 0 if self.start == "prior" else min(self.descent, burn_in // 3)
        burn_in -= descent
        blocks = num_blocks(between, BLOCK)
        likelihood = problem.objective()  # the prior's part of the gradient is known in closed form

        def passes(name: str, number: int, size: int, rule: _Rule, **hooks: Any) -> Phase:
            def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
                return _Chains(self, stds, state, batches, objective, rule).run(size)

            return Phase(name, number, likelihood, step, batches="full", cost=size, **hooks)

        def burning(number: int, enter: Hook = nothing, *, spread: bool = False) -> list[Phase]:
            """A part of the burn-in, of so many passes."""
            rule = _Rule(longest=max(1, burn_in // LEAST_TRANSITIONS), spread=spread)
            return [
                passes("burn_in", count, size, rule, enter=enter if place == 0 else nothing)
                for place, (count, size) in enumerate(in_blocks(number, BLOCK))
            ]

        def begin_again(state: State) -> None:
            """Take the averaged step size, and go on from the last state that was accepted."""
            common = state.common
            common["step"]["log_step"].copy_(common["step"]["log_average"])
            for name in ("left", *COUNTS):
                common[name].zero_()
            state.own["gradient"].copy_(state.own["kept_gradient"])
            common["log_density"].copy_(common["kept_log_density"])
            _put_back(state, stds)

        def rescale(state: State) -> None:
            """Measure weights by their own spread; the step keeps its length, and is sought anew."""
            begin_again(state)
            step, everyone = state.common["step"], torch.ones_like(state.common["left"], dtype=torch.bool)
            shorter = Spread.rescale(state.own["scale"], state.own["spread"], everyone)
            for name, value in DualAveraging.begin(step["log_step"].exp() * shorter).items():
                step[name].copy_(value)
            state.common["trajectory"].fill_(self.trajectory_length("variances"))
            state.common["rescaled"].fill_(1.0)

        def keep(state: State) -> None:
            """Every so many passes the last state that was accepted is a sample."""
            state.common["blocks"] += 1
            if int(state.common["blocks"][0]) % blocks == 0:
                weights = {name: state.members.stacked[name] for name in stds}
                kept = {n: t.to(weights[n].dtype) for n, t in views_of(state.own["kept"], weights).items()}
                state.finished.append(replace(state.members, stacked=state.members.stacked | kept))

        posterior = problem.objective(gaussian_prior(stds))
        phases = []
        if descent:
            phases.append(
                Phase(
                    "descent",
                    descent,
                    posterior,
                    optimizers={"all": Over(self.optimizer)},
                    leave=lambda state: state.common["descent"].fill_(descent),
                )
            )
        parts = [round(share * burn_in) for share in PARTS[:2]]
        if self.scale == "prior" or min(parts) < LEAST_TRANSITIONS:  # too few to measure a spread by
            phases += burning(burn_in)
        else:
            phases += burning(parts[0])
            phases += burning(parts[1], begin_again, spread=True)
            phases += burning(burn_in - sum(parts), rescale)
        sampling = kept * blocks, between // blocks, _Rule()
        return [*phases, passes("sample", *sampling, enter=begin_again, end_epoch=keep)]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """How the chain went: what decides whether it may be called a reference."""
        transitions, accepted, divergences = (float(state.common[name]) for name in COUNTS)
        step = math.exp(float(state.common["step"]["log_step"]))
        acceptance = accepted / transitions if transitions else None
        if acceptance is not None and transitions >= 10 and acceptance < 0.5:
            warnings.warn(
                f"A chain of hmc accepts {acceptance:.0%} of its proposals ({divergences:.0f} of "
                f"{transitions:.0f} trajectories diverge): its samples are not to be trusted. Raise "
                "target_acceptance, or give it more passes to find a smaller step.",
                stacklevel=2,
            )
        return {
            "acceptance": acceptance,
            "divergences": int(divergences),
            "transitions": int(transitions),
            "step_size": step,
            "leapfrog_steps": math.ceil(float(state.common["trajectory"]) / step),
            "scale": "variances" if bool(state.common["rescaled"]) else "prior",
            "start": start_in_words(
                bool(state.common["given"]), int(state.common["descent"]), from_prior=self.start == "prior"
            ),
        }

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(2, round(member_epochs / self.num_chains))


COUNTS = ("transitions", "accepted", "divergences")  # of a chain, since burn-in; accepted: sum of the rates


@dataclass(frozen=True)
class _Rule:
    """What happens beside the steps.

    longest: leaps of a trajectory while the step size is sought; None: it is fixed. spread: measure that of
    every weight.
    """

    longest: int | None = None
    spread: bool = False


class _Chains:
    """All chains at once, θ and p as vectors [G, D]; momenta are in units of the weights' scale.

    Where a trajectory ends, its chain decides and begins the next. Chains have step sizes of their own and
    are at different places of their trajectories: numbers are [G], and ``left`` counts the steps to each
    chain's next decision.
    """

    def __init__(
        self,
        method: HMC,
        stds: Mapping[str, float],
        state: State,
        batches: Sequence[Batch],
        objective: Objective,
        rule: _Rule,
    ) -> None:
        self.method, self.state, self.common, self.rule = method, state, state.common, rule
        self.density = LogDensity(stds, state, batches, objective, method.temperature)
        self.position, self.scale = self.density.position, state.own["scale"]
        self.momentum, self.gradient = state.own["momentum"], state.own["gradient"]

    def run(self, num_passes: int) -> Tensor:
        """Take so many gradients of every chain; returns its mean loss at the last place, [G]."""
        left, losses = self.common["left"], None
        everywhere = torch.ones_like(left, dtype=torch.bool)
        if not bool(self.common["passes"].any()):
            losses = self._look()
            self.common["log_density"].copy_(self.density.value(losses))
            self._keep(everywhere)
            self.common["passes"] += 1
            num_passes -= 1
        while num_passes:
            self._begin(left == 0)
            step = self.common["step"]["log_step"].exp()
            pace = self._pace(step)
            stretch = min(num_passes, int(left.min()))
            if self.rule.spread:  # on a clock of its own: nothing depends on who runs beside it
                stretch = min(stretch, BETWEEN_LOOKS - int(self.common["passes"][0]) % BETWEEN_LOOKS)
            left -= stretch
            self.common["passes"] += stretch
            num_passes -= stretch
            ending = left == 0
            kick = self._pace(torch.where(ending, step / 2, step))  # the last of a trajectory is half of one
            for place in range(stretch):
                paces = (pace, pace if place < stretch - 1 else kick)
                losses = self.density.advance(_leap, self.momentum, self.gradient, then=paces)
            assert losses is not None
            if self.rule.spread and int(self.common["passes"][0]) % BETWEEN_LOOKS == 0:
                self._measure_spread(losses)
            self._decide(ending, losses)
        self.density.write_back()
        assert losses is not None
        return losses

    def _measure_spread(self, losses: Tensor) -> None:
        """Take in states on their way, where they have about the energy that the way began with."""
        change = self._kinetic() - self.density.value(losses) - self.common["energy"]
        Spread.update(self.state.own["spread"], self.position, (change.abs() < PLAUSIBLE).double())

    def _pace(self, step: Tensor) -> Tensor:
        return step[:, None].to(self.scale.dtype) * self.scale

    def _look(self) -> Tensor:
        """The gradient at the present place; returns the mean losses of the data, [G]."""
        losses, gradient = self.density.look()
        self.gradient.copy_(gradient)
        return losses

    def _kinetic(self) -> Tensor:
        return self.momentum.double().square().sum(1) / 2

    def _begin(self, where: Tensor) -> None:
        """New momenta p ~ N(0, 1), the energy to conserve, the number of steps, and half a kick."""
        if not bool(where.any()):
            return
        factors = torch.ones(len(where), dtype=torch.float64)
        for row in where.nonzero().flatten().tolist():
            one, generator = self.momentum[row], self.state.generators[row]
            one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype))
            drawn = torch.rand((), generator=generator, dtype=torch.float64)
            factors[row] = 1 + self.method.jitter * (2 * drawn - 1)
        step = self.common["step"]["log_step"].exp()
        steps = (self.common["trajectory"] * factors.to(step.device) / step).ceil()
        steps = steps.clamp(min=1, max=self.rule.longest)
        _assign(self.common["energy"], self._kinetic() - self.common["log_density"], where)
        _assign(self.common["left"], steps, where)
        self.momentum.addcmul_(self._pace(torch.where(where, step / 2, 0.0)), self.gradient)

    def _decide(self, ending: Tensor, losses: Tensor) -> None:
        """Metropolis' rule for the chains whose trajectories end here."""
        if not bool(ending.any()):
            return
        _assign(self.common["log_density"], self.density.value(losses), ending)
        change = self._kinetic() - self.common["log_density"] - self.common["energy"]
        change = change.nan_to_num(torch.inf, torch.inf, torch.inf)
        rate = (-change).clamp(max=0).exp()
        drawn = torch.ones_like(rate)
        for row in ending.nonzero().flatten().tolist():
            drawn[row] = torch.rand((), generator=self.state.generators[row], dtype=torch.float64)
        accepted = ending & (drawn < rate)
        self._keep(accepted)
        self._return_to_kept(ending & ~accepted)
        for name, amount in zip(COUNTS, (1.0, rate, change > DIVERGED), strict=True):
            self.common[name] += torch.where(ending, amount, 0.0)
        if self.rule.longest is not None:
            adaptation = DualAveraging(self.method.target_acceptance)
            adaptation.update(self.common["step"], rate, ending)

    def _keep(self, where: Tensor) -> None:
        _assign(self.state.own["kept"], self.position, where)
        _assign(self.state.own["kept_gradient"], self.gradient, where)
        _assign(self.common["kept_log_density"], self.common["log_density"], where)

    def _return_to_kept(self, where: Tensor) -> None:
        _assign(self.position, self.state.own["kept"], where)
        _assign(self.gradient, self.state.own["kept_gradient"], where)
        _assign(self.common["log_density"], self.common["kept_log_density"], where)


def _leap(density: LogDensity, momentum: Tensor, gradient: Tensor, pace: Tensor, kick: Tensor) -> Tensor:
    """A step of the leapfrog; returns the mean losses of the data at the new place, [G]."""
    density.position.addcmul_(pace, momentum)  # θ ← θ + ε s p
    losses, found = density.look()
    gradient.copy_(found)
    momentum.addcmul_(kick, gradient)  # p ← p + ε s ∇ℓ(θ)
    return losses


def _put_back(state: State, stds: Mapping[str, float]) -> None:
    """Give the members the weights of the last states that were accepted."""
    weights = {name: state.members.stacked[name] for name in stds}
    for name, kept in views_of(state.own["kept"], weights).items():
        weights[name].copy_(kept)


def _assign(target: Tensor, source: Tensor, where: Tensor) -> None:
    """Give some rows [G] of a tensor other values."""
    if bool(where.all()):
        target.copy_(source)
    elif bool(where.any()):
        rows = where.reshape(-1, *[1] * (target.ndim - 1))
        target.copy_(torch.where(rows, source, target))
