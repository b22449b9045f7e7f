"""Transition kernels on dictionaries of tensors; no network is involved."""

from polymode.samplers.adaptation import DualAveraging, EnergyErrors
from polymode.samplers.correlation import correlation_time
from polymode.samplers.microcanonical import microcanonical_step, refresh, turn
from polymode.samplers.spread import Spread
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
    "EnergyErrors",
    "GuidedWalk",
    "Independent",
    "RandomWalk",
    "Spread",
    "Walk",
    "as_vectors",
    "correlation_time",
    "draw_prior",
    "hamiltonian_step",
    "langevin_step",
    "microcanonical_step",
    "refresh",
    "turn",
    "views_of",
]
