"""The machinery of microcanonical chains.

Their kernel is tested in tests/samplers, and that they sample the posterior in tests/statistical.
"""

import math

import pytest
import torch
from torch import nn

import polymode as pm
from polymode.errors import InputError
from polymode.methods import HMC, Microcanonical
from polymode.networks.surgery import build
from polymode.posteriors.particles import StoredMembers
from polymode.seeds import derive_generator, draw_seed
from polymode.training.loop import batches as batches_module


def network():
    return pm.models.MLP(3, 1, (4,)).double()


def data(n=20, seed=1, batch_size=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = x[:, 0].sin() + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, y, batch_size=batch_size)


GAUSS = pm.likelihoods.FixedGaussian(std=0.3)


def sampler(*arguments, **options):
    """A method whose steps are long and in units of the prior, unless told otherwise."""
    return Microcanonical(*arguments, **{"energy_variance": 0.1, "scale": "prior"} | options)


def fitted(method, source=None, epochs=120, model=network, **options):
    options = {"likelihood": GAUSS, "progress": False, "backend": "vmap"} | options
    return pm.fit(method, model, source if source is not None else data(), epochs=epochs, **options)


def weights(posterior):
    blocks = list(posterior.draw())
    return {name: torch.cat([b.stacked[name] for b in blocks]) for name in blocks[0].stacked}


def assert_same(first, second, **tolerance):
    tolerance = tolerance or {"rtol": 1e-7, "atol": 1e-9}
    for name, tensor in weights(first).items():
        torch.testing.assert_close(tensor, weights(second)[name], **tolerance)


def numbers(finding):
    """What a chain says about itself in numbers."""
    return {name: value for name, value in finding.items() if name != "start"}


def assert_same_findings(first, second):
    for one, other in zip(first.record["findings"], second.record["findings"], strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-6)
        assert one["start"] == other["start"]


UNTRUSTED = "ignore:A microcanonical chain is not to be trusted"  # by far too few steps


@pytest.fixture
def short_measurements(monkeypatch):
    """Scales are found in runs that are as short as those of tests."""
    monkeypatch.setattr("polymode.methods.microcanonical.LEAST_MEASURED", 3)


# --- the algorithm ----------------------------------------------------------------------------------

FIRST = 0.1931833275037836  # of McLachlan's palindrome


def by_hand(source, stds, method, chain, looks):
    """The formulas, one weight vector and one number after another: states after each step, and Σ ΔE²/d.

    looks: for every step, the rows that its gradients are of.
    """
    generator = derive_generator(0, "chain", chain)
    module = build(network, draw_seed(generator))
    parameters = dict(sorted(module.named_parameters()))
    theta = torch.cat([p.detach().flatten() for p in parameters.values()])
    d = len(theta)
    u = torch.randn(1, d, generator=generator, dtype=torch.float64)[0]
    u = u / u.norm()
    draw_seed(generator)  # for the noise of networks that have some
    s = torch.cat([torch.full((p.numel(),), stds(n), dtype=torch.float64) for n, p in parameters.items()])
    step, length, temperature = method.step_size, method.length, method.temperature

    def shaped(vector):
        parts = vector.split([p.numel() for p in parameters.values()])
        return {n: t.view(p.shape) for (n, p), t in zip(parameters.items(), parts, strict=True)}

    def look(rows):
        here = theta.clone().requires_grad_()
        outputs = torch.func.functional_call(module, shaped(here), (source.inputs[rows],))
        log_likelihood = GAUSS.log_prob(outputs, source.targets[rows]).mean() * source.num_examples
        value = (log_likelihood - (here / s).square().sum() / 2) / temperature
        return value.item(), torch.autograd.grad(value, here)[0]

    def turn(gradient, time):
        nonlocal u, kinetic
        g = s * gradient
        e, delta = g / g.norm(), time * g.norm() / (d - 1)
        zeta, c = torch.exp(-delta), u @ e
        u = e * (1 - zeta) * (1 + zeta + c * (1 - zeta)) + 2 * zeta * u
        u = u / u.norm()
        kinetic += (d - 1) * (delta - math.log(2) + torch.log(1 + c + (1 - c) * zeta**2)).item()

    states, errors = [], 0.0
    for rows in looks:
        noise = torch.randn(d, generator=generator, dtype=torch.float64)
        u = u + math.sqrt((math.exp(2 * step / length) - 1) / d) * noise
        u = u / u.norm()
        kinetic = 0.0
        before, gradient = look(rows)
        turn(gradient, FIRST * step)
        theta = theta + step / 2 * s * u
        turn(look(rows)[1], (1 - 2 * FIRST) * step)
        theta = theta + step / 2 * s * u
        after, gradient = look(rows)
        turn(gradient, FIRST * step)
        errors += (kinetic - (after - before)) ** 2 / d
        states.append(shaped(theta))
    return states, errors


