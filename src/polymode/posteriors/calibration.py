"""Calibration of a posterior by held-out data: what its likelihood learns of them."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from polymode.data import arrays_of, as_data
from polymode.errors import require
from polymode.trees import map_tree

if TYPE_CHECKING:
    from polymode.posteriors.base import AnyPosterior

# Held-out points that are looked at: their error is then a hundredth, and all outputs fit into memory.
MOST_POINTS = 10_000
# With fewer, one factor is wrong by a quarter and more: 1/√(2 · 8).
FEWEST_POINTS = 8


def calibrated(
    posterior: "AnyPosterior", data: Any, num_draws: int | None, generator: torch.Generator | None
) -> "AnyPosterior":
    """The posterior with a likelihood that has been calibrated on held-out data."""
    inputs, targets = arrays_of(as_data(data))
    require(
        len(targets) >= FEWEST_POINTS,
        f"{len(targets)} held-out points are too few to calibrate on: give at least {FEWEST_POINTS}.",
    )
    if len(targets) > MOST_POINTS:
        rows = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))[:MOST_POINTS]
        inputs, targets = map_tree(lambda t: t[rows], inputs), targets[rows]
    before, seen = posterior.network.likelihood.uncalibrated, []
    for rows, outputs, weights in posterior.by_points(inputs, num_draws, generator):
        chunk, first = targets[rows].to(weights.device), map_tree(lambda t: t[0], outputs)
        before.check_outputs(first, chunk)
        before.check_targets(chunk, first)
        seen.append((outputs, weights, chunk))
    after = before.calibrated(seen)
    told = {"points": len(targets), "nll_before": before.nll(seen), "nll_after": after.nll(seen)}
    record = posterior.record | {"calibration": told | after.learned_by_calibration}
    return replace(posterior.with_likelihood(after), record=record)
