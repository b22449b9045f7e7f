"""ResNet-20 with filter response normalisation and swish, the network of the HMC reference.

Used by Izmailov et al. (2021) and, for sequential anchored ensembles, by Delaunoy and Louppe (2021).

It has no BatchNorm: the output for one example depends on no other, as a posterior needs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.models.initialisation import initialise

_EPSILON = 1e-6  # added to the mean square (Singh & Krishnan 2020)


class FilterResponseNorm(nn.Module):
    """max(γ x / √(mean over H, W of x² + ε) + β, τ): [B, C, H, W] -> [B, C, H, W].

    ``weight`` γ, ``bias`` β and ``threshold`` τ, [C] each (Singh & Krishnan 2020).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.threshold = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.threshold)

    def forward(self, images: Tensor) -> Tensor:
        # max(y, τ) = relu(y − τ) + τ: the gradient of a maximum with a broadcast τ takes three times as long.
        raised, _ = _ScaledRelu.apply(images, self.weight, self.bias - self.threshold)
        return raised + self.threshold[:, None, None]


class _ScaledRelu(torch.autograd.Function):
    """(x [B, C, H, W], γ [C], b [C]) -> relu(γ x r + b) and r = 1/√(mean over H, W of x² + ε), [B, C, 1, 1].

    Memory is what costs time here, and the gradient by hand passes over it half as often as autograd's. r is
    an output so that the gradient can be differentiated again: it depends on x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.rsqrt(images.square().mean((-2, -1), keepdim=True) + _EPSILON)
        raised = torch.addcmul(bias[:, None, None], images, inverse * weight[:, None, None]).relu_()
        return raised, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        images, weight, _ = inputs
        ctx.save_for_backward(images, weight, *output)

    @staticmethod
    def backward(  # type: ignore[override]  # torch passes one gradient for each output
        ctx: Any, grad: Tensor, grad_inverse: Tensor
    ) -> tuple[Tensor, ...]:
        images, weight, raised, inverse = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grad, raised, 0)
        along = (grad * images).sum((-2, -1), keepdim=True)
        of_inverse = along * weight[:, None, None] + grad_inverse
        # r changes with x by −r³ x / HW.
        through_inverse = images * (of_inverse * inverse**3 / -(images.shape[-2] * images.shape[-1]))
        of_images = torch.addcmul(through_inverse, grad, inverse * weight[:, None, None])
        return of_images, (along * inverse).sum((0, 2, 3)), grad.sum((0, 2, 3))


class FRNBlock(nn.Module):
    """conv–FRN–swish–conv–FRN, plus the input, then swish; a 1×1 convolution with FRN where shapes change."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1 if stride == 1 else 0)
        self.norm1 = FilterResponseNorm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = FilterResponseNorm(channels)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and in_channels == channels
            else nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride), FilterResponseNorm(channels))
        )

    def forward(self, images: Tensor) -> Tensor:
        padded = images if self.conv1.stride == (1, 1) else _pad_for_stride_2(images)
        out = F.silu(self.norm1(self.conv1(padded)))
        return F.silu(self.norm2(self.conv2(out)) + self.shortcut(images))


def _pad_for_stride_2(images: Tensor) -> Tensor:
    """Zeros for a 3×3 convolution of stride 2, as JAX pads by "same": an even size only below and right."""
    height, width = images.shape[-2:]
    return F.pad(images, (width % 2, 1, height % 2, 1))


class FRNResNet(nn.Module):
    """A 3×3 stem of 16 channels, three stacks (16, 32, 64) of blocks, average pooling, one linear layer."""

    def __init__(self, blocks_per_stack: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.norm = FilterResponseNorm(16)
        blocks: list[nn.Module] = []
        width = 16
        for stack, channels in enumerate((16, 32, 64)):
            for index in range(blocks_per_stack):
                blocks.append(FRNBlock(width, channels, stride=2 if stack and not index else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise(self, convolution_variance=2.0)
        for part in self.modules():
            if isinstance(part, FilterResponseNorm):
                part.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(F.silu(self.norm(self.conv(images))))
        return self.classifier(features.mean((-2, -1)))


def resnet20_frn(num_classes: int = 10, in_channels: int = 3) -> FRNResNet:
    """Three blocks a stack: 274,042 parameters for ten classes."""
    return FRNResNet(3, num_classes, in_channels)