@pytest.mark.parametrize("minibatch", [False, True], ids=["all data", "minibatches"])
def test_steps_are_those_written_by_hand(minibatch):
    """Two chains, widths that differ, another temperature; of 6 or of 9 steps 3 are kept."""
    source = data()
    method = sampler(
        2,
        {"*.bias": 1.3, "*": 0.6},
        num_samples=3,
        warm_up=0.0,
        descent=0,
        step_size=0.4,
        length=1.7,
        minibatch=minibatch,
        temperature=0.7,
    )
    epochs = 9 if minibatch else 13
    assert method.lengths(epochs) == ((0, 0, 3, 1) if minibatch else (0, 0, 3, 2))
    posterior = fitted(method, source, epochs)
    found = weights(posterior)
    for chain in range(2):
        looks = [torch.arange(20)] * 6
        if minibatch:
            orders = [
                torch.randperm(20, generator=derive_generator(0, "order", chain, e, 20)) for e in range(3)
            ]
            looks = [rows for order in orders for rows in order.split(7)]
        states, errors = by_hand(source, lambda n: 1.3 if n.endswith("bias") else 0.6, method, chain, looks)
        for sample, state in enumerate(states[len(looks) // 3 - 1 :: len(looks) // 3]):
            for name, tensor in state.items():
                torch.testing.assert_close(found[name][3 * chain + sample], tensor, rtol=1e-9, atol=1e-11)
        finding = posterior.record["findings"][chain]
        assert finding["steps"] == len(looks)
        assert finding["divergences"] == 0
        assert finding["energy_variance"] == pytest.approx(errors / len(looks), rel=1e-6)
        assert finding["energy_variance"] > 1e-6  # and not of rounding
        assert (finding["step_size"], finding["length"]) == (0.4, 1.7)


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.filterwarnings(UNTRUSTED)
def test_one_minibatch_of_all_examples_is_the_whole_data_set():
    """Warm-up included: what it finds does not depend on how the gradients are put together."""
    options = {"num_samples": 4, "warm_up": 0.6, "descent": 0, "first_energy_variance": 0.1}
    options |= {"scale": "variances"}
    whole = fitted(sampler(2, 0.7, **options), epochs=1 + 2 * 80)
    batch = fitted(sampler(2, 0.7, **options, minibatch=True), data(batch_size=20), epochs=3 * 80)
    assert [chain["steps"] for chain in whole.record["findings"]] == [32, 32]
    assert_same(whole, batch, rtol=1e-6, atol=1e-8)
    assert_same_findings(whole, batch)


# --- chains beside each other -----------------------------------------------------------------------


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.parametrize("scale", ["prior", "variances"])
@pytest.mark.filterwarnings(UNTRUSTED)
def test_data_sets_side_by_side_are_sampled_as_if_alone(scale):
    first, second = data(20), data(13, seed=2)
    method = sampler(2, 0.7, num_samples=5, scale=scale)
    together = fitted(method, [first, second])
    for source, posterior in zip((first, second), together, strict=True):
        alone = fitted(method, source)
        assert_same(posterior, alone)
        assert_same_findings(posterior, alone)


@pytest.mark.filterwarnings(UNTRUSTED)
def test_data_sets_of_several_minibatches_are_sampled_as_if_alone(monkeypatch):
    """Three minibatches an epoch beside one: what is measured over some steps counts those of each data set.

    Where these numbers have a least value, a short run does not show it: they are made small.
    """
    for name, value in (("LEAST_MEASURED", 2), ("LEAST_MEMORY", 2), ("TRACED", (6, 100))):
        monkeypatch.setattr(f"polymode.methods.microcanonical.{name}", value)
    first, second = data(20), data(6, seed=2)
    method = sampler(2, 0.7, num_samples=3, minibatch=True, scale="variances")
    together = fitted(method, [first, second], 90)
    for source, posterior in zip((first, second), together, strict=True):
        alone = fitted(method, source, 90)
        assert posterior.record["member_epochs"] == alone.record["member_epochs"] == 180
        assert_same(posterior, alone, rtol=1e-6, atol=1e-8)
        assert_same_findings(posterior, alone)


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.filterwarnings(UNTRUSTED)
def test_a_chain_does_not_depend_on_how_many_run_beside_it():
    options = {"num_samples": 5, "scale": "variances"}
    one, three = (fitted(sampler(n, 0.7, **options)) for n in (1, 3))
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(three)[name][:5], rtol=1e-7, atol=1e-9)
    alone, beside = (numbers(posterior.record["findings"][0]) for posterior in (one, three))
    assert alone == pytest.approx(beside, rel=1e-6)
    assert len({chain["step_size"] for chain in three.record["findings"]}) == 3  # each has its own
    assert len({chain["length"] for chain in three.record["findings"]}) == 3


def test_a_large_data_set_is_passed_over_in_pieces(monkeypatch):
    method = sampler(2, 0.7, num_samples=5)
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
    method = sampler(1, 0.7, num_samples=4, descent=0, step_size=0.3)
    assert_same(fitted(method, twice, 61), fitted(method, weighted, 61), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_weights_of_several_types_move_as_those_of_one(backend):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1).double()

        def forward(self, x):
            return self.second(torch.tanh(self.first(x.float())).double())

    def double():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    source = data()
    method = sampler(2, 0.7, num_samples=3, descent=0, step_size=0.1, warm_up=0.0)
    found = weights(fitted(method, source, 13, Mixed, backend=backend))
    expected = weights(fitted(method, source, 13, double, backend=backend))
    assert found["first.weight"].dtype == torch.float32
    for name, other in (("first.weight", "0.weight"), ("second.bias", "2.bias")):
        torch.testing.assert_close(found[name].double(), expected[other], rtol=2e-3, atol=2e-4)


# --- passes -----------------------------------------------------------------------------------------


def spent(method, epochs):
    """Passes that the lengths add up to."""
    descent, warm_up, kept, between = method.lengths(epochs)
    return descent + (0 if method.minibatch else 1) + method.step_cost * (warm_up + kept * between)


@pytest.mark.parametrize("minibatch", [False, True])
@pytest.mark.parametrize("warm_up", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("num_samples", [1, 30, 10_000])
def test_lengths_add_up_to_the_passes_that_were_given(minibatch, warm_up, num_samples):
    for descent in (0, 1, 100):
        method = sampler(num_samples=num_samples, warm_up=warm_up, descent=descent, minibatch=minibatch)
        for epochs in (*range(3, 60), 100, 333, 1000, 4001):
            first, warm, kept, between = method.lengths(epochs)
            assert min(first, warm) >= 0
            assert 1 <= kept == method.kept_samples(epochs) <= num_samples
            assert between >= 1
            assert first <= epochs // 3 + method.step_cost
            # Without a descent nothing takes what is less than a step.
            left = epochs - spent(method, epochs)
            assert left == 0 if first else 0 <= left < method.step_cost
            if warm_up == 0:  # what cannot be divided among samples, or among the stretches between two
                assert warm < kept if minibatch else warm < (warm + kept * between) / 12 + 2 * kept


@pytest.mark.parametrize("minibatch", [False, True])
def test_passes_are_spent_as_declared(minibatch):
    """Lengths of samples that are taken in one stretch, in several, and with a rest."""
    for epochs, num_samples in ((4, 1), (10, 3), (128, 3), (131, 1)):
        method = sampler(2, 0.7, num_samples=num_samples, descent=5, minibatch=minibatch)
        posterior = fitted(method, data(7), epochs)
        assert posterior.record["member_epochs"] == 2 * spent(method, epochs)
        descent, _, kept, between = method.lengths(epochs)
        assert posterior.num_members == 2 * kept
        [_, steps] = [chain["steps"] for chain in posterior.record["findings"]]
        assert steps == kept * between
        assert sum(e["phase"] == "descent" for e in posterior.record["history"]) == descent


def test_budgets():
    method = sampler(num_chains=4, passes=500)
    assert method.least_budget == 2000
    assert method.for_budget(method.least_budget) == (method, 500)
    assert method.for_budget(402.0) == (method, 100)
    assert pm.methods.Single().least_budget == HMC().least_budget == 0
    for minibatch in (False, True):  # however little there is, it is enough for a step
        small = sampler(num_chains=4, minibatch=minibatch)
        assert small.kept_samples(small.for_budget(1.0)[1]) == 1
    posterior = pm.fit(
        sampler(2, 0.7, num_samples=3),
        network,
        data(),
        likelihood=GAUSS,
        budget=80.0,
        progress=False,
        backend="vmap",
    )
    assert posterior.record["member_epochs"] == 80


@pytest.mark.parametrize("minibatch", [False, True])
def test_two_passes_are_too_few(minibatch):
    with pytest.raises(InputError, match="at least 3 gradient passes, got 2; thousands are usual"):
        fitted(sampler(minibatch=minibatch), epochs=2)


def test_the_descent_keeps_its_best_epoch_and_says_where_chains_began():
    descent = {"descent": 6, "optimizer": pm.Optimizer("SGD", lr=1e-4), "num_samples": 2, "step_size": 1e-9}
    source, held_out = data(), data(9, seed=3)
    posterior = fitted(sampler(1, 0.7, **descent, keep="best", warm_up=0.0), source, 19, validation=held_out)
    # Steps are too short to move: samples are the best of the six epochs, which have no prior.
    ends = [
        fitted(pm.methods.Single(None, pm.Optimizer("SGD", lr=1e-4)), source, e).predict(held_out.inputs).mean
        for e in range(1, 7)
    ]
    errors = [(mean.squeeze() - held_out.targets).square().mean().item() for mean in ends]
    mean = posterior.predict(held_out.inputs).mean.squeeze()
    assert (mean - held_out.targets).square().mean().item() == pytest.approx(min(errors), rel=1e-6)
    assert posterior.record["findings"][0]["start"] == "optima of a descent of 6 epochs"


def test_chains_say_where_they_began():
    def start(method, **options):
        return fitted(method, epochs=9, **options).record["findings"][0]["start"]

    plain = sampler(1, 0.7, num_samples=1, descent=0)
    assert start(plain) == "the network's initialisation"
    ensemble = fitted(pm.methods.DeepEnsemble(2), epochs=2)
    given = fitted(sampler(2, 0.7, num_samples=1, descent=0, step_size=1e-9), epochs=3, initial=ensemble)
    assert given.record["findings"][0]["start"] == "networks that were given"
    assert_same(given, ensemble, rtol=0, atol=1e-7)


# --- steps that go wrong ----------------------------------------------------------------------------


class Walled(nn.Module):
    """A linear network whose outputs are of no use where its weights are far from 0."""

    def __init__(self, beyond, radius):
        super().__init__()
        self.linear, self.beyond, self.radius = nn.Linear(3, 1).double(), beyond, radius
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.3)

    def forward(self, x):
        size = self.linear.weight.square().sum() + self.linear.bias.square().sum()
        return self.linear(x) * torch.where(size.sqrt() > self.radius, self.beyond, 1.0)


def behind_a_wall(beyond, radius, warm_up):
    """Three chains that meet the wall, and how far the samples of each are from 0, [3, 40]."""
    method = sampler(3, 0.7, num_samples=40, descent=0, step_size=0.3, warm_up=warm_up)
    noise = pm.likelihoods.FixedGaussian(std=1.0)
    posterior = fitted(method, epochs=401, model=lambda: Walled(beyond, radius), likelihood=noise)
    found = torch.cat([tensor.flatten(1) for tensor in weights(posterior).values()], 1)
    return posterior.record["findings"], torch.linalg.vector_norm(found, dim=1).unflatten(0, (3, 40))


@pytest.mark.parametrize("beyond", [math.nan, math.inf, 1e6])
def test_a_chain_goes_on_from_where_it_was_with_smaller_steps(beyond):
    with pytest.warns(UserWarning, match="not to be trusted: .* of 200 steps diverged and were undone"):
        findings, sizes = behind_a_wall(beyond, 0.6, 0.0)
    assert sizes.isfinite().all()
    assert sizes.max() <= 0.6
    for chain, of_chain in zip(findings, sizes, strict=True):
        assert 2 < chain["divergences"] < 50
        assert chain["step_size"] == pytest.approx(0.3 * 0.9 ** chain["divergences"], rel=1e-5)
        assert len(of_chain.unique()) == 40  # it moves between any two samples
        assert of_chain.std() > 0.05
        assert chain["energy_variance"] < 0.1  # of the steps that were taken


@pytest.mark.filterwarnings(UNTRUSTED)
def test_one_step_that_is_off_by_far_does_not_decide_about_all_others():
    """In warm-up a loss that is enormous counts as one that is no number: steps become shorter, not tiny."""
    shortest = {}
    for beyond in (math.nan, 1e6):
        findings, sizes = behind_a_wall(beyond, 1.0, 0.5)
        assert sizes.max() <= 1.0
        shortest[beyond] = min(chain["step_size"] for chain in findings)
    assert shortest[1e6] > shortest[math.nan] / 4


def test_a_chain_that_begins_where_there_is_no_number_stays_and_says_so():
    with pytest.warns(UserWarning, match="200 of 200 steps diverged and were undone"):
        findings, sizes = behind_a_wall(math.nan, 0.0, 0.0)
    assert all(chain["divergences"] == chain["steps"] == 200 for chain in findings)
    assert torch.equal(sizes, sizes[:, :1].expand_as(sizes))
    assert sizes.isfinite().all()


def test_steps_below_the_rounding_of_the_weights_are_noticed():
    """A noise level of 1e-9 asks for steps of 1e-19; in single precision no weight moves by them."""
    single = pm.ArrayData(data().inputs.float(), data().targets.float())
    noise = pm.likelihoods.FixedGaussian(std=1e-9)
    method = sampler(1, 0.7, num_samples=2, descent=0)
    with pytest.warns(UserWarning, match="steps are smaller than the rounding of its weights"):
        fitted(method, single, 500, model=lambda: pm.models.MLP(3, 1, (4,)), likelihood=noise)


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.parametrize("epochs", [9, 20, 30, 60])
@pytest.mark.filterwarnings(UNTRUSTED)
def test_a_short_warm_up_finds_some_scale(epochs):
    """One state has no spread: what is too short to measure by leaves the scale as it is."""
    posterior = fitted(sampler(2, 0.7, num_samples=2, scale="variances"), epochs=epochs)
    for chain in posterior.record["findings"]:
        assert 0 < chain["step_size"] < math.inf


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_chains": 0}, "num_chains must be a whole number of at least 1, got 0"),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1, got 0"),
        ({"passes": 2}, "passes must be a whole number of at least 3, got 2"),
        ({"descent": -1}, "descent must be a whole number of at least 0, got -1"),
        ({"prior_std": 0}, "prior_std must be a positive number, got 0"),
        ({"prior_std": -0.3}, "prior_std must be a positive number, got -0.3"),
        ({"warm_up": 1}, "warm_up must be at least 0 and below 1, got 1"),
        ({"warm_up": -0.1}, "warm_up must be at least 0 and below 1, got -0.1"),
        ({"energy_variance": 0.0}, "energy_variance must be a positive number, got 0.0"),
        (
            {"energy_variance": 0.1, "first_energy_variance": 0.05},
            "falls in warm-up: first_energy_variance=0.05 must be at least energy_variance=0.1",
        ),
        ({"scale": "variance"}, "Unknown scale 'variance'. Did you mean 'variances'"),
        ({"step_size": -1.0}, "step_size must be a positive number, got -1.0"),
        ({"length": math.inf}, "length must be a positive number, got inf"),
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"keep": "first"}, "keep='first': allowed are 'last', 'best'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        Microcanonical(**options)


