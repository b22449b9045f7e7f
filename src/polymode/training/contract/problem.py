"""What a method knows about its task."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.networks.members import Members, Tensors
from polymode.posteriors.network import Network
from polymode.training.contract.execution import Execution
from polymode.training.contract.objective import Objective
from polymode.training.contract.recordings import Recordings
from polymode.trees import Tree
from polymode.weights.priors import Penalty, PriorStd, gaussian_prior, prior_stds


def _cannot_redraw(layers: Iterable[str], generator: torch.Generator) -> Tensors:
    raise InputError(f"This problem cannot draw the weights of {', '.join(layers)} anew.")


@dataclass(frozen=True)
class Problem:
    """What a method knows about its task: the network, its weights, where a chain starts.

    trainable: names of the weights with a gradient. exempt: those that carry no decay when an
    optimiser says ``decay_all=False``. start: draws the initial weights of a chain, by its number.
    observations: N of every chain's data set, [G]. initial: weights of the members that ``fit(initial=...)``
    lets this chain begin at. example: inputs [1, ...] of the data, as the network wants them; None where
    there are no data.
    """

    network: Network
    trainable: frozenset[str]
    exempt: frozenset[str]
    start: Callable[[int, torch.Generator], Tensors]
    execution: Execution
    observations: Tensor
    initial: Sequence[Tensors] = ()
    chain: int = 0
    group: int = 0  # the chain's place among all that run side by side
    # Draws the weights of some layers anew, as the user's model or the layers themselves draw them.
    redraw: Callable[[Iterable[str], torch.Generator], Tensors] = _cannot_redraw
    replayable: bool = True  # whether examples can be told by their places in the data set
    num_minibatches: int | None = None  # of an epoch over the smallest data set, where it is known
    example: Tree = None
    recordings: Recordings = field(default_factory=Recordings, compare=False, repr=False)

    @property
    def rates(self) -> Mapping[str, float]:
        """Names of what learns at a multiple of the rate of the weights, such as a noise level."""
        return self.network.likelihood.rates

    @property
    def num_observations(self) -> int:
        """Training observations of this chain's data set."""
        return int(self.observations[self.group])

    def initial_weights(self, generator: torch.Generator) -> Tensors:
        """The weights of one network: of the member to begin at, or drawn as the user's model draws them."""
        if self.initial:
            return self.start(0, generator) | self.initial[0]
        return self.start(self.chain, generator)

    def initial_members(self, generator: torch.Generator) -> Members:
        """One network, drawn as the user's model draws it: a group of one member."""
        weights = self.initial_weights(generator)
        return Members({name: tensor[None].clone() for name, tensor in weights.items()})

    def prior_stds(self, prior_std: PriorStd) -> dict[str, float]:
        """The width of the prior of each trained weight."""
        return prior_stds(prior_std, self.network.module, self.trainable)

    def prior(self, prior_std: PriorStd | None) -> Penalty | None:
        """Minus the log of a Gaussian prior of these widths; None for a flat one."""
        return None if prior_std is None else gaussian_prior(self.prior_stds(prior_std))

    def objective(
        self,
        penalty: Penalty | None = None,
        realise: Callable[[Tensors, Tree], Tensors] | None = None,
        trainable: frozenset[str] | None = None,
        noise: tuple[str, ...] = (),
        drawn: Callable[[Members], Tree] | None = None,
    ) -> Objective:
        """The loss of this problem's network and likelihood with a method's own terms."""
        names = self.trainable if trainable is None else trainable
        return Objective(
            self.network,
            names,
            self.execution,
            self.observations,
            penalty,
            realise,
            noise,
            drawn,
            self.recordings,
        )
