"""The posterior of component mixtures: its draws, what they cost, and what they say together."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import polymode as pm
from polymode.errors import InputError, NotCollapsible
from polymode.likelihoods import make_likelihood
from polymode.networks.members import stack
from polymode.networks.surgery import prepare, tensors_of, trainable_names
from polymode.posteriors.component_mixture import COMPONENTS, SHARED, ComponentMixture
from polymode.posteriors.network import Network
from polymode.seeds import draw_seed
from polymode.weights.mixtures import family_of, mixture_over
from tolerances import PASS, assert_equal_up_to_rounding

X = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))


def module(width: int = 8, outputs: int = 3) -> nn.Module:
    layers = (nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))
    made = nn.Sequential(*layers).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made


def posterior(scheme: str, likelihood="categorical", where=("norm", "output"), **options) -> ComponentMixture:
    made = module(**options)
    mixture = mixture_over(made, where, family_of(scheme, 3), trainable_names(made))
    generator = torch.Generator().manual_seed(4)
    chain = {
        SHARED + name: tensor.clone()
        for name, tensor in tensors_of(made).items()
        if name not in mixture.names
    }
    chain |= {
        COMPONENTS + name: torch.randn(mixture.family.num_components, *shape, generator=generator)
        for name, shape in mixture.shapes.items()
    }
    network = Network(prepare(made), make_likelihood(likelihood), "vmap")
    return ComponentMixture(network, mixture=mixture, chains=[chain])


def seeds_of_draws(number: int, generator: torch.Generator) -> torch.Tensor:
    """Every chain has a generator of its own, seeded from the one that is given."""
    of_chain = torch.Generator().manual_seed(draw_seed(generator))
    return torch.randint(2**62, (number,), generator=of_chain)


def by_hand(found: ComponentMixture, seed: torch.Tensor) -> torch.Tensor:
    """Outputs of the network with one seed, written with plain PyTorch."""
    [chain] = found.chains
    assert found.mixture is not None
    weights = {n.removeprefix(SHARED): t for n, t in chain.items() if n.startswith(SHARED)}
    for name, index in found.mixture.indices(seed[None]).items():
        components = chain[COMPONENTS + name]
        index = index[0].expand(components.shape[1:])
        weights[name] = sum((index == k).float() * components[k] for k in range(3))
    return torch.func.functional_call(module(), weights, (X,))


@pytest.mark.parametrize("scheme", ["emp", "ecmp"])
def test_the_predictive_is_the_mean_of_probabilities_over_draws(scheme):
    found = posterior(scheme)
    seeds = seeds_of_draws(50, torch.Generator().manual_seed(9))
    expected = torch.stack([by_hand(found, seed).softmax(-1) for seed in seeds]).mean(0)
    for backend in ("vmap", "loop"):
        predicted = found.with_backend(backend).predict(X, 50, torch.Generator().manual_seed(9))
        assert predicted.num_members == 50
        torch.testing.assert_close(predicted.mean, expected)


def test_mean_and_variance_of_a_regression_are_those_of_appendix_b3():
    found = posterior("ecmp", pm.likelihoods.FixedGaussian(std=0.5), outputs=1)
    outputs = torch.cat([o for _, o, _ in found.outputs(X, 400, torch.Generator().manual_seed(2))])
    predicted = found.predict(X, 400, torch.Generator().manual_seed(2))
    torch.testing.assert_close(predicted.mean, outputs.mean(0))
    variance = outputs.double().square().mean(0) - outputs.double().mean(0).square() + 0.25
    torch.testing.assert_close(predicted.std.double().square(), variance, rtol=1e-4, atol=1e-5)


def test_an_explicit_ensemble_is_its_networks():
    found = posterior("explicit")
    assert found.num_members == 3
    [chain] = found.chains
    shared = {n.removeprefix(SHARED): t for n, t in chain.items() if n.startswith(SHARED)}
    networks = [
        shared | {n.removeprefix(COMPONENTS): t[k] for n, t in chain.items() if n.startswith(COMPONENTS)}
        for k in range(3)
    ]
    particles = pm.Particles(found.network, blocks=[stack(networks)])
    torch.testing.assert_close(found.predict(X).mean, particles.predict(X).mean)
    assert found.predict(X, 2).num_members == 2
    with pytest.raises(InputError, match="holds 3"):
        found.predict(X, 4)


def test_draws_replay_and_do_not_depend_on_their_number_or_on_blocks(monkeypatch):
    found = posterior("ecmp")
    first = torch.cat([o for _, o, _ in found.outputs(X, 20)])
    assert torch.equal(first, torch.cat([o for _, o, _ in found.outputs(X, 20)]))
    monkeypatch.setattr("polymode.posteriors.component_mixture.BLOCK_BYTES", 1024 * 7)
    monkeypatch.setattr("polymode.posteriors.base.ACTIVATION_BYTES", 11 * 8 * 4 * 3)
    blocks = [o for rows, o, _ in found.outputs(X, 20)]
    assert max(len(block) for block in blocks) <= 3
    torch.testing.assert_close(torch.cat(blocks), first)
    torch.testing.assert_close(torch.cat([o for _, o, _ in found.outputs(X, 7)]), first[:7])
    assert not torch.allclose(first, torch.cat([o for _, o, _ in found.outputs(X, 20, torch.Generator())]))


def test_layers_before_the_first_patched_one_run_once_for_all_draws(monkeypatch):
    found = posterior("ecmp", where="output")
    calls = {"trunk": 0, "head": 0}
    trunk, head = found.network.module[0], found.network.module[3]
    trunk.register_forward_hook(lambda *_: calls.update(trunk=calls["trunk"] + 1))
    shapes = []
    trunk.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    head.register_forward_hook(lambda *_: calls.update(head=calls["head"] + 1))
    found.predict(X, 200)
    assert calls["trunk"] <= 2, "one pass, and one with one example that finds out how large activations are"
    assert set(shapes) <= {(11, 8), (1, 8)}, "the trunk is never run once a draw"
    # However large the trunk's activations are: they are there once.
    monkeypatch.setattr("polymode.posteriors.base.ACTIVATION_BYTES", len(X) * 3 * 4 * 200)
    wide = posterior("ecmp", where="output", width=1000)
    counted = []
    wide.network.module[0].register_forward_hook(lambda *_: counted.append(1))
    wide.predict(X, 200)
    assert len(counted) <= 2


def test_draws_of_a_large_layer_stay_bounded(monkeypatch):
    """Neither a block, nor what is made at once on the way to it, grows with the number of draws."""
    found = posterior("ecmp", where="output", width=300, outputs=300)
    made = []
    numbers = type(found.mixture).numbers

    def noted(self, seeds):
        made.append(len(seeds) * self.num_assignments)
        return numbers(self, seeds)

    monkeypatch.setattr(type(found.mixture), "numbers", noted)
    monkeypatch.setattr("polymode.posteriors.component_mixture.BLOCK_BYTES", 2**24)
    sizes, total = [], 0
    for block in found.draw(200):
        sizes.append(sum(t.numel() * t.element_size() for t in block.stacked.values()))
        total += block.num_members
    assert total == 200
    assert len(sizes) > 1
    assert max(sizes) <= 2**24
    assert max(made) <= 2**21
    assert found.mixture.indices(torch.arange(2))["3.weight"].element_size() == 1


def test_ten_thousand_draws_run_in_pieces_of_bounded_activations(monkeypatch):
    found = posterior("ecmp")
    monkeypatch.setattr("polymode.posteriors.base.ACTIVATION_BYTES", len(X) * 8 * 4 * 1000)
    largest = []
    found.network.module[3].register_forward_hook(lambda _, __, out: None)
    for _, outputs, _ in found.outputs(X, 10_000):
        largest.append(len(outputs))
    assert sum(largest) == 10_000
    assert max(largest) <= 1000


def test_what_cannot_be_asked_of_it():
    found = posterior("emp")
    with pytest.raises(NotCollapsible, match="draws a new network every time"):
        found.collapse()
    with pytest.raises(InputError, match="num_draws must be a whole number of at least 1, got 0"):
        found.predict(X, 0)
    with pytest.raises(InputError, match="cannot be merged"):
        found.merged([posterior("ecmp")])


def test_chains_of_a_merged_mixture_share_the_draws():
    found = posterior("ecmp")
    merged = pm.merge([found, found])
    labels = torch.cat([block.labels for block in merged.draw(7)])
    assert labels[:, 1].tolist() == [0] * 3 + [1] * 4
    assert merged.num_parameters == 2 * found.num_parameters
    trained = sum(p.numel() for p in module().parameters())
    patched = 8 + 8 + 24 + 3
    assert found.num_parameters == trained + 2 * patched


def test_chains_have_their_weights_whatever_the_number_of_draws():
    found = posterior("ecmp")
    weighted = pm.ComponentMixture(
        found.network, mixture=found.mixture, chains=[*found.chains] * 2, log_weights=(0.0, math.log(3))
    )
    for number in (4, 5, 9):
        blocks = list(weighted.draw(number))
        shares = [
            sum(float(b.log_weights.exp().sum()) for b in blocks if int(b.labels[0, 1]) == c) for c in (0, 1)
        ]
        assert shares[1] / shares[0] == pytest.approx(3)


class TestDropout:
    """Dropout layers that a trained network has, sampled without training again."""

    def single(self, p: float = 0.3) -> pm.Particles:
        made = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Dropout(p), nn.Linear(50, 2)).eval()
        generator = torch.Generator().manual_seed(3)
        for parameter in made.parameters():
            parameter.data.normal_(generator=generator)
        network = Network(prepare(made), make_likelihood("categorical"), "vmap")
        weights = {n: t for n, t in tensors_of(network.module).items() if not n.endswith("first_example")}
        return pm.Particles(network, blocks=[stack([weights])])

    def test_draws_have_the_mean_and_spread_of_dropout(self):
        single = self.single()
        sampled = pm.sample_dropout(single)
        draws = torch.cat([o for _, o, _ in sampled.outputs(X, 4000)]).double()
        [block] = single.draw()
        weights = {name: tensor.double() for name, tensor in block.member(0).items()}
        hidden = (X.double() @ weights["0.weight"].T + weights["0.bias"]).relu()
        mean = hidden @ weights["3.weight"].T + weights["3.bias"]
        variance = hidden.square() @ weights["3.weight"].T.square() * 0.3 / 0.7
        error = (variance / 4000).sqrt()
        assert float(((draws.mean(0) - mean) / error).abs().max()) < 4.5
        ratio = draws.var(0) / variance
        assert float((ratio - 1).abs().max()) < 4.5 * math.sqrt(2 / 4000) * 1.2  # kurtosis of 50 summed flips
        torch.testing.assert_close(single.predict(X).mean, mean.float().softmax(-1))

    def test_a_draw_has_one_mask_for_all_examples_or_one_for_each(self):
        same = X[:1].expand(6, -1)
        by_example = torch.cat([o for _, o, _ in pm.sample_dropout(self.single()).outputs(same, 3)])
        by_draw = torch.cat([o for _, o, _ in pm.sample_dropout(self.single(), "draw").outputs(same, 3)])
        for draw in by_draw:
            assert_equal_up_to_rounding(draw, draw[:1].expand_as(draw), PASS)
        for draw in (
            *by_example,
            by_draw[:, 0],
        ):  # masks that differ move the outputs by far more than rounding
            assert bool((torch.pdist(draw) > 0.01).all())

    def test_predictions_do_not_depend_on_how_inputs_are_cut(self):
        for masks in ("example", "draw"):
            sampled = pm.sample_dropout(self.single(), masks)
            torch.testing.assert_close(
                sampled.predict(X, 20, batch_size=3).mean, sampled.predict(X, 20, batch_size=11).mean
            )

    def test_it_is_saved_with_its_masks(self, tmp_path):
        sampled = pm.sample_dropout(self.single(), "draw")
        sampled.save(tmp_path / "saved")
        make = lambda: nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Dropout(0.3), nn.Linear(50, 2))  # noqa: E731
        loaded = pm.load_posterior(tmp_path / "saved", make)
        assert_equal_up_to_rounding(loaded.predict(X, 30).mean, sampled.predict(X, 30).mean, PASS)

    def test_stacked_draws_are_saved_with_their_masks(self, tmp_path):
        sampled = pm.sample_dropout(self.single(0.5))
        held_out = pm.ArrayData(X, torch.arange(11) % 2)
        stacked = pm.weigh_members(sampled, held_out, 30)
        stacked.save(tmp_path / "saved")
        make = lambda: nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Dropout(0.5), nn.Linear(50, 2))  # noqa: E731
        loaded = pm.load_posterior(tmp_path / "saved", make)
        torch.testing.assert_close(loaded.predict(X).mean, stacked.predict(X).mean)

    def test_weights_of_members_are_kept(self):
        [block] = self.single().draw()
        two = stack([block.member(0), block.member(0)])
        weighted = pm.Particles(
            self.single().network, blocks=[replace(two, log_weights=torch.tensor([0.0, math.log(0.5)]))]
        )
        sampled = pm.sample_dropout(weighted)
        blocks = list(sampled.draw(6))
        shares = [float(b.log_weights.exp().sum()) for b in blocks]
        assert shares[0] / shares[1] == pytest.approx(2)

    def test_a_network_without_dropout_is_refused(self):
        with pytest.raises(InputError, match="has no dropout layer with a rate above 0"):
            pm.sample_dropout(self.single(0.0))


class TiedRecurrent(nn.Module):
    """An LSTM between an embedding and the output layer that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.output = nn.Linear(6, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.embedding(tokens))[0])


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("number", [1, 2, 100])
def test_dropout_behind_an_lstm_is_drawn_in_any_number(number, validated):
    """Nothing before the dropout is a draw's own: vmap never meets the LSTM, which it could not run."""
    tokens = torch.randint(7, (12, 5), generator=torch.Generator().manual_seed(0))
    data = pm.ArrayData(tokens, tokens, batch_size=8)
    options = {"likelihood": "categorical", "epochs": 1, "progress": False}
    held_out = data if validated else None  # members in training own the LSTM: they run on the loop
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Members predict one after another")
        made = pm.fit(pm.methods.MCDropout(), TiedRecurrent, data, validation=held_out, **options)
    found = made.with_backend("vmap").predict(tokens, number).mean
    torch.testing.assert_close(found, made.with_backend("loop").predict(tokens, number).mean)
    assert pm.evaluate(made, data, num_draws=number)["nll"] > 0
