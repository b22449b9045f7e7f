"""Gaussian weights whose units may be left out: a sparse Bayesian network by variational inference.

The spike-and-slab networks of Jantre et al., "Sequential Bayesian Neural Subnetwork Ensembles", 2022.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymode.errors import require
from polymode.methods.mean_field import PUBLISHED, MeanField
from polymode.networks.members import DRAW, Tensors
from polymode.networks.selection import Where, check_where
from polymode.options import option
from polymode.training.contract import LAYERS, OPTIMIZER, Measure, Optimizer, Problem, Remaining, State
from polymode.weights.gaussian import INCLUSION, RHO, GaussianWeights, gaussian_weights


@dataclass(frozen=True)
class SpikeSlab(MeanField):
    """θ_j = z_j (μ_j + σ_j ∘ ε), one z_j ~ Bernoulli(γ_j) for all weights of an output unit or channel j.

    Minimises −E_q Σ_n log p(y_n | x_n, θ) + Σ_j KL(γ_j ‖ λ) + γ_j KL(N(μ_j, σ_j²) ‖ N(0, s²)), the other
    weights being Gaussian; z is drawn straight through a binary concrete variable (Jantre et al. 2022, §3.1).
    """

    name: ClassVar[str] = "spike_slab"
    summary: ClassVar[str] = (
        "Gaussian weights, and units that training leaves out (a sparse Bayesian network)"
    )
    cost: ClassVar[str] = MeanField.cost
    kept: ClassVar[str] = "a mean and a spread of every weight, and a number for each unit"

    where: Where = option(
        "hidden",
        f"the layers whose units may be left out: {LAYERS}; never the last one. Every trained weight has a "
        "Gaussian",
    )
    prior_inclusion: float = option(1e-4, "λ, probability of the prior that a unit is there")
    inclusion: float = option(
        0.99,
        "γ that all units begin with. From 0.99 it takes many epochs until units are left out, whatever λ "
        "is; from 0.9 about an eighth of that",
    )
    temperature: float = option(0.5, "τ of the relaxed inclusion variables")
    optimizer: Optimizer = option(PUBLISHED, OPTIMIZER)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "where", check_where(self.where))
        for name in ("prior_inclusion", "inclusion"):
            value = getattr(self, name)
            require(0 < value < 1, f"{name} is a probability above 0 and below 1, got {value!r}.")
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature!r}.")

    def weights_over(self, module: nn.Module, trainable: frozenset[str]) -> GaussianWeights:
        return gaussian_weights(module, trainable, None, self.where, self.temperature)

    def begin(self, weights: GaussianWeights, start: Tensors) -> Tensors:
        return weights.begin(start, self.rho, self.inclusion)

    def measure(self, problem: Problem, *, frozen: bool = False) -> Measure:
        """The share of units that the latest draw takes in, and what remains of the network with them."""
        weights = self.weights_over(problem.network.module, problem.trainable)
        remaining = Remaining(problem)

        @torch.no_grad()
        def measure(state: State) -> Tensors:
            stacked = state.members.stacked
            included = weights.included(stacked, weights.noise(stacked[DRAW], stacked[RHO]), frozen=frozen)
            shares = {"units": included.mean(1)} | remaining.shares(weights.by_layer(included))
            return {f"{name}_remaining": share for name, share in shares.items()}

        return measure

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """The units of each layer that are more probable than not; a layer without any is worth a warning."""
        weights = self.weights_over(problem.network.module, problem.trainable)
        logits = weights.by_layer(state.members.stacked[INCLUSION][0])
        kept = {layer: [int((each > 0).sum()), len(each)] for layer, each in logits.items()}
        warn_of_empty_layers([layer for layer, (number, _) in kept.items() if not number])
        return {"units": kept}

    def divergence(self, weights: GaussianWeights, tensors: Tensors, stds: dict[str, float]) -> Tensor:
        return weights.kl(tensors, stds, self.prior_inclusion)


def warn_of_empty_layers(layers: Sequence[str]) -> None:
    """Warn of layers that have lost all their units: what comes after them does not see the inputs."""
    if layers:
        warnings.warn(
            f"Training has left out all units of {', '.join(map(repr, layers))}: the KL term outweighs the "
            "data. Begin nearer to 1 (inclusion), train at a smaller rate or for fewer epochs, weigh the KL "
            "term less (annealing), or name other layers in where.",
            stacklevel=2,
        )
