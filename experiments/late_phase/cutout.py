"""CIFAR-10 and CIFAR-100 with crops, flips and one square hole of 16 pixels, as the data of the WRN-28-14."""

from dataclasses import replace

from polymode.application.datasets import ArrayData, images
from polymode.data.augmentation import Cutout
from polymode.data.task import Task


def cifar10(folder: str) -> dict:
    """CIFAR-10 in batches of 128."""
    return _with_hole(images.cifar10(folder, augment=True))


def cifar100(folder: str) -> dict:
    """CIFAR-100 in batches of 128."""
    return _with_hole(images.cifar100(folder, augment=True))


def _with_hole(task: Task) -> dict:
    split = task.splits[0]
    assert isinstance(split.train, ArrayData)
    train = replace(split.train, augment=(*split.train.augment, Cutout(16)))
    return {"train": train, "test": split.test, "likelihood": "categorical", "model": "wrn28_14"}
