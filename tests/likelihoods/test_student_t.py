"""Heavy tails: densities, mixtures and samples against torch.distributions and SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import StudentT as Reference

import polymode as pm
from polymode.errors import InputError
from polymode.judging.contents import predictive_samples
from polymode.likelihoods import (
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    NoiseLevel,
    StudentT,
    make_likelihood,
)
from polymode.likelihoods.numbers import mixture_quantiles
from polymode.likelihoods.student_t import StudentTLaw, student_t_cdf, student_t_quantiles


@pytest.mark.parametrize("degrees", [3, 4, 5, 8, 31, 200])
def test_distribution_function_and_quantiles_are_those_of_scipy(degrees):
    t = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([-1e6, -1e-9, 1e-9, 1e6])]).double()
    np.testing.assert_allclose(student_t_cdf(t, degrees), stats.t.cdf(t.numpy(), degrees), atol=1e-14)
    levels = torch.tensor([1e-4, 0.05, 0.5, 0.7, 0.975], dtype=torch.float64)
    expected = stats.t.ppf(levels.numpy(), degrees)
    np.testing.assert_allclose(student_t_quantiles(levels, degrees), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("degrees", [3, 4, 9])
def test_density_is_that_of_torch(degrees):
    likelihood = StudentT(degrees=degrees)
    mean, raw, targets = torch.randn(20, 2).double(), torch.randn(20, 2).double(), torch.randn(20, 2).double()
    std = torch.nn.functional.softplus(raw) + likelihood.min_std
    reference = Reference(degrees, mean, std * math.sqrt((degrees - 2) / degrees))
    found = likelihood.log_prob({"mean": mean, "raw_std": raw}, targets)
    torch.testing.assert_close(found, reference.log_prob(targets).sum(1))
    torch.testing.assert_close(reference.variance, std.square())  # σ is the standard deviation


def test_noise_of_the_input_with_heavy_tails_is_that_of_torch():
    likelihood = HeteroscedasticStudentT(degrees=5, min_std=0.01)
    outputs, targets = torch.randn(3, 20, 2).double(), torch.randn(20).double()
    mean, std = likelihood.moments(outputs)
    torch.testing.assert_close(mean, outputs[..., :1])
    torch.testing.assert_close(std, torch.nn.functional.softplus(outputs[..., 1:]) + 0.01)
    reference = Reference(5, mean[0, :, 0], std[0, :, 0] * math.sqrt(3 / 5))
    torch.testing.assert_close(likelihood.log_prob(outputs[0], targets), reference.log_prob(targets))
    assert likelihood.num_outputs([targets]) == 2
    found = likelihood.found(outputs, torch.ones(3).double(), targets)
    by_hand = np.mean(
        [stats.t.cdf(targets, 5, mean[m, :, 0], std[m, :, 0] * math.sqrt(3 / 5)) for m in range(3)], 0
    )
    np.testing.assert_allclose(found["up_to"], by_hand, atol=1e-9)
    assert make_likelihood(likelihood.config()) == likelihood


def test_one_unusual_row_does_not_decide_a_score():
    """A thousand deviations away: a Gaussian charges half a million nats, heavy tails some thirty."""
    outputs = torch.tensor([[[0.0, -20.0]]]).double()
    heavy, light = HeteroscedasticStudentT(min_std=1e-3), HeteroscedasticGaussian(min_std=1e-3)
    far = torch.tensor([1.0]).double()
    assert -light.log_prob(outputs[0], far).item() > 4e5
    assert -heavy.log_prob(outputs[0], far).item() < 40


def law(degrees=4):
    mean = torch.tensor([[-1.0, 3.0], [0.5, 30.0], [2.0, -20.0]]).double()
    return StudentTLaw(mean, torch.tensor([[0.3, 1.0], [1.0, 0.1], [0.2, 2.0]]).double(), degrees)


def test_quantiles_of_a_mixture_invert_its_distribution_function():
    weights = torch.tensor([0.2, 0.5, 0.3]).double()
    levels = torch.tensor([0.001, 0.05, 0.4, 0.95]).double()
    found = mixture_quantiles(law(), weights, levels)
    for level, at in zip(levels, found, strict=True):
        each = stats.t.cdf(at.numpy(), 4, law().mean.numpy(), law().scale.numpy())
        np.testing.assert_allclose(weights.numpy() @ each, level, atol=1e-9)


def posterior(num_members=3):
    likelihood = StudentT(degrees=5)
    modules = [likelihood.prepare(pm.models.MLP(2, 1, (4,)).double()) for _ in range(num_members)]
    for place, module in enumerate(modules):
        module.noise.data.fill_(float(place))  # noise levels of their own
    return pm.StackedModule(modules).posterior(likelihood)


def test_moments_follow_the_law_of_total_variance():
    made, x = posterior(), torch.randn(20, 2).double()
    mean, std = made.network.likelihood.moments(next(made.outputs(x))[1])
    predictive = made.predict(x)
    torch.testing.assert_close(predictive.mean, mean.mean(0))
    torch.testing.assert_close(predictive.noise_variance, std.square().mean(0))
    torch.testing.assert_close(predictive.member_variance, mean.var(0, correction=0))
    torch.testing.assert_close(predictive.variance, std.square().mean(0) + mean.var(0, correction=0))
    scaled = predictive.rescaled(3.0, 2.0)
    torch.testing.assert_close(scaled.std, 2 * predictive.std)


def test_samples_follow_the_distribution_function():
    """Kolmogorov's distance of n samples exceeds 2.2/√n with a probability of 2 exp(−2·2.2²) = 1e-4."""
    made, x = posterior(), torch.randn(3, 2).double()
    samples = predictive_samples(made, x, num_samples=20_000).sort(0).values
    mixture = made.network.likelihood.law(next(made.outputs(x))[1])
    steps = (torch.arange(20_000).double() + 0.5) / 20_000
    for point in range(3):
        at = samples[:, point]
        cdf = student_t_cdf((at - mixture.mean[:, point]) / mixture.scale[:, point], 5).mean(0)
        assert (cdf - steps).abs().max() < 2.2 / math.sqrt(20_000)


