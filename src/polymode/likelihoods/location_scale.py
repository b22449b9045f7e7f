"""Numbers that scatter around a location: how they are standardised, and a noise level that is learned."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError, require_positive
from polymode.likelihoods.base import Seen, check_finite_targets, match_trailing_one
from polymode.likelihoods.calibration import best_factor
from polymode.likelihoods.numbers import Numbers
from polymode.trees import Tree

# Means and spreads of targets beyond which a remark is due. Outputs begin around 1, a learned noise at 0.5,
# and Adam moves a number by its rate, 0.001, a step: by 10 in the 10,000 steps of a first comparison. Below
# SMALL a network has to unlearn outputs twenty times as large as what it is to tell apart.
FAR, SMALL = 10.0, 0.05


@dataclass(frozen=True)
class LocationScale(Numbers):
    """Numbers with a mean and a standard deviation: shifting and scaling them changes nothing else.

    noise_scale: a factor on the noise of every member, which calibration learns of held-out points.
    """

    noise_scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("noise_scale", self.noise_scale)

    @abstractmethod
    def trained_moments(self, outputs: Tree) -> tuple[Tensor, Tensor | float]:
        """Mean, and standard deviation of the same shape (or one number), as members were trained to give."""

    def moments(self, outputs: Tree) -> tuple[Tensor, Tensor | float]:
        """Mean, and standard deviation of the same shape (or one number), of one or many members."""
        mean, std = self.trained_moments(outputs)
        return mean, std if self.noise_scale == 1 else std * self.noise_scale

    @property
    def uncalibrated(self) -> Self:
        return replace(self, noise_scale=1.0, conformal=())

    def calibrated(self, seen: Sequence[Seen]) -> Self:
        """The noise scale with the lowest held-out NLL, then the scores that conformal intervals rest on."""
        raw = self.uncalibrated
        scaled = replace(raw, noise_scale=best_factor(lambda c: replace(raw, noise_scale=c).nll(seen)))
        return replace(scaled, conformal=scaled.conformal_scores(seen))

    @property
    def learned_by_calibration(self) -> dict[str, float]:
        return {"noise_scale": self.noise_scale}

    def means(self, outputs: Tree) -> Tensor:
        return self.moments(outputs)[0]

    def _moments_like(self, outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        mean, std = self.moments(outputs)
        std = match_trailing_one(std, targets) if isinstance(std, Tensor) else std
        return match_trailing_one(mean, targets), std

    def function_values(self, outputs: Tree) -> Tensor:
        mean, std = self.moments(outputs)
        both = [mean, std] if isinstance(std, Tensor) else [mean]
        return torch.cat([part.flatten(2) if part.ndim > 2 else part[..., None] for part in both], -1)

    def target_scaling(
        self, mean: float, std: float, geometric_mean: float = math.nan
    ) -> tuple[float, float]:
        return mean, std

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


@dataclass(frozen=True)
class LearnedNoise(LocationScale):
    """The network gives the mean; each member learns one noise level σ = softplus(ρ) + min_std.

    ρ is the parameter ``noise`` of the prepared network, which then returns (mean, ρ). noise_rate: it learns
    at so many times the rate of the weights, and carries no weight decay.
    """

    initial_std: float = field(default=0.5, kw_only=True)
    min_std: float = field(default=1e-4, kw_only=True)
    noise_rate: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("noise_rate", self.noise_rate)
        if not self.initial_std > self.min_std > 0:
            raise InputError(
                f"{type(self).__name__} needs initial_std > min_std > 0, got {self.initial_std} and "
                f"{self.min_std}."
            )

    @property
    def rates(self) -> Mapping[str, float]:
        return {} if self.noise_rate == 1 else {"noise": self.noise_rate}

    def prepare(self, module: nn.Module) -> nn.Module:
        return NoiseLevel(module, self)

    def check_prepared(self, module: nn.Module) -> None:
        if not isinstance(module, NoiseLevel):
            raise InputError(
                f"The noise level of {self.kind!r} is trained beside the network: train or patch "
                f"likelihood.prepare(module) with likelihood = {type(self).__name__}(), or use a likelihood "
                "without one, such as 'fixed_gaussian'."
            )

    def trained_moments(self, outputs: Tree) -> tuple[Tensor, Tensor]:
        if not isinstance(outputs, dict) or outputs.keys() != {"mean", "raw_std"}:
            raise InputError(
                f"{type(self).__name__} ({self.kind!r}) learns its noise level beside the network. fit() "
                f"adds it; in your own loop wrap every module: {type(self).__name__}().prepare(module)."
            )
        mean, raw = outputs["mean"], outputs["raw_std"]
        return mean, F.softplus(raw) + self.min_std


@dataclass(frozen=True)
class NoiseOfInputs(LocationScale):
    """The network gives [..., 2D]: D means, then D raw noise levels, σ = softplus(·) + min_std."""

    min_std: float = 1e-6

    def trained_moments(self, outputs: Tree) -> tuple[Tensor, Tensor]:
        both = self.read(outputs)
        if both.shape[-1] % 2:
            raise InputError(
                f"{type(self).__name__} needs an even number of outputs (means, then raw standard "
                f"deviations), the network gives {both.shape[-1]}."
            )
        mean, raw = both.chunk(2, -1)
        return mean, F.softplus(raw) + self.min_std

    def raw_outputs(self, mean: Tensor, std: Tensor) -> Tensor:
        """The outputs [..., 2] that have these means and deviations [...]."""
        above = (std - self.min_std).clamp(min=self.min_std)
        # softplus undone; beyond 30 it is the identity.
        return torch.stack([mean, torch.where(above > 30, above, above.clamp(max=30).expm1().log())], -1)

    def num_outputs(self, targets: Iterable[Tensor]) -> int:
        return 2 * super().num_outputs(targets)


class NoiseLevel(nn.Module):
    """A network beside a learned noise level: returns ``{"mean": ..., "raw_std": ...}``."""

    wraps = "network"  # where the user's network is

    def __init__(self, network: nn.Module, likelihood: LearnedNoise) -> None:
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
