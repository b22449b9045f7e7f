import pickle

import numpy as np
import pytest
import torch

from polymode.application.datasets.catalogue import DATASETS
from polymode.application.datasets.cifar10_shifted import SHIFTS, cifar10_shifted
from polymode.application.datasets.corruptions import CORRUPTIONS
from polymode.application.datasets.images import cifar10
from polymode.application.datasets.loading import is_ready, load_task
from polymode.errors import InputError

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
RANDOM = np.random.RandomState(0)
CLEAN = RANDOM.randint(0, 256, (3, 3072)).astype(np.uint8)
LABELS = [3, 8, 0]
SIZE = 3  # images of one severity


def corrupted(name):
    """Fifteen images in the official format; each is of one colour, which tells corruption and severity."""
    severities = np.repeat(np.arange(1, 6), SIZE)
    colours = np.stack([np.full(15, CORRUPTIONS.index(name)), severities, np.arange(15) % SIZE], 1)
    return np.tile(colours.astype(np.uint8)[:, None, None], (1, 32, 32, 1))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        content = pickle.dumps({"data": CLEAN, "labels": LABELS}, 2)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    (tmp_path / "cifar-10-batches-py/batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}, 2))
    (tmp_path / "CIFAR-10-C").mkdir()
    for name in SHIFTS:
        np.save(tmp_path / f"CIFAR-10-C/{name}.npy", corrupted(name))
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.array(LABELS * 5, np.uint8))
    return tmp_path


def colours_of(task):
    ready = task.splits[0].preprocessing
    shift, scale = (torch.tensor(v)[:, None, None] for v in (ready.input_shift, ready.input_scale))
    raw = (task.splits[0].test.inputs[len(CLEAN) :] * scale + shift) * 255
    torch.testing.assert_close(raw, raw[..., :1, :1].expand_as(raw), atol=1e-3, rtol=0)
    return raw[..., 0, 0].round().int().tolist()


def test_the_blocks_are_clean_then_four_corruptions(folder):
    assert is_ready(DATASETS["cifar10_shifted"], folder)
    task = load_task("cifar10_shifted", {"normalise": "hmc"}, folder)
    split, plain = task.splits[0], cifar10(folder, normalise="hmc").splits[0]
    assert torch.equal(split.train.inputs, plain.train.inputs)
    assert torch.equal(split.test.inputs[:3], plain.test.inputs)
    assert split.test.targets.tolist() == LABELS * 5
    assert split.test.targets.dtype == torch.int64
    # gaussian_noise 2, brightness 3, pixelate 4, zoom_blur 5: the organisers' list.
    blocks = [(0, 2), (10, 3), (13, 4), (6, 5)]
    assert colours_of(task) == [[*block, image] for block in blocks for image in range(SIZE)]
    assert (task.name, task.model, task.num_outputs) == ("cifar10_shifted", "alexnet", 10)
    assert (split.train.augment, split.validation) == ((), None)


def test_other_corruptions_in_an_order_of_ones_own(folder):
    np.save(folder / "CIFAR-10-C/fog.npy", corrupted("fog"))
    task = cifar10_shifted(folder, shifts={"zoom_blur": 1, "fog": 5}, num_validation=2, augment=True)
    assert colours_of(task) == [[*block, image] for block in [(6, 1), (9, 5)] for image in range(SIZE)]
    assert task.splits[0].validation.num_examples == 2
    assert task.splits[0].train.augment
    assert cifar10_shifted(folder, shifts={}).splits[0].test.num_examples == 3


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        ({"fogg": 1}, "Unknown corruption 'fogg'. Did you mean 'fog'"),
        ({"fog": 6}, "severity of fog must be a whole number from 1 to 5, got 6"),
        ({"fog": "1"}, "severity of fog must be a whole number from 1 to 5, got '1'"),
        (["fog"], r"shifts must give a severity to names of corruptions, got \['fog'\]"),
        ({"fog": 1}, r"'cifar10_shifted' needs fog.npy.*fetch cifar10_shifted.*zenodo.*CIFAR-10-C.tar"),
    ],
)
def test_shifts_that_cannot_be_had_are_named(folder, shifts, message):
    with pytest.raises(InputError, match=message):
        cifar10_shifted(folder, shifts=shifts)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("pixelate", corrupted("pixelate")[:14], r"not an array of bytes \[5 N, 32, 32, 3\]"),
        ("pixelate", corrupted("pixelate").astype(np.float32), "not an array of bytes"),
        ("pixelate", np.array([{}]), "Python objects"),
        ("labels", np.array(LABELS), r"it is \[3\] for 15 images of gaussian_noise"),
        ("labels", np.array([10] * 15), "whole numbers from 0 to 9"),
    ],
)
def test_files_that_are_not_official_are_refused(folder, file, content, reason):
    np.save(folder / f"CIFAR-10-C/{file}.npy", content)
    with pytest.raises(InputError, match=f"{file}.npy is damaged or not an official file.*{reason}"):
        cifar10_shifted(folder)
    (folder / f"CIFAR-10-C/{file}.npy").write_bytes(b"")
    with pytest.raises(InputError, match=f"{file}.npy is damaged"):
        cifar10_shifted(folder)
