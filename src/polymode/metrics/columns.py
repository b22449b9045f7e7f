"""Columns of a comparison: a score by its name, its title and which of its values are better."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A score: its key, its title, which values are better, and the digits after the point."""

    key: str
    title: str
    better: Literal["high", "low"] | float | None  # a number: the closer to it the better
    digits: int = 3
    explanation: str = ""

    def rank(self, value: float) -> float:
        """A number that is lower where the value is better."""
        if self.better == "high":
            return -value
        return value if not isinstance(self.better, float) else abs(value - self.better)


def by_key(*columns: Column) -> dict[str, Column]:
    """Columns by the names of their scores, in the order they are shown in."""
    return {column.key: column for column in columns}


# Closeness to a reference predictive, where one is given: to its probabilities, or to its samples.
TO_PROBABILITIES = (
    Column("agreement", "agreement", "high", 4, "share of points with the reference's most probable class"),
    Column("total_variation", "TV", "low", 4, "total variation distance to the reference, mean over points"),
)


def to_samples(units: str) -> tuple[Column, ...]:
    """Distances to the samples of a reference, in the units that these have."""
    return tuple(
        Column(f"wasserstein{p}", f"W{p}", "low", 4, f"Wasserstein-{p} distance to the reference, {units}")
        for p in (1, 2)
    )
