"""Gaussians over weights: the law they reach, sparsity that was planted, and what is particular to them."""

import json
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.seeds import draw_seed
from polymode.training.contract import next_noise
from polymode.training.loop.batches import Batches
from polymode.weights.gaussian import INCLUSION, RHO

SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9)


def linear_gaussian(num_examples=40, noise=0.5, prior=0.8):
    """Data of a linear model, and the posterior N(m, S) of its weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_examples, 3, generator=generator, dtype=torch.float64)
    x[:, 2] += 0.8 * x[:, 1]  # correlated, so that the mean field is not the posterior
    y = x @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    y = (y + noise * torch.randn(num_examples, generator=generator, dtype=torch.float64))[:, None]
    precision = x.T @ x / noise**2 + torch.eye(3, dtype=torch.float64) / prior**2
    return x, y, torch.linalg.solve(precision, x.T @ y / noise**2)[:, 0], precision


def test_the_law_of_a_linear_gaussian_model_is_reached():
    """The mean field of N(m, S) that minimises KL(q ‖ p) is N(m, 1/diag S⁻¹) (Bishop 2006, §10.1.2)."""
    x, y, mean, precision = linear_gaussian()
    falling = pm.schedules.Pieces(((0, 1.0), (0.3, 1.0), (1, 0.001)))
    method = pm.methods.MeanField(
        prior_std=0.8, rho=-2.0, optimizer=pm.Optimizer("Adam", lr=0.03), schedule=falling
    )
    posterior = pm.fit(
        method,
        lambda: nn.Linear(3, 1, bias=False).double(),
        pm.ArrayData(x, y, batch_size=len(x)),
        likelihood=pm.likelihoods.FixedGaussian(std=0.5),
        epochs=3000,
        progress=False,
    )
    [block] = posterior.blocks
    found, sigma = block.stacked["weight"].flatten(), F.softplus(block.stacked[RHO]).flatten()
    expected = precision.diagonal().rsqrt()
    # The noise of the last steps, at rates that fall to 3e-5, is far below the widths themselves.
    torch.testing.assert_close(found, mean, atol=0.1 * expected.min().item(), rtol=0)
    torch.testing.assert_close(sigma, expected, rtol=0.05, atol=0)
    wrong = torch.linalg.inv(precision).diagonal().sqrt()  # the marginal widths of the posterior
    assert (wrong[1:] / expected[1:]).min() > 1.2  # which the comparison would tell apart
    drawn = torch.cat([b.stacked["weight"] for b in posterior.draw(4000)])[:, 0]
    torch.testing.assert_close(drawn.std(0), sigma, rtol=5 / (2 * 4000) ** 0.5, atol=0)
    torch.testing.assert_close(drawn.mean(0), found, atol=(5 * sigma.max() / 4000**0.5).item(), rtol=0)


def test_planted_sparsity_is_recovered_exactly():
    """Every output has a hidden unit of its own; half of the outputs are noise, whose units are left out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    planted = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0], dtype=torch.float64)
    teacher = torch.randn(8, 5, generator=generator, dtype=torch.float64) * planted[:, None]
    y = x @ teacher.T + 0.5 * torch.randn(400, 8, generator=generator, dtype=torch.float64)

    def network() -> nn.Module:
        module = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8, bias=False)).double()
        nn.init.eye_(module[1].weight)
        module[1].requires_grad_(False)
        return module

    method = pm.methods.SpikeSlab(
        prior_std=1.0,
        rho=-4.0,
        inclusion=0.9,
        prior_inclusion=0.1,
        optimizer=pm.Optimizer("Adam", lr=0.02),
        schedule=pm.schedules.Pieces(((0, 1.0), (0.5, 1.0), (1, 0.01))),
    )
    posterior = pm.fit(
        method,
        network,
        pm.ArrayData(x, y, batch_size=100),
        likelihood=pm.likelihoods.FixedGaussian(std=0.5),
        epochs=300,
        progress=False,
    )
    gamma = posterior.blocks[0].stacked[INCLUSION].sigmoid().flatten()
    assert torch.equal((gamma > 0.5).double(), planted)
    assert ((gamma < 0.1) | (gamma > 0.9)).all()
    measured = posterior.record["history"][-1]["measure_units_remaining"]
    assert measured == pytest.approx(planted.mean().item())
    weights = posterior.means().collapse()[0].weight
    assert torch.equal((weights != 0).any(1).double(), planted)
    torch.testing.assert_close(weights, teacher, atol=5 * 0.5 / 400**0.5, rtol=0)


# --- what is drawn, kept and weighed ------------------------------------------------------------------


