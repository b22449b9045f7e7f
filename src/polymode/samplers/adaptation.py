"""Step sizes that find themselves: dual averaging (Hoffman and Gelman 2014, §3.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polymode.networks.members import Tensors

# The constants of the paper: how fast it moves, how little the first transitions count, how fast it settles.
GAMMA, T0, KAPPA = 0.05, 10.0, 0.75

ENORMOUS = 1e50  # a change of energy whose square would leave the numbers
LARGEST = 1000.0  # ratio of a squared change to what is wanted: one outlier is not to shorten steps for long


@dataclass(frozen=True)
class DualAveraging:
    """Moves the logarithm of step sizes until transitions are accepted with the ``target`` rate.

    Its state is a dictionary of tensors [G], one entry a chain; chains that are given the same rates keep
    the same step size.
    """

    target: float

    @staticmethod
    def begin(step_size: Tensor) -> Tensors:
        """The state of an adaptation that starts at some step sizes, [G]."""
        log_step = step_size.double().log()
        return {
            "log_step": log_step.clone(),
            "log_average": log_step.clone(),  # what is used in the end
            "log_centre": log_step + torch.tensor(10.0, dtype=torch.float64).log(),
            "error": torch.zeros_like(log_step),
            "updates": torch.zeros_like(log_step),
        }

    def update(self, state: Tensors, rate: Tensor, where: Tensor) -> None:
        """Take in the acceptance rates [G] of a transition, for the chains ``where`` [G] holds; in place."""
        count = state["updates"] + 1
        weight = 1 / (count + T0)
        error = (1 - weight) * state["error"] + weight * (self.target - rate)
        log_step = state["log_centre"] - count.sqrt() / GAMMA * error
        forget = count**-KAPPA
        log_average = forget * log_step + (1 - forget) * state["log_average"]
        new = {"updates": count, "error": error, "log_step": log_step, "log_average": log_average}
        for name, value in new.items():
            state[name].copy_(torch.where(where, value, state[name]))


@dataclass(frozen=True)
class EnergyErrors:
    """Step sizes of chains without an acceptance test: the variance of the energy's error is to be v D.

    Robnik et al. 2024, appendix: that variance grows as ε⁶, so a step whose energy changes by ΔE suggests
    ε⁻⁶ = ΔE²/(v D ε⁶); suggestions far from what is wanted count little, old ones are forgotten. Its state is
    a dictionary of tensors [G], one entry a chain, each with a step size of its own.
    num_weights: D. memory: steps that are remembered, one number or [G]. trust: suggestions off by so many
    e-folds of ε count e^(−1/2).
    """

    num_weights: int
    memory: float | Tensor = 100.0
    trust: float = 1.5

    @staticmethod
    def begin(step: Tensor) -> Tensors:
        """The state of an adaptation that starts at some step sizes, [G]."""
        zero = torch.zeros_like(step, dtype=torch.float64)
        return {
            "step": step.double().clone(),
            "suggested": zero.clone(),  # sum of weighted ξ/ε⁶
            "weight": zero.clone(),
            "longest": zero + torch.inf,  # no step above one that has left the numbers
        }

    def update(self, state: Tensors, change: Tensor, variance: Tensor, where: Tensor) -> None:
        """Take in the energy's changes [G] for a wanted variance v [G], for the chains ``where``; in place.

        A change that is no finite number, or enormous, stands for a step that was much too long.
        """
        step, finite = state["step"], change.abs() < ENORMOUS
        ratio = (change.square() / (self.num_weights * variance) + 1e-8).clamp(max=LARGEST)
        weight = torch.where(finite, torch.exp(-((ratio.log() / (6 * self.trust)).square()) / 2), 0.0)
        forget = (self.memory - 1) / (self.memory + 1)
        suggested = forget * state["suggested"] + torch.where(finite, weight * ratio / step**6, 0.0)
        total = forget * state["weight"] + weight
        longest = torch.where(finite, state["longest"], torch.minimum(state["longest"], step / 2))
        found = torch.where(total > 0, (suggested / total) ** (-1 / 6), step)
        new = {
            "step": torch.minimum(found, longest),
            "suggested": suggested,
            "weight": total,
            "longest": longest,
        }
        for name, value in new.items():
            state[name].copy_(torch.where(where, value, state[name]))
