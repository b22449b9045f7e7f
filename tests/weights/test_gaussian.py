"""Gaussian weights and units that may be left out, against Monte Carlo, differences and closed forms."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.weights.gaussian import INCLUSION, MASK, RHO, GaussianWeights, gaussian_weights, kaiming_uniform


def network() -> nn.Module:
    layers = (
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.Tanh(),
        nn.Linear(4, 2),
    )
    module = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
    return module


def all_names(module):
    return frozenset(name for name, _ in module.named_parameters())


def tensors(weights: GaussianWeights, module, seed=0):
    """Random means, spreads and logits."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: p.detach().clone() for name, p in module.named_parameters()}
    draw = lambda n: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731
    found[RHO] = draw(sum(weights.sizes)) - 1
    if weights.units:
        found[INCLUSION] = draw(sum(weights.counts))
    return found


def realised(weights, found, seeds, **options):
    noise = weights.noise(seeds, found[RHO])
    return torch.vmap(lambda numbers: weights.realise(found, numbers, **options))(noise)


def test_units_are_those_of_hidden_layers_with_their_biases():
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    assert weights.units == {"0": ("0.weight", "0.bias"), "3": ("3.weight", "3.bias")}
    assert weights.counts == (3, 4)
    assert set(weights.shapes) == all_names(module)  # normalisation and the last layer have Gaussians, too


def test_vectors_and_names_are_the_same_numbers_in_the_order_of_channels_last():
    weights = gaussian_weights(module := network(), all_names(module))
    vector = torch.arange(sum(weights.sizes), dtype=torch.float64)
    parts = weights.by_name(vector)
    assert {name: tuple(part.shape) for name, part in parts.items()} == dict(weights.shapes)
    kernel = parts["0.weight"]
    for (o, i, h, w), place in {(0, 0, 0, 0): 0, (0, 1, 0, 0): 1, (0, 0, 0, 1): 2, (1, 0, 0, 0): 18}.items():
        assert kernel[o, i, h, w] == place
    assert kernel.is_contiguous(memory_format=torch.channels_last)


def test_draws_depend_on_their_seed_alone():
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    found = tensors(weights, module)
    three = realised(weights, found, torch.tensor([5, 7, 9]))
    one = realised(weights, found, torch.tensor([7]))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor[0], three[name][1], rtol=1e-14, atol=0)
        if name in weights.shapes:
            assert not torch.equal(three[name][0], three[name][1])


def test_moments_of_draws():
    """The mean and variance of a scalar of a unit: γ μ and γ (σ² + μ²) − γ² μ²."""
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    found = tensors(weights, module)
    count = 40_000
    draws = realised(weights, found, torch.arange(count))
    sigma, gamma = weights.by_name(F.softplus(found[RHO])), weights.by_layer(found[INCLUSION].sigmoid())
    of_name = {name: gamma[layer] for layer, names in weights.units.items() for name in names}
    for name, shape in weights.shapes.items():
        g = of_name.get(name, torch.ones(shape[0], dtype=torch.float64)).reshape(-1, *[1] * (len(shape) - 1))
        mean, second = g * found[name], g * (sigma[name] ** 2 + found[name] ** 2)
        variance = second - mean**2
        error = (draws[name].mean(0) - mean) / (variance / count).sqrt()
        assert error.abs().max() < 5.5  # of 80 scalars: beyond five standard errors once in 20,000 trials
        fourth = draws[name].sub(mean).pow(4).mean(0)
        error = (draws[name].var(0) - variance) / ((fourth - variance**2) / count).sqrt()
        assert error.abs().max() < 5.5


@pytest.mark.parametrize("stds", ["one", "many"])
def test_kl_against_monte_carlo(stds):
    """KL(q ‖ p) = E_q[log q − log p], of the weights of units and of whether they are there."""
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    found, inclusion = tensors(weights, module), 0.2
    widths = {n: 0.7 if stds == "one" else 0.4 + 0.1 * i for i, n in enumerate(weights.shapes)}
    seeds = torch.arange(20_000)
    noise = weights.noise(seeds, found[RHO])
    z = weights.included(found, noise)
    sigma, epsilon = weights.by_name(F.softplus(found[RHO])), weights.by_name(noise["normal"])
    gamma = found[INCLUSION].sigmoid()
    each = torch.where(
        z > 0, gamma.log() - math.log(inclusion), (1 - gamma).log() - math.log1p(-inclusion)
    ).sum(1)
    taken = weights.by_layer(z)
    of_name = {name: taken[layer] for layer, names in weights.units.items() for name in names}
    for name in weights.shapes:
        value = found[name] + sigma[name] * epsilon[name]
        q = torch.distributions.Normal(found[name], sigma[name]).log_prob(value)
        p = torch.distributions.Normal(0.0, torch.tensor(widths[name]).double()).log_prob(value)
        rows = (q - p).flatten(2).sum(2) if value.ndim > 2 else q - p
        each += (rows * of_name[name] if name in of_name else rows).sum(1)
    expected = weights.kl(found, widths, inclusion)
    assert abs(each.mean() - expected) < 4 * each.std() / math.sqrt(len(seeds))
    assert each.std() / math.sqrt(len(seeds)) < 0.01 * expected  # a comparison that could fail


