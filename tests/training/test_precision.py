"""Double precision by option: the numbers are those of a model and data in 64 bits."""

import numpy as np
import pytest
import torch

import polymode as pm
from cases import redrawn
from polymode.errors import InputError
from tolerances import PASS, assert_equal_up_to_rounding

METHODS = [pm.methods.Anchored(2, optimizer=pm.Optimizer("SGD", lr=0.1)), pm.methods.HMC(2, num_samples=3)]


def data():
    generator = torch.Generator().manual_seed(0)
    return pm.ArrayData(
        torch.randn(20, 4, generator=generator), torch.randint(3, (20,), generator=generator), batch_size=8
    )


def network():
    return pm.models.MLP(4, 3, (6,))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_double_precision_is_that_of_a_double_model_on_double_data(method, backend, tmp_path):
    options = {"likelihood": "categorical", "epochs": 6, "progress": False, "backend": backend}
    by_option = pm.fit(method, network, data(), precision="double", run_dir=tmp_path / "run", **options)
    source = data()
    double = pm.ArrayData(source.inputs.double(), source.targets, batch_size=8)
    by_hand = pm.fit(method, lambda: network().double(), double, **options)
    for one, other in zip(by_option.draw(), by_hand.draw(), strict=True):
        for name, tensor in one.stacked.items():
            assert tensor.dtype == torch.float64
            assert_equal_up_to_rounding(tensor, other.stacked[name])
    loaded = pm.load_posterior(tmp_path / "run", network)
    predictive = loaded.predict(source.inputs)  # 32 bits in, 64 bits out
    assert predictive.mean.dtype == torch.float64
    assert_equal_up_to_rounding(predictive.mean, by_hand.predict(double.inputs).mean, PASS)
    assert np.isfinite(pm.evaluate(loaded, source)["nll"])


@redrawn
def test_the_users_module_stays_in_single_precision():
    module = network()
    pm.fit(METHODS[0], module, data(), likelihood="categorical", epochs=1, progress=False, precision="double")
    assert all(p.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_inputs_take_the_type_of_the_weights(backend, dtype):
    """Tensors of another precision than the network's are trained on and predicted as those of its own."""
    source, method = data(), METHODS[0]
    other = source.inputs.to(dtype)
    options = {"likelihood": "categorical", "epochs": 2, "progress": False, "backend": backend}
    expected = pm.fit(method, network, pm.ArrayData(other.float(), source.targets, batch_size=8), **options)
    given = pm.ArrayData(other, source.targets, batch_size=8)
    posterior = pm.fit(method, network, given, validation=given, **options)
    for one, two in zip(posterior.draw(), expected.draw(), strict=True):
        assert all(torch.equal(tensor, two.stacked[name]) for name, tensor in one.stacked.items())
    predictive = posterior.predict(other)
    assert predictive.mean.dtype == torch.float32
    assert torch.equal(predictive.mean, posterior.predict(other.float()).mean)
    torch.testing.assert_close(
        posterior.log_prob(other, source.targets), posterior.log_prob(other.float(), source.targets)
    )
    assert np.isfinite(pm.evaluate(posterior, given)["nll"])


def test_unknown_precisions():
    with pytest.raises(InputError, match="Unknown precision 'half'"):
        pm.fit(METHODS[0], network, data(), likelihood="categorical", epochs=1, precision="half")


def test_epochs_or_a_budget():
    method = pm.methods.Anchored(2, optimizer=pm.Optimizer("SGD", lr=0.1))
    posterior = pm.fit(method, network, data(), likelihood="categorical", budget=6, progress=False)
    assert posterior.record["epochs"] == 3
    assert posterior.record["member_epochs"] == pytest.approx(6)
    with pytest.raises(InputError, match=r"epochs=\.\.\. of each chain, or budget=\.\.\. member-epochs"):
        pm.fit(method, network, data(), likelihood="categorical")
    with pytest.raises(InputError, match=r"epochs=3 and budget=6 are two ways .* leave one out"):
        pm.fit(method, network, data(), likelihood="categorical", epochs=3, budget=6)
    with pytest.raises(InputError, match="budget must be a positive number, got 0"):
        pm.fit(method, network, data(), likelihood="categorical", budget=0)


def test_numbers_too_small_to_be_normal_are_zero_in_training_only():
    """They are slow: moments that decay to them made a training about three times slower."""

    def tiny() -> float:
        return (torch.tensor([1e-39]) * 0.5).item()

    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush them")
    seen = []
    pm.fit(
        METHODS[0],
        network,
        data(),
        likelihood="categorical",
        epochs=1,
        progress=False,
        observer=lambda epoch: seen.append(tiny()),
    )
    assert seen == [0.0]
    assert tiny() > 0
