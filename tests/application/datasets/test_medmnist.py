import numpy as np
import pytest
import torch

from polymode.application.datasets.loading import check_data, load_task
from polymode.application.datasets.medmnist import dermamnist
from polymode.data.augmentation import RandomCrop, RandomFlip
from polymode.errors import InputError

PIXELS = np.random.RandomState(0).randint(0, 256, (9, 28, 28, 3)).astype(np.uint8)
LABELS = np.array([5, 0, 6, 1, 2, 3, 4, 5, 5], np.uint8)[:, None]
PARTS = {"train": slice(0, 4), "val": slice(4, 6), "test": slice(6, 9)}


def official():
    images = {f"{part}_images": PIXELS[rows] for part, rows in PARTS.items()}
    return images | {f"{part}_labels": LABELS[rows] for part, rows in PARTS.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "medmnist").mkdir()
    np.savez(tmp_path / "medmnist/dermamnist.npz", **official())
    return tmp_path


def test_the_three_parts_have_the_exact_pixels_and_labels(folder):
    task = load_task("dermamnist", {"batch_size": 2}, folder)
    split = task.splits[0]
    expected = torch.tensor((PIXELS.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5).float()
    for part, rows in (("train", PARTS["train"]), ("validation", PARTS["val"]), ("test", PARTS["test"])):
        data = getattr(split, part)
        torch.testing.assert_close(data.inputs, expected[rows], atol=2e-6, rtol=1e-5)
        assert data.targets.tolist() == LABELS[rows, 0].tolist()
        assert (data.batch_size, data.augment) == (2, ())
    assert (task.model, task.num_outputs, task.likelihood) == ("lenet", 7, "categorical")
    assert split.preprocessing.image_shape == (3, 28, 28)
    assert split.preprocessing.classes[4] == "melanoma"
    with pytest.raises(InputError, match="training examples 6, expected was 8010"):
        check_data("dermamnist", folder)


def test_validation_can_be_left_out_or_taken_from_training(folder):
    assert dermamnist(folder, num_validation=0).splits[0].validation is None
    split = dermamnist(folder, num_validation=1, augment=True).splits[0]
    assert (split.train.targets.tolist(), split.validation.targets.tolist()) == ([5, 0, 6], [1])
    assert split.train.augment == (RandomCrop(4), RandomFlip())
    assert dermamnist(folder, num_test=2).splits[0].test.targets.tolist() == LABELS[6:8, 0].tolist()
    split = dermamnist(folder, num_train=2).splits[0]
    assert (split.train.num_examples, split.validation.num_examples) == (2, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"val_images": PIXELS[4:6, :, :, 0]}, r"images \[2, 28, 28\] and labels \[2, 1\]"),
        ({"test_labels": LABELS[6:9, 0]}, r"images \[3, 28, 28, 3\] and labels \[3\]"),
        ({"train_images": PIXELS[:4].astype(float)}, "it holds images"),
        ({"train_labels": LABELS[:4] + 2}, "whole numbers from 0 to 6"),
        ({"train_labels": np.array([[{}]] * 4)}, "pickle"),
    ],
)
def test_files_that_are_not_official_are_refused(folder, change, reason):
    np.savez(folder / "medmnist/dermamnist.npz", **(official() | change))
    with pytest.raises(InputError, match=f"dermamnist.npz is damaged or not an official file.*{reason}"):
        dermamnist(folder)


def test_missing_arrays_and_files_are_named(folder):
    path = folder / "medmnist/dermamnist.npz"
    np.savez(path, train_images=PIXELS)
    with pytest.raises(InputError, match=r"dermamnist.npz is damaged.*train_labels"):
        dermamnist(folder)
    path.write_bytes(b"rubbish")
    with pytest.raises(InputError, match=r"dermamnist.npz is damaged"):
        dermamnist(folder)
    path.unlink()
    with pytest.raises(
        InputError, match=r"needs dermamnist.npz.*fetch dermamnist.*zenodo.org/records/10519652"
    ):
        dermamnist(folder)
