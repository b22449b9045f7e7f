"""Dropout whose masks are a function of a seed, so that they can be replayed.

A mask entry depends on (seed, layer, example, unit) and on nothing else: not on the backend, not on
how inputs are cut into chunks, not on what was drawn before. The seed is a buffer and hence an entry
of ``Members`` like any weight.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from polymode.seeds import fold, mix, uniform16

Masks = Literal["example", "draw"]

_LAYERS = 1 << 16  # more layers than any network has


def mask_numbers(seed: Tensor, layer: int, first_example: Tensor, shape: torch.Size) -> Tensor:
    """Uniform numbers in (0, 1) of ``shape`` [B, ...], keyed by (seed, layer, example, unit)."""
    example = torch.arange(shape[0], device=seed.device) + first_example
    key = fold(seed)
    key = mix(key ^ mix(torch.full_like(key, layer + 1)))
    key = mix(key ^ fold(example))
    return uniform16(key, shape[1:].numel()).reshape(shape)


class SeededDropout(nn.Module):
    """Replayable ``nn.Dropout``, or (whole channels) ``nn.Dropout1d/2d/3d``, as ``original`` says.

    Inputs [B, ...]; kept values are divided by 1 − p; nothing happens in evaluation mode, unless the layer is
    ``sampled``. masks: one for each example, or one for each draw of the network, which all examples share. A
    layer that is used several times in one pass draws a new mask each time: ``calls`` counts them and is part
    of the key; whoever begins a pass sets it to 0.
    """

    seed: Tensor
    first_example: Tensor

    def __init__(self, p: float, layer: int, original: type[nn.Module] = nn.Dropout) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.original = original
        self.calls = 0
        self.sampled = False
        self.masks: Masks = "example"
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.register_buffer("first_example", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if not (self.training or self.sampled) or self.p == 0:
            return inputs
        whole_channels = self.original is not nn.Dropout
        shape = inputs.shape[:2] + (1,) * (inputs.ndim - 2) if whole_channels else inputs.shape
        key = self.layer + _LAYERS * self.calls
        self.calls += 1
        first_example = self.first_example
        if self.masks == "draw":
            shape, first_example = torch.Size([1, *shape[1:]]), torch.zeros_like(first_example)
        kept = mask_numbers(self.seed, key, first_example, torch.Size(shape)) >= self.p
        return inputs * kept.to(inputs.dtype) / (1 - self.p) if self.p < 1 else inputs * 0

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}, original={self.original.__name__}"
