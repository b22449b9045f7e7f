"""The family of component mixtures against its definition: Chang et al. (2019), Eqs. 1 and 6, Table 2."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polymode.errors import InputError
from polymode.networks.surgery import tensors_of, trainable_names
from polymode.weights.mixtures import Family, Mixture, family_of, initial_components, mixture_kl, mixture_over


def network() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    module = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(0)
    for layer in (module[0], module[4]):
        for parameter in layer.parameters():
            parameter.data.normal_(generator=generator)
    return module


def mixture(family: Family, where=("norm", "output")) -> Mixture:
    module = network()
    return mixture_over(module, where, family, trainable_names(module))


def components_of(found: Mixture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(found.family.num_components, *shape, generator=generator, dtype=torch.float64)
        for name, shape in found.shapes.items()
    }


SEEDS = torch.arange(20_000)


@pytest.mark.parametrize("scheme", ["emp", "ecmp", "explicit"])
@pytest.mark.parametrize("probabilities", [None, (0.5, 0.3, 0.2)])
def test_components_are_drawn_with_their_probabilities(scheme, probabilities):
    found = mixture(family_of(scheme, 3, probabilities=probabilities))
    expected = torch.tensor(probabilities or (1 / 3,) * 3, dtype=torch.float64)
    for index in found.indices(SEEDS).values():
        assert index.dtype == torch.uint8
        shares = torch.stack([(index == k).double().mean(0).flatten() for k in range(3)], 1)
        # Each share is a mean of 20,000 coin flips; the largest of some hundred deviations stays below 4.5.
        error = (expected * (1 - expected) / len(SEEDS)).sqrt()
        assert float(((shares - expected) / error).abs().max()) < 4.5


def test_what_is_drawn_together_and_what_apart():
    names = ("1.weight", "1.bias", "4.weight", "4.bias")
    layer = mixture(family_of("emp", 3)).indices(SEEDS)
    assert torch.equal(layer["1.weight"].flatten(), layer["1.bias"].flatten())
    assert torch.equal(layer["4.weight"].flatten(), layer["4.bias"].flatten())
    together = (layer["1.weight"].flatten() == layer["4.weight"].flatten()).double().mean()
    assert abs(together - 1 / 3) < 4.5 * math.sqrt(2 / 9 / len(SEEDS))
    explicit = mixture(family_of("explicit", 3)).indices(SEEDS)
    for name in names[1:]:
        assert torch.equal(explicit[name].flatten(), explicit[names[0]].flatten())
    scalar = mixture(family_of("ecmp", 3)).indices(SEEDS)
    flat = torch.cat([scalar[name].flatten(1) for name in names], 1)
    assert flat.shape[1] == 4 + 4 + 80 + 5
    same = (flat[:, :-1] == flat[:, 1:]).double().mean(0)  # neighbours, also across tensors
    assert float((same - 1 / 3).abs().max()) < 4.5 * math.sqrt(2 / 9 / len(SEEDS))


@pytest.mark.parametrize("scheme", ["emp", "ecmp", "explicit", "dropout", "dropconnect"])
def test_draws_are_the_sum_over_components_of_equation_1(scheme):
    found = mixture(family_of(scheme, 3, rate=0.4))
    components, seeds = components_of(found), torch.arange(40)
    drawn, indices = found.draw(components, seeds), found.indices(seeds)
    for name, shape in found.shapes.items():
        index = indices[name].expand(-1, *shape)
        expected = sum(
            (index == k).double() * components[name][k] for k in range(found.family.num_components)
        )
        torch.testing.assert_close(drawn[name], expected / (1 - found.family.drop))
        one = found.realise(components, seeds[7])[name]
        torch.testing.assert_close(one, drawn[name][7], rtol=0, atol=0)


def test_dropout_of_inputs_is_a_mixture_with_a_zero_component():
    found = mixture(family_of("dropout", rate=0.3), where=("0", "output"))
    module = network()
    weights = tensors_of(module)
    components = {name: weights[name][None] for name in found.shapes}
    assert found.names == {"0.weight", "4.weight"}, "biases are shared"
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    hidden = torch.randn(6, 16, dtype=torch.float64)
    for seed in torch.arange(5):
        drawn = found.realise(components, seed)
        kept = {name: (index[0] == 0).double() / 0.7 for name, index in found.indices(seed[None]).items()}
        torch.testing.assert_close(
            F.conv2d(x, drawn["0.weight"]),
            F.conv2d(x * kept["0.weight"].reshape(3, 1, 1), weights["0.weight"]),
        )
        torch.testing.assert_close(
            hidden @ drawn["4.weight"].T, (hidden * kept["4.weight"].flatten()) @ weights["4.weight"].T
        )
    shares = torch.cat([(i == 1).double().mean(0).flatten() for i in found.indices(SEEDS).values()])
    assert float((shares - 0.3).abs().max()) < 4.5 * math.sqrt(0.21 / len(SEEDS))


def test_equal_components_are_the_plain_network():
    module = network().eval()
    weights = tensors_of(module)
    for scheme in ("emp", "ecmp", "explicit"):
        found = mixture(family_of(scheme, 4))
        components = {name: torch.stack([weights[name]] * 4) for name in found.shapes}
        for name, drawn in found.draw(components, torch.arange(3)).items():
            torch.testing.assert_close(drawn, torch.stack([weights[name]] * 3), rtol=0, atol=0)


def test_kl_is_equation_6():
    found = mixture(family_of("ecmp", 3, probabilities=(0.5, 0.3, 0.2)))
    weights = tensors_of(network()) | components_of(found)
    stds = {"0.weight": 0.5, "0.bias": 2.0, "1.weight": 1.0, "1.bias": 3.0, "4.weight": 0.7, "4.bias": 1.5}
    expected = 0.0
    for name, std in stds.items():
        if name in found.shapes:
            for p, component in zip((0.5, 0.3, 0.2), weights[name], strict=True):
                expected += p * component.square().sum().item() / (2 * std**2)
        else:
            expected += weights[name].square().sum().item() / (2 * std**2)
    assert mixture_kl(found, weights, stds).item() == pytest.approx(expected, rel=1e-12)
    logs = {layer: torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log() for layer in found.layers}
    entropy = -(logs["1"].exp() * logs["1"]).sum().item()
    number = 4 + 4 + 80 + 5
    assert mixture_kl(found, weights, stds, logs).item() == pytest.approx(expected - number * entropy)
    of_layers = mixture(family_of("emp", 3))
    assert mixture_kl(of_layers, weights, stds, logs).item() == pytest.approx(expected - 2 * entropy)


def test_kl_of_dropping_counts_what_is_kept():
    found = mixture(family_of("dropconnect", rate=0.4), where="output")
    weights = {"4.weight": torch.ones(1, 5, 16, dtype=torch.float64)}
    # p ‖M‖² with p = 0.6 and M = 1/0.6 in each of 80 weights.
    expected = 0.6 * 80 * (1 / 0.6) ** 2 / 2
    assert mixture_kl(found, weights, {"4.weight": 1.0}).item() == pytest.approx(expected)


def test_components_begin_apart_or_near_the_weights_of_the_module():
    module = network()
    found = mixture(family_of("ecmp", 250))
    start = tensors_of(module)
    generator = torch.Generator().manual_seed(0)
    near = initial_components(found, module, [start], generator, keep=True, spread=0.1)
    for name, tensor in near.items():
        assert torch.equal(tensor[0], start[name]), "component 0 keeps the user's weights"
    size = start["4.weight"].square().mean().sqrt()
    spread = (near["4.weight"][1:] - start["4.weight"]).std() / size
    assert abs(spread - 0.1) < 0.1 * 4.5 / math.sqrt(2 * 249 * 80)
    starts = [
        start,
        *({"4.weight": torch.full((5, 16), k), "4.bias": torch.full((5,), k)} for k in range(249)),
    ]
    apart = initial_components(found, module, starts, generator, keep=False, spread=0.1)
    assert torch.equal(apart["4.weight"][1:, 0, 0], torch.arange(249).double())
    scale, shift = apart["1.weight"], apart["1.bias"]
    assert abs(scale.std() - 0.1) < 0.1 * 4.5 / math.sqrt(2 * 1000)
    assert abs(shift.std() - 0.1) < 0.1 * 4.5 / math.sqrt(2 * 1000)
    assert abs(scale.mean() - 1) < 0.1 * 4.5 / math.sqrt(1000)


def test_learned_probabilities_leave_a_bad_component():
    found = mixture(family_of("emp", 2), where="output")
    good = torch.zeros(5, 16, dtype=torch.float64)
    components = {
        "4.weight": torch.stack([good, good + 1]),
        "4.bias": torch.zeros(2, 5, dtype=torch.float64),
    }
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for seed in torch.arange(300):
        weights = found.realise_relaxed(components, {"4": logits}, seed)
        indices = [
            k for k in range(2) if torch.equal(weights["4.weight"].detach(), components["4.weight"][k])
        ]
        assert len(indices) == 1, "values are those of one component"
        optimizer.zero_grad()
        weights["4.weight"].square().mean().backward()
        optimizer.step()
    assert logits.softmax(0)[0] > 0.9
    drawn = found.indices(SEEDS, {"4": logits.softmax(0)})["4.weight"].double().mean()
    assert drawn == pytest.approx(logits.softmax(0)[1].item(), abs=4.5 * math.sqrt(0.25 / len(SEEDS)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Family("layer", 1), "num_components must be a whole number of at least 2, got 1"),
        (lambda: Family("layer", 300), "at most 254, got 300"),
        (lambda: Family("row"), "Unknown assignment 'row'"),
        (lambda: Family("layer", 3, (0.5, 0.6, 0.1)), "must sum to one"),
        (lambda: Family("layer", 3, (0.5, 0.5)), "must be 3 numbers"),
        (lambda: Family("layer", 2, (1.5, -0.5)), "from 0 to 1"),
        (lambda: Family("scalar", 1, drop=1.0), "at least 0 and below 1, got 1.0"),
        (lambda: family_of("ecmpp"), "Did you mean 'ecmp'"),
    ],
)
def test_bad_settings_are_named(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_grouped_convolutions_cannot_drop_inputs():
    module = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(InputError, match="'0' is a convolution in 2 groups"):
        mixture_over(module, "all", family_of("dropout"), trainable_names(module))


def test_frozen_layers_are_left_alone():
    module = network()
    module[4].requires_grad_(False)
    found = mixture_over(module, ("norm", "output"), family_of("emp"), trainable_names(module))
    assert found.names == {"1.weight", "1.bias"}
    module[1].requires_grad_(False)
    with pytest.raises(InputError, match="are frozen"):
        mixture_over(module, ("norm", "output"), family_of("emp"), trainable_names(module))
