import gzip
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from polymode.application.datasets.images import cifar10, cifar100, fashion_mnist, mnist, svhn
from polymode.application.datasets.loading import check_data
from polymode.data.augmentation import RandomCrop, RandomFlip
from polymode.errors import InputError

REAL = os.environ.get("POLYMODE_TEST_DATA", "")
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PIXELS = np.random.RandomState(0).randint(0, 256, (12, 3072)).astype(np.uint8)
LABELS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 0, 7]


def old_pickle(value):
    """As the official files: protocol 2, with NumPy's old module names."""
    return pickle.dumps(value, 2).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


@pytest.fixture
def cifar(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in range(5):
        rows = slice(2 * number, 2 * number + 2)
        content = {"data": PIXELS[rows], "labels": LABELS[rows], "batch_label": "x", "filenames": ["a", "b"]}
        (folder / f"data_batch_{number + 1}").write_bytes(old_pickle(content))
    (folder / "test_batch").write_bytes(pickle.dumps({"data": PIXELS[10:], "labels": LABELS[10:]}, 4))
    (folder / "batches.meta").write_bytes(old_pickle({"label_names": NAMES}))
    return tmp_path


def test_cifar10_has_the_exact_pixels_and_labels(cifar):
    task = cifar10(cifar, batch_size=4)
    split = task.splits[0]
    mean, std = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])
    expected = (PIXELS.reshape(-1, 3, 32, 32) - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(split.train.inputs, torch.tensor(expected[:10]).float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(split.test.inputs, torch.tensor(expected[10:]).float(), atol=2e-6, rtol=1e-5)
    assert split.train.targets.tolist() == LABELS[:10]
    assert split.test.targets.tolist() == LABELS[10:]
    assert split.train.targets.dtype == torch.int64
    assert split.preprocessing.classes == tuple(NAMES)
    assert (task.num_outputs, task.model, split.train.batch_size) == (10, "smallcnn", 4)
    assert split.train.augment == ()
    raw = torch.from_numpy(PIXELS.reshape(-1, 3, 32, 32)).float() / 255
    assert torch.equal(split.preprocessing.inputs(raw[:10]), split.train.inputs)  # bit for bit


def test_cifar10_as_the_hmc_samples_saw_it(cifar):
    split = cifar10(cifar, normalise="hmc").splits[0]
    mean = np.array([0.49, 0.48, 0.44])[:, None, None]
    expected = torch.tensor((PIXELS.reshape(-1, 3, 32, 32) / 255 - mean) / 0.2).float()
    torch.testing.assert_close(split.test.inputs, expected[10:], atol=2e-6, rtol=1e-5)
    assert split.train.augment == ()
    assert split.validation is None
    raw = torch.from_numpy(PIXELS.reshape(-1, 3, 32, 32)).float() / 255
    assert torch.equal(split.preprocessing.inputs(raw[:10]), split.train.inputs)
    with pytest.raises(InputError, match=r"Unknown value of normalise 'hcm'. Did you mean 'hmc'"):
        cifar10(cifar, normalise="hcm")


def test_cifar10_with_pixels_as_they_are(cifar):
    """Values from 0 to 255, as Fort et al. (2019) have them."""
    split = cifar10(cifar, normalise="raw").splits[0]
    pixels = torch.from_numpy(PIXELS.reshape(-1, 3, 32, 32)).float()
    torch.testing.assert_close(split.train.inputs, pixels[:10], rtol=1e-6, atol=0)
    torch.testing.assert_close(split.test.inputs, pixels[10:], rtol=1e-6, atol=0)
    assert float(split.train.inputs.max()) > 200
    assert torch.equal(split.preprocessing.inputs(pixels[:10] / 255), split.train.inputs)


def test_the_last_images_validate_and_the_first_are_trained_on(cifar):
    split = cifar10(cifar, augment=True, num_validation=3, num_train=4).splits[0]
    assert split.train.targets.tolist() == LABELS[:4]
    assert split.validation.targets.tolist() == LABELS[7:10]
    assert split.train.augment == (RandomCrop(4), RandomFlip())
    assert split.validation.augment == split.test.augment == ()
    with pytest.raises(InputError, match="num_train=8 and num_validation=3 are more than the 10"):
        cifar10(cifar, num_validation=3, num_train=8)
    with pytest.raises(InputError, match=r"num_train must be a whole number of at least 1, got '8'"):
        cifar10(cifar, num_train="8")


def test_a_missing_file_says_where_it_should_be(cifar):
    (cifar / "cifar-10-batches-py/data_batch_3").unlink()
    with pytest.raises(
        InputError, match=r"needs data_batch_3.*polymode data fetch cifar10.*toronto"
    ) as caught:
        cifar10(cifar)
    assert str(cifar / "cifar-10-batches-py/data_batch_3") in str(caught.value)


class Malicious:
    def __reduce__(self):
        return os.system, ("echo broken > broken.txt",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps({"data": Malicious(), "labels": []}, 2), r"refers to (posix|nt).system"),
        (pickle.dumps({"data": np.load, "labels": []}, 2), "refers to numpy.*load"),
        (old_pickle({"data": PIXELS[:2], "labels": [1, 2]})[:1000], "damaged"),
        (b"", "damaged"),
        (pickle.dumps([1]), "it holds a list"),
        (pickle.dumps({"data": PIXELS[:2, :-1], "labels": [1, 2]}), r"bytes \[N, 3072\]"),
        (pickle.dumps({"data": PIXELS[:2], "labels": [1]}), "not a list of 2 labels"),
        (pickle.dumps({"data": PIXELS[:2], "labels": [1, 10]}), "whole numbers from 0 to 9"),
    ],
)
def test_files_that_are_not_official_are_refused(cifar, content, reason, monkeypatch):
    monkeypatch.chdir(cifar)
    (cifar / "cifar-10-batches-py/data_batch_2").write_bytes(content)
    with pytest.raises(
        InputError, match=f"data_batch_2 is damaged or not an official file.*{reason}|{reason}"
    ):
        cifar10(cifar)
    assert not (cifar / "broken.txt").exists()


