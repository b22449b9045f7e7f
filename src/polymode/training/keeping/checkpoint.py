"""Checkpoints: the whole state of a run, replaced atomically, the predecessor kept."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polymode.errors import CheckpointError, PolymodeError
from polymode.posteriors.network import check_fingerprint
from polymode.sizes import NotEnoughMemory
from polymode.storage import (
    entry,
    inside,
    pack,
    read_document,
    read_tensors,
    unpack,
    well_formed,
    write_document,
    write_tensors,
)

NAMES = ("checkpoint.json", "previous.json")
OLDEST_FORMAT = 3  # of a checkpoint that can be continued


class Checkpoints:
    """The checkpoints of one run folder: the newest and the one before it."""

    def __init__(self, folder: Path, signature: dict[str, Any]) -> None:
        self.folder = folder
        self.signature = signature

    @property
    def exist(self) -> bool:
        return any((self.folder / name).exists() for name in NAMES)

    def save(self, number: int, content: dict[str, Any]) -> None:
        """Write a checkpoint; at every moment one complete checkpoint is readable.

        The tensors go to a new file first; the small JSON file that names them, with their
        checksum, is then swapped in.
        """
        tensors: dict = {}
        packed = pack(content, tensors)
        file = f"state-{number:09d}.safetensors"
        digest = write_tensors(self.folder / file, tensors)
        newest, previous = (self.folder / name for name in NAMES)
        if newest.exists():
            newest.replace(previous)
        write_document(
            newest,
            "checkpoint",
            {"signature": self.signature, "tensors": file, "checksum": digest, "content": packed},
        )
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        named = {
            read_document(self.folder / name, "checkpoint")["tensors"]
            for name in NAMES
            if (self.folder / name).exists()
        }
        for path in self.folder.glob("state-*.safetensors"):
            if path.name not in named:
                path.unlink()

    def load(self, restore: Callable[[dict[str, Any]], None]) -> None:
        """Restore the newest checkpoint that is whole; a damaged one is reported and passed over.

        restore: takes up the content, as often as it is called, and raises where it does not suffice.
        """
        problems: list[str] = []
        for name in NAMES:
            path = self.folder / name
            if not path.exists():
                continue
            try:
                restore(self._read(path))
            except (SignatureError, NotEnoughMemory):  # it may be whole
                raise
            except PolymodeError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                warnings.warn(f"{problem} Resuming from its predecessor.", stacklevel=4)
            if problems:  # the next checkpoint must not push the good one out for the damaged one
                (self.folder / NAMES[0]).unlink()
            return
        reasons = " ".join(dict.fromkeys(problems))
        raise CheckpointError(
            f"No checkpoint in {self.folder} can be used, so the run cannot go on: {reasons} "
            f"Put the files back as they were, or remove {self.folder.parent} and begin again."
        )

    def _read(self, path: Path) -> dict[str, Any]:
        manifest = read_document(path, "checkpoint", advice="")  # there is another one
        if manifest["format_version"] < OLDEST_FORMAT:
            raise SignatureError(
                f"{path} was written by an earlier version of polymode, whose unfinished runs cannot go on: "
                "finish it with that version, or begin again in another folder."
            )
        check_signature(entry(manifest, "signature", dict, path), self.signature, f"The checkpoint {path}")
        file = inside(self.folder, entry(manifest, "tensors", str, path))
        tensors = read_tensors(file, entry(manifest, "checksum", str, path))
        with well_formed(path):
            return unpack(entry(manifest, "content", dict, path), tensors)


class SignatureError(CheckpointError):
    """A checkpoint that is whole but belongs to another run or network."""


DATA_KEYS = {"data": "training data", "validation": "validation data"}


def _check_data(key: str, saved: dict[str, Any], given: dict[str, Any], where: str) -> None:
    """Raise where a data set is another one: the two are told by their sizes, not by their hashes."""
    there, now, what = saved.get(key, []), given.get(key, []), DATA_KEYS[key]
    advice = "Resume with the same data, or choose another run_dir."
    if len(there) != len(now):
        raise SignatureError(
            f"{where} belongs to another run: it has {len(there)} sets of {what}, now there are {len(now)}. "
            f"{advice}"
        )
    for index, (one, other) in enumerate(zip(there, now, strict=True)):
        if one != other:
            number = f" number {index} (counted from 0)" if len(now) > 1 else ""
            sizes = [signature.get("sizes", {}).get(key) for signature in (saved, given)]
            told = ""
            if None not in sizes:
                first, second = sizes[0][index], sizes[1][index]
                told = f", {first} there and {second} now"
                if first == second:
                    told = f", {first} there and now, but not the same examples in the same order"
            raise SignatureError(f"{where} belongs to another run: its {what}{number} differ{told}. {advice}")


def check_signature(saved: dict[str, Any], given: dict[str, Any], where: str) -> None:
    """Raise when a file was written by a run of another kind, naming the first difference."""
    with well_formed(where):
        _compare_signatures(saved, given, where)


def _compare_signatures(saved: dict[str, Any], given: dict[str, Any], where: str) -> None:
    for key in sorted((given.keys() | saved.keys()) - {"sizes"}):  # they only explain the data
        if key in DATA_KEYS:
            _check_data(key, saved, given, where)
        elif key == "initial" and saved.get(key) != given.get(key):
            began = "no networks of another posterior" if key not in saved else "other networks"
            raise SignatureError(
                f"{where} belongs to another run: it began at {began} (initial=...). Resume with the same, "
                "or choose another run_dir."
            )
        elif key == "network":
            try:
                check_fingerprint(saved.get(key, {}), given.get(key, {}), where)
            except CheckpointError as error:
                raise SignatureError(str(error)) from None
        elif saved.get(key) != given.get(key):
            raise SignatureError(
                f"{where} belongs to another run: its {key} is {saved.get(key)}, now it is "
                f"{given.get(key)}. Resume with the same, or choose another run_dir."
            )
