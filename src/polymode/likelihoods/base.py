"""What every likelihood is, and the checks they share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polymode.errors import InputError, unknown_name
from polymode.likelihoods.predictive import Accumulator
from polymode.trees import Tree


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
        return terms.sum() * (-1 / self.num_observations(targets))

    def randomised(self, targets: Tensor, draw: Callable[[int], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Targets, and weights of the examples, of one random data set; targets lead with any axes.

        draw(k): uniform numbers [..., k] in (0, 1) for each example. Here w ~ Exp(1): gradients of the
        weighted log likelihood then vary with the covariance that the information matrix has (the weighted
        likelihood bootstrap, Newton and Raftery 1994).
        """
        return targets, -draw(1).squeeze(-1).log()

    def config(self) -> dict:
        """The kind and options, as JSON values."""
        return {"kind": self.kind} | asdict(self)


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
