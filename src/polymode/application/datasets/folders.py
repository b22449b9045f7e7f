"""Folders of images of the user's own: one subfolder a class."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets.tables import share_of
from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, standardised, training_parts
from polymode.errors import InputError, require, unknown_name
from polymode.sizes import check_memory, said

MOST_PIXELS = 2**26  # of an image: a file of some kilobytes may claim billions
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


@dataclass(frozen=True)
class _Folder:
    """Image files and the numbers of their classes."""

    files: list[Path]
    labels: Tensor


def image_folder(
    path: Path | str,
    image_size: int | Sequence[int] | None = None,
    test_share: float = 0.2,
    num_validation: int = 0,
    batch_size: int = 64,
) -> Task:
    """A task from a folder with one subfolder of images for each class.

    Where it has ``train`` and ``test`` subfolders (and perhaps ``validation``), each with class subfolders,
    these are the split; otherwise ``test_share`` of every class is. image_size: bring images to this size
    (one number, or height and width); needed where they differ. Images are grey where all files are, or else
    RGB.
    """
    path = Path(path)
    require(path.is_dir(), f"There is no folder {path.absolute()}. Check the path of the images.")
    parts = _given_parts(path)
    if parts is None:
        classes = _class_names(path)
        everything = _labelled_files(path, classes)
        parts = _stratified(everything, classes, test_share, path)
    else:
        classes = _class_names(path / "train")
    if "validation" in parts:
        require(
            not num_validation,
            f"{path} has validation images of its own; leave num_validation={num_validation} out.",
        )
    elif num_validation:
        parts = {**parts, **_with_validation(parts["train"], num_validation)}
    return _folder_task(path, parts, classes, image_size, batch_size)


def read_images(
    path_or_files: Path | str | Sequence[Path | str], preprocessing: Preprocessing
) -> tuple[Tensor, list[str]]:
    """Inputs [N, C, H, W] and names of new images, prepared as those that a network was trained on.

    Takes a file, a folder (searched with its subfolders) or a list of files. Images of another size are
    resized.
    """
    if isinstance(path_or_files, Path | str):
        root = Path(path_or_files)
        files = _image_files(root) if root.is_dir() else [root]
        names = [str(file.relative_to(root)) if root.is_dir() else str(file) for file in files]
        require(
            len(files) > 0, f"There are no images in {root.absolute()}; endings are {', '.join(SUFFIXES)}."
        )
    else:
        files = [Path(file) for file in path_or_files]
        names = [str(file) for file in files]
        require(len(files) > 0, "The list of image files is empty.")
    return preprocessing.inputs(_raw(_read_pixels(files, preprocessing))), names


def labelled_images(path: Path | str, preprocessing: Preprocessing) -> ArrayData:
    """Images of a folder with class subfolders, prepared and numbered as those a network was trained on."""
    pixels, labels = labelled_pixels(path, preprocessing)
    return ArrayData(preprocessing.inputs(_raw(pixels)), torch.from_numpy(labels))


def labelled_pixels(
    path: Path | str, preprocessing: Preprocessing, num_images: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [N, C, H, W] of a folder with class subfolders, sized and numbered as a network knows them.

    num_images: only so many, spread evenly over the files.
    """
    path = Path(path)
    names = _class_names(path)
    for name in names:
        if name not in preprocessing.classes:
            raise unknown_name(f"class folder in {path}", name, preprocessing.classes)
    found = _labelled_files(path, names)
    if num_images is not None and num_images < len(found.files):
        found = _chosen(found, torch.arange(num_images) * len(found.files) // num_images)
    numbers = torch.tensor([preprocessing.classes.index(name) for name in names])
    return _read_pixels(found.files, preprocessing), numbers[found.labels].numpy()


def _read_pixels(files: Sequence[Path], preprocessing: Preprocessing) -> np.ndarray:
    require(
        len(preprocessing.image_shape) == 3,
        f"The network was not trained on images but on {preprocessing.source or 'arrays'}; it cannot read "
        "image files.",
    )
    channels, height, width = preprocessing.image_shape
    return _stacked(files, channels == 1, (height, width))


def _stacked(files: Sequence[Path], grey: bool, size: tuple[int, int]) -> np.ndarray:
    """Bytes [N, C, H, W] of image files, decoded one at a time."""
    shape = (len(files), 1 if grey else 3, *size)
    # A byte a pixel, and the four of the number that it becomes.
    check_memory(5 * math.prod(shape), f"{len(files):,} images of {size[1]}×{size[0]} pixels")
    pixels = np.empty(shape, np.uint8)
    for place, file in zip(pixels, files, strict=True):
        place[:] = _pixels(_opened(file), grey, size)
    return pixels


def _folder_task(
    path: Path,
    parts: dict[str, _Folder],
    classes: tuple[str, ...],
    image_size: int | Sequence[int] | None,
    batch_size: int,
) -> Task:
    files = [file for folder in parts.values() for file in folder.files]
    headers = [_header(file) for file in files]
    size = _common_size(headers, files) if image_size is None else _size(image_size)
    grey = all(header.mode in ("1", "L", "LA") for header in headers)
    raw = {part: _raw(_stacked(folder.files, grey, size)) for part, folder in parts.items()}
    ready, shift, scale = standardised(raw["train"], *list(raw.values())[1:], per_channel=True)
    data = {
        part: ArrayData(inputs, parts[part].labels, batch_size=batch_size)
        for part, inputs in zip(raw, ready, strict=True)
    }
    preprocessing = Preprocessing(
        source="images",
        input_shift=shift,
        input_scale=scale,
        classes=classes,
        image_shape=tuple(raw["train"].shape[1:]),
    )
    return Task(
        path.name,
        [Split(data["train"], data["test"], data.get("validation"), preprocessing)],
        "categorical",
        num_outputs=len(classes),
        model="smallcnn",
    )


def _given_parts(path: Path) -> dict[str, _Folder] | None:
    if not ((path / "train").is_dir() and (path / "test").is_dir()):
        return None
    classes = _class_names(path / "train")
    known = ("train", "test", "validation")
    others = [name for name in _subfolders(path) if name not in known]
    require(
        not others,
        f"{path} has train and test folders and also {', '.join(others)}; allowed beside them is "
        "'validation'. Rename or move the others.",
    )
    parts = {name: path / name for name in known if (path / name).is_dir()}
    for name, folder in parts.items():
        differing = set(_subfolders(folder)) ^ set(classes)
        require(
            not differing,
            f"The classes in {folder} are not those in {path / 'train'}; only one of them has "
            f"{', '.join(sorted(differing))}. Make the subfolders of {name} and train equal.",
        )
    return {name: _labelled_files(folder, classes) for name, folder in parts.items()}


def _subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_names(path: Path) -> tuple[str, ...]:
    names = _subfolders(path)
    require(
        len(names) >= 2,
        f"{path} needs one subfolder of images for each of at least two classes; it has "
        f"{', '.join(names) or 'no subfolders'}.",
    )
    return tuple(names)


def _image_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.is_file() and not file.name.startswith(".")
    )


