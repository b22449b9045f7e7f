"""Flatness against a closed form and against one network at a time."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polymode as pm
from cases import BY_NAME
from polymode.errors import InputError
from polymode.landscape import flatness
from polymode.landscape.flatness import _perturbed
from polymode.networks.members import call_module

NOISE = 0.5


def fitted(name, method=None, **options):
    case = BY_NAME[name]
    posterior = pm.fit(
        method or pm.methods.DeepEnsemble(2),
        case.double_factory,
        case.data(),
        likelihood=case.likelihood,
        epochs=2,
        progress=False,
        **options,
    )
    return case.data(30, seed=5), posterior


def linear(generator, dtype=torch.float64):
    """A linear regression, its data, and mean Σ_i w_i² x_i²/(2 s²)."""
    network = nn.Linear(5, 1, dtype=dtype)
    with torch.no_grad():
        network.weight.copy_(torch.randn(1, 5, generator=generator))
        network.bias.fill_(0.3)
    x = torch.randn(64, 5, generator=generator, dtype=dtype)
    y = x.sum(1) + torch.randn(64, generator=generator, dtype=dtype)
    weights = torch.cat([network.weight.detach()[0], network.bias.detach()])
    padded = torch.cat([x, torch.ones(64, 1, dtype=dtype)], 1)
    slope = float((weights * padded).square().sum(1).mean() / (2 * NOISE**2))
    posterior = pm.StackedModule([network]).posterior(pm.likelihoods.FixedGaussian(std=NOISE))
    return posterior, pm.ArrayData(x, y), slope


def test_a_linear_regression_in_closed_form(generator):
    posterior, data, slope = linear(generator)
    scales = (0.01, 0.1, 0.5)
    found = flatness(posterior, data, scales=scales, num_draws=1000)
    for row, scale in zip(found.rows(), scales, strict=True):
        assert row["scale"] == scale
        assert row["increase"] == pytest.approx(scale**2 * slope, abs=4 * row["increase_se"])
    assert found.rows()[-1]["increase_se"] < 0.15 * found.rows()[-1]["increase"]
    nll = -pm.evaluate(posterior, data)["log_density"]
    assert found.loss.tolist() == pytest.approx([nll])


def test_draws_are_the_same_for_all_scales(generator):
    """The loss is quadratic along a draw, so that third differences vanish: δ(3σ) − 3 δ(2σ) + 3 δ(σ) = 0."""
    posterior, data, _ = linear(generator)
    one, two, three = flatness(posterior, data, scales=(0.1, 0.2, 0.3)).increases[:, 0]
    torch.testing.assert_close(three, 3 * two - 3 * one)


@pytest.mark.parametrize("name", ["mlp", "convolution", "batch_norm_and_dropout"])
def test_no_perturbation_is_no_increase(name):
    data, posterior = fitted(name)
    found = flatness(posterior, data, scales=(0.0, 0.1), num_draws=3)
    assert torch.equal(found.increases[0], torch.zeros(2, 3, dtype=torch.float64))
    assert bool((found.increases[1] != 0).all())
    assert found.standard_error[0] == 0


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("name", ["mlp", "batch_norm_and_dropout", "convolution", "learned_noise"])
def test_every_draw_is_the_loss_of_its_network(name, backend):
    """One network at a time, in evaluation mode, with running statistics as they were."""
    data, posterior = fitted(name)
    posterior = posterior.with_backend(backend)
    found = flatness(posterior, data, scales=(0.05, 0.3), num_draws=2, seed=7)
    module, likelihood = posterior.network.module, posterior.network.likelihood
    assert not module.training
    trained = {name for name, _ in module.named_parameters()}

    def loss(weights):
        return -float(likelihood.log_prob(call_module(module, weights, data.inputs), data.targets).mean())

    for index, weights in enumerate(pm.unstack(next(posterior.draw()))):
        before = loss(weights)
        assert float(found.loss[index]) == pytest.approx(before, rel=1e-10)
        for place, scale in enumerate(found.scales):
            for draw in range(2):
                own = {name: tensor for name, tensor in weights.items() if name in trained}
                after = loss(weights | _perturbed(own, scale, 7, draw))
                assert float(found.increases[place, index, draw]) == pytest.approx(after - before, abs=1e-9)


def test_noise_is_in_proportion_to_each_weight():
    weights = {"a": torch.tensor([0.0, 1.0, -10.0]).repeat(50_000, 1)}
    moved = _perturbed(weights, 0.2, 0, 0)["a"] - weights["a"]
    error = 0.2 / math.sqrt(2 * 50_000)
    assert moved.std(0)[0] == 0
    assert float(moved.std(0)[1]) == pytest.approx(0.2, abs=4 * error)
    assert float(moved.std(0)[2]) == pytest.approx(2.0, abs=40 * error)


def test_blocks_and_loaders_change_nothing(monkeypatch):
    data, posterior = fitted("batch_norm")
    whole = flatness(posterior, data, num_draws=5)
    loader = DataLoader(TensorDataset(data.inputs, data.targets), batch_size=7)
    torch.testing.assert_close(flatness(posterior, loader, num_draws=5).increases, whole.increases)
    module = sys.modules[_perturbed.__module__]  # its name in the package is the function's
    monkeypatch.setattr(module, "BLOCK_MEMBERS", 3)
    torch.testing.assert_close(flatness(posterior, data, num_draws=5).increases, whole.increases)
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    torch.testing.assert_close(flatness(posterior, data, num_draws=5).increases, whole.increases)


def test_networks_are_judged_one_by_one_and_averaged():
    data, posterior = fitted("mlp")
    both = flatness(posterior, data, scales=(0.1,), num_draws=8)
    first = pm.Particles(posterior.network, blocks=[next(posterior.draw()).between(0, 1)])
    alone = flatness(first, data, scales=(0.1,), num_draws=8)
    torch.testing.assert_close(alone.increases[:, 0], both.increases[:, 0])
    torch.testing.assert_close(flatness(posterior, data, num_members=1).loss, alone.loss)
    assert float(both.mean) == pytest.approx(float(both.increases.mean()))
    errors = both.increases[0].std(1) / math.sqrt(8)
    assert float(both.standard_error) == pytest.approx(float(errors.square().sum().sqrt() / 2))
    assert math.isnan(flatness(posterior, data, num_draws=1).rows()[0]["increase_se"])


def test_draws_without_end_and_shared_weights():
    data, posterior = fitted("batch_norm", pm.methods.ECMP(where="norm", num_components=3))
    found = flatness(posterior, data, scales=(0.1,), num_draws=2, num_members=3)
    assert found.increases.shape == (1, 3, 2)
    weights = [block.member(i) for block in posterior.draw(3) for i in range(block.num_members)]
    plain = pm.Particles(posterior.network, blocks=[pm.stack(weights)])
    torch.testing.assert_close(flatness(plain, data, scales=(0.1,), num_draws=2).increases, found.increases)


def test_ignored_tokens_do_not_count():
    case = BY_NAME["tied_tokens"]
    data = case.data(6)
    targets = data.targets.clone()
    targets[:, 3:] = -1
    some = pm.ArrayData(data.inputs, targets, batch_size=3)
    likelihood = pm.likelihoods.Categorical(ignore_index=-1)
    posterior = pm.fit(
        pm.methods.Single(), case.double_factory, some, likelihood=likelihood, epochs=1, progress=False
    )
    assert float(flatness(posterior, some).loss) == pytest.approx(pm.evaluate(posterior, some)["nll"])
    nothing = pm.ArrayData(data.inputs, torch.full_like(targets, -1))
    with pytest.raises(InputError, match="no observations"):
        flatness(posterior, nothing)


def test_the_seed_decides_and_the_posterior_is_left_alone():
    data, posterior = fitted("batch_norm")
    before = next(posterior.draw()).clone()
    first = flatness(posterior, data)
    assert torch.equal(flatness(posterior, data).increases, first.increases)
    assert not torch.equal(flatness(posterior, data, seed=1).increases, first.increases)
    after = next(posterior.draw())
    assert all(torch.equal(after.stacked[name], tensor) for name, tensor in before.stacked.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scales": ()}, "at least one"),
        ({"scales": (-0.1,)}, "at least 0, got -0.1"),
        ({"scales": (math.nan,)}, "at least 0"),
        ({"scales": (True,)}, "at least 0"),
        ({"num_draws": 0}, "num_draws must be a whole number"),
        ({"num_members": 3}, "holds 1"),
    ],
)
def test_what_cannot_be_is_refused(options, words, generator):
    posterior, data, _ = linear(generator)
    with pytest.raises(InputError, match=words):
        flatness(posterior, data, **options)


def test_data_must_fit(generator):
    posterior, data, _ = linear(generator)
    with pytest.raises(InputError, match="Data must be"):
        flatness(posterior, data.inputs)
    with pytest.raises(InputError, match="floating point"):
        flatness(posterior, pm.ArrayData(data.inputs, torch.ones(64, dtype=torch.int64)))
