"""The machinery of HMC; that it samples the posterior is shown in tests/statistical."""

import copy
import fnmatch

import pytest
import torch
from torch import nn

import polymode as pm
from polymode.errors import InputError
from polymode.methods import HMC
from polymode.networks.surgery import build
from polymode.seeds import derive_generator, draw_seed
from polymode.training.loop import batches as batches_module


def network():
    return pm.models.MLP(3, 1, (4,)).double()


def data(n=20, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = x[:, 0].sin() + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, y, batch_size=7)


GAUSS = pm.likelihoods.FixedGaussian(std=0.3)


def fitted(method, source=None, epochs=120, **options):
    options = {"likelihood": GAUSS, "progress": False, "backend": "vmap"} | options
    return pm.fit(method, network, source if source is not None else data(), epochs=epochs, **options)


def weights(posterior):
    blocks = list(posterior.draw())
    return {name: torch.cat([b.stacked[name] for b in blocks]) for name in blocks[0].stacked}


def assert_same(first, second, **tolerance):
    for name, tensor in weights(first).items():
        torch.testing.assert_close(tensor, weights(second)[name], **tolerance)


def test_one_trajectory_is_the_leapfrog_written_by_hand():
    """With a tiny step everything is accepted: the second sample is where one trajectory leads."""
    step, steps, std, temperature = 1e-3, 5, 0.8, 0.7
    method = HMC(
        1,
        std,
        num_samples=2,
        burn_in=0.01,
        descent=0,
        step_size=step,
        trajectory=step * steps * 0.999,
        jitter=0.0,
        temperature=temperature,
    )
    source = data()
    assert method.lengths(11) == (1, 2, 5)
    posterior = fitted(method, epochs=11)
    assert posterior.record["findings"][0]["transitions"] == 2
    found = weights(posterior)

    generator = derive_generator(0, "chain", 0)
    module = build(network, draw_seed(generator))
    draw_seed(generator)
    parameters = dict(module.named_parameters())
    names = sorted(parameters)

    def force():
        log_prob = GAUSS.log_prob(module(source.inputs), source.targets).sum()
        prior = sum(p.square().sum() for p in parameters.values()) / (2 * std**2)
        gradients = torch.autograd.grad((log_prob - prior) / temperature, [parameters[n] for n in names])
        return dict(zip(names, gradients, strict=True))

    for sample in range(2):
        sizes = [parameters[n].numel() for n in names]
        drawn = torch.randn(sum(sizes), generator=generator, dtype=torch.float64).split(sizes)
        momentum = {n: part.view(parameters[n].shape).clone() for n, part in zip(names, drawn, strict=True)}
        torch.rand((), generator=generator, dtype=torch.float64)  # jitter
        for _ in range(steps):
            for n, f in force().items():
                momentum[n] += step / 2 * std * f
            with torch.no_grad():
                for n in names:
                    parameters[n] += step * std * momentum[n]
            for n, f in force().items():
                momentum[n] += step / 2 * std * f
        torch.rand((), generator=generator, dtype=torch.float64)  # Metropolis
        for n in names:
            torch.testing.assert_close(found[n][sample], parameters[n].detach(), rtol=1e-9, atol=1e-11)


def test_data_sets_side_by_side_are_sampled_as_if_alone():
    first, second = data(20), data(13, seed=2)
    method = HMC(2, 0.7, num_samples=5)
    together = fitted(method, [first, second])
    for source, posterior in zip((first, second), together, strict=True):
        alone = fitted(method, source)
        assert_same(posterior, alone, rtol=1e-7, atol=1e-9)
        for one, other in zip(posterior.record["findings"], alone.record["findings"], strict=True):
            assert one == pytest.approx(other)


def test_a_large_data_set_is_passed_over_in_pieces(monkeypatch):
    method = HMC(2, 0.7, num_samples=5)
    whole = fitted(method)
    monkeypatch.setattr(batches_module, "FULL_BYTES", 8 * 3 * 7)  # seven rows
    pieces = fitted(method)
    assert pieces.record["member_epochs"] == whole.record["member_epochs"] == 240
    assert_same(whole, pieces, rtol=1e-6, atol=1e-8)


