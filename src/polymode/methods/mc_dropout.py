"""Dropout that stays on: every draw is a thinned network (Gal and Ghahramani 2016)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from polymode.errors import InputError, require
from polymode.networks.adaptations import Adaptation, Sampling
from polymode.networks.layers import Masks
from polymode.networks.members import Tensors
from polymode.networks.selection import Where, check_where, select_layers
from polymode.networks.surgery import random_layers, seed_buffers
from polymode.options import option
from polymode.posteriors import ComponentMixture, Posterior
from polymode.posteriors.component_mixture import SHARED
from polymode.training.contract import LAYERS, Descent, Problem, State


@dataclass(frozen=True)
class MCDropout(Descent):
    """p(y | x) = (1/S) Σ_s p(y | x, W ⊙ z_s), every unit's z ~ Bernoulli(1 − rate)/(1 − rate) drawn anew."""

    name: ClassVar[str] = "mc_dropout"
    summary: ClassVar[str] = "dropout in training and in every draw"
    cost: ClassVar[str] = (
        "one member-epoch an epoch; no further parameters; predicts with as many passes as draws"
    )
    best_epoch: ClassVar[str] = "of every network its own, by one mask for each validation example"

    where: Where | None = option(
        None,
        "None takes the dropout layers that the network has, with their own rates; if it has none, dropout "
        f"is put before its output layer. Layers {LAYERS} get dropout on their inputs beside those",
    )
    rate: float = option(0.1, "probability that an input is dropped, where dropout is put in")
    masks: Masks = option(
        "example",
        'a mask for each `"example"`, as in usual training, or for each `"draw"`: one that all examples '
        "share, so that a draw is a function",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.rate < 1, f"rate must be above 0 and below 1, got {self.rate!r}.")
        Sampling(self.masks)
        if self.where is not None:
            object.__setattr__(self, "where", check_where(self.where))  # one way to say one thing

    @property
    def chain_members(self) -> int | None:
        return None

    def adaptations(self, module: nn.Module) -> Sequence[Adaptation]:
        where = self.where
        if where is None:
            where = () if random_layers(module) else ("output",)
        layers = select_layers(module, where) if where else []
        for name in layers:
            if isinstance(module.get_submodule(name), nn.Embedding):
                raise InputError(
                    f"{name!r} is an Embedding: its inputs are numbers of rows, which cannot be dropped. "
                    "Name the layer after it."
                )
        return [Sampling(self.masks, dict.fromkeys(layers, self.rate))]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        module = problem.network.module
        drawn = frozenset(seed_buffers(module))
        chain: Tensors = {
            SHARED + name: tensor.clone()
            for name, tensor in state.members.member(0).items()
            if name not in drawn
        }
        return ComponentMixture(problem.network, chains=[chain])
