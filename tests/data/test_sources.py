"""Data sources: what goes in comes out, in the order asked for."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import polymode as pm
from polymode.data import Examples, as_data
from polymode.errors import InputError
from polymode.training.loop.batches import Batches


def test_numpy_becomes_float32_and_tensors_stay():
    data = pm.ArrayData(np.ones((3, 2)), np.array([0, 1, 2]))
    assert (data.inputs.dtype, data.targets.dtype) == (torch.float32, torch.int64)
    assert pm.ArrayData(torch.ones(3, 2).double(), torch.zeros(3)).inputs.dtype == torch.float64


def test_trees_of_inputs_are_gathered_together():
    data = pm.ArrayData({"a": torch.arange(4), "b": torch.arange(8).reshape(4, 2)}, torch.arange(4))
    [got] = data.stream([torch.tensor([3, 1])], [torch.zeros(2, dtype=torch.int64)])
    assert got.inputs["a"].tolist() == got.targets.tolist() == [3, 1]
    assert got.inputs["b"].tolist() == [[6, 7], [2, 3]]
    subset = data.subset([2, 0])
    assert subset.targets.tolist() == [2, 0]
    assert subset.batch_size == data.batch_size


def test_loader_keeps_its_collation_and_takes_our_order():
    dataset = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = DataLoader(
        dataset,
        batch_size=4,
        collate_fn=lambda rows: (
            torch.stack([r[0] for r in rows]) * 2,
            torch.stack([r[1] for r in rows]),
        ),
    )
    data = as_data(loader)
    assert (data.num_examples, data.batch_size) == (10, 4)
    [got] = data.stream([torch.tensor([7, 3])], [torch.arange(2)])
    assert got.inputs.tolist() == [14, 6]
    in_order = torch.cat([part.targets for part in data.in_order(4)])
    assert in_order.tolist() == list(range(10))


class Drawing(Dataset):
    """Augments as people do: with Python's, NumPy's and torch's global generators."""

    def __len__(self):
        return 6

    def __getitem__(self, row):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]), row


def test_what_a_data_set_draws_follows_from_the_seed_of_the_example():
    data = as_data(DataLoader(Drawing(), batch_size=3))
    rows, seeds = torch.tensor([0, 1, 2]), torch.tensor([7, 8, 9])
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    [first] = data.stream([rows], [seeds])
    [again] = data.stream([rows.flip(0)], [seeds.flip(0)])
    assert torch.equal(first.inputs, again.inputs.flip(0))
    assert len(first.inputs.unique()) == 9
    [other] = data.stream([rows], [seeds + 10])
    assert not bool((first.inputs == other.inputs).any())
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert after == before  # the user's own generators are left alone


def test_a_loader_that_yields_something_else_is_refused():
    with pytest.raises(InputError, match=r"must yield .* it yields Tensor"):
        next(as_data(DataLoader(torch.arange(4))).in_order(2))


def test_sample_weights_travel():
    data = pm.ArrayData(torch.arange(3.0), torch.arange(3), weights=[1.0, 0.0, 2.0])
    [got] = data.stream([torch.tensor([2])], [torch.arange(1)])
    assert isinstance(got, Examples)
    assert got.weights.tolist() == [2.0]


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_of_ragged_sets_visit_every_row_once(drop_last):
    sizes = (11, 4, 7)
    sets = [
        pm.ArrayData(torch.arange(n) + 100 * d, torch.zeros(n), batch_size=3, drop_last=drop_last)
        for d, n in enumerate(sizes)
    ]
    batches = Batches(sets, [0, 1], [5, 5, 5], shared_order=False)
    assert [g.num_examples for g in batches.groups] == [11, 11, 7, 7, 4, 4]
    seen: dict[int, list[int]] = {g: [] for g in range(6)}
    for [batch] in batches.epoch(0, 1):
        for piece in batch.pieces:
            for row, group in enumerate(range(piece.groups.start, piece.groups.stop)):
                seen[group] += piece.examples.inputs[row].tolist()
    for group, rows in seen.items():
        info = batches.groups[group]
        full = {100 * info.data_set + i for i in range(info.num_examples)}
        assert len(rows) == len(set(rows)) == info.num_examples - (info.num_examples % 3) * drop_last
        assert set(rows) <= full
    assert seen[0] != seen[1]


def test_rounds_and_full_batches():
    data = pm.ArrayData(torch.arange(10), torch.zeros(10), batch_size=2)
    batches = Batches([data], [0], [0], shared_order=False)
    assert [len(r) for r in batches.epoch(0, 2)] == [2, 2, 1]
    [[full]] = batches.epoch(0, "full")
    # All chains see the same rows: no group axis.
    assert full.pieces[0].examples.inputs.tolist() == list(range(10))
    assert batches.steps_per_epoch(slice(0, 1), 2) == 3


def test_an_epoch_can_be_taken_up_in_the_middle():
    data = pm.ArrayData(torch.arange(10), torch.zeros(10), batch_size=3)
    batches = Batches([data], [0, 1], [0], shared_order=False)
    whole = [r[0].pieces[0].examples.inputs for r in batches.epoch(4, 1)]
    rest = [r[0].pieces[0].examples.inputs for r in batches.epoch(4, 1, first_step=2)]
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True))
    other = [r[0].pieces[0].examples.inputs for r in batches.epoch(5, 1)]
    assert not all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


def test_every_batch_begins_where_a_tensor_of_its_own_would():
    """Some kernels round by alignment, so that a batch would depend on those gathered before it."""
    inputs = {"a": torch.randn(40, 3), "b": torch.randint(9, (40, 5), dtype=torch.uint8)}
    data = pm.ArrayData(inputs, torch.arange(40), weights=torch.ones(40), batch_size=7)
    batches = Batches([data], [0], [0], shared_order=True)
    for first in (0, 2):
        for number, [batch] in enumerate(batches.epoch(0, 1, first), first):
            [piece] = batch.pieces
            assert torch.equal(piece.examples.inputs["a"], inputs["a"][piece.rows])
            assert torch.equal(piece.examples.targets, piece.rows)
            assert len(piece.rows) == (7 if number < 5 else 5)
            for tensor in (*piece.examples.inputs.values(), piece.examples.targets, piece.examples.weights):
                assert tensor.data_ptr() % 64 == 0
