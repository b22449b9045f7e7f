"""What every likelihood is, and the checks they share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError, unknown_name
from polymode.likelihoods.predictive import Accumulator
from polymode.metrics.columns import Column
from polymode.metrics.diversity import label_disagreement
from polymode.trees import Tree

# Options that earlier versions did not have: files that do not name them mean the defaults.
LATER_OPTIONS = frozenset({"conformal", "noise_scale", "log_scale", "noise_rate", "temperature"})
# What all members put out for some points [M, b, ...], the members' weights [M], the targets [b, ...].
Seen = tuple[Tree, Tensor, Tensor]


@dataclass(frozen=True)
class Likelihood(ABC):
    """p(y | outputs). ``output`` names the entry to read when the network returns a dictionary.

    reads: whether a column of targets holds labels or numbers. columns: the scores that a comparison shows,
    by name; those that a posterior has not been given are left out. quality: the one that gains are measured
    in, proper and about the whole predictive. reference_kind: what a reference of it holds
    (``judging.contents``), None where there is none. levels: of the quantiles that its scores need. units:
    of targets, as the network sees them. difference_name: what ``difference`` measures.
    """

    kind: ClassVar[str]
    reads: ClassVar[Literal["labels", "numbers"]]
    columns: ClassVar[Mapping[str, Column]]
    quality: ClassVar[str]
    reference_kind: ClassVar[Literal["probabilities", "samples"] | None] = None
    levels: ClassVar[tuple[float, ...]] = ()
    units: ClassVar[str] = ""
    difference_name: ClassVar[str] = "disagreement"
    squared_errors: ClassVar[bool] = False
    per_token: ClassVar[bool] = False  # each entry of the targets is an observation of its own
    output: str | None = field(default=None, kw_only=True)

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

    def check_prepared(self, module: nn.Module) -> None:
        """Raise an ``InputError`` unless a module that was trained holds what ``prepare`` adds."""
        return

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

    def remark_on(self, targets: Tensor) -> str | None:
        """What to tell a user about targets that are allowed, but hard to learn; None where nothing is."""
        return None

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
        # A count of tokens is a tensor of integers: its reciprocal would have 32 bits, whatever terms have.
        return terms.sum() / -self.num_observations(targets)

    # --- data -------------------------------------------------------------------------------

    def num_outputs(self, targets: Iterable[Tensor]) -> int:
        """Outputs that a network needs for all targets, which come in parts [b, ...]."""
        return next(iter(targets))[0].numel()

    def class_names(self, num_outputs: int) -> tuple[str, ...]:
        """Names of the classes that so many outputs tell apart, where they have no others."""
        return ()

    def target_scaling(
        self, mean: float, std: float, geometric_mean: float = math.nan
    ) -> tuple[float, float]:
        """Shift and scale that raw targets of this mean and deviation are standardised with.

        geometric_mean: NaN where not all of them are positive.
        """
        return 0.0, 1.0

    @property
    def rates(self) -> Mapping[str, float]:
        """Names of what the likelihood itself learns, and how many times the usual rate each learns at."""
        return {}

    def randomised(self, targets: Tensor, draw: Callable[[int], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Targets, and weights of the examples, of one random data set; targets lead with any axes.

        draw(k): uniform numbers [..., k] in (0, 1) for each example. Here w ~ Exp(1): gradients of the
        weighted log likelihood then vary with the covariance that the information matrix has (the weighted
        likelihood bootstrap, Newton and Raftery 1994).
        """
        return targets, -draw(1).squeeze(-1).log()

    def on_log_scale(self, log_scale: float) -> "Likelihood":
        """The same about positive targets on a logarithmic scale, log(y)/log_scale."""
        raise InputError(
            f"A logarithmic scale is for 'gaussian' and 'heteroscedastic_gaussian', not for {self.kind!r}."
        )

    # --- other models -----------------------------------------------------------------------

    @property
    def of_baseline(self) -> "Likelihood | None":
        """What logits, or means beside raw deviations, of a model that is no network mean for these targets.

        None where such a model cannot be judged by the same scores.
        """
        return None

    def raw_outputs(self, mean: Tensor, std: Tensor) -> Tensor:
        """The outputs that have these means and deviations."""
        raise InputError(f"Outputs of {self.kind!r} are not made of means and deviations.")

    def latent(self, targets: Tensor) -> Tensor:
        """Targets as such a model learns them: on the scale on which their noise is Gaussian."""
        return targets

    # --- calibration ------------------------------------------------------------------------

    @property
    def uncalibrated(self) -> Self:
        """The same without what calibration has learned."""
        return self

    def calibrated(self, seen: Sequence[Seen]) -> Self:
        """The same with what calibration learns of held-out points: outputs [M, b, ...], weights, targets."""
        raise InputError(f"The likelihood {self.kind!r} has nothing to calibrate.")

    @property
    def learned_by_calibration(self) -> dict[str, float]:
        """The factor that calibration has learned, by its name."""
        return {}

    def nll(self, seen: Sequence[Seen]) -> float:
        """Minus the mean log probability that the mixture gives to held-out points."""
        total, count = 0.0, 0
        for outputs, weights, targets in seen:
            log_prob = mixture_log_prob(self, outputs, weights, targets)[self.observed(targets)]
            total, count = total - float(log_prob.sum()), count + log_prob.numel()
        return total / max(count, 1)

    # --- judging ----------------------------------------------------------------------------

    def found(self, outputs: Tree, weights: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What the mixture of outputs [M, b, ...] says of its targets, for scores and curves.

        "log_prob" and what ``Predictive.scores`` of this likelihood reads beside it, a row an observation.
        """
        return {"log_prob": mixture_log_prob(self, outputs, weights, targets)}

    @abstractmethod
    def answers(self, outputs: Tree) -> Tensor:
        """The one answer that each member gives, [M, b, ...]: a label or a number."""

    def difference(self, answers: Tensor, targets: Tensor) -> Tensor:
        """How far the answers [M, N] of every two members are apart, [M, M]; targets: of all test points."""
        return label_disagreement(answers)

    @abstractmethod
    def function_values(self, outputs: Tree) -> Tensor:
        """All that each member says of a point, [M, b, ...], as numbers that chains can be compared by."""

    def quantiles(self, outputs: Tree, weights: Tensor, levels: Sequence[float]) -> Tensor:
        """Quantiles [q, b, ...] of the mixture of all members' outputs [M, b, ...] at some points."""
        raise InputError(f"Quantiles need a likelihood of numbers, this one is {self.kind!r}.")

    def samples(
        self, outputs: Tree, weights: Tensor, num_samples: int, noise: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Samples [S, b] of the mixture of outputs [M, b, 1], and the member [S] that each comes from."""
        raise InputError(f"Samples of numbers need a likelihood of numbers, this one is {self.kind!r}.")

    def config(self) -> dict:
        """The kind and options, as JSON values; those that came later only where they are set."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        unset = {
            each.name for each in fields(self) if getattr(self, each.name) == each.default
        } & LATER_OPTIONS
        return {"kind": self.kind} | {name: value for name, value in plain.items() if name not in unset}


def mixture_log_prob(likelihood: Likelihood, outputs: Tree, weights: Tensor, targets: Tensor) -> Tensor:
    """Log Σ_m w_m p(y | outputs_m) of each observation, [b] or [b, T], in 64 bits."""
    each = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, targets).double()
    shares = (weights.double() / weights.double().sum()).log().reshape(-1, *[1] * (each.ndim - 1))
    return torch.logsumexp(each + shares, 0)


def first_place(mask: Tensor) -> str:
    """Where a mask first holds, in words."""
    return f"first at position {tuple(mask.nonzero()[0].tolist())}"


def check_finite_targets(targets: Tensor) -> None:
    """Raise an ``InputError`` for targets that are NaN or infinite."""
    if targets.is_floating_point() and not bool(targets.isfinite().all()):
        bad = ~targets.isfinite()
        raise InputError(
            f"{int(bad.sum())} targets are NaN or infinite, {first_place(bad)}. Remove or impute them."
        )


def match_trailing_one(tensor: Tensor, targets: Tensor) -> Tensor:
    """Drop an output axis of length one that the targets do not have ([B, 1] against [B])."""
    if tensor.ndim == targets.ndim + 1 and tensor.shape[-1] == 1:
        return tensor.squeeze(-1)
    return tensor


def check_same_shape(kind: str, outputs: Tensor, targets: Tensor) -> None:
    """Raise an ``InputError`` unless outputs and targets have one shape."""
    if outputs.shape != targets.shape:
        raise InputError(
            f"{kind}: the network gives {list(outputs.shape)} for targets {list(targets.shape)}; "
            "the shapes must agree."
        )
