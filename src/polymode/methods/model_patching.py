"""Ensemble model patching: a few layers hold K components, each step and each draw picks among them.

Chang, Yao, Williams-King and Lipson, "Ensemble Model Patching: A Parameter-Efficient Variational Bayesian
Neural Network", 2019.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from polymode.errors import CannotRedraw, InputError, require, unknown_name
from polymode.networks.members import DRAW, Members, Tensors
from polymode.networks.selection import Where, check_where, is_normalisation
from polymode.networks.surgery import seed_buffers
from polymode.options import option
from polymode.posteriors import ComponentMixture, Posterior
from polymode.posteriors.component_mixture import COMPONENTS, PROBABILITIES, SHARED, STATISTICS
from polymode.schedules import Constant, Schedule
from polymode.training.contract import (
    KEEP,
    LAYERS,
    OPTIMIZER,
    PRIOR_STD,
    SCHEDULE,
    Batch,
    Keep,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_optimizer,
    check_schedule,
    keep_rule,
    next_noise,
)
from polymode.trees import Tree
from polymode.weights.mixtures import (
    Assignment,
    Family,
    Mixture,
    initial_components,
    mixture_kl,
    mixture_over,
)
from polymode.weights.priors import PriorStd, check_prior_std

# The logits of a layer's learned probabilities; a name with a slash, which no module has.
LOGITS = "mixing/"
# Optimisers whose weight decay is an L2 term of the loss, not a step of its own.
COUPLED = frozenset({"SGD", "Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Rprop"})


@dataclass(frozen=True)
class _Patching(Method):
    """Algorithm 1 and Eq. 6 for any family of assignments."""

    where: Where = option(("norm", "output"), f"the patched layers: {LAYERS}")
    prior_std: PriorStd | None = option(
        None, f"{PRIOR_STD}. It adds the squares of the KL term (Eq. 6), which None leaves out"
    )
    l2: float | None = option(
        None,
        "λ of a term λ‖M‖² over all trained numbers, which the experiments of Chang et al. (2019) have in "
        "place of Eq. 6 (0.001/batch size there); it is the weight decay 2λ of the optimiser",
    )
    optimizer: Optimizer = option(Optimizer("Adam", lr=1e-3), OPTIMIZER)
    schedule: Schedule = option(Constant(), SCHEDULE)
    keep: Keep = option("last", KEEP)

    def __post_init__(self) -> None:
        _ = self.family  # checks itself
        object.__setattr__(self, "where", check_where(self.where))  # one way to say one thing
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        keep_rule(self.keep)
        if self.prior_std is not None:
            check_prior_std(self.prior_std)
        if self.l2 is not None:
            require(self.l2 >= 0, f"l2 must be at least 0, got {self.l2!r}.")
            options = self.optimizer.options
            coupled = self.optimizer.kind in COUPLED and not options.get("decoupled_weight_decay")
            if not coupled or options.get("weight_decay"):
                raise InputError(
                    f"l2={self.l2:g} is the weight decay 2·l2 of the optimiser, which {self.optimizer.kind} "
                    f"with options {dict(options)} cannot take: use Adam or SGD without "
                    "weight_decay, or leave l2 out."
                )

    @property
    @abstractmethod
    def family(self) -> Family:
        """How components are assigned."""

    @property
    def chain_members(self) -> int | None:
        return None

    @property
    def _learns_probabilities(self) -> bool:
        return False

    @property
    def _own_statistics(self) -> bool:
        """Whether every component has running statistics of its own."""
        return False

    def _components(
        self, problem: Problem, mixture: Mixture, start: Tensors, generator: torch.Generator
    ) -> Tensors:
        """What the components of the patched tensors begin with, [K, ...]."""
        return {name: start[name][None].clone() for name in mixture.shapes}

    # --- the algorithm ------------------------------------------------------------------------

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        mixture = self._mixture(problem.network.module, problem.trainable)
        start = problem.initial_weights(generator)
        trained = {n: t.clone() for n, t in start.items() if n in problem.trainable}
        trained |= self._components(problem, mixture, start, generator)
        shared = {name: tensor[None] for name, tensor in trained.items()}
        if self._learns_probabilities:
            shared |= {
                LOGITS + layer: trained[names[0]].new_zeros(1, mixture.family.num_components)
                for layer, names in mixture.layers.items()
            }
        own = {n: t[None].clone() for n, t in start.items() if n not in problem.trainable}
        own |= {
            STATISTICS + name: torch.stack([own[name]] * mixture.family.num_components, 1)
            for name in self._statistics(mixture, own)
        }
        seed = torch.zeros(1, dtype=torch.int64, device=problem.execution.device)
        return State(Members(own | {DRAW: seed}, shared))

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        mixture = self._mixture(problem.network.module, problem.trainable)
        optimizers = {"all": Over(self._optimizer, problem.trainable)}
        learned: frozenset[str] = frozenset()
        if self._learns_probabilities:
            learned = frozenset(LOGITS + layer for layer in mixture.layers)
            optimizers["mixing"] = Over(self._optimizer.with_options(weight_decay=0.0), learned)
        # Without a prior over weights the entropy of learned assignments still counts: Z has a uniform prior.
        stds = {} if self.prior_std is None else problem.prior_stds(self.prior_std)

        def realise(weights: Tensors, _: Tree) -> Tensors:
            if self._learns_probabilities:
                drawn = mixture.realise_relaxed(weights, _logits(weights), weights[DRAW])
            else:
                drawn = mixture.realise(weights, weights[DRAW])
            return {name: t for name, t in weights.items() if _of_module(name)} | drawn

        def kl(weights: Tensors, _: Tree) -> Tensor:
            logs = {layer: logits.log_softmax(0) for layer, logits in _logits(weights).items()}
            return mixture_kl(mixture, weights, stds, logs or None)

        def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
            [batch] = batches
            if self._own_statistics:
                self._load_statistics(mixture, state)
            losses, gradients = objective.losses_and_gradients(state, batch)
            for optimizer in state.optimizers.values():
                optimizer.step(gradients.shared, batch.cohorts)
            if self._own_statistics:
                self._store_statistics(mixture, state, batch)
            return losses

        return [
            Phase(
                "train",
                epochs,
                problem.objective(
                    kl if stds or learned else None, realise, problem.trainable | learned, (DRAW,)
                ),
                step,
                optimizers,
                schedule=self.schedule,
                keep=keep_rule(self.keep),
            )
        ]

    @property
    def _optimizer(self) -> Optimizer:
        # The gradient of λ‖θ‖² is 2λθ.
        return self.optimizer if self.l2 is None else self.optimizer.with_options(weight_decay=2 * self.l2)

    def posterior(self, problem: Problem, state: State) -> Posterior:
        mixture = self._mixture(problem.network.module, problem.trainable)
        members = state.members.clone()
        tensors: Tensors = {}
        for name, tensor in members.shared.items():
            if name.startswith(LOGITS):
                tensors[PROBABILITIES + name.removeprefix(LOGITS)] = tensor[0].double().softmax(0)
            else:
                tensors[(COMPONENTS if name in mixture.names else SHARED) + name] = tensor[0]
        left_out = {DRAW, *self._statistics(mixture, members.stacked), *seed_buffers(problem.network.module)}
        for name, tensor in members.stacked.items():
            if name.startswith(STATISTICS):
                tensors[name] = tensor[0]
            elif name not in left_out:
                tensors[SHARED + name] = tensor[0]
        return ComponentMixture(problem.network, mixture=mixture, chains=[tensors])

    def num_parameters(self, module: nn.Module) -> int:
        trained = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
        patched = self._mixture(module, frozenset(trained)).names
        further = self.family.num_components - 1
        return sum(trained.values()) + further * sum(trained[name] for name in patched)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs))

    # --- parts --------------------------------------------------------------------------------

    def _mixture(self, module: nn.Module, trainable: frozenset[str]) -> Mixture:
        return mixture_over(module, self.where, self.family, trainable)

    def _statistics(self, mixture: Mixture, buffers: Tensors) -> list[str]:
        """Names of the running statistics that every component has its own of."""
        if not self._own_statistics:
            return []
        return [name for name in buffers if name.rpartition(".")[0] in mixture.layers]

    def _load_statistics(self, mixture: Mixture, state: State) -> None:
        """Put the running statistics of the components that the next gradient will use in place."""
        self._exchange(mixture, state, next_noise(state.noise), slice(None), load=True)

    def _store_statistics(self, mixture: Mixture, state: State, batch: Batch) -> None:
        """Keep the statistics that the gradient has moved with their components."""
        for piece in batch.pieces:
            rows = state.members.rows(piece.groups)
            self._exchange(mixture, state, state.noise, rows, load=False)

    def _exchange(self, mixture: Mixture, state: State, seeds: Tensor, rows: slice, *, load: bool) -> None:
        stacked = state.members.stacked
        indices = mixture.indices(seeds.to(stacked[DRAW].device))
        each = torch.arange(len(seeds), device=stacked[DRAW].device)[rows]
        for name in self._statistics(mixture, stacked):
            [first, *_] = mixture.layers[name.rpartition(".")[0]]
            chosen = indices[first].flatten().long()[rows]
            if load:
                stacked[name][rows] = stacked[STATISTICS + name][each, chosen]
            else:
                stacked[STATISTICS + name][each, chosen] = stacked[name][rows]


def _of_module(name: str) -> bool:
    return name != DRAW and not name.startswith((LOGITS, STATISTICS))


def _logits(weights: Tensors) -> Tensors:
    return {n.removeprefix(LOGITS): t for n, t in weights.items() if n.startswith(LOGITS)}


@dataclass(frozen=True)
class _Trained(_Patching):
    """Families whose components are all trained."""

    assignment: ClassVar[Assignment]

    num_components: int = option(5, "K, of each patched layer")
    probabilities: Sequence[float] | None = option(
        None, "p, one number for each component; None means equal ones"
    )
    learn_probabilities: bool = option(
        False,
        "learn p for each layer, by a relaxation of the draw; the loss then has minus the entropy of the "
        "draws, with or without `prior_std`",
    )
    components_from: Literal["initialiser", "weights"] = option(
        "initialiser",
        'what the components of Linear, convolutional and Embedding layers begin with: `"initialiser"` draws '
        'them independently, as the model does; `"weights"` keeps those of a trained module in component 0 '
        "and lets the others begin near them",
    )
    spread: float = option(
        0.1, "components of normalisation layers begin at γ (1 + spread · ε) and β + spread · ε"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.components_from not in ("initialiser", "weights"):
            raise unknown_name("components_from", self.components_from, ("initialiser", "weights"))
        require(self.spread >= 0, f"spread must be at least 0, got {self.spread!r}.")
        if self.learn_probabilities and self.probabilities is not None:
            raise InputError("probabilities are given and learn_probabilities=True: choose one of them.")

    @property
    def family(self) -> Family:
        given = None if self.probabilities is None else tuple(self.probabilities)
        return Family(self.assignment, self.num_components, given)

    @property
    def _learns_probabilities(self) -> bool:
        return self.learn_probabilities

    def _components(
        self, problem: Problem, mixture: Mixture, start: Tensors, generator: torch.Generator
    ) -> Tensors:
        module, keep = problem.network.module, self.components_from == "weights"
        weighted = [name for name in mixture.layers if not is_normalisation(module.get_submodule(name))]
        starts = [start]
        if weighted and not keep:
            try:
                starts += [problem.redraw(weighted, generator) for _ in range(self.num_components - 1)]
            except CannotRedraw as error:
                raise InputError(
                    f"{error.reason} Say components_from='weights': component 0 then keeps the weights of "
                    "the module, and the others begin near them. Or pass a function that builds the module "
                    "and draws other weights each time."
                ) from error
            _check_drawn(mixture, weighted, starts)
        return initial_components(mixture, module, starts, generator, keep=keep, spread=self.spread)


def _check_drawn(mixture: Mixture, layers: Sequence[str], starts: Sequence[Tensors]) -> None:
    """Components of a layer must differ, unless the network begins with a constant there, such as zeros."""
    first, *others = starts
    for layer in layers:
        varied = [name for name in mixture.layers[layer] if bool((first[name] != first[name].amax()).any())]
        same = [all(torch.equal(first[name], other[name]) for other in others) for name in varied]
        if varied and all(same):
            raise InputError(
                f"The function that builds the module gives the layer {layer!r} the same weights each time "
                f"(pretrained ones, or a seed of its own), so that its {len(starts)} components would be "
                "equal. Say components_from='weights': component 0 then keeps them, and the others begin "
                "near them."
            )


@dataclass(frozen=True)
class EMP(_Trained):
    """Ensemble model patching: W_i = M_i,z(i), one z(i) ~ Categorical(p) for each patched layer i.

    Trained on −log p(y | x, W) for one draw a step, plus Σ_i Σ_k p_k ‖M_ik‖²/(2s²) + Σ_shared ‖M‖²/(2s²), the
    KL term of Eq. 6. A network drawn at test time is one of Kᴸ.
    """

    name: ClassVar[str] = "emp"
    summary: ClassVar[str] = "model patching: K components a patched layer, drawn layer by layer"
    cost: ClassVar[str] = (
        "one member-epoch an epoch; K − 1 further copies of the patched layers; predicts with as many passes "
        "as draws, the layers before the first patched one once"
    )
    best_epoch: ClassVar[str] = (
        "the chain's: components share weights, and one draw of them is validated after every epoch"
    )

    assignment: ClassVar[Assignment] = "layer"

    statistics: Literal["shared", "component"] = option(
        "shared", 'running statistics of BatchNorm: `"shared"` by all components, or of each `"component"`'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.statistics not in ("shared", "component"):
            raise unknown_name("statistics", self.statistics, ("shared", "component"))
        if self.statistics == "component" and self.learn_probabilities:
            raise InputError(
                "statistics='component' and learn_probabilities=True cannot be had together: the component "
                "of a step must be known before it. Choose one of them."
            )

    @property
    def _own_statistics(self) -> bool:
        return self.statistics == "component"


@dataclass(frozen=True)
class ECMP(_Trained):
    """Ensemble cross model patching: w_ij = M_ij,z(ij), a z(ij) ~ Categorical(p) for every scalar.

    Trained on −log p(y | x, W) for one draw a step, plus Σ_i Σ_k p_k ‖M_ik‖²/(2s²) + Σ_shared ‖M‖²/(2s²), the
    KL term of Eq. 6. Running statistics of BatchNorm are shared: components meet inside a layer.
    """

    name: ClassVar[str] = "ecmp"
    summary: ClassVar[str] = "crossed model patching: K components a patched layer, drawn scalar by scalar"
    cost: ClassVar[str] = EMP.cost
    assignment: ClassVar[Assignment] = "scalar"


@dataclass(frozen=True)
class DropConnect(_Patching):
    """Every weight w_ij is dropped with probability ``rate``: a second component is zero (Wan et al. 2013).

    What is kept is divided by 1 − rate, biases are left alone, and draws at test time drop as training does.
    """

    name: ClassVar[str] = "dropconnect"
    summary: ClassVar[str] = "weights dropped at random, in training and in every draw"
    cost: ClassVar[str] = (
        "one member-epoch an epoch; no further parameters; predicts with as many passes as draws"
    )
    best_epoch: ClassVar[str] = (
        "the chain's: components share weights, and one draw of them is validated after every epoch"
    )

    where: Where = option(("Linear",), f"the layers whose weights are dropped: {LAYERS}")
    rate: float = option(0.1, "probability that a weight is dropped")

    def __post_init__(self) -> None:
        require(0 < self.rate < 1, f"rate must be above 0 and below 1, got {self.rate!r}.")
        super().__post_init__()

    @property
    def family(self) -> Family:
        return Family("scalar", 1, drop=self.rate)
