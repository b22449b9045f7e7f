"""The common corruptions of images (Hendrycks and Dietterich 2019): made anew, or read from files."""

from polymode.application.datasets.corruptions.making import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from polymode.application.datasets.corruptions.reading import cifar_c, imagenet_c

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "cifar_c", "corrupt", "imagenet_c"]