def claiming(shape):
    """A batch whose array claims another shape than its bytes have."""
    content = old_pickle({"data": PIXELS[:2], "labels": [1, 2]})
    true = b"K\x02M\x00\x0c\x86"  # (2, 3072)
    assert content.count(true) == 1
    return content.replace(true, old_pickle(shape)[2:-1])


NESTED = b"\x80\x02]q\x00" + b"".join(b"h\x00]q\x00(h\x00h\x00e" for _ in range(3)) + b"."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (claiming((10**12, 3072)), r"holds 6144 bytes for an array \(1000000000000, 3072\)"),
        (claiming((-2, -3072)), "6144 bytes for an array"),
        (old_pickle({"data": PIXELS[:2].astype(float), "labels": [1, 2]}), "array of other than bytes"),
        (old_pickle({"data": np.asfortranarray(PIXELS[:2]), "labels": [1, 2]}), "columns first"),
        (old_pickle({"data": PIXELS[:2], "labels": [[1], [2]]}), "not a list of 2 labels"),
        (b"\x80\x02X\xff\xff\xff\xffa.", "damaged"),  # a text of four billion characters
        (b"\x80\x02}(K\x01K\x02u.", "not named by texts"),
        (b"\x80\x02cnumpy\ndtype\n)R.", "damaged"),
        (b"\x80\x02K\x01K\x02R.", "calls what is no function"),
        (b"\x80\x02.", "damaged"),
        (b"(i__main__\nA\n.", "instruction INST"),
        (b"Pabc\n.", "instruction PERSID"),
        (NESTED, "damaged"),
    ],
)
def test_instructions_that_no_official_file_has_are_not_followed(cifar, content, reason):
    (cifar / "cifar-10-batches-py/data_batch_2").write_bytes(content)
    with pytest.raises(
        InputError, match=f"data_batch_2 is damaged or not an official file.*{reason}|{reason}"
    ):
        cifar10(cifar)


def test_cifar100_takes_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, rows in (("train", slice(0, 8)), ("test", slice(8, 12))):
        labels = [10 * label for label in LABELS[rows]]
        content = {"data": PIXELS[rows], "fine_labels": labels, "coarse_labels": [0] * len(labels)}
        (folder / name).write_bytes(old_pickle(content))
    (folder / "meta").write_bytes(old_pickle({"fine_label_names": [f"kind {k}" for k in range(100)]}))
    task = cifar100(tmp_path)
    split = task.splits[0]
    assert split.train.targets.tolist() == [10 * label for label in LABELS[:8]]
    assert (task.num_outputs, split.preprocessing.classes[42]) == (100, "kind 42")
    first = (PIXELS[8, 1024] - 124.1) / 65.4
    assert split.test.inputs[0, 1, 0, 0].item() == pytest.approx(first, abs=1e-5)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


