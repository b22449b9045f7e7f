"""How much memory there is, and whether what a file claims fits: asked before any is taken."""

import gzip
import zipfile
from pathlib import Path

from polymode.errors import InputError

MEMORY_INFO = Path("/proc/meminfo")
ALWAYS_THERE = 2**20  # bytes that are taken without a question: what is free is an estimate
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container that may have less than the machine
# What deflate, the method of .zip, .gz, .npz and .png, can make of a byte at most.
MOST_FROM_A_BYTE = 1032


class NotEnoughMemory(InputError):
    """Something that may be whole, but does not fit in what is free now."""


def free_memory() -> int | None:
    """Bytes that can be had; None where nobody tells."""
    found = [bytes_ for bytes_ in (_memory("MemAvailable:"), _free_in_group()) if bytes_ is not None]
    return min(found) if found else None


def whole_memory() -> int | None:
    """Bytes that this machine or container has, taken or not; None where nobody tells."""
    found = [bytes_ for bytes_ in (_memory("MemTotal:"), _most_of_group()) if bytes_ is not None]
    return min(found) if found else None


def _memory(name: str) -> int | None:
    try:
        lines = MEMORY_INFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except (OSError, StopIteration, ValueError):
        return None


def _most_of_group() -> int | None:
    try:
        return int((CONTROL_GROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no group, or "max"
        return None


def _free_in_group() -> int | None:
    most = _most_of_group()
    try:
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        amounts = {name: int(amount) for name, amount in (line.split() for line in lines)}
    except (OSError, ValueError):
        return None
    # Files that were read or written stay in memory, and make room as soon as it is wanted.
    cached = sum(amounts.get(name, 0) for name in ("active_file", "inactive_file", "slab_reclaimable"))
    return None if most is None else min(most, max(0, most - used + cached))


def check_memory(needed: int, what: str) -> None:
    """Raise ``NotEnoughMemory`` where more is needed than is free.

    what: a sentence up to "needs", such as "Reading rows.xlsx".
    """
    if needed <= ALWAYS_THERE:
        return
    free = free_memory()
    if free is not None and needed > free:
        raise NotEnoughMemory(
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
