"""Full-batch Hamiltonian Monte Carlo: samples of the posterior itself, to judge everything else by."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polymode.errors import InputError, require_positive, require_whole
from polymode.networks.surgery import batch_norms, random_layers
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.samplers import DualAveraging, as_vectors, views_of
from polymode.training.contract import (
    OPTIMIZER,
    PRIOR_STD,
    Batch,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_optimizer,
)
from polymode.weights.priors import PriorStd, check_prior_std, gaussian_prior

# A trajectory whose energy has changed by more than this has left the level set it should follow.
DIVERGED = 1000.0
BLOCK = 25  # gradient passes, at most, that nothing can interrupt
LEAST_TRANSITIONS = 40  # of a burn-in: while the step size is unknown, trajectories are cut to allow them


@dataclass(frozen=True)
class HMC(Method):
    """Leapfrog along −∇U, U(θ) = (−Σ_n log p(y_n | x_n, θ) + Σ_j θ_j²/(2 s²))/T, then Metropolis (Neal 2011).

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

    num_chains: int = option(
        3, "run side by side; those on one data set share step size and number of leapfrog steps"
    )
    prior_std: PriorStd = option(0.3, f"{PRIOR_STD}. Momenta are in units of s")
    num_samples: int = option(
        100,
        "states kept of each chain, spread evenly over the passes after burn-in (thinning follows from it)",
    )
    burn_in: float = option(0.3, "share of the passes in which the step size is found and nothing is kept")
    descent: int = option(
        100,
        "epochs at the beginning of burn-in, at most a third of it, in which minibatch descent brings each "
        "chain from the network's initialisation near a mode",
    )
    optimizer: Optimizer = option(Optimizer("Adam", lr=3e-3), f"of the descent: {OPTIMIZER}")
    target_acceptance: float = option(
        0.8, "rate of acceptance that the step size is found for (dual averaging over the mean of the chains)"
    )
    step_size: float | None = option(
        None, "where the search for it begins, in units of s; None takes it from the number of observations"
    )
    trajectory: float | None = option(
        None, "length in units of s; None means (π/2)√T, a quarter of the prior's period"
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
        for name in ("step_size", "trajectory", "temperature"):
            if (value := getattr(self, name)) is not None:
                require_positive(name, value)
        for name in ("burn_in", "target_acceptance"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"{name} lies between 0 and 1, got {getattr(self, name)!r}.")
        if not 0 <= self.jitter < 1:
            raise InputError(f"jitter must be at least 0 and below 1, got {self.jitter!r}.")

    @property
    def total_chains(self) -> int:
        return self.num_chains

    @property
    def trajectory_length(self) -> float:
        """In units of s: a quarter of the period that a weight has under the prior alone."""
        return math.pi / 2 * math.sqrt(self.temperature) if self.trajectory is None else self.trajectory

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
        between -= between % _blocks(between)
        return epochs - kept * between, kept, between

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        members = problem.initial_members(generator)
        stds = problem.prior_stds(self.prior_std)
        position = as_vectors({name: members.stacked[name] for name in stds})
        moving = {name: torch.zeros_like(position) for name in ("momentum", "force", "kept_force")}
        # A step of half the width that one weight would have, were all of the data about it alone.
        widest = max(stds.values()) * math.sqrt(problem.num_observations)
        step = position.new_tensor([self.step_size or 0.5 / widest], dtype=torch.float64)
        zero = torch.zeros_like(step)
        return State(
            members,
            own=moving | {"kept": position},
            common={
                "step": DualAveraging.begin(step),
                **{name: zero.clone() for name in ("potential", "kept_potential", "energy")},
                **{name: zero.clone() for name in ("left", "passes", "blocks", *COUNTS)},
            },
        )

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        _check_deterministic(problem)
        stds = problem.prior_stds(self.prior_std)
        burn_in, kept, between = self.lengths(epochs)
        descent = min(self.descent, burn_in // 3)
        burn_in -= descent
        longest = max(1, burn_in // LEAST_TRANSITIONS)
        blocks = _blocks(between)
        likelihood = problem.objective()  # the prior's part of the force is known in closed form

        def passes(name: str, number: int, size: int, *, adapt: bool, **hooks: Any) -> Phase:
            def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
                chains = _Chains(self, stds, state, batches, objective, longest if adapt else None)
                return chains.run(size)

            return Phase(name, number, likelihood, step, batches="full", cost=size, **hooks)

        def settle(state: State) -> None:
            """Take the averaged step size, and begin again at the last state that was accepted."""
            common = state.common
            common["step"]["log_step"].copy_(common["step"]["log_average"])
            for name in ("left", *COUNTS):
                common[name].zero_()
            state.own["force"].copy_(state.own["kept_force"])
            common["potential"].copy_(common["kept_potential"])
            _put_back(state, stds)

        def keep(state: State) -> None:
            """Every so many passes the last state that was accepted is a sample."""
            state.common["blocks"] += 1
            if int(state.common["blocks"][0]) % blocks == 0:
                weights = {name: state.members.stacked[name] for name in stds}
                kept = {n: t.to(weights[n].dtype) for n, t in views_of(state.own["kept"], weights).items()}
                state.finished.append(replace(state.members, stacked=state.members.stacked | kept))

        posterior = problem.objective(gaussian_prior(stds))
        descending = Phase("descent", descent, posterior, optimizers={"all": Over(self.optimizer)})
        whole, rest = divmod(burn_in, BLOCK)
        burning = [descending] if descent else []
        burning += [passes("burn_in", whole, BLOCK, adapt=True)] if whole else []
        burning += [passes("burn_in", 1, rest, adapt=True)] if rest else []
        sampling = passes(
            "sample", kept * blocks, between // blocks, adapt=False, enter=settle, end_epoch=keep
        )
        return [*burning, sampling]

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
            "leapfrog_steps": math.ceil(self.trajectory_length / step),
        }

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(2, round(member_epochs / self.num_chains))


def _blocks(passes: int) -> int:
    """Into how many stretches of equal length some passes are divided."""
    return -(-passes // BLOCK)


COUNTS = ("transitions", "accepted", "divergences")  # of a chain, since burn-in; accepted: sum of the rates


class _Chains:
    """All chains at once, θ and p as vectors [G, D]; momenta are in units of the prior's widths s.

    Where a trajectory ends, its chain decides and begins the next. Chains on different data sets have their
    own step sizes and are at different places of their trajectories: numbers are [G], and ``left`` counts the
    steps to each chain's next decision.
    """

    def __init__(
        self,
        method: HMC,
        stds: Mapping[str, float],
        state: State,
        batches: Sequence[Batch],
        objective: Objective,
        longest: int | None,
    ) -> None:
        self.method, self.stds, self.state, self.longest = method, stds, state, longest
        self.batches, self.objective, self.common = batches, objective, state.common
        weights = {name: state.members.stacked[name] for name in stds}
        self.position = as_vectors(weights)
        self.momentum, self.force = state.own["momentum"], state.own["force"]
        self.weights, self.views = weights, views_of(self.position, weights)
        # Views move with the vectors; weights of several types are copied after every drift.
        self.copied = any(view.dtype != weights[name].dtype for name, view in self.views.items())
        moving = state.members.stacked | ({} if self.copied else self.views)
        self.moving = replace(state, members=replace(state.members, stacked=moving))
        self.counts = objective.observations(batches, state)
        self.num_observations = self.counts.sum(0)
        sizes = torch.tensor([tensor[0].numel() for tensor in weights.values()])
        widths = torch.tensor(list(stds.values()), dtype=torch.float64).repeat_interleave(sizes)
        self.widths = widths.to(self.position.device)
        # f = −s ∇U = −(θ/s + s N ∇L)/T
        of_data = -self.widths * self.num_observations[:, None] / method.temperature
        self.of_prior = (-1 / (self.widths * method.temperature)).to(self.position.dtype)
        self.of_data = of_data.to(self.position.dtype)

    def run(self, num_passes: int) -> Tensor:
        """Take so many gradients of every chain; returns its mean loss at the last place, [G]."""
        left, losses = self.common["left"], None
        everywhere = torch.ones_like(left, dtype=torch.bool)
        if not bool(self.common["passes"].any()):
            losses = self._look()
            self.common["potential"].copy_(self._potential(losses))
            self._keep(everywhere)
            self.common["passes"] += 1
            num_passes -= 1
        while num_passes:
            self._begin(left == 0)
            step = self.common["step"]["log_step"].exp()
            pace = (step[:, None] * self.widths).to(self.position.dtype)
            stretch = min(num_passes, int(left.min()))
            for _ in range(stretch - 1):
                self._drift(pace)  # θ ← θ + ε s p
                self._look()  # f ← −s ∇U(θ)
                self._kick(step)  # p ← p + ε f
            self._drift(pace)
            losses = self._look()
            left -= stretch
            self.common["passes"] += stretch
            num_passes -= stretch
            ending = left == 0
            self._kick(torch.where(ending, step / 2, step))  # the last kick of a trajectory is half of one
            self._decide(ending, losses)
        self._write_back()
        assert losses is not None
        return losses

    def _drift(self, pace: Tensor) -> None:
        self.position.addcmul_(pace, self.momentum)
        if self.copied:
            self._write_back()

    def _write_back(self) -> None:
        for name, view in self.views.items():
            self.weights[name].copy_(view)

    def _look(self) -> Tensor:
        """The force at the present place; returns the mean losses of the data, [G]."""
        losses, gradients = self.objective.means(self.moving, self.batches, self.counts)
        torch.mul(self.position, self.of_prior, out=self.force)
        self.force.addcmul_(self.of_data, as_vectors({name: gradients[name] for name in self.stds}))
        return losses

    def _kick(self, step: Tensor) -> None:
        self.momentum.addcmul_(step[:, None].to(self.force.dtype), self.force)

    def _potential(self, losses: Tensor) -> Tensor:
        """U(θ) = (N L + Σ θ²/(2 s²))/T, in double precision: energies are differences of large numbers."""
        of_prior = (self.position.double() / self.widths).square().sum(1) / 2
        return (losses * self.num_observations + of_prior) / self.method.temperature

    def _kinetic(self) -> Tensor:
        return self.momentum.double().square().sum(1) / 2

    def _begin(self, where: Tensor) -> None:
        """New momenta p ~ N(0, 1), the energy to conserve, the number of steps, and half a kick."""
        if not bool(where.any()):
            return
        for row in where.nonzero().flatten().tolist():
            one = self.momentum[row]
            one.copy_(torch.randn(one.shape, generator=self.state.generators[row], dtype=one.dtype))
        step = self.common["step"]["log_step"].exp()
        steps = (self.method.trajectory_length * self._shared_jitter(where) / step).ceil()
        steps = steps.clamp(min=1, max=self.longest)
        _assign(self.common["energy"], self.common["potential"] + self._kinetic(), where)
        _assign(self.common["left"], steps, where)
        self._kick(torch.where(where, step / 2, 0.0))

    def _shared_jitter(self, where: Tensor) -> Tensor:
        """Factors of the trajectories' lengths: one for all chains on a data set, from its first one."""
        factors = torch.ones(len(where), dtype=torch.float64)
        data_sets = self.state.members.labels[:, 0].tolist()
        for row in where.nonzero().flatten().tolist():
            first = data_sets.index(data_sets[row])
            if row == first:
                drawn = torch.rand((), generator=self.state.generators[row], dtype=torch.float64)
                factors[row] = 1 + self.method.jitter * (2 * drawn - 1)
            factors[row] = factors[first]
        return factors.to(where.device)

    def _decide(self, ending: Tensor, losses: Tensor) -> None:
        """Metropolis' rule for the chains whose trajectories end here."""
        if not bool(ending.any()):
            return
        _assign(self.common["potential"], self._potential(losses), ending)
        change = self.common["potential"] + self._kinetic() - self.common["energy"]
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
        if self.longest is not None:
            adaptation = DualAveraging(self.method.target_acceptance)
            adaptation.update(self.common["step"], self._mean_rate(rate), ending)

    def _mean_rate(self, rate: Tensor) -> Tensor:
        """The mean over the chains on each data set, to the same bits: they share one step size."""
        means = torch.empty_like(rate)
        data_sets = self.state.members.labels[:, 0].to(rate.device)
        for data_set in data_sets.unique():
            means[data_sets == data_set] = rate[data_sets == data_set].mean()
        return means

    def _keep(self, where: Tensor) -> None:
        _assign(self.state.own["kept"], self.position, where)
        _assign(self.state.own["kept_force"], self.force, where)
        _assign(self.common["kept_potential"], self.common["potential"], where)

    def _return_to_kept(self, where: Tensor) -> None:
        _assign(self.position, self.state.own["kept"], where)
        _assign(self.force, self.state.own["kept_force"], where)
        _assign(self.common["potential"], self.common["kept_potential"], where)


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


def _check_deterministic(problem: Problem) -> None:
    """Refuse networks whose likelihood is not one function of the weights."""
    network = problem.network
    normalising = [name for name in batch_norms(network.module) if name not in network.always_eval]
    if normalising:
        raise InputError(
            f"hmc cannot sample a network with BatchNorm ({normalising[0]!r}): its output depends on which "
            "examples are in the batch, so the likelihood is no product over examples. Use a network with "
            "LayerNorm, GroupNorm or filter response normalisation (resnet20_frn), or keep the layer in "
            "eval()."
        )
    if problem.execution.precision == "bfloat16":
        raise InputError("hmc needs gradients of one smooth function: use precision 'full' or 'double'.")
    random = [name for name in random_layers(network.module) if name not in network.always_eval]
    if random or network.draws_globally:
        where = f" ({random[0]!r})" if random else ""
        raise InputError(
            f"hmc cannot sample a network that is random itself, such as one with dropout{where}: remove "
            "the layer, or set its probability to 0."
        )
