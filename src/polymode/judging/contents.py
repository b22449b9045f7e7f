"""What a reference holds, probabilities of classes or samples of numbers, and how far others are from it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polymode.data import Data
from polymode.errors import InputError, require
from polymode.likelihoods import Likelihood, Predictive
from polymode.metrics import agreement, total_variation, wasserstein1, wasserstein2
from polymode.metrics.scores import check_probabilities
from polymode.posteriors import Posterior
from polymode.trees import Tree

NUM_SAMPLES = 1000  # of a predictive distribution; the number that the HMC references in use have
REFERENCE_SEED = 1  # of the noise in a reference's samples: not that of the methods, which is 0


class Contents(ABC):
    """One kind of values, a matrix whose axis ``point_axis`` is that of the test points."""

    name: ClassVar[str]
    point_axis: ClassVar[int]
    units: ClassVar[str] = ""  # of distances, where a reference does not tell

    @abstractmethod
    def check(self, values: Tensor) -> None:
        """Raise an ``InputError`` unless a matrix can be the values of a reference."""

    @abstractmethod
    def check_task(self, targets: Tensor) -> None:
        """Raise an ``InputError`` for test targets that no reference can be made of."""

    def check_about(self, values: Tensor, test: Data, num_outputs: int | None) -> None:
        """Raise an ``InputError`` unless values can be about these test data."""
        return

    def check_order(self, values: Tensor, test: Data) -> None:
        """Raise an ``InputError`` where values that name no rows are in another order than the test data."""
        return

    @abstractmethod
    def predicted(
        self,
        posterior: Posterior,
        inputs: Tree,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
        *,
        predictive: Predictive | None = None,
        seed: int = 0,
    ) -> Tensor:
        """What a posterior predicts. predictive: of the same draws, where it is known; seed: of noise."""

    def kept(self, values: Tensor) -> Tensor:
        """Values as a file holds them."""
        return values

    @abstractmethod
    def distances(self, predicted: Tensor, reference: Tensor) -> dict[str, float]:
        """Distances by the names of their columns, means over the points."""

    @abstractmethod
    def between_halves(
        self,
        likelihood: Likelihood,
        outputs: Tree,
        weights: Tensor,
        halves: Sequence[Tensor],
        noise: torch.Generator,
    ) -> list[dict[str, float]]:
        """Distances between what the members [M] of each half and all others predict at some points."""


class Probabilities(Contents):
    """Mean probabilities [N, C] of classes."""

    name = "probabilities"
    point_axis = 0

    def check(self, values: Tensor) -> None:
        off = (values.double().sum(1) - 1).abs().max().item()
        if off > 1e-3 or bool((values < -1e-6).any()):
            raise InputError(
                "Probabilities of a reference must be at least 0 and sum to 1 in each row; one is off "
                f"by {off:.2g}."
            )

    def check_task(self, targets: Tensor) -> None:
        return

    def check_about(self, values: Tensor, test: Data, num_outputs: int | None) -> None:
        if num_outputs is not None and values.shape[1] != num_outputs:
            raise InputError(f"The reference has {values.shape[1]} classes, the task has {num_outputs}.")

    def check_order(self, values: Tensor, test: Data) -> None:
        labels = torch.cat([examples.targets for examples in test.in_order()]).cpu()
        right = (values.argmax(1) == labels).double().mean().item()
        commonest = labels.bincount().max().item() / len(labels)
        if right < commonest - 3 * (commonest * (1 - commonest) / len(labels)) ** 0.5:
            raise InputError(
                f"The reference is right on {right:.1%} of the test points, less than always naming the "
                f"commonest class ({commonest:.1%}): it seems to be in another order."
            )

    def predicted(
        self,
        posterior: Posterior,
        inputs: Tree,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
        *,
        predictive: Predictive | None = None,
        seed: int = 0,
    ) -> Tensor:
        return (predictive or posterior.predict(inputs, num_draws, generator)).mean

    def distances(self, predicted: Tensor, reference: Tensor) -> dict[str, float]:
        reference = torch.as_tensor(reference).to(predicted.device)
        check_probabilities(reference.flatten(0, -2))
        return {
            "agreement": agreement(predicted, reference),
            "total_variation": total_variation(predicted, reference),
        }

    def between_halves(
        self,
        likelihood: Likelihood,
        outputs: Tree,
        weights: Tensor,
        halves: Sequence[Tensor],
        noise: torch.Generator,
    ) -> list[dict[str, float]]:
        probabilities = likelihood.function_values(outputs).double()
        found = []
        for half in halves:
            first, second = (_mean(probabilities, weights, part) for part in (half, ~half))
            found.append(
                {"agreement": agreement(first, second), "total_variation": total_variation(first, second)}
            )
        return found


class Samples(Contents):
    """Samples [S, N] of the predictive distribution of one number a point, as the network sees it."""

    name = "samples"
    point_axis = 1
    units = "standardised units"

    def check(self, values: Tensor) -> None:
        return

    def check_task(self, targets: Tensor) -> None:
        require(
            targets[0].numel() == 1,
            f"A reference of numbers is about one output; these targets have {targets[0].numel()}.",
        )

    def predicted(
        self,
        posterior: Posterior,
        inputs: Tree,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
        *,
        predictive: Predictive | None = None,
        seed: int = 0,
    ) -> Tensor:
        return predictive_samples(posterior, inputs, num_draws, generator, seed=seed).cpu()

    def kept(self, values: Tensor) -> Tensor:
        return values.float()

    def distances(self, predicted: Tensor, reference: Tensor) -> dict[str, float]:
        return {
            "wasserstein1": wasserstein1(predicted, reference),
            "wasserstein2": wasserstein2(predicted, reference),
        }

    def between_halves(
        self,
        likelihood: Likelihood,
        outputs: Tree,
        weights: Tensor,
        halves: Sequence[Tensor],
        noise: torch.Generator,
    ) -> list[dict[str, float]]:
        samples, members = likelihood.samples(outputs, weights, NUM_SAMPLES, noise)
        chosen = [half.to(members.device)[members] for half in halves]
        return [self.distances(samples[half], samples[~half]) for half in chosen]


CONTENTS: dict[str, Contents] = {contents.name: contents for contents in (Probabilities(), Samples())}


def contents_for(likelihood: Likelihood, what: str = "A reference") -> Contents:
    """What a reference of a likelihood holds, or an ``InputError`` where it has none."""
    if likelihood.reference_kind is None:
        raise InputError(f"{what} is of classes or numbers, not of the likelihood {likelihood.kind!r}.")
    return CONTENTS[likelihood.reference_kind]


def predictive_samples(
    posterior: Posterior,
    inputs: Tree,
    num_draws: int | None = None,
    generator: torch.Generator | None = None,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Tensor:
    """Samples [S, N] of the predictive distribution of a regression with one output.

    Members take part in proportion to their weights, spread evenly over all of them where there are more
    than samples, each with noise of its own.
    """
    likelihood = posterior.network.likelihood
    noise = torch.Generator().manual_seed(seed)
    chunks = []
    for _, outputs, weights in posterior.by_points(inputs, num_draws, generator):
        chunks.append(likelihood.samples(outputs, weights, num_samples, noise)[0])
    return torch.cat(chunks, 1)


def _mean(values: Tensor, weights: Tensor, some: Tensor) -> Tensor:
    """The mean over some of the members, [M, ...] -> [...]."""
    some = some.to(values.device)
    share = weights.double()[some]
    return torch.tensordot(share / share.sum(), values[some], 1)
