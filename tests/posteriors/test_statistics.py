"""Running statistics for any weights, against means and variances taken by hand."""

import pytest
import torch
from torch import nn

import polymode as pm
from polymode.methods import DeepEnsemble, Single
from polymode.posteriors.statistics import estimated_names, in_batches, of_latest_batch, with_statistics
from tolerances import PASS, assert_equal_up_to_rounding

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=10)


def network(*, dropout=0.0):
    """Two normalisations, so that the second sees what the first one makes of a batch."""
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5, momentum=0.3),
        nn.Tanh(),
        nn.Linear(5, 2),
    ).double()


def fitted(model=network, count=3):
    optimizer = pm.Optimizer("SGD", lr=0.1)
    method = DeepEnsemble(count, of=Single(optimizer=optimizer))
    return pm.fit(method, model, DATA, likelihood="categorical", epochs=2, progress=False, backend="loop")


def whole(posterior):
    [members] = posterior.draw()
    return members


def by_hand(weights, batches):
    """Layer by layer: a batch is normalised by its biased variance, and the unbiased one is kept."""
    kept = {name: 0.0 for name in weights if "running" in name}
    total = sum(map(len, batches))
    for batch in batches:
        share, hidden = len(batch) / total, batch
        for linear, norm in (("0", "1"), ("4", "5")):
            hidden = hidden @ weights[f"{linear}.weight"].T + weights[f"{linear}.bias"]
            kept[f"{norm}.running_mean"] += share * hidden.mean(0)
            kept[f"{norm}.running_var"] += share * hidden.var(0)
            scaled = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
            hidden = torch.tanh(scaled * weights[f"{norm}.weight"] + weights[f"{norm}.bias"])
    return kept


@pytest.mark.parametrize("sizes", [[30], [10, 10, 10], [16, 12, 2]])
def test_statistics_are_means_over_batches_by_their_sizes(sizes):
    posterior = fitted()
    before = whole(posterior)
    found = with_statistics(posterior.network, before, X.split(sizes))
    for index in range(3):
        expected = by_hand(before.member(index), X.split(sizes))
        for name, tensor in found.member(index).items():
            if "running" in name:
                assert_equal_up_to_rounding(tensor, expected[name], PASS, name)
            elif "tracked" not in name:
                assert torch.equal(tensor, before.member(index)[name]), name
        assert not torch.allclose(expected["1.running_mean"], before.member(index)["1.running_mean"])
    assert torch.equal(found.labels, before.labels)


def test_what_is_given_stays_as_it_is():
    posterior = fitted()
    members = whole(posterior)
    copy, template = members.clone(), {n: t.clone() for n, t in posterior.network.module.state_dict().items()}
    with_statistics(posterior.network, members, [X])
    assert all(torch.equal(tensor, copy.stacked[name]) for name, tensor in members.stacked.items())
    for name, tensor in posterior.network.module.state_dict().items():
        assert torch.equal(tensor, template[name])
    momenta = [m.momentum for m in posterior.network.module.modules() if isinstance(m, nn.BatchNorm1d)]
    assert momenta == [0.1, 0.3]
    latest = of_latest_batch(posterior.network).module
    assert [m.momentum for m in latest.modules() if isinstance(m, nn.BatchNorm1d)] == [1.0, 1.0]


def test_dropout_stays_off():
    posterior = fitted(lambda: network(dropout=0.9), 1)
    members = whole(posterior)
    found = with_statistics(posterior.network, members, X.split(10)).member(0)
    expected = by_hand(members.member(0), X.split(10))
    for name, tensor in expected.items():
        assert_equal_up_to_rounding(found[name], tensor, PASS, name)


def test_layers_that_the_user_has_fixed_keep_theirs():
    def fixed():
        module = network()
        module[5].eval()
        return module

    posterior = fitted(fixed, 1)
    assert estimated_names(posterior.network) == ["1.running_mean", "1.running_var"]
    members = whole(posterior)
    found = with_statistics(posterior.network, members, [X]).member(0)
    hidden = X @ members.member(0)["0.weight"].T + members.member(0)["0.bias"]
    assert_equal_up_to_rounding(found["1.running_mean"], hidden.mean(0), PASS)
    assert_equal_up_to_rounding(found["1.running_var"], hidden.var(0), PASS)
    fresh = {name: found[name] for name in ("5.running_mean", "5.running_var") if name in found}
    for name, tensor in fresh.items():
        assert torch.equal(tensor, members.member(0)[name])
    module = posterior.network.module
    assert torch.equal(module.get_buffer("5.running_mean"), torch.zeros(5, dtype=torch.float64))


def test_predictions_are_those_of_the_network_with_these_statistics():
    """In evaluation mode on the data that they were taken from: all but what biased variances differ by."""
    posterior = fitted()
    members = with_statistics(posterior.network, whole(posterior), [X])
    predicted = pm.Particles(posterior.network, blocks=[members]).predict(X).mean
    parts = []
    for index in range(3):
        module = network().train()
        weights = {name: t.clone() for name, t in members.member(index).items()}
        outputs = torch.func.functional_call(module, weights, (X,)).detach()
        parts.append(outputs.softmax(-1))
    # Variances of 30 numbers differ by 30/29 with and without the correction: 1.7 % of a width.
    torch.testing.assert_close(predicted, torch.stack(parts).mean(0), rtol=0, atol=0.02)


def test_a_network_without_normalisation_is_left_alone():
    posterior = fitted(lambda: pm.models.MLP(4, 2, (5,)).double())
    before = whole(posterior)
    assert estimated_names(posterior.network) == []
    found = with_statistics(posterior.network, before, [X])
    assert all(torch.equal(found.stacked[name], tensor) for name, tensor in before.stacked.items())


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(30, [30]), (10, [10, 10, 10]), (14, [15, 15]), (29, [30]), (8, [7, 8, 7, 8])]
)
def test_batches_are_nearly_of_one_size(batch_size, sizes):
    found = in_batches({"a": X, "b": X[:, 0]}, batch_size)
    assert [len(batch["a"]) for batch in found] == sizes
    assert torch.equal(torch.cat([batch["a"] for batch in found]), X)
    assert torch.equal(torch.cat([batch["b"] for batch in found]), X[:, 0])
