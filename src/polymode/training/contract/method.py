"""The contract between a method and ``fit``: Problem, Phase, Method (State has a file of its own)."""

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require
from polymode.networks.adaptations import Adaptation
from polymode.networks.members import Members, Tensors
from polymode.posteriors import Posterior
from polymode.posteriors.network import Network
from polymode.schedules import Constant, Schedule
from polymode.training.contract.batch import Batch
from polymode.training.contract.execution import Execution
from polymode.training.contract.objective import Objective
from polymode.training.contract.optimizers import MemberOptimizer, Optimizer
from polymode.training.contract.state import State
from polymode.trees import Tree
from polymode.weights.priors import Penalty, PriorStd, prior_stds


def _cannot_redraw(layers: Iterable[str], generator: torch.Generator) -> Tensors:
    raise InputError(f"This problem cannot draw the weights of {', '.join(layers)} anew.")


@dataclass(frozen=True)
class Problem:
    """What a method knows about its task: the network, its weights, where a chain starts.

    trainable: names of the weights with a gradient. exempt: those that carry no decay when an
    optimiser says ``decay_all=False``. start: draws the initial weights of a chain, by its number.
    observations: N of every chain's data set, [G]. initial: weights of the members that ``fit(initial=...)``
    lets this chain begin at.
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

    def objective(
        self,
        penalty: Penalty | None = None,
        realise: Callable[[Tensors, Tree], Tensors] | None = None,
        trainable: frozenset[str] | None = None,
        noise: tuple[str, ...] = (),
    ) -> Objective:
        """The loss of this problem's network and likelihood with a method's own terms."""
        names = self.trainable if trainable is None else trainable
        return Objective(self.network, names, self.execution, self.observations, penalty, realise, noise)


@dataclass(frozen=True)
class KeepBest:
    """Keep all tensors of each member as they were in the epoch with the lowest validation criterion.

    criterion: "nll", "error" (misclassification, or root mean square), or "objective" (NLL plus
    the penalty divided by N). from_epoch, to_epoch: the window of the phase's epochs, counted from 1,
    in which weights may be kept; the phase's end closes it unless said otherwise.
    What belongs to a chain follows the mean of its members, and members that share weights are judged
    together by it.
    """

    criterion: Literal["nll", "error", "objective"] = "nll"
    from_epoch: int = 1
    to_epoch: int | None = None

    def includes(self, epoch: int) -> bool:
        return self.from_epoch <= epoch and (self.to_epoch is None or epoch <= self.to_epoch)

    def __post_init__(self) -> None:
        if self.from_epoch < 1 or (self.to_epoch is not None and self.to_epoch < self.from_epoch):
            raise InputError(
                f"KeepBest needs 1 <= from_epoch <= to_epoch, got {self.from_epoch} and {self.to_epoch}."
            )
        if self.criterion not in ("nll", "error", "objective"):
            raise InputError(
                f"KeepBest criterion {self.criterion!r}: allowed are 'nll', 'error', 'objective'."
            )


Keep = Literal["last", "best"] | KeepBest


def keep_rule(keep: Keep) -> KeepBest | None:
    """Read ``keep="last" | "best"`` or a ``KeepBest``."""
    if isinstance(keep, KeepBest):
        return keep
    if keep not in ("last", "best"):
        raise InputError(f"keep={keep!r}: allowed are 'last', 'best' or a KeepBest.")
    return KeepBest() if keep == "best" else None


def epochs_before(name: str, value: float, epochs: int | None) -> int:
    """Read when something begins: a whole number of epochs before it, or a fraction of all epochs.

    epochs: of the whole training; None only checks the value.
    """
    fraction = isinstance(value, float) and value < 1
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value:
        raise InputError(f"{name} must be a number of epochs or a fraction of all below 1, got {value!r}.")
    require(
        fraction or float(value).is_integer(), f"{name}={value!r}: give whole epochs, or a fraction below 1."
    )
    if epochs is None:
        return 0
    if fraction:
        return min(math.floor(value * epochs + 1e-9), epochs - 1)
    if value >= epochs:
        raise InputError(
            f"{name}={value} is not before the end of {epochs} epochs: begin earlier, or train longer."
        )
    return int(value)


Step = Callable[[State, Sequence[Batch], Objective], Tensor]
Hook = Callable[[State], None]
Measure = Callable[[State], Mapping[str, Tensor]]


def descend(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
    """One gradient step of every member on its own batch: θ_m ← θ_m − step(∇L_m). Returns losses [M]."""
    [batch] = batches
    optimizer = state.optimizers["all"]
    if not optimizer.spec.needs_closure:
        losses, gradients = objective.losses_and_gradients(state, batch)
        optimizer.step(gradients.stacked, batch.cohorts)
        return losses
    losses = torch.full((state.members.num_members,), torch.nan, device=objective.execution.device)

    def evaluate(row: int) -> tuple[Tensor, Tensors]:
        group, member = divmod(row, state.members.group_size)
        each, gradients = objective.losses_and_gradients(state, batch.only(group), member)
        losses[row] = each[row].detach()
        return each[row], {name: tensor[row] for name, tensor in gradients.stacked.items()}

    optimizer.step_with_closure(evaluate, batch.cohorts)
    return losses


def nothing(state: State) -> None:
    """The hook that does nothing."""


@dataclass(frozen=True)
class Over:
    """An optimiser over some weights: all trainable ones, or those named.

    The names are all stacked or all shared weights. separate_members: members of a chain step one at a
    time (late-phase rounds), each with its own moments and step count.
    """

    optimizer: Optimizer
    names: frozenset[str] | None = None
    separate_members: bool = False


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one rule.

    step: what happens with each round of ``batches`` minibatches ("full": the whole data set).
    optimizers: built when the phase begins; those named in ``carry`` go on as they were.
    schedule: multiplies the learning rates. penalty_schedule: multiplies the penalty; None leaves it as it
    is. cost: member-epochs that a chain spends in an epoch. measure: what to show of each member after every
    epoch, {name: [M]}. enter, end_epoch, leave: hooks of the method at the phase's borders.
    """

    name: str
    epochs: int
    objective: Objective
    step: Step = descend
    optimizers: Mapping[str, Over] = field(default_factory=dict)
    carry: frozenset[str] = frozenset()
    schedule: Schedule = Constant()
    penalty_schedule: Schedule | None = None
    batches: int | Literal["full"] = 1
    cost: float = 1.0
    keep: KeepBest | None = None
    measure: Measure | None = None
    enter: Hook = nothing
    end_epoch: Hook = nothing
    leave: Hook = nothing


