"""The residual network for large images (He et al. 2016) that Chang et al. (2019) patch."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from polymode.models.dropout import dropout_layer
from polymode.models.initialisation import initialise_by_fan_out
from polymode.models.resnet import Block


class ImageNetResNet(nn.Module):
    """A 7×7 stem and max-pooling (together a quarter of the size), four stacks of 64, 128, 256, 512 channels.

    Parameters and buffers are named as in torchvision, whose state dicts load. dropout: its rate directly
    before every BatchNorm (Chang et al. 2019, Appendix D).
    """

    def __init__(
        self,
        blocks_per_stack: Sequence[int],
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, padding=3, bias=False)
        self.dropout1 = dropout_layer(dropout)
        self.bn1 = nn.BatchNorm2d(64)
        first, second, third, fourth = blocks_per_stack
        self.layer1 = _stack(64, 64, first, 1, dropout)
        self.layer2 = _stack(64, 128, second, 2, dropout)
        self.layer3 = _stack(128, 256, third, 2, dropout)
        self.layer4 = _stack(256, 512, fourth, 2, dropout)
        self.fc = nn.Linear(512, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise_by_fan_out(self)

    def forward(self, images: Tensor) -> Tensor:
        stem = F.relu(self.bn1(self.dropout1(self.conv1(images))))
        features = self.layer2(self.layer1(F.max_pool2d(stem, 3, 2, padding=1)))
        return self.fc(self.layer4(self.layer3(features)).mean((-2, -1)))


def _stack(in_channels: int, channels: int, num_blocks: int, stride: int, dropout: float) -> nn.Sequential:
    first = Block(in_channels, channels, stride, dropout)
    return nn.Sequential(first, *(Block(channels, channels, 1, dropout) for _ in range(num_blocks - 1)))


def resnet18(num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.0) -> ImageNetResNet:
    """Two blocks a stack: 11,689,512 parameters for a thousand classes."""
    return ImageNetResNet((2, 2, 2, 2), num_classes, in_channels, dropout)
