"""Closeness of a predictive to a reference, such as the one of Hamiltonian Monte Carlo."""

import torch
from torch import Tensor

from polymode.errors import InputError


def _check_same_shape(ours: Tensor, reference: Tensor) -> None:
    if ours.shape != reference.shape:
        raise InputError(
            f"The predictive has shape {list(ours.shape)} and the reference {list(reference.shape)}: "
            "they must be about the same points and classes, in the same order."
        )


def agreement(probabilities: Tensor, reference: Tensor) -> float:
    """Share of points where both have the same most probable class."""
    _check_same_shape(probabilities, reference)
    return (probabilities.argmax(-1) == reference.argmax(-1)).double().mean().item()


def total_variation(probabilities: Tensor, reference: Tensor) -> float:
    """½ Σ_c |p_c − q_c|, mean over points."""
    _check_same_shape(probabilities, reference)
    return 0.5 * (probabilities - reference).double().abs().sum(-1).mean().item()


def _quantile_differences(samples: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Differences [K, N] of the two quantile functions on the K intervals where both are constant.

    The empirical quantile functions of n and m samples step at i/n and j/m; between neighbouring
    steps of either they are constant, so the integrals below are exact for any n and m.
    """
    if samples.ndim != 2 or reference.ndim != 2 or samples.shape[1] != reference.shape[1]:
        raise InputError(
            f"Expected samples [S, N] and [R, N] of the same N points, got {list(samples.shape)} and "
            f"{list(reference.shape)}."
        )
    n, m = len(samples), len(reference)
    steps = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).unique()
    widths = torch.diff(steps, prepend=torch.zeros(1, dtype=steps.dtype)).double() / (n * m)
    before = steps - 1  # any integer inside the interval, in units of 1/(nm)
    first = samples.double().sort(0).values[(before // m).to(samples.device)]
    second = reference.double().sort(0).values[(before // n).to(reference.device)]
    return first - second, widths.to(samples.device)


def wasserstein1(samples: Tensor, reference: Tensor) -> float:
    """W₁ = ∫ |F⁻¹ − G⁻¹|, mean over points, from samples [S, N] and [R, N].

    With S = R it is the mean absolute difference of the sorted samples; this is the quantity that
    Delaunoy and Louppe (2021) print under the name W2.
    """
    differences, widths = _quantile_differences(samples, reference)
    return torch.tensordot(widths, differences.abs(), 1).mean().item()


def wasserstein2(samples: Tensor, reference: Tensor) -> float:
    """W₂ = (∫ |F⁻¹ − G⁻¹|²)^½, mean over points, from samples [S, N] and [R, N]."""
    differences, widths = _quantile_differences(samples, reference)
    return torch.tensordot(widths, differences.square(), 1).sqrt().mean().item()
