import sys

import pytest
import torch

from polymode.application.datasets.embedded import breast_cancer, diabetes, digits, gap_regression, two_moons
from polymode.errors import InputError

LOADERS = (digits, two_moons, gap_regression, breast_cancer, diabetes)


@pytest.mark.parametrize("load", LOADERS)
def test_tasks_are_the_same_in_every_call_and_take_a_batch_size(load):
    first, second = load(batch_size=7), load(batch_size=7)
    for part in ("train", "test"):
        one, other = getattr(first.splits[0], part), getattr(second.splits[0], part)
        assert one.batch_size == 7
        assert one.inputs.dtype == torch.float32
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    assert first.name == load.__name__


def test_digits_hold_out_two_classes():
    from sklearn.datasets import load_digits

    task = digits()
    split = task.splits[0]
    assert (split.train.num_examples, split.validation.num_examples, split.test.num_examples) == (
        250,
        100,
        1093,
    )
    assert task.ood.num_examples == 354
    assert set(task.ood.targets.tolist()) == {8, 9}
    known = torch.cat([split.train.targets, split.validation.targets, split.test.targets])
    counts = [178, 182, 177, 183, 181, 182, 181, 179]
    assert known.bincount().tolist() == counts
    # Together the parts are exactly the known images, each once.
    bundle = load_digits()
    pixels = torch.cat([split.train.inputs, split.validation.inputs, split.test.inputs])[:, 0] * 16
    expected = torch.tensor(bundle.images[bundle.target < 8], dtype=torch.float32)
    assert sorted(map(tuple, pixels.flatten(1).tolist())) == sorted(map(tuple, expected.flatten(1).tolist()))
    assert (task.model, task.budget, task.num_outputs) == ("smallcnn", 200, 8)
    assert split.preprocessing.image_shape == (1, 8, 8)


def test_digits_without_validation_and_too_many():
    split, usual = digits(num_train=350, num_validation=0).splits[0], digits().splits[0]
    assert split.validation is None
    # All but the usual test images are trained on.
    assert torch.equal(split.test.inputs, usual.test.inputs)
    assert torch.equal(split.train.inputs, torch.cat([usual.train.inputs, usual.validation.inputs]))
    with pytest.raises(InputError, match="leave nothing of 1443 digits"):
        digits(num_train=1443)
    with pytest.raises(InputError, match="num_train must be a whole number of at least 1, got 0"):
        digits(num_train=0)


def test_moons_without_noise_lie_on_half_circles():
    task = two_moons(num_train=40, noise=0.0)
    split, ready = task.splits[0], task.splits[0].preprocessing
    raw = split.train.inputs * torch.tensor(ready.input_scale) + torch.tensor(ready.input_shift)
    upper, lower = raw[split.train.targets == 0], raw[split.train.targets == 1]
    assert len(upper) == len(lower) == 20
    torch.testing.assert_close(upper.norm(dim=1), torch.ones(20))
    torch.testing.assert_close((lower - torch.tensor([1.0, 0.5])).norm(dim=1), torch.ones(20))
    assert bool((upper[:, 1] >= -1e-6).all())
    assert bool((lower[:, 1] <= 0.5 + 1e-6).all())
    torch.testing.assert_close(split.train.inputs.mean(0), torch.zeros(2), atol=1e-6, rtol=0)


def test_foreign_points_are_far_from_the_moons():
    task = two_moons()
    distance = torch.cdist(task.ood.inputs, task.splits[0].test.inputs).min()
    spread = torch.cdist(task.splits[0].test.inputs, task.splits[0].train.inputs).min(1).values.max()
    assert distance > spread
    with pytest.raises(InputError, match="noise must be a number from 0, got -1"):
        two_moons(noise=-1)


def test_the_gap_has_no_training_data_and_is_tested():
    split = gap_regression(num_train=500).splits[0]
    ready = split.preprocessing
    shift, scale = torch.tensor(ready.input_shift), torch.tensor(ready.input_scale)
    train, test = ((part.inputs * scale + shift)[:, 0] for part in (split.train, split.test))
    assert bool((((train > -4.001) & (train < -0.999)) | ((train > 1.499) & (train < 4.001))).all())
    assert bool((train < 0).any())
    assert bool((train > 0).any())
    assert bool(((test > -1) & (test < 1.5)).any())
    assert (round(test.min().item(), 4), round(test.max().item(), 4)) == (-5, 5)
    targets = split.train.targets * ready.target_scale + ready.target_shift
    noise = targets - torch.sin(1.5 * train) - train / 4
    assert abs(noise.std().item() - 0.1) < 4 * 0.1 / 1000**0.5  # four standard errors
    assert split.train.targets.shape == (500,)
    assert split.train.targets.dtype == torch.float32


def test_tables_of_scikit_learn_are_standardised_on_training_rows():
    task = breast_cancer()
    split = task.splits[0]
    assert (split.train.num_examples, split.test.num_examples, task.num_outputs) == (455, 114, 2)
    assert split.preprocessing.classes == ("malignant", "benign")
    assert split.preprocessing.columns[0] == "mean radius"
    torch.testing.assert_close(split.train.inputs.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    # The divisor is the deviation + 1e-6, which shows in the columns of small numbers.
    torch.testing.assert_close(split.train.inputs.std(0, correction=0), torch.ones(30), atol=1e-3, rtol=0)
    regression = diabetes()
    split = regression.splits[0]
    assert (split.train.num_examples, split.test.num_examples, regression.likelihood) == (354, 88, "gaussian")
    raw = torch.cat([split.train.targets, split.test.targets]) * split.preprocessing.target_scale
    raw = raw + split.preprocessing.target_shift
    assert (raw.min().round().item(), raw.max().round().item()) == (25, 346)
    assert split.preprocessing.target == "progression"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r"scikit-learn: pip install 'polymode\[data\]'"):
        digits()
