"""Images: readers of the official files of CIFAR, MNIST, Fashion-MNIST and SVHN.

Raw pixels lie in [0, 1]; ``Preprocessing`` standardises them per channel.
"""

import gzip
import io
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets.cifar_files import read_dictionary
from polymode.application.datasets.downloads import Download, missing_file
from polymode.data.augmentation import Augmentation, RandomCrop, RandomFlip
from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, training_parts
from polymode.errors import InputError, unknown_name
from polymode.sizes import MOST_FROM_A_BYTE, check_memory, read_packed, said

CIFAR10_DOWNLOADS = (
    Download(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "cifar-10-python.tar.gz",
        "md5:c58f30108f718f92721af3b95e74349a",
    ),
)
CIFAR100_DOWNLOADS = (
    Download(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "cifar-100-python.tar.gz",
        "md5:eb9058c3a382ffc7106e4002c42a8d85",
    ),
)
# In the order of the reader: images and labels to train on, images and labels to test on.
IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_MNIST_SUMS = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_FASHION_SUMS = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
MNIST_DOWNLOADS = tuple(
    Download(f"https://ossci-datasets.s3.amazonaws.com/mnist/{file}", f"MNIST/raw/{file}", f"md5:{checksum}")
    for file, checksum in zip(IDX_FILES, _MNIST_SUMS, strict=True)
)
FASHION_MNIST_DOWNLOADS = tuple(
    Download(
        f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{file}",
        f"FashionMNIST/raw/{file}",
        f"md5:{checksum}",
    )
    for file, checksum in zip(IDX_FILES, _FASHION_SUMS, strict=True)
)
SVHN_DOWNLOADS = tuple(
    Download(f"http://ufldl.stanford.edu/housenumbers/{file}", f"svhn/{file}", f"md5:{checksum}")
    for file, checksum in (
        ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    )
)

CIFAR10_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10_FILES = tuple(
    f"cifar-10-batches-py/{name}" for name in (*CIFAR10_TRAIN, "test_batch", "batches.meta")
)
CIFAR100_FILES = tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta"))
DIGIT_NAMES = tuple(str(digit) for digit in range(10))
FASHION_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# What the published HMC samples of CIFAR-10 were computed with (Izmailov et al. 2021).
HMC_NORMAL = ((0.49, 0.48, 0.44), (0.2, 0.2, 0.2))
RAW = ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))  # pixels as they are in the files (Fort et al. 2019)

Mean = tuple[float, ...]
Labelled = tuple[np.ndarray, np.ndarray]


# Data sets in their official formats.


def cifar10(
    folder: Path | str,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    batch_size: int = 128,
    normalise: str = "usual",
) -> Task:
    """CIFAR-10 from ``cifar-10-batches-py``.

    num_validation: the last images of the training set are kept for validation. num_train: only the first so
    many are trained on. augment: crop at random from an image padded by 4 pixels, and mirror half of them.
    normalise: "usual" standardises with the training pixels' mean and deviation, "hmc" as the published HMC
    samples were, "raw" leaves the values from 0 to 255 as they are.
    """
    train, test, names = read_cifar10(Path(folder), "cifar10")
    return image_task(
        "cifar10",
        train,
        test,
        names,
        cifar10_normal(normalise),
        (RandomCrop(4), RandomFlip()) if augment else (),
        num_validation,
        num_train,
        batch_size,
    )


