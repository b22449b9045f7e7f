"""The parameter counts of Tables 1 and 3 of Chang et al. (2019), exactly."""

import re

import pytest
import torch
from torch import nn

import polymode as pm
from contract.sketches import Mimo
from polymode.methods import (
    ECMP,
    EMP,
    HMC,
    SWAG,
    DeepEnsemble,
    DropConnect,
    LatePhase,
    MCDropout,
    SequentialAnchored,
    Single,
    network_count,
    parameter_counts,
)

METHODS = {
    "single": Single(),
    "dropout": MCDropout(),
    "dropconnect": DropConnect(),
    "emp": EMP(),
    "ecmp": ECMP(),
    "norm": ECMP(where="norm"),
    "ensemble": DeepEnsemble(5),
}


def counts(module: nn.Module, **options) -> dict[str, int | None]:
    return {name: count.parameters for name, count in parameter_counts(module, METHODS, **options).items()}


def test_resnet18():
    found = counts(pm.models.resnet18())
    assert found == {
        "single": 11_689_512,
        "dropout": 11_689_512,
        "dropconnect": 11_689_512,
        "emp": 13_779_912,
        "ecmp": 13_779_912,
        "norm": 11_689_512 + 38_400,
        "ensemble": 58_447_560,
    }
    overheads = parameter_counts(pm.models.resnet18(), METHODS)
    assert round(100 * overheads["emp"].overhead, 1) == 17.9
    assert overheads["norm"].overhead == pytest.approx(0.003285, abs=5e-7)


def test_pyramidnet():
    found = counts(pm.models.pyramidnet110(num_classes=100))
    assert found["single"] == 28_511_307
    assert found["emp"] == found["ecmp"] == 28_825_299
    assert found["ensemble"] == 142_556_535


def test_the_fully_connected_network_in_both_countings():
    module = pm.models.MLP(100, 100, (100,) * 99, batch_norm="after", output_bias=False)
    ours = counts(module)
    assert (ours["single"], ours["emp"]) == (1_029_700, 1_148_900)
    papers = counts(module, count_norm=False)
    assert (papers["single"], papers["emp"], papers["ecmp"]) == (1_009_900, 1_129_100, 1_129_100)
    assert papers["ensemble"] == 5_049_500


@pytest.mark.parametrize(
    ("inputs", "outputs", "width", "once", "patched"),
    [
        (13, 1, 50, 877, 1381),
        (8, 1, 50, 617, 1081),
        (8, 2, 50, 668, 1132),
        (16, 2, 50, 1084, 1612),
        (4, 1, 50, 409, 841),
        (9, 1, 100, 1319, 2191),
        (11, 1, 50, 773, 1261),
        (6, 1, 50, 513, 961),
        (90, 1, 100, 9581, 11101),
    ],
)
def test_regression_networks(inputs, outputs, width, once, patched):
    module = pm.models.MLP(inputs, outputs, (width,), batch_norm="after", input_norm=True, norm_scale=0.2)
    assert sum(p.numel() for p in module.parameters()) == once
    assert ECMP(where="norm").num_parameters(module) == patched


def test_a_prediction_multiplies_in_every_pass():
    methods = METHODS | {
        "late": LatePhase(7),
        "members": LatePhase(7, keep_members=True),
        "nested": DeepEnsemble(2, of=SWAG(num_draws=3)),
        "sampler": HMC(4, num_samples=5),
        "sequence": SequentialAnchored(2),
    }
    found = parameter_counts(pm.models.resnet20(), methods, inputs=torch.zeros(1, 3, 32, 32))
    passes = {"single": 1, "ensemble": 5, "late": 1, "members": 7, "nested": 6, "sampler": 20}
    for name, count in found.items():
        assert count.multiplications == (40_813_184 * passes[name] if name in passes else None), name
    assert all(count.multiplications is None for count in parameter_counts(nn.Linear(3, 2), METHODS).values())


def test_a_pass_goes_through_what_a_method_makes_of_the_network():
    """MIMO (a sketch) widens the first and the last layer."""
    module = pm.models.MLP(4, 3, (6,))
    [found] = parameter_counts(module, {"mimo": Mimo(heads=2)}, inputs=torch.zeros(1, 4)).values()
    assert found.multiplications == 2 * (4 * 6 + 6 * 3)


def test_a_network_is_counted_in_two_ways():
    module, images = pm.models.resnet32(), torch.zeros(1, 3, 32, 32)
    found = network_count(module, images)
    assert (found.parameters, found.multiplications, found.note) == (466_906, 69_124_736, "")
    assert (found.accounting.parameters, found.accounting.multiplications) == (461_882, 68_862_602)
    norms = sum(p.numel() for p in module.parameters() if p.ndim == 1) - 10
    assert network_count(module, images, count_norm=False).parameters == 466_906 - norms


@pytest.mark.parametrize(
    ("module", "inputs", "multiplied", "note"),
    [
        (nn.Linear(4, 2), torch.zeros(1, 3), None, r"This Linear cannot run on inputs \[1, 3\]"),
        (nn.Linear(4, 2), None, None, "the shape of an example, which is not known"),
        (nn.LSTM(3, 4, batch_first=True), torch.zeros(1, 5, 3), 560, "No Linear layer or convolution"),
    ],
)
def test_a_network_that_cannot_be_counted_says_why(module, inputs, multiplied, note):
    found = network_count(module, inputs)
    assert found.parameters == sum(p.numel() for p in module.parameters())
    assert found.multiplications == multiplied
    assert found.accounting is None
    assert re.search(note, found.note)


def test_a_method_that_refuses_the_network_says_why():
    found = parameter_counts(nn.Sequential(nn.LSTM(3, 4)), {"emp": EMP(), "single": Single()})
    assert found["emp"].parameters is None
    assert "selects no layer" in found["emp"].note
    assert found["single"].overhead == 0
