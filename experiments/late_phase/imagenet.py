"""Torchvision's networks with its ImageNet weights, as the models of ``imagenet.yaml``; needs torchvision."""

from torch import nn


def _pretrained(name: str, version: str) -> nn.Module:
    from torchvision import models  # type: ignore[import-not-found]  # optional

    return getattr(models, name)(weights=version)


def resnet50() -> nn.Module:
    """ResNet-50, 76.1 % (the first version of its weights, as in the paper)."""
    return _pretrained("resnet50", "IMAGENET1K_V1")


def resnet152() -> nn.Module:
    """ResNet-152, 78.3 %."""
    return _pretrained("resnet152", "IMAGENET1K_V1")


def densenet161() -> nn.Module:
    """DenseNet-161, 77.1 %."""
    return _pretrained("densenet161", "IMAGENET1K_V1")
