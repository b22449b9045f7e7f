"""Scores of every member on held-out data during training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polymode.data import Data
from polymode.members import Members, Tensors, call_module, map_members
from polymode.training.batches import Batches
from polymode.training.method import State
from polymode.training.objective import Objective


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
        own = {name: tensor[rows] for name, tensor in state.own.items()}
        with torch.no_grad():
            nll, error = _scores(objective, members.groups(groups), own, validation[data_set])
            scores["nll"][rows], scores["error"][rows] = nll.float(), error.float()
            scores["objective"][rows] = nll.float()
            penalty_of = objective.penalty
            if penalty_of is not None:
                penalty = map_members(
                    lambda weights, own, _: penalty_of(weights, own),
                    members.groups(groups),
                    own,
                    backend=objective.execution.backend,
                )
                count = objective.execution.num_observations[first]
                scores["objective"][rows] += (penalty / count).cpu()
    objective.network.module.train()
    return scores


def _scores(
    objective: Objective, members: Members, own: Tensors, data: Data
) -> tuple[Tensor, Tensor]:
    network, device = objective.network, objective.execution.device
    likelihood = network.likelihood
    nll = torch.zeros(members.num_members, dtype=torch.float64)
    error = torch.zeros(members.num_members, dtype=torch.float64)
    num_observations = 0
    for examples in data.in_order():
        examples = examples.map(lambda t: t.to(device))
        inputs = network.arrange(examples.inputs)
        outputs = map_members(
            lambda weights, own, _, x=inputs: call_module(
                network.module, objective.realised(weights, own), x
            ),
            members,
            own,
            backend=objective.execution.backend,
        )
        log_prob = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, examples.targets)
        errors = torch.vmap(likelihood.errors, in_dims=(0, None))(outputs, examples.targets)
        nll -= log_prob.flatten(1).double().sum(1).cpu()
        error += errors.flatten(1).double().sum(1).cpu()
        num_observations += int(likelihood.num_observations(examples.targets))
    error = error / num_observations
    return nll / num_observations, error.sqrt() if likelihood.squared_errors else error
