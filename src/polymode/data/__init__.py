"""Data: what members are trained and judged on."""

from polymode.data.augmentation import Cutout, RandomCrop, RandomFlip
from polymode.data.fingerprints import fingerprint, fingerprints
from polymode.data.sources import (
    ArrayData,
    Data,
    Examples,
    LoaderData,
    arrays_of,
    as_data,
    as_tree,
    check_finite,
)
from polymode.data.task import Preprocessing, Split, Task, as_task

__all__ = [
    "ArrayData",
    "Cutout",
    "Data",
    "Examples",
    "LoaderData",
    "Preprocessing",
    "RandomCrop",
    "RandomFlip",
    "Split",
    "Task",
    "arrays_of",
    "as_data",
    "as_task",
    "as_tree",
    "check_finite",
    "fingerprint",
    "fingerprints",
]
