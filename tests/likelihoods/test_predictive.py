"""Predictives against direct formulas, in any chunking, with bounded memory."""

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import polymode as pm
from cases import BY_NAME
from forks import fork
from polymode.errors import InputError
from polymode.likelihoods import HeteroscedasticGaussian, numbers
from polymode.likelihoods.categorical import softmax_and_entropy
from polymode.likelihoods.gaussian import GaussianLaw
from polymode.likelihoods.numbers import mixture_quantiles
from polymode.networks.members import Members
from polymode.networks.surgery import prepare, tensors_of
from polymode.posteriors import Particles, Posterior
from polymode.posteriors.base import DRAWS
from polymode.posteriors.network import Network
from polymode.posteriors.particles import BLOCK_MEMBERS


def particles(name: str, num_members: int = 7, backend="loop", log_weights=None) -> Particles:
    case = BY_NAME[name]
    modules = [case.likelihood.prepare(prepare(case.double_factory())) for _ in range(num_members)]
    members = pm.stack([tensors_of(module) for module in modules])
    if log_weights is not None:
        members = Members(members.stacked, log_weights=log_weights)
    return Particles(Network(modules[0], case.likelihood, backend), blocks=[members])


def all_outputs(posterior, inputs):
    return next(posterior.outputs(inputs, batch_size=10**6))[1]


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("batch_size", [5, 1024])
def test_categorical_against_the_formulas(backend, batch_size):
    weights = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.05, 0.1, 0.1], dtype=torch.float64)
    posterior = particles("mlp", backend=backend, log_weights=(3 * weights).log())
    x = BY_NAME["mlp"].data(23).inputs
    p = all_outputs(posterior, x).softmax(-1)
    mean = torch.einsum("m,mnc->nc", weights, p)
    expected_entropy = torch.einsum("m,mn->n", weights, -(p * p.log()).sum(-1))
    predictive = posterior.predict(x, batch_size=batch_size)
    torch.testing.assert_close(predictive.mean, mean)
    torch.testing.assert_close(predictive.entropy, -(mean * mean.log()).sum(-1))
    mutual = -(mean * mean.log()).sum(-1) - expected_entropy
    torch.testing.assert_close(predictive.mutual_information, mutual, rtol=1e-6, atol=1e-9)
    assert predictive.num_members == 7
    assert torch.equal(predictive.labels, mean.argmax(-1))
    targets = torch.randint(3, (23,))
    log_prob = posterior.log_prob(x, targets, batch_size=batch_size)
    torch.testing.assert_close(log_prob, mean[torch.arange(23), targets].log())


def test_per_token_shapes_and_values():
    posterior = particles("tied_tokens")
    data = BY_NAME["tied_tokens"].data(6)
    p = all_outputs(posterior, data.inputs).softmax(-1).mean(0)
    torch.testing.assert_close(posterior.predict(data.inputs, batch_size=4).mean, p)
    log_prob = posterior.log_prob(data.inputs, data.targets)
    torch.testing.assert_close(log_prob, p.gather(-1, data.targets[..., None])[..., 0].log())


def test_bernoulli_against_the_formulas():
    posterior = particles("multi_label")
    data = BY_NAME["multi_label"].data(11)
    p = all_outputs(posterior, data.inputs).sigmoid()
    predictive = posterior.predict(data.inputs)
    torch.testing.assert_close(predictive.mean, p.mean(0))
    each = -(p * p.log() + (1 - p) * (1 - p).log())
    torch.testing.assert_close(predictive.expected_entropy, each.mean(0))
    joint = (data.targets * p.log() + (1 - data.targets) * (1 - p).log()).sum(-1)
    expected = joint.logsumexp(0) - math.log(7)
    torch.testing.assert_close(posterior.log_prob(data.inputs, data.targets), expected)


@pytest.mark.parametrize("name", ["fixed_noise", "learned_noise", "input_dependent_noise"])
def test_gaussian_mixture_against_torch_distributions(name):
    posterior = particles(name)
    data = BY_NAME[name].data(19)
    mean, std = posterior.network.likelihood.moments(all_outputs(posterior, data.inputs))
    std = torch.as_tensor(std, dtype=mean.dtype).expand(mean.shape)
    components = Normal(mean.movedim(0, -1), std.movedim(0, -1))
    mixture = MixtureSameFamily(Categorical(torch.ones_like(components.loc)), components)
    levels = (0.025, 0.3, 0.5, 0.99)
    predictive = posterior.predict(data.inputs, quantiles=levels, batch_size=4)
    torch.testing.assert_close(predictive.mean, mixture.mean)
    torch.testing.assert_close(predictive.variance, mixture.variance)
    torch.testing.assert_close(predictive.noise_variance, std.square().mean(0))
    for level, value in predictive.quantiles.items():
        torch.testing.assert_close(mixture.cdf(value), torch.full_like(value, level), rtol=0, atol=1e-9)
    targets = data.targets.reshape(19, -1)
    each = Normal(mean, std).log_prob(targets).sum(-1)
    expected = each.logsumexp(0) - math.log(7)
    torch.testing.assert_close(posterior.log_prob(data.inputs, data.targets), expected)


