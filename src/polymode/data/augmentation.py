"""Augmentation of whole batches of images [B, C, H, W], on the device they are on.

What happens to an example depends on its seed alone, whatever the batch it is in, so that a run replays and
resumes as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from polymode.errors import InputError, require
from polymode.seeds import fold, mix, uniform


class Augmentation(Protocol):
    """A random change of images [B, C, H, W], as ``uniforms`` [B, num_draws] in [0, 1) say."""

    @property
    def num_draws(self) -> int: ...

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class RandomCrop:
    """Pad by ``padding`` on every side and cut the old size out at a random place.

    fill: "zeros" (the mean colour, where images are standardised) or "reflect".
    """

    padding: int = 4
    fill: str = "zeros"
    num_draws = 2

    def __post_init__(self) -> None:
        require(self.padding >= 1, f"RandomCrop(padding=...) must be at least 1, got {self.padding}.")
        require(self.fill in ("zeros", "reflect"), f"fill={self.fill!r}: allowed are 'zeros' and 'reflect'.")

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        size, pad = images.shape[-2:], self.padding
        mode = "constant" if self.fill == "zeros" else "reflect"
        padded = F.pad(images, [pad] * 4, mode=mode)
        top, left = (uniforms * (2 * pad + 1)).long().unbind(1)
        rows = top[:, None] + torch.arange(size[0], device=images.device)
        columns = left[:, None] + torch.arange(size[1], device=images.device)
        batch = torch.arange(len(images), device=images.device)[:, None, None, None]
        channels = torch.arange(images.shape[1], device=images.device)[:, None, None]
        return padded[batch, channels, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class RandomFlip:
    """Mirror left and right with probability one half."""

    num_draws = 1

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return torch.where((uniforms < 0.5)[:, :, None, None], images.flip(-1), images)


@dataclass(frozen=True)
class Cutout:
    """Set a square of ``size`` pixels around a random pixel to zero (DeVries and Taylor 2017)."""

    size: int = 16
    num_draws = 2

    def __post_init__(self) -> None:
        require(self.size >= 1, f"Cutout(size=...) must be at least 1, got {self.size}.")

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        masks = []
        for length, uniform_of_axis in zip(images.shape[2:], uniforms.unbind(1), strict=True):
            start = (uniform_of_axis * length).long()[:, None] - self.size // 2
            place = torch.arange(length, device=images.device)
            masks.append((place >= start) & (place < start + self.size))  # [B, length]
        inside = masks[0][:, None, :, None] & masks[1][:, None, None, :]
        return images.masked_fill(inside, 0.0)


def augmented(images: Tensor, steps: Sequence[Augmentation], seeds: Tensor) -> Tensor:
    """Apply the steps in turn, each with random numbers of its own; seeds [B], one an example."""
    for number, step in enumerate(steps, 1):
        keys = fold(seeds.to(images.device))
        keys = mix(keys ^ mix(torch.full_like(keys, number)))
        images = step(images, uniform(keys, step.num_draws))
    return images


def check_images(inputs: object) -> None:
    """Raise an ``InputError`` unless the inputs are images [N, C, H, W] of floating-point numbers."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.is_floating_point():
        seen = f"{list(inputs.shape)} {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(
            f"Augmentation is for floating-point images [N, C, H, W], the inputs are {seen}. Convert them, "
            "or leave augment out."
        )
