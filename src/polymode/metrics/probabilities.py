"""Probabilities of classes: their entropy, and those that belong to labels."""

import torch
from torch import Tensor

from polymode.errors import InputError


def entropy(probabilities: Tensor) -> Tensor:
    """−Σ_c p_c log p_c over the last axis, with 0 log 0 = 0, in nats.

    Added up in 64 bits: mutual information is a small difference of two such sums.
    """
    return torch.special.entr(probabilities).sum(-1, dtype=torch.float64).to(probabilities.dtype)


def labelled(probabilities: Tensor, labels: Tensor, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities [N, C] and labels [N] of all observations, from [..., C] and [...].

    Observations whose label is ``ignore_index`` are left out; any other label that is not one of the
    C classes is an error.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"Labels must be a tensor of integers, got {kind}.")
    if probabilities.shape[:-1] != labels.shape:
        raise InputError(
            f"Probabilities {list(probabilities.shape)} need labels {list(probabilities.shape[:-1])}, "
            f"got {list(labels.shape)}."
        )
    flat, of_each = probabilities.flatten(0, -2), labels.flatten().long().to(probabilities.device)
    if ignore_index is not None:
        kept = of_each != ignore_index
        flat, of_each = flat[kept], of_each[kept]
    num_classes = probabilities.shape[-1]
    if not len(of_each):
        raise InputError("There are no labelled points.")
    low, high = int(of_each.min()), int(of_each.max())
    if low < 0 or high >= num_classes:
        raise InputError(
            f"Labels go from {low} to {high}; with {num_classes} classes they must lie between 0 and "
            f"{num_classes - 1}."
        )
    return flat, of_each
