"""The mean losses, scores and measures of every epoch so far."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from polymode.training.contract.epoch import Epoch


class History:
    """A row for each epoch: its phase and number, and means over the members."""

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows = rows or []

    def add(self, epoch: Epoch) -> None:
        means = {f"validation_{name}": score for name, score in epoch.validation.items()}
        means |= {f"measure_{name}": value for name, value in epoch.measures.items()}
        self.rows.append(
            {"phase": epoch.phase, "epoch": epoch.epoch, "loss": epoch.losses.mean().item()}
            | {name: values.double().mean().item() for name, values in means.items()}
        )

    @property
    def loss(self) -> float:
        """The mean loss of the latest epoch; NaN before the first."""
        return self.rows[-1]["loss"] if self.rows else math.nan

    def columns(self) -> dict[str, Any]:
        """A tensor for every column: a checkpoint holds all epochs so far, thousands of them.

        What some epochs have, others may lack: NaN stands in their rows, and their kind says so.
        """
        kinds: dict[tuple[str, ...], int] = {}  # the phase and the names of a row
        of_rows = [(row["phase"], *sorted(row.keys() - {"phase"})) for row in self.rows]
        places = [kinds.setdefault(kind, len(kinds)) for kind in of_rows]
        names = dict.fromkeys(name for row in self.rows for name in row if name != "phase")
        columns = {
            name: torch.tensor([row.get(name, math.nan) for row in self.rows], dtype=torch.float64)
            for name in names
        }
        return {
            "kinds": [list(kind) for kind in kinds],
            "kind": torch.tensor(places, dtype=torch.int64),
            "columns": columns,
        }

    @classmethod
    def of_columns(cls, saved: Mapping[str, Any]) -> "History":
        """The history that ``columns`` was made of."""
        numbers = {name: column.tolist() for name, column in saved["columns"].items()}
        rows = []
        for index, place in enumerate(saved["kind"].tolist()):
            phase, *names = saved["kinds"][place]
            row = {name: values[index] for name, values in numbers.items() if name in names}
            rows.append({"phase": str(phase)} | row | {"epoch": int(row["epoch"]), "loss": row["loss"]})
        return cls(rows)