def test_rescaled_is_the_predictive_in_other_units():
    posterior, x = particles("fixed_noise"), BY_NAME["fixed_noise"].data(9).inputs
    predictive = posterior.predict(x, quantiles=(0.1,))
    other = predictive.rescaled(3.0, 2.0)
    torch.testing.assert_close(other.mean, 3 + 2 * predictive.mean)
    torch.testing.assert_close(other.std, 2 * predictive.std)
    torch.testing.assert_close(other.quantiles[0.1], 3 + 2 * predictive.quantiles[0.1])


def test_variance_survives_a_large_offset():
    """Raw sums of squares would lose all digits at 1e6 in float32."""
    means = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])
    likelihood = pm.likelihoods.FixedGaussian(std=0.5)
    accumulator = likelihood.accumulator(1)
    for mean in means:
        accumulator.update(mean.reshape(1, 1, 1), torch.ones(1), slice(0, 1))
    predictive = accumulator.result()
    assert predictive.member_variance.item() == pytest.approx(2 / 3, rel=1e-5)
    assert predictive.mean.item() == 1e6 + 1


def test_quantiles_of_far_apart_components():
    means = torch.tensor([[-50.0], [50.0]])
    stds = torch.tensor([[1.0], [2.0]])
    law = GaussianLaw(means, stds)
    q = mixture_quantiles(law, torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(q.flatten(), torch.tensor([-50.0, 50.0], dtype=torch.float64))
    with pytest.raises(InputError, match="strictly between 0 and 1"):
        mixture_quantiles(law, torch.tensor([0.5, 0.5]), torch.tensor([0.0]))


def test_softmax_and_entropy_with_a_class_ruled_out():
    logits = torch.tensor([[0.0, -math.inf, 1.0], [5.0, 5.0, 5.0]])
    p, h = softmax_and_entropy(logits)
    torch.testing.assert_close(p, logits.softmax(-1))
    q = logits[0, [0, 2]].softmax(-1)
    torch.testing.assert_close(h, torch.stack([-(q * q.log()).sum(), torch.tensor(math.log(3.0))]))


@pytest.mark.parametrize("offset", [0.0, -1000.0, 700.0])
def test_weights_are_unnormalised_logarithms(offset):
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    posterior = particles("mlp", 3, log_weights=weights.log() + offset)
    x = BY_NAME["mlp"].data(5).inputs
    p = all_outputs(posterior, x).softmax(-1)
    torch.testing.assert_close(posterior.predict(x).mean, torch.einsum("m,mnc->nc", weights, p))


def test_blocks_stay_below_the_memory_limit(monkeypatch):
    monkeypatch.setattr("polymode.posteriors.particles.BLOCK_BYTES", 4 * 8 * 60)
    posterior = particles("mlp", 20)
    [each] = {block.num_bytes // block.num_members for block in posterior.draw()}
    assert max(block.num_bytes for block in posterior.draw()) <= max(4 * 8 * 60, each)
    assert sum(block.num_members for block in posterior.draw()) == 20


def test_networks_with_other_constants_are_not_merged():
    a, b = (pm.models.MLP(4, 3, (6,)).double() for _ in range(2))
    for module in (a, b):
        module[1].requires_grad_(False)
    first, second = (
        pm.fit(
            pm.methods.Single(), m, BY_NAME["mlp"].data(), likelihood="categorical", epochs=1, progress=False
        )
        for m in (a, b)
    )
    with pytest.raises(InputError, match=r"'1\.\w+', which their members have in common, differs"):
        pm.merge([first, second])
    assert pm.merge([first, first]).num_members == 2
    with pytest.raises(InputError, match="no posteriors"):
        pm.merge([])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.randn(5, 3, dtype=torch.float64), r"cannot run on a batch of these inputs, \[5, 3\]"),
        (torch.randint(3, (5, 4)), "int64"),
        (torch.full((2, 4), float("nan"), dtype=torch.float64), "first in row 0"),
        (torch.zeros(0, 4, dtype=torch.float64), "no points"),
    ],
)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_bad_inputs_to_predict(backend, inputs, message):
    with pytest.raises(InputError, match=message):
        particles("mlp", backend=backend).predict(inputs)