def test_scores_are_those_of_the_mixture():
    made, x, y = posterior(), torch.randn(60, 2).double(), torch.randn(60).double()
    mixture = made.network.likelihood.law(next(made.outputs(x))[1])
    place, scale = mixture.mean[..., 0].numpy(), mixture.scale[..., 0].numpy()
    scores = pm.evaluate(made, pm.ArrayData(x, y), target_scale=3.0)
    density = stats.t.pdf(y.numpy(), 5, place, scale).mean(0)
    assert scores["log_density"] == pytest.approx(np.log(density).mean() - math.log(3.0))
    levels = stats.t.cdf(y.numpy(), 5, place, scale).mean(0)
    assert scores["coverage90"] == pytest.approx(((levels >= 0.05) & (levels <= 0.95)).mean())
    assert scores["mean_std"] == pytest.approx(3 * made.predict(x).std.mean().item())


def test_outliers_move_a_fit_less_than_they_move_a_gaussian():
    """One bias for 99 numbers around 0 and an outlier of 50: the Gaussian's answer is their mean, 0.5."""
    y = torch.cat([torch.linspace(-1, 1, 99), torch.tensor([50.0])])
    data, answers = pm.ArrayData(torch.zeros(100, 1), y, batch_size=100), {}
    for kind in ("gaussian", "student_t"):
        made = pm.fit(
            pm.methods.Single(optimizer=pm.Optimizer("Adam", lr=0.05)),
            lambda: torch.nn.Linear(1, 1),
            data,
            likelihood=kind,
            epochs=800,
            progress=False,
        )
        answers[kind] = made.predict(torch.zeros(1, 1)).mean.item()
    assert answers["gaussian"] == pytest.approx(0.5, abs=0.05)
    assert abs(answers["student_t"]) < 0.05


def test_conformal_intervals_cover():
    predictive = StudentT().predictive(torch.zeros(3000), torch.ones(3000), torch.zeros(3000), 1)
    targets = 3 * Reference(4.0).sample((3000,))
    fitted = pm.ConformalIntervals.fit(predictive, targets, 0.1)
    low, high = fitted.intervals(predictive)
    new = 3 * Reference(4.0).sample((3000,))
    covered = ((new >= low) & (new <= high)).double().mean().item()
    assert abs(covered - 0.9) < 4 * math.sqrt(0.09 * 2 / 3000)
    with pytest.raises(InputError, match="StudentTPredictive has no class probabilities"):
        pm.TemperatureScaling.fit(predictive, torch.zeros(3000).long())


@pytest.mark.parametrize("degrees", [2, 0, -1, 4.5, math.inf])
def test_degrees_without_a_variance_are_refused(degrees):
    with pytest.raises(InputError, match="degrees of StudentT must be a whole number of at least 3"):
        StudentT(degrees=degrees)


def test_options_and_configuration():
    assert make_likelihood(StudentT(degrees=7, initial_std=0.2).config()) == StudentT(
        degrees=7, initial_std=0.2
    )
    with pytest.raises(InputError, match="StudentT needs initial_std > min_std > 0"):
        StudentT(initial_std=0.0)
    with pytest.raises(InputError, match=r"wrap every module: StudentT\(\)\.prepare\(module\)"):
        StudentT().moments(torch.zeros(3, 1))
    with pytest.raises(InputError, match=r"noise level of 'student_t'.*likelihood = StudentT\(\)"):
        StudentT().check_prepared(torch.nn.Linear(1, 1))
    prepared = StudentT(initial_std=0.7).prepare(torch.nn.Linear(1, 1))
    assert isinstance(prepared, NoiseLevel)
    _, std = StudentT(initial_std=0.7).moments(prepared(torch.zeros(1, 1)))
    assert std.item() == pytest.approx(0.7)
    with pytest.raises(InputError, match="NaN or infinite"):
        StudentT().check_targets(torch.tensor([1.0, math.nan]), {})
    assert "mean of 300" in StudentT().remark_on(torch.tensor([299.0, 301.0]))


def test_options_come_first_and_degrees_are_bounded():
    assert StudentT(30) == StudentT(degrees=30)
    assert pm.likelihoods.FixedGaussian(0.1).std == 0.1
    with pytest.raises(pm.errors.InputError, match="at most 100, got 1000000000: use 'gaussian'"):
        StudentT(degrees=10**9)
