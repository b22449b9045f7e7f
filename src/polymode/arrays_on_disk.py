"""NumPy's files of anyone's, .npz and .npy: never a pickle, and no memory before sizes are checked."""

import math
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from polymode.errors import InputError, shortened
from polymode.sizes import check_archive, check_memory, said

# What np.savez and np.savez_compressed write; other methods may claim memory of their own.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

Result = TypeVar("Result")


def read_arrays(path: Path | str, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an NPZ file, or those of some names that it has.

    Raises an ``InputError`` that gives the reason alone: what the file is for is for the caller to say.
    """
    return _explained(lambda: _read_archive(Path(path), names))


def names_of_arrays(path: Path | str) -> list[str]:
    """The names of an NPZ file's arrays, in their order."""

    def found() -> list[str]:
        with zipfile.ZipFile(path) as archive:
            return [_name(member) for member in archive.infolist()]

    return _explained(found)


def read_array(path: Path | str, *, stays_on_disk: bool = False) -> np.ndarray:
    """The array of an NPY file; errors as those of ``read_arrays``.

    stays_on_disk: rows are read when they are asked for.
    """

    def found() -> np.ndarray:
        with Path(path).open("rb") as file:
            claimed = _claimed(file, Path(path).stat().st_size, "the file")
            if not stays_on_disk:
                check_memory(claimed, f"Reading {path}")
                file.seek(0)
                return np.lib.format.read_array(file, allow_pickle=False)
        return np.lib.format.open_memmap(path, mode="r")

    return _explained(found)


def _explained(read: Callable[[], Result]) -> Result:
    try:
        return read()
    except (InputError, FileNotFoundError):
        raise
    except Exception as error:  # zip and header errors are of every class
        raise InputError(shortened(" ".join(str(error).split())) or type(error).__name__) from error


def _read_archive(path: Path, names: Collection[str] | None) -> dict[str, np.ndarray]:
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        wanted = [m for m in archive.infolist() if names is None or _name(m) in names]
        for member in wanted:
            if member.compress_type not in METHODS:
                raise InputError(f"{_name(member)!r} is packed by the method {member.compress_type}")
            with archive.open(member) as file:
                _claimed(file, member.file_size, repr(_name(member)))
        return {_name(member): _unpacked(archive, member) for member in wanted}


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # to the end, where its checksum is compared
        return array


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


def _claimed(file: BinaryIO | Any, size: int, what: str) -> int:
    """Bytes that the header of an array asks for, having made sure that so many follow."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise InputError(f"{what} is an array of the format {'.'.join(map(str, version))}")
    shape, _, kind = HEADERS[version](file)
    if kind.hasobject:
        raise InputError(f"it holds Python objects, which are not read ({what} is a pickle)")
    count = math.prod(shape)
    claimed, real = count * kind.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or max(claimed, count) > real:
        raise InputError(
            f"{what} claims an array {shortened(str(list(shape)))} of {kind}, {said(claimed)}, and holds "
            f"{said(real)}"
        )
    return claimed
