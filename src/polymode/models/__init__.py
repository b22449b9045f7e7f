"""Networks of the papers in docs/references.md, with the parameter counts they state."""

from polymode.models.alexnet import AlexNet
from polymode.models.catalogue import MODELS, Architecture, make_model
from polymode.models.cnn import MediumCNN, SmallCNN
from polymode.models.frn import FilterResponseNorm, FRNResNet, resnet20_frn
from polymode.models.imagenet import ImageNetResNet, resnet18
from polymode.models.lenet import LeNet, LeNet5
from polymode.models.mlp import MLP
from polymode.models.pyramidnet import PyramidNet, pyramidnet110
from polymode.models.resnet import ResNet, resnet8, resnet20, resnet32, resnet56
from polymode.models.text import CNNLSTM, LSTM, CharacterLSTM, MeanEmbedding
from polymode.models.wideresnet import WideResNet, wrn16_2, wrn28_10, wrn28_14

__all__ = [
    "CNNLSTM",
    "LSTM",
    "MLP",
    "MODELS",
    "AlexNet",
    "Architecture",
    "CharacterLSTM",
    "FRNResNet",
    "FilterResponseNorm",
    "ImageNetResNet",
    "LeNet",
    "LeNet5",
    "MeanEmbedding",
    "MediumCNN",
    "PyramidNet",
    "ResNet",
    "SmallCNN",
    "WideResNet",
    "make_model",
    "pyramidnet110",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet20_frn",
    "resnet32",
    "resnet56",
    "wrn16_2",
    "wrn28_10",
    "wrn28_14",
]
