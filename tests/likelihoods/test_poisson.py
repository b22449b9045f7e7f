"""Counts: mass, mixtures, scores and refusals against torch.distributions and SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import polymode as pm
from polymode.errors import InputError
from polymode.judging.contents import predictive_samples
from polymode.likelihoods import Poisson, make_likelihood
from polymode.likelihoods.numbers import mixture_quantiles
from polymode.likelihoods.poisson import PoissonLaw, ranked_probability_scores
from polymode.metrics.curves import coverage_curve

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
RATES = torch.tensor([[0.02, 3.0, 40.0, 900.0], [0.5, 9.0, 55.0, 1000.0], [2.0, 3.5, 41.0, 700.0]]).double()


def mixture_cdf(k):
    """Σ_m w_m P(Y ≤ k) of the four mixtures."""
    return WEIGHTS.numpy() @ stats.poisson.cdf(k, RATES.numpy())


def test_log_mass_is_that_of_torch():
    log_rates, counts = torch.randn(30, 2).double(), torch.randint(20, (30, 2))
    expected = torch.distributions.Poisson(log_rates.exp()).log_prob(counts.double())
    torch.testing.assert_close(Poisson().log_prob(log_rates, counts), expected.sum(1))
    torch.testing.assert_close(Poisson().terms(log_rates, counts.double()), expected)
    one = Poisson().log_prob(log_rates[:, :1], counts[:, 0])  # [B, 1] against [B]
    torch.testing.assert_close(one, expected[:, 0])
    squares = (log_rates.exp() - counts).square().mean(1)
    torch.testing.assert_close(Poisson().errors(log_rates, counts), squares)


def test_quantiles_are_the_smallest_counts_that_reach_a_level():
    levels = torch.tensor([0.001, 0.05, 0.5, 0.95, 0.9999], dtype=torch.float64)
    found = mixture_quantiles(PoissonLaw(RATES), WEIGHTS, levels)
    for level, row in zip(levels.tolist(), found.numpy(), strict=True):
        expected = [next(k for k in range(3000) if mixture_cdf(k)[i] >= level) for i in range(4)]
        assert row.tolist() == expected


def test_distribution_function_and_what_lies_below():
    law = PoissonLaw(RATES)
    for at in (-1.0, 0.0, 2.0, 2.5, 60.0, 950.0):
        expected = stats.poisson.cdf(at, RATES.numpy())
        place = torch.full((4,), at, dtype=torch.float64)
        np.testing.assert_allclose(law.cdf(place), expected, atol=1e-9)  # torch.special.gammaincc: 1e-10
        below = stats.poisson.cdf(math.ceil(at) - 1, RATES.numpy())
        np.testing.assert_allclose(law.cdf_below(place), below, atol=1e-9)


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (1, 5, 45, 950), (7, 30, 200, 20)])
def test_ranked_probability_score_is_the_sum_of_squares(counts):
    k = np.arange(4000)
    above = np.array([mixture_cdf(each) for each in k]) - (k[:, None] >= np.array(counts))
    found = ranked_probability_scores(PoissonLaw(RATES), WEIGHTS, torch.tensor(counts).double())
    np.testing.assert_allclose(found, (above**2).sum(0), rtol=1e-5)  # wide sums go by cells: 3e-5 at most


def test_ranked_probability_score_is_the_energy_form():
    """CRPS = E|X − y| − ½ E|X − X′|, over pairs of counts."""
    law, k = PoissonLaw(torch.tensor([[2.5]]).double()), np.arange(60)
    mass = stats.poisson.pmf(k, 2.5)
    spread = (mass[:, None] * mass * abs(k[:, None] - k)).sum()
    for count in (0, 2, 9):
        expected = (mass * abs(k - count)).sum() - spread / 2
        found = ranked_probability_scores(law, torch.ones(1).double(), torch.tensor([float(count)]).double())
        assert found.item() == pytest.approx(expected, rel=1e-7)


def posterior(num_members=3):
    return pm.StackedModule([pm.models.MLP(2, 1, (4,)).double() for _ in range(num_members)]).posterior(
        "poisson"
    )


def test_moments_follow_the_law_of_total_variance():
    made, x = posterior(), torch.randn(20, 2).double()
    rates = next(made.outputs(x))[1].exp()
    predictive = made.predict(x, quantiles=(0.1, 0.9))
    torch.testing.assert_close(predictive.mean, rates.mean(0))
    torch.testing.assert_close(predictive.noise_variance, rates.mean(0))  # a count's variance is its rate
    torch.testing.assert_close(predictive.member_variance, rates.var(0, correction=0))
    torch.testing.assert_close(predictive.variance, rates.mean(0) + rates.var(0, correction=0))
    weights = np.full(3, 1 / 3)
    for level, value in predictive.quantiles.items():
        counts = value[:, 0].numpy()
        assert (weights @ stats.poisson.cdf(counts, rates[..., 0].numpy()) >= level).all()
        assert (weights @ stats.poisson.cdf(counts - 1, rates[..., 0].numpy()) < level).all()


def test_scores_are_those_of_the_mixture():
    made, x = posterior(), torch.randn(50, 2).double()
    counts = torch.poisson(torch.full((50,), 1.5), generator=torch.Generator().manual_seed(0)).long()
    rates = next(made.outputs(x))[1].exp()[..., 0].numpy()
    scores = pm.evaluate(made, pm.ArrayData(x, counts))
    mass = stats.poisson.pmf(counts.numpy(), rates).mean(0)
    assert scores["log_density"] == pytest.approx(np.log(mass).mean())
    assert scores["rmse"] == pytest.approx(
        math.sqrt(((rates.mean(0) - counts.numpy()) ** 2).mean()), rel=1e-6
    )
    k = np.arange(100)[:, None]
    cdf = np.array([stats.poisson.cdf(each, rates).mean(0) for each in k])
    assert scores["crps"] == pytest.approx(((cdf - (k >= counts.numpy())) ** 2).sum(0).mean(), rel=1e-6)
    quantile = {level: (cdf < level).sum(0) for level in (0.05, 0.95)}
    inside = (counts.numpy() >= quantile[0.05]) & (counts.numpy() <= quantile[0.95])
    assert scores["coverage90"] == pytest.approx(inside.mean())


def test_the_coverage_of_a_right_predictive_is_what_it_says():
    """Shares of steps: each is a mean of n numbers in [0, 1] whose mean is the level, hence √(p(1−p)/n)."""
    rates = torch.full((1, 20_000), 1.3, dtype=torch.float64)
    counts = torch.poisson(rates[0], generator=torch.Generator().manual_seed(1))
    law = PoissonLaw(rates)
    curve = coverage_curve(law.cdf_below(counts)[0], law.cdf(counts)[0])
    for nominal, observed in zip(curve["nominal"], curve["observed"], strict=True):
        assert abs(observed - nominal) < 4 * math.sqrt(nominal * (1 - nominal) / 20_000)


def test_samples_have_the_mass_of_the_mixture():
    made, x = posterior(), torch.randn(4, 2).double()
    samples = predictive_samples(made, x, num_samples=30_000)
    rates = next(made.outputs(x))[1].exp()[..., 0].numpy()
    for count in range(4):
        expected = stats.poisson.pmf(count, rates).mean(0)
        error = np.sqrt(expected * (1 - expected) / 30_000)
        assert (np.abs((samples == count).double().mean(0).numpy() - expected) < 4.5 * error).all()


def test_conformal_intervals_of_counts_cover_and_end_in_counts():
    rates = torch.rand(6000, generator=torch.Generator().manual_seed(2)) * 6 + 0.2
    counts = torch.poisson(rates, generator=torch.Generator().manual_seed(3))
    likelihood = Poisson()
    first, second = (likelihood.predictive(part, part, 0 * part, 1) for part in rates.split([2000, 4000]))
    fitted = pm.ConformalIntervals.fit(first, counts[:2000], 0.1)
    low, high = fitted.intervals(second)
    assert bool((low == low.round()).all() and (low >= 0).all() and (high == high.round()).all())
    covered = ((counts[2000:] >= low) & (counts[2000:] <= high)).double().mean().item()
    # Scores of counts have ties: the coverage is 90 % or more, up to its error.
    assert covered > 0.9 - 4 * math.sqrt(0.09 * (1 / 2000 + 1 / 4000))
    assert covered < 0.96
    edge = likelihood.predictive(torch.tensor([4.0]), torch.tensor([4.0]), torch.tensor([0.0]), 1)
    assert [end.item() for end in edge.interval(1.5)] == [1.0, 7.0]  # 4 ± 3: the ends belong to it


def test_an_interval_without_a_count_is_the_nearest_one():
    """Rare counts: 0.4 ± 0.1 and 1.6 ± 0.1 hold none."""
    rates = torch.tensor([0.4, 1.6])
    rare = Poisson().predictive(rates, torch.full((2,), 0.01), torch.zeros(2), 1)
    assert [end.tolist() for end in rare.interval(1.0)] == [[0.0, 2.0], [0.0, 2.0]]
    rates = torch.rand(4000, generator=torch.Generator().manual_seed(4)) * 0.5
    counts = torch.poisson(rates, generator=torch.Generator().manual_seed(5))
    predictive = Poisson().predictive(rates, rates, 0 * rates, 1)
    low, high = pm.ConformalIntervals.fit(predictive, counts, 0.2).intervals(predictive)
    assert bool((low <= high).all())
    assert ((counts >= low) & (counts <= high)).double().mean() > 0.8 - 4 * math.sqrt(0.16 / 4000)


def test_large_counts_are_scored_in_64_bits():
    outputs, counts = torch.tensor([[11.5129]]), torch.tensor([[100_000]])
    exact = torch.distributions.Poisson(outputs.double().exp()).log_prob(counts.double())
    torch.testing.assert_close(Poisson().terms(outputs, counts).double(), exact, rtol=1e-6, atol=0)


def test_what_makes_no_sense_is_refused():
    predictive = Poisson().predictive(*torch.ones(3, 5), num_members=1)
    with pytest.raises(InputError, match="PoissonPredictive has no class probabilities"):
        pm.TemperatureScaling.fit(predictive, torch.zeros(5).long())
    with pytest.raises(InputError, match="PoissonPredictive has no class probabilities"):
        pm.ConformalSets.fit(predictive, torch.zeros(5).long())
    with pytest.raises(InputError, match=r"never shifted or scaled, got 1\.0 and 2\.0"):
        predictive.rescaled(1.0, 2.0)
    assert predictive.rescaled(0.0, 1.0) is predictive


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.tensor([1.0, 2.0, -3.0]), r"got -3, first at position \(2,\)"),
        (torch.tensor([1, -4]), r"got -4, first at position \(1,\)"),
        (torch.tensor([[1.0], [2.5]]), r"got 2\.5, first at position \(1, 0\) \(1 in all\)"),
        (torch.tensor([math.nan, 2.5, 0.0]), r"got nan, first at position \(0,\) \(2 in all\)"),
        (torch.tensor([0.0, math.inf]), r"got inf, first at position \(1,\)"),
        (torch.tensor([True, False]), "Counts must be numbers, got torch.bool"),
    ],
)
def test_bad_counts_are_refused_with_their_place_and_value(targets, message):
    with pytest.raises(InputError, match=message):
        Poisson().check_targets(targets, torch.zeros(len(targets), 1))
    Poisson().check_targets(torch.tensor([0, 1, 10**6]), torch.zeros(3, 1))
    Poisson().check_targets(torch.tensor([0.0, 7.0]), torch.zeros(2, 1))


@pytest.mark.parametrize(("mean", "is_far"), [(1.0, False), (140.0, False), (160.0, True), (1e-3, True)])
def test_counts_that_networks_hardly_reach_are_remarked_on(mean, is_far):
    counts = torch.full((1000,), mean) if mean >= 1 else torch.arange(1000).eq(0).long()
    remark = Poisson().remark_on(counts)
    assert (remark is not None) == is_far
    if is_far:
        assert f"a mean of {mean:g}" in remark


def test_counts_are_never_standardised_and_numbers_are():
    assert Poisson().target_scaling(7.0, 3.0) == (0.0, 1.0)
    assert make_likelihood("student_t").target_scaling(7.0, 3.0) == (7.0, 3.0)
    assert make_likelihood("gaussian").target_scaling(7.0, 3.0) == (7.0, 3.0)


def test_random_data_of_a_chain_are_weights_of_examples():
    """Exp(1) weights: the counts stay counts."""
    counts = torch.tensor([0, 3, 5])
    uniform = torch.tensor([[0.1], [0.5], [0.9]])
    targets, weights = Poisson().randomised(counts, lambda count: uniform)
    assert torch.equal(targets, counts)
    torch.testing.assert_close(weights, -uniform[:, 0].log())


def test_fitted_saved_and_loaded(tmp_path):
    """One weight and a bias: the rate of the fit is the mean count, where the gradient vanishes."""
    generator = torch.Generator().manual_seed(4)
    counts = torch.poisson(torch.full((400,), 3.0), generator=generator)
    data = pm.ArrayData(torch.zeros(400, 1), counts, batch_size=400)
    optimizer = pm.Optimizer("Adam", lr=0.05)
    made = pm.fit(
        pm.methods.DeepEnsemble(2, of=pm.methods.Single(optimizer=optimizer)),
        lambda: torch.nn.Linear(1, 1),
        data,
        likelihood="poisson",
        epochs=300,
        progress=False,
    )
    rates = made.predict(torch.zeros(1, 1)).mean
    assert rates.item() == pytest.approx(counts.mean().item(), rel=1e-3)
    loaded = pm.load_posterior(made.save(tmp_path / "p"), lambda: torch.nn.Linear(1, 1))
    assert loaded.network.likelihood == Poisson()
    assert torch.equal(loaded.predict(torch.zeros(1, 1)).mean, rates)
