"""evaluate puts the metrics of one posterior together."""

from dataclasses import replace

import pytest
import torch

import polymode as pm
from cases import BY_NAME
from polymode import metrics
from polymode.errors import InputError


def fitted(name, method=None):
    case = BY_NAME[name]
    return case, pm.fit(
        method or pm.methods.DeepEnsemble(3),
        case.double_factory,
        case.data(),
        likelihood=case.likelihood,
        epochs=2,
        progress=False,
        backend="loop",
    )


def test_classification_scores_are_those_of_the_predictive():
    case, posterior = fitted("mlp")
    test = case.data(40, seed=3)
    foreign = 10 * torch.randn(30, 4, dtype=torch.float64)
    reference = torch.full((40, 3), 1 / 3, dtype=torch.float64)
    scores = pm.evaluate(posterior, test, ood=foreign, reference=reference)
    p = posterior.predict(test.inputs)
    assert scores["nll"] == pytest.approx(metrics.nll(p.mean, test.targets))
    assert scores["nll"] == pytest.approx(-posterior.log_prob(test.inputs, test.targets).mean().item())
    assert scores["ece"] == pytest.approx(metrics.ece(p.mean, test.targets))
    assert scores["total_variation"] == pytest.approx(metrics.total_variation(p.mean, reference))
    far = posterior.predict(foreign)
    expected = metrics.ood_scores(p.entropy, far.entropy).auroc
    assert scores["ood_entropy_auroc"] == pytest.approx(expected)
    assert 0 <= scores["ood_mutual_information_fpr95"] <= 1
    others = pm.evaluate(posterior, test, bins=metrics.Bins(20, min_count=5))
    for name in ("ece", "mce"):
        expected = getattr(metrics, name)(p.mean, test.targets, 20, min_count=5)
        assert others[name] == pytest.approx(expected)
    assert others["ece"] != pytest.approx(scores["ece"])
    assert others["nll"] == scores["nll"]


def test_regression_scores():
    case, posterior = fitted("learned_noise")
    test = case.data(50, seed=3)
    scores = pm.evaluate(posterior, test)
    p = posterior.predict(test.inputs, quantiles=(0.05, 0.95))
    assert scores["rmse"] == pytest.approx((p.mean - test.targets).square().mean().sqrt().item(), rel=1e-6)
    inside = (test.targets >= p.quantiles[0.05]) & (test.targets <= p.quantiles[0.95])
    assert scores["coverage90"] == pytest.approx(inside.double().mean().item())
    assert scores["coverage95"] >= scores["coverage90"]
    assert scores["log_density"] == pytest.approx(posterior.log_prob(test.inputs, test.targets).mean().item())


def test_ignored_tokens_do_not_count():
    case = BY_NAME["tied_tokens"]
    data = case.data(6)
    targets = data.targets.clone()
    targets[:, 3:] = -1
    likelihood = pm.likelihoods.Categorical(ignore_index=-1)
    posterior = pm.fit(
        pm.methods.Single(),
        case.double_factory,
        pm.ArrayData(data.inputs, targets, batch_size=3),
        likelihood=likelihood,
        epochs=1,
        progress=False,
    )
    scores = pm.evaluate(posterior, pm.ArrayData(data.inputs, targets))
    p = posterior.predict(data.inputs).mean[:, :3].flatten(0, 1)
    assert scores["nll"] == pytest.approx(metrics.nll(p, data.targets[:, :3].flatten()))
    assert scores["accuracy"] == pytest.approx(metrics.accuracy(p, data.targets[:, :3].flatten()))


def test_nll_does_not_underflow_and_half_precision_is_scored():
    network = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.constant_(network.weight[:1].data, 200.0)
    torch.nn.init.constant_(network.weight[1:].data, -200.0)
    sure = pm.StackedModule([network]).posterior("categorical")
    data = pm.ArrayData(torch.ones(3, 1), torch.ones(3, dtype=torch.int64))
    assert pm.evaluate(sure, data)["nll"] == pytest.approx(400.0)
    half = pm.StackedModule([pm.models.MLP(4, 3).bfloat16()]).posterior("categorical")
    x = torch.randn(20, 4).bfloat16()
    scores = pm.evaluate(half, pm.ArrayData(x, torch.zeros(20).long()))
    p = half.predict(x).mean
    assert p.dtype == torch.float32
    assert scores["nll"] == pytest.approx(-p[:, 0].log().mean().item(), rel=0.01)


