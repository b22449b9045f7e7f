"""MIMO against a wider network that is trained by hand, and what its heads say together."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F

import polymode as pm
from cases import BY_NAME, conv_net
from polymode.errors import InputError
from polymode.seeds import derive_generator
from polymode.training.loop import backends
from tolerances import PASS, assert_equal_up_to_rounding

HEADS, N, BATCH, EPOCHS, PRIOR = 3, 22, 8, 2, 0.7
SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9)
STILL = pm.Optimizer("SGD", lr=1e-300)


class Watched(pm.methods.MIMO):
    """Remembers where its chains begin and how examples are shuffled, in the order of steps and chains."""

    def init(self, problem, generator):
        state = super().init(problem, generator)
        WATCHED["start"].append({n: t[0].clone() for n, t in state.members.stacked.items()})
        return state

    def shuffles(self, count, generator):
        WATCHED["shuffles"].append(super().shuffles(count, generator))
        return WATCHED["shuffles"][-1]


WATCHED: dict[str, list] = {}


@pytest.fixture(autouse=True)
def _forgotten():
    WATCHED.update(start=[], shuffles=[])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def images() -> nn.Module:
    return conv_net().double()


def data_of(network, seed=3, count=N) -> pm.ArrayData:
    g = torch.Generator().manual_seed(seed)
    shape = (4,) if network is mlp else (2, 6, 6)
    x = torch.randn(count, *shape, dtype=torch.float64, generator=g)
    weights = torch.rand(count, dtype=torch.float64, generator=g) if network is mlp else None
    return pm.ArrayData(x, torch.randint(3, (count,), generator=g), weights=weights, batch_size=BATCH)


def fitted(method, model, data, epochs=EPOCHS, likelihood="categorical", **options):
    options = {"backend": "loop", "progress": False} | options
    return pm.fit(method, model, data, likelihood=likelihood, epochs=epochs, **options)


def weights_of(posterior) -> dict[str, Tensor]:
    [block] = posterior.draw()
    return {name: tensor[0] for name, tensor in block.shared.items()}


def heads_of(wide: nn.Module, slots: list[Tensor]) -> list[Tensor]:
    """Outputs of all heads of a wider network; an input for each slot."""
    return list(wide(torch.cat(slots, 1)).chunk(len(slots), 1))


def wider(network) -> nn.Module:
    module, size = network(), 4 if network is mlp else 2
    if network is mlp:
        module[0] = nn.Linear(HEADS * size, 5)
    else:
        module[0] = nn.Conv2d(HEADS * size, 4, 3, padding=1)
    module[-1] = nn.Linear(module[-1].in_features, HEADS * 3)
    return module.double()


def trained_by_hand(network, data: pm.ArrayData, chain: int, shuffles: list[Tensor]) -> nn.Module:
    """Σ_h CE(head h, its own examples) on every minibatch, repeated and shuffled, and the prior's part."""
    wide = wider(network)
    wide.load_state_dict({n: t for n, t in WATCHED["start"][chain].items() if "shares" not in n})
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.05, momentum=0.9)
    weights = torch.ones(N).double() if data.weights is None else data.weights
    steps = iter(shuffles)
    for epoch in range(EPOCHS):
        order = torch.randperm(N, generator=derive_generator(0, "order", chain, epoch, N))
        for rows in order.split(BATCH):
            slots = [rows[places] for places in next(steps)]
            loss = sum(p.square().sum() for p in wide.parameters()) / (2 * PRIOR**2) / N
            outputs = heads_of(wide, [data.inputs[slot] for slot in slots])
            for output, slot in zip(outputs, slots, strict=True):
                loss = (
                    loss
                    + (weights[slot] * F.cross_entropy(output, data.targets[slot], reduction="none")).mean()
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert next(steps, None) is None
    return wide


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("network", [mlp, images])
def test_training_against_a_wider_network_by_hand(network, backend):
    data = data_of(network)
    method = Watched(HEADS, repetitions=2, input_repetition=0.25, prior_std=PRIOR, optimizer=SGD)
    posterior = fitted(pm.methods.DeepEnsemble(2, of=method), network, data, backend=backend)
    assert posterior.num_members == 2 * HEADS
    assert posterior.record["member_epochs"] == pytest.approx(2 * 2 * EPOCHS)
    steps = EPOCHS * -(-N // BATCH)
    of_chains = WATCHED["shuffles"][-2 * steps :]  # before the training a step is tried
    for chain, block in enumerate(posterior.draw()):
        wide = trained_by_hand(network, data, chain, of_chains[chain::2])
        for name, tensor in wide.state_dict().items():
            assert_equal_up_to_rounding(block.shared[name][0], tensor, name=name)
        moved = block.shared["0.weight"][0] - WATCHED["start"][chain]["0.weight"]
        assert moved.abs().max() > 1e-3


def test_every_head_sees_every_example_as_often():
    method = pm.methods.MIMO(4, repetitions=3)
    found = method.shuffles(10, torch.Generator().manual_seed(0))
    assert found.shape == (4, 30)
    for head in found:
        assert head.bincount().tolist() == [3] * 10
    # Independent orders meet in a tenth of the 6 · 30 places of every two heads: 18, give or take 4 · 4.
    pairs = torch.combinations(torch.arange(4))
    assert 2 <= int((found[pairs[:, 0]] == found[pairs[:, 1]]).sum()) <= 34
    others = method.shuffles(10, torch.Generator().manual_seed(1))
    assert not torch.equal(found, others)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.4, 80), (1.0, 200)])
