"""A Gaussian over every weight, fitted by variational inference with one draw a step.

Blundell, Cornebise, Kavukcuoglu and Wierstra, "Weight Uncertainty in Neural Networks", ICML 2015; the dense
networks of Jantre et al., "Sequential Bayesian Neural Subnetwork Ensembles", 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from polymode.errors import unknown_name
from polymode.networks.members import DRAW, Members, Tensors
from polymode.networks.selection import Where, check_where
from polymode.options import option
from polymode.posteriors import Posterior, Variational
from polymode.schedules import Constant, Schedule
from polymode.training.contract import (
    KEEP,
    LAYERS,
    OPTIMIZER,
    PRIOR_STD,
    SCHEDULE,
    Batch,
    Keep,
    Measure,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_optimizer,
    check_schedule,
    clip_each,
    keep_rule,
    refuse_line_search,
)
from polymode.trees import Tree
from polymode.weights.gaussian import INCLUSION, RHO, GaussianWeights, gaussian_weights, kaiming_uniform
from polymode.weights.priors import PriorStd, check_prior_std, gaussian_prior

# Of Jantre et al. (2022).
PUBLISHED = Optimizer("SGD", lr=0.1, momentum=0.9, clip_norm=1.0)


@dataclass(frozen=True)
class MeanField(Method):
    """q(θ) = Π_j N(μ_j, σ_j²), σ = softplus(ρ), minimises −E_q Σ_n log p(y_n | x_n, θ) + KL(q ‖ N(0, s²)).

    Every step draws one θ = μ + σ ∘ ε for the minibatch; KL = Σ_j log(s/σ_j) + (σ_j² + μ_j²)/(2 s²) − ½.
    """

    name: ClassVar[str] = "mean_field"
    summary: ClassVar[str] = "a Gaussian over every weight (a Bayesian network by variational inference)"
    cost: ClassVar[str] = (
        "one member-epoch an epoch; twice the parameters; predicts with as many passes as draws"
    )
    best_epoch: ClassVar[str] = "of every network its own, by one draw of its weights"
    kept: ClassVar[str] = "a mean and a spread of every weight"

    prior_std: PriorStd = option(0.2, PRIOR_STD)
    rho: float = option(-6.0, "ρ that all weights begin with; σ = log(1 + e^ρ), 0.0025 at −6")
    where: Where | None = option(
        None,
        f"the layers whose weights have a Gaussian: {LAYERS}; None means every trained weight. Others have "
        "the prior and one value",
    )
    means_from: Literal["network", "kaiming"] = option(
        "network",
        'what the means of Linear layers and convolutions begin with: as the `"network"` draws its weights, '
        'or `"kaiming"`, uniform within ±√(6/fan-in) as in Jantre et al. (2022)',
    )
    annealing: Schedule | None = option(
        None,
        "factor on the KL term over the course of training, such as `Warmup(10)` or "
        "`Pieces(((0, 0.0), (0.5, 1.0)))`; None means 1",
    )
    optimizer: Optimizer = option(Optimizer("Adam", lr=1e-3), OPTIMIZER)
    schedule: Schedule = option(Constant(), SCHEDULE)
    keep: Keep = option("last", f"{KEEP}. Validation sees one draw of each network")

    def __post_init__(self) -> None:
        check_prior_std(self.prior_std)
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        keep_rule(self.keep)
        if self.annealing is not None:
            check_schedule(self.annealing, "annealing")
        if self.where is not None:
            object.__setattr__(self, "where", check_where(self.where))  # one way to say one thing
        if self.means_from not in ("network", "kaiming"):
            raise unknown_name("means_from", self.means_from, ("network", "kaiming"))
        refuse_line_search(self.optimizer, self.name)

    @property
    def chain_members(self) -> None:
        return None

    # --- the algorithm ------------------------------------------------------------------------

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        start = problem.initial_weights(generator)
        weights = self.weights_over(problem.network.module, problem.trainable)
        if self.means_from == "kaiming" and not problem.initial:
            start = start | kaiming_uniform(problem.network.module, weights.shapes, start, generator)
        trained = start | self.begin(weights, start)
        seed = torch.zeros(1, dtype=torch.int64, device=problem.execution.device)
        return State(Members({name: t[None].clone() for name, t in trained.items()} | {DRAW: seed}))

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        return [
            Phase(
                "train",
                epochs,
                self.objective(problem),
                self.step,
                self.optimizers(problem),
                schedule=self.schedule,
                penalty_schedule=self.annealing,
                keep=keep_rule(self.keep),
                measure=self.measure(problem),
            )
        ]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        weights = self.weights_over(problem.network.module, problem.trainable)
        return Variational(problem.network, blocks=[state.members.clone()], weights=weights)

    def num_parameters(self, module: nn.Module) -> int:
        trained = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
        weights = self.weights_over(module, frozenset(trained))
        return sum(trained.values()) + sum(weights.sizes) + sum(weights.counts)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs))

    # --- its parts, which methods that are made of it use, too ----------------------------------

    def weights_over(self, module: nn.Module, trainable: frozenset[str]) -> GaussianWeights:
        """Which weights of a network have a Gaussian."""
        return gaussian_weights(module, trainable, self.where)

    def begin(self, weights: GaussianWeights, start: Tensors) -> Tensors:
        """What is trained beside the means, at its beginning."""
        return weights.begin(start, self.rho)

    def divergence(self, weights: GaussianWeights, tensors: Tensors, stds: dict[str, float]) -> Tensor:
        """KL(q ‖ p) of the weights with a Gaussian."""
        return weights.kl(tensors, stds)

    def objective(self, problem: Problem, *, frozen: bool = False) -> Objective:
        """−log p(y | x, θ) of one draw, plus KL(q ‖ p)/N; frozen: no units are drawn any more."""
        weights = self.weights_over(problem.network.module, problem.trainable)
        stds = problem.prior_stds(self.prior_std)
        single = {name: std for name, std in stds.items() if name not in weights.shapes}
        prior = gaussian_prior(single) if single else None
        [first, *_] = weights.shapes

        def drawn(members: Members) -> Tree:
            return weights.noise(members.stacked[DRAW], members.stacked[first])

        def realise(tensors: Tensors, own: Tree) -> Tensors:
            return weights.realise(tensors, own["drawn"], frozen=frozen)

        def kl(tensors: Tensors, own: Tree) -> Tensor:
            of_single = 0.0 if prior is None else prior(tensors, own)
            return self.divergence(weights, tensors, stds) + of_single

        learned = {RHO} if frozen or not weights.units else {RHO, INCLUSION}
        return problem.objective(kl, realise, problem.trainable | learned, (DRAW,), drawn)

    def measure(self, problem: Problem, *, frozen: bool = False) -> Measure | None:
        """What to show of each network after every epoch: nothing, where all of it is always there."""
        return None

    def optimizers(self, problem: Problem, *, frozen: bool = False) -> dict[str, Over]:
        """One for each kind of number: only weights decay, and inclusion variables may be left alone."""
        means = self.optimizer.with_clipping(None)  # of all together, in the step
        others = means.undecayed
        found = {"means": Over(means, problem.trainable), "spreads": Over(others, frozenset({RHO}))}
        if not frozen and self.weights_over(problem.network.module, problem.trainable).units:
            found["inclusions"] = Over(others, frozenset({INCLUSION}))
        return found

    def step(self, state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        """One draw of every network, and one step of all that it was made of."""
        [batch] = batches
        losses, gradients = objective.losses_and_gradients(state, batch)
        clipped = self.clipped(gradients.stacked)
        for optimizer in state.optimizers.values():
            optimizer.step(clipped, batch.cohorts)
        return losses

    def clipped(self, gradients: Tensors) -> Tensors:
        """Gradients of each member, over means, spreads and inclusion variables, of a bounded norm."""
        clip_norm = self.optimizer.clip_norm
        return gradients if clip_norm is None else clip_each(gradients, clip_norm)
