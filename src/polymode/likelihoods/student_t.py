"""Numbers with heavy tails: Student's t, with a noise level that is learned or depends on the input."""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from polymode.errors import require, require_whole
from polymode.likelihoods.gaussian import SMALLEST_STD, HeteroscedasticGaussian
from polymode.likelihoods.location_scale import LearnedNoise, LocationScale, NoiseOfInputs
from polymode.likelihoods.numbers import Law, NumbersPredictive
from polymode.trees import Tree

MOST_DEGREES = 100


class StudentTPredictive(NumbersPredictive):
    """A mixture of the members' t distributions."""


@dataclass(frozen=True)
class StudentTLaw(Law):
    """μ + s·t_ν of every member; scale: s, in the shape of the mean; degrees: ν."""

    scale: Tensor
    degrees: int

    @property
    def variance(self) -> Tensor:
        return self.scale.double().square() * (self.degrees / (self.degrees - 2))

    def cdf(self, at: Tensor) -> Tensor:
        return student_t_cdf(((at - self.mean) / self.scale).double(), self.degrees)

    def brackets(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        t = student_t_quantiles(levels, self.degrees).reshape(-1, *[1] * self.mean.ndim)
        mean, scale = self.mean.double(), self.scale.double()
        # The quantiles are known up to rounding: a bracket must not miss them by that.
        slack = 1e-9 * scale * (1 + t.abs())
        return mean + t * scale - slack, mean + t * scale + slack

    def sample(self, noise: torch.Generator) -> Tensor:
        """√(ν (U^{−2/ν} − 1)) cos 2πV is t_ν for uniform U and V (Bailey 1994)."""
        u, v = torch.rand(2, *self.mean.shape, generator=noise, dtype=torch.float64).to(self.mean.device)
        radius = (self.degrees * ((1 - u).pow(-2 / self.degrees) - 1)).sqrt()
        return self.mean.double() + self.scale.double() * radius * (2 * math.pi * v).cos()

    def taken(self, members: Tensor) -> Self:
        return type(self)(self.mean.flatten(1)[members], self.scale.flatten(1)[members], self.degrees)


@dataclass(frozen=True)
class HeavyTails(LocationScale):
    """y = μ + σ √((ν − 2)/ν) t_ν.

    σ is the standard deviation of the noise, as it is in Gaussian likelihoods, so that the two can be
    compared; for that ν must be larger than 2. degrees: ν, a whole number, for which the distribution
    function is a finite sum. Densities fall as |y|^(−ν−1): with 4, the usual choice (Lange, Little and Taylor
    1989), an error of ten deviations costs 10 nats, where a Gaussian charges 50; beyond 30 the two hardly
    differ.
    """

    degrees: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        # Its variance exists beyond 2; beyond a hundred it is a Gaussian, and its sum is long.
        require_whole("The degrees of StudentT", self.degrees, least=3)
        require(
            self.degrees <= MOST_DEGREES,
            f"The degrees of StudentT are at most {MOST_DEGREES}, got {self.degrees}: use 'gaussian'.",
        )

    @property
    def _scale_of_std(self) -> float:
        return math.sqrt((self.degrees - 2) / self.degrees)

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        mean, std = self._moments_like(outputs, targets)
        scale, nu = torch.as_tensor(std) * self._scale_of_std, self.degrees
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
        square = ((targets - mean) / scale).square()
        return constant - scale.log() - (nu + 1) / 2 * torch.log1p(square / nu)

    @property
    def of_baseline(self) -> HeteroscedasticGaussian:
        return HeteroscedasticGaussian(SMALLEST_STD)

    def law(self, outputs: Tree) -> StudentTLaw:
        mean, std = self.moments(outputs)
        return StudentTLaw(mean, torch.as_tensor(std) * self._scale_of_std, self.degrees)

    def predictive(
        self, mean: Tensor, noise_variance: Tensor, member_variance: Tensor, num_members: int
    ) -> StudentTPredictive:
        return StudentTPredictive(mean, noise_variance, member_variance, num_members)


@dataclass(frozen=True)
class StudentT(LearnedNoise, HeavyTails):
    """The network gives μ, each member learns one σ = softplus(ρ) + min_std; the noise has heavy tails."""

    kind: ClassVar[str] = "student_t"


@dataclass(frozen=True)
class HeteroscedasticStudentT(NoiseOfInputs, HeavyTails):
    """The network gives [..., 2D]: D means, then D raw noise levels; the noise has heavy tails."""

    kind: ClassVar[str] = "heteroscedastic_student_t"


def student_t_cdf(t: Tensor, degrees: int) -> Tensor:
    """P(T ≤ t) of Student's t with a whole number ν of degrees, in 64 bits.

    With θ = arctan(t/√ν) it is ½ + ½ sin θ (1 + ½ cos² θ + 1·3/(2·4) cos⁴ θ + …) for even ν and
    ½ + (θ + sin θ (cos θ + ⅔ cos³ θ + 2·4/(3·5) cos⁵ θ + …))/π for odd ν, up to cos^{ν−2} θ
    (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    """
    t = t.double()
    square = degrees / (degrees + t.square())
    sine = t / (degrees + t.square()).sqrt()
    is_odd = degrees % 2 == 1
    term = square.sqrt() if is_odd else torch.ones_like(t)
    total = term.clone()
    for power in range(2 + is_odd, degrees - 1, 2):
        term = term * square * ((power - 1) / power)
        total += term
    if is_odd:
        return 0.5 + (torch.atan(t / math.sqrt(degrees)) + sine * total) / math.pi
    return 0.5 + 0.5 * sine * total


def student_t_quantiles(levels: Tensor, degrees: int) -> Tensor:
    """Quantiles [q] of Student's t by bisection, up to rounding."""
    high = torch.ones_like(levels, dtype=torch.float64)
    while bool((outside := student_t_cdf(high, degrees) < levels.maximum(1 - levels)).any()):
        high = torch.where(outside, 2 * high, high)
    low = -high
    for _ in range(100):
        middle = 0.5 * (low + high)
        is_below = student_t_cdf(middle, degrees) < levels
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return 0.5 * (low + high)
