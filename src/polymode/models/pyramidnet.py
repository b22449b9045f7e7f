"""Pyramidal residual networks for small images (Han et al. 2017; Chang et al. 2019: depth 110, α = 270)."""

from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError, require_positive, require_whole
from polymode.models.dropout import dropout_layer
from polymode.models.initialisation import initialise_by_fan_out


class PyramidBlock(nn.Module):
    """BN–conv–BN–ReLU–conv–BN, plus the input: halved by averages with its stride, new channels zero."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout1 = dropout_layer(dropout)
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.dropout2 = dropout_layer(dropout)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.dropout3 = dropout_layer(dropout)
        self.bn3 = nn.BatchNorm2d(channels)
        # An odd size is rounded up, as the convolution rounds it.
        self.downsample = nn.Identity() if stride == 1 else nn.AvgPool2d(stride, ceil_mode=True)
        self.new_channels = channels - in_channels

    def forward(self, images: Tensor) -> Tensor:
        out = self.bn2(self.dropout2(self.conv1(self.bn1(self.dropout1(images)))))
        out = self.bn3(self.dropout3(self.conv2(F.relu(out))))
        return out + F.pad(self.downsample(images), (0, 0, 0, 0, 0, self.new_channels))


class PyramidNet(nn.Module):
    """A 3×3 stem of 16 channels and three stacks of n = (depth − 2)/6 blocks that widen to 16 + alpha.

    Block i of the 3n has 16 + i alpha/3n channels, rounded; then BN–ReLU, average pooling, one linear layer.
    Names are those of Han et al.'s code. dropout: its rate directly before every BatchNorm (Chang et
    al. 2019, Appendix D).
    """

    def __init__(
        self,
        depth: int,
        alpha: float,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_whole("depth", depth, least=8)
        require_positive("alpha", alpha)
        if (depth - 2) % 6:
            nearest = 2 + 6 * round((depth - 2) / 6)
            raise InputError(f"depth must be 6 n + 2, such as 110, got {depth}. The nearest is {nearest}.")
        blocks_per_stack = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.dropout1 = dropout_layer(dropout)
        self.bn1 = nn.BatchNorm2d(16)
        stacks: list[nn.Sequential] = []
        width, channels = 16.0, 16
        for stride in (1, 2, 2):
            blocks: list[nn.Module] = []
            for index in range(blocks_per_stack):
                width += alpha / (3 * blocks_per_stack)
                blocks.append(PyramidBlock(channels, round(width), 1 if index else stride, dropout))
                channels = round(width)
            stacks.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stacks
        self.dropout_final = dropout_layer(dropout)
        self.bn_final = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise_by_fan_out(self)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.bn1(self.dropout1(self.conv1(images)))
        features = self.layer3(self.layer2(self.layer1(stem)))
        return self.fc(F.relu(self.bn_final(self.dropout_final(features))).mean((-2, -1)))


def pyramidnet110(
    num_classes: int = 10, in_channels: int = 3, alpha: float = 270, dropout: float = 0.0
) -> PyramidNet:
    """Eighteen blocks a stack: 28,511,307 parameters for a hundred classes, 28,485,477 for ten."""
    return PyramidNet(110, alpha, num_classes, in_channels, dropout)
