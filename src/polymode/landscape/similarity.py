"""How alike networks are, in what they say: pair by pair, within runs and between them, in a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polymode.errors import InputError, require

MOST_EXACT = 300  # networks for which a map without approximations is also the faster one


@dataclass(frozen=True)
class Pairs:
    """The mean of a matrix over some pairs, with its standard error over runs; NaN where they are few."""

    mean: float
    standard_error: float
    count: int


def within_and_between(matrix: Tensor, runs: Sequence[int]) -> tuple[Pairs | None, Pairs | None]:
    """Means over pairs of networks of one run, and of two; None where there are no such pairs.

    matrix: [M, M]. runs: [M], the run of each network. Pairs of one run (or of the same two) are no
    replicates of each other: the standard error is over the means of runs. Pairs of runs share runs: theirs
    is that of the jackknife, which leaves out one run at a time; it needs three runs.
    """
    require(len(matrix) == len(runs), f"{len(runs)} runs are named for a matrix of {len(matrix)} networks.")
    groups = {run: [i for i, other in enumerate(runs) if other == run] for run in dict.fromkeys(runs)}
    inside, across = [], []
    names = list(groups)
    for place, one in enumerate(names):
        own = matrix[groups[one]][:, groups[one]]
        if len(own) > 1:
            off = ~torch.eye(len(own), dtype=torch.bool)
            inside.append(float(own[off].mean()))
        for two in names[place + 1 :]:
            both = matrix[groups[one]][:, groups[two]], matrix[groups[two]][:, groups[one]]
            across.append((place, names.index(two), float(torch.stack([b.mean() for b in both]).mean())))
    return _of_runs(inside), _of_pairs(across, len(names))


def _of_runs(values: list[float]) -> Pairs | None:
    if not values:
        return None
    found = torch.tensor(values, dtype=torch.float64)
    error = float(found.std()) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Pairs(float(found.mean()), error, len(found))


def _of_pairs(values: list[tuple[int, int, float]], number: int) -> Pairs | None:
    if not values:
        return None
    mean = sum(value for *_, value in values) / len(values)

    def without(run: int) -> float:
        kept = [value for one, two, value in values if run not in (one, two)]
        return sum(kept) / len(kept)

    error = jackknife([without(run) for run in range(number)]) if number >= 3 else math.nan
    return Pairs(mean, error, len(values))


def jackknife(left_out: Sequence[float]) -> float:
    """The standard error of a statistic of runs, from its values with each of them left out; NaN below 3."""
    number = len(left_out)
    if number < 3:
        return math.nan
    mean = sum(left_out) / number
    return math.sqrt((number - 1) / number * sum((value - mean) ** 2 for value in left_out))


def embedding(values: Tensor, *, perplexity: float | None = None, seed: int = 0) -> Tensor:
    """A map of networks in two dimensions by t-SNE (van der Maaten and Hinton 2008), [M, 2].

    values: what every network says, [M, N, ...]. perplexity: about how many neighbours count; None means 30,
    or a third of the networks where they are few.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise InputError("A t-SNE map needs scikit-learn: pip install 'polymode[data]'.") from None
    number = len(values)
    require(number >= 4, f"A t-SNE map needs at least four networks, got {number}.")
    perplexity = min(30.0, (number - 1) / 3) if perplexity is None else perplexity
    if not 0 < perplexity < number:
        raise InputError(f"perplexity must be above 0 and below the {number} networks, got {perplexity!r}.")
    flat = values.double().reshape(number, -1)
    require(bool(flat.isfinite().all()), "What networks say holds NaN or infinite numbers.")
    if bool((flat == flat[0]).all()):
        raise InputError("All networks say the same of every point: there is nothing to map.")
    # The map depends on distances alone: coordinates along all principal axes have the same.
    centred = flat - flat.mean(0)
    squares, axes = torch.linalg.eigh(centred @ centred.T)
    places = (axes * squares.clamp(min=0).sqrt()).flip(1).numpy()
    start = 1e-4 * places[:, :2] / max(float(places[:, 0].std()), 1e-300)  # as scikit-learn begins
    method = "exact" if number <= MOST_EXACT else "barnes_hut"
    made = TSNE(2, perplexity=perplexity, init=start, random_state=seed, method=method)
    return torch.from_numpy(made.fit_transform(places)).double()