GREY = PIXELS[:, : 28 * 28].reshape(12, 28, 28)


def write_idx(folder):
    folder.mkdir(parents=True)
    for name, rows in (("train", slice(0, 9)), ("t10k", slice(9, 12))):
        labels = np.array(LABELS[rows], np.uint8)
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(GREY[rows])))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


@pytest.mark.parametrize(
    ("load", "place", "mean", "std"),
    [(mnist, "MNIST/raw", 0.1307, 0.3081), (fashion_mnist, "FashionMNIST/raw", 0.2860, 0.3530)],
)
def test_idx_files_have_the_exact_pixels_and_labels(tmp_path, load, place, mean, std):
    write_idx(tmp_path / place)
    task = load(tmp_path, augment=True)
    split = task.splits[0]
    expected = torch.tensor((GREY / 255 - mean) / std).float()[:, None]
    torch.testing.assert_close(split.train.inputs, expected[:9], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(split.test.inputs, expected[9:], atol=2e-6, rtol=1e-5)
    assert (split.train.targets.tolist(), split.test.targets.tolist()) == (LABELS[:9], LABELS[9:])
    assert split.train.augment == (RandomCrop(4),)
    assert split.preprocessing.image_shape == (1, 28, 28)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(idx(GREY[:9]))[:-50], "damaged"),
        (b"no gzip", "damaged"),
        (gzip.compress(idx(GREY[:9])[:-1]), "holds 7055 bytes where it claims 7056"),
        (gzip.compress(idx(GREY[:9].reshape(-1))), "starts with 00000801, expected was 00000803"),
        (gzip.compress(idx(GREY[:8])), "it has 9 labels for the 8 images"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, content, reason):
    folder = write_idx(tmp_path / "MNIST/raw")
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(InputError, match=reason):
        mnist(tmp_path)


def test_svhn_calls_the_digit_zero_ten(tmp_path):
    images = PIXELS.reshape(12, 3, 32, 32)
    (tmp_path / "svhn").mkdir()
    for name, rows in (("train", slice(0, 9)), ("test", slice(9, 12))):
        labels = np.array([label or 10 for label in LABELS[rows]], np.uint8)[:, None]
        savemat(tmp_path / f"svhn/{name}_32x32.mat", {"X": images[rows].transpose(2, 3, 1, 0), "y": labels})
    split = svhn(tmp_path).splits[0]
    assert (split.train.targets.tolist(), split.test.targets.tolist()) == (LABELS[:9], LABELS[9:])
    mean, std = np.array([0.4377, 0.4438, 0.4728]), np.array([0.1980, 0.2010, 0.1970])
    expected = torch.tensor((images / 255 - mean[:, None, None]) / std[:, None, None]).float()
    torch.testing.assert_close(split.test.inputs, expected[9:], atol=2e-6, rtol=1e-5)
    (tmp_path / "svhn/test_32x32.mat").write_bytes(b"rubbish" * 100)
    with pytest.raises(InputError, match=r"test_32x32.mat is damaged"):
        svhn(tmp_path)
    (tmp_path / "svhn/test_32x32.mat").unlink()
    with pytest.raises(InputError, match=r"needs test_32x32.mat.*fetch svhn.*housenumbers/test_32x32.mat"):
        svhn(tmp_path)


def test_a_missing_scipy_is_named(tmp_path, monkeypatch):
    (tmp_path / "svhn").mkdir()
    for name in ("train", "test"):
        (tmp_path / f"svhn/{name}_32x32.mat").touch()
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(InputError, match=r"scipy: pip install 'polymode\[data\]'"):
        svhn(tmp_path)


@pytest.mark.skipif(not REAL, reason="POLYMODE_TEST_DATA names no folder of real data")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("cifar10", "cifar-10-batches-py"),
        ("mnist", "MNIST"),
        ("fashion_mnist", "FashionMNIST"),
        ("imdb", "imdb"),
    ],
)
def test_real_data_have_the_known_facts(name, place):
    if not (Path(REAL) / place).is_dir():
        pytest.skip(f"{place} is not in POLYMODE_TEST_DATA")
    lines = check_data(name, REAL)
    assert any("each class" in line for line in lines)
    assert len(lines) >= 6