def read_cifar10(folder: Path, name: str) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Training and test images with their labels, and the names of the classes; for the data set ``name``."""
    root = folder / "cifar-10-batches-py"
    check_files(folder, CIFAR10_FILES, name, CIFAR10_DOWNLOADS)
    names = _cifar_names(root / "batches.meta", "label_names")
    batches = [_cifar_batch(root / batch, "labels", len(names)) for batch in CIFAR10_TRAIN]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return (images, labels), _cifar_batch(root / "test_batch", "labels", len(names)), names


def cifar10_normal(normalise: str) -> tuple[Mean, Mean]:
    """Mean and standard deviation of the channels that an option stands for."""
    usual = ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255))
    choices = {"usual": usual, "hmc": HMC_NORMAL, "raw": RAW}
    if normalise not in choices:
        raise unknown_name("value of normalise", normalise, choices)
    return choices[normalise]


def cifar100(
    folder: Path | str,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    batch_size: int = 128,
) -> Task:
    """CIFAR-100 with its fine labels from ``cifar-100-python``; options as those of ``cifar10``."""
    root = Path(folder) / "cifar-100-python"
    check_files(Path(folder), CIFAR100_FILES, "cifar100", CIFAR100_DOWNLOADS)
    names = _cifar_names(root / "meta", "fine_label_names")
    return image_task(
        "cifar100",
        _cifar_batch(root / "train", "fine_labels", len(names)),
        _cifar_batch(root / "test", "fine_labels", len(names)),
        names,
        ((129.3 / 255, 124.1 / 255, 112.4 / 255), (68.2 / 255, 65.4 / 255, 70.4 / 255)),
        (RandomCrop(4), RandomFlip()) if augment else (),
        num_validation,
        num_train,
        batch_size,
    )


def mnist(
    folder: Path | str,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    batch_size: int = 128,
) -> Task:
    """MNIST from ``MNIST/raw``; options as those of ``cifar10``, without mirrored digits."""
    train, test = _idx_pairs(Path(folder), "mnist", MNIST_DOWNLOADS)
    steps = (RandomCrop(4),) if augment else ()
    normal = ((0.1307,), (0.3081,))
    return image_task("mnist", train, test, DIGIT_NAMES, normal, steps, num_validation, num_train, batch_size)


def fashion_mnist(
    folder: Path | str,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    batch_size: int = 128,
) -> Task:
    """Fashion-MNIST from ``FashionMNIST/raw``; options as those of ``cifar10``, without mirrored images."""
    train, test = _idx_pairs(Path(folder), "fashion_mnist", FASHION_MNIST_DOWNLOADS)
    steps = (RandomCrop(4),) if augment else ()
    normal = ((0.2860,), (0.3530,))
    return image_task(
        "fashion_mnist", train, test, FASHION_NAMES, normal, steps, num_validation, num_train, batch_size
    )


def svhn(
    folder: Path | str,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    batch_size: int = 128,
) -> Task:
    """House numbers (SVHN) from ``svhn``; options as those of ``cifar10``, without mirrored digits."""
    files = [download.file for download in SVHN_DOWNLOADS]
    check_files(Path(folder), files, "svhn", SVHN_DOWNLOADS)
    train, test = (_svhn_part(Path(folder) / file) for file in files)
    steps = (RandomCrop(4),) if augment else ()
    normal = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
    return image_task("svhn", train, test, DIGIT_NAMES, normal, steps, num_validation, num_train, batch_size)


def image_task(
    name: str,
    train: Labelled,
    test: Labelled,
    classes: Sequence[str],
    normal: tuple[Mean, Mean],
    augment: tuple[Augmentation, ...],
    num_validation: int,
    num_train: int | None,
    batch_size: int,
    *,
    validation: Labelled | None = None,
    model: str = "smallcnn",
) -> Task:
    """A task of images [N, C, H, W] of bytes; options as those of ``cifar10``.

    normal: mean and standard deviation of each channel. validation: images of its own to validate on, where
    none of the training set are kept for it.
    """
    first, last = training_parts(len(train[0]), num_train, num_validation)

    def data(part: Labelled, steps: tuple[Augmentation, ...] = ()) -> ArrayData:
        labels = torch.from_numpy(part[1].astype(np.int64))
        return ArrayData(_normalised(part[0], *normal), labels, batch_size=batch_size, augment=steps)

    ready = Preprocessing(
        source="images",
        input_shift=normal[0],
        input_scale=normal[1],
        classes=tuple(classes),
        image_shape=tuple(train[0].shape[1:]),
    )
    if num_validation:
        validation = train[0][last], train[1][last]
    split = Split(
        data((train[0][first], train[1][first]), augment),
        data(test),
        None if validation is None else data(validation),
        ready,
    )
    return Task(name, [split], "categorical", num_outputs=len(classes), model=model)


def _normalised(pixels: np.ndarray, mean: Mean, std: Mean) -> Tensor:
    """What ``Preprocessing`` computes, bit for bit, in place: a whole data set is large."""
    images = torch.from_numpy(np.ascontiguousarray(pixels)).float().div_(255)
    shift, scale = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (mean, std))
    return images.sub_(shift).div_(scale)


def check_files(folder: Path, files: Sequence[str], name: str, downloads: Sequence[Download]) -> None:
    """Raise an ``InputError`` for the first file of a data set that is not in the data folder."""
    for file in files:
        if not (folder / file).is_file():
            address = next((d.url for d in downloads if d.file == file), downloads[0].url)
            raise missing_file(folder / file, name, address)


def damaged(path: Path, reason: object) -> InputError:
    """Build the error for a file whose content is not what it should be."""
    return InputError(
        f"{path} is damaged or not an official file: {reason}. Delete it and fetch the data again."
    )


# CIFAR: pickles of Python 2.


def _dictionary(path: Path) -> dict[str, Any]:
    try:
        return read_dictionary(path)
    except Exception as error:  # damaged files raise errors of every class
        raise damaged(path, error or type(error).__name__) from error


def _cifar_names(path: Path, entry: str) -> tuple[str, ...]:
    names = _dictionary(path).get(entry)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise damaged(path, f"it has no list {entry!r} of names")
    return tuple(names)


def _cifar_batch(path: Path, entry: str, num_classes: int) -> Labelled:
    content = _dictionary(path)
    data, labels = content.get("data"), content.get(entry)
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3072:
        raise damaged(path, "its 'data' is not an array of bytes [N, 3072]")
    labels = labels if isinstance(labels, list) else []
    if len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise damaged(path, f"its {entry!r} is not a list of {len(data)} labels")
    return data.reshape(-1, 3, 32, 32), checked_labels(np.asarray(labels), num_classes, path)


def checked_labels(labels: np.ndarray, num_classes: int, path: Path) -> np.ndarray:
    """The labels, having made sure that each is the number of a class."""
    if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0 or labels.max(initial=0) >= num_classes:
        raise damaged(path, f"its labels are not whole numbers from 0 to {num_classes - 1}")
    return labels


# MNIST: idx files, big-endian sizes after a magic number of two zeros, the type and the number of axes.


def _idx_pairs(folder: Path, name: str, downloads: Sequence[Download]) -> tuple[Labelled, Labelled]:
    check_files(folder, [download.file for download in downloads], name, downloads)
    train_images, train_labels, test_images, test_labels = (folder / download.file for download in downloads)
    return _idx_pair(train_images, train_labels), _idx_pair(test_images, test_labels)


def _idx_pair(image_file: Path, label_file: Path) -> Labelled:
    images, labels = _idx_array(image_file, 3), _idx_array(label_file, 1)
    if len(images) != len(labels):
        raise damaged(label_file, f"it has {len(labels)} labels for the {len(images)} images beside it")
    return images[:, None], checked_labels(labels, 10, label_file)


def _idx_array(path: Path, num_axes: int) -> np.ndarray:
    magic, length = bytes([0, 0, 8, num_axes]), 4 + 4 * num_axes
    try:
        with gzip.open(path) as file:
            header = file.read(length)
            if header[:4] != magic or len(header) < length:
                raise damaged(path, f"it starts with {header[:4].hex()}, expected was {magic.hex()}")
            shape = np.frombuffer(header, ">u4", num_axes, offset=4).tolist()
            content = read_packed(file, math.prod(shape), path)
            if file.read(1):
                raise damaged(path, f"it holds more than the {len(content)} bytes of an array {shape}")
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error
    # A copy, as torch wants arrays that can be written to.
    return np.frombuffer(content, np.uint8).reshape(shape).copy()


# SVHN: Matlab files. After 128 bytes come elements: a type, a size and so many bytes; packed ones, of type
# 15, hold an element each.


def _unpacked_matlab(path: Path) -> bytes:
    """The file with its elements unpacked, each no further than it claims to reach."""
    parts, real = [], path.stat().st_size
    with path.open("rb") as file:
        parts.append(file.read(128))
        if parts[0][126:] != b"IM":
            raise damaged(path, "it does not begin as a Matlab file of this format")
        while len(tag := file.read(8)) == 8:
            kind, size = struct.unpack("<II", tag)
            content = file.read(min(size, real))
            if kind == 15:
                unpacker = zlib.decompressobj()
                tag = unpacker.decompress(content, 8)
                claimed = struct.unpack("<II", tag)[1]
                if claimed > MOST_FROM_A_BYTE * len(content):
                    raise damaged(path, f"it claims {said(claimed)} in {said(len(content))}")
                check_memory(3 * claimed, f"Unpacking {path} ({said(real)}, which claims {said(claimed)})")
                content = unpacker.decompress(unpacker.unconsumed_tail, claimed)
            parts += [tag, content]
    return b"".join(parts)


def _svhn_part(path: Path) -> Labelled:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise InputError("Reading SVHN needs scipy: pip install 'polymode[data]'.") from None
    try:
        content = loadmat(io.BytesIO(_unpacked_matlab(path)), variable_names=("X", "y"))
        images, labels = content["X"], content["y"].reshape(-1)
    except InputError:
        raise
    except Exception as error:  # damaged Matlab files raise errors of every class
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels) or images.dtype != np.uint8:
        raise damaged(path, f"it holds images {list(images.shape)} and {len(labels)} labels")
    labels = np.where(labels == 10, 0, labels)  # the files call the digit zero 10
    return images.transpose(3, 2, 0, 1), checked_labels(labels, 10, path)
