"""Steps of stochastic-gradient samplers on vectors [G, D], a row a chain; in place.

The gradient is that of U/N, the mean over observations, as training has it: a rate h on it is a step of h/N
on U. At temperature T they sample from exp(−U/T) as h → 0.
"""

from torch import Tensor


def langevin_step(
    position: Tensor, gradient: Tensor, rate: Tensor, noise: Tensor | None, spread: Tensor
) -> None:
    """Move: θ ← θ − h ∇(U/N) + √(2 h T/N) ε (Welling and Teh 2011).

    rate: [G, 1], h. noise: ε, or None for a step of plain descent. spread: [G, 1], T/N.
    """
    position.sub_(rate * gradient)
    if noise is not None:
        position.add_((2 * rate * spread).sqrt() * noise)


def hamiltonian_step(
    position: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    rate: Tensor,
    friction: float,
    noise: Tensor | None,
    spread: Tensor,
) -> None:
    """Move with momentum: m ← (1 − α) m − h ∇(U/N) + √(2 h α T/N) ε, θ ← θ + m (Chen et al. 2014)."""
    momentum.mul_(1 - friction).sub_(rate * gradient)
    if noise is not None:
        momentum.add_((2 * rate * friction * spread).sqrt() * noise)
    position.add_(momentum)