def build_optimizers(state: State, phase: Phase, cohorts: Sequence[slice], exempt: frozenset[str]) -> None:
    """Build the optimisers a phase begins with; cohorts are slices of chains that step together."""
    members = state.members
    state.optimizers = {n: o for n, o in state.optimizers.items() if n in phase.carry}
    for name, over in phase.optimizers.items():
        if name in state.optimizers:
            continue
        wanted = phase.objective.trainable if over.names is None else over.names
        tensors = {n: t for n, t in members.stacked.items() if n in wanted}
        if tensors and not wanted.isdisjoint(members.shared):
            raise InputError(
                f"The optimiser {name!r} of phase {phase.name!r} is over stacked and shared weights at once: "
                "name one kind in Over(names=...) and give the other an optimiser of its own."
            )
        rows = [members.rows(cohort) for cohort in cohorts]
        group_size = members.group_size if over.separate_members else None
        if not tensors:
            tensors = {n: t for n, t in members.shared.items() if n in wanted}
            rows, group_size = list(cohorts), None
        state.optimizers[name] = MemberOptimizer(over.optimizer, tensors, exempt, rows, group_size)


@dataclass(frozen=True)
class Method(ABC):
    """How a posterior is fitted: hyper-parameters and the algorithm of **one chain**.

    ``fit`` runs ``total_chains`` chains side by side on every data set; the posterior is the mixture
    of theirs.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    cost: ClassVar[str]  # in words, for who chooses a method
    kept: ClassVar[str] = ""  # what ``num_parameters`` counts, where it is not everything
    reference: ClassVar[bool] = False  # a sampler to judge others by: compared only when it is named

    @property
    def total_chains(self) -> int:
        return 1

    @property
    def initial_members(self) -> int:
        """Members of the posterior in ``fit(initial=...)`` that each chain begins at."""
        return 1

    @property
    def can_average(self) -> bool:
        """Whether the posterior is made of the weights as they are when training ends.

        Where it is, their average over epochs can take their place.
        """
        return False

    def adaptations(self, module: nn.Module) -> Sequence[Adaptation]:
        """What has to be done to the user's network, here prepared, such as adding noise; nothing by default.

        It is done in this order to the template under a seed of the run, and to each chain's network under
        one of its own. A saved posterior names it all, and it is done again when that is loaded.
        """
        return ()

    def num_parameters(self, module: nn.Module) -> int:
        """Numbers that a posterior over this network keeps."""
        return self.total_chains * sum(p.numel() for p in module.parameters() if p.requires_grad)

    @abstractmethod
    def init(self, problem: Problem, generator: torch.Generator) -> State:
        """Make the state of one chain."""

    @abstractmethod
    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        """The algorithm, phase by phase, for a chain that may train ``epochs`` epochs."""

    @abstractmethod
    def posterior(self, problem: Problem, state: State) -> Posterior:
        """What one finished chain leaves behind."""

    def remarks(self, epochs: int) -> Iterable[str]:
        """What is allowed, but might not be what was meant; ``fit`` warns of it."""
        return ()

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """What one chain, finished, has to say about itself, as JSON values; nothing unless it says so."""
        return {}

    @abstractmethod
    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        """This method and the epochs to fit it for, spending ``member_epochs`` in all."""

    def declared_budget(self, problem: Problem, epochs: int) -> float:
        """Member-epochs (gradient passes over the data) that fitting one data set takes."""
        return self.total_chains * sum(p.epochs * p.cost for p in self.phases(problem, epochs))

    def config(self) -> dict[str, Any]:
        """Name and hyper-parameters as JSON values."""
        return describe(self)


def describe(value: Any) -> Any:
    """Hyper-parameters as JSON values; functions and classes by their qualified name."""
    if isinstance(value, Method):
        options = {f.name: describe(getattr(value, f.name)) for f in fields(value)}
        return {"name": value.name} | options
    if is_dataclass(value) and not isinstance(value, type):
        options = {f.name: describe(getattr(value, f.name)) for f in fields(value)}
        return {"type": type(value).__name__} | options
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, functools.partial):
        return ["partial", describe(value.func), describe(value.args), describe(value.keywords)]
    named = value if hasattr(value, "__qualname__") else type(value)
    code = getattr(value, "__code__", None)  # tells one lambda from another
    suffix = "" if code is None else f":{hashlib.sha256(code.co_code).hexdigest()[:8]}"
    return f"{named.__module__}:{named.__qualname__}{suffix}"
