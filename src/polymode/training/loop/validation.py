"""Scores of every member on held-out data during training."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polymode.data import Data
from polymode.networks.members import Backend, Members, Tensors, call_module, map_members
from polymode.training.contract.objective import Objective
from polymode.training.contract.state import Best, State, copy_into
from polymode.training.loop.batches import Batches
from polymode.trees import Tree, map_tree


def validate(
    state: State, objective: Objective, batches: Batches, validation: Sequence[Data]
) -> dict[str, Tensor]:
    """NLL, error and objective of each member, [M]; the error is 1 − accuracy or the RMSE."""
    members = state.members
    scores = {name: torch.zeros(members.num_members) for name in ("nll", "error", "objective")}
    objective.network.module.eval()
    data_sets = [group.data_set for group in batches.groups]
    for data_set in sorted(set(data_sets)):
        first = data_sets.index(data_set)
        groups = slice(first, first + data_sets.count(data_set))
        rows = members.rows(groups)
        own = map_tree(lambda t, rows=rows: t[rows], state.own)
        own = objective.own_of(members.groups(groups), own)
        with torch.no_grad():
            nll, error = _scores(objective, members.groups(groups), own, validation[data_set])
            scores["nll"][rows], scores["error"][rows] = nll.float(), error.float()
            scores["objective"][rows] = nll.float()
            if (penalty_of := objective.penalty) is not None:
                penalty = _of_members(
                    objective, lambda weights, own, f=penalty_of: f(weights, own), members.groups(groups), own
                )
                count = objective.num_observations[first]
                scores["objective"][rows] += (penalty / count).cpu()
    objective.network.train()
    return scores


def keep_better(state: State, scores: Tensor, patience: float = math.inf) -> bool:
    """Copy all tensors of every member and of every chain whose score is the lowest so far; scores: [M].

    What is a member's own follows its score; what is a chain's follows the mean score of its members. One
    that has gone ``patience`` epochs without a better score stays as it was. Returns whether all have.
    """
    members = state.members
    chain_scores = scores.reshape(members.num_groups, -1).mean(1)
    if members.shared:  # members that share weights are kept or replaced together
        scores = chain_scores.repeat_interleave(members.group_size)
    if state.best is None:
        state.best = Best(
            map_tree(torch.clone, state.tensors),
            scores.clone(),
            chain_scores.clone(),
            torch.zeros_like(scores),
            torch.zeros_like(chain_scores),
        )
        return False
    best = state.best
    for kinds, lowest, now, since in (
        (("stacked", "own"), best.scores, scores, best.since),
        (("shared", "common"), best.chain_scores, chain_scores, best.chain_since),
    ):
        going = since < patience
        better = going & ((now < lowest) | lowest.isnan())  # anything is better than NaN
        lowest[better] = now[better]
        since[better] = 0
        since[going & ~better] += 1
        for kind in kinds:
            _copy_rows(best.tensors[kind], state.tensors[kind], better)
    return bool((best.since >= patience).all() and (best.chain_since >= patience).all())


def take_best(state: State) -> None:
    """Put what was kept in the place of what training ended with."""
    assert state.best is not None
    copy_into(state.tensors, state.best.tensors)


def _copy_rows(target: Tree, source: Tree, rows: Tensor) -> None:
    """Copy some rows of the tensors of a tree into those of another one."""

    def copy(tensor: Tensor, other: Tensor) -> None:
        where = rows.to(tensor.device)
        tensor[where] = other[where]

    map_tree(copy, target, source)


def _scores(objective: Objective, members: Members, own: Tree, data: Data) -> tuple[Tensor, Tensor]:
    network, device = objective.network, objective.execution.device
    likelihood, realise = network.likelihood, objective.realise or (lambda weights, _: weights)
    nll = torch.zeros(members.num_members, dtype=torch.float64)
    error = torch.zeros(members.num_members, dtype=torch.float64)
    num_observations = 0.0
    for examples in data.in_order():
        examples = map_tree(lambda t: t.to(device), examples)
        inputs = network.arrange(examples.inputs)
        outputs = _of_members(
            objective,
            lambda weights, own, x=inputs: call_module(network.module, realise(weights, own), x),
            members,
            own,
        )
        log_prob = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, examples.targets)
        errors = torch.vmap(likelihood.errors, in_dims=(0, None))(outputs, examples.targets)
        observed = likelihood.observed(examples.targets).double()  # [B] or [B, T]
        if examples.weights is not None:
            observed = observed * examples.weights.reshape(-1, *[1] * (observed.ndim - 1))
        nll -= (log_prob.double() * observed).flatten(1).sum(1).cpu()
        error += (errors.double() * observed).flatten(1).sum(1).cpu()
        num_observations += float(observed.sum())
    error = error / num_observations
    return nll / num_observations, error.sqrt() if likelihood.squared_errors else error


def _of_members(
    objective: Objective, function: Callable[[Tensors, Tree], Any], members: Members, own: Tree
) -> Any:
    """``function(weights, own)`` of every member, [M, ...], in the way that predictions are made."""

    def run(members: Members, backend: Backend) -> Any:
        return map_members(lambda w, o, _: function(w, o), members, own, backend=backend)

    return objective.network.run_members(run, members, objective.execution.prediction_backend)
