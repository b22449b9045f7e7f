"""The small convolutional networks of Fort et al. (2019, §3)."""

from typing import ClassVar

from torch import Tensor, nn

from polymode.errors import unknown_name
from polymode.models.dropout import require_rate
from polymode.models.initialisation import initialise_by_xavier


class _PlainCNN(nn.Module):
    """Layers of 3×3 convolution, dropout, 2×2 max-pooling and ReLU (not after the last); one linear layer.

    initialisation: "pytorch" draws the layers as they draw themselves, "xavier" weights and biases from
    uniform laws, as the published experiments have them.
    """

    channels: ClassVar[tuple[int, ...]]

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        dropout: float = 0.1,
        initialisation: str = "pytorch",
    ) -> None:
        super().__init__()
        require_rate(dropout)
        if initialisation not in ("pytorch", "xavier"):
            raise unknown_name("initialisation", initialisation, ("pytorch", "xavier"))
        layers: list[nn.Module] = []
        width, size = in_channels, image_size
        for index, out in enumerate(self.channels):
            layers.append(nn.Conv2d(width, out, 3, padding=1))
            if dropout:
                layers.append(nn.Dropout(dropout))
            layers.append(nn.MaxPool2d(2))
            if index < len(self.channels) - 1:
                layers.append(nn.ReLU())
            width, size = out, size // 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * size * size, num_classes)
        if initialisation == "xavier":
            initialise_by_xavier(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


class SmallCNN(_PlainCNN):
    """Channels 16, 32, 32: 19,466 parameters for 32×32 colour images and ten classes."""

    channels = (16, 32, 32)


class MediumCNN(_PlainCNN):
    """Channels 64, 128, 256, 256: 971,146 parameters for 32×32 colour images and ten classes."""

    channels = (64, 128, 256, 256)