def test_single_precision_inputs_are_enough_for_a_network_in_double():
    inputs = torch.randn(5, 4)
    posterior = particles("mlp")
    assert torch.equal(posterior.predict(inputs).mean, posterior.predict(inputs.double()).mean)


def test_targets_that_do_not_fit_are_refused():
    posterior, data = particles("learned_noise"), BY_NAME["learned_noise"].data(6)
    with pytest.raises(InputError, match=r"gives \[6, 2\] for targets \[6, 1\]"):
        posterior.log_prob(data.inputs, data.targets[:, :1])
    with pytest.raises(InputError, match="1 targets for 6 inputs"):
        posterior.log_prob(data.inputs, data.targets[:1])
    with pytest.raises(InputError, match="batch_size must be at least 1"):
        posterior.predict(data.inputs, batch_size=0)
    assert repr(posterior) == "Particles(7 × NoiseLevel, gaussian)"


def test_numpy_inputs_are_welcome():
    posterior = pm.StackedModule([pm.models.MLP(4, 3) for _ in range(2)]).posterior("categorical")
    x = torch.randn(5, 4)
    assert torch.equal(posterior.predict(x.numpy()).mean, posterior.predict(x).mean)


def test_fewer_members_are_spread_over_the_chain():
    members = Members({"w": torch.arange(10.0)[:, None]})
    case = BY_NAME["mlp"]
    posterior = Particles(Network(case.factory(), case.likelihood), blocks=[members])
    [drawn] = posterior.draw(4)
    assert drawn.stacked["w"].flatten().tolist() == [0, 2, 5, 7]
    assert torch.cat([b.stacked["w"] for b in posterior.draw()]).flatten().tolist() == list(range(10))
    with pytest.raises(InputError, match="num_draws=11 asked for, this posterior holds 10"):
        next(posterior.draw(11))
    with pytest.raises(InputError, match="at least 1, got 0"):
        next(posterior.draw(0))


def test_many_members_come_in_blocks():
    case = BY_NAME["mlp"]
    count = 2 * BLOCK_MEMBERS + 5
    states = [tensors_of(case.double_factory()) for _ in range(count)]
    posterior = Particles(
        Network(case.double_factory(), case.likelihood),
        blocks=[pm.stack(states[:9]), pm.stack(states[9:])],
    )
    sizes = [block.num_members for block in posterior.draw()]
    assert sum(sizes) == count
    assert max(sizes) <= BLOCK_MEMBERS
    x = case.data(5).inputs
    expected = torch.stack([torch.func.functional_call(case.double_factory(), s, x) for s in states])
    torch.testing.assert_close(posterior.predict(x).mean, expected.softmax(-1).mean(0))


# --- an endless posterior: replay and memory ----------------------------------------------------


@dataclass(frozen=True)
class NoisyHead(Posterior):
    """Gaussian noise on the last bias, drawn without end: a stand-in for variational posteriors."""

    kind: ClassVar[str] = "noisy_head"
    weights: dict = field(default_factory=dict)

    @property
    def num_members(self):
        return None

    def draw(self, num_draws=None, generator=None):
        self.check_num_draws(num_draws)
        num_draws = num_draws or DRAWS
        for start in range(0, num_draws, 50):
            count = min(50, num_draws - start)
            bias = self.weights["3.bias"]
            noise = torch.randn(count, *bias.shape, generator=generator, dtype=bias.dtype)
            shared = {n: t[None] for n, t in self.weights.items() if n != "3.bias"}
            yield Members({"3.bias": bias + noise}, shared)

    def collapse(self):
        raise AssertionError

    def merged(self, others):
        raise AssertionError

    def tensors(self):
        raise AssertionError

    @classmethod
    def from_files(cls, network, files, constants, options):
        raise AssertionError


def noisy(name: str, **options) -> NoisyHead:
    case = BY_NAME[name]
    module = case.double_factory()
    return NoisyHead(Network(module, case.likelihood, **options), tensors_of(module))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_endless_posterior_draws_what_is_asked_and_replays(backend):
    posterior = noisy("fixed_noise", backend=backend)
    x = BY_NAME["fixed_noise"].data(13).inputs
    make = lambda: torch.Generator().manual_seed(5)  # noqa: E731
    a = posterior.predict(x, 120, make(), batch_size=4, quantiles=(0.5,))
    b = posterior.predict(x, 120, make(), batch_size=13)
    assert a.num_members == 120
    torch.testing.assert_close(a.mean, b.mean)
    # Quantiles replay the same draws: the mixture's own distribution function is 1/2 there.
    rows, outputs, _ = next(posterior.by_points(x, 120, make()))
    cdf = Normal(outputs, 0.7).cdf(a.quantiles[0.5][rows]).mean(0)
    torch.testing.assert_close(cdf, torch.full_like(cdf, 0.5), atol=1e-9, rtol=0)


