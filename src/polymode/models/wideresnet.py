"""Wide residual networks for small images (Zagoruyko and Komodakis 2016).

Von Oswald et al. (2021) use 28-10 and 28-14.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError, require_whole
from polymode.models.dropout import dropout_layer
from polymode.models.initialisation import initialise_by_fan_out


class WideBlock(nn.Module):
    """BN–ReLU–conv–dropout–BN–ReLU–conv, plus the input.

    Where shapes change, the input is replaced by a 1×1 convolution of what the first ReLU gives.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.dropout = dropout_layer(dropout)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.downsample = (
            None
            if stride == 1 and in_channels == channels
            else nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        active = F.relu(self.bn1(images))
        out = self.dropout(self.conv1(active))
        out = self.conv2(F.relu(self.bn2(out)))
        return out + (images if self.downsample is None else self.downsample(active))


class WideResNet(nn.Module):
    """A 3×3 stem of 16 channels and three stacks of (depth − 4)/6 blocks, 16, 32 and 64 times ``width`` wide.

    Then BN–ReLU, average pooling, one linear layer; no convolution has a bias. dropout: its rate behind the
    first convolution of every block.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_whole("depth", depth, least=10)
        require_whole("width", width)
        if (depth - 4) % 6:
            nearest = 4 + 6 * round((depth - 4) / 6)
            raise InputError(f"depth must be 6 n + 4, such as 28, got {depth}. The nearest is {nearest}.")
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        before = 16
        for stack, channels in enumerate((16 * width, 32 * width, 64 * width)):
            for index in range((depth - 4) // 6):
                blocks.append(WideBlock(before, channels, 2 if stack and not index else 1, dropout))
                before = channels
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(before)
        self.classifier = nn.Linear(before, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise_by_fan_out(self)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.bn(self.blocks(self.conv(images))))
        return self.classifier(features.mean((-2, -1)))


def wrn16_2(num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0) -> WideResNet:
    """Two blocks a stack, twice as wide as a ResNet: 691,674 parameters for ten classes."""
    return WideResNet(16, 2, num_classes, in_channels, dropout)


def wrn28_10(num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0) -> WideResNet:
    """Four blocks a stack: 36,479,194 parameters for ten classes, 36,536,884 for a hundred."""
    return WideResNet(28, 10, num_classes, in_channels, dropout)


def wrn28_14(num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0) -> WideResNet:
    """Four blocks a stack: 71,470,810 parameters for ten classes, 71,551,540 for a hundred."""
    return WideResNet(28, 14, num_classes, in_channels, dropout)
