"""What is compiled gives what vmap gives: for every method, with every kind of network."""

import warnings

import pytest
import torch

from cases import BY_NAME, NETWORKS
from contract.registry import accepts
from contract.test_methods import predictions, run, weights
from polymode.errors import CannotVectorise
from polymode.methods import METHODS
from polymode.networks import recording
from tolerances import assert_equal_up_to_rounding

REALLY_COMPILED = ("deep_ensemble", "mean_field", "microcanonical")


def pairs(networks):
    """Every method with each of some networks that it accepts."""
    found = [(name, network) for network in networks for name in METHODS if accepts(name, network)]
    return pytest.mark.parametrize(("name", "network"), found)


@pytest.fixture
def recorded_only(monkeypatch):
    """Graphs go through all of torch.compile's stages but the last: their operations run one by one."""
    monkeypatch.setattr(recording, "COMPILER", "aot_eager")


def compare(name, network):
    case = BY_NAME[network]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that nothing was compiled
        try:
            vmap = run(name, case, backend="vmap")
        except CannotVectorise:
            pytest.skip("vmap cannot run it")
        compiled = run(name, case, backend="compiled")
    assert compiled.record["backend"] == "compiled"
    for found, expected in ((weights(compiled), weights(vmap)),):
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-9)
    assert_equal_up_to_rounding(predictions(compiled, case).mean, predictions(vmap, case).mean)


@pairs(["mlp"])
def test_a_compiled_step_is_the_step(name, network, recorded_only):
    compare(name, network)


@pytest.mark.slow
@pairs([case.name for case in NETWORKS if case.name != "mlp"])
def test_a_compiled_step_is_the_step_on_every_network(name, network, recorded_only):
    compare(name, network)