def layers(*some):
    return nn.Sequential(nn.Linear(3, 4), *some, nn.Tanh(), nn.Linear(4, 1)).double()


def test_networks_without_a_posterior_are_refused():
    with pytest.raises(InputError, match=r"microcanonical cannot sample .* BatchNorm \('1'\)"):
        fitted(sampler(1), model=layers(nn.BatchNorm1d(4)))
    with pytest.raises(InputError, match=r"microcanonical cannot sample .* random itself.* \('1'\)"):
        fitted(sampler(1), model=layers(nn.Dropout(0.1)))
    frozen = layers(nn.BatchNorm1d(4))
    frozen[1].eval()
    for module in (frozen, layers(nn.Dropout(0.0)), layers(nn.LayerNorm(4))):
        method = sampler(1, 0.7, num_samples=2, descent=0, step_size=0.01, warm_up=0.0)
        assert fitted(method, epochs=5, model=module.double()).num_members == 2


def test_rounded_gradients_are_refused():
    single = pm.ArrayData(data().inputs.float(), data().targets.float())
    with pytest.raises(InputError, match="one smooth function: use precision 'full' or 'double'"):
        fitted(sampler(1), single, model=lambda: pm.models.MLP(3, 1, (4,)), precision="bfloat16")


def test_one_weight_has_no_direction_to_turn():
    one = pm.ArrayData(data().inputs[:, :1], data().targets)
    with pytest.raises(InputError, match="this network has 1 to train: at least 2 are needed"):
        fitted(sampler(1), one, model=lambda: nn.Linear(1, 1, bias=False).double())
    two = fitted(
        sampler(1, num_samples=2, step_size=0.01, warm_up=0.0, descent=0),
        one,
        5,
        model=lambda: nn.Linear(1, 1).double(),
    )
    assert two.num_members == 2


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        source = data()
        yield from zip(source.inputs, source.targets, strict=True)


