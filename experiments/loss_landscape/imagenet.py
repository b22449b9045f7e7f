"""Torchvision's ResNet-50, untrained, as the model of ``imagenet.yaml``; needs torchvision."""

from torch import nn


def resnet50() -> nn.Module:
    """ResNet-50 with weights drawn anew."""
    from torchvision import models  # type: ignore[import-not-found]  # optional

    return models.resnet50(weights=None)
