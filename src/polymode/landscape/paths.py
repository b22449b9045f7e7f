"""Paths between networks: straight ones, bent ones, and the sheets that they span with the origin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode.errors import InputError, require, require_whole
from polymode.landscape.networks import WeightSpace
from polymode.landscape.survey import Points, Progress, survey
from polymode.storage import digest_of


@dataclass(frozen=True)
class Walk:
    """What networks along a path do: place [P] from 0 to 1, loss and error [P], difference [P, R].

    place: how far along the straight line between the two ends a point is. is_corner: [P], whether it is one
    of the networks that the path was given by, or lies between two of them.
    """

    place: Tensor
    is_corner: Tensor
    loss: Tensor
    error: Tensor
    difference: Tensor


def walk(
    space: WeightSpace,
    corners: Tensor,
    data: Any,
    *,
    num_between: int = 4,
    references: Tensor | None = None,
    statistics: Any = None,
    keep: Path | str | None = None,
    progress: Progress | None = None,
) -> Walk:
    """Judge the networks on straight segments between corners [K, D]; all else is as in ``survey``.

    num_between: points inside each segment.
    """
    corners = corners.double()
    points, shares = _segments(corners, num_between)
    line = corners[-1] - corners[0]
    length = float(line @ line)
    if length == 0:
        raise InputError("The path ends where it begins: its ends must be two networks.")
    found = survey(
        space,
        points,
        data,
        references=references,
        statistics=statistics,
        keep=keep,
        progress=progress,
    )
    at = ((corners - corners[0]) @ line) / length
    segment = shares.long().clamp(max=len(corners) - 2)
    place = torch.lerp(at[segment], at[segment + 1], shares - segment)
    return Walk(place, shares == shares.round(), found.loss, found.error, found.difference)


def _segments(corners: Tensor, num_between: int) -> tuple[Points, Tensor]:
    """The points of a path, and where each is: 2.5 is the middle between corners 2 and 3."""
    require(corners.ndim == 2 and len(corners) >= 2, "A path needs at least two networks.")
    require_whole("num_between", num_between, least=0)
    count = (len(corners) - 1) * (num_between + 1) + 1
    # Whole numbers over a whole number: corners are met exactly.
    shares = torch.arange(count, dtype=torch.float64) / (num_between + 1)

    def at(start: int, stop: int) -> Tensor:
        some = shares[start:stop]
        first = some.long().clamp(max=len(corners) - 2)
        return torch.lerp(corners[first], corners[first + 1], (some - first)[:, None])

    return Points(count, at, digest_of({"corners": corners, "shares": shares})), shares


@dataclass(frozen=True)
class Sheet:
    """Triangles between the origin and the segments of a path, side by side (Fort et al. 2019, Figure S3).

    angle: [P], radians that the path has turned around the origin. share: [S], of the way from the origin to
    the path. radius: [S, P], distance from the origin. loss, error: [S, P]; difference: [S, P, R].
    corner_angles: [K], where the triangles meet.
    """

    angle: Tensor
    share: Tensor
    radius: Tensor
    loss: Tensor
    error: Tensor
    difference: Tensor
    corner_angles: Tensor


def sheet(
    space: WeightSpace,
    corners: Tensor,
    shares: Tensor,
    data: Any,
    *,
    num_between: int = 3,
    references: Tensor | None = None,
    statistics: Any = None,
    keep: Path | str | None = None,
    progress: Progress | None = None,
) -> Sheet:
    """Judge r·θ for every point θ of a path and every r of ``shares``; all else is as in ``survey``."""
    corners = corners.double()
    path, places = _segments(corners, num_between)
    shares = shares.double()
    count = path.count
    lengths = torch.cat([path.at(i, i + 1).norm(dim=1) for i in range(count)])
    if bool((lengths == 0).any()):
        raise InputError("The path leads through the origin of weight space, where it has no direction.")

    def at(start: int, stop: int) -> Tensor:
        numbers = torch.arange(start, stop)
        theta = torch.cat([path.at(int(n), int(n) + 1) for n in numbers % count])
        return shares[numbers // count, None] * theta

    points = Points(count * len(shares), at, digest_of({"corners": corners, "s": shares, "p": places}))
    found = survey(
        space,
        points,
        data,
        references=references,
        statistics=statistics,
        keep=keep,
        progress=progress,
    )
    theta = path.at(0, count)
    turns = (theta[1:] * theta[:-1]).sum(1) / (lengths[1:] * lengths[:-1])
    angle = torch.cat([torch.zeros(1, dtype=torch.float64), turns.clamp(-1, 1).arccos().cumsum(0)])
    shape = (len(shares), count)
    return Sheet(
        angle,
        shares,
        shares[:, None] * lengths,
        found.loss.reshape(shape),
        found.error.reshape(shape),
        found.difference.reshape(*shape, -1),
        angle[places == places.round()],
    )
