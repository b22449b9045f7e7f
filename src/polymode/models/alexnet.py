"""The variant of AlexNet for small images that Delaunoy and Louppe (2021) use."""

from torch import Tensor, nn

from polymode.models.initialisation import initialise


class AlexNet(nn.Module):
    """Five convolutions, three linear layers, swish between them.

    1,488,202 parameters for 32×32 colour images and ten classes.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_channels
        for channels in (64, 128):
            layers += [nn.Conv2d(width, channels, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2)]
            width = channels
        for channels in (256, 128, 64):
            # "Same" padding of a 2×2 kernel is one row below and one column to the right.
            layers += [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(width, channels, 2), nn.SiLU()]
            width = channels
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(width * (image_size // 4) ** 2, 256),
            nn.SiLU(),
            nn.Linear(256, 256),
            nn.SiLU(),
            nn.Linear(256, num_classes),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))
