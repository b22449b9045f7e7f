"""The LeNet of the sequential ensembles (paper 000), for DermaMNIST."""

from torch import Tensor, nn

from polymode.models.initialisation import initialise


class LeNet(nn.Module):
    """Two 5×5 convolutions with average pooling, three linear layers, ReLU between them.

    61,751 parameters for 28×28 colour images and seven classes.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 28) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * ((image_size // 2 - 4) // 2) ** 2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))
