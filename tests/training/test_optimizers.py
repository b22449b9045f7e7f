"""The rates that rows have: those of their cohorts, whoever steps together."""

import pytest
import torch

import polymode as pm
from polymode.training.contract.optimizers import MemberOptimizer

COHORTS = [slice(0, 4), slice(4, 6)]  # rows: two groups of two members, then one such group
FACTORS = [0.5, 0.25]


def over(kind, group_size, **options):
    tensors = {"weight": torch.ones(6, 3, dtype=torch.float64), "bias": torch.ones(6, 2, dtype=torch.float64)}
    spec = pm.Optimizer(kind, lr=0.1, **options)
    return MemberOptimizer(spec, tensors, frozenset({"bias"}), COHORTS, group_size), tensors


@pytest.mark.parametrize("kind", ["SGD", "Adafactor"])  # one instance for many rows, one for each
@pytest.mark.parametrize("group_size", [None, 2], ids=["together", "separate members"])
def test_every_row_has_the_rate_of_its_cohort(kind, group_size):
    optimizer, _ = over(kind, group_size)
    assert optimizer.rates.tolist() == [0.1] * 6
    optimizer.set_rates(FACTORS)
    assert optimizer.rates.tolist() == [0.05] * 4 + [0.025] * 2
    assert optimizer.rates.dtype == torch.float64


@pytest.mark.parametrize("group_size", [None, 2], ids=["together", "separate members"])
def test_they_are_what_a_step_multiplies_the_gradient_by(group_size):
    """Plain SGD on a gradient of one moves every row by its rate; decay has a group of its own."""
    optimizer, tensors = over("SGD", group_size, weight_decay=0.5, decay_all=False)
    optimizer.set_rates(FACTORS)
    before = tensors["bias"].clone()
    ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    for member in [None] if group_size is None else range(group_size):
        optimizer.step(ones, member=member)
    torch.testing.assert_close(before - tensors["bias"], optimizer.rates[:, None].expand(6, 2))
    # The decayed weights move by half as much again: 1 + 0.5 · 1.
    torch.testing.assert_close(1 - tensors["weight"], 1.5 * optimizer.rates[:, None].expand(6, 3))


def test_rows_that_do_not_step_have_rates_too():
    optimizer, tensors = over("SGD", 2)
    optimizer.set_rates(FACTORS)
    optimizer.step({name: torch.ones_like(t) for name, t in tensors.items()}, cohorts=[1], member=1)
    moved = (1 - tensors["weight"]).amax(1)
    torch.testing.assert_close(moved, torch.tensor([0, 0, 0, 0, 0, 0.025], dtype=torch.float64))
    assert optimizer.rates.tolist() == [0.05] * 4 + [0.025] * 2


def test_there_are_none_where_there_is_nothing_to_train():
    assert MemberOptimizer(pm.Optimizer("SGD"), {}, frozenset(), []).rates.shape == (0,)
