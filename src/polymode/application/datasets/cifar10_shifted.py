"""CIFAR-10 tested on shifted images too, those of CIFAR-10-C (Hendrycks and Dietterich 2019)."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from polymode.application.datasets.corruptions.making import check_corruption
from polymode.application.datasets.corruptions.reading import cifar_c
from polymode.application.datasets.downloads import Download
from polymode.application.datasets.images import (
    CIFAR10_DOWNLOADS,
    CIFAR10_FILES,
    check_files,
    cifar10_normal,
    image_task,
    read_cifar10,
)
from polymode.data.augmentation import RandomCrop, RandomFlip
from polymode.data.task import Task
from polymode.errors import require

DOWNLOADS = (
    *CIFAR10_DOWNLOADS,
    Download(
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
        "CIFAR-10-C.tar",
        "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
    ),
)
FOLDER = "CIFAR-10-C"
# The test set of the NeurIPS 2021 competition by its organisers' note. Delaunoy and Louppe (2021)
# speak of severity 4 throughout, but were judged on that competition's data.
SHIFTS: Mapping[str, int] = MappingProxyType(
    {"gaussian_noise": 2, "brightness": 3, "pixelate": 4, "zoom_blur": 5}
)
FILES = (*CIFAR10_FILES, *(f"{FOLDER}/{name}.npy" for name in (*SHIFTS, "labels")))


def cifar10_shifted(
    folder: Path | str,
    shifts: Mapping[str, int] = SHIFTS,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    batch_size: int = 128,
    normalise: str = "usual",
) -> Task:
    """CIFAR-10 to train on; its test images, then the corruptions of CIFAR-10-C, block by block, to test on.

    shifts: the severity, 1 to 5, of each corruption, in the order of the blocks. Other options as those of
    ``cifar10``.
    """
    require(
        isinstance(shifts, Mapping), f"shifts must give a severity to names of corruptions, got {shifts!r}."
    )
    for name, severity in shifts.items():
        check_corruption(name, severity)
    train, clean, names = read_cifar10(Path(folder), "cifar10_shifted")
    files = [f"{FOLDER}/{name}.npy" for name in (*shifts, "labels")]
    check_files(Path(folder), files, "cifar10_shifted", DOWNLOADS[1:])
    blocks = [clean, *(cifar_c(Path(folder) / FOLDER, *shift, len(names)) for shift in shifts.items())]
    images, labels = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return image_task(
        "cifar10_shifted",
        train,
        (images, labels),
        names,
        cifar10_normal(normalise),
        (RandomCrop(4), RandomFlip()) if augment else (),
        num_validation,
        num_train,
        batch_size,
        model="alexnet",
    )
