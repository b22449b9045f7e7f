"""The log density of every chain's posterior, for samplers that move all weights at once."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.networks.members import Tensors
from polymode.networks.surgery import batch_norms, random_layers
from polymode.samplers import as_vectors, views_of
from polymode.training.contract.batch import Batch
from polymode.training.contract.objective import Objective
from polymode.training.contract.problem import Problem
from polymode.training.contract.state import State
from polymode.trees import Tree

# What a sampler does with a density and its own tensors between two decisions.
Move = Callable[..., Any]


class LogDensity:
    """ℓ(θ) = (Σ_n log p(y_n | x_n, θ) − Σ_j θ_j²/(2 s_j²))/T of all chains, θ as vectors [G, D].

    ``position`` is θ, to be moved in place; ``write_back`` gives it to the members. stds: the width s of each
    weight's prior, by name. whole: whether the batches are all data; of a minibatch, the sum over
    observations is N times their mean.
    """

    def __init__(
        self,
        stds: Mapping[str, float],
        state: State,
        batches: Sequence[Batch],
        objective: Objective,
        temperature: float = 1.0,
        *,
        whole: bool = True,
    ) -> None:
        self.batches, self.objective, self.temperature = batches, objective, temperature
        self.stds = stds
        weights = {name: state.members.stacked[name] for name in stds}
        self.position = as_vectors(weights)
        self.weights, self.views = weights, views_of(self.position, weights)
        # Views move with the vectors; weights of several types are copied before every look.
        self.copied = any(view.dtype != weights[name].dtype for name, view in self.views.items())
        moving = state.members.stacked | ({} if self.copied else self.views)
        self.moving = replace(state, members=replace(state.members, stacked=moving))
        self.counts = objective.observations(batches, state)
        self.num_observations = self.counts.sum(0) if whole else objective.num_observations.to(self.counts)
        self.widths = prior_widths(stds, weights)
        # ∇ℓ = −(θ/s² + N ∇L)/T
        self._of_prior = (-1 / (self.widths.square() * temperature)).to(self.position.dtype)
        self._replays: dict[Any, Any] = {}
        self._of_data = (-self.num_observations[:, None] / temperature).to(self.position.dtype)

    @property
    def active(self) -> Tensor:
        """The chains that have an observation in these batches, [G]."""
        return self.counts.sum(0) > 0

    def advance(self, move: Move, *arguments: Tree, then: tuple[Tree, ...] = (), looks: int = 1) -> Any:
        """``move(density, *arguments, *then)``, which takes so many looks and changes tensors in place.

        Where the run is compiled, all of it is one graph. arguments: trees of tensors that are the same ones
        at every call; then: those that are not.
        """
        if move not in self._replays:
            self._replays[move] = self._recorded(move, arguments, then)
        replay = self._replays[move]
        if replay is None:
            return move(self, *arguments, *then)
        [batch] = self.batches
        count = self.moving.members.group_size * batch.pieces[0].num_passes
        self.moving.gradient_examples[batch.pieces[0].groups] += looks * count
        return replay(then)

    def _recorded(
        self, move: Move, arguments: tuple[Tree, ...], then: tuple[Tree, ...]
    ) -> Callable[..., Any] | None:
        """The move as a compiled graph of what changes; None where it is not to be one, or cannot."""
        found = None
        if self.objective.execution.backend == "compiled" and len(self.batches) == 1 and not self.copied:
            found = self.objective.evaluation(self.moving, self.batches[0])
        if found is None:
            return None
        evaluate, (stacked, *others) = found

        def moved(position: Tensor, rest: Tree, others: Tree, arguments: Tree, then: Tree) -> Any:
            here = copy.copy(self)
            here.position, here.views = position, views_of(position, self.weights)
            here.means = lambda: evaluate(rest | here.views, *others)[:2]
            return move(here, *arguments, *then)

        rest = {name: tensor for name, tensor in stacked.items() if name not in self.stds}
        everything = (self.position, rest, others, arguments, then)
        # A recording keeps the numbers of the density that it was made of: others have one of their own.
        numbers = (self.temperature, *self.stds.items(), *self.num_observations.tolist())
        recording = self.objective.recorded((move, numbers), moved, everything)
        return None if recording is None else recording.bind(*everything[:-1])

    def means(self) -> tuple[Tensor, Tensors]:
        """Mean losses of the data [G], and their gradients by name."""
        if self.copied:
            self.write_back()
        return self.objective.means(self.moving, self.batches, self.counts)

    def look(self) -> tuple[Tensor, Tensor]:
        """Mean losses of the data [G] and ∇ℓ [G, D] at the present position."""
        losses, gradients = self.means()
        gradient = as_vectors({name: gradients[name] for name in self.stds}).mul_(self._of_data)
        return losses, gradient.addcmul_(self.position, self._of_prior)

    def value(self, losses: Tensor) -> Tensor:
        """ℓ(θ), in double precision: energies are differences of large numbers."""
        of_prior = (self.position.double() / self.widths).square().sum(1) / 2
        return -(losses.double() * self.num_observations + of_prior) / self.temperature

    def write_back(self) -> None:
        """Give the members the present position."""
        for name, view in self.views.items():
            self.weights[name].copy_(view)


def prior_widths(stds: Mapping[str, float], weights: Mapping[str, Tensor]) -> Tensor:
    """The prior's width of each scalar of the stacked weights, as ``as_vectors`` has them: [D], double."""
    sizes = torch.tensor([weights[name][0].numel() for name in stds])
    device = next(iter(weights.values())).device
    return torch.tensor(list(stds.values()), dtype=torch.float64).repeat_interleave(sizes).to(device)


def start_in_words(given: bool, descent: int, *, from_prior: bool = False) -> str:
    """Where a chain of a sampler began, for its label. given: at a network of another posterior."""
    if given:
        return "networks that were given" + (f", after {descent} epochs of descent" if descent else "")
    if from_prior:
        return "draws from the prior"
    return f"optima of a descent of {descent} epochs" if descent else "the network's initialisation"


def check_samplable(problem: Problem, method: str) -> None:
    """Refuse networks whose likelihood is not one smooth function of the weights."""
    network = problem.network
    normalising = [name for name in batch_norms(network.module) if name not in network.always_eval]
    if normalising:
        raise InputError(
            f"{method} cannot sample a network with BatchNorm ({normalising[0]!r}): its output depends on "
            "which examples are in the batch, so the likelihood is no product over examples. Use a network "
            "with LayerNorm, GroupNorm or filter response normalisation (resnet20_frn), or keep the layer in "
            "eval()."
        )
    if problem.execution.precision == "bfloat16":
        raise InputError(
            f"{method} needs gradients of one smooth function: use precision 'full' or 'double'."
        )
    random = [name for name in random_layers(network.module) if name not in network.always_eval]
    if random or network.draws_globally:
        where = f" ({random[0]!r})" if random else ""
        raise InputError(
            f"{method} cannot sample a network that is random itself, such as one with dropout{where}: "
            "remove the layer, or set its probability to 0."
        )
