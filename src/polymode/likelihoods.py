"""Likelihoods: what a network's outputs mean, for one member.

Each has ``log_prob(outputs, targets)`` per observation, ``check`` for bad input before training, and
an accumulator that turns the outputs of many members into one predictive.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError, unknown_name
from polymode.predictive import (
    Accumulator,
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    gaussian_log_prob,
    mixture_quantiles,
    softmax_and_entropy,
)
from polymode.trees import Tree, map_tree


@dataclass(frozen=True)
class Likelihood(ABC):
    """p(y | outputs). ``output`` names the entry to read when the network returns a dictionary."""

    kind: ClassVar[str]
    squared_errors: ClassVar[bool] = False
    per_token: ClassVar[bool] = False  # each entry of the targets is an observation of its own
    output: str | None = None

    def read(self, outputs: Tree) -> Tree:
        """Pick the tensor this likelihood is about from what the network returned."""
        if isinstance(outputs, dict):
            if self.output is None:
                raise InputError(
                    f"The network returns a dictionary with {sorted(outputs)}; name the entry that "
                    f"the likelihood reads: {type(self).__name__}(output=...)."
                )
            if self.output not in outputs:
                raise unknown_name("network output", self.output, outputs)
            return outputs[self.output]
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"The network returns a {type(outputs).__name__}; a likelihood reads a tensor or one "
                "entry of a dictionary. Wrap the network so that it returns one of these."
            )
        return outputs

    def prepare(self, module: nn.Module) -> nn.Module:
        """Add what the likelihood itself has to learn to the (prepared) network."""
        return module

    @abstractmethod
    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        """Log-likelihood terms [B, ...] that add up to the observations'; ignored ones give 0."""

    def log_prob(self, outputs: Tree, targets: Tensor) -> Tensor:
        """Log-likelihood of each observation: [B], or [B, T] per token."""
        terms = self.terms(outputs, targets)
        if terms.ndim == 1 or self.per_token:
            return terms
        return terms.flatten(1).sum(1)

    def num_observations(self, targets: Tensor) -> Tensor | int:
        """Number of observations among the targets (tokens that are not ignored, else examples)."""
        return targets.shape[0]

    def observed(self, targets: Tensor) -> Tensor:
        """Which entries of ``log_prob`` are observations, [B] or [B, T]."""
        return torch.ones(targets.shape[0], dtype=torch.bool, device=targets.device)

    @abstractmethod
    def errors(self, outputs: Tree, targets: Tensor) -> Tensor:
        """Error of each observation, [B, ...]: 0 or 1, a share of wrong labels, or a squared error."""

    @abstractmethod
    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        """Raise an ``InputError`` for targets that the network cannot have, given some of its outputs."""

    @abstractmethod
    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        """Raise an ``InputError`` when one member's outputs [B, ...] do not fit their targets' shape."""

    @abstractmethod
    def accumulator(self, num_points: int) -> Accumulator: ...

    def mean_loss(self, outputs: Tree, targets: Tensor, weights: Tensor | None) -> Tensor:
        """−Σ_n w_n log p(y_n | x_n) / n_obs: the mean over the batch's observations, a scalar."""
        terms = self.terms(outputs, targets)
        if weights is not None:
            terms = terms * weights.reshape(-1, *[1] * (terms.ndim - 1))
        return terms.sum() * (-1 / self.num_observations(targets))

    def config(self) -> dict:
        """The kind and options, as JSON values."""
        return {"kind": self.kind} | asdict(self)


def _example(mask: Tensor) -> str:
    return f"first at position {tuple(mask.nonzero()[0].tolist())}"


