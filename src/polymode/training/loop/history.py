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

        What an epoch of one phase has, those of another one may lack: NaN stands in their rows.
        """
        phases = {row["phase"]: [name for name in row if name != "phase"] for row in self.rows}
        places = {name: place for place, name in enumerate(phases)}
        columns = {
            name: torch.tensor([row.get(name, math.nan) for row in self.rows], dtype=torch.float64)
            for name in dict.fromkeys(name for names in phases.values() for name in names)
        }
        return {
            "phases": [[name, names] for name, names in phases.items()],
            "phase": torch.tensor([places[row["phase"]] for row in self.rows], dtype=torch.int64),
            "columns": columns,
        }

    @classmethod
    def of_columns(cls, saved: Mapping[str, Any]) -> "History":
        """The history that ``columns`` was made of."""
        numbers = {name: column.tolist() for name, column in saved["columns"].items()}
        rows = []
        for index, place in enumerate(saved["phase"].tolist()):
            phase, names = saved["phases"][place]
            row = {name: numbers[name][index] for name in names}
            rows.append({"phase": phase} | row | {"epoch": int(row["epoch"])})
        return cls(rows)
