"""Running statistics of normalisation layers, estimated anew for weights that no step has led to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polymode.networks.members import Members
from polymode.posteriors.statistics import estimated_names, of_latest_batch
from polymode.training.contract.batch import Batch
from polymode.training.contract.objective import Objective
from polymode.training.contract.phase import Hook, Phase, nothing
from polymode.training.contract.problem import Problem
from polymode.training.contract.state import State


def by_chain(members: Members, name: str) -> Tensor:
    """A view of a tensor of the members, [G, ...]; members of a chain have an axis of their own."""
    if name in members.shared:
        return members.shared[name]
    return members.stacked[name].unflatten(0, (members.num_groups, -1))


def estimated_statistics(problem: Problem) -> list[str]:
    """Names of running statistics, but for layers that the user keeps in evaluation mode."""
    return estimated_names(problem.network)


def empty_statistics(problem: Problem, state: State) -> dict[str, Any]:
    """What ``re_estimate`` needs as ``State.common["statistics"]`` of a chain."""
    owned = state.members.stacked.keys()  # a layer that is never called has nothing to estimate
    names = [name for name in estimated_statistics(problem) if name in owned]
    return {
        "examples": torch.zeros(1, dtype=torch.int64),
        "means": {name: torch.zeros_like(by_chain(state.members, name)) for name in names},
    }


def re_estimate(
    name: str, problem: Problem, objective: Objective, enter: Hook = nothing, leave: Hook = nothing
) -> Phase:
    """A pass over the data that gives every member the mean of its batch statistics, and nothing else."""
    objective = replace(objective, network=of_latest_batch(problem.network))

    def begin(state: State) -> None:
        enter(state)
        state.common["statistics"]["examples"].zero_()

    def step(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        [batch] = batches
        losses = objective.losses(state, batch, training=True)
        statistics = state.common["statistics"]
        for piece in batch.pieces:
            seen = statistics["examples"][piece.groups]
            seen.add_(piece.batch_size)
            for key, mean in statistics["means"].items():
                part = mean[piece.groups]
                share = (piece.batch_size / seen).to(part).reshape(-1, *[1] * (part.ndim - 1))
                part.add_(share * (by_chain(state.members, key)[piece.groups] - part))
        return losses

    def end(state: State) -> None:
        for key, mean in state.common["statistics"]["means"].items():
            by_chain(state.members, key).copy_(mean)
        leave(state)

    return Phase(name, 1, objective, step, cost=0.0, enter=begin, leave=end)
