"""Downloads of official files: verified, never half done, and replaceable by files placed by hand.

POLYMODE_DATA names the data folder. POLYMODE_MIRROR, where set, is an address that serves the data folder's
layout: each file is then fetched from ``POLYMODE_MIRROR/<file>`` instead of its official address (the
checksum must match all the same).
"""

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from polymode.errors import InputError, require
from polymode.sizes import MOST_FROM_A_BYTE, said

Progress = Callable[[int, int | None], None]

ALGORITHMS = ("md5", "sha256")
TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 2**18
MOST_BYTES = 2**35  # of a download


def data_folder() -> Path:
    """The folder of data sets: POLYMODE_DATA, or else ~/.cache/polymode/data."""
    chosen = os.environ.get("POLYMODE_DATA")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "polymode" / "data"


@dataclass(frozen=True)
class Download:
    """A file of known content: its official address, its place in the data folder, "md5:…" or "sha256:…"."""

    url: str
    file: str
    checksum: str

    def __post_init__(self) -> None:
        algorithm = self.checksum.partition(":")[0]
        require(
            algorithm in ALGORITHMS,
            f"The checksum {self.checksum!r} of {self.file} must start with one of "
            f"{', '.join(name + ':' for name in ALGORITHMS)}.",
        )
        require(
            not _leads_outside(self.file),
            f"The place {self.file!r} of a download must be a path inside the data folder.",
        )

    @property
    def address(self) -> str:
        """Where the file is fetched from: the mirror where one is set, or else the official address."""
        mirror = os.environ.get("POLYMODE_MIRROR")
        return f"{mirror.rstrip('/')}/{self.file}" if mirror else self.url


def missing_file(file: Path, name: str, address: str) -> InputError:
    """Build the error for a file that a data set needs and that is not in the data folder."""
    return InputError(
        f"The data set {name!r} needs {file.name}, which is not at {file.absolute()}. Run `polymode data "
        f"fetch {name}`, or download it from {address} and place it there; POLYMODE_DATA chooses the data "
        "folder."
    )


def fetch(download: Download, folder: Path | str, *, progress: Progress | None = None) -> Path:
    """The file in the data folder, downloaded unless it is there with the right checksum.

    progress: called with the bytes done and the bytes in all (None where the server does not say).
    """
    target = (Path(folder) / download.file).absolute()
    if target.is_file() and _checksum_of(target, download) == download.checksum:
        return target
    with whole_file(target) as file:  # what goes wrong with the network is no OSError, but an InputError
        digest = _new_digest(download)
        done = 0
        for block, total in _received(download, target):
            file.write(block)
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
        seen = f"{digest.name}:{digest.hexdigest()}"
        require(
            seen == download.checksum,
            f"{download.address} has the checksum {seen}, expected was {download.checksum}; it was not kept. "
            f"Try again, or place the right file as {target}.",
        )
    return target


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that is at its place once all went well, and nowhere otherwise."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error}). Free some space there, or set "
            "POLYMODE_DATA to another folder."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _received(download: Download, target: Path) -> Iterator[tuple[bytes, int | None]]:
    """Blocks of the file and its stated length; every failure of the network is an ``InputError``."""
    request = urllib.request.Request(download.address, headers={"User-Agent": "polymode"})
    done, total = 0, None
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            stated = response.headers.get("Content-Length")
            total = int(stated) if stated and stated.isdigit() else None
            _check_room(total or 0, target.parent, download.address)
            while block := response.read(BLOCK_BYTES):
                done += len(block)
                require(
                    done <= MOST_BYTES,
                    f"{download.address} sends more than {said(MOST_BYTES)}, as no data set does; it was not "
                    f"kept. Place the right file as {target}.",
                )
                yield block, total
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise _not_fetched(download, target, f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _not_fetched(download, target, str(error.reason)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _not_fetched(download, target, str(error) or type(error).__name__) from error
    if total is not None and done != total:
        raise _not_fetched(download, target, f"cut off after {done} of {total} bytes")


def _check_room(needed: int, folder: Path, what: str) -> None:
    """Raise where a disk has less room than is needed, before any of it is taken."""
    free = shutil.disk_usage(folder).free
    require(
        needed <= free,
        f"{what} needs {said(needed)}, and the disk of {folder} has {said(free)} left. Free some space, or "
        "set POLYMODE_DATA to another folder.",
    )


def _not_fetched(download: Download, target: Path, reason: str) -> InputError:
    damaged = " (the file there now has a wrong checksum)" if target.exists() else ""
    return InputError(
        f"Could not fetch {download.address} ({reason}). Download it by hand on another machine and place it "
        f"as {target}{damaged}, or set POLYMODE_DATA to a folder that holds it."
    )


def _new_digest(download: Download):
    return hashlib.new(download.checksum.partition(":")[0], usedforsecurity=False)


def _checksum_of(path: Path, download: Download) -> str:
    digest = _new_digest(download)
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return f"{digest.name}:{digest.hexdigest()}"


def _leads_outside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or not path.parts


def extract(archive: Path | str, folder: Path | str) -> None:
    """Unpack a .tar.gz or .tar into a folder, all of it or nothing.

    Entries appear under their final names only once everything is unpacked; older ones of the same name are
    replaced. An archive with names or links that lead outside is refused.
    """
    archive, folder = Path(archive), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the renames stay on one file system.
    with tempfile.TemporaryDirectory(prefix=".extracting-", dir=folder) as temporary:
        unpacked, replaced = Path(temporary) / "new", Path(temporary) / "old"
        unpacked.mkdir()
        replaced.mkdir()
        _unpack(archive, unpacked)
        for entry in sorted(unpacked.iterdir()):
            place = folder / entry.name
            if place.exists():
                shutil.move(place, replaced / entry.name)
            os.replace(entry, place)


def _unpack(archive: Path, folder: Path) -> None:
    unpacked, most = 0, MOST_FROM_A_BYTE * archive.stat().st_size
    try:
        with tarfile.open(archive, "r:gz" if archive.suffix == ".gz" else "r:") as tar:
            for member in tar:
                unpacked += member.size
                require(
                    unpacked <= most,
                    f"{archive} was refused: it claims more than {said(most)} in a file of "
                    f"{said(archive.stat().st_size)}, which no archive holds. Download it again.",
                )
                _check_room(member.size, folder, f"{member.name!r} of {archive}")
                if _leads_outside(member.name) and member.name not in (".", "./"):
                    raise InputError(
                        f"{archive} was refused: its entry {member.name!r} leads outside the folder. "
                        "Download the archive from its official address."
                    )
                tar.extract(member, folder, filter="data")
    except tarfile.FilterError as error:
        raise InputError(
            f"{archive} was refused: {error}. Download the archive from its official address."
        ) from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise _damaged(archive, error) from error
    except OSError as error:
        if error.errno is None:  # gzip reports damage as an OSError without a number
            raise _damaged(archive, error) from error
        raise InputError(
            f"{archive} cannot be unpacked into {folder.parent.parent} ({error.strerror}). Free some space "
            "there, or set POLYMODE_DATA to another folder."
        ) from error


def _damaged(archive: Path, error: Exception) -> InputError:
    kind = ".tar.gz" if archive.suffix == ".gz" else ".tar"
    return InputError(f"{archive} is not a whole {kind} archive ({error}). Delete it and download it again.")
