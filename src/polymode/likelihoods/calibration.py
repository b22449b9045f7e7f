"""What calibration learns of held-out points: one factor, and how far quantiles have to be moved."""

import math
from collections.abc import Callable, Sequence

# A factor is looked for between e^-WIDTH and e^WIDTH around the best one so far, at most so often: the noise
# of targets that were never standardised may be wrong by many powers of ten.
WIDTH, MOST_MOVES = 5.0, 20
GRID_POINTS, STEPS = 41, 40
GOLDEN = (math.sqrt(5) - 1) / 2


def best_factor(loss: Callable[[float], float]) -> float:
    """The factor c > 0 with the lowest loss: the best of a grid over log c, refined by golden sections.

    The grid guards against a second minimum; where all losses are infinite, or none is lower than that of 1,
    it is 1.
    """
    places, losses, best = _grid(loss, 0.0)
    for _ in range(MOST_MOVES):
        if 0 < best < GRID_POINTS - 1 or math.isinf(losses[best]):
            break
        places, losses, best = _grid(loss, places[best])
    low, high = places[max(best - 1, 0)], places[min(best + 1, GRID_POINTS - 1)]
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = _finite(loss(math.exp(left))), _finite(loss(math.exp(right)))
    for _ in range(STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = _finite(loss(math.exp(left)))
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = _finite(loss(math.exp(right)))
    found = math.exp(0.5 * (low + high))
    return found if _finite(loss(found)) < _finite(loss(1.0)) else 1.0


def _grid(loss: Callable[[float], float], centre: float) -> tuple[list[float], list[float], int]:
    """Logarithms of factors around one of them, their losses, and the place of the lowest."""
    places = [centre + WIDTH * (2 * i / (GRID_POINTS - 1) - 1) for i in range(GRID_POINTS)]
    losses = [_finite(loss(math.exp(place))) for place in places]
    return places, losses, min(range(GRID_POINTS), key=losses.__getitem__)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def moved_levels(levels: Sequence[float], scores: Sequence[float]) -> list[float]:
    """The levels of the law's own quantiles that stand for these levels, by split conformal prediction.

    scores: |2 F(y) − 1| of held-out points, sorted. The central interval of coverage c ends at the levels
    (1 ± s)/2, with s the ⌈(n+1)c⌉-th smallest score: a new point lies inside with probability c or more,
    whatever the law is (distributional conformal prediction, Chernozhukov, Wüthrich and Zhu 2021). Where n is
    too small for a coverage, the largest score counts, or the coverage itself if that is larger.
    """
    found = []
    for level in levels:
        coverage = abs(2 * level - 1)
        rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
        if rank < 1:
            moved = 0.0
        elif rank > len(scores):
            moved = max(scores[-1], coverage)
        else:
            moved = scores[rank - 1]
        # Quantiles of the levels 0 and 1 are infinite: one beyond all held-out points is far enough.
        moved = min(moved, 1 - 1e-6)
        found.append(0.5 * (1 + moved) if level >= 0.5 else 0.5 * (1 - moved))
    return found
