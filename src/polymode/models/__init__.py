"""Networks of the papers, with the parameter counts they state."""

from polymode.models.catalogue import MODELS, Architecture, make_model
from polymode.models.cnn import MediumCNN, SmallCNN
from polymode.models.mlp import MLP
from polymode.models.resnet import ResNet, resnet20, resnet32, resnet56
from polymode.models.text import MeanEmbedding

__all__ = [
    "MLP",
    "MODELS",
    "Architecture",
    "MeanEmbedding",
    "MediumCNN",
    "ResNet",
    "SmallCNN",
    "make_model",
    "resnet20",
    "resnet32",
    "resnet56",
]