def test_weights_of_examples_count_as_multiplicities():
    source = data(10)
    twice = pm.ArrayData(torch.cat([source.inputs] * 2), torch.cat([source.targets] * 2), batch_size=20)
    weighted = pm.ArrayData(source.inputs, source.targets, weights=torch.full((10,), 2.0), batch_size=10)
    # The initial step size depends on the number of rows: give it.
    method = HMC(1, 0.7, num_samples=4, descent=0, step_size=0.05)
    assert_same(fitted(method, twice, 40), fitted(method, weighted, 40), rtol=1e-6, atol=1e-8)


def test_the_step_size_meets_the_target_and_every_chain_has_its_own():
    found = {}
    # Over six seeds the mean rate was 0.145 above 0.6 (standard deviation 0.022: the number of leaps is
    # rounded up) and 0.006 above 0.9 (0.015): that much, and four standard deviations.
    for target, tolerance in ((0.6, 0.24), (0.9, 0.07)):
        posterior = fitted(HMC(8, 0.7, num_samples=20, target_acceptance=target, scale="prior"), epochs=2500)
        findings = posterior.record["findings"]
        assert len({chain["step_size"] for chain in findings}) == 8
        mean = sum(chain["acceptance"] for chain in findings) / 8
        assert abs(mean - target) < tolerance
        found[target] = (sum(chain["step_size"] for chain in findings) / 8, mean)
    assert found[0.6][0] > 1.2 * found[0.9][0]
    assert found[0.6][1] < found[0.9][1]


def test_a_chain_does_not_depend_on_how_many_run_beside_it():
    """Chains decide at different times, each for itself, and find scales of their own."""
    method = {"prior_std": 0.7, "num_samples": 5, "descent": 0, "burn_in": 0.7}
    one, three = (fitted(HMC(number, **method), epochs=200) for number in (1, 3))
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(three)[name][:5], rtol=1e-5, atol=1e-7)
    alone, beside = (posterior.record["findings"][0] for posterior in (one, three))
    assert alone == pytest.approx(beside)
    assert alone["scale"] == "variances"


def test_chains_begin_at_draws_of_the_prior():
    """Steps are too short to move: samples are the draws."""
    widths = {"*.bias": 2.0, "*": 0.5}
    method = HMC(
        3, widths, num_samples=1, burn_in=0.01, start="prior", step_size=1e-12, trajectory=1e-12, jitter=0.0
    )
    posterior = fitted(method, epochs=2)
    found = weights(posterior)
    for chain in range(3):
        generator = derive_generator(0, "chain", chain)
        draw_seed(generator)  # of the network, whose weights the draws replace
        for name in sorted(found):
            width = next(w for pattern, w in widths.items() if fnmatch.fnmatchcase(name, pattern))
            shape = found[name][chain : chain + 1].shape
            drawn = width * torch.randn(shape, generator=generator, dtype=torch.float64)
            torch.testing.assert_close(found[name][chain], drawn[0], rtol=0, atol=1e-9)


def test_chains_say_where_they_began():
    def findings(method, **options):
        posterior = fitted(method, epochs=60, **options)
        phases = {entry["phase"] for entry in posterior.record["history"]}
        [chain] = posterior.record["findings"]
        return chain["start"], "descent" in phases

    few = {"num_chains": 1, "num_samples": 2, "step_size": 0.01}
    assert findings(HMC(**few)) == ("optima of a descent of 6 epochs", True)
    assert findings(HMC(**few, descent=0)) == ("the network's initialisation", False)
    assert findings(HMC(**few, start="prior")) == ("draws from the prior", False)
    given = fitted(pm.methods.DeepEnsemble(1), epochs=1)
    for start in ("optimum", "prior"):
        assert findings(HMC(**few, start=start, descent=0), initial=given)[0] == "networks that were given"
    continued = findings(HMC(**few), initial=given)
    assert continued == ("networks that were given, after 6 epochs of descent", True)


def test_a_diverging_chain_stays_where_it_is_and_says_so():
    method = HMC(2, 0.7, num_samples=4, descent=0, step_size=1e6, burn_in=0.02)
    with pytest.warns(UserWarning, match="accepts 0% of its proposals .* not to be trusted"):
        posterior = fitted(method, epochs=50)
    for chain in posterior.record["findings"]:
        assert chain["divergences"] == chain["transitions"] > 0
        assert chain["acceptance"] == 0
    for tensor in weights(posterior).values():
        for rows in tensor.unflatten(0, (2, 4)):
            assert torch.equal(rows, rows[:1].expand_as(rows))


def test_lengths_add_up_to_the_passes_that_were_given():
    for epochs in (2, 3, 10, 77, 1000):
        burn_in, kept, between = HMC(num_samples=30).lengths(epochs)
        assert burn_in >= 1
        assert kept >= 1
        assert burn_in + kept * between == epochs


