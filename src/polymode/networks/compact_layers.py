"""Layers that compute some of their channels, and whose parameters have the names of the layers they replace.

Channels that a smaller network does without hold constants. Where a layer read them, their share is in its
bias, or, where zeros are padded around an image, in one more kernel; where others still need the full width,
constants are put back in their places.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _Widened:
    """Puts the channels that a layer computes among constants: ``order`` [P] of (computed, constants).

    behind: how many axes stand behind that of the channels. constants: [P − computed]; zeros where there are
    none. Without ``order`` the outputs are what is computed.
    """

    behind: int
    order: Tensor | None
    constants: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as torch names it
        outputs = super().forward(input)  # type: ignore[misc]  # of the layer beside this one
        if self.order is None:
            return outputs
        constants = outputs.new_zeros(()) if self.constants is None else self.constants.to(outputs.dtype)
        return _ordered(outputs, constants, self.order, self.behind)

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        return text if self.order is None else f"{text}, widened_to={len(self.order)}"


def _ordered(outputs: Tensor, constants: Tensor, order: Tensor, behind: int) -> Tensor:
    """Channels and constants side by side, in another order and in the memory format of the channels.

    Of the ways to scatter channels on CPU this one is the fastest that is exact and leaves the format alone.
    """
    axis = -1 - behind
    missing = len(order) - outputs.shape[axis]
    if behind and outputs.stride(axis) == 1:  # channels_last: rows of channels
        spread = outputs.movedim(axis, -1)
        rows = _ordered(spread.flatten(0, -2), constants, order, 0)
        return rows.unflatten(0, spread.shape[:-1]).movedim(-1, axis)
    shape = [*outputs.shape[:axis], missing, *outputs.shape[outputs.ndim - behind :]]
    filling = constants.reshape(-1, *[1] * behind).expand(shape)
    return torch.cat([outputs, filling], axis).index_select(axis, order)


class _PaddedConstants(_Widened):
    """Adds what channels that hold constants contribute: one constant input channel of ones.

    ``constant_kernel`` is Σ_j c_j W_j, [outputs, 1, ...]: zeros around an image cut it off at the borders.
    """

    constant_kernel: Tensor | None

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        outputs = super()._conv_forward(input, weight, bias)  # type: ignore[misc]
        if self.constant_kernel is None:
            return outputs
        ones = input.new_ones([1] * (input.ndim - self.behind) + list(input.shape[-self.behind :]))
        shares = super()._conv_forward(ones, self.constant_kernel, None)  # type: ignore[misc]
        axis = -1 - self.behind
        if outputs.stride(axis) == 1:  # channels_last: a sum of two layouts takes four times as long
            shares = shares.movedim(axis, -1).contiguous().movedim(-1, axis)
        return outputs + shares


class CompactLinear(_Widened, nn.Linear):
    """``nn.Linear`` over some of its units."""

    behind = 0


class CompactConv1d(_PaddedConstants, nn.Conv1d):
    """``nn.Conv1d`` over some of its channels."""

    behind = 1


class CompactConv2d(_PaddedConstants, nn.Conv2d):
    """``nn.Conv2d`` over some of its channels."""

    behind = 2


class CompactConv3d(_PaddedConstants, nn.Conv3d):
    """``nn.Conv3d`` over some of its channels."""

    behind = 3


class WidenedFeatureNorm(_Widened, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` of units [B, C], some of which are computed."""

    behind = 0