def test_data_that_cannot_be_read_again_are_for_minibatches_only():
    source = pm.LoaderData(torch.utils.data.DataLoader(Stream(), batch_size=5), num_examples=20)
    few = {"num_chains": 1, "num_samples": 2, "descent": 0, "step_size": 0.01, "warm_up": 0.0}
    with pytest.raises(InputError, match="cannot be read again"):
        fitted(sampler(**few), source, 9)
    assert fitted(sampler(**few, minibatch=True), source, 9).num_members == 2


def test_augmented_images_are_refused():
    """They are others every time: all of them have no likelihood."""
    images = pm.ArrayData(
        torch.zeros(4, 1, 6, 6), torch.zeros(4, dtype=torch.int64), augment=[pm.data.RandomFlip()]
    )
    with pytest.raises(InputError, match="augment"):
        fitted(
            sampler(1),
            images,
            6,
            model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)),
            likelihood="categorical",
        )


# --- other networks, and where samples are kept -----------------------------------------------------


def test_a_convolutional_network_of_classes_and_samples_on_disk(monkeypatch):
    """Samples beyond the memory that they may take are in files, and are the same ones."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 3
    images = torch.randn(24, 1, 6, 6, generator=generator) + labels[:, None, None, None].float()
    source = pm.ArrayData(images, labels, batch_size=8)

    def model():
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
        )

    method = sampler(2, 0.5, num_samples=4, descent=20)
    options = {"epochs": 200, "model": model, "likelihood": "categorical"}
    posterior = fitted(method, source, **options)
    probabilities = posterior.predict(images).mean
    torch.testing.assert_close(probabilities.sum(1), torch.ones(24))
    assert (probabilities.argmax(1) == labels).double().mean() > 0.8
    assert all(chain["divergences"] == 0 for chain in posterior.record["findings"])

    size = sum(parameter.numel() for parameter in model().parameters()) * 4 * 2  # of a sample of each chain
    monkeypatch.setattr("polymode.posteriors.particles.MEMORY_BYTES", 2 * size)
    stored = fitted(method, source, **options)
    assert sum(isinstance(block, StoredMembers) for block in stored.blocks) == 4  # two samples of two chains
    for name, tensor in weights(posterior).items():
        assert torch.equal(weights(stored)[name], tensor)
