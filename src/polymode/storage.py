"""Files: JSON and safetensors, written atomically, checked by checksum, never executed."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from polymode.errors import CheckpointError, PolymodeError, shortened
from polymode.sizes import NotEnoughMemory, check_memory

# Documents of format 1 have no checksum of their own. Format 3 names the adaptations of a network, and
# checkpoints nest the tensors of a method. In format 4 they rest on files of the epochs that are over, and
# several finished members share a file.
FORMAT_VERSION = 4
LONGEST_NAME = 255  # in bytes: more is no name of a file
JSON_TIMES = 20  # what a byte of JSON takes in memory, as values
OF_PLACES = (  # errors that more room would not help
    *(errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT, errno.ENOTDIR),
    *(errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
PUT_BACK = "Put it back as it was."  # what to do about a file of ours that is not as it was written
DIGEST = "sha256"  # where a document keeps the checksum of everything else in it

Value = TypeVar("Value")


def write_document(path: Path, what: str, content: Mapping[str, Any]) -> None:
    """Write a JSON document of ours, with its kind, its format and its checksum.

    A reader sees the old file or the new one, never a part.
    """
    document = {"format_version": FORMAT_VERSION, "what": what} | dict(content)
    document = json.loads(json.dumps(document))  # as a reader will find it: keys are text
    write_text(path, json.dumps(document | {DIGEST: _digest(document)}, indent=2) + "\n")


def _digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document, however it is laid out: of its JSON with sorted keys and without blanks."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def finite(value: Any) -> Any:
    """The value with NaN and infinity, which JSON does not have, replaced by null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, content: str) -> None:
    """Write text atomically."""
    write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes atomically."""
    _replace(path, lambda temporary: temporary.write_bytes(content))


def read_document(path: Path, what: str, advice: str = PUT_BACK) -> dict[str, Any]:
    """Read a JSON document of ours; missing, damaged, foreign and newer files are told apart.

    what: its kind. advice: what to do about a damaged one.
    """
    damaged = f"{path} is damaged"
    try:
        check_memory(JSON_TIMES * path.stat().st_size, f"Reading {path}")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is not a {what}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except NotEnoughMemory:
        raise
    except (ValueError, RecursionError) as error:  # no text, no JSON, or nested without end
        raise CheckpointError(f"{damaged} ({error}). {advice}".strip()) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{path} is not a {what} of polymode (it has no format_version).")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this polymode reads up to {FORMAT_VERSION}: "
            "update polymode to open it."
        )
    expected = content.pop(DIGEST, None)
    if expected != _digest(content) and not (version == 1 and expected is None):
        raise CheckpointError(f"{damaged}: its checksum differs from the one written. {advice}".strip())
    if content.get("what") != what:
        raise CheckpointError(f"{path} is not a {what}: it is a {content.get('what')!r}.")
    return content


def entry(document: Mapping[str, Any], key: str, kind: type[Value], where: Path) -> Value:
    """The value under a key of a document; a ``CheckpointError`` where it is missing or of another type."""
    value = document.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        seen = f"is {shortened(repr(value))}" if key in document else "is missing"
        raise CheckpointError(f"{where} is damaged: its {key!r} {seen}, it must be of type {kind.__name__}.")
    return value


@contextmanager
def well_formed(where: Path | str) -> Iterator[None]:
    """Turn whatever goes wrong with a content that is not as it was written into a ``CheckpointError``."""
    try:
        yield
    except PolymodeError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{where} is not as polymode writes it ({reason}).") from error


def inside(folder: Path, name: Any) -> Path:
    """The path of what a document names in its own folder; names that lead out of it are refused."""
    plain = isinstance(name, str) and name == Path(name).name and not {"/", "\\", "\0"} & set(name)
    plain = plain and len(name.encode(errors="surrogatepass")) <= LONGEST_NAME and name.isprintable()
    path = folder / name if plain and name not in ("", ".", "..") else folder
    if path == folder or path.resolve().parent != folder.resolve():
        raise CheckpointError(
            f"{shortened(repr(name))}, which a file in {folder} names, does not lie in that folder: "
            "it is not read."
        )
    return path


def refuse_links(folder: Path) -> None:
    """Raise where something in a folder of ours is a symbolic link, which leads elsewhere."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link, and a run's folder holds none: what it leads to is not touched. "
                "Remove it, or choose another folder."
            )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors atomically and return the file's SHA-256."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors refuses tensors that share memory; here each name is a value of its own.
    seen: set[int] = set()
    for name, tensor in plain.items():
        if tensor.untyped_storage().data_ptr() in seen:
            plain[name] = tensor.clone()
        seen.add(plain[name].untyped_storage().data_ptr())

    def write(temporary: Path) -> None:
        try:
            safetensors.torch.save_file(plain, temporary)
        except safetensors.SafetensorError as error:  # it wraps the system's error
            raise OSError(str(error)) from error

    _replace(path, write)
    return checksum(path)


