"""Members that share their matrices and have Gaussian rank-one factors of their own.

Dusenberry et al., "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors", ICML 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require_positive, require_whole
from polymode.networks.members import DRAW, Members, Tensors
from polymode.networks.selection import Where, check_where
from polymode.options import option
from polymode.posteriors import Posterior, Variational
from polymode.schedules import Constant, Pieces, Schedule
from polymode.training.contract import (
    KEEP,
    OPTIMIZER,
    SCHEDULE,
    Keep,
    Method,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_optimizer,
    check_schedule,
    descend_together,
    keep_rule,
    refuse_line_search,
)
from polymode.trees import Tree
from polymode.weights.gaussian import RHO, GaussianWeights
from polymode.weights.late import LateWeights, late_weights


@dataclass(frozen=True)
class RankOneBNN(Method):
    """W_k = θ ∘ u_k v_kᵀ, u_k and v_k ~ N(μ_k, σ_k²), for K members that share θ (Dusenberry et al. 2020).

    Minimises the mean over members of −E Σ_n log p(y_n | x_n, W_k) + KL(N(μ_k, σ_k²) ‖ N(1, s²)): all members
    see each minibatch, one draw of each, as if it were tiled K times.
    """

    name: ClassVar[str] = "rank_one_bnn"
    summary: ClassVar[str] = "K members of shared matrices, each with Gaussian rank-one factors"
    cost: ClassVar[str] = "num_members member-epochs an epoch; four vectors a matrix and member"
    best_epoch: ClassVar[str] = "the chain's, by the mean over its members and one draw of each"
    kept: ClassVar[str] = "shared weights once and K times means and spreads of the factors"

    num_members: int = option(4, "K, networks that share the matrices")
    prior_std: float = option(0.1, "s of the prior N(1, s²) over the factors")
    std: float = option(0.0316, "σ that factors begin with, about: their ρ get normal noise of 0.1")
    matrices: Where | None = option(
        None, "patterns of the weights that get factors; None takes all but embeddings"
    )
    annealing: Schedule | None = option(
        Pieces(((0, 0.0), (0.8, 1.0))),
        "factor on the KL term over the course of training; None means 1",
    )
    optimizer: Optimizer = option(
        Optimizer("Adam", lr=1e-3),
        f"{OPTIMIZER}. Only the shared weights carry weight decay, and their gradient is bounded by itself",
    )
    schedule: Schedule = option(Constant(), SCHEDULE)
    keep: Keep = option("last", f"{KEEP}. Validation sees one draw of each member")

    def __post_init__(self) -> None:
        require_whole("num_members", self.num_members)
        require_positive("prior_std", self.prior_std)
        require_positive("std", self.std)
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        keep_rule(self.keep)
        refuse_line_search(self.optimizer, self.name)
        if self.annealing is not None:
            check_schedule(self.annealing, "annealing")
        if self.matrices is not None:
            object.__setattr__(self, "matrices", check_where(self.matrices))

    @property
    def chain_members(self) -> None:
        return None

    # --- the algorithm ------------------------------------------------------------------------

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        late, factors = self._weights(problem.network.module, problem.trainable)
        start, count = problem.initial_weights(generator), self.num_members
        shared = {name: tensor[None].clone() for name, tensor in start.items() if name in problem.trainable}
        stacked = {n: torch.stack([t] * count) for n, t in start.items() if n not in problem.trainable}
        like = start[late.factored[0]]
        signs = torch.randint(2, (count, sum(factors.sizes)), generator=generator).to(like) * 2 - 1
        stacked |= {name: tensor.clone() for name, tensor in factors.by_name(signs).items()}
        noise = torch.randn(signs.shape, generator=generator, dtype=torch.float64).to(like)
        stacked[RHO] = math.log(math.expm1(self.std)) + 0.1 * noise  # softplus⁻¹(σ)
        stacked[DRAW] = torch.zeros(count, dtype=torch.int64, device=like.device)
        return State(Members(stacked, shared))

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        late, factors = self._weights(problem.network.module, problem.trainable)
        stds = dict.fromkeys(factors.shapes, self.prior_std)

        def drawn(members: Members) -> Tree:
            return factors.noise(members.stacked[DRAW], members.stacked[RHO])

        def realise(weights: Tensors, own: Tree) -> Tensors:
            return late.realise(factors.realise(weights, own["drawn"]))

        def kl(weights: Tensors, _: Tree) -> Tensor:
            return factors.kl(weights, stds, centre=1.0)

        learned = late.names | {RHO}
        return [
            Phase(
                "train",
                epochs,
                problem.objective(kl, realise, problem.trainable | learned, (DRAW,), drawn),
                descend_together,
                {
                    "base": Over(self.optimizer, problem.trainable),
                    "factors": Over(self.optimizer.undecayed, learned),
                },
                schedule=self.schedule,
                penalty_schedule=self.annealing,
                cost=self.num_members,
                keep=keep_rule(self.keep),
            )
        ]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        late, factors = self._weights(problem.network.module, problem.trainable)
        return Variational(problem.network, blocks=[state.members.clone()], weights=factors, late=late)

    def num_parameters(self, module: nn.Module) -> int:
        trained = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
        _, factors = self._weights(module, frozenset(trained))
        return sum(trained.values()) + 2 * self.num_members * sum(factors.sizes)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs / self.num_members))

    # --- parts --------------------------------------------------------------------------------

    def _weights(self, module: nn.Module, trainable: frozenset[str]) -> tuple[LateWeights, GaussianWeights]:
        """Which matrices have factors, and the Gaussians over these."""
        late = late_weights(module, trainable, "rank_one", head=False, matrices=self.matrices)
        matrices = {n: p for n, p in module.named_parameters() if n in late.factored}
        sizes = late.trained({n: ["", *p.shape] for n, p in matrices.items()})
        shapes = {name: tuple(shape) for name, (_, *shape) in sizes.items() if name in late.names}
        if not shapes:
            raise InputError(f"{self.name}: this {type(module).__name__} has no matrices for factors.")
        return late, GaussianWeights(shapes)
