"""The parameter counts of Tables 1 and 3 of Chang et al. (2019), exactly."""

import pytest
from torch import nn

import polymode as pm
from polymode.methods import ECMP, EMP, DeepEnsemble, DropConnect, MCDropout, Single, parameter_counts

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


def test_a_method_that_refuses_the_network_says_why():
    found = parameter_counts(nn.Sequential(nn.LSTM(3, 4)), {"emp": EMP(), "single": Single()})
    assert found["emp"].parameters is None
    assert "selects no layer" in found["emp"].note
    assert found["single"].overhead == 0
