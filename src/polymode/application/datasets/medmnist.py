"""DermaMNIST from the official file of MedMNIST (Yang et al. 2023)."""

from pathlib import Path

import numpy as np

from polymode.application.datasets.downloads import Download
from polymode.application.datasets.images import Labelled, check_files, checked_labels, damaged, image_task
from polymode.arrays_on_disk import read_arrays
from polymode.data.augmentation import RandomCrop, RandomFlip
from polymode.data.task import Task
from polymode.errors import InputError

DOWNLOADS = (
    Download(
        "https://zenodo.org/records/10519652/files/dermamnist.npz",
        "medmnist/dermamnist.npz",
        "md5:0744692d530f8e62ec473284d019b0c7",
    ),
)
CLASSES = (
    "actinic keratoses and intraepithelial carcinoma",
    "basal cell carcinoma",
    "benign keratosis-like lesions",
    "dermatofibroma",
    "melanoma",
    "melanocytic nevi",
    "vascular lesions",
)


def dermamnist(
    folder: Path | str,
    augment: bool = False,
    num_validation: int | None = None,
    num_train: int | None = None,
    num_test: int | None = None,
    batch_size: int = 128,
) -> Task:
    """Spots of skin, 28×28 colour images, from ``medmnist/dermamnist.npz``.

    num_validation: the official validation images unless given; a number keeps so many of the last training
    images instead, 0 none. num_test: only the first so many test images (the published HMC predictions are
    about 2,000 of the 2,005). Other options as those of ``cifar10``.
    """
    check_files(Path(folder), [DOWNLOADS[0].file], "dermamnist", DOWNLOADS)
    train, validation, (images, labels) = _parts(Path(folder) / DOWNLOADS[0].file)
    test = (images[:num_test], labels[:num_test])
    return image_task(
        "dermamnist",
        train,
        test,
        CLASSES,
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # as in the examples of MedMNIST
        (RandomCrop(4), RandomFlip()) if augment else (),
        num_validation or 0,
        num_train,
        batch_size,
        validation=validation if num_validation is None else None,
        model="lenet",
    )


def _parts(path: Path) -> list[Labelled]:
    """The images and labels to train, to validate and to test on."""
    try:
        found = read_arrays(path)
        arrays = [(found[f"{part}_images"], found[f"{part}_labels"]) for part in ("train", "val", "test")]
    except (InputError, KeyError) as error:
        raise damaged(path, error) from error
    for images, labels in arrays:
        if images.dtype != np.uint8 or images.shape[1:] != (28, 28, 3) or labels.shape != (len(images), 1):
            raise damaged(path, f"it holds images {list(images.shape)} and labels {list(labels.shape)}")
    return [
        (images.transpose(0, 3, 1, 2), checked_labels(labels[:, 0], len(CLASSES), path))
        for images, labels in arrays
    ]
