import pytest
import torch

import polymode as pm
from polymode.data import Split, Task
from polymode.data.division import divided, group_numbers, with_validation
from polymode.errors import InputError


def whole(first, last, count):
    assert sorted([*first.tolist(), *last.tolist()]) == list(range(count))


@pytest.mark.parametrize(("count", "num_last"), [(2, 1), (10, 3), (101, 20)])
def test_rows_are_drawn_once_and_by_the_generator(count, num_last, generator):
    first, last = divided(count, num_last, generator)
    whole(first, last, count)
    assert len(last) == num_last
    again = divided(count, num_last, torch.Generator().manual_seed(0))
    assert torch.equal(again[1], last)


@pytest.mark.parametrize("num_last", [0, 5, 6])
def test_something_must_be_on_either_side(num_last, generator):
    with pytest.raises(InputError, match=f"{num_last} of 5 rows cannot be held out"):
        divided(5, num_last, generator)


def test_both_parts_have_the_classes_in_the_same_proportions(generator):
    labels = torch.tensor([0] * 100 + [1] * 50 + [2] * 10)[torch.randperm(160, generator=generator)]
    first, last = divided(160, 32, generator, labels=labels)
    whole(first, last, 160)
    assert torch.bincount(labels[last]).tolist() == [20, 10, 2]


@pytest.mark.parametrize("num_last", [1, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_every_class_keeps_a_row_to_learn_from(num_last, seed):
    labels = torch.tensor([0] * 5 + [1, 2] + [3, 3])
    first, last = divided(9, num_last, torch.Generator().manual_seed(seed), labels=labels)
    whole(first, last, 9)
    assert set(labels[first].tolist()) == {0, 1, 2, 3}
    assert len(last) == min(num_last, 5)
    assert not {1, 2} & set(labels[last].tolist())


def test_classes_of_one_row_each_cannot_be_divided(generator):
    with pytest.raises(InputError, match="Every class has one row"):
        divided(4, 1, generator, labels=torch.arange(4))


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_group_stay_together(seed):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(100) % 20
    first, last = divided(100, 20, generator, groups=groups)
    whole(first, last, 100)
    assert not set(groups[first].tolist()) & set(groups[last].tolist())
    assert len(last) == 20  # groups of five


@pytest.mark.parametrize("seed", range(10))
def test_a_group_that_is_too_large_is_trained_on(seed):
    groups = torch.tensor([0] * 90 + [1] * 5 + [2] * 5)
    _, last = divided(100, 10, torch.Generator().manual_seed(seed), groups=groups)
    assert set(groups[last].tolist()) == {1, 2} or len(last) == 5
    _, last = divided(100, 1, torch.Generator().manual_seed(seed), groups=groups)
    assert len(last) == 5


def test_one_group_cannot_be_divided(generator):
    with pytest.raises(InputError, match="one group only"):
        divided(5, 1, generator, groups=torch.zeros(5, dtype=torch.int64))


def test_the_order_of_time_is_kept(generator):
    first, last = divided(10, 3, generator, ordered=True)
    assert (first.tolist(), last.tolist()) == (list(range(7)), [7, 8, 9])


def test_groups_are_numbered_as_they_occur():
    assert group_numbers(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]


def task(targets, likelihood, **options):
    data = pm.ArrayData(torch.arange(len(targets)).float()[:, None], targets, batch_size=4)
    return Task("t", [Split(data, data, **options)], likelihood, 2)


def rows_of(data):
    return data.inputs.flatten().int().tolist()


def test_validation_rows_come_from_the_training_rows():
    labels = torch.tensor([0] * 60 + [1] * 40)
    split = with_validation(task(labels, "categorical")).splits[0]
    assert torch.bincount(split.validation.targets).tolist() == [9, 6]  # fifteen of a hundred
    assert sorted(rows_of(split.train) + rows_of(split.validation)) == list(range(100))
    assert (rows_of(split.test), split.train.batch_size) == (list(range(100)), 4)
    again = with_validation(Task("t", [split], "categorical", 2)).splits[0]
    assert again.validation is split.validation


def test_validation_rows_are_the_last_ones_or_whole_groups():
    numbers = torch.arange(20.0)
    split = with_validation(task(numbers, "gaussian", ordered=True), 0.2).splits[0]
    assert rows_of(split.validation) == [16, 17, 18, 19]
    groups = torch.arange(20) // 4
    split = with_validation(task(numbers, "gaussian", groups=groups), 0.2).splits[0]
    assert len(set(groups[rows_of(split.validation)].tolist())) == 1
    assert split.groups.tolist() == groups[rows_of(split.train)].tolist()


def test_too_few_rows_stay_as_they_are():
    few = task(torch.arange(3.0), "gaussian")
    assert with_validation(few).splits[0].validation is None
    for share, count in ((0.1, 0), (0.9, 3)):
        with pytest.raises(InputError, match=f"of 3 training examples is {count} to validate on"):
            with_validation(few, share)