def test_what_needs_classes_says_so():
    case, posterior = fitted("learned_noise")
    with pytest.raises(pm.errors.InputError, match=r"needs? a categorical likelihood"):
        pm.evaluate(posterior, case.data(), ood=case.data().inputs)
    case, posterior = fitted("mlp")
    with pytest.raises(pm.errors.InputError, match="Apply softmax"):
        pm.evaluate(posterior, case.data(40), reference=torch.randn(40, 3))


def test_multi_label_and_tokens():
    case, posterior = fitted("multi_label")
    test = case.data(20, seed=3)
    wrong = (posterior.predict(test.inputs).mean > 0.5) != (test.targets > 0.5)
    assert pm.evaluate(posterior, test)["accuracy"] == pytest.approx(1 - wrong.double().mean().item())
    case, posterior = fitted("tied_tokens")
    test = case.data(6, seed=3)
    scores = pm.evaluate(posterior, test)
    assert scores["nll"] == pytest.approx(-posterior.log_prob(test.inputs, test.targets).mean().item())
    p = posterior.predict(test.inputs).mean.flatten(0, 1)
    bits = metrics.bits_per_character(p, test.targets.flatten())
    assert bits == pytest.approx(-p[range(len(p)), test.targets.flatten()].log2().mean().item(), rel=1e-5)
    assert scores["bits_per_character"] == pytest.approx(bits, rel=1e-5)
    case, posterior = fitted("mlp")
    assert "bits_per_character" not in pm.evaluate(posterior, case.data(20))


def test_foreign_tokens_are_points():
    case, posterior = fitted("tied_tokens")
    test, foreign = case.data(6, seed=3), case.data(4, seed=4)
    found = pm.evaluate(posterior, test, ood=foreign.inputs)["ood_entropy_auroc"]
    ordinary, other = (posterior.predict(data.inputs).entropy.flatten() for data in (test, foreign))
    difference = other[:, None] - ordinary
    tied = difference.abs() < 1e-12  # the same token has the same entropy, up to rounding
    above = (difference > 0).double().where(~tied, torch.tensor(0.5).double())
    assert found == pytest.approx(above.mean().item())


def test_the_mean_of_outputs_takes_the_place_of_that_of_predictions():
    """softmax of the weighted mean of logits, in scores, predictions and densities alike."""
    case = BY_NAME["mlp"]
    posterior = pm.fit(
        pm.methods.DeepEnsemble(3),
        case.double_factory,
        case.data(),
        likelihood="categorical",
        epochs=2,
        progress=False,
    )
    posterior = replace(
        posterior, blocks=[replace(b, log_weights=torch.tensor([0.0, -1.0, 0.5])) for b in posterior.draw()]
    )
    data = case.data(num_examples=30, seed=3)
    logits = torch.cat([outputs for _, outputs, _ in posterior.outputs(data.inputs)])
    weights = torch.tensor([0.0, -1.0, 0.5]).double().softmax(0)
    expected = (weights[:, None, None] * logits).sum(0).log_softmax(-1)
    options = {"average": "outputs", "batch_size": 7}
    predictive = posterior.predict(data.inputs, **options)
    torch.testing.assert_close(predictive.mean, expected.exp())
    assert predictive.num_members == 1
    found = posterior.log_prob(data.inputs, data.targets, **options)
    torch.testing.assert_close(found, expected.gather(1, data.targets[:, None])[:, 0])
    scores = pm.evaluate(posterior, data, average="outputs")
    assert scores["nll"] == pytest.approx(-found.mean().item())
    assert scores["nll"] != pytest.approx(pm.evaluate(posterior, data)["nll"], rel=1e-6)
    with pytest.raises(InputError, match="average"):
        posterior.predict(data.inputs, average="logits")
