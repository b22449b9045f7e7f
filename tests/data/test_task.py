import pytest
import torch

import polymode as pm
from polymode.application.datasets.loading import load_labelled
from polymode.data import Preprocessing, Task, as_task
from polymode.data.task import standardised
from polymode.errors import InputError

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


def test_pairs_dictionaries_and_loaders_become_tasks():
    task = as_task(((X[:15], Y[:15]), (X[15:], Y[15:]), X + 9), "mine:load")
    assert (task.likelihood, task.num_outputs, task.ood.num_examples) == ("categorical", 3, 20)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
    task = as_task({"train": loader, "test": loader, "classes": ["a", "b", "c", "d"]}, "mine:load")
    assert (task.num_outputs, task.splits[0].train.batch_size) == (4, 4)
    numbers = as_task({"train": (X, X[:, :2]), "test": (X, X[:, :2])}, "mine:load")
    assert (numbers.likelihood, numbers.num_outputs) == ("gaussian", 2)
    two = {"train": (X, X[:, 0]), "test": (X, X[:, 0]), "likelihood": "heteroscedastic_gaussian"}
    assert as_task(two, "mine:load").num_outputs == 2
    assert as_task(task, "x") is task


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must return a Task, a pair"),
        ({"train": (X, Y)}, "has no 'test'"),
        ({"train": (X, Y), "test": (X, Y), "tset": 1}, "Unknown entry .* 'tset'. Did you mean 'test'"),
        ({"train": X, "test": (X, Y)}, "must be ArrayData, a DataLoader or a pair"),
    ],
)
def test_other_things_are_refused(value, message):
    with pytest.raises(InputError, match=message):
        as_task(value, "mine:load")


def test_targets_far_from_one_are_remarked_on_when_they_are_trained_on():
    task = as_task(((X, Y * 6000.0), (X, Y * 6000.0)), "mine:load")
    with pytest.warns(UserWarning, match=r"mean of 5700 and a standard deviation of 4828") as said:
        pm.fit(
            pm.methods.Single(),
            lambda: pm.models.MLP(3, 1, (4,)),
            task.splits[0].train,
            likelihood=task.likelihood,
            epochs=1,
            progress=False,
        )
    assert len(said) == 1


def test_what_is_constant_in_training_is_always_zero():
    generator = torch.Generator().manual_seed(0)
    varied = torch.randn(50, generator=generator, dtype=torch.float64)
    sums = torch.rand(50, 10, generator=generator, dtype=torch.float64)
    rounding = 1e6 * (sums / sums.sum(1, keepdim=True)).sum(1)  # 1e6 but for the last bits
    assert rounding.unique().numel() > 1
    train = torch.stack(
        [varied, torch.zeros(50), torch.full((50,), 0.1), rounding, 1e-9 * varied], 1
    ).double()
    new = torch.tensor([[0.5, 1.0, -1e8, 7.0, 5e-10]], dtype=torch.float64)
    (inputs, prepared), shift, scale = standardised(train, new)
    ready = Preprocessing(input_shift=shift, input_scale=scale)
    assert scale[1:4] == (0.0, 0.0, 0.0)
    assert (ready.constant, Preprocessing.from_config(ready.config())) == (("1", "2", "3"), ready)
    assert prepared[0, 1:4].tolist() == [0, 0, 0]
    assert not inputs[:, 1:4].any()
    torch.testing.assert_close(ready.raw(prepared)[0, 1:4], torch.tensor([0.0, 0.1, 1e6]))
    # A spread that is small, but real, is a spread like any other: the two columns are one but for the unit.
    torch.testing.assert_close(inputs[:, 4], inputs[:, 0])
    torch.testing.assert_close(inputs[:, 4].std(correction=0), torch.tensor(1.0))
    assert prepared[0, 4] == pytest.approx(prepared[0, 0])


def test_a_constant_channel_is_always_zero():
    images = torch.rand(20, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images[:, 1] = 0.3
    (inputs, others), _, scale = standardised(images, torch.rand(2, 3, 4, 4), per_channel=True)
    assert scale[1] == 0
    assert not inputs[:, 1].any()
    assert not others[:, 1].any()
    assert inputs[:, 0].std(correction=0).item() == pytest.approx(1)


def test_the_suggested_budget_makes_about_ten_thousand_steps():
    def task(count, batch_size, **options):
        data = pm.ArrayData(torch.zeros(count, 1), torch.zeros(count), batch_size=batch_size)
        return Task("t", [pm.data.Split(data, data)], "gaussian", 1, **options)

    assert task(1000, 10).suggested_budget == 100  # 100 steps an epoch
    assert task(20, 20).suggested_budget == 4000
    assert task(100_000, 10).suggested_budget == 20
    assert task(20, 20, budget=7.0).suggested_budget == 7.0


def test_foreign_examples_are_prepared_as_the_run_was(tmp_path, monkeypatch):
    """Undo their own standardisation and class order, apply the run's."""
    from polymode.application.datasets import loading

    raw = X * 5 + 2
    theirs = Preprocessing(
        input_shift=(2.0,) * 3, input_scale=(5.0,) * 3, target_shift=1.0, target_scale=4.0, classes=("b", "a")
    )
    ready = Preprocessing(
        input_shift=(1.0,) * 3,
        input_scale=(2.0,) * 3,
        target_shift=0.0,
        target_scale=2.0,
        classes=("a", "b", "c"),
    )
    labels = pm.ArrayData(theirs.inputs(raw), Y % 2)
    numbers = pm.ArrayData(theirs.inputs(raw), theirs.targets(raw[:, 0]))
    for data in (labels, numbers):
        split = pm.data.Split(data, data, preprocessing=theirs)
        monkeypatch.setattr(loading, "load_task", lambda *_, s=split, **__: Task("t", [s], "gaussian", 1))
        got = load_labelled("other:load", ready)
        torch.testing.assert_close(got.inputs, (raw - 1) / 2)
        if data is labels:
            assert got.targets.tolist() == [1 - label for label in (Y % 2).tolist()]
        else:
            torch.testing.assert_close(got.targets, raw[:, 0] / 2)
