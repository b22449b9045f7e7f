"""Posteriors: what a method leaves behind."""

from polymode.posteriors.base import Posterior, merge
from polymode.posteriors.checkpoints import from_state_dicts
from polymode.posteriors.component_mixture import ComponentMixture, sample_dropout
from polymode.posteriors.late_members import LateMembers
from polymode.posteriors.loading import load_posterior
from polymode.posteriors.particles import Particles
from polymode.posteriors.separate import Separate
from polymode.posteriors.variational import Variational

__all__ = [
    "ComponentMixture",
    "LateMembers",
    "Particles",
    "Posterior",
    "Separate",
    "Variational",
    "from_state_dicts",
    "load_posterior",
    "merge",
    "sample_dropout",
]