class WidenedBatchNorm1d(_Widened, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` of sequences [B, C, T], some channels of which are computed."""

    behind = 1


class WidenedBatchNorm2d(_Widened, nn.BatchNorm2d):
    """``nn.BatchNorm2d``, some channels of which are computed."""

    behind = 2


class WidenedBatchNorm3d(_Widened, nn.BatchNorm3d):
    """``nn.BatchNorm3d``, some channels of which are computed."""

    behind = 3


CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}  # axes of space
NORMS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (0, 1),
    nn.BatchNorm2d: (2,),
    nn.BatchNorm3d: (3,),
}
_COMPACT: dict[tuple[type[nn.Module], int], type[nn.Module]] = {
    (nn.Linear, 0): CompactLinear,
    (nn.Conv1d, 1): CompactConv1d,
    (nn.Conv2d, 2): CompactConv2d,
    (nn.Conv3d, 3): CompactConv3d,
    (nn.BatchNorm1d, 0): WidenedFeatureNorm,
    (nn.BatchNorm1d, 1): WidenedBatchNorm1d,
    (nn.BatchNorm2d, 2): WidenedBatchNorm2d,
    (nn.BatchNorm3d, 3): WidenedBatchNorm3d,
}
COMPACT_LAYERS = tuple(_COMPACT.values())


def pads_zeros(layer: Any) -> bool:
    """Whether a convolution sees zeros around its inputs."""
    if type(layer) not in CONVOLUTIONS or layer.padding_mode != "zeros":
        return False
    padding = layer.padding
    return padding == "same" or (padding != "valid" and any(padding))


def keep_weights(layer: Any, rows: Tensor, columns: Tensor) -> None:
    """Leave a linear layer or a convolution with some outputs (rows) and inputs (columns)."""
    weight, bias = layer.weight, layer.bias
    kept = weight.detach()[rows.to(weight.device)][:, columns.to(weight.device)]
    layer.weight = parameter(kept, weight)
    if bias is not None:
        layer.bias = parameter(bias.detach()[rows.to(bias.device)], bias)
    sizes = {"out": int(rows.sum()), "in": int(columns.sum())}
    for side, size in sizes.items():
        setattr(layer, f"{side}_{'features' if isinstance(layer, nn.Linear) else 'channels'}", size)


def keep_features(layer: Any, kept: Tensor) -> None:
    """Leave a BatchNorm layer with some of its features."""
    for name in ("weight", "bias"):
        if (old := getattr(layer, name)) is not None:
            setattr(layer, name, parameter(old.detach()[kept.to(old.device)], old))
    for name in ("running_mean", "running_var"):
        old = getattr(layer, name)
        setattr(layer, name, old[kept.to(old.device)])
    layer.num_features = int(kept.sum())


def add_bias(layer: Any, shares: Tensor) -> None:
    """Add what constants contribute to every output, [outputs]."""
    if layer.bias is None:
        layer.bias = parameter(shares, layer.weight)
    else:
        layer.bias = parameter(layer.bias.detach().to(shares) + shares, layer.bias)


def add_constant_kernel(layer: Any, kernel: Tensor) -> None:
    """Let a padded convolution add what constants contribute; kernel: [outputs, ...]."""
    _make_compact(layer, CONVOLUTIONS[type(layer)])
    layer.constant_kernel = parameter(kernel[:, None], layer.weight)


def widen(layer: Any, behind: int, order: Tensor, constants: Tensor | None) -> None:
    """Let a layer put what it computes, and then the constants, in this order."""
    _make_compact(layer, behind)
    like = layer.weight if layer.weight is not None else layer.running_mean
    layer.register_buffer("order", order.to(like.device))
    if constants is not None:
        layer.constants = parameter(constants, like)


def _make_compact(layer: Any, behind: int) -> None:
    """Change the class of a layer where it stands: whoever holds it, holds the compact one."""
    if isinstance(layer, COMPACT_LAYERS):
        return
    layer.__class__ = _COMPACT[type(layer), behind]
    layer.register_buffer("order", None)
    for name in ("constants", "constant_kernel"):
        layer.register_parameter(name, None)


def parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter with these values and the type, place, memory format and gradient of another one."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(values.ndim)
    kept = last is not None and like.ndim == values.ndim and like.is_contiguous(memory_format=last)
    values = values.to(like.device, like.dtype, copy=True)
    layout = last if kept and last is not None else torch.contiguous_format
    return nn.Parameter(values.contiguous(memory_format=layout), like.requires_grad)


def orders_in(module: nn.Module) -> dict[str, Tensor]:
    """The orders that layers put their channels in, by name: they follow from masks, not from training."""
    return {
        f"{name}.order".lstrip("."): layer.order
        for name, layer in module.named_modules()
        if isinstance(layer, _Widened) and layer.order is not None
    }
