"""Numbers with Gaussian noise: fixed, learned, or depending on the input."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.special import ndtr, ndtri

from polymode.errors import InputError
from polymode.likelihoods.location_scale import LearnedNoise, LocationScale
from polymode.likelihoods.numbers import Law, NumbersPredictive
from polymode.trees import Tree


class GaussianPredictive(NumbersPredictive):
    """A mixture of the members' Gaussians."""


@dataclass(frozen=True)
class GaussianLaw(Law):
    """N(μ, σ²) of every member; std: in the shape of the mean."""

    std: Tensor

    @property
    def variance(self) -> Tensor:
        return self.std.double().square()

    def cdf(self, at: Tensor) -> Tensor:
        return ndtr(((at - self.mean) / self.std).double())

    def brackets(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        z = ndtri(levels).reshape(-1, *[1] * self.mean.ndim)
        quantiles = self.mean.double() + z * self.std.double()
        return quantiles, quantiles

    def sample(self, noise: torch.Generator) -> Tensor:
        drawn = torch.randn(self.mean.shape, generator=noise, dtype=torch.float64)
        return self.mean.double() + self.std.double() * drawn.to(self.mean.device)

    def taken(self, members: Tensor) -> Self:
        return type(self)(self.mean.flatten(1)[members], self.std.flatten(1)[members])


@dataclass(frozen=True)
class Gaussian(LocationScale):
    """N(μ, σ²) with independent dimensions, whose log densities add up to one observation's."""

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        return gaussian_log_prob(targets, *self._moments_like(outputs, targets))

    def law(self, outputs: Tree) -> GaussianLaw:
        mean, std = self.moments(outputs)
        return GaussianLaw(mean, std if isinstance(std, Tensor) else torch.full_like(mean, std))

    def predictive(
        self, mean: Tensor, noise_variance: Tensor, member_variance: Tensor, num_members: int
    ) -> GaussianPredictive:
        return GaussianPredictive(mean, noise_variance, member_variance, num_members)


@dataclass(frozen=True)
class FixedGaussian(Gaussian):
    """The network gives the mean; the noise has the known standard deviation ``std``."""

    kind: ClassVar[str] = "fixed_gaussian"
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise InputError(f"FixedGaussian(std=...) must be positive, got {self.std}.")

    def moments(self, outputs: Tree) -> tuple[Tensor, float]:
        return self.read(outputs), self.std

    @property
    def _known_noise(self) -> float:
        return self.std

    def randomised(self, targets: Tensor, draw: Callable[[int], Tensor]) -> tuple[Tensor, None]:
        """Targets drawn again with the likelihood's noise: exact posterior samples of linear models."""
        each = draw(1).shape[:-1]
        noise = ndtri(draw(targets.numel() // each.numel())).reshape(targets.shape)
        return targets + self.std * noise.to(targets.dtype), None


@dataclass(frozen=True)
class LearnedGaussian(LearnedNoise, Gaussian):
    """The network gives the mean; each member learns one noise level σ = softplus(ρ) + min_std.

    ρ is the parameter ``noise`` of the prepared network, which then returns (mean, ρ).
    """

    kind: ClassVar[str] = "gaussian"


@dataclass(frozen=True)
class HeteroscedasticGaussian(Gaussian):
    """The network gives [..., 2D]: D means, then D raw noise levels, σ = softplus(·) + min_std."""

    kind: ClassVar[str] = "heteroscedastic_gaussian"
    min_std: float = 1e-6

    def moments(self, outputs: Tree) -> tuple[Tensor, Tensor]:
        both = self.read(outputs)
        if both.shape[-1] % 2:
            raise InputError(
                "HeteroscedasticGaussian needs an even number of outputs (means, then raw standard "
                f"deviations), the network gives {both.shape[-1]}."
            )
        mean, raw = both.chunk(2, -1)
        return mean, F.softplus(raw) + self.min_std

    def num_outputs(self, targets: Iterable[Tensor]) -> int:
        return 2 * super().num_outputs(targets)


def gaussian_log_prob(targets: Tensor, means: Tensor, stds: Tensor | float) -> Tensor:
    """Log N(y; μ, σ²), element by element."""
    constant = 0.5 * math.log(2 * math.pi)
    if not isinstance(stds, Tensor):  # fewer operations, which a small network feels
        return (targets - means).square() * (-0.5 / stds**2) - (math.log(stds) + constant)
    return -0.5 * ((targets - means) / stds).square() - stds.log() - constant