def read_tensors(path: Path, expected_checksum: str | None = None) -> dict[str, Tensor]:
    """Read all tensors of a file, after comparing its SHA-256 with the one expected."""
    check_file(path, expected_checksum)
    try:
        # Copies, because in a file tensors begin anywhere: some kernels round by where numbers stand in
        # memory, and what is resumed must compute as what was interrupted.
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}).") from error


def check_file(path: Path, expected_checksum: str | None) -> None:
    """Raise a ``CheckpointError`` when a file is missing or differs from what was written."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. {PUT_BACK}")
    if expected_checksum is not None and checksum(path) != expected_checksum:
        raise CheckpointError(f"{path} is damaged: its checksum differs from the one written. {PUT_BACK}")


@dataclass
class CheckedFile:
    """A file that is written once: whoever reads it gets what was written, or an error."""

    path: Path
    checksum: str
    keeper: object = field(
        default=None, compare=False, repr=False
    )  # holds the folder as long as the file is held
    _seen: tuple[int, ...] | None = field(default=None, init=False, compare=False, repr=False)

    def check(self) -> Path:
        """The path, after a look at the file; one that is not as it was last time is read and compared."""
        try:
            found = self.path.stat()
        except OSError:
            raise CheckpointError(f"{self.path} is missing. {PUT_BACK}") from None
        seen = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        if seen != self._seen:
            check_file(self.path, self.checksum)
            self._seen = seen
        return self.path


def read_some(path: Path, rows_of: Callable[[str], slice | None]) -> dict[str, Tensor]:
    """Read, of every tensor, the leading rows that ``rows_of(name)`` wants, and nothing else."""
    with _opened(path) as file:
        wanted = {name: rows_of(name) for name in file.keys()}  # noqa: SIM118
        return {n: file.get_slice(n)[rows] for n, rows in wanted.items() if rows is not None}


def tensor_bytes(path: Path) -> int:
    """Bytes of a file's tensors, without its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def names_of(path: Path) -> list[str]:
    """The names of a file's tensors."""
    with _opened(path) as file:
        return list(file.keys())


def fingerprint_of(path: Path, *, infinite: bool = False) -> dict[str, list]:
    """Type and shape of every tensor of a file; NaN, and infinite numbers unless allowed, are refused."""
    found: dict[str, list] = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            found[name] = [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
            if tensor.is_floating_point() and tensor.numel():
                extremes = torch.stack(tensor.aminmax())  # NaN is both
                if extremes.isnan().any() or (extremes.isinf().any() and not infinite):
                    raise CheckpointError(f"{path}: {name!r} holds NaN or infinite numbers.")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}).") from error
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        raise CheckpointError(
            f"{path} cannot be mapped into memory ({error}). Allow the process a larger address space "
            "(ulimit -v, ulimit -d), or end others."
        ) from error


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one sentence what a full disk or a forbidden folder means for what is there already."""
    try:
        yield
    except OSError as error:
        full = error.errno not in OF_PLACES  # safetensors tells no number
        advice = "Make room; a run goes on from its last checkpoint." if full else "Choose another place."
        reason = error.strerror or error
        raise CheckpointError(
            f"{path} cannot be written: {reason}. Whatever was written before is whole. {advice}"
        ) from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary file beside the path, to be written: it takes its place in the end, unless all fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            rights = temporary.stat().st_mode
        yield temporary
        with writing(path):
            temporary.chmod(rights)  # the usual ones: safetensors would keep others from reading
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # the rename itself must survive a power cut
            finally:
                os.close(directory)
    finally:
        with suppress(OSError):  # what is wrong has been said
            temporary.unlink(missing_ok=True)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    with replaced(path) as temporary, writing(path):
        write(temporary)


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Move the tensors of a nested Python value into ``tensors``, leaving JSON behind."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, torch.Generator):
        tensors[path] = value.get_state()
        return {"generator": path}
    if isinstance(value, Mapping):
        packed = [[key, pack(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        return {"items": packed}
    if isinstance(value, list | tuple):
        return {"list": [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise CheckpointError(f"{path}: a {type(value).__name__} cannot be written to a checkpoint.")


def unpack(packed: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Put back together what ``pack`` took apart."""
    [(kind, content)] = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "generator":
        generator = torch.Generator()
        generator.set_state(tensors[content])
        return generator
    if kind == "items":
        return {key: unpack(item, tensors) for key, item in content}
    if kind == "list":
        return [unpack(item, tensors) for item in content]
    return content


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