def test_kl_without_units_is_that_of_torch():
    weights = gaussian_weights(module := network(), all_names(module))
    found = tensors(weights, module)
    sigma = weights.by_name(F.softplus(found[RHO]))
    prior = torch.distributions.Normal(torch.zeros(()).double(), 0.3)
    each = (
        torch.distributions.kl_divergence(torch.distributions.Normal(found[name], sigma[name]), prior).sum()
        for name in weights.shapes
    )
    torch.testing.assert_close(weights.kl(found, dict.fromkeys(weights.shapes, 0.3)), sum(each))


def test_gradient_of_the_relaxed_objective_against_finite_differences():
    """What descends is the relaxation: values of z are hard, gradients those of sigmoid(η/τ)."""
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    found = tensors(weights, module)
    noise = {name: t[0] for name, t in weights.noise(torch.tensor([3]), found[RHO]).items()}
    x = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module.eval()

    def loss(logits, rho, relaxed):
        now = found | {INCLUSION: logits, RHO: rho}
        made = weights.realise(now, noise)
        if relaxed:  # linear in the soft variables around the hard ones
            u = noise["uniform"]
            eta = logits + (u + 1e-10).log() - (1 - u + 1e-10).log()
            eta0 = found[INCLUSION] + (u + 1e-10).log() - (1 - u + 1e-10).log()
            soft, soft0 = (eta / 0.5).sigmoid(), (eta0 / 0.5).sigmoid()
            z = (soft0 > 0.5).double() + soft - soft0
            plain = {
                name: found[name] + t
                for name, t in weights.by_name(F.softplus(rho) * noise["normal"]).items()
            }
            made = plain | weights._switched(plain, z)
        outputs = torch.func.functional_call(module, made, (x,))
        return outputs.logsumexp(1).sum() + 0.01 * weights.kl(now, dict.fromkeys(weights.shapes, 0.3), 0.1)

    logits, rho = found[INCLUSION].clone().requires_grad_(), found[RHO].clone().requires_grad_()
    of_logits, of_rho = torch.autograd.grad(loss(logits, rho, relaxed=False), (logits, rho))
    step = 1e-6
    for which, gradient in ((0, of_logits), (1, of_rho)):
        for place in range(0, len(gradient), 3):
            ends = []
            for sign in (1, -1):
                moved = [found[INCLUSION].clone(), found[RHO].clone()]
                moved[which][place] += sign * step
                ends.append(loss(*moved, relaxed=True))
            assert gradient[place].item() == pytest.approx(
                ((ends[0] - ends[1]) / (2 * step)).item(), rel=1e-5, abs=1e-8
            )
    assert of_logits.abs().min() > 0


def test_units_that_are_left_out_have_weights_and_bias_zero():
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    found = tensors(weights, module)
    noise = weights.noise(torch.tensor([3]), found[RHO])
    made = {name: t[0] for name, t in realised(weights, found, torch.tensor([3])).items()}
    taken = weights.by_layer(weights.included(found, noise)[0])
    assert {0.0, 1.0} == set(torch.cat(list(taken.values())).tolist())
    for layer, names in weights.units.items():
        for name in names:
            there = made[name].flatten(1).abs().sum(1) if made[name].ndim > 1 else made[name].abs()
            assert torch.equal(there > 0, taken[layer] > 0)


def test_masks_take_the_place_of_draws():
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    found = tensors(weights, module)
    mask = torch.tensor([1.0, 0, 1, 0, 0, 1, 1], dtype=torch.float64)
    for made in (
        {
            name: t[1]
            for name, t in realised(weights, found | {MASK: mask}, torch.arange(2), frozen=True).items()
        },
        weights.means(found | {MASK: mask}, frozen=True),
    ):
        assert (made["0.weight"].flatten(1).abs().sum(1) > 0).tolist() == [True, False, True]
        assert (made["3.bias"].abs() > 0).tolist() == [False, False, True, True]


def test_means_without_a_mask_have_the_units_that_are_more_probable_than_not():
    weights = gaussian_weights(module := network(), all_names(module), units="hidden")
    found = tensors(weights, module)
    made = weights.means(found)
    expected = found[INCLUSION].split(weights.counts)[0] > 0
    assert torch.equal(made["0.bias"] != 0, expected)
    assert torch.equal(made["5.weight"], found["5.weight"])


def test_kaiming_is_uniform_within_its_bound():
    module = pm.models.MLP(50, 3, (400,)).double()
    start = dict(module.named_parameters())
    drawn = kaiming_uniform(module, start, start, torch.Generator().manual_seed(0))
    assert set(drawn) == {"1.weight", "3.weight"}
    bound, values = math.sqrt(6 / 50), drawn["1.weight"]
    assert values.abs().max() < bound
    assert values.var().item() == pytest.approx(bound**2 / 3, rel=5 * math.sqrt(0.8 / values.numel()))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("output", "the last layer"),
        ("norm", "no units could be left out"),
        ("Conv3d", "no layer whose units could be left out"),
        (["0", "5"], "the last layer"),
    ],
)
def test_layers_without_units_are_refused(where, message):
    with pytest.raises(InputError, match=message):
        gaussian_weights(module := network(), all_names(module), units=where)


def test_frozen_layers_have_no_gaussian():
    module = network()
    trained = all_names(module) - {"0.weight", "0.bias"}
    assert "0.weight" not in gaussian_weights(module, trained).shapes
    with pytest.raises(InputError, match="frozen"):
        gaussian_weights(module, trained, "0")


def test_read_back_from_json():
    import json

    weights = gaussian_weights(module := network(), all_names(module), units="hidden", temperature=0.3)
    assert GaussianWeights.from_config(json.loads(json.dumps(weights.config()))) == weights
