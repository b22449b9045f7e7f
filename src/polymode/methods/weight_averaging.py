"""Averages over the end of training: stochastic weight averaging, and a Gaussian around the average.

Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018; Maddox et al., "A
Simple Baseline for Bayesian Uncertainty in Deep Learning" (SWAG), 2019.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import nn

from polymode.errors import InputError, require, require_positive, require_whole
from polymode.methods.single import Single
from polymode.networks.members import Tensors
from polymode.options import option
from polymode.posteriors import Posterior, merge
from polymode.posteriors.particles import MemberStore, rows_of
from polymode.training.contract import (
    Method,
    Phase,
    Problem,
    State,
    Wrapper,
    by_chain,
    empty_statistics,
    epochs_before,
    estimated_statistics,
    re_estimate,
)
from polymode.trees import map_tree


@dataclass(frozen=True)
class _Averaging(Wrapper):
    """Collects the weights at the end of each of the last epochs of another method's training.

    ``State.common["averaging"]`` holds, of each chain: "epochs", how many have been seen; "mean", of weights
    over epochs; "spread", the sum of their squared deviations from it; "deviations", the latest of them.
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

    @property
    def can_keep_best(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.of.can_average:
            raise InputError(
                f"{self.name} averages weights over epochs, and what {self.of.name} leaves behind is not "
                "made of the weights at the end of its training. Use single, late_phase, batch_ensemble or "
                "mc_dropout."
            )
        epochs_before("start", self.start, None)

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        each, epochs = self.of.for_budget(member_epochs)
        return replace(self, of=each), epochs

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        state = self.of.init(problem, generator)
        state.common["statistics"] = empty_statistics(problem, state)
        state.common["averaging"] = {
            "epochs": torch.zeros(1, dtype=torch.int64),
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
    best_epoch: ClassVar[str] = "none: an average is over the last epochs, whatever their validation says"

    def _collect(self, state: State, number: int) -> None:
        for name, mean in state.common["averaging"]["mean"].items():
            mean.add_(by_chain(state.members, name) - mean, alpha=1 / number)

    def _finished(self, problem: Problem, trained: Phase, others: list[Phase], collected: int) -> list[Phase]:
        def leave(state: State) -> None:
            trained.leave(state)
            for name, mean in state.common["averaging"]["mean"].items():
                by_chain(state.members, name).copy_(mean)

        averaged = replace(trained, leave=leave)
        if not estimated_statistics(problem):
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
    best_epoch: ClassVar[str] = "none: an average is over the last epochs, whatever their validation says"

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

    @property
    def chain_passes(self) -> int | None:
        each = self.of.chain_passes
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
            now, before = by_chain(state.members, name), mean.clone()
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
                by_chain(state.members, name)[group].copy_(centre + math.sqrt(self.scale) * step)

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
        if not estimated_statistics(problem):
            return [*before, replace(last, leave=draw_all)]
        each = re_estimate("draw", problem, trained.objective, enter=draw, leave=finish)
        return [*before, last, *[each] * self.num_draws]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        drawn = []
        blocks = state.finished.blocks or [state.members]  # one, where training was cut short
        for block in blocks:
            members = rows_of(block, 0, block.num_members)
            drawn.append(self.of.posterior(problem, replace(state, members=members, finished=MemberStore())))
        return merge(drawn)


def _zeros(state: State, names: Sequence[str]) -> Tensors:
    return {name: torch.zeros_like(by_chain(state.members, name)) for name in names}


def _weights(problem: Problem, state: State) -> list[str]:
    """Names of what is trained; those with a slash are a method's own."""
    tensors = state.members.stacked | state.members.shared
    return [n for n, t in tensors.items() if (n in problem.trainable or "/" in n) and t.is_floating_point()]
