"""Samples of a posterior, cycle by cycle.

Zhang et al., "Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning", 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require, require_positive, require_whole, unknown_name
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.samplers import as_vectors, hamiltonian_step, langevin_step, views_of
from polymode.schedules import Cosine, Part
from polymode.training.contract import (
    PRIOR_STD_OR_FLAT,
    Batch,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    Step,
    equal_parts,
    nothing,
)
from polymode.weights.priors import PriorStd, check_prior_std

Kernel = Literal["sghmc", "sgld"]


@dataclass(frozen=True)
class CyclicalSGMCMC(Method):
    """Algorithm 1: the rate falls as ½ (1 + cos πt) in each cycle; first descent, then noise, then samples.

    sgld: θ ← θ − h ∇L + √(2 h T/N) ε. sghmc: m ← (1 − α) m − h ∇L + √(2 h α T/N) ε, θ ← θ + m. L is the mean
    loss with the prior's part, U/N, so that T = 1 is the posterior and T < 1 a colder one.
    ``State.own["momentum"]`` is m, one vector for each chain.
    """

    name: ClassVar[str] = "cyclical_sgmcmc"
    summary: ClassVar[str] = "stochastic-gradient MCMC in cycles of the rate: descend, then sample"
    cost: ClassVar[str] = "one member-epoch an epoch; predicts with a pass for every sample"
    best_epoch: ClassVar[str] = "none: a sampler keeps what it visits, and choosing would no longer sample"

    tempered: ClassVar[bool] = True

    kernel: Kernel = option("sghmc", '`"sghmc"` (with momentum) or `"sgld"`')
    num_cycles: int = option(4, "M, cycles of the rate")
    samples_per_cycle: int = option(3, "networks kept of each cycle, at the ends of its last epochs")
    sampling: float = option(
        0.1, "share of a cycle's epochs in which noise is added; at least as many as samples are kept"
    )
    lr: float = option(0.1, "h at the beginning of a cycle (0.5 for ResNet-18 in the paper)")
    friction: float = option(0.9, "α of sghmc")
    temperature: float = option(
        1.0,
        "T: 1 samples from the posterior, less from one that is sharpened; the published runs have 1/N, N "
        "being the number of observations, 2e-5 for CIFAR-10",
    )
    prior_std: PriorStd | None = option(
        0.2, f"{PRIOR_STD_OR_FLAT}; 0.2 is a decay of 5e-4 with 50,000 observations, 1/√(5e-4 · N)"
    )

    def __post_init__(self) -> None:
        if self.kernel not in get_args(Kernel):
            raise unknown_name("kernel", self.kernel, get_args(Kernel))
        require_whole("num_cycles", self.num_cycles)
        require_whole("samples_per_cycle", self.samples_per_cycle)
        require(0 < self.sampling <= 1, f"sampling must be above 0 and at most 1, got {self.sampling!r}.")
        require(0 < self.friction <= 1, f"friction must be above 0 and at most 1, got {self.friction!r}.")
        require_positive("lr", self.lr)
        require_positive("temperature", self.temperature)
        if self.prior_std is not None:
            check_prior_std(self.prior_std)

    @property
    def chain_members(self) -> int:
        return self.num_cycles * self.samples_per_cycle

    def num_parameters(self, module: nn.Module) -> int:
        return self.chain_members * super().num_parameters(module)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        members = problem.initial_members(generator)
        moving = as_vectors({name: members.stacked[name] for name in sorted(problem.trainable)})
        return State(members, own={"momentum": torch.zeros_like(moving)})

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        if epochs < self.num_cycles * (self.samples_per_cycle + 1):
            raise InputError(
                f"{epochs} epochs are too few for {self.num_cycles} cycles, each with an epoch of descent "
                f"and {self.samples_per_cycle} that end in a sample: raise epochs (or the budget), or lower "
                "num_cycles or samples_per_cycle."
            )
        prior = problem.prior(self.prior_std)
        objective, rate = problem.objective(prior), {"rate": Over(Optimizer("SGD", lr=self.lr))}
        phases = []
        for length in equal_parts(epochs, self.num_cycles):
            noisy = min(length - 1, max(self.samples_per_cycle, round(self.sampling * length)))
            warm_up = noisy - self.samples_per_cycle
            # Stretches of one cycle: descent, noise, and epochs of noise that end in a sample.
            stretches = [("explore", length - noisy), ("warm up", warm_up)]
            stretches += [("sample", 1)] * self.samples_per_cycle
            before = 0
            for name, part in stretches:
                if part == 0:
                    continue
                phases.append(
                    Phase(
                        name,
                        part,
                        objective,
                        self._step(problem, noisy=name != "explore"),
                        rate,
                        schedule=Part(Cosine(), before, length),
                        restarts=before == 0,
                        leave=_finish if name == "sample" else nothing,
                    )
                )
                before += part
        return phases

    def _step(self, problem: Problem, *, noisy: bool) -> Step:
        """One step of the sampler; without noise it is the same with T = 0."""
        names = sorted(problem.trainable)

        def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
            [batch] = batches
            losses, gradients = objective.losses_and_gradients(state, batch)
            active = slice(batch.groups.start, batch.groups.stop)
            weights = {name: state.members.stacked[name][active] for name in names}
            position, momentum = as_vectors(weights), state.own["momentum"][active]
            force = as_vectors({name: gradients.stacked[name][active] for name in names})
            rate = state.optimizers["rate"].rates[active, None].to(position)
            spread = self.temperature / objective.num_observations[active, None].to(position)
            noise = None
            if noisy:
                drawn = [
                    torch.randn(position.shape[1], generator=g, dtype=position.dtype)
                    for g in state.generators[active]
                ]
                noise = torch.stack(drawn).to(position.device)
            if self.kernel == "sgld":
                langevin_step(position, force, rate, noise, spread)
            else:
                hamiltonian_step(position, momentum, force, rate, self.friction, noise, spread)
            for name, moved in views_of(position, weights).items():
                weights[name].copy_(moved)
            return losses

        return step

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return Particles(problem.network, blocks=state.finished.blocks)

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(self.num_cycles * (self.samples_per_cycle + 1), round(member_epochs))


def _finish(state: State) -> None:
    state.finished.append(state.members)
