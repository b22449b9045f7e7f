"""The mean losses, scores and measures of every epoch so far."""

import json
import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode.errors import CheckpointError
from polymode.storage import pack, read_tensors, unpack, write_tensors
from polymode.training.contract.epoch import Epoch

STRETCH = 1024  # epochs in a file


class History:
    """A row for each epoch: its phase and number, and means over the members; held as columns of numbers.

    folder: where whole stretches of epochs are written, each once, so that a checkpoint holds only the rest.
    What some epochs have, others may lack: NaN stands in their rows, and their kind says so.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._kinds: dict[tuple[str, ...], int] = {}  # the phase and the names of a row
        self._kind = array("q")  # of each row
        self._columns: dict[str, array] = {}
        self._digests: list[bytes] = []  # of the stretches that are written
        self._written = 0  # epochs in them

    def __len__(self) -> int:
        return len(self._kind)

    def add(self, epoch: Epoch) -> None:
        means = {f"validation_{name}": score for name, score in epoch.validation.items()}
        means |= {f"measure_{name}": value for name, value in epoch.measures.items()}
        row = {"epoch": epoch.epoch, "loss": epoch.losses.mean().item()}
        self._add(epoch.phase, row | {name: values.double().mean().item() for name, values in means.items()})

    def _add(self, phase: str, row: Mapping[str, float]) -> None:
        for name in row.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * len(self)
        for name, column in self._columns.items():
            column.append(row.get(name, math.nan))
        self._kind.append(self._kinds.setdefault((phase, *row), len(self._kinds)))

    @property
    def loss(self) -> float:
        """The mean loss of the latest epoch; NaN before the first."""
        return self._columns["loss"][-1] if self._kind else math.nan

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The epochs in order, each as a dictionary."""
        kinds, rows = list(self._kinds), []
        for index, kind in enumerate(self._kind):
            phase, *names = kinds[kind]
            row = {name: self._columns[name][index] for name in names}
            rows.append({"phase": phase} | row | {"epoch": int(row["epoch"])})
        return rows

    # --- checkpoints ----------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """What a checkpoint needs: the SHA-256 of each whole stretch, now written, and the other epochs."""
        while self.folder is not None and len(self) - self._written >= STRETCH:
            stop = self._written + STRETCH
            digest = write_tensors(self._path(len(self._digests)), _flat(self._between(self._written, stop)))
            self._digests.append(bytes.fromhex(digest))
            self._written = stop
        stretches = torch.tensor([list(digest) for digest in self._digests], dtype=torch.uint8)
        return {"stretches": stretches.reshape(-1, 32)} | self._between(self._written, len(self))

    def _between(self, start: int, stop: int) -> dict[str, Any]:
        """Some epochs: a tensor for every column, and the kinds of their rows."""
        kinds, places = list(self._kinds), self._kind[start:stop].tolist()
        found = {kind: place for place, kind in enumerate(dict.fromkeys(places))}
        names = dict.fromkeys(name for kind in found for name in kinds[kind][1:])
        return {
            "kinds": [list(kinds[kind]) for kind in found],
            "kind": torch.tensor([found[kind] for kind in places], dtype=torch.int64),
            "columns": {
                name: torch.tensor(self._columns[name][start:stop].tolist(), dtype=torch.float64)
                for name in names
            },
        }

    @classmethod
    def of_content(cls, content: Mapping[str, Any], folder: Path | None) -> "History":
        """The history that ``content`` was made of; stretches that are not as they were are an error."""
        history = cls(folder)
        # Checkpoints of format 3 hold all epochs.
        history._digests = [digest.tobytes() for digest in content.get("stretches", torch.empty(0)).numpy()]
        for number, digest in enumerate(history._digests):
            history._take_up(_unflat(read_tensors(history._path(number), digest.hex())))
        history._written = len(history)
        history._take_up(content)
        return history

    def _take_up(self, part: Mapping[str, Any]) -> None:
        columns = {name: column.tolist() for name, column in part["columns"].items()}
        for index, kind in enumerate(part["kind"].tolist()):
            phase, *names = part["kinds"][kind]
            row = {name: columns[name][index] for name in ["epoch", "loss", *names]}
            self._add(str(phase), row)

    def _path(self, number: int) -> Path:
        if self.folder is None:
            raise CheckpointError("The checkpoint rests on files of a run's folder, and there is none.")
        return self.folder / f"epochs-{number:05d}.safetensors"


def _flat(part: dict[str, Any]) -> dict[str, Tensor]:
    """Some epochs as tensors alone: what is text is a tensor of bytes."""
    tensors: dict[str, Tensor] = {}
    form = json.dumps(pack(part, tensors)).encode()
    return tensors | {"form": torch.frombuffer(bytearray(form), dtype=torch.uint8)}


def _unflat(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What ``_flat`` was given."""
    return unpack(json.loads(tensors["form"].numpy().tobytes()), tensors)