def test_a_share_of_the_passes_has_one_example_in_all_slots(share, count):
    method = pm.methods.MIMO(3, repetitions=2, input_repetition=share)
    found = method.shuffles(100, torch.Generator().manual_seed(0))
    for head in found:
        assert head.bincount().tolist() == [2] * 100
    alike = int((found == found[0]).all(0).sum())
    assert count <= alike <= count + 3  # three of a hundred examples rarely meet


def test_the_body_runs_once_for_all_heads():
    """In training also on the loop; in prediction where vmap maps heads, from the last layer on."""
    seen = []

    def note(_, inputs, outputs):
        seen.append((len(outputs), is_batchedtensor(outputs)))

    def watched() -> nn.Module:
        module = mlp()
        module[1].register_forward_hook(note)
        return module

    data = data_of(mlp, count=16)
    posterior = fitted(pm.methods.MIMO(HEADS, repetitions=2), watched, data, epochs=1)
    assert seen[-2:] == [(2 * BATCH, False)] * 2
    calls = len(seen)
    posterior.with_backend("vmap").predict(data.inputs)
    assert set(seen[calls:]) <= {(16, False), (1, False)}  # one row, to see how much memory members need


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_predictions_are_the_mean_of_the_heads(backend):
    data = data_of(images)
    posterior = fitted(pm.methods.MIMO(HEADS, optimizer=SGD), images, data)
    wide = wider(images).eval()
    wide.load_state_dict(weights_of(posterior))
    outputs = torch.stack(heads_of(wide, [data.inputs] * HEADS)).detach()
    predictive = posterior.with_backend(backend).predict(data.inputs, batch_size=9)
    assert_equal_up_to_rounding(predictive.mean, outputs.softmax(-1).mean(0), PASS)
    assert_equal_up_to_rounding(
        posterior.log_prob(data.inputs, data.targets),
        outputs.softmax(-1).mean(0).log()[range(N), data.targets],
        PASS,
    )
    [block] = posterior.draw()
    assert block.labels.tolist() == [[0, 0, head] for head in range(HEADS)]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)