def _check_finite(targets: Tensor) -> None:
    if targets.is_floating_point() and not bool(targets.isfinite().all()):
        bad = ~targets.isfinite()
        raise InputError(
            f"{int(bad.sum())} targets are NaN or infinite, {_example(bad)}. Remove or impute them."
        )


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Softmax over the last axis: logits [B, C] with labels [B], or [B, T, C] with tokens [B, T].

    Every token is an observation; those equal to ``ignore_index`` are not.
    """

    kind: ClassVar[str] = "categorical"
    per_token: ClassVar[bool] = True
    ignore_index: int | None = None

    def _ignored(self, targets: Tensor) -> Tensor:
        if self.ignore_index is None:
            return torch.zeros_like(targets, dtype=torch.bool)
        return targets == self.ignore_index

    def num_observations(self, targets: Tensor) -> Tensor | int:
        if self.ignore_index is None:
            return targets.numel()
        return (~self._ignored(targets)).sum().clamp(min=1)

    def observed(self, targets: Tensor) -> Tensor:
        return ~self._ignored(targets)

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        logits, targets = self.read(outputs).movedim(-1, 1), targets.long()
        ignored = -100 if self.ignore_index is None else self.ignore_index
        return -F.cross_entropy(logits, targets, reduction="none", ignore_index=ignored)

    def errors(self, outputs: Tree, targets: Tensor) -> Tensor:
        wrong = self.read(outputs).argmax(-1) != targets
        return (wrong & ~self._ignored(targets)).float()

    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise InputError(
                f"Class labels must be integers, got {targets.dtype}. Use targets.long() for indices, "
                "targets.argmax(-1) for one-hot rows, or likelihood='bernoulli' for yes/no targets."
            )
        negative = (targets < 0) & ~self._ignored(targets)
        if bool(negative.any()):
            raise InputError(
                f"Class labels must be 0 or larger, got {int(targets[negative].min())}, "
                f"{_example(negative)}. To leave observations out pass Categorical(ignore_index=...)."
            )
        num_classes = self.read(outputs).shape[-1]
        too_large = (targets >= num_classes) & ~self._ignored(targets)
        if bool(too_large.any()):
            raise InputError(
                f"Label {int(targets[too_large].max())} is out of range, {_example(too_large)}: the "
                f"network has {num_classes} outputs, so labels go from 0 to {num_classes - 1}."
            )

    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        logits = self.read(outputs)
        if logits.ndim < 2 or logits.shape[:-1] != targets.shape:
            advice = ""
            if targets.ndim == logits.ndim and targets.shape[-1] == 1:
                advice = " Use targets.squeeze(-1)."
            elif targets.shape == logits.shape:
                advice = " For one-hot rows use targets.argmax(-1)."
            raise InputError(
                f"Categorical needs logits [B, C] for labels [B], or [B, T, C] for [B, T]; the "
                f"network gives {list(logits.shape)} for labels {list(targets.shape)}.{advice}"
            )
        if bool((logits >= 0).all()) and bool((logits.sum(-1) - 1).abs().max() < 1e-4):
            warnings.warn(
                "The network's outputs are non-negative and sum to 1: it seems to end in a softmax, but "
                "Categorical takes logits. Remove the softmax.",
                stacklevel=2,
            )
        if logits.shape[-1] < 2:
            raise InputError("Categorical needs at least two outputs; for one yes/no output use 'bernoulli'.")

    def accumulator(self, num_points: int) -> Accumulator:
        return _CategoricalAccumulator(self, num_points)


class _CategoricalAccumulator(Accumulator):
    def __init__(self, likelihood: Categorical, num_points: int) -> None:
        super().__init__(num_points)
        self.likelihood = likelihood

    def update(self, outputs: Tree, weights: Tensor, rows: slice) -> None:
        probabilities, entropies = softmax_and_entropy(self.likelihood.read(outputs))
        self.add("mean", weights, probabilities, rows)
        self.add("entropy", weights, entropies, rows)
        self.count(weights, rows)

    def result(self) -> CategoricalPredictive:
        return CategoricalPredictive(self.mean("mean"), self.mean("entropy"), self.num_members)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent yes/no outputs (multi-label): logits and targets [B, ...], targets in [0, 1].

    The labels of one example are one observation: their log-probabilities add up.
    """

    kind: ClassVar[str] = "bernoulli"

    def _logits(self, outputs: Tree, targets: Tensor) -> Tensor:
        return _match_trailing_one(self.read(outputs), targets)

    def terms(self, outputs: Tree, targets: Tensor) -> Tensor:
        logits = self._logits(outputs, targets)
        return -F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")

    def errors(self, outputs: Tree, targets: Tensor) -> Tensor:
        wrong = ((self._logits(outputs, targets) > 0) != (targets > 0.5)).float()
        return wrong.flatten(1).mean(1) if wrong.ndim > 1 else wrong

    def check_targets(self, targets: Tensor, outputs: Tree) -> None:
        _check_finite(targets)
        outside = (targets < 0) | (targets > 1)
        if bool(outside.any()):
            raise InputError(
                f"Bernoulli targets must lie between 0 and 1, got {targets[outside][0].item()}, "
                f"{_example(outside)}."
            )

    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        _check_same_shape("Bernoulli", self._logits(outputs, targets), targets)

    def accumulator(self, num_points: int) -> Accumulator:
        return _BernoulliAccumulator(self, num_points)


