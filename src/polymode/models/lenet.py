"""LeNets: for DermaMNIST (Delaunoy and Louppe 2021), and LeNet-5 with BatchNorm (von Oswald et al. 2021)."""

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


class LeNet5(nn.Module):
    """LeNet-5 with ReLU, max pooling and BatchNorm behind each hidden activation.

    62,006 parameters and 452 of BatchNorm for 32×32 colour images and ten classes. Convolutions are not
    padded.
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32, batch_norm: bool = True
    ) -> None:
        super().__init__()

        def norm(layer: nn.Module) -> list[nn.Module]:
            return [layer] if batch_norm else []

        side = ((image_size - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            *(nn.Conv2d(in_channels, 6, 5), nn.ReLU(), *norm(nn.BatchNorm2d(6)), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), *norm(nn.BatchNorm2d(16)), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(16 * side**2, 120), nn.ReLU(), *norm(nn.BatchNorm1d(120))),
            *(nn.Linear(120, 84), nn.ReLU(), *norm(nn.BatchNorm1d(84))),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))
