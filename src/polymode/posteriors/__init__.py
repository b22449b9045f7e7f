"""Posteriors: what a method leaves behind."""

from polymode.posteriors.base import Posterior, load_posterior, merge
from polymode.posteriors.particles import Particles

__all__ = ["Particles", "Posterior", "load_posterior", "merge"]