class _BernoulliAccumulator(Accumulator):
    def __init__(self, likelihood: Bernoulli, num_points: int) -> None:
        super().__init__(num_points)
        self.likelihood = likelihood

    def update(self, outputs: Tree, weights: Tensor, rows: slice) -> None:
        probability = self.likelihood.read(outputs).sigmoid()
        both = torch.special.entr(probability) + torch.special.entr(1 - probability)
        self.add("mean", weights, probability, rows)
        self.add("entropy", weights, both, rows)
        self.count(weights, rows)

    def result(self) -> BernoulliPredictive:
        return BernoulliPredictive(self.mean("mean"), self.mean("entropy"), self.num_members)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """N(μ, σ²) with independent dimensions, whose log densities add up to one observation's."""

    squared_errors: ClassVar[bool] = True

    @abstractmethod
    def moments(self, outputs: Tree) -> tuple[Tensor, Tensor | float]:
        """Mean, and standard deviation of the same shape (or one number), of one or many members."""

    def _moments_like(self, outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        mean, std = self.moments(outputs)
        std = _match_trailing_one(std, targets) if isinstance(std, Tensor) else std
        return _match_trailing_one(mean, targets), std

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
        _check_finite(targets)

    def check_outputs(self, outputs: Tree, targets: Tensor) -> None:
        _check_same_shape(type(self).__name__, self._moments_like(outputs, targets)[0], targets)

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

    def __init__(self, network: nn.Module, likelihood: LearnedGaussian) -> None:
        super().__init__()
        self.network = network
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


def _match_trailing_one(tensor: Tensor, targets: Tensor) -> Tensor:
    """Drop an output axis of length one that the targets do not have ([B, 1] against [B])."""
    if tensor.ndim == targets.ndim + 1 and tensor.shape[-1] == 1:
        return tensor.squeeze(-1)
    return tensor


def _check_same_shape(kind: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise InputError(
            f"{kind}: the network gives {list(outputs.shape)} for targets {list(targets.shape)}; "
            "the shapes must agree."
        )


LIKELIHOODS: dict[str, type[Likelihood]] = {
    likelihood.kind: likelihood
    for likelihood in (
        Categorical,
        Bernoulli,
        LearnedGaussian,
        FixedGaussian,
        HeteroscedasticGaussian,
    )
}


def make_likelihood(likelihood: "str | Likelihood | dict") -> Likelihood:
    """Read a likelihood given as an object, a name or a configuration."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str | dict):
        given = likelihood.__name__ if isinstance(likelihood, type) else type(likelihood).__name__
        raise InputError(
            f"likelihood must be a name ({', '.join(LIKELIHOODS)}) or an instance such as Categorical(), "
            f"got {given}."
        )
    options = {"kind": likelihood} if isinstance(likelihood, str) else dict(likelihood)
    kind = options.pop("kind")
    if kind not in LIKELIHOODS:
        raise unknown_name("likelihood", kind, LIKELIHOODS)
    return LIKELIHOODS[kind](**options)


def member_losses(
    likelihood: str | Likelihood, outputs: Tree, targets: Tensor, *, targets_have_members: bool = False
) -> Tensor:
    """Mean negative log-likelihood of each member, [M], from outputs [M, B, ...].

    For one's own loop: sum these losses and step; averaging them would divide every member's gradient by M.
    """
    likelihood = make_likelihood(likelihood)
    in_dims = (0, 0 if targets_have_members else None)
    likelihood.check_outputs(
        map_tree(lambda t: t[0].detach(), outputs), targets[0] if targets_have_members else targets
    )
    return torch.vmap(lambda o, t: likelihood.mean_loss(o, t, None), in_dims=in_dims)(outputs, targets)


def quantiles_of(likelihood: Likelihood, outputs: Tree, weights: Tensor, levels: Sequence[float]) -> Tensor:
    """Quantiles [q, b, ...] of the mixture of all members' outputs [m, b, ...] at some points."""
    if not isinstance(likelihood, Gaussian):
        raise InputError(f"Quantiles need a Gaussian likelihood, this one is {likelihood.kind!r}.")
    means, stds = likelihood.moments(outputs)
    stds = stds if isinstance(stds, Tensor) else torch.full_like(means, stds)
    weights = weights.double() / weights.double().sum()
    at = torch.tensor(list(levels), dtype=torch.float64, device=means.device)
    return mixture_quantiles(means, stds, weights, at)
