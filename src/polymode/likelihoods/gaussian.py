"""Numbers with Gaussian noise: fixed, learned, or depending on the input."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError
from polymode.likelihoods.base import (
    Likelihood,
    check_finite_targets,
    check_same_shape,
    match_trailing_one,
)
from polymode.likelihoods.predictive import Accumulator, GaussianPredictive, gaussian_log_prob
from polymode.trees import Tree

# Means and spreads of targets beyond which a remark is due. Outputs begin around 1, a learned noise at 0.5,
# and Adam moves a number by its rate, 0.001, a step: by 10 in the 10,000 steps of a first comparison. Below
# SMALL a network has to unlearn outputs twenty times as large as what it is to tell apart.
FAR, SMALL = 10.0, 0.05


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """N(μ, σ²) with independent dimensions, whose log densities add up to one observation's."""

    squared_errors: ClassVar[bool] = True

    @abstractmethod
    def moments(self, outputs: Tree) -> tuple[Tensor, Tensor | float]:
        """Mean, and standard deviation of the same shape (or one number), of one or many members."""

    def _moments_like(self, outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        mean, std = self.moments(outputs)
        std = match_trailing_one(std, targets) if isinstance(std, Tensor) else std
        return match_trailing_one(mean, targets), std

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        return gaussian_log_prob(targets, *self._moments_like(outputs, targets))

    def errors(self, outputs: Tree, targets: Tensor) -> Tensor:
        squares = (self._moments_like(outputs, targets)[0] - targets).square()
        return squares.flatten(1).mean(1) if squares.ndim > 1 else squares

    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        if not targets.is_floating_point():
            raise InputError(
                f"Regression targets must be floating point, got {targets.dtype}: use targets.float()."
            )
        check_finite_targets(targets)

    def remark_on(self, targets: Tensor) -> str | None:
        each = targets.double().reshape(len(targets), -1)
        mean, spread = each.mean(0), each.std(0, correction=0)
        is_small = (spread > 0) & (spread < SMALL) & (self._known_noise < SMALL)
        hard = (spread > FAR) | (mean.abs() > FAR) | is_small
        if not bool(hard.any()):
            return None
        worst = int(hard.nonzero()[0])
        return (
            f"The targets have a mean of {mean[worst]:.4g} and a standard deviation of {spread[worst]:.4g}; "
            "networks learn well where these are about 0 and 1. Standardise them, (y - mean) / std, and "
            "bring predictions back with predictive.rescaled(mean, std); tables that the command line reads "
            "are standardised by themselves."
        )

    @property
    def _known_noise(self) -> float:
        """The standard deviation of noise that is known: much smaller errors do not matter."""
        return 0.0

    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        check_same_shape(type(self).__name__, self._moments_like(outputs, targets)[0], targets)

    def accumulator(self, num_points: int) -> Accumulator:
        return _GaussianAccumulator(self, num_points)


class _GaussianAccumulator(Accumulator):
    def __init__(self, likelihood: Gaussian, num_points: int) -> None:
        super().__init__(num_points)
        self.likelihood = likelihood
        self.centre: Tensor | None = None

    def update(self, outputs: Tree, weights: Tensor, rows: slice) -> None:
        mean, std = self.likelihood.moments(outputs)
        std = std if isinstance(std, Tensor) else torch.full_like(mean, std)
        if self.centre is None:
            self.centre = mean.new_zeros(self.num_points, *mean.shape[2:], dtype=torch.float64)
        if not bool(self.total[rows].any()):
            self.centre[rows] = mean[0].double()
        # Squares are taken around the first member: sums of raw squares would cancel.
        deviation = mean.double() - self.centre[rows]
        self.add("deviation", weights, deviation, rows)
        self.add("square", weights, deviation.square(), rows)
        self.add("noise", weights, std.double().square(), rows)
        self.count(weights, rows)
        self.dtype = mean.dtype

    def result(self) -> GaussianPredictive:
        dtype, self.dtype = self.dtype, torch.float64
        deviation = self.mean("deviation")
        spread = (self.mean("square") - deviation.square()).clamp(min=0)
        assert self.centre is not None
        return GaussianPredictive(
            (self.centre + deviation).to(dtype),
            self.mean("noise").to(dtype),
            spread.to(dtype),
            self.num_members,
        )


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
        noise = torch.special.ndtri(draw(targets.numel() // each.numel())).reshape(targets.shape)
        return targets + self.std * noise.to(targets.dtype), None


@dataclass(frozen=True)
class LearnedGaussian(Gaussian):
    """The network gives the mean; each member learns one noise level σ = softplus(ρ) + min_std.

    ρ is the parameter ``noise`` of the prepared network, which then returns (mean, ρ).
    """

    kind: ClassVar[str] = "gaussian"
    initial_std: float = 0.5
    min_std: float = 1e-4

    def __post_init__(self) -> None:
        if not self.initial_std > self.min_std > 0:
            raise InputError(
                f"LearnedGaussian needs initial_std > min_std > 0, got {self.initial_std} and {self.min_std}."
            )

    def prepare(self, module: nn.Module) -> nn.Module:
        return NoiseLevel(module, self)

    def moments(self, outputs: Tree) -> tuple[Tensor, Tensor]:
        if not isinstance(outputs, dict) or outputs.keys() != {"mean", "raw_std"}:
            raise InputError(
                "LearnedGaussian ('gaussian') learns its noise level beside the network. fit() adds it; "
                "in your own loop wrap every module: LearnedGaussian().prepare(module)."
            )
        mean, raw = outputs["mean"], outputs["raw_std"]
        return mean, F.softplus(raw) + self.min_std


class NoiseLevel(nn.Module):
    """A network beside a learned noise level: returns ``{"mean": ..., "raw_std": ...}``."""

    wraps = "network"  # where the user's network is

    def __init__(self, network: nn.Module, likelihood: LearnedGaussian) -> None:
        super().__init__()
        self.network = network
        self.training = network.training  # the wrapper is in the mode of what it wraps
        self.likelihood = likelihood
        start = torch.tensor(likelihood.initial_std - likelihood.min_std, dtype=torch.float64)
        reference = next(network.parameters(), torch.zeros(()))
        self.noise = nn.Parameter(start.expm1().log().to(reference.dtype).to(reference.device))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        mean = self.likelihood.read(self.network(*args, **kwargs))
        return {"mean": mean, "raw_std": self.noise.expand(mean.shape)}


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
