"""Dropout as an option of the networks, with the same names of parameters whether it is there or not."""

from collections import OrderedDict

from torch import nn

from polymode.errors import InputError


def require_rate(rate: float, name: str = "dropout") -> float:
    """Return a rate in [0, 1); otherwise raise an error that names it."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise InputError(f"{name} must be a rate of at least 0 and below 1, got {rate!r}.")
    return float(rate)


def dropout_layer(rate: float) -> nn.Module:
    """Dropout, or nothing where the rate is 0."""
    return nn.Dropout(rate) if require_rate(rate) else nn.Identity()


def projection(in_channels: int, channels: int, stride: int, dropout: float) -> nn.Sequential:
    """The shortcut between shapes: a 1×1 convolution and BatchNorm, named 0 and 1; dropout between them."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["0"] = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
    if require_rate(dropout):
        layers["dropout"] = nn.Dropout(dropout)
    layers["1"] = nn.BatchNorm2d(channels)
    return nn.Sequential(layers)
