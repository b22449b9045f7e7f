"""Walks that leave N(0, s²) invariant, every scalar on its own: how anchors move through the prior."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polymode.errors import InputError, require_positive
from polymode.networks.members import Tensors

# A walk has crossed the prior when it has come from −2 s to 2 s, where 95 % of the mass lies.
WIDTH = 4.0
MEAN_SIZE = math.sqrt(2 / math.pi)  # E|z| of a standard normal z


def draw_prior(stds: Mapping[str, float], like: Tensors, generator: torch.Generator) -> Tensors:
    """Independent draws from N(0, s²) in the shapes, types and devices of ``like``."""
    return {name: std * _normal(like[name], generator) for name, std in stds.items()}


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    # In the memory format of the weights: a loss over two formats takes a fifth of a ResNet's step.
    return torch.empty_like(like).copy_(torch.randn(like.shape, generator=generator, dtype=like.dtype))


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(like).copy_(torch.rand(like.shape, generator=generator, dtype=like.dtype))


@dataclass(frozen=True)
class Walk(ABC):
    """A Markov chain for each scalar of a dictionary, with the stationary law N(0, s²).

    Steps are in units of s: a step of 0.05 moves a scalar by about a twentieth of its prior's width.
    """

    def begin(self, position: Tensors, generator: torch.Generator) -> Tensors:
        """What the walk has to remember beside the position; nothing unless it says so."""
        return {}

    @abstractmethod
    def advance(
        self, position: Tensors, memory: Tensors, stds: Mapping[str, float], generator: torch.Generator
    ) -> None:
        """One transition of every scalar, in place."""

    @property
    @abstractmethod
    def traversal(self) -> float:
        """Transitions in which the walk typically crosses the prior, from −2 s to 2 s."""


@dataclass(frozen=True)
class Independent(Walk):
    """A new draw each time: a ← s z."""

    def advance(self, position, memory, stds, generator) -> None:
        for name, std in stds.items():
            position[name].copy_(std * _normal(position[name], generator))

    @property
    def traversal(self) -> float:
        return 1.0


@dataclass(frozen=True)
class GuidedWalk(Walk):
    """Guided-walk Metropolis–Hastings (Gustafson 1998; Delaunoy and Louppe 2021, Algorithm 3).

    y = a + p |z|, z ~ N(0, (step s)²); accepted with min(1, exp((a² − y²)/(2 s²))), otherwise p ← −p.
    Towards the centre nothing is ever rejected, so a scalar goes on in one direction until it is past it.
    step: standard deviation of a step, in units of s.
    """

    step: float = 0.2

    def __post_init__(self) -> None:
        require_positive("GuidedWalk(step=...)", self.step)

    def begin(self, position: Tensors, generator: torch.Generator) -> Tensors:
        """A fair coin for the direction of each scalar."""
        return {
            name: torch.where(_uniform(a, generator) < 0.5, -1.0, 1.0).to(a) for name, a in position.items()
        }

    def advance(self, position, memory, stds, generator) -> None:
        for name, std in stds.items():
            a, p = position[name], memory[name]
            y = a + p * (self.step * std * _normal(a, generator)).abs()
            accepted = _accepted(a, y, std, generator)
            a.copy_(torch.where(accepted, y, a))
            p.copy_(torch.where(accepted, p, -p))

    @property
    def traversal(self) -> float:
        return WIDTH / (MEAN_SIZE * self.step)


@dataclass(frozen=True)
class RandomWalk(Walk):
    """Random-walk Metropolis: y = a + z, z ~ N(0, (step s)²), accepted as in the guided walk.

    step: standard deviation of a step, in units of s. It diffuses: twice the way takes four times the steps.
    """

    step: float = 0.2

    def __post_init__(self) -> None:
        require_positive("RandomWalk(step=...)", self.step)

    def advance(self, position, memory, stds, generator) -> None:
        for name, std in stds.items():
            a = position[name]
            y = a + self.step * std * _normal(a, generator)
            a.copy_(torch.where(_accepted(a, y, std, generator), y, a))

    @property
    def traversal(self) -> float:
        return (WIDTH / self.step) ** 2


@dataclass(frozen=True)
class Autoregressive(Walk):
    """a ← ρ a + √(1 − ρ²) s z with √(1 − ρ²) = step: exact, nothing is ever rejected.

    step: standard deviation of what is new in a step, in units of s; 1 gives independent draws.
    """

    step: float = 0.2

    def __post_init__(self) -> None:
        if require_positive("Autoregressive(step=...)", self.step) > 1:
            raise InputError(f"Autoregressive(step=...) lies between 0 and 1, got {self.step}.")

    @property
    def correlation(self) -> float:
        """Of a scalar with itself one transition later: ρ."""
        return math.sqrt(1 - self.step**2)

    def advance(self, position, memory, stds, generator) -> None:
        for name, std in stds.items():
            a = position[name]
            a.mul_(self.correlation).add_(_normal(a, generator), alpha=self.step * std)

    @property
    def traversal(self) -> float:
        """Transitions until a scalar's correlation with where it was has fallen to e⁻²."""
        return 1.0 if self.step == 1 else max(1.0, -2 / math.log(self.correlation))


def _accepted(a: Tensor, y: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Metropolis' rule for N(0, s²): u ≤ exp((a² − y²)/(2 s²))."""
    return _uniform(a, generator).log() <= (a.square() - y.square()) / (2 * std**2)


WALKS: tuple[type[Walk], ...] = (GuidedWalk, RandomWalk, Autoregressive, Independent)
