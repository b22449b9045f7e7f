"""MIMO: subnetworks that share all weights of one network with several inputs and several outputs.

Havasi, Jenatton, Fort, Liu, Snoek, Lakshminarayanan, Dai and Tran, "Training independent subnetworks for
robust prediction", ICLR 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from polymode.errors import require, require_whole
from polymode.methods.single import Single
from polymode.networks.adaptations import Adaptation, JoinedHeads, adapt
from polymode.networks.members import Members, copied_module
from polymode.networks.selection import select_layers
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.schedules import Constant, Schedule
from polymode.training.contract import (
    KEEP,
    OPTIMIZER,
    PRIOR_STD_OR_FLAT,
    SCHEDULE,
    Batch,
    Keep,
    Method,
    Objective,
    Optimizer,
    Phase,
    Piece,
    Problem,
    State,
    descend,
)
from polymode.trees import map_tree
from polymode.weights.priors import PriorStd


@dataclass(frozen=True)
class MIMO(Method):
    """−Σ_h log p_h(y_h | x_1, ..., x_H), examples of each head drawn independently (Havasi et al. 2021).

    H inputs are joined along the channels of the first layer, and the last layer has H times the outputs: a
    pass through the body serves all heads. To predict, x stands in all slots: p(y | x) = (1/H) Σ_h p_h(y | x,
    ..., x). A member is a head; in training and validation the network is one, whose outputs are the mean of
    the heads'.
    """

    name: ClassVar[str] = "mimo"
    summary: ClassVar[str] = "heads of one network that takes several examples at once"
    cost: ClassVar[str] = (
        "repetitions member-epochs an epoch; H times the first and the last layer; predicts with one pass"
    )
    best_epoch: ClassVar[str] = "of every chain, by the mean of its heads' outputs"
    kept: ClassVar[str] = "one network with a first and a last layer for H heads"

    num_members: int = option(3, "H, heads and slots for inputs")
    repetitions: int = option(4, "how often an epoch shows each example to each head, in its minibatch")
    input_repetition: float = option(
        0.0, "share of the passes whose slots hold the same example, as they do in prediction"
    )
    prior_std: PriorStd | None = option(None, PRIOR_STD_OR_FLAT)
    optimizer: Optimizer = option(Optimizer("Adam", lr=1e-3), OPTIMIZER)
    schedule: Schedule = option(Constant(), SCHEDULE)
    keep: Keep = option("last", f"{KEEP}. Validation is about the mean of the heads' outputs")

    def __post_init__(self) -> None:
        require_whole("num_members", self.num_members)
        require_whole("repetitions", self.repetitions)
        require(
            0 <= self.input_repetition <= 1,
            f"input_repetition is a share from 0 to 1, got {self.input_repetition!r}.",
        )
        self._single()  # checks everything else

    def _single(self) -> Single:
        """How the one network is trained."""
        return Single(self.prior_std, self.optimizer, self.schedule, self.keep)

    @property
    def undivided(self) -> str:
        return "mimo mixes the examples of a batch, and those of other processes are not there."

    @property
    def can_average(self) -> bool:
        return True

    @property
    def chain_members(self) -> int:
        return self.num_members

    @property
    def chain_passes(self) -> int:
        return 1  # for all heads

    def adaptations(self, module: nn.Module) -> Sequence[Adaptation]:
        [first], [last] = select_layers(module, "input"), select_layers(module, "output")
        return [JoinedHeads(self.num_members, first, last)]

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        state = self._single().init(problem, generator)
        state.members.stacked[_shares(problem)].fill_(1 / self.num_members)  # also when it begins at a head
        return state

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
            [batch] = batches
            dealt = replace(batch, pieces=[self._dealt(piece, state) for piece in batch.pieces])
            return descend(state, [dealt], objective)

        [phase] = self._single().phases(problem, epochs)
        return [replace(phase, step=step, cost=self.repetitions)]

    def _dealt(self, piece: Piece, state: State) -> Piece:
        """Examples of every head, one head after another: [G, H · repetitions · B, ...]."""
        generators = state.generators[piece.groups]
        orders = torch.stack([self.shuffles(piece.batch_size, each).flatten() for each in generators])
        chains = torch.arange(len(orders))[:, None]

        def dealt(tensor: Tensor) -> Tensor:
            places = (chains, orders) if piece.has_groups else (orders,)
            return tensor[tuple(place.to(tensor.device) for place in places)]

        examples, rows = map_tree(dealt, (piece.examples, piece.rows))
        weights = torch.ones_like(orders) if examples.weights is None else examples.weights
        # A loss is the mean over all that is dealt; times H it is the sum over heads.
        examples = examples._replace(weights=self.num_members * weights.to(examples.targets.device))
        return replace(piece, examples=examples, rows=rows, has_groups=True, joined=self.num_members)

    def shuffles(self, count: int, generator: torch.Generator) -> Tensor:
        """Which of ``count`` examples stand in the slots of each pass: [H, repetitions · count]."""
        order = torch.randperm(self.repetitions * count, generator=generator) % count
        apart = round((1 - self.input_repetition) * len(order))
        shuffles = [torch.randperm(apart, generator=generator) for _ in range(self.num_members)]
        return torch.stack([torch.cat([order[shuffle], order[apart:]]) for shuffle in shuffles])

    def posterior(self, problem: Problem, state: State) -> Posterior:
        """The heads: members that share all weights, each with all of the shares."""
        whole, shares = state.members.clone(), _shares(problem)
        equal = whole.stacked.pop(shares)
        labels = whole.labels.repeat(self.num_members, 1)
        labels[:, 2] = self.num_members * labels[:, 2] + torch.arange(self.num_members)
        heads = {shares: torch.eye(self.num_members, dtype=equal.dtype, device=equal.device)}
        return Particles(problem.network, blocks=[Members(heads, whole.stacked, labels=labels)])

    def num_parameters(self, module: nn.Module) -> int:
        return super().num_parameters(adapt(copied_module(module), self.adaptations(module), seed=0))

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs / self.repetitions))


def _shares(problem: Problem) -> str:
    """The name of the heads' shares in the outputs of a network."""
    [joined] = problem.network.adaptations
    assert isinstance(joined, JoinedHeads)
    return joined.shares
