"""Parameter counts that the papers and their audits state."""

import pytest
import torch

from polymode.models import MLP, MediumCNN, SmallCNN, resnet20, resnet32, resnet56
from polymode.surgery import normalisation_and_bias_names


def count(module, keep=lambda name: True):
    return sum(p.numel() for name, p in module.named_parameters() if keep(name))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SmallCNN, 19_466),
        (MediumCNN, 971_146),
        (resnet32, 466_906),
        (resnet56, 855_770),
        (lambda: resnet32(100), 472_756),
        (lambda: resnet56(100), 861_620),
        (lambda: MLP(8, 2, (50,)), 552),
        (lambda: MLP(13, 1, (50,)), 751),
    ],
)
def test_counts(make, expected):
    assert count(make()) == expected


def test_resnet20_convolutions_and_classifier():
    """268,346 without BatchNorm and the two 1×1 shortcuts (FACTS §2.6)."""
    module = resnet20()
    kept = count(module, lambda n: "bn" not in n and "shortcut" not in n)
    assert kept == 268_346


@pytest.mark.parametrize("make", [SmallCNN, MediumCNN, resnet20])
def test_images_become_logits_that_depend_on_them(make):
    module = make().eval()
    images = torch.randn(4, 3, 32, 32)
    logits = module(images)
    assert logits.shape == (4, 10)
    assert not torch.allclose(logits[0], logits[1])


def test_names_without_decay():
    names = normalisation_and_bias_names(resnet20())
    assert "bn.weight" in names
    assert "blocks.3.shortcut.1.weight" in names
    assert "classifier.bias" in names
    assert not names & {"conv.weight", "classifier.weight", "blocks.3.shortcut.0.weight"}