@pytest.mark.parametrize("prior", [{"*": 0.7}, {"*.bias": 0.7, "*.weight": 0.7}], ids=["all", "by kind"])
def test_widths_by_name_are_those_of_one_number(prior):
    assert_same(
        fitted(HMC(2, prior, num_samples=3), epochs=60), fitted(HMC(2, 0.7, num_samples=3), epochs=60)
    )


def test_every_weight_is_moved_in_units_of_its_own_width():
    """Under a prior alone (data that say nothing) samples have each weight's own width."""
    noise = pm.likelihoods.FixedGaussian(std=1e4)
    widths = {"1.weight": 0.2, "*.bias": 2.0, "*": 0.7}
    posterior = fitted(HMC(300, widths, num_samples=5, descent=0), epochs=400, likelihood=noise)
    for name, tensor in weights(posterior).items():
        width = next(w for pattern, w in widths.items() if fnmatch.fnmatchcase(name, pattern))
        error = 4.5 / (2 * 300 * tensor[0].numel()) ** 0.5  # as if samples of a chain were one
        assert tensor.std().item() == pytest.approx(width, rel=error), name


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        source = data()
        yield from zip(source.inputs, source.targets, strict=True)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (HMC(1), "cannot be read again"),
        (pm.methods.Anchored(2, perturb_data=True), "does not tell them apart"),
    ],
    ids=["hmc", "anchored"],
)
def test_data_that_cannot_be_read_again_are_refused(method, message):
    loader = torch.utils.data.DataLoader(Stream(), batch_size=5)
    with pytest.raises(InputError, match=message):
        pm.fit(
            method,
            network,
            pm.LoaderData(loader, num_examples=20),
            likelihood=GAUSS,
            epochs=4,
            progress=False,
        )


def test_frozen_batch_norm_is_no_obstacle():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    with pytest.raises(InputError, match=r"BatchNorm \('1'\)"):
        pm.fit(HMC(1), module, data(), likelihood=GAUSS, epochs=10, progress=False)
    frozen = copy.deepcopy(module)
    frozen[1].eval()
    posterior = pm.fit(HMC(1, num_samples=2), frozen, data(), likelihood=GAUSS, epochs=10, progress=False)
    assert posterior.num_members == 2


def test_augmented_images_are_refused():
    images = pm.ArrayData(
        torch.zeros(4, 1, 6, 6), torch.zeros(4, dtype=torch.int64), augment=[pm.data.RandomFlip()]
    )
    with pytest.raises(InputError, match="Leave augment out"):
        pm.fit(
            HMC(1),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)),
            images,
            likelihood="categorical",
            epochs=4,
            progress=False,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_chains": 0}, "num_chains must be a whole number"),
        ({"prior_std": 0}, "prior_std must be a positive number"),
        ({"step_size": -1.0}, "step_size must be a positive number, got -1.0"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"target_acceptance": 1.0}, "target_acceptance lies between 0 and 1, got 1.0"),
        ({"burn_in": 1.5}, "burn_in lies between 0 and 1"),
        ({"jitter": 1.0}, "jitter must be at least 0 and below 1"),
        ({"start": "optima"}, "Unknown start 'optima'. Did you mean 'optimum'"),
        ({"scale": "variance"}, "Unknown scale 'variance'. Did you mean 'variances'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        HMC(**options)


def test_one_pass_is_too_few():
    with pytest.raises(InputError, match="at least 2 gradient passes, got 1"):
        fitted(HMC(), epochs=1)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_weights_of_several_types_move_as_those_of_one(backend):
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1).double()

        def forward(self, x):
            return self.second(torch.tanh(self.first(x.float())).double())

    def double():
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()

    source = pm.ArrayData(torch.randn(20, 3), torch.randn(20, 1).double(), batch_size=20)
    method = HMC(2, 0.7, num_samples=3, descent=0, step_size=0.01, burn_in=0.2)
    options = {"likelihood": GAUSS, "epochs": 20, "progress": False, "backend": backend}
    found = weights(pm.fit(method, Mixed, source, **options))
    expected = weights(pm.fit(method, double, source, **options))
    assert found["first.weight"].dtype == torch.float32
    for name, other in (("first.weight", "0.weight"), ("second.bias", "2.bias")):
        torch.testing.assert_close(found[name].double(), expected[other], rtol=2e-3, atol=2e-4)
