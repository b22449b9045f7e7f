"""How much memory there is, and whether what a file claims fits: asked before any is taken."""

import gzip
import zipfile
from pathlib import Path

from polymode.errors import InputError

MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container that may have less than the machine
# What deflate, the method of .zip, .gz, .npz and .png, can make of a byte at most.
MOST_FROM_A_BYTE = 1032


def free_memory() -> int | None:
    """Bytes that can be had; None where nobody tells."""
    found = [bytes_ for bytes_ in (_free_on_machine(), _free_in_group()) if bytes_ is not None]
    return min(found) if found else None


def memory_of_machine() -> int | None:
    """Bytes that the machine has, taken or not; None where nobody tells."""
    return _memory("MemTotal:")


def _free_on_machine() -> int | None:
    return _memory("MemAvailable:")


def _memory(name: str) -> int | None:
    try:
        lines = MEMORY_INFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except (OSError, StopIteration, ValueError):
        return None


def _free_in_group() -> int | None:
    try:
        most, used = ((CONTROL_GROUP / name).read_text() for name in ("memory.max", "memory.current"))
        return max(0, int(most) - int(used))
    except (OSError, ValueError):  # no group, or "max"
        return None


def check_memory(needed: int, what: str) -> None:
    """Raise an ``InputError`` where more memory is needed than is free.

    what: a sentence up to "needs", such as "Reading rows.xlsx".
    """
    free = free_memory()
    if free is not None and needed > free:
        raise InputError(
            f"{what} needs {said(needed)} of memory, and {said(free)} are free: give less at once, or more "
            "memory."
        )


def said(number: int) -> str:
    """A number of bytes as people say it."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}" if number < 10**18 else f"more than a million {unit}"
    return f"{number} bytes"


def check_archive(path: Path, *, times: int = 1) -> None:
    """Raise an ``InputError`` for a ZIP file that claims more than it can hold, or than there is memory for.

    times: so often the unpacked bytes are needed at once, 0 where they are read in parts. Whoever unpacks
    reads no further than the sizes that are checked here.
    """
    real = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        claimed = sum(member.file_size for member in archive.infolist())
        for member in archive.infolist():
            most = MOST_FROM_A_BYTE * (member.compress_size + 1)
            if member.file_size > most or member.compress_size > real:
                raise InputError(
                    f"{path} is refused: its part {member.filename[:100]!r} claims "
                    f"{said(member.file_size)} in {said(member.compress_size)} of a file of {said(real)}, "
                    "which no archive holds. Replace it."
                )
    check_memory(times * claimed, f"Unpacking {path} ({said(real)}, which claims {said(claimed)} unpacked)")


def read_packed(file: gzip.GzipFile, size: int, path: Path) -> bytes:
    """So many bytes of a packed file, having made sure that it can hold and memory can take them."""
    real = path.stat().st_size
    if size > MOST_FROM_A_BYTE * real:
        raise InputError(
            f"{path} claims {said(size)} in a file of {said(real)}, which no packed file holds. Replace it."
        )
    check_memory(size, f"Unpacking {path} ({said(real)}, which claims {said(size)} unpacked)")
    content = file.read(size)
    if len(content) < size:
        raise InputError(f"{path} holds {len(content)} bytes where it claims {size}. Replace it.")
    return content
