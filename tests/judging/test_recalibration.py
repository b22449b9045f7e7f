"""Temperature and conformal corrections do what their theorems say."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar

import polymode as pm
from polymode import metrics
from polymode.errors import InputError


def predictive(logits):
    p = logits.softmax(-1)
    return pm.CategoricalPredictive(p, torch.zeros(len(p), dtype=p.dtype), 1)


def drawn(n, temperature, seed):
    """Labels follow softmax(z); the predictive says softmax(z · temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return predictive(logits * temperature), labels


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_temperature_is_found(temperature):
    given, labels = drawn(4000, temperature, 0)
    scaling = pm.TemperatureScaling.fit(given, labels)

    def loss(inverse):
        return metrics.nll((given.mean.log() * inverse).softmax(-1), labels)

    best = minimize_scalar(loss, bounds=(0.01, 10), method="bounded", options={"xatol": 1e-8})
    assert 1 / scaling.temperature == pytest.approx(best.x, rel=1e-4)
    # The estimate's standard error is below 3 % at n = 4000.
    assert scaling.temperature == pytest.approx(temperature, rel=0.1)
    assert metrics.ece(scaling.apply(given).mean, labels) < 0.03


def test_tokens_are_observations_of_their_own():
    given, labels = drawn(600, 2.0, 5)
    tokens = pm.CategoricalPredictive(given.mean.reshape(100, 6, 4), torch.zeros(100, 6), 1)
    expected = pm.TemperatureScaling.fit(given, labels).temperature
    assert pm.TemperatureScaling.fit(tokens, labels.reshape(100, 6)).temperature == expected
    ignored = labels.clone()
    ignored[::3] = -100
    kept = ignored != -100
    part = pm.CategoricalPredictive(given.mean[kept], torch.zeros(int(kept.sum())), 1)
    expected = pm.TemperatureScaling.fit(part, labels[kept]).temperature
    found = pm.TemperatureScaling.fit(tokens, ignored.reshape(100, 6), ignore_index=-100)
    assert found.temperature == expected
    threshold = pm.ConformalSets.fit(given, labels).threshold
    assert pm.ConformalSets.fit(tokens, labels.reshape(100, 6)).threshold == threshold
    with pytest.raises(InputError, match="Labels go from -100"):
        pm.TemperatureScaling.fit(tokens, ignored.reshape(100, 6))


def test_tempering_leaves_the_disagreement_alone():
    members = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(6)).softmax(-1)
    within = -(members * members.log()).sum(-1).mean(0)
    given = pm.CategoricalPredictive(members.mean(0), within, 3)
    tempered = pm.TemperatureScaling(2.0).apply(given)
    torch.testing.assert_close(tempered.mutual_information, given.mutual_information, rtol=1e-4, atol=1e-6)
    with pytest.raises(InputError, match="must be positive, got -1"):
        pm.TemperatureScaling(-1.0)
    with pytest.raises(InputError, match="Expected a predictive"):
        pm.TemperatureScaling.fit(members, torch.zeros(50))


@pytest.mark.parametrize("miscoverage", [0.05, 0.2])
def test_conformal_sets_cover(miscoverage):
    """Coverage of new points: mean 1 − α, standard deviation about sqrt(α(1−α)(1/n + 1/m))."""
    calibration, labels = drawn(2000, 3.0, 1)
    test, test_labels = drawn(5000, 3.0, 2)
    sets = pm.ConformalSets.fit(calibration, labels, miscoverage).sets(test)
    covered = sets.gather(1, test_labels[:, None]).double().mean().item()
    error = math.sqrt(miscoverage * (1 - miscoverage) * (1 / 2000 + 1 / 5000))
    assert abs(covered - (1 - miscoverage)) < 4 * error
    assert sets.sum(1).double().mean() < 4


def test_conformal_intervals_cover():
    generator = torch.Generator().manual_seed(3)
    std = torch.rand(6000, generator=generator) + 0.2
    targets = 5 * std * torch.randn(6000, generator=generator)  # five times what is claimed
    claimed = pm.GaussianPredictive(torch.zeros(6000), std**2, torch.zeros(6000), 1)

    def part(s):
        return pm.GaussianPredictive(
            claimed.mean[s], claimed.noise_variance[s], claimed.member_variance[s], 1
        )

    fitted = pm.ConformalIntervals.fit(part(slice(0, 2000)), targets[:2000], 0.1)
    low, high = fitted.intervals(part(slice(2000, None)))
    covered = metrics.interval_coverage(low, high, targets[2000:])
    assert abs(covered - 0.9) < 4 * math.sqrt(0.09 * (1 / 2000 + 1 / 4000))
    assert fitted.factor == pytest.approx(5 * 1.645, rel=0.1)


def test_too_few_points_are_refused():
    given, labels = drawn(18, 1.0, 4)
    with pytest.raises(InputError, match="at least 19 are needed"):
        pm.ConformalSets.fit(given, labels, 0.05)
    with pytest.raises(InputError, match="strictly between"):
        pm.ConformalSets.fit(given, labels, 0.0)
    few = pm.ConformalSets.fit(*drawn(19, 1.0, 4), 0.05)
    assert few.threshold <= 1