def note_memory(num_draws, note):
    """Write by how many megabytes the memory of this process has grown at most while it predicted."""

    def resident(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    posterior = noisy("mlp", backend="vmap")
    x = torch.randn(20_000, 4, dtype=torch.float64)
    posterior.predict(x, 50, torch.Generator())
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    posterior.predict(x, num_draws, torch.Generator())
    note.write_text(str(resident("VmHWM") - before))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_draws(tmp_path):
    """1,000 draws × 20,000 points × 3 classes would be 480 MB in float64; 200 draws 96 MB."""
    for number in (100, 1000):
        process = fork(note_memory, number, tmp_path / str(number))
        process.join(timeout=300)
        assert process.exitcode == 0
    few, many = (float((tmp_path / str(number)).read_text()) for number in (100, 1000))
    assert many < few + 40, (few, many)
    assert many < 150


class FewOrMany(nn.Module):
    """Looks at a value where there are more than ten examples, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return -out if len(x) > 10 and out.sum().item() > 0 else out


def test_a_prediction_that_vmap_cannot_make_is_made_by_the_loop_and_said_once():
    x = torch.randn(24, 4)
    data = pm.ArrayData(x[:10], torch.randint(3, (10,)), batch_size=5)
    made = pm.fit(
        pm.methods.DeepEnsemble(3),
        FewOrMany,
        data,
        likelihood="categorical",
        epochs=1,
        backend="vmap",
        progress=False,
    )
    assert made.network.backend == "vmap"
    expected = made.with_backend("loop").predict(x)
    with pytest.warns(UserWarning, match=r"one after another.*FewOrMany"):
        found = made.predict(x)
    torch.testing.assert_close(found.mean, expected.mean)
    made.predict(x)  # a second warning would be an error
    with pytest.raises(pm.errors.InputError, match="cannot run on a batch of these inputs"):
        made.predict(torch.randn(24, 5))


def test_predictives_print_as_one_line():
    mean = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    half = -0.5 * (0.9 * math.log(0.9) + 0.1 * math.log(0.1)) + 0.5 * math.log(2)
    shown = repr(pm.CategoricalPredictive(mean.repeat(500, 1), torch.zeros(1000), 5))
    assert shown == (
        "CategoricalPredictive(1000 points, 2 classes, 5 members, mean confidence 0.7, "
        f"mean entropy {half:.3g}, mean mutual_information {half:.3g})"
    )
    tokens = pm.CategoricalPredictive(mean.expand(7, 2, 2), torch.zeros(7, 2), 3)
    assert repr(tokens).startswith("CategoricalPredictive(7 points of [2], 2 classes, 3 members, ")
    many = pm.BernoulliPredictive(torch.full((7, 4), 0.25), torch.zeros(7, 4), 3)
    assert repr(many).startswith("BernoulliPredictive(7 points of [4], 3 members, mean probability 0.25, ")
    numbers = pm.GaussianPredictive(
        torch.full((7, 1), 2.0), torch.full((7, 1), 16.0), torch.full((7, 1), 9.0), 3
    )
    expected = (
        "GaussianPredictive(7 points of [1], 3 members, {}mean prediction 2, mean std 5, mean member_std 3)"
    )
    assert repr(numbers) == expected.format("")
    levels = {0.05: torch.zeros(7, 1), 0.95: torch.ones(7, 1)}
    assert repr(replace(numbers, quantiles=levels)) == expected.format("quantiles 0.05, 0.95, ")


def test_quantiles_of_many_points_are_those_of_each(monkeypatch):
    """Points are worked on some at a time; the distribution function at each quantile is its level."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(7, 501, 2, generator=generator, dtype=torch.float64)
    weights = torch.rand(7, generator=generator, dtype=torch.float64)
    likelihood = HeteroscedasticGaussian()
    monkeypatch.setattr(numbers, "CACHED", 100)  # blocks of seven points, and one that is shorter
    low, high = likelihood.quantiles(outputs, weights, (0.05, 0.95))
    law = likelihood.law(outputs)
    for level, found in ((0.05, low), (0.95, high)):
        assert found.shape == law.mean.shape[1:]
        reached = torch.tensordot(weights / weights.sum(), law.cdf(found), 1)
        torch.testing.assert_close(reached, torch.full_like(reached, level), atol=1e-9, rtol=0)
