"""Official files of corrupted images, small but in their format; and images made anew."""

import numpy as np
import pytest
import torch
from PIL import Image

from polymode.application.datasets.corruptions import corrupt
from polymode.application.datasets.corruptions.reading import (
    cifar_c,
    image_bytes,
    imagenet_c,
    made_blocks,
    official_blocks,
)
from polymode.data import Preprocessing
from polymode.errors import InputError

LABELS = np.array([3, 99, 0], np.uint8)
RANDOM = np.random.default_rng(0)
READY = Preprocessing(
    source="images",
    input_shift=(0.5, 0.4, 0.3),
    input_scale=(0.2, 0.3, 0.25),
    classes=tuple(f"class {number}" for number in range(100)),
    image_shape=(3, 32, 32),
)
CLEAN = (RANDOM.integers(0, 256, (3, 3, 32, 32)).astype(np.uint8), LABELS)


@pytest.fixture
def arrays(tmp_path):
    """As CIFAR-100-C: three images at each of five severities, whose first value says which."""
    images = RANDOM.integers(0, 256, (15, 32, 32, 3)).astype(np.uint8)
    images[:, 0, 0, 0] = np.arange(15)
    np.save(tmp_path / "fog.npy", images)
    np.save(tmp_path / "labels.npy", np.tile(LABELS, 5))
    return tmp_path, images


def test_arrays_hold_severity_after_severity(arrays):
    folder, images = arrays
    for severity in range(1, 6):
        found, labels = cifar_c(folder, "fog", severity, 100)
        assert np.array_equal(found, images[3 * severity - 3 : 3 * severity].transpose(0, 3, 1, 2))
        assert labels.tolist() == LABELS.tolist()
    first, labels = cifar_c(folder, "fog", 2, 100, num_images=2)
    assert first[:, 0, 0, 0].tolist() == [3, 4]
    assert labels.tolist() == [3, 99]
    with pytest.raises(InputError, match="whole numbers from 0 to 9"):
        cifar_c(folder, "fog", 1, 10)
    with pytest.raises(InputError, match=r"There is no .*snow.npy. Unpack CIFAR-10-C .*zenodo"):
        cifar_c(folder, "snow", 1, 100)
    with pytest.raises(InputError, match="Did you mean 'fog'"):
        cifar_c(folder, "fogg", 1, 100)
    with pytest.raises(InputError, match="from 1 to 5, got 6"):
        cifar_c(folder, "fog", 6, 100)


def test_arrays_must_be_about_the_test_images(arrays):
    folder, images = arrays
    blocks = official_blocks(folder, READY, CLEAN)
    assert np.array_equal(blocks("fog", 5)[0], images[12:].transpose(0, 3, 1, 2))
    two = official_blocks(folder, READY, (CLEAN[0][:2], LABELS[:2]))
    assert len(two("fog", 5)[0]) == 2
    with pytest.raises(InputError, match=r"fog.npy is not about the test images.*or other labels"):
        official_blocks(folder, READY, (CLEAN[0], LABELS[::-1]))("fog", 1)
    with pytest.raises(InputError, match=r"3 images .* for 4 of"):
        official_blocks(folder, READY, (np.repeat(CLEAN[0][:1], 4, 0), np.array([3, 99, 0, 0])))("fog", 1)
    with pytest.raises(InputError, match=r"There is no folder .*nowhere"):
        official_blocks(folder / "nowhere", READY, CLEAN)


def test_folders_hold_corruption_severity_and_class(tmp_path):
    ready = Preprocessing(
        source="images", classes=("n01", "n02"), image_shape=(3, 8, 8), input_shift=(0.0,), input_scale=(1.0,)
    )
    for severity in (1, 4):
        for label, name in enumerate(ready.classes):
            folder = tmp_path / "glass_blur" / str(severity) / name
            folder.mkdir(parents=True)
            for number in range(4):
                colour = (50 * severity, 200 * label, 60 * number)
                Image.new("RGB", (16, 16), colour).save(folder / f"val_{number}.JPEG", quality=100)
    images, labels = imagenet_c(tmp_path, "glass_blur", 4, ready)
    assert images.shape == (8, 3, 8, 8)  # brought to the size that the network knows
    assert images.dtype == np.uint8
    assert labels.tolist() == [0] * 4 + [1] * 4
    expected = [[200, 200 * label, 60 * number] for label in range(2) for number in range(4)]
    np.testing.assert_allclose(images[..., 0, 0], expected, atol=3)
    some, labels = imagenet_c(tmp_path, "glass_blur", 1, ready, num_images=4)
    assert labels.tolist() == [0, 0, 1, 1]  # of all classes
    np.testing.assert_allclose(some[:, 2, 0, 0], [0, 120, 0, 120], atol=3)
    blocks = official_blocks(tmp_path, ready, (np.zeros((2, 3, 8, 8), np.uint8), np.array([0, 1])))
    assert blocks("glass_blur", 4)[1].tolist() == [0, 1]
    with pytest.raises(InputError, match=r"no folder .*glass_blur/2: images of ImageNet-C.*2235448"):
        imagenet_c(tmp_path, "glass_blur", 2, ready)
    (tmp_path / "glass_blur/1/n01").rename(tmp_path / "glass_blur/1/n03")
    with pytest.raises(InputError, match=r"Unknown class folder .* 'n03'"):
        imagenet_c(tmp_path, "glass_blur", 1, ready)


def test_images_made_anew_are_those_of_corrupt():
    images, labels = made_blocks(CLEAN, seed=5)("snow", 3)
    expected = corrupt(np.ascontiguousarray(CLEAN[0].transpose(0, 2, 3, 1)), "snow", 3, seed=5)
    assert np.array_equal(images, expected.transpose(0, 3, 1, 2))
    assert labels is LABELS


def test_inputs_become_the_bytes_they_were_made_of():
    levels = torch.arange(256).byte().reshape(1, 1, 16, 16).repeat(2, 3, 1, 1)
    inputs = READY.inputs(levels.float() / 255)
    assert np.array_equal(image_bytes(inputs, READY), levels.numpy())
    torch.testing.assert_close(READY.inputs(READY.raw(inputs)), inputs)
    with pytest.raises(InputError, match=r"Pixels must lie in \[0, 1\].*they lie in \[0, 2\]"):
        image_bytes(READY.inputs(levels.float() / 127.5), READY)
    with pytest.raises(InputError, match=r"Corruptions are for images; these are table of shape \[4\]"):
        image_bytes(torch.zeros(3, 4), Preprocessing(source="table"))
    with pytest.raises(InputError, match=r"these are arrays of shape \[3, 4, 4\]"):
        image_bytes(torch.zeros(3, 3, 4, 4), Preprocessing())
