"""The networks and the batches of all contenders that are written in PyTorch."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from league.jobs import NUM_CLASSES, NUM_HIDDEN, NUM_INPUTS


class MLP(nn.Sequential):
    def __init__(
        self,
        num_outputs: int = 1,
        num_inputs: int = NUM_INPUTS,
        num_hidden: int = NUM_HIDDEN,
        dropout: float = 0.0,
    ) -> None:
        noise = [nn.Dropout(dropout)] if dropout else []
        layers = [nn.Linear(num_inputs, num_hidden), nn.ReLU(), *noise, nn.Linear(num_hidden, num_outputs)]
        super().__init__(*layers)


class SmallCNN(nn.Module):
    """That of ``polymode.models`` without dropout, which the peers' environments do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(512, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def tensors(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    x, y = arrays
    return torch.from_numpy(x), torch.from_numpy(y)


def loader(x: Tensor, y: Tensor, batch_size: int) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


def shuffled(x: Tensor, y: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, from memory: for libraries that leave the loop to their users."""
    for rows in torch.randperm(len(x)).split(batch_size):
        yield x[rows], y[rows]


def moments(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the networks, which stand on the first axis."""
    return outputs.mean(0), outputs.var(0)
