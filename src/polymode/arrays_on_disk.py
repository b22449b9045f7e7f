"""NumPy's files of anyone's, .npz and .npy: never a pickle, and no memory before sizes are checked."""

import math
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np

from polymode.errors import InputError, shortened
from polymode.sizes import check_archive, check_memory, said

# What np.savez and np.savez_compressed write; other methods may claim memory of their own.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

Result = TypeVar("Result")


class Header(NamedTuple):
    """What stands before the numbers of an array."""

    shape: tuple[int, ...]
    by_columns: bool  # whether the first index changes fastest
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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


@contextmanager
def opened_array(path: Path | str, name: str) -> Iterator[tuple[IO[bytes], Header]]:
    """One array of an NPZ file to be read in parts: a file that stands at its first number, and its header.

    Nothing is bounded but what the file claims: whoever reads takes no more at once than fits.
    """
    check_archive(Path(path), times=0)
    with zipfile.ZipFile(path) as archive:
        member = next(member for member in archive.infolist() if _name(member) == name)
        _check_method(member)
        with archive.open(member) as file:
            yield file, _header(file, member.file_size, repr(name))


def read_array(path: Path | str, *, stays_on_disk: bool = False) -> np.ndarray:
    """The array of an NPY file; errors as those of ``read_arrays``.

    stays_on_disk: rows are read when they are asked for.
    """

    def found() -> np.ndarray:
        with Path(path).open("rb") as file:
            header = _header(file, Path(path).stat().st_size, "the file")
            if not stays_on_disk:
                check_memory(header.num_bytes, f"Reading {path}")
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
            _check_method(member)
            with archive.open(member) as file:
                _header(file, member.file_size, repr(_name(member)))
        return {_name(member): _unpacked(archive, member) for member in wanted}


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # to the end, where its checksum is compared
        return array


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(".npy")


def _check_method(member: zipfile.ZipInfo) -> None:
    if member.compress_type not in METHODS:
        raise InputError(f"{_name(member)!r} is packed by the method {member.compress_type}")


def _header(file: IO[bytes], size: int, what: str) -> Header:
    """The header of an array, having made sure that as many bytes follow as it asks for."""
    version = np.lib.format.read_magic(file)  # type: ignore[arg-type]
    if version not in HEADERS:
        raise InputError(f"{what} is an array of the format {'.'.join(map(str, version))}")
    header = Header(*HEADERS[version](file))  # type: ignore[arg-type]
    if header.dtype.hasobject:
        raise InputError(f"it holds Python objects, which are not read ({what} is a pickle)")
    shape, real = header.shape, size - file.tell()
    if min(shape, default=0) < 0 or max(header.num_bytes, math.prod(shape)) > real:
        raise InputError(
            f"{what} claims an array {shortened(str(list(shape)))} of {header.dtype}, "
            f"{said(header.num_bytes)}, and holds {said(real)}"
        )
    return header
