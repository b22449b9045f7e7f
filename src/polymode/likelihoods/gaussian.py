"""Numbers with Gaussian noise: fixed, learned, or depending on the input."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from polymode.errors import InputError, require_positive
from polymode.likelihoods.base import first_place
from polymode.likelihoods.location_scale import LearnedNoise, LocationScale, NoiseOfInputs
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


# Exponents beyond this are cut: no target is e^50 times another one, and moments stay finite.
LARGEST_EXPONENT = 50.0
SMALLEST_STD = 1e-9  # of models that are no networks


@dataclass(frozen=True)
class LogGaussianLaw(Law):
    """exp(s Z) of every member, Z ~ N(μ, σ²); log_scale: s. The mean is exp(s μ + s²σ²/2)."""

    normal: GaussianLaw
    log_scale: float

    @classmethod
    def of(cls, normal: GaussianLaw, log_scale: float) -> Self:
        exponent = log_scale * normal.mean.double() + 0.5 * log_scale**2 * normal.variance
        mean = exponent.clamp(max=LARGEST_EXPONENT).exp().to(normal.mean.dtype)
        return cls(mean, normal, log_scale)

    @property
    def variance(self) -> Tensor:
        spread = (self.log_scale**2 * self.normal.variance).clamp(max=LARGEST_EXPONENT)
        return spread.expm1() * self.mean.double().square()

    def cdf(self, at: Tensor) -> Tensor:
        below = at.double() <= 0
        inside = self.normal.cdf(at.double().masked_fill(below, 1.0).log() / self.log_scale)
        return inside.masked_fill(below, 0.0)

    def brackets(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        low, high = ((self.log_scale * end).exp() for end in self.normal.brackets(levels))
        # Logarithms and exponentials round: a bracket must not miss the quantile by that.
        return low * (1 - 1e-12), high * (1 + 1e-12)

    @property
    def resolution(self) -> Tensor:
        """Relative to the members' medians: the deviation says little about the lower tail."""
        return 1e-10 * (self.log_scale * self.normal.mean.double()).exp().amin(0)

    def sample(self, noise: torch.Generator) -> Tensor:
        return (self.log_scale * self.normal.sample(noise)).exp()

    def taken(self, members: Tensor) -> Self:
        return type(self)(self.mean.flatten(1)[members], self.normal.taken(members), self.log_scale)


@dataclass(frozen=True)
class Gaussian(LocationScale):
    """N(μ, σ²) with independent dimensions, whose log densities add up to one observation's.

    log_scale: s of positive targets that are Gaussian on a logarithmic scale: log(y)/s ~ N(μ, σ²). Densities,
    quantiles and moments are those of y itself.
    """

    log_scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_scale is not None:
            require_positive("log_scale", self.log_scale)

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        moments = self._moments_like(outputs, targets)
        if self.log_scale is None:
            return gaussian_log_prob(targets, *moments)
        # The density of y is that of z = log(y)/s times dz/dy = 1/(s y).
        logs = targets.log()
        return gaussian_log_prob(logs / self.log_scale, *moments) - logs - math.log(self.log_scale)

    def means(self, outputs: Tree) -> Tensor:
        """Means; of a logarithmic scale the medians, which no wide noise can send anywhere."""
        mean = super().means(outputs)
        if self.log_scale is None:
            return mean
        return (self.log_scale * mean).clamp(max=LARGEST_EXPONENT).exp()

    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        super().check_targets(targets, outputs)
        if self.log_scale is not None and bool((targets <= 0).any()):
            bad = targets <= 0
            raise InputError(
                f"Targets on a logarithmic scale must be positive, got {targets[bad][0].item()}, "
                f"{first_place(bad)}. Leave log_scale out."
            )

    def remark_on(self, targets: Tensor) -> str | None:
        return super().remark_on(targets if self.log_scale is None else targets.log() / self.log_scale)

    def target_scaling(
        self, mean: float, std: float, geometric_mean: float = math.nan
    ) -> tuple[float, float]:
        if self.log_scale is None:
            return super().target_scaling(mean, std, geometric_mean)
        return 0.0, geometric_mean

    def on_log_scale(self, log_scale: float) -> Self:
        return replace(self, log_scale=log_scale)

    @property
    def of_baseline(self) -> "HeteroscedasticGaussian":
        return HeteroscedasticGaussian(SMALLEST_STD, log_scale=self.log_scale)

    def latent(self, targets: Tensor) -> Tensor:
        return targets.double() if self.log_scale is None else targets.double().log() / self.log_scale

    def law(self, outputs: Tree) -> GaussianLaw | LogGaussianLaw:
        mean, std = self.moments(outputs)
        normal = GaussianLaw(mean, std if isinstance(std, Tensor) else torch.full_like(mean, std))
        return normal if self.log_scale is None else LogGaussianLaw.of(normal, self.log_scale)

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
        super().__post_init__()
        if not self.std > 0:
            raise InputError(f"FixedGaussian(std=...) must be positive, got {self.std}.")

    def trained_moments(self, outputs: Tree) -> tuple[Tensor, float]:
        return self.read(outputs), self.std

    @property
    def _known_noise(self) -> float:
        return self.std

    def randomised(self, targets: Tensor, draw: Callable[[int], Tensor]) -> tuple[Tensor, None]:
        """Targets drawn again with the likelihood's noise: exact posterior samples of linear models."""
        each = draw(1).shape[:-1]
        noise = ndtri(draw(targets.numel() // each.numel())).reshape(targets.shape).to(targets.dtype)
        if self.log_scale is not None:
            return targets * (self.log_scale * self.std * noise).exp(), None
        return targets + self.std * noise, None


@dataclass(frozen=True)
class LearnedGaussian(LearnedNoise, Gaussian):
    """The network gives the mean; each member learns one noise level σ = softplus(ρ) + min_std.

    ρ is the parameter ``noise`` of the prepared network, which then returns (mean, ρ).
    """

    kind: ClassVar[str] = "gaussian"


@dataclass(frozen=True)
class HeteroscedasticGaussian(NoiseOfInputs, Gaussian):
    """The network gives [..., 2D]: D means, then D raw noise levels, σ = softplus(·) + min_std."""

    kind: ClassVar[str] = "heteroscedastic_gaussian"


def gaussian_log_prob(targets: Tensor, means: Tensor, stds: Tensor | float) -> Tensor:
    """Log N(y; μ, σ²), element by element."""
    constant = 0.5 * math.log(2 * math.pi)
    if not isinstance(stds, Tensor):  # fewer operations, which a small network feels
        return (targets - means).square() * (-0.5 / stds**2) - (math.log(stds) + constant)
    return -0.5 * ((targets - means) / stds).square() - stds.log() - constant
