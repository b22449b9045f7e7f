"""Averages over the end of training: stochastic weight averaging, and a Gaussian around the average.

Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018; Maddox et al., "A
Simple Baseline for Bayesian Uncertainty in Deep Learning" (SWAG), 2019.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require, require_positive, require_whole
from polymode.methods.single import Single
from polymode.networks.adaptations import Adaptation
from polymode.networks.members import Members, Tensors, copied_module
from polymode.networks.surgery import running_statistics
from polymode.options import option
from polymode.posteriors import Posterior, merge
from polymode.posteriors.network import Network
from polymode.posteriors.particles import MemberStore, rows_of
from polymode.training.contract import (
    Batch,
    Hook,
    Method,
    Objective,
    Phase,
    Problem,
    State,
    epochs_before,
    nothing,
)
from polymode.trees import map_tree


@dataclass(frozen=True)
class _Averaging(Method):
    """Collects the weights at the end of each of the last epochs of another method's training.

    ``State.common["averaging"]`` holds, of each chain: "epochs" and "examples", how many have been seen;
    "mean", of weights over epochs; "spread", the sum of their squared deviations from it; "deviations", the
    latest of them; "statistics", the mean of batch statistics.
    """

    _least: ClassVar[int] = 1  # epochs to average

    of: Method = option(
        Single(),
        "how the weights are trained: any method with weights at its end (`single`, `late_phase`, "
        "`batch_ensemble`, `mc_dropout`)",
    )
    start: float = option(
        0.75,
        "epochs before the first that counts: a whole number, or a fraction of all; the last phase of `of` "
        "must have begun",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.of, Method):
            given = self.of.__name__ if isinstance(self.of, type) else repr(self.of)
            raise InputError(f"of must be an instance of a method, such as Single(), got {given}.")
        if not self.of.can_average:
            raise InputError(
                f"{self.name} averages weights over epochs, and what {self.of.name} leaves behind is not "
                "made of the weights at the end of its training. Use single, late_phase, batch_ensemble or "
                "mc_dropout."
            )
        epochs_before("start", self.start, None)

    @property
    def total_chains(self) -> int:
        return self.of.total_chains

    @property
    def chain_members(self) -> int | None:
        return self.of.chain_members

    def adaptations(self, module: nn.Module) -> Sequence[Adaptation]:
        return self.of.adaptations(module)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        each, epochs = self.of.for_budget(member_epochs)
        return replace(self, of=each), epochs

    def remarks(self, epochs: int) -> Iterable[str]:
        return self.of.remarks(epochs)

    @property
    def num_initial(self) -> int:
        return self.of.num_initial

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        return self.of.findings(problem, state)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        state = self.of.init(problem, generator)
        owned = state.members.stacked.keys()  # a layer that is never called has nothing to estimate
        estimated = [name for name in _estimated(problem) if name in owned]
        state.common["averaging"] = {
            "epochs": torch.zeros(1, dtype=torch.int64),
            "examples": torch.zeros(1, dtype=torch.int64),
            "statistics": _zeros(state, estimated),
            "mean": _zeros(state, _weights(problem, state)),
        }
        return state

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        phases = list(self.of.phases(problem, epochs))
        last = max(index for index, phase in enumerate(phases) if phase.optimizers)
        trained = phases[last]
        before = sum(phase.epochs for phase in phases[:last])
        start = epochs_before("start", self.start, epochs)
        self._check(trained, before, start)

        def collect(state: State) -> None:
            trained.end_epoch(state)
            seen = state.common["averaging"]["epochs"].add_(1)
            number = int(seen[0]) - (start - before)
            if number >= 1:
                self._collect(state, number)

        collecting = replace(trained, end_epoch=collect)
        collected = trained.epochs - (start - before)
        return [*phases[:last], *self._finished(problem, collecting, phases[last + 1 :], collected)]

    def _check(self, trained: Phase, before: int, start: int) -> None:
        if start < before:
            raise InputError(
                f"start={self.start} begins to average after {start} epochs, but the last phase of "
                f"{self.of.name}, whose weights these are, begins only after {before}. Begin later."
            )
        if trained.keep is not None:
            raise InputError(
                f"keep='best' of {self.of.name} chooses one epoch, and {self.name} averages over several: "
                "take keep='last'."
            )
        left = before + trained.epochs - start
        require(
            left >= self._least,
            f"{self.name} needs {self._least} or more epochs to average, start={self.start} leaves {left}.",
        )

    @abstractmethod
    def _collect(self, state: State, number: int) -> None:
        """Take in the weights of the ``number``-th epoch that is averaged."""

    @abstractmethod
    def _finished(self, problem: Problem, trained: Phase, others: list[Phase], collected: int) -> list[Phase]:
        """The training, in which so many epochs are collected, with what follows on it, and the others."""


@dataclass(frozen=True)
class SWA(_Averaging):
    """θ̄ = mean of θ at the end of every epoch after ``start``; then the running statistics for θ̄."""

    name: ClassVar[str] = "swa"
    summary: ClassVar[str] = "stochastic weight averaging: one network, the mean over the last epochs"
    cost: ClassVar[str] = "that of `of`, and one forward pass over the data where there is BatchNorm"

    def num_parameters(self, module: nn.Module) -> int:
        return self.of.num_parameters(module)

    def _collect(self, state: State, number: int) -> None:
        for name, mean in state.common["averaging"]["mean"].items():
            mean.add_(_by_chain(state, name) - mean, alpha=1 / number)

    def _finished(self, problem: Problem, trained: Phase, others: list[Phase], collected: int) -> list[Phase]:
        def leave(state: State) -> None:
            trained.leave(state)
            for name, mean in state.common["averaging"]["mean"].items():
                _by_chain(state, name).copy_(mean)

        averaged = replace(trained, leave=leave)
        if not _estimated(problem):
            return [averaged, *others]
        return [averaged, re_estimate("statistics", problem, trained.objective), *others]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        return self.of.posterior(problem, state)


@dataclass(frozen=True)
class SWAG(_Averaging):
    """θ ~ N(θ̄, scale · [diag(mean θ² − θ̄²) + D Dᵀ/(R − 1)]): a Gaussian from the last epochs of training.

    Column r of D is the deviation of an epoch's weights from the running mean, over all layers at once, so
    that layers vary together. Every draw gets running statistics of its own from a pass over the data.
    """

    name: ClassVar[str] = "swag"
    summary: ClassVar[str] = "draws from a Gaussian fitted to the last epochs of one training"
    cost: ClassVar[str] = (
        "that of `of`, and where there is BatchNorm a forward pass over the data for every draw; predicts "
        "with num_draws passes"
    )

    _least: ClassVar[int] = 2

    num_draws: int = option(30, "networks in the posterior")
    rank: int = option(20, "R, the number of latest deviations that are kept; 0 leaves the diagonal alone")
    scale: float = option(
        0.5,
        "of the covariance; ½ is that of Maddox et al. (2019), which halves the sum of its two parts; 1 with "
        "`rank=0` is its diagonal version",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("num_draws", self.num_draws)
        require_whole("rank", self.rank, least=0)
        require(self.rank != 1, "rank must be 0 or at least 2: one deviation has no spread.")
        require_positive("scale", self.scale)

    @property
    def chain_members(self) -> int | None:
        each = self.of.chain_members
        return None if each is None else self.num_draws * each

    def num_parameters(self, module: nn.Module) -> int:
        return self.num_draws * self.of.num_parameters(module)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        state = super().init(problem, generator)
        averaging = state.common["averaging"]
        averaging["spread"] = map_tree(torch.zeros_like, averaging["mean"])
        averaging["deviations"] = {}
        if self.rank:
            averaging["deviations"] = map_tree(
                lambda t: t.new_zeros(1, self.rank, *t.shape[1:]), averaging["mean"]
            )
        return state

    def _collect(self, state: State, number: int) -> None:
        averaging = state.common["averaging"]
        for name, mean in averaging["mean"].items():
            now, before = _by_chain(state, name), mean.clone()
            mean.add_(now - mean, alpha=1 / number)
            # Welford's sum: mean θ² − θ̄² would lose all digits of a variance that is small beside θ̄².
            averaging["spread"][name].addcmul_(now - before, now - mean)
            if self.rank:
                averaging["deviations"][name][:, (number - 1) % self.rank] = now - mean

    def draw(self, state: State, num_epochs: int) -> None:
        """Put a draw of every chain in the place of its weights; ``num_epochs`` were collected."""
        kept, averaging = min(num_epochs, self.rank), state.common["averaging"]
        for group, generator in enumerate(state.generators):
            common = torch.randn(kept, generator=generator, dtype=torch.float64) / math.sqrt(max(kept - 1, 1))
            for name, mean in averaging["mean"].items():
                centre = mean[group].double()
                variance = averaging["spread"][name][group].double() / num_epochs
                own = torch.randn(centre.shape, generator=generator, dtype=torch.float64)
                step = variance.sqrt() * own.to(centre.device)
                if kept:
                    deviations = averaging["deviations"][name][group, :kept].double()
                    step = step + torch.tensordot(common.to(centre.device), deviations, 1)
                _by_chain(state, name)[group].copy_(centre + math.sqrt(self.scale) * step)

    def _finished(self, problem: Problem, trained: Phase, others: list[Phase], collected: int) -> list[Phase]:
        def draw(state: State) -> None:
            self.draw(state, collected)

        def finish(state: State) -> None:
            state.finished.append(state.members)

        def draw_all(state: State) -> None:
            last.leave(state)
            for _ in range(self.num_draws):
                draw(state)
                finish(state)

        *before, last = [trained, *others]  # a look at the members is one at those that were trained
        if not _estimated(problem):
            return [*before, replace(last, leave=draw_all)]
        each = re_estimate("draw", problem, trained.objective, enter=draw, leave=finish)
        return [*before, last, *[each] * self.num_draws]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        drawn = []
        blocks = state.finished.blocks or [state.members]  # one, where training was cut short
        for number, block in enumerate(blocks):
            members = rows_of(block, 0, block.num_members)
            labels = members.labels.clone()
            labels[:, 2] += number * block.num_members
            members = replace(members, labels=labels)
            drawn.append(self.of.posterior(problem, replace(state, members=members, finished=MemberStore())))
        return merge(drawn)


def re_estimate(
    name: str, problem: Problem, objective: Objective, enter: Hook = nothing, leave: Hook = nothing
) -> Phase:
    """A pass over the data that gives every member the mean of its batch statistics, and nothing else."""
    objective = replace(objective, network=_of_latest_statistics(problem.network))

    def begin(state: State) -> None:
        enter(state)
        state.common["averaging"]["examples"].zero_()

    def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        [batch] = batches
        losses = objective.losses(state, batch, training=True)
        averaging = state.common["averaging"]
        for piece in batch.pieces:
            seen = averaging["examples"][piece.groups]
            seen.add_(piece.batch_size)
            for key, mean in averaging["statistics"].items():
                part = mean[piece.groups]
                share = (piece.batch_size / seen).to(part).reshape(-1, *[1] * (part.ndim - 1))
                part.add_(share * (_by_chain(state, key)[piece.groups] - part))
        return losses

    def end(state: State) -> None:
        for key, mean in state.common["averaging"]["statistics"].items():
            _by_chain(state, key).copy_(mean)
        leave(state)

    return Phase(name, 1, objective, step, cost=0.0, enter=begin, leave=end)


def _of_latest_statistics(network: Network) -> Network:
    """The same network, but its running statistics are those of the latest batch alone."""
    module = copied_module(network.module)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.momentum = 1.0
    return replace(network, module=module)


def _by_chain(state: State, name: str) -> Tensor:
    """A view of a tensor of the members, [G, ...]; members of a chain have an axis of their own."""
    members: Members = state.members
    if name in members.shared:
        return members.shared[name]
    return members.stacked[name].unflatten(0, (members.num_groups, -1))


def _zeros(state: State, names: Sequence[str]) -> Tensors:
    return {name: torch.zeros_like(_by_chain(state, name)) for name in names}


def _weights(problem: Problem, state: State) -> list[str]:
    """Names of what is trained; those with a slash are a method's own."""
    tensors = state.members.stacked | state.members.shared
    return [n for n, t in tensors.items() if (n in problem.trainable or "/" in n) and t.is_floating_point()]


def _estimated(problem: Problem) -> list[str]:
    """Names of running statistics, but for layers that the user keeps in evaluation mode."""
    kept = set(problem.network.always_eval)
    return [n for n in running_statistics(problem.network.module) if n.rpartition(".")[0] not in kept]
