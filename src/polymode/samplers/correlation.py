"""How many steps of a chain are worth one independent draw."""

import torch
from torch import Tensor

WINDOW = 5.0  # correlations are summed over so many of the times that they sum to (Sokal 1997)


def correlation_time(values: Tensor) -> Tensor:
    """Integrated autocorrelation time τ = 1 + 2 Σ_t ρ_t of series [..., T, K], [..., K]; T/τ is the number of
    independent draws that a series is worth.

    ρ is summed up to the first lag W ≥ 5 τ(W): beyond it there is more noise than correlation. A series that
    never moves has T.
    """
    length = values.shape[-2]
    centred = values.double() - values.double().mean(-2, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * length, dim=-2).abs().square()
    covariance = torch.fft.irfft(spectrum, n=2 * length, dim=-2)[..., :length, :]
    variance = covariance[..., :1, :]
    moving = variance > 0
    correlation = torch.where(moving, covariance / torch.where(moving, variance, 1.0), 1.0)
    times = 2 * correlation.cumsum(-2) - 1  # τ(W), for every last lag W
    lags = torch.arange(length, device=values.device)[:, None]
    enough = lags >= WINDOW * times
    first = torch.where(enough.any(-2), enough.int().argmax(-2), length - 1)
    found = times.gather(-2, first.unsqueeze(-2)).squeeze(-2)
    return torch.where(moving.squeeze(-2), found, float(length)).clamp(1.0, float(length))
