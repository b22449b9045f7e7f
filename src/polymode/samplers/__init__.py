"""Transition kernels on dictionaries of tensors; no network is involved."""

from polymode.samplers.adaptation import DualAveraging
from polymode.samplers.stochastic_gradients import hamiltonian_step, langevin_step
from polymode.samplers.vectors import as_vectors, views_of
from polymode.samplers.walks import (
    WALKS,
    Autoregressive,
    GuidedWalk,
    Independent,
    RandomWalk,
    Walk,
    draw_prior,
)

__all__ = [
    "WALKS",
    "Autoregressive",
    "DualAveraging",
    "GuidedWalk",
    "Independent",
    "RandomWalk",
    "Walk",
    "as_vectors",
    "draw_prior",
    "hamiltonian_step",
    "langevin_step",
    "views_of",
]