def small(method, epochs=3, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (24,), generator=generator)
    options = {"likelihood": "categorical", "progress": False, "epochs": epochs} | options
    factory = lambda: pm.models.MLP(4, 3, (6,), activation=nn.Tanh).double()  # noqa: E731
    return pm.fit(method, options.pop("model", factory), pm.ArrayData(x, y, batch_size=8), **options), (x, y)


@pytest.mark.parametrize(
    "annealing", [None, pm.schedules.Pieces(((0, 0.0), (1, 1.0)))], ids=["whole", "annealed"]
)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("sparse", [False, True], ids=["mean_field", "spike_slab"])
def test_a_training_is_the_loop_by_hand(backend, annealing, sparse):
    """Every step by autograd on the formulas, with the noise that the seeds give, clipped over everything."""
    optimizer = pm.Optimizer("SGD", lr=0.1, momentum=0.9, clip_norm=0.3)
    options = {"prior_std": 0.5, "rho": -2.0, "annealing": annealing, "optimizer": optimizer}
    method = pm.methods.MeanField(**options)
    if sparse:
        method = pm.methods.SpikeSlab(**options, inclusion=0.7, prior_inclusion=0.2)
    torch_state = torch.get_rng_state()
    posterior, (x, y) = small(method, backend=backend)
    assert torch.equal(torch.get_rng_state(), torch_state)
    found = {name: t[0] for name, t in posterior.blocks[0].stacked.items()}
    expected = _by_hand(method, posterior, x, y, annealing)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def _by_hand(method, posterior, x, y, annealing):
    """Three epochs of three minibatches; start, orders and seeds are those of chain 0, seed 0."""
    weights = posterior.weights
    start, noise = _beginning_of(method)
    trained = {name: t.clone() for name, t in start.items()}
    momentum = {name: torch.zeros_like(t) for name, t in trained.items()}
    batches = Batches(
        [pm.ArrayData(x, y, batch_size=8)], range(1), [0], shared_order=False, arrange=lambda e, _: e
    )
    step = 0
    for epoch in range(3):
        for [batch] in batches.epoch(epoch, 1):
            noise = next_noise(noise)
            examples = batch.pieces[0].examples
            inputs, targets = examples.inputs[0], examples.targets[0]
            numbers = {n: t[0] for n, t in weights.noise(noise, trained[RHO]).items()}
            leaves = {name: t.clone().requires_grad_() for name, t in trained.items()}
            sigma = F.softplus(leaves[RHO])
            moved = weights.by_name(sigma * numbers["normal"])
            made = {name: leaves[name] + moved[name] for name in weights.shapes}
            z = torch.ones(())
            if INCLUSION in leaves:
                u, logits = numbers["uniform"], leaves[INCLUSION]
                eta = logits + (u + 1e-10).log() - (1 - u + 1e-10).log()
                soft = (eta / 0.5).sigmoid()
                z = (eta > 0).double() + soft - soft.detach()
                made["1.weight"], made["1.bias"] = made["1.weight"] * z[:, None], made["1.bias"] * z
            hidden = torch.tanh(inputs @ made["1.weight"].T + made["1.bias"])
            data = F.cross_entropy(hidden @ made["3.weight"].T + made["3.bias"], targets)
            terms = {}
            for name, std in weights.by_name(sigma).items():
                q = torch.distributions.Normal(leaves[name], std)
                terms[name] = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 0.5))
            if INCLUSION in leaves:
                gamma, prior = leaves[INCLUSION].sigmoid(), 0.2
                kl = (gamma * (terms["1.weight"].sum(1) + terms["1.bias"])).sum()
                kl = kl + terms["3.weight"].sum() + terms["3.bias"].sum()
                kl = (
                    kl
                    + (gamma * (gamma / prior).log() + (1 - gamma) * ((1 - gamma) / (1 - prior)).log()).sum()
                )
            else:
                kl = sum(term.sum() for term in terms.values())
            factor = 1.0 if annealing is None else step / 9
            gradients = torch.autograd.grad(data + factor * kl / 24, list(leaves.values()))
            norm = torch.sqrt(sum(g.square().sum() for g in gradients))
            for name, gradient in zip(leaves, gradients, strict=True):
                clipped = gradient * min(1.0, 0.3 / (norm.item() + 1e-6))
                momentum[name] = clipped if step == 0 else 0.9 * momentum[name] + clipped
                trained[name] = trained[name] - 0.1 * momentum[name]
            step += 1
    return trained


