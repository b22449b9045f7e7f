"""Widths of priors: one number, by name, by fan-in."""

import math

import pytest
import torch
from torch import nn

from polymode.errors import InputError
from polymode.networks.surgery import trainable_names
from polymode.weights.priors import FanIn, anchored_prior, gaussian_penalty, prior_stds


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 2)
        self.temperature = nn.Parameter(torch.zeros(()))


def stds(prior):
    module = Net()
    return prior_stds(prior, module, trainable_names(module))


def test_one_number_for_all():
    found = stds(0.4)
    assert set(found.values()) == {0.4}
    assert "conv.weight" in found
    assert "temperature" in found


def test_fan_in_counts_the_inputs_of_each_output():
    found = stds(FanIn(2.0))
    assert found["conv.weight"] == pytest.approx(2 / math.sqrt(27))
    assert found["head.weight"] == pytest.approx(2 / math.sqrt(8))
    assert (
        found["embedding.weight"] == found["head.bias"] == found["norm.weight"] == found["temperature"] == 2.0
    )


def test_the_first_pattern_that_fits_counts():
    found = stds({"*.bias": 1.0, "head.*": 0.2, "*": 0.3})
    assert (found["head.bias"], found["head.weight"], found["conv.weight"]) == (1.0, 0.2, 0.3)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (0, "prior_std must be a positive number, got 0"),
        (-1.0, "prior_std must be a positive number, got -1.0"),
        ({}, "prior_std has no entry"),
        ({"*": 0.0}, r"prior_std of '\*' must be a positive number"),
        ({"head.*": 1.0}, "fits the weight 'conv.bias'"),
        ({"haed.weight": 1.0, "*": 1.0}, "Did you mean 'head.weight'"),
    ],
)
def test_bad_widths(prior, message):
    with pytest.raises(InputError, match=message):
        stds(prior)


def test_an_anchored_prior_is_centred_at_the_anchor_with_each_width():
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    own = {"anchor": {"a": torch.tensor([0.5, 2.0]), "b": torch.tensor([[1.0]])}}
    found = anchored_prior({"a": 0.5, "b": 2.0})(weights, own)
    assert found.item() == pytest.approx(0.25 / 0.5 + 4 / 8)
    assert gaussian_penalty(weights, {"a": 0.5, "b": 2.0}).item() == pytest.approx(5 / 0.5 + 9 / 8)
