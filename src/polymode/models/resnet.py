"""Residual networks for small images, with BatchNorm (He et al. 2016); 32 and 56 in Jantre et al. (2022)."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import unknown_name
from polymode.models.dropout import dropout_layer, projection

Activation = Literal["relu", "silu"]

_ACTIVATIONS = {"relu": F.relu, "silu": F.silu}


class Block(nn.Module):
    """conv–BN–ReLU–conv–BN, plus the input, then ReLU; a 1×1 convolution with BN where shapes change.

    Parameters are named as in torchvision. activation: "silu" in place of both ReLUs.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        dropout: float = 0.0,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        if activation not in list(_ACTIVATIONS):  # a value that has no hash is refused as well
            raise unknown_name("activation", activation, _ACTIVATIONS)
        self.activation = activation
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.dropout1 = dropout_layer(dropout)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.dropout2 = dropout_layer(dropout)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = (
            nn.Identity()
            if stride == 1 and in_channels == channels
            else projection(in_channels, channels, stride, dropout)
        )

    def forward(self, images: Tensor) -> Tensor:
        activate = _ACTIVATIONS[self.activation]
        out = activate(self.bn1(self.dropout1(self.conv1(images))))
        return activate(self.bn2(self.dropout2(self.conv2(out))) + self.downsample(images))


class ResNet(nn.Module):
    """A 3×3 stem of 16 channels, three stacks (16, 32, 64) of blocks, average pooling, one linear layer.

    dropout: its rate directly before every BatchNorm (Chang et al. 2019, Appendix D). activation: "relu" or
    "silu", of the stem and of the blocks.
    """

    def __init__(
        self,
        blocks_per_stack: int,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.activation = activation
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.dropout = dropout_layer(dropout)
        self.bn = nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        width = 16
        for stack, channels in enumerate((16, 32, 64)):
            for index in range(blocks_per_stack):
                stride = 2 if stack and not index else 1
                blocks.append(Block(width, channels, stride, dropout, activation))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        stem = _ACTIVATIONS[self.activation](self.bn(self.dropout(self.conv(images))))
        return self.classifier(self.blocks(stem).mean((-2, -1)))

    def extra_repr(self) -> str:
        """Files of a posterior compare it; those written before there was a choice say nothing."""
        return "" if self.activation == "relu" else f"activation={self.activation}"


def resnet8(
    num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, activation: Activation = "relu"
) -> ResNet:
    """One block a stack: 78,042 parameters for ten classes."""
    return ResNet(1, num_classes, in_channels, dropout, activation)


def resnet20(
    num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, activation: Activation = "relu"
) -> ResNet:
    """Three blocks a stack."""
    return ResNet(3, num_classes, in_channels, dropout, activation)


def resnet32(
    num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, activation: Activation = "relu"
) -> ResNet:
    """Five blocks a stack: 466,906 parameters for ten classes."""
    return ResNet(5, num_classes, in_channels, dropout, activation)


def resnet56(
    num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, activation: Activation = "relu"
) -> ResNet:
    """Nine blocks a stack: 855,770 parameters for ten classes."""
    return ResNet(9, num_classes, in_channels, dropout, activation)
