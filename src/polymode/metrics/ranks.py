"""Ranks of scores, where values that differ by rounding alone are ties."""

import torch
from torch import Tensor

from polymode.errors import InputError


def rounding_of(values: Tensor) -> float:
    """How far apart rounding alone can put two equal scores: 16 ε · max(1, max |value|).

    ε is that of the values' own type: hand over scores as they were computed, not widened. Confidences
    and entropies are made of log-probabilities, which are wrong by some ε of the logits' size, and carry
    that error with the weights p: some ε of the largest entropy, log C. A mutual information is a
    difference of two entropies, so that its error does not shrink with it; hence the scale is at least 1.
    Relative changes of ε in the logits move entropies and confidences by up to 5 ε (ten classes, logits of
    size 5), and the mutual information of members that agree is at most 4 ε (up to 1,000 classes).
    Integers are exact.
    """
    if not values.is_floating_point() or not len(values):
        return 0.0
    return 16 * torch.finfo(values.dtype).eps * max(1.0, values.abs().max().item())


def ranks_of(values: Tensor, tolerance: float | None = None) -> Tensor:
    """Ranks 0, 1, … [N] of values [N]; those that are equal up to ``tolerance`` have the same rank.

    From the lowest value upwards: a group is a value and all that lie within ``tolerance`` above it, the next
    value begins the next group. So no group is wider than the tolerance, however dense the values are.
    tolerance: ``rounding_of(values)`` where none is given.
    """
    if not bool(values.isfinite().all()):
        number = int((~values.isfinite()).sum())
        raise InputError(f"{number} of {len(values)} scores are NaN or infinite: they have no rank.")
    tolerance = rounding_of(values) if tolerance is None else tolerance
    ordered, order = values.double().sort()
    ends = torch.searchsorted(ordered, ordered + tolerance, right=True).tolist()
    begins = torch.zeros(len(ordered), dtype=torch.int64)
    place = 0
    while place < len(ends):
        begins[place] = 1
        place = ends[place]
    ranks = torch.empty_like(order)
    ranks[order] = begins.cumsum(0).to(order.device) - 1
    return ranks
