"""Microcanonical Langevin dynamics on vectors [G, D], a row a chain; in place.

Robnik et al., "Microcanonical Hamiltonian Monte Carlo", 2023, and "Fluctuation without dissipation", 2024.

The momentum u is a unit vector. With the scale σ of the weights, time passes as dθ = σ∘u dt and
du = (1 − u uᵀ)(σ∘∇ log p) dt/(D − 1), which keeps the energy (D − 1) log(speed) − log p; random turns of u
make the density of θ that of p. Nothing is accepted or rejected: the change of the energy in a step measures
its error, whose variance falls with the sixth power of the step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# The share of a step before the first move of the palindrome that McLachlan found to have the least error.
FIRST_TURN = 0.1931833275037836

# From nothing but the position, which has been moved in place: log p, [G], and its gradient, [G, D].
Look = Callable[[], tuple[Tensor, Tensor]]


def microcanonical_step(
    position: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    log_density: Tensor,
    *,
    step: Tensor,
    scale: Tensor,
    look: Look,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of size ε = ``step`` [G]: turn, move, turn, move, turn. Two gradients.

    gradient, log_density: at the present position. scale: σ, [G, D] or [D]. Returns the new log density, its
    gradient, and the change of the energy, [G], in double precision.
    """
    pace = step[:, None].to(position.dtype) / 2 * scale  # half of a step
    kinetic = turn(momentum, scale * gradient, FIRST_TURN * step)
    position.addcmul_(pace, momentum)
    _, between = look()
    kinetic += turn(momentum, scale * between, (1 - 2 * FIRST_TURN) * step)
    position.addcmul_(pace, momentum)
    reached, there = look()
    kinetic += turn(momentum, scale * there, FIRST_TURN * step)
    return reached, there, kinetic - (reached - log_density)


def turn(momentum: Tensor, force: Tensor, time: Tensor) -> Tensor:
    """Turn u towards the force g = σ∘∇ log p for some time [G], exactly; returns the kinetic change, [G].

    With e = g/‖g‖, c = u·e, δ = time ‖g‖/(D − 1) and ζ = exp(−δ):
    u ← normalised[e (1 − ζ)(1 + ζ + c (1 − ζ)) + 2 ζ u], and the kinetic energy changes by
    (D − 1)(δ − log 2 + log(1 + c + (1 − c) ζ²)).
    """
    freedom = momentum.shape[1] - 1
    strength = torch.linalg.vector_norm(force, dim=1).double()
    along = (momentum * force).sum(1).double()
    cosine = (along / strength.clamp(min=torch.finfo(force.dtype).tiny)).clamp(-1, 1)
    delta = time * strength / freedom
    decay = torch.exp(-delta)
    towards = (1 - decay) * (1 + decay + cosine * (1 - decay))
    size = (towards.square() + (2 * decay).square() + 4 * towards * decay * cosine).sqrt()
    of_force = towards / (size * strength.clamp(min=torch.finfo(force.dtype).tiny))
    momentum.mul_((2 * decay / size)[:, None].to(momentum.dtype))
    momentum.addcmul_(of_force[:, None].to(force.dtype), force)
    # 1 + c + (1 − c) ζ² is 2 − (1 − c)(1 − ζ²): precise where hardly anything changes.
    return freedom * (delta + torch.log1p((1 - cosine) * torch.expm1(-2 * delta) / 2))


def refresh(momentum: Tensor, noise: Tensor, time: Tensor, length: Tensor) -> None:
    """Turn u at random: u ← normalised[u + ν z], ν = √((exp(2 time/L) − 1)/D); it is forgotten in a time L.

    It leaves the uniform law on the sphere as it is. The two half refreshments that meet between two steps
    are (nearly) one of twice the time. noise: z ~ N(0, 1), [G, D]; time, length: [G].
    """
    # Both terms times exp(−time/L): none grows without bound.
    spread = (-torch.expm1(-2 * time / length) / momentum.shape[1]).sqrt()
    momentum.mul_(torch.exp(-time / length)[:, None].to(momentum.dtype))
    momentum.addcmul_(spread[:, None].to(momentum.dtype), noise)
    momentum.div_(torch.linalg.vector_norm(momentum, dim=1, keepdim=True))