def _beginning_of(method):
    """Weights that chain 0 begins with, and its seed of noise."""
    captured = {}

    class Spy(type(method)):
        def init(self, problem, generator):
            state = super().init(problem, generator)
            captured.update({n: t[0].clone() for n, t in state.members.stacked.items()})
            copied = torch.Generator()
            copied.set_state(generator.get_state())
            captured["noise"] = torch.tensor([draw_seed(copied)])
            return state

    options = {each.name: getattr(method, each.name) for each in fields(method)}
    small(Spy(**options), epochs=1)
    noise = captured.pop("noise")
    return {name: t for name, t in captured.items() if t.is_floating_point()}, noise


def test_only_the_layers_that_where_names_are_drawn():
    posterior, _ = small(pm.methods.MeanField(where="output", rho=-1.0, optimizer=SGD))
    [block] = posterior.draw(5)
    assert set(block.stacked) == {"3.weight", "3.bias"}
    assert {"1.weight", "1.bias"} <= set(block.shared)
    assert posterior.num_parameters == 6 * 4 + 6 + 2 * (3 * 6 + 3)


def test_counts_of_parameters_and_bytes(tmp_path):
    """Mean and spread of every weight, and one number for each unit: 2.2 times the network at most."""
    network = pm.models.resnet20()
    dense = sum(p.numel() for p in network.parameters())
    assert pm.methods.MeanField().num_parameters(network) == 2 * dense
    channels = sum(m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d))
    assert pm.methods.SpikeSlab().num_parameters(network) == 2 * dense + channels
    x, y = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    posterior = pm.fit(
        pm.methods.SpikeSlab(),
        pm.models.resnet20,
        pm.ArrayData(x, y),
        likelihood="categorical",
        epochs=1,
        progress=False,
    )
    posterior.save(tmp_path / "saved")
    size = sum(path.stat().st_size for path in (tmp_path / "saved").iterdir())
    assert size < 2.2 * 4 * dense
    assert posterior.num_parameters == 2 * dense + channels


@pytest.mark.parametrize(("count", "published"), [(5, 1232), (9, 2128)], ids=["ResNet-32", "ResNet-56"])
def test_units_of_the_published_networks(count, published):
    network = pm.models.resnet.ResNet(count)
    trained = frozenset(name for name, _ in network.named_parameters())
    assert sum(pm.methods.SpikeSlab().weights_over(network, trained).counts) == published


def test_draws_are_spread_over_members_of_an_ensemble():
    posterior, (x, _) = small(pm.methods.DeepEnsemble(3, of=pm.methods.MeanField(rho=-1.0, optimizer=SGD)))
    assert posterior.num_members is None
    assert posterior.num_components == 3
    blocks = list(posterior.draw(7))
    assert [block.num_members for block in blocks] == [2, 2, 3]
    assert [block.labels[0, 1].item() for block in blocks] == [0, 1, 2]
    mass = [block.log_weights.exp().sum().item() for block in blocks]
    assert mass == pytest.approx([7 / 3] * 3)
    assert not torch.equal(posterior.predict(x, 2).mean, posterior.predict(x, 50).mean)


