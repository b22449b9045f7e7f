"""Scores of probabilities [N, C] against labels [N], and of regression predictives against targets.

Probabilities are those of the ensemble, the mean over members; every score is a mean over points.
"""

import math

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.metrics.probabilities import labelled
from polymode.metrics.ranks import ranks_of


def check_probabilities(probabilities: Tensor) -> None:
    """Raise an ``InputError`` unless these are probabilities [N, C]."""
    if not isinstance(probabilities, Tensor):
        raise InputError(
            f"Expected a tensor of probabilities, got {type(probabilities).__name__}: pass predictive.mean, "
            "or torch.as_tensor(array)."
        )
    if probabilities.ndim != 2 or probabilities.shape[0] == 0:
        raise InputError(
            f"Expected probabilities [N, C] with N > 0, got shape {list(probabilities.shape)}. For tokens "
            "use probabilities.flatten(0, -2) and labels.flatten()."
        )
    sums = probabilities.sum(-1)
    if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3) or bool((probabilities < 0).any()):
        raise InputError(
            "These are not probabilities: rows must be non-negative and sum to 1 "
            f"(sums from {sums.min():.4g} to {sums.max():.4g}). Apply softmax to logits first."
        )


def check_labelled(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [N, C] with integer labels [N] on the same device, or an ``InputError``."""
    check_probabilities(probabilities)
    return labelled(probabilities, labels)


def accuracy(probabilities: Tensor, labels: Tensor, top: int = 1) -> float:
    """Share of points whose label is among the ``top`` most probable classes."""
    from torchmetrics.functional.classification import multiclass_accuracy

    probabilities, labels = check_labelled(probabilities, labels)
    num_classes = probabilities.shape[-1]
    if not 1 <= top <= num_classes:
        raise InputError(f"top must lie between 1 and {num_classes} classes, got {top}.")
    return multiclass_accuracy(
        probabilities, labels, num_classes=num_classes, top_k=top, average="micro"
    ).item()


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """−log p_y of the mean probability, in nats; infinite when a true label has probability 0."""
    probabilities, labels = check_labelled(probabilities, labels)
    return -_of_label(probabilities, labels).double().log().mean().item()


def bits_per_character(probabilities: Tensor, labels: Tensor) -> float:
    """−log₂ p_y of the mean probability: NLL / log 2, where every point is a symbol of a text."""
    return nll(probabilities, labels) / math.log(2)


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Σ_c p_c² − 2 p_y + 1, between 0 and 2."""
    probabilities, labels = check_labelled(probabilities, labels)
    p = probabilities.double()
    return (p.square().sum(-1) - 2 * _of_label(p, labels) + 1).mean().item()


def _of_label(probabilities: Tensor, labels: Tensor) -> Tensor:
    return probabilities.gather(-1, labels[:, None]).squeeze(-1)


def risk_coverage(confidence: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Coverage and risk [N]: the mean error of the k most confident points, for k = 1 … N.

    Points whose confidence is equal up to rounding (``metrics.ranks``) are accepted together: each carries
    their mean error.
    """
    ranks = ranks_of(confidence)
    order = ranks.argsort(descending=True, stable=True)
    ordered, losses = ranks[order], errors[order].double()
    _, tie, counts = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=torch.float64, device=errors.device).index_add_(0, tie, losses)
    losses = (sums / counts)[tie]
    number = torch.arange(1, len(losses) + 1, dtype=torch.float64, device=errors.device)
    return number / len(losses), losses.cumsum(0) / number


def aurc(confidence: Tensor, errors: Tensor) -> float:
    """Area under the risk–coverage curve, the mean of the risks; lower is better."""
    return risk_coverage(confidence, errors)[1].mean().item()


def rmse(means: Tensor, targets: Tensor) -> float:
    """Root mean square error of the predictive mean."""
    if means.ndim == targets.ndim + 1 and means.shape[-1] == 1:
        means = means.squeeze(-1)
    if means.shape != targets.shape:
        raise InputError(f"Means {list(means.shape)} and targets {list(targets.shape)} differ.")
    from torchmetrics.functional.regression import mean_squared_error

    return mean_squared_error(means.flatten(), targets.flatten(), squared=False).item()


def interval_coverage(low: Tensor, high: Tensor, targets: Tensor) -> float:
    """Share of targets inside [low, high]."""
    low, high = low.reshape(targets.shape), high.reshape(targets.shape)
    if bool((low > high).any()):
        raise InputError("Some lower ends lie above their upper ends.")
    return ((targets >= low) & (targets <= high)).double().mean().item()
