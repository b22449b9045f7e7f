"""Step sizes that find themselves: dual averaging (Hoffman and Gelman 2014, §3.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polymode.networks.members import Tensors

# The constants of the paper: how fast it moves, how little the first transitions count, how fast it settles.
GAMMA, T0, KAPPA = 0.05, 10.0, 0.75


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