def test_without_spread_a_draw_is_the_network_at_the_means():
    posterior, (x, _) = small(pm.methods.MeanField(rho=-60.0, optimizer=pm.Optimizer("SGD", lr=1e-12)))
    torch.testing.assert_close(posterior.predict(x, 3).mean, posterior.means().predict(x).mean)
    with pytest.raises(pm.errors.NotCollapsible, match=r"means\(\).collapse\(\)"):
        posterior.collapse()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pm.methods.MeanField(prior_std=0.0), "prior_std"),
        (lambda: pm.methods.MeanField(means_from="zeros"), "means_from"),
        (lambda: pm.methods.MeanField(optimizer=pm.Optimizer("LBFGS")), "another draw"),
        (lambda: pm.methods.MeanField(annealing=3), "annealing"),
        (lambda: pm.methods.SpikeSlab(inclusion=1.0), "inclusion"),
        (lambda: pm.methods.SpikeSlab(prior_inclusion=0.0), "prior_inclusion"),
        (lambda: pm.methods.SpikeSlab(temperature=0), "temperature"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_network_without_hidden_layers_is_refused_before_training():
    with pytest.raises(InputError, match="left out"):
        small(pm.methods.SpikeSlab(), model=lambda: nn.Linear(4, 3).double())


def test_what_remains_is_counted_after_every_epoch():
    """Of a network of 4 × 6 and 6 × 3 weights: the classifier (21 with its biases) always counts whole."""
    posterior, _ = small(
        pm.methods.SpikeSlab(inclusion=0.7, prior_inclusion=0.5, prior_std=1.0, rho=-2.0, optimizer=SGD),
        epochs=2,
    )
    for row in posterior.record["history"]:
        units = round(6 * row["measure_units_remaining"])
        assert row["measure_parameters_remaining"] == pytest.approx((4 * units + 21) / (24 + 21))
        assert row["measure_multiplications_remaining"] == pytest.approx((4 * units + 21) / (24 + 21))
        # Really multiplied: a unit less also saves in the layer that reads it; a layer keeps at least one.
        assert row["measure_computed_remaining"] == pytest.approx(7 * max(1, units) / (24 + 18))


def test_weight_decay_acts_on_means_only():
    """Also where torch's optimiser has some by default, as AdamW has."""
    for optimizer in (pm.Optimizer("AdamW", lr=1e-3), pm.Optimizer("SGD", lr=1e-3, weight_decay=0.1)):
        method = pm.methods.SpikeSlab(rho=-60.0, annealing=pm.schedules.Constant(0.0), optimizer=optimizer)
        posterior, _ = small(method)
        assert (posterior.blocks[0].stacked[RHO] == -60.0).all()
    heavy = pm.methods.MeanField(rho=-60.0, optimizer=pm.Optimizer("SGD", lr=0.01, weight_decay=10.0))
    light = pm.methods.MeanField(rho=-60.0, optimizer=pm.Optimizer("SGD", lr=0.01))
    sizes = [small(m)[0].blocks[0].stacked["1.weight"].norm() for m in (heavy, light)]
    assert sizes[0] < 0.6 * sizes[1]


def test_weights_without_a_gaussian_have_the_prior():
    """Weights that are not drawn are pulled towards 0 by Σ θ²/(2 s²)/N all the same."""
    flat, tight = (
        small(pm.methods.MeanField(prior_std=s, where="output", rho=-60.0, optimizer=SGD), epochs=60)[0]
        for s in (100.0, 0.05)
    )
    assert tight.blocks[0].stacked["1.weight"].norm() < 0.2 * flat.blocks[0].stacked["1.weight"].norm()


def test_means_can_begin_as_he_et_al_draw_them():
    still = pm.Optimizer("SGD", lr=1e-12)
    posterior, _ = small(pm.methods.MeanField(means_from="kaiming", optimizer=still))
    weight = posterior.blocks[0].stacked["1.weight"]
    assert 0.5 * (6 / 4) ** 0.5 < weight.abs().max() <= (6 / 4) ** 0.5  # beyond 1/√4, where PyTorch stops
    again, _ = small(pm.methods.MeanField(means_from="kaiming", optimizer=still), initial=posterior.means())
    torch.testing.assert_close(again.blocks[0].stacked["1.weight"], weight, atol=1e-9, rtol=0)


def test_a_layer_that_loses_all_units_is_told():
    method = pm.methods.SpikeSlab(inclusion=0.51, prior_inclusion=1e-9, optimizer=pm.Optimizer("SGD", lr=1.0))
    with pytest.warns(UserWarning, match="left out all units of '1'"):
        posterior, _ = small(method, epochs=30)
    assert posterior.record["findings"][0]["units"] == {"1": [0, 6]}


def test_compact_networks_are_the_draws_of_the_same_seed():
    posterior, (x, _) = small(
        pm.methods.SpikeSlab(inclusion=0.7, prior_inclusion=0.5, prior_std=1.0, rho=-2.0, optimizer=SGD)
    )
    separate = posterior.compact(num_draws=3, seed=4)
    torch.testing.assert_close(
        separate.predict(x).mean, posterior.predict(x, 3, torch.Generator().manual_seed(4)).mean
    )
    assert posterior.compact(num_draws=None).num_members == 1
    means = posterior.compact(mean=True)
    torch.testing.assert_close(means.predict(x).mean, posterior.means().predict(x).mean)


def test_the_order_of_weights_is_stored_as_such(tmp_path):
    """A tool that sorts the keys of a document changes nothing: vectors are divided by lists."""
    posterior, (x, _) = small(
        pm.methods.SpikeSlab(inclusion=0.7, prior_inclusion=0.5, prior_std=1.0, rho=-2.0, optimizer=SGD)
    )
    posterior.save(tmp_path / "saved")
    path = tmp_path / "saved" / "posterior.json"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    again = pm.load_posterior(tmp_path / "saved", lambda: pm.models.MLP(4, 3, (6,), activation=nn.Tanh))
    assert torch.equal(again.predict(x, 5).mean, posterior.predict(x, 5).mean)
