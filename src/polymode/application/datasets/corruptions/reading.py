"""Corrupted images to judge networks on: the official files of CIFAR-C and ImageNet-C, or made anew."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from polymode.application.datasets.corruptions.making import check_corruption, corrupt
from polymode.application.datasets.corruptions.severities import NUM_SEVERITIES
from polymode.application.datasets.folders import labelled_pixels
from polymode.application.datasets.images import Labelled, checked_labels, damaged
from polymode.arrays_on_disk import read_array
from polymode.data.task import Preprocessing
from polymode.errors import InputError, require

# The images of a corruption at a severity, bytes [N, C, H, W], and their labels [N].
Blocks = Callable[[str, int], Labelled]


def cifar_c(
    folder: Path | str, name: str, severity: int, num_classes: int, num_images: int | None = None
) -> Labelled:
    """One severity of a corruption from the folder of CIFAR-10-C or CIFAR-100-C.

    A file holds all images of severity 1, then of 2, up to 5. num_images: only the first so many.
    """
    check_corruption(name, severity)
    folder = Path(folder)
    path = folder / f"{name}.npy"
    require(
        path.is_file(),
        f"There is no {path.absolute()}. Unpack CIFAR-10-C (https://zenodo.org/records/2535967) or "
        "CIFAR-100-C (https://zenodo.org/records/3555552) there.",
    )
    images, labels = _array(path), _array(folder / "labels.npy")
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or len(images) % NUM_SEVERITIES:
        raise damaged(path, f"it is not an array of bytes [{NUM_SEVERITIES} N, 32, 32, 3]")
    if labels.shape != images.shape[:1]:
        raise damaged(folder / "labels.npy", f"it is {list(labels.shape)} for {len(images)} images of {name}")
    size = len(images) // NUM_SEVERITIES
    first = size * (severity - 1)
    rows = slice(first, first + (size if num_images is None else min(num_images, size)))
    labels = checked_labels(np.asarray(labels[rows]), num_classes, folder / "labels.npy")
    return images[rows].transpose(0, 3, 1, 2), labels


def imagenet_c(
    folder: Path | str, name: str, severity: int, ready: Preprocessing, num_images: int | None = None
) -> Labelled:
    """One severity of a corruption from a folder as ImageNet-C: ``corruption/severity/class/*.JPEG``.

    ready: of the network to be judged; its image size and classes. num_images: only so many, spread evenly
    over the files.
    """
    check_corruption(name, severity)
    path = Path(folder) / name / str(severity)
    require(
        path.is_dir(),
        f"There is no folder {path.absolute()}: images of ImageNet-C lie in corruption/severity/class. "
        "Check the path, or fetch them from https://zenodo.org/records/2235448.",
    )
    return labelled_pixels(path, ready, num_images)


def official_blocks(folder: Path | str, ready: Preprocessing, clean: Labelled) -> Blocks:
    """Images from a folder of official files: arrays as CIFAR-10-C has, or folders as ImageNet-C.

    clean: the images without corruption. Arrays must hold the same in the same order; of folders as many
    files are read, spread evenly.
    """
    folder, labels = Path(folder), clean[1]
    require(folder.is_dir(), f"There is no folder {folder.absolute()} of corrupted images. Check the path.")

    def arrays(name: str, severity: int) -> Labelled:
        found = cifar_c(folder, name, severity, len(ready.classes), len(labels))
        require(
            ready.image_shape == found[0].shape[1:] and np.array_equal(found[1], labels),
            f"{folder / name}.npy is not about the test images: {len(found[1])} images "
            f"{list(found[0].shape[1:])} for {len(labels)} of {list(ready.image_shape)}, or other labels.",
        )
        return found

    def folders(name: str, severity: int) -> Labelled:
        return imagenet_c(folder, name, severity, ready, len(labels))

    return arrays if (folder / "labels.npy").is_file() else folders


def made_blocks(clean: Labelled, *, seed: int = 0, frost_folder: Path | str | None = None) -> Blocks:
    """Images made anew from clean ones, bytes [N, C, H, W], with ``corrupt``."""
    images = np.ascontiguousarray(clean[0].transpose(0, 2, 3, 1))

    def made(name: str, severity: int) -> Labelled:
        corrupted = corrupt(images, name, severity, seed=seed, frost_folder=frost_folder)
        return corrupted.transpose(0, 3, 1, 2), clean[1]

    return made


def image_bytes(inputs: Tensor, ready: Preprocessing) -> np.ndarray:
    """Bytes [N, C, H, W] from inputs that ``ready`` made of them."""
    if ready.source != "images" or inputs.ndim != 4:
        raise InputError(
            f"Corruptions are for images; these are {ready.source or 'arrays'} of shape "
            f"{list(inputs.shape[1:])}. A function of your own returns images as a Task whose Preprocessing "
            "has source='images' and undoes their standardisation."
        )
    levels = ready.raw(inputs) * 255
    lowest, highest = levels.min().item(), levels.max().item()
    require(
        lowest > -1 and highest < 256,
        f"Pixels must lie in [0, 1] before they are standardised to be corrupted; they lie in "
        f"[{lowest / 255:.3g}, {highest / 255:.3g}].",
    )
    return levels.round().clamp(0, 255).byte().cpu().numpy()


def _array(path: Path) -> np.ndarray:
    """An array that stays on disk: one severity of it is read."""
    try:
        return read_array(path, stays_on_disk=True)
    except (InputError, OSError) as error:
        raise damaged(path, error) from error
