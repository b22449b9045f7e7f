"""Parameter counts that the papers and their audits state."""

import pytest
import torch

import polymode as pm
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


def test_networks_by_name_fit_the_examples():
    from polymode.models import MODELS, make_model

    for name, architecture in MODELS.items():
        shape = {"table": (7,), "images": (3, 32, 32), "tokens": (9,)}[architecture.takes]
        examples = torch.randint(1, 50, (2, 9)) if architecture.takes == "tokens" else torch.randn(2, *shape)
        module = make_model(name, shape, 4, {})()
        assert module.eval()(examples).shape == (2, 4)
    assert make_model("mlp", (7,), 4, {"hidden": [3]})()[1].weight.shape == (3, 7)
    assert make_model("smallcnn", (1, 8, 8), 8, {})().classifier.weight.shape == (8, 32)


def test_padding_does_not_change_a_bag_of_words():
    module = pm.models.MeanEmbedding(2, vocabulary=10)
    padded = module(torch.tensor([[0, 0, 3, 5]]))
    torch.testing.assert_close(padded, module(torch.tensor([[3, 5]])))
    assert bool(module(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all())


@pytest.mark.parametrize(
    ("spec", "shape", "options", "message"),
    [
        ("smalcnn", (3, 8, 8), {}, r"Did you mean 'smallcnn'.*package.module:callable"),
        ("smallcnn", (7,), {}, r"takes images .* these examples are \[7\]"),
        ("smallcnn", (3, 8, 10), {}, "square images, these are 8×10"),
        ("mlp", (7,), {"hiden": [3]}, "Unknown option of the model mlp 'hiden'. Did you mean 'hidden'"),
        ("mlp", {"a": (3,)}, {}, "several inputs"),
        ("nowhere.at_all:build", (7,), {}, "there is no module 'nowhere'"),
        ("torch.nn:Linaer", (7,), {}, "Did you mean 'Linear'"),
        ("math:pi", (7,), {}, "math:pi is a float"),
    ],
)
def test_networks_that_do_not_fit_are_refused(spec, shape, options, message):
    from polymode.models import make_model

    with pytest.raises(pm.errors.InputError, match=message):
        make_model(spec, shape, 2, options)
