"""Adaptations change a network, keep the names of its tensors, and come back from what is stored of them."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from polymode.errors import InputError, UnknownName
from polymode.networks.adaptations import (
    ADAPTATIONS,
    Adaptation,
    Sampling,
    adapt,
    make_adaptation,
    register_adaptation,
)
from polymode.networks.surgery import prepare, tensors_of


@pytest.fixture(autouse=True)
def _registry():
    """What a test registers is forgotten after it."""
    known = dict(ADAPTATIONS)
    yield
    ADAPTATIONS.clear()
    ADAPTATIONS.update(known)


def net() -> nn.Module:
    return prepare(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 2)))


def defined(kind: str, change, default: Any = None) -> type[Adaptation]:
    """A registered adaptation of one field that does ``change(module)``."""

    @dataclass(frozen=True)
    class Changing(Adaptation):
        value: Any = field(default_factory=lambda: default)

        def apply(self, module):
            return change(module)

    Changing.kind, Changing.__qualname__ = kind, kind
    return register_adaptation(Changing)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling("draw", {"0": 0.25, "2": 0.5})])
def test_an_adaptation_comes_back_from_its_config(sampling):
    config = json.loads(json.dumps(sampling.config()))
    assert config["kind"] == "sampling"
    assert make_adaptation(config) == sampling


def test_only_registered_kinds_with_their_own_fields_are_made():
    with pytest.raises(
        InputError, match=r"'os:system' is not known: import the module .* Known: joined_heads, sampling"
    ):
        make_adaptation({"kind": "os:system", "command": "true"})
    with pytest.raises(InputError, match="The adaptation None is not known"):
        make_adaptation({})
    with pytest.raises(UnknownName, match=r"field of the adaptation 'sampling' 'mask'.*'masks'"):
        make_adaptation({"kind": "sampling", "mask": "draw"})
    with pytest.raises(UnknownName, match="masks 'both'"):
        make_adaptation({"kind": "sampling", "masks": "both"})


def test_there_is_one_adaptation_of_a_kind():
    first = defined("tests/one", lambda module: module)
    again = defined("tests/one", lambda module: module)  # as a cell of a notebook that is run again
    assert ADAPTATIONS["tests/one"] is again
    assert again is not first

    class Other(Sampling):
        kind: ClassVar[str] = "tests/one"

    with pytest.raises(InputError, match=r"Other is an adaptation of kind 'tests/one', as .* is"):
        register_adaptation(Other)
    assert ADAPTATIONS["tests/one"] is again


def test_adaptations_are_applied_in_order_under_the_seed():
    def noisy(module):
        module.register_buffer("noise", torch.randn(3))
        return module

    def doubled(module):
        module.noise.mul_(2)
        return module

    both = [defined("tests/noisy", noisy)(), defined("tests/doubled", doubled)()]
    modules = [net() for _ in range(3)]
    before = torch.get_rng_state()
    first, again, other = (adapt(m, both, seed).noise for m, seed in zip(modules, (5, 5, 6), strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first, 2 * torch.randn(3, generator=torch.Generator().manual_seed(5)))


def widened(module):
    module[0] = nn.Linear(8, 5)
    return module


def without_bias(module):
    module[2].bias = None
    return module


def test_shapes_may_change_and_names_may_not():
    names = tensors_of(net()).keys()
    wider = adapt(net(), [defined("tests/wider", widened)()], 0)
    assert tensors_of(wider).keys() == names
    assert wider[0].weight.shape == (5, 8)
    for change, lost in ((lambda m: nn.Sequential(nn.Identity(), m), "0.bias"), (without_bias, "2.bias")):
        message = f"'tests/lossy' renames or removes the tensor '{re.escape(lost)}' of the network"
        with pytest.raises(InputError, match=message):
            adapt(net(), [defined("tests/lossy", change)()], 0)
    with pytest.raises(InputError, match="'tests/nothing' returned NoneType; it must return the module"):
        adapt(net(), [defined("tests/nothing", lambda module: None)()], 0)


def test_what_could_not_be_stored_is_refused_before_it_is_applied():
    def fail(module):
        raise AssertionError

    kind = defined("tests/field", fail)
    with pytest.raises(InputError, match=r"has a field that is not a JSON value: .*set is not JSON"):
        adapt(net(), [kind({1, 2})], 0)
    with pytest.raises(InputError, match=r"value=\(1, 2\)\) is another adaptation after it was stored"):
        adapt(net(), [kind((1, 2))], 0)  # a list, when it is read

    @dataclass(frozen=True)
    class Unregistered(Adaptation):
        kind: ClassVar[str] = "tests/unregistered"

        def apply(self, module):
            raise AssertionError

    with pytest.raises(InputError, match=r"Unregistered .* is not registered: put @register_adaptation"):
        adapt(net(), [Unregistered()], 0)


def test_sampled_dropout_acts_in_evaluation_mode():
    """With every unit's mask z ~ Bernoulli(1 − p)/(1 − p), a layer of ones gives sums of them."""
    module = adapt(net(), [Sampling(added={"0": 0.5})], 0).eval()
    with torch.no_grad():
        module[0].weight.fill_(1.0), module[0].bias.zero_()
        hidden = module[0](torch.ones(4000, 4))[:, 0]
    # 2 · Binomial(4, ½): mean 4, variance 4; 4.5 standard errors of the mean, and of each frequency.
    assert abs(float(hidden.mean()) - 4) < 4.5 * (4 / 4000) ** 0.5
    for value, chance in ((0.0, 1 / 16), (2.0, 1 / 4), (4.0, 3 / 8), (6.0, 1 / 4), (8.0, 1 / 16)):
        share = float((hidden == value).double().mean())
        assert abs(share - chance) < 4.5 * (chance * (1 - chance) / 4000) ** 0.5
    with pytest.raises(InputError, match="There is no layer '7' with weights"):
        adapt(net(), [Sampling(added={"7": 0.5})], 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "An adaptation is a kind with its fields, got None"),
        ("joined_heads", "got 'joined_heads'"),
        ({"kind": []}, r"The adaptation \[\] is not known"),
        ({"kind": "joined_heads"}, "'joined_heads' cannot be made of {}"),
    ],
)
def test_values_that_are_no_adaptations_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        make_adaptation(config)