def _labelled_files(path: Path, classes: Sequence[str]) -> _Folder:
    files, labels = [], []
    for label, name in enumerate(classes):
        found = _image_files(path / name)
        require(
            len(found) > 0,
            f"The class folder {path / name} has no images; endings are {', '.join(SUFFIXES)}.",
        )
        files += found
        labels += [label] * len(found)
    return _Folder(files, torch.tensor(labels))


def _stratified(
    everything: _Folder, classes: Sequence[str], test_share: float, path: Path
) -> dict[str, _Folder]:
    """The share of every class, then both parts shuffled, all from one fixed seed."""
    generator = torch.Generator().manual_seed(0)
    share_of(len(everything.files), test_share, str(path))
    train, test = [], []
    for label, name in enumerate(classes):
        rows = (everything.labels == label).nonzero()[:, 0]
        require(
            len(rows) >= 2,
            f"The class {name!r} of {path} has one image; two are needed, to train on and to test on.",
        )
        rows = rows[torch.randperm(len(rows), generator=generator)]
        num_test = min(max(1, round(len(rows) * test_share)), len(rows) - 1)
        train.append(rows[num_test:])
        test.append(rows[:num_test])
    parts = {}
    for part, some in (("train", train), ("test", test)):
        rows = torch.cat(some)
        parts[part] = _chosen(everything, rows[torch.randperm(len(rows), generator=generator)])
    return parts


def _with_validation(train: _Folder, num_validation: int) -> dict[str, _Folder]:
    first, last = training_parts(len(train.files), None, num_validation)
    order = torch.randperm(len(train.files), generator=torch.Generator().manual_seed(0))
    return {"train": _chosen(train, order[first]), "validation": _chosen(train, order[last])}


def _chosen(folder: _Folder, rows: Tensor) -> _Folder:
    return _Folder([folder.files[row] for row in rows.tolist()], folder.labels[rows])


@dataclass(frozen=True)
class _Header:
    """What an image file says of itself before it is decoded: width and height, and the kind of pixels."""

    size: tuple[int, int]
    mode: str


def _header(path: Path) -> _Header:
    image = _opened(path, decode=False)
    return _Header(image.size, image.mode)


def _opened(path: Path, *, decode: bool = True) -> Any:
    """The image of a file; decode: its pixels, too, and not only what it says of itself."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError("Reading images needs pillow: pip install 'polymode[data]'.") from None
    require(path.is_file(), f"There is no image {path.absolute()}. Check its path.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below, at a lower bound
            image = Image.open(path)
        with image:
            width, height = image.size
            require(
                width * height <= MOST_PIXELS,
                f"it claims {width:,}×{height:,} pixels in a file of {said(path.stat().st_size)}, at most "
                f"{MOST_PIXELS:,} are read",
            )
            if decode:
                image.load()
    except Exception as error:  # damaged images raise errors of every class
        raise InputError(
            f"The image {path} cannot be read ({error}). Replace it, or take it out of the folder."
        ) from error
    require(
        not image.mode.startswith(("I", "F")),
        f"The image {path} has the mode {image.mode!r} (more than 8 bits a pixel). Convert it to 8 bits.",
    )
    return image


def _common_size(images: list[Any], files: list[Path]) -> tuple[int, int]:
    for image, file in zip(images, files, strict=True):
        if image.size != images[0].size:
            raise InputError(
                f"The images differ in size: {files[0]} is {_by(images[0])}, {file} is {_by(image)} (width "
                "by height). Set data.image_size=... to bring all to one size."
            )
    width, height = images[0].size
    return height, width


def _by(image: Any) -> str:
    return f"{image.size[0]}×{image.size[1]}"


def _size(image_size: int | Sequence[int]) -> tuple[int, int]:
    pair = [image_size] * 2 if isinstance(image_size, int) else list(image_size)
    require(
        len(pair) == 2 and all(isinstance(side, int) and side >= 1 for side in pair),
        f"image_size must be one number of pixels or [height, width], got {image_size!r}.",
    )
    return pair[0], pair[1]


def _pixels(image: Any, grey: bool, size: tuple[int, int]) -> np.ndarray:
    """Bytes [C, H, W] of one image."""
    from PIL import Image

    # A palette may hold transparency, which only RGBA takes over.
    image = image.convert("RGBA") if image.mode == "P" else image
    image = image.convert("L" if grey else "RGB")
    if image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.array(image)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _raw(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).float().div_(255)
