"""Planes of weight space: through the origin and two solutions, or through three points."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode.errors import InputError, require, require_whole
from polymode.landscape.networks import WeightSpace
from polymode.landscape.survey import Points, Progress, survey
from polymode.storage import digest_of

# A third point this much nearer to the line through two others than they are long lies on it.
_FLAT = 1e-6


@dataclass(frozen=True)
class Plane:
    """All origin + x·first + y·second; vectors [D], the last two of unit length and at right angles."""

    origin: Tensor
    first: Tensor
    second: Tensor

    @staticmethod
    def spanned(origin: Tensor, towards: Tensor, beside: Tensor) -> "Plane":
        """The plane through a point and two others, by Gram and Schmidt."""
        one, two = towards - origin, beside - origin
        require(bool(one.norm() > 0), "Two of the points that a plane should lead through are the same.")
        first = one / one.norm()
        rest = two - (two @ first) * first
        if not bool(rest.norm() > _FLAT * max(float(one.norm()), float(two.norm()))):
            raise InputError(
                "The three points lie on one line (the origin counts in a radial plane), so many planes lead "
                "through them: choose another point, such as a network from another start."
            )
        return Plane(origin, first, rest / rest.norm())

    @staticmethod
    def radial(one: Tensor, two: Tensor) -> "Plane":
        """Through the origin of weight space and two solutions."""
        return Plane.spanned(torch.zeros_like(one), one, two)

    def coordinates(self, vector: Tensor) -> tuple[float, float]:
        """Where a point lies, or the foot of its perpendicular on the plane."""
        moved = vector - self.origin
        return float(moved @ self.first), float(moved @ self.second)

    def distance(self, vector: Tensor) -> float:
        """How far a point is from the plane."""
        x, y = self.coordinates(vector)
        return float((vector - self.origin - x * self.first - y * self.second).norm())

    def points(self, xs: Tensor, ys: Tensor) -> Points:
        """All points of a grid, row by row: the first axis is y."""
        identity = digest_of({"plane": torch.stack([self.origin, self.first, self.second]), "x": xs, "y": ys})

        def at(start: int, stop: int) -> Tensor:
            places = torch.arange(start, stop)
            x, y = xs[places % len(xs)], ys[places // len(xs)]
            return self.origin + x[:, None] * self.first + y[:, None] * self.second

        return Points(len(xs) * len(ys), at, identity)


@dataclass(frozen=True)
class Cut:
    """What networks of a plane do: x [X], y [Y], loss and error [Y, X], difference [Y, X, R].

    error: the share of wrong labels, or a deviation. difference: from each of R networks.
    """

    x: Tensor
    y: Tensor
    loss: Tensor
    error: Tensor
    difference: Tensor


def margins(places: Sequence[float], num: int, margin: float = 0.25) -> Tensor:
    """``num`` values that reach beyond the lowest and highest of some by a share of their distance."""
    low, high = min(places), max(places)
    room = margin * ((high - low) or 1.0)
    return torch.linspace(low - room, high + room, num, dtype=torch.float64)


def cut(
    space: WeightSpace,
    plane: Plane,
    x: Tensor,
    y: Tensor,
    data: Any,
    *,
    references: Tensor | None = None,
    statistics: Any = None,
    keep: Path | str | None = None,
    progress: Progress | None = None,
) -> Cut:
    """Judge the networks on a grid of a plane; all but the grid is as in ``survey``."""
    require_whole("the number of values of x", len(x), least=2)
    require_whole("the number of values of y", len(y), least=2)
    x, y = x.double(), y.double()
    found = survey(
        space,
        plane.points(x, y),
        data,
        references=references,
        statistics=statistics,
        keep=keep,
        progress=progress,
    )
    shape = (len(y), len(x))
    return Cut(
        x,
        y,
        found.loss.reshape(shape),
        found.error.reshape(shape),
        found.difference.reshape(*shape, -1),
    )