def test_regression_mixes_the_heads_predictives():
    case = BY_NAME["input_dependent_noise"]
    method = pm.methods.MIMO(2, repetitions=1, optimizer=pm.Optimizer("SGD", lr=0.01))
    posterior = fitted(method, case.double_factory, case.data(), likelihood=case.likelihood)
    inputs = case.data(seed=5).inputs
    wide = pm.models.MLP(8, 4, (6,)).double()
    wide.load_state_dict(weights_of(posterior))
    outputs = torch.stack(heads_of(wide, [inputs] * 2)).detach()
    means, stds = case.likelihood.moments(outputs)
    predictive = posterior.predict(inputs)
    assert_equal_up_to_rounding(predictive.mean, means.mean(0), PASS)
    variance = stds.square().mean(0) + means.var(0, correction=0)
    assert_equal_up_to_rounding(predictive.variance, variance, PASS)


def test_tokens_of_joined_sequences():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 6, 4, dtype=torch.float64, generator=g)
    y = x.cumsum(1)[..., :3].argmax(-1)
    data = pm.ArrayData(x, y, batch_size=10)
    posterior = fitted(pm.methods.MIMO(2, optimizer=SGD), mlp, data, epochs=20)
    wide = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    wide.load_state_dict(weights_of(posterior))
    expected = wide(torch.cat([x, x], -1)).unflatten(-1, (2, 3)).softmax(-1).mean(-2)
    assert_equal_up_to_rounding(posterior.predict(x).mean, expected.detach(), PASS)
    losses = [entry["loss"] for entry in posterior.record["history"]]
    assert losses[-1] < 0.9 * losses[0]


def test_validation_is_about_the_mean_of_the_heads_outputs():
    data, held_out = data_of(mlp), data_of(mlp, seed=4)
    posterior = fitted(pm.methods.MIMO(HEADS, optimizer=SGD), mlp, data, validation=held_out)
    outputs = torch.cat([outputs for _, outputs, _ in posterior.outputs(held_out.inputs)])
    losses = F.cross_entropy(outputs.mean(0), held_out.targets, reduction="none")
    expected = (held_out.weights * losses).sum() / held_out.weights.sum()
    found = posterior.record["history"][-1]["validation_nll"]
    assert found == pytest.approx(float(expected), abs=1e-6)


def test_the_best_epoch_is_kept():
    data, held_out = data_of(mlp), data_of(mlp, seed=4)
    method = pm.methods.MIMO(2, optimizer=pm.Optimizer("SGD", lr=2.0), keep="best")
    posterior = fitted(method, mlp, data, epochs=8, validation=held_out)
    scores = [entry["validation_nll"] for entry in posterior.record["history"]]
    best = 1 + scores.index(min(scores))
    assert best < 8
    until = fitted(replace(method, keep="last"), mlp, data, epochs=best)
    assert_equal_up_to_rounding(weights_of(posterior), weights_of(until))


def test_counts_of_parameters():
    with torch.device("meta"):
        network = pm.models.WideResNet(28, 10)
    assert pm.methods.Single().num_parameters(network) == 36_479_194
    assert pm.methods.MIMO(3).num_parameters(network) == 36_492_878  # as published
    method = pm.methods.DeepEnsemble(2, of=pm.methods.MIMO(HEADS, optimizer=SGD))
    for model in (mlp, images):
        posterior = fitted(method, model, data_of(model), epochs=1)
        own = sum(p.numel() for p in wider(model).parameters())
        assert posterior.num_parameters == method.num_parameters(model()) == 2 * own
    assert pm.methods.MIMO(1).num_parameters(mlp()) == pm.methods.Single().num_parameters(mlp())


def test_the_users_weights_between_the_two_layers_are_where_it_begins():
    module = images()
    nn.init.normal_(module[1].weight)
    begun = weights_of(fitted(pm.methods.MIMO(HEADS, optimizer=STILL), module, data_of(images), epochs=1))
    assert torch.equal(begun["1.weight"], module[1].weight)
    assert begun["0.weight"].shape == (4, 6, 3, 3)


