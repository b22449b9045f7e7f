"""Networks of the papers, with the parameter counts they state."""

from polymode.models.cnn import MediumCNN, SmallCNN
from polymode.models.mlp import MLP
from polymode.models.resnet import ResNet, resnet20, resnet32, resnet56

__all__ = ["MLP", "MediumCNN", "ResNet", "SmallCNN", "resnet20", "resnet32", "resnet56"]
