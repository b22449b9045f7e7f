"""How like its training data a row is: the distance to the nearest of some rows that are kept of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polymode.errors import CheckpointError, InputError, require
from polymode.seeds import derive_generator

LEVEL = 99  # percent of ordinary rows that are not flagged
NEIGHBOURS = 5
MOST_ROWS = 1000  # kept of the training data: they are stored with the posterior
MOST_HELD_OUT = 10_000  # of them 1 % is known to within a tenth of itself; more would only take longer
BLOCK = 2**19  # numbers of the largest tensor of a block: 4 MB stay in a processor's cache
# Rows of categories have few distances, and many rows lie at the threshold itself. Which side of it they fall
# to must not depend on how a kernel rounds.
SLACK = 1e-6


@dataclass(frozen=True, eq=False)
class Familiarity:
    """What tells ordinary rows from strange ones.

    rows: [R, D] float32, of the training data as the network sees them. threshold: the distance that 99 % of
    the training data do not exceed. neighbours: how many of the nearest rows a distance is the mean of.
    """

    rows: Tensor
    threshold: float
    neighbours: int

    @classmethod
    def of(cls, inputs: Tensor, seed: int = 0) -> "Familiarity":
        """Keep some rows of the training inputs [N, D] and find the threshold from the others."""
        require(
            inputs.dim() == 2 and inputs.numel() > 0,
            f"inputs must be a table [rows, columns] that is not empty, got the shape {list(inputs.shape)}.",
        )
        order = torch.randperm(len(inputs), generator=derive_generator(seed, "familiarity"))
        rows = _single(inputs[order[:MOST_ROWS].to(inputs.device)], order)
        # A row kept is as far from the other ones as a row held out is, but for one row fewer to be near to.
        # So small tables, which cannot spare any, lose next to nothing.
        alone = len(inputs) < 2 * MOST_ROWS
        neighbours = max(1, min(NEIGHBOURS, len(rows) - alone))
        if len(inputs) == 1:
            return cls(rows, 0.0, neighbours)
        outside = order[MOST_ROWS : MOST_ROWS + MOST_HELD_OUT]
        judged = rows if alone else _single(inputs[outside.to(inputs.device)], outside)
        distances = _distances(judged, rows, neighbours, alone=alone)
        # One more ordinary row is beyond this rank with 1 % at most; below 99 rows the largest has to do.
        rank = min(len(distances), -(-(len(distances) + 1) * LEVEL // 100))
        return cls(rows, distances.kthvalue(rank).values.item() * (1 + SLACK), neighbours)

    def strangeness(self, inputs: Tensor) -> Tensor:
        """The distance of each row of [N, D] in thresholds, [N] float64: rows above 1 are unlike the data."""
        width = self.rows.shape[1]
        require(
            inputs.dim() == 2 and inputs.shape[1] == width,
            f"inputs must be a table [rows, {width}] as in training, got the shape {list(inputs.shape)}.",
        )
        distances = _distances(inputs, self.rows, self.neighbours)
        if self.threshold > 0:
            return distances / self.threshold
        return torch.where(distances > 0, math.inf, 0.0).to(distances.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored."""
        return {
            "rows": self.rows,
            "threshold": torch.tensor(self.threshold, dtype=torch.float64),
            "neighbours": torch.tensor(self.neighbours, dtype=torch.int64),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Familiarity":
        """Put back together what ``tensors`` gave; a ``CheckpointError`` says what is damaged."""
        wanted = {"rows": (torch.float32, 2), "threshold": (torch.float64, 0), "neighbours": (torch.int64, 0)}
        if tensors.keys() != wanted.keys():
            raise _damaged(f"it holds {sorted(tensors)}, it must hold {sorted(wanted)}")
        for name, (dtype, dimensions) in wanted.items():
            found = tensors[name]
            if found.dtype != dtype or found.dim() != dimensions:
                kind = str(dtype).removeprefix("torch.")
                seen = f"{str(found.dtype).removeprefix('torch.')} of the shape {list(found.shape)}"
                raise _damaged(f"its {name!r} is {seen}, it must be {kind} with {dimensions} dimensions")
        rows, threshold = tensors["rows"], tensors["threshold"].item()
        neighbours = int(tensors["neighbours"].item())
        if not rows.numel():
            raise _damaged(f"its 'rows' are empty, of the shape {list(rows.shape)}")
        if not rows.isfinite().all():
            raise _damaged("its 'rows' hold NaN or infinite numbers")
        if not 0 <= threshold < math.inf:
            raise _damaged(f"its 'threshold' is {threshold}, it must be finite and not negative")
        if not 1 <= neighbours <= len(rows):
            raise _damaged(f"its 'neighbours' is {neighbours}, it must be from 1 to its {len(rows)} rows")
        return cls(rows, threshold, neighbours)


def _damaged(reason: str) -> CheckpointError:
    return CheckpointError(f"What is stored of the training data's familiarity is damaged: {reason}.")


def _single(inputs: Tensor, places: Tensor) -> Tensor:
    """Rows in single precision on the CPU, as they are stored; places: where they stand, for the error."""
    # Rows are rounded even where distances are computed in double precision, or none would equal a kept one.
    rows = inputs.detach().to("cpu", torch.float32)
    broken = (~rows.isfinite()).any(1).nonzero().flatten()
    if len(broken):
        place = int(places[broken[0]])
        raise InputError(f"Row {place} of the inputs (from 0) holds NaN or infinite numbers in float32.")
    return rows


def _distances(inputs: Tensor, rows: Tensor, neighbours: int, *, alone: bool = False) -> Tensor:
    """Mean distance to the nearest rows for each input, [N] float64, divided by the root of the width.

    alone: the inputs are the rows, and none is its own neighbour.
    """
    # In double precision, squares of float32 cannot overflow, and their products are exact.
    rows = rows.double()
    squares = rows.square().sum(1)
    size = max(1, BLOCK // max(len(rows), neighbours * rows.shape[1]))
    found = torch.empty(len(inputs), dtype=torch.float64)
    products = torch.empty(min(size, len(inputs)), len(rows), dtype=torch.float64)
    for start in range(0, len(inputs), size):
        part = inputs[start : start + size]
        places = torch.arange(start, start + len(part))
        block = _single(part, places).double()
        # Squared distances but for what all rows have in common: a matrix product, which is quick.
        order = torch.addmm(squares, block, rows.T, alpha=-2, out=products[: len(part)])
        if alone:
            order[places - start, places] = math.inf
        nearest = order.topk(neighbours, largest=False, sorted=False).indices
        # From differences, because the product above cancels: the distance of equal rows has to be zero.
        apart = rows[nearest] - block[:, None]
        found[start : start + len(part)] = torch.linalg.vector_norm(apart, dim=-1).mean(1)
    return found / math.sqrt(rows.shape[1])
