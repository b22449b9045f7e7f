"""A fan: values known at angles and distances, drawn around a point."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from polymode.application.plots.style import finite

_CELLS = 200  # along the longer side
_EDGE = 1e-9  # shares of a step that a place may lie outside by rounding


@dataclass(frozen=True)
class Fan:
    """angle: [P], ascending; radius: [S, P], ascending along S. x, y: the grid on which values are spread."""

    angle: np.ndarray
    radius: np.ndarray
    x: np.ndarray
    y: np.ndarray

    @staticmethod
    def of(angle: Any, radius: Any) -> "Fan":
        """A fan with its grid of square cells, which holds the centre too."""
        nothing = np.zeros(1)
        fan = Fan(finite(angle), finite(radius), nothing, nothing)
        if not (fan.angle.size and np.isfinite(fan.radius).any()):
            return fan
        across, up = fan.places(fan.angle[None], fan.radius)
        left, right = min(0.0, np.nanmin(across)), max(0.0, np.nanmax(across))
        low, high = min(0.0, np.nanmin(up)), max(0.0, np.nanmax(up))
        cell = max(right - left, high - low) / _CELLS
        if not cell > 0:
            return fan
        x, y = (np.arange(a, b + cell, cell) for a, b in ((left, right), (low, high)))
        return Fan(fan.angle, fan.radius, x, y)

    @property
    def has_area(self) -> bool:
        """Whether there is anything to spread: one direction or one distance is a line."""
        return min(self.radius.shape) > 1 and min(len(self.x), len(self.y)) > 1

    @property
    def aspect(self) -> float:
        """Height over width."""
        return len(self.y) / len(self.x)

    def places(self, angle: Any, radius: Any) -> tuple[np.ndarray, np.ndarray]:
        """Where some angles and distances are: the middle of the fan points up, small angles to the left."""
        if not self.angle.size:
            return np.zeros(0), np.zeros(0)
        turned = np.asarray(angle, float) - self._middle
        return np.asarray(radius) * np.sin(turned), np.asarray(radius) * np.cos(turned)

    def spread(self, values: Any) -> np.ndarray:
        """Values [S, P] on the grid [Y, X], bilinear in angle and distance; gaps outside the fan."""
        known = finite(values)
        x, y = np.meshgrid(self.x, self.y)
        distance, turned = np.hypot(x, y), self._middle + np.arctan2(x, y)
        column, across = _place(
            np.broadcast_to(self.angle[:, None, None], (len(self.angle), *x.shape)), turned
        )
        distances = self.radius[:, column] * (1 - across) + self.radius[:, column + 1] * across
        row, along = _place(distances, distance)
        inner, outer = (
            known[r, column] * (1 - across) + known[r, column + 1] * across for r in (row, row + 1)
        )
        inside = (np.abs(across - 0.5) <= 0.5 + _EDGE) & (np.abs(along - 0.5) <= 0.5 + _EDGE)
        return np.where(inside, inner * (1 - along) + outer * along, np.nan)

    @property
    def _middle(self) -> float:
        return float(self.angle.min() + self.angle.max()) / 2


def _place(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which ascending step [N, Y, X] is below each value [Y, X], and the share of the way to the next."""
    lower = np.clip((steps <= values).sum(0) - 1, 0, len(steps) - 2)
    low, high = (np.take_along_axis(steps, (lower + i)[None], 0)[0] for i in (0, 1))
    return lower, (values - low) / np.where(high > low, high - low, 1)
