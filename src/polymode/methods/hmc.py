"""Full-batch Hamiltonian Monte Carlo: samples of the posterior itself, to judge everything else by."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polymode.errors import InputError, require_positive, require_whole
from polymode.networks.members import Tensors
from polymode.networks.surgery import batch_norms, random_layers
from polymode.posteriors import Particles, Posterior
from polymode.samplers import DualAveraging
from polymode.schedules import Constant
from polymode.training.contract import (
    Batch,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_options,
    under,
)
from polymode.weights.priors import PriorStd, check_prior_std, gaussian_prior

# A trajectory whose energy has changed by more than this has left the level set it should follow.
DIVERGED = 1000.0
BLOCK = 25  # gradient passes, at most, that nothing can interrupt
LEAST_TRANSITIONS = 40  # of a burn-in: while the step size is unknown, trajectories are cut to allow them


@dataclass(frozen=True)
class HMC(Method):
    """Leapfrog along −∇U, U(θ) = (−Σ_n log p(y_n | x_n, θ) + Σ_j θ_j²/(2 s²))/T, then Metropolis (Neal 2011).

    An epoch is a gradient pass over the whole data set. num_chains: run side by side; those on one data set
    share step size and number of leapfrog steps. prior_std: s, one number, numbers by pattern of the
    weights' names, or ``priors.FanIn``; momenta are in units of it. num_samples: states kept of each chain,
    spread evenly over the passes after burn-in. burn_in: share of the passes in which the step size is
    found and nothing is kept. descent: passes at its beginning in which minibatch descent brings each chain
    from the network's initialisation near a mode, at most a third of burn-in. optimizer: of the descent.
    target_acceptance: the rate that the step size is found for. step_size: where the search begins, in
    units of s; None takes it from the number of observations. trajectory: length in units of s; None means
    (π/2)·√T, a quarter of the prior's period. jitter: trajectories vary by this share, so that no
    direction's period fits into them. temperature: T; below 1 the posterior
    is sharpened.
    """

    name: ClassVar[str] = "hmc"
    summary: ClassVar[str] = "full-batch Hamiltonian Monte Carlo, the reference"
    kept: ClassVar[str] = "for each sample of a chain"
    cost: ClassVar[str] = (
        "chains member-epochs a gradient pass; thousands of passes; predicts with chains × samples passes"
    )
    reference: ClassVar[bool] = True

    num_chains: int = 3
    prior_std: PriorStd = 0.3
    num_samples: int = 100
    burn_in: float = 0.3
    descent: int = 100
    optimizer: Optimizer = Optimizer("Adam", lr=3e-3)
    target_acceptance: float = 0.8
    step_size: float | None = None
    trajectory: float | None = None
    jitter: float = 0.2
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_whole("num_chains", self.num_chains)
        require_whole("num_samples", self.num_samples)
        require_whole("descent", self.descent, least=0)
        check_options(self.optimizer, Constant(), "last")
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
        weights = {name: members.stacked[name] for name in stds}
        own = {f"kept.{name}": tensor.clone() for name, tensor in weights.items()}
        for kind in ("momentum", "force", "kept_force"):
            own |= {f"{kind}.{name}": torch.zeros_like(tensor) for name, tensor in weights.items()}
        # A step of half the width that one weight would have, were all of the data about it alone.
        widest = max(stds.values()) * math.sqrt(problem.num_observations)
        step = torch.tensor(
            [self.step_size or 0.5 / widest], dtype=torch.float64, device=problem.execution.device
        )
        counters = ("passes", "blocks", "left", "energy", "potential", "kept_potential", *COUNTS)
        zero = torch.zeros_like(step)
        return State(members, own, DualAveraging.begin(step) | {name: zero.clone() for name in counters})

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        _check_deterministic(problem)
        stds = problem.prior_stds(self.prior_std)
        burn_in, kept, between = self.lengths(epochs)
        descent = min(self.descent, burn_in // 3)
        burn_in -= descent
        longest = max(1, burn_in // LEAST_TRANSITIONS)
        likelihood = problem.objective()  # the prior's part of the force is known in closed form

        def passes(name: str, number: int, size: int, adapt: bool, **hooks: Any) -> Phase:
            def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
                leapfrog = _Leapfrog(self, stds, state, batches, objective, longest if adapt else None)
                return leapfrog.run(size)

            return Phase(name, number, likelihood, step, batches="full", cost=size, **hooks)

        def settle(state: State) -> None:
            """Take the averaged step size, and begin again at the last state that was accepted."""
            state.common["log_step"].copy_(state.common["log_average"])
            for name in ("left", *COUNTS):
                state.common[name].zero_()
            _return_to_kept(state, torch.ones_like(state.common["left"], dtype=torch.bool))

        blocks = _blocks(between)

        def keep(state: State) -> None:
            state.common["blocks"] += 1
            if int(state.common["blocks"][0]) % blocks == 0:
                now = state.members.stacked | under("kept.", state.own)
                state.finished.append(replace(state.members, stacked=now))

        posterior = problem.objective(gaussian_prior(stds))
        descending = Phase("descent", descent, posterior, optimizers={"all": Over(self.optimizer)})
        whole, rest = divmod(burn_in, BLOCK)
        burning = [passes("burn_in", whole, BLOCK, adapt=True)] if whole else []
        burning += [passes("burn_in", 1, rest, adapt=True)] if rest else []
        burning = [descending, *burning] if descent else burning
        hooks = {"enter": settle, "end_epoch": keep}
        sampling = passes("sample", kept * blocks, between // blocks, adapt=False, **hooks)
        return [*burning, sampling]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """How the chain went: what decides whether it may be called a reference."""
        found = {name: float(state.common[name]) for name in (*COUNTS, "log_step")}
        step = math.exp(found["log_step"])
        transitions = found["transitions"]
        acceptance = found["accepted"] / transitions if transitions else None
        if acceptance is not None and transitions >= 10 and acceptance < 0.5:
            warnings.warn(
                f"A chain of hmc accepts {acceptance:.0%} of its proposals ({found['divergences']:.0f} of "
                f"{transitions:.0f} trajectories diverge): its samples are not to be trusted. Raise "
                "target_acceptance, or give it more passes to find a smaller step.",
                stacklevel=2,
            )
        return {
            "acceptance": acceptance,
            "divergences": int(found["divergences"]),
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


class _Leapfrog:
    """Passes of all chains at once; where a trajectory ends, its chain decides and begins the next.

    Chains on different data sets have their own step sizes and are at different places of their
    trajectories: numbers are [G], and ``left`` counts the steps to each chain's next decision.
    """

    def __init__(
        self,
        method: HMC,
        stds: dict[str, float],
        state: State,
        batches: Sequence[Batch],
        objective: Objective,
        longest: int | None,
    ) -> None:
        self.method, self.stds, self.state = method, stds, state
        self.batches, self.objective, self.longest = batches, objective, longest
        self.counts = objective.observations(batches, state)
        self.num_observations = self.counts.sum(0)
        self.common = state.common
        self.weights = {name: state.members.stacked[name] for name in stds}
        self.momentum, self.force = under("momentum.", state.own), under("force.", state.own)
        self.everywhere = torch.ones_like(self.common["left"], dtype=torch.bool)

    def run(self, num_passes: int) -> Tensor:
        """Take so many gradients of every chain; returns its mean loss at the last place, [G]."""
        losses = None
        if not bool(self.common["passes"].any()):
            losses = self._arrive(self.everywhere)
            self._keep(self.everywhere)
            self.common["passes"] += 1
            num_passes -= 1
        while num_passes:
            self._begin(self.common["left"] == 0)
            stretch = min(num_passes, int(self.common["left"].min()))
            step = self.common["log_step"].exp()
            drift = {name: _rows(step * std, self.momentum[name]) for name, std in self.stds.items()}
            self._whole_steps(step, drift, stretch - 1)
            self.common["left"] -= stretch
            self.common["passes"] += stretch
            num_passes -= stretch
            ending = self.common["left"] == 0
            self._drift(drift)
            losses = self._arrive(ending)
            self._kick(torch.where(ending, step / 2, step))  # the last kick of a trajectory is half of one
            self._decide(ending)
        assert losses is not None
        return losses

    def _whole_steps(self, step: Tensor, drift: Tensors, number: int) -> None:
        """θ ← θ + ε s p, then p ← p − ε s ∇U(θ), so often; most of the time goes here."""
        temperature = self.method.temperature
        of_prior, of_data = (
            {name: _rows(factor(std), self.momentum[name]) for name, std in self.stds.items()}
            for factor in (
                lambda std: -step / (std * temperature),
                lambda std: -step * std * self.num_observations / temperature,
            )
        )
        for _ in range(number):
            self._drift(drift)
            _, gradients = self.objective.means(self.state, self.batches, self.counts)
            for name, momentum in self.momentum.items():
                momentum.addcmul_(of_prior[name], self.weights[name]).addcmul_(of_data[name], gradients[name])

    def _drift(self, factors: Tensors) -> None:
        for name, momentum in self.momentum.items():
            self.weights[name].addcmul_(factors[name], momentum)

    def _arrive(self, where: Tensor) -> Tensor:
        """The force f = −s ∇U at the present weights, and the potential energy where it is needed."""
        temperature = self.method.temperature
        losses, gradients = self.objective.means(self.state, self.batches, self.counts)
        for name, std in self.stds.items():
            force = self.force[name]
            torch.mul(self.weights[name], -1 / (std * temperature), out=force)
            force.addcmul_(_rows(self.num_observations, force), gradients[name], value=-std / temperature)
        if bool(where.any()):
            potential = losses * self.num_observations
            for name, std in self.stds.items():
                potential = potential + _sum_of_squares(self.weights[name]) / (2 * std**2)
            self.common["potential"].copy_(potential / temperature)
        return losses

    def _begin(self, where: Tensor) -> None:
        """New momenta p ~ N(0, 1), the energy to conserve, the number of steps, and half a kick."""
        if not bool(where.any()):
            return
        generators = self.state.generators
        for row in where.nonzero().flatten().tolist():
            for momentum in self.momentum.values():
                drawn = torch.randn(momentum.shape[1:], generator=generators[row], dtype=momentum.dtype)
                momentum[row].copy_(drawn)
        energy = self.common["potential"] + self._kinetic()
        step = self.common["log_step"].exp()
        steps = (self.method.trajectory_length * self._shared_jitter(where) / step).ceil().clamp(min=1)
        if self.longest is not None:
            steps = steps.clamp(max=self.longest)
        self.common["energy"].copy_(torch.where(where, energy, self.common["energy"]))
        self.common["left"].copy_(torch.where(where, steps, self.common["left"]))
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

    def _kinetic(self) -> Tensor:
        return torch.stack([_sum_of_squares(p) for p in self.momentum.values()]).sum(0) / 2

    def _kick(self, step: Tensor) -> None:
        for name, momentum in self.momentum.items():
            momentum.addcmul_(_rows(step, momentum), self.force[name])

    def _decide(self, ending: Tensor) -> None:
        """Metropolis' rule for the chains whose trajectories end here."""
        if not bool(ending.any()):
            return
        change = self.common["potential"] + self._kinetic() - self.common["energy"]
        change = change.nan_to_num(torch.inf, torch.inf, torch.inf)
        rate = (-change).clamp(max=0).exp()
        drawn = torch.ones_like(rate)
        for row in ending.nonzero().flatten().tolist():
            drawn[row] = torch.rand((), generator=self.state.generators[row], dtype=torch.float64)
        accepted = ending & (drawn < rate)
        self._keep(accepted)
        _return_to_kept(self.state, ending & ~accepted)
        for name, amount in (("transitions", 1.0), ("accepted", rate), ("divergences", change > DIVERGED)):
            self.common[name] += torch.where(ending, amount, 0.0)
        if self.longest is not None:
            DualAveraging(self.method.target_acceptance).update(self.common, self._mean_rate(rate), ending)

    def _mean_rate(self, rate: Tensor) -> Tensor:
        """The mean over the chains on each data set, to the same bits: they share one step size."""
        means = torch.empty_like(rate)
        data_sets = self.state.members.labels[:, 0].to(rate.device)
        for data_set in data_sets.unique():
            means[data_sets == data_set] = rate[data_sets == data_set].mean()
        return means

    def _keep(self, where: Tensor) -> None:
        own, common = self.state.own, self.common
        for name, weight in self.weights.items():
            _assign(own[f"kept.{name}"], weight, where)
            _assign(own[f"kept_force.{name}"], self.force[name], where)
        _assign(common["kept_potential"], common["potential"], where)


def _return_to_kept(state: State, where: Tensor) -> None:
    for name, kept in under("kept.", state.own).items():
        _assign(state.members.stacked[name], kept, where)
        _assign(state.own[f"force.{name}"], state.own[f"kept_force.{name}"], where)
    _assign(state.common["potential"], state.common["kept_potential"], where)


def _assign(target: Tensor, source: Tensor, where: Tensor) -> None:
    if bool(where.all()):
        target.copy_(source)
    elif bool(where.any()):
        target.copy_(torch.where(_rows(where, target), source, target))


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """Numbers [G] as a factor of tensors [G, ...]."""
    values = values if values.dtype == torch.bool else values.to(like.dtype)
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Σ over all but the first axis, in double precision: energies are differences of large numbers."""
    return tensor.double().square().reshape(len(tensor), -1).sum(1)


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
    if random or problem.execution.uses_global_random:
        where = f" ({random[0]!r})" if random else ""
        raise InputError(
            f"hmc cannot sample a network that is random itself, such as one with dropout{where}: remove "
            "the layer, or set its probability to 0."
        )
