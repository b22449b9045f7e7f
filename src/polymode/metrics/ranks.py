"""Ranks of scores, where values that differ by rounding alone are ties."""

import torch
from torch import Tensor

from polymode.errors import InputError


def rounding_of(values: Tensor) -> Tensor:
    """How far apart rounding alone can put two scores that are equal: 16 ε · max(1, |value|), [N].

    ε is that of the values' own type: hand over scores as they were computed, not widened. Confidences
    and entropies are made of log-probabilities, which are wrong by some ε of the logits' size, and carry
    that error with the weights p: some ε of the largest entropy, log C. A mutual information is a
    difference of two entropies, so that its error does not shrink with it; hence the scale is at least 1.
    Relative changes of ε in the logits move entropies and confidences by up to 5 ε (ten classes, logits of
    size 5), and the mutual information of members that agree is at most 4 ε (up to 1,000 classes).
    Integers are exact.
    """
    if not values.is_floating_point():
        return torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    return 16 * torch.finfo(values.dtype).eps * values.abs().double().clamp(min=1.0)


def ranks_of(values: Tensor, tolerance: float | None = None) -> Tensor:
    """Ranks 0, 1, … [N] of values [N]; those that are equal up to ``tolerance`` have the same rank.

    From the lowest value upwards: a group is a value and all that lie within ``tolerance`` above it, the next
    value begins the next group. So no group is wider than the tolerance, however dense the values are.
    tolerance: one for all, or ``rounding_of(values)``, that of the first value of a group.
    """
    if not bool(values.isfinite().all()):
        number = int((~values.isfinite()).sum())
        raise InputError(f"{number} of {len(values)} scores are NaN or infinite: they have no rank.")
    ordered, order = values.double().sort()
    width = rounding_of(values)[order] if tolerance is None else tolerance
    ends = torch.searchsorted(ordered, ordered + width, right=True).tolist()
    begins, place = [], 0
    while place < len(ends):
        begins.append(place)
        place = ends[place]
    is_first = torch.zeros_like(order)
    is_first[torch.tensor(begins, dtype=torch.int64, device=order.device)] = 1
    ranks = torch.empty_like(order)
    ranks[order] = is_first.cumsum(0) - 1
    return ranks