def test_a_fit_begins_where_another_one_ended():
    data, method = data_of(images), Watched(HEADS, optimizer=SGD)
    first = fitted(method, images, data)
    WATCHED["start"].clear()
    again = fitted(method, images, data, initial=first)
    [start] = WATCHED["start"]
    assert torch.equal(start.pop("5.shares"), torch.full((HEADS,), 1 / HEADS, dtype=torch.float64))
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights_of(first).items())
    assert again.num_members == HEADS
    ensemble = fitted(pm.methods.DeepEnsemble(2, of=method), images, data)
    WATCHED["start"].clear()
    fitted(pm.methods.DeepEnsemble(2, of=method), images, data, initial=ensemble)
    for start, block in zip(WATCHED["start"], ensemble.draw(), strict=True):
        assert torch.equal(start["0.weight"], block.shared["0.weight"][0])
    with pytest.raises(InputError, match=r"initial is of another network: '0.weight'"):
        fitted(pm.methods.MIMO(2), images, data, initial=first)
    with pytest.raises(InputError, match=r"initial is of another network: '0.weight'"):
        fitted(pm.methods.Single(), images, data, initial=first)


def test_chains_on_unequal_data_sets_are_what_they_would_be_alone():
    long, short = data_of(images), data_of(images, seed=4, count=11)
    method = pm.methods.MIMO(HEADS, optimizer=SGD)
    together = fitted(method, images, [long, short])
    for data, posterior in zip((long, short), together, strict=True):
        assert_equal_up_to_rounding(weights_of(posterior), weights_of(fitted(method, images, data)))


def test_chains_that_share_the_order_of_data_shuffle_apart():
    method = pm.methods.DeepEnsemble(2, of=Watched(HEADS, optimizer=SGD))
    fitted(method, mlp, data_of(mlp), shared_order=True)
    first, second = WATCHED["shuffles"][-2:]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", [pm.methods.SWA, pm.methods.SWAG])
def test_its_weights_can_be_averaged(method):
    """Running statistics are those of dealt batches, as in training; every draw has all heads."""
    averaged = method(pm.methods.MIMO(HEADS, optimizer=SGD), start=0)
    posterior = fitted(averaged, images, data_of(images))
    labels = torch.cat([block.labels for block in posterior.draw()])
    assert labels[:, 2].tolist() == list(range(posterior.num_members))
    assert posterior.predict(data_of(images).inputs).mean.isfinite().all()


def test_members_that_share_weights_predict_the_faster_way(monkeypatch):
    timed = []

    def seconds(network, members, source, backend, num_examples=32):
        timed.append((members.num_members, sorted(members.stacked)))
        return {"vmap": 1.0, "loop": 2.0}[backend]

    monkeypatch.setattr(backends, "_pass_seconds", seconds)
    posterior = fitted(pm.methods.MIMO(HEADS), images, data_of(images), epochs=1, backend="auto")
    assert posterior.record["backend"] == "loop"
    assert posterior.record["prediction_backend"] == posterior.network.backend == "vmap"
    assert set(map(str, timed)) == {str((HEADS, ["5.shares"]))}
    timed.clear()
    fitted(pm.methods.Single(), images, data_of(images), epochs=1, backend="auto")
    assert not timed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members must be a whole number of at least 1"),
        ({"repetitions": 0.5}, "repetitions must be a whole number of at least 1"),
        ({"input_repetition": 1.5}, "input_repetition is a share from 0 to 1, got 1.5"),
        ({"optimizer": "adam"}, "optimizer must be a description"),
        ({"keep": "first"}, "keep='first'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        pm.methods.MIMO(**options)


def test_the_users_module_keeps_its_layers():
    module = images()
    before = copy.deepcopy(module)
    pm.methods.MIMO().num_parameters(module)
    fitted(pm.methods.MIMO(), module, data_of(images), epochs=1)
    assert repr(module) == repr(before)
    for name, tensor in before.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)
