"""Files: JSON and safetensors, written atomically, checked by checksum, never executed."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from polymode.errors import CheckpointError

FORMAT_VERSION = 1


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    _replace(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


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


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON file of ours; missing, damaged, foreign and newer files are told apart."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is not a {what}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}).") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{path} is not a {what} of polymode (it has no format_version).")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this polymode reads up to {FORMAT_VERSION}: "
            "update polymode to open it."
        )
    return content


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
    if not path.exists():
        raise CheckpointError(f"{path} is missing.")
    if expected_checksum is not None and checksum(path) != expected_checksum:
        raise CheckpointError(f"{path} is damaged: its checksum differs from the one written.")


def read_some(path: Path, rows_of: Callable[[str], slice | None]) -> dict[str, Tensor]:
    """Read, of every tensor, the leading rows that ``rows_of(name)`` wants, and nothing else."""
    with safetensors.safe_open(path, framework="pt") as file:
        wanted = {name: rows_of(name) for name in file.keys()}  # noqa: SIM118
        return {n: file.get_slice(n)[rows] for n, rows in wanted.items() if rows is not None}


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
        full = error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT, errno.ENOTDIR)
        advice = "Make room; a run goes on from its last checkpoint." if full else "Choose another folder."
        reason = error.strerror or error
        raise CheckpointError(
            f"{path} cannot be written: {reason}. Whatever was written before is whole. {advice}"
        ) from error


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch()  # with the usual rights: safetensors would keep others from reading
            write(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive a power cut
    finally:
        os.close(directory)


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
