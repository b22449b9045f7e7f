"""Calibration as part of a likelihood, and targets on a logarithmic scale."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import minimize_scalar

import polymode as pm
from polymode.errors import InputError
from polymode.likelihoods import (
    Categorical,
    FixedGaussian,
    HeteroscedasticGaussian,
    LearnedGaussian,
    Poisson,
    StudentT,
    make_likelihood,
)
from polymode.likelihoods.calibration import best_factor, moved_levels


def logits_of(temperature, number=4000, classes=4, members=3):
    """Outputs of members that are sure by a factor, and labels drawn from their mixture when it is undone."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(members, number, classes, generator=generator, dtype=torch.float64)
    labels = true.softmax(-1).mean(0).multinomial(1, generator=generator)[:, 0]
    return true * temperature, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_the_members_were_multiplied_by_is_found(temperature):
    outputs, labels = logits_of(temperature)
    found = Categorical().calibrated([(outputs, torch.ones(3), labels)])
    # The curvature of the NLL in log T gives the error of the estimate.
    steps = [0.99, 1.0, 1.01]
    nll = [
        Categorical(temperature=temperature * s).nll([(outputs, torch.ones(3), labels)]) * len(labels)
        for s in steps
    ]
    curvature = (nll[0] - 2 * nll[1] + nll[2]) / 0.01**2
    assert abs(math.log(found.temperature / temperature)) < 4 / math.sqrt(curvature)
    assert found.nll([(outputs, torch.ones(3), labels)]) <= Categorical().nll(
        [(outputs, torch.ones(3), labels)]
    )
    assert found.uncalibrated == Categorical()


def test_a_tempered_likelihood_is_tempered_everywhere():
    outputs, labels = logits_of(2.0, number=50)
    tempered, by_hand = Categorical(temperature=2.0), Categorical()
    for name in ("log_prob", "function_values"):
        arguments = (outputs[0], labels) if name == "log_prob" else (outputs,)
        halved = (outputs[0] / 2, labels) if name == "log_prob" else (outputs / 2,)
        assert torch.allclose(getattr(tempered, name)(*arguments), getattr(by_hand, name)(*halved))
    accumulators = []
    for likelihood, given in ((tempered, outputs), (by_hand, outputs / 2)):
        accumulator = likelihood.accumulator(50)
        accumulator.update(given, torch.ones(3), slice(0, 50))
        accumulators.append(accumulator.result())
    assert torch.allclose(accumulators[0].mean, accumulators[1].mean)
    assert torch.allclose(accumulators[0].mutual_information, accumulators[1].mutual_information)


@pytest.mark.parametrize("likelihood", [FixedGaussian(0.5), FixedGaussian(0.5, log_scale=0.7)])
def test_the_scale_of_the_noise_has_the_closed_form_of_one_member(likelihood):
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(3000, 1, generator=generator, dtype=torch.float64)
    latent = mean[:, 0] + 1.3 * torch.randn(3000, generator=generator, dtype=torch.float64)
    targets = latent if likelihood.log_scale is None else (likelihood.log_scale * latent).exp()
    found = likelihood.calibrated([(mean[None], torch.ones(1), targets)])
    # The maximum likelihood is the root mean square of the residuals.
    expected = (latent - mean[:, 0]).square().mean().sqrt().item() / 0.5
    assert found.noise_scale == pytest.approx(expected, rel=1e-5)


def test_conformal_quantiles_hold_what_they_say_whatever_the_law_is():
    """Wrong noise and heavy tails: coverage of new points is at least nominal, within Monte-Carlo error."""
    generator = np.random.default_rng(0)
    covered = []
    for _ in range(300):
        noise = generator.standard_t(2, size=(2, 60))
        mean = torch.zeros(1, 60, 1, dtype=torch.float64)
        calibrated = FixedGaussian(0.2).calibrated([(mean, torch.ones(1), torch.from_numpy(noise[0]))])
        low, high = calibrated.quantiles(mean, torch.ones(1), (0.05, 0.95))[:, :, 0].numpy()
        covered.append(((low <= noise[1]) & (noise[1] <= high)).mean())
    error = np.std(covered) / math.sqrt(len(covered))
    # Of 60 calibration points the ⌈61 · 0.9⌉ = 55th score: coverage is 55/61 on average.
    assert abs(np.mean(covered) - 55 / 61) < 4 * error


def test_moved_levels_are_ranks_of_the_scores():
    scores = sorted(np.random.default_rng(0).uniform(size=99).tolist())
    low, high = moved_levels((0.05, 0.95), scores)
    assert high - low == pytest.approx(scores[89])  # the 90th of 99
    assert low + high == pytest.approx(1)
    assert moved_levels((0.5,), scores) == [0.5]
    # Nine scores cannot speak of 95 %: the largest, or the level itself, counts.
    assert moved_levels((0.975,), [0.1] * 9) == [pytest.approx(0.975)]


def test_best_factor_finds_a_minimum_and_stays_where_there_is_none():
    assert best_factor(lambda c: (math.log(c) - 1.2) ** 2) == pytest.approx(math.exp(1.2), rel=1e-6)
    assert best_factor(lambda c: math.inf) == 1.0
    assert best_factor(lambda c: 3.0) == 1.0
    bumpy = best_factor(lambda c: min((math.log(c) - 3) ** 2, (math.log(c) + 2) ** 2 - 0.5))
    assert bumpy == pytest.approx(math.exp(-2), rel=1e-4)


def test_a_lognormal_is_that_of_scipy():
    likelihood = HeteroscedasticGaussian(log_scale=0.8)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 7, 2, generator=generator, dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    mean, std = likelihood.moments(outputs)
    laws = [
        [stats.lognorm(s=0.8 * std[m, i, 0], scale=math.exp(0.8 * mean[m, i, 0])) for i in range(7)]
        for m in range(3)
    ]
    share = (weights / weights.sum()).numpy()
    targets = torch.linspace(0.2, 4, 7, dtype=torch.float64)
    density = [sum(w * laws[m][i].pdf(targets[i]) for m, w in enumerate(share)) for i in range(7)]
    found = likelihood.found(outputs, weights, targets)
    assert np.allclose(found["log_prob"].exp(), density)
    below = [sum(w * laws[m][i].cdf(targets[i]) for m, w in enumerate(share)) for i in range(7)]
    assert np.allclose(found["up_to"], below)
    law = likelihood.law(outputs)
    assert np.allclose(law.mean[..., 0], [[each.mean() for each in row] for row in laws])
    assert np.allclose(law.variance[..., 0], [[each.var() for each in row] for row in laws])
    quantiles = likelihood.quantiles(outputs, weights, (0.05, 0.5, 0.95))[:, :, 0].numpy()
    for level, row in zip((0.05, 0.5, 0.95), quantiles, strict=True):
        reached = [sum(w * laws[m][i].cdf(row[i]) for m, w in enumerate(share)) for i in range(7)]
        assert np.allclose(reached, level, atol=1e-8)
    one = law.taken(torch.zeros(20_000, dtype=torch.int64))
    drawn = one.sample(torch.Generator().manual_seed(3))[:, 0]
    tested = stats.kstest(drawn.numpy(), laws[0][0].cdf)
    assert tested.pvalue > 1e-3


def test_scores_on_a_logarithmic_scale_are_in_the_units_of_the_targets():
    likelihood = FixedGaussian(1.0, log_scale=0.5)
    outputs, targets = torch.zeros(1, 100, 1), torch.exp(0.5 * torch.randn(100, generator=_seeded()))
    from polymode.judging.evaluation import judged_outputs

    predictive, seen = judged_outputs(likelihood, [(slice(0, 100), outputs, torch.ones(1))], targets)
    scores = predictive.scores(seen, target_scale=20.0)
    by_hand = stats.lognorm(s=0.5, scale=20.0).logpdf(20.0 * targets.numpy()).mean()
    assert scores["log_density"] == pytest.approx(by_hand, rel=1e-5)
    mean = 20 * math.exp(0.125)
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((20 * targets.numpy() - mean) ** 2)), rel=1e-5)
    table = predictive.rescaled(0.0, 20.0)
    assert table.mean[0].item() == pytest.approx(mean, rel=1e-5)


def _seeded():
    return torch.Generator().manual_seed(0)


def test_learning_on_a_logarithmic_scale_finds_the_law_of_its_data():
    targets = torch.exp(1 + 0.6 * torch.randn(2000, generator=_seeded()))
    data = pm.ArrayData(torch.ones(2000, 1), targets / math.exp(1), batch_size=200)
    posterior = pm.fit(
        pm.methods.Single(optimizer=pm.Optimizer("Adam", lr=0.02)),
        lambda: torch.nn.Linear(1, 1),
        data,
        likelihood=LearnedGaussian(log_scale=0.6, noise_rate=2.0),
        epochs=60,
        progress=False,
    )
    predictive = posterior.predict(torch.ones(1, 1), quantiles=(0.05, 0.5, 0.95))
    expected = stats.lognorm(s=0.6, scale=1.0).ppf([0.05, 0.5, 0.95])
    # 2,000 rows know log quantiles to about 0.6 · √(1/2000 · (1 + z²/2)): 3 %; four of these.
    assert np.allclose(np.log([v.item() for v in predictive.quantiles.values()]), np.log(expected), atol=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Categorical(temperature=0.0), "temperature must be a positive number, got 0.0"),
        (lambda: FixedGaussian(noise_scale=-1.0), "noise_scale must be a positive number, got -1.0"),
        (lambda: LearnedGaussian(noise_rate=0.0), "noise_rate must be a positive number"),
        (lambda: LearnedGaussian(log_scale=math.nan), "log_scale must be a positive number"),
        (lambda: StudentT(conformal=(0.5, 0.1)), "sorted scores between 0 and 1"),
        (lambda: StudentT(conformal=(0.5, 1.5)), "sorted scores between 0 and 1"),
        (lambda: StudentT().on_log_scale(1.0), "A logarithmic scale is for 'gaussian'"),
        (lambda: Poisson().calibrated([]), "'poisson' has nothing to calibrate"),
    ],
)
def test_values_that_mean_nothing_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_targets_that_are_not_positive_have_no_logarithm():
    with pytest.raises(InputError, match=r"must be positive, got -1.0, first at position \(1,\)"):
        LearnedGaussian(log_scale=1.0).check_targets(torch.tensor([1.0, -1.0]), None)


@pytest.mark.parametrize(
    "likelihood",
    [
        Categorical(temperature=1.7),
        StudentT(noise_scale=0.4, conformal=(0.1, 0.2)),
        LearnedGaussian(log_scale=0.3, noise_rate=3.0),
        HeteroscedasticGaussian(log_scale=2.0, conformal=(0.5,)),
    ],
)
def test_what_was_learned_is_kept_in_the_configuration(likelihood):
    import json

    assert make_likelihood(json.loads(json.dumps(likelihood.config()))) == likelihood


def test_configurations_of_earlier_versions_are_those_without_calibration():
    assert Categorical().config() == {"kind": "categorical", "output": None, "ignore_index": None}
    assert FixedGaussian(0.5).config() == {"kind": "fixed_gaussian", "output": None, "std": 0.5}


class TestPosterior:
    def fitted(self, likelihood="gaussian", outputs=1):
        x = torch.linspace(-2, 2, 300)[:, None]
        y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(300, generator=_seeded())
        y = (y > 0).long() if outputs > 1 else y
        rows = torch.randperm(300, generator=_seeded())
        train, held_out = (pm.ArrayData(x[r], y[r], batch_size=50) for r in (rows[:200], rows[200:]))
        posterior = pm.fit(
            pm.methods.DeepEnsemble(3),
            lambda: pm.models.MLP(1, outputs, (20,)),
            train,
            likelihood=likelihood,
            epochs=30,
            progress=False,
        )
        return posterior, held_out

    @pytest.mark.parametrize(("likelihood", "outputs"), [("gaussian", 1), ("categorical", 2)])
    def test_it_is_saved_loaded_scored_and_predicts_as_it_was_calibrated(self, tmp_path, likelihood, outputs):
        posterior, held_out = self.fitted(likelihood, outputs)
        calibrated = posterior.calibrated(held_out)
        key = "log_density" if outputs == 1 else "nll"
        before, after = pm.evaluate(posterior, held_out)[key], pm.evaluate(calibrated, held_out)[key]
        assert (after >= before) if outputs == 1 else (after <= before)
        told = calibrated.record["calibration"]
        assert told["points"] == 100
        assert told["nll_after"] == pytest.approx(-after if outputs == 1 else after, rel=1e-5)
        calibrated.save(tmp_path / "kept")
        loaded = pm.load_posterior(tmp_path / "kept", lambda: pm.models.MLP(1, outputs, (20,)))
        assert loaded.network.likelihood == calibrated.network.likelihood
        x = torch.randn(10, 1)
        assert torch.equal(loaded.predict(x).mean, calibrated.predict(x).mean)
        assert pm.evaluate(loaded, held_out) == pm.evaluate(calibrated, held_out)
        assert posterior.record.get("calibration") is None  # it is left as it was

    def test_the_factor_is_the_best_of_all(self):
        posterior, held_out = self.fitted()
        found = posterior.calibrated(held_out).network.likelihood.noise_scale

        def nll(scale):
            likelihood = LearnedGaussian(noise_scale=scale)
            return -posterior.with_likelihood(likelihood).log_prob(held_out.inputs, held_out.targets).mean()

        best = minimize_scalar(lambda c: float(nll(math.exp(c))), bounds=(-2, 2), method="bounded").x
        assert math.log(found) == pytest.approx(best, abs=1e-3)

    def test_networks_trained_elsewhere_get_their_noise_level(self):
        x = torch.linspace(-1, 1, 400)[:, None]
        y = 2 * x[:, 0] + 0.1 * torch.randn(400, generator=_seeded())
        module = torch.nn.Linear(1, 1)
        with torch.no_grad():
            module.weight.fill_(2.0)
            module.bias.zero_()
        held_out = pm.ArrayData(x, y)
        for likelihood in ("gaussian", "fixed_gaussian"):
            posterior = pm.from_state_dicts(
                torch.nn.Linear(1, 1), [module.state_dict()], likelihood=likelihood, calibrate=held_out
            )
            std = posterior.predict(x).std.mean().item()
            residual = (y - 2 * x[:, 0]).square().mean().sqrt().item()
            assert std == pytest.approx(residual, rel=1e-3)

    def test_a_noise_level_is_found_however_large_the_targets_are(self):
        """Targets in the hundred thousands, as networks that were trained elsewhere may have them."""
        x = torch.linspace(-1, 1, 300)[:, None]
        y = 2e5 + 1e5 * x[:, 0] + 5e4 * torch.randn(300, generator=_seeded())
        module = torch.nn.Linear(1, 1)
        with torch.no_grad():
            module.weight.fill_(1e5)
            module.bias.fill_(2e5)
        posterior = pm.from_state_dicts(
            module, [module.state_dict()], likelihood="gaussian", calibrate=pm.ArrayData(x, y)
        )
        residual = (y - module(x)[:, 0]).square().mean().sqrt().item()
        assert posterior.predict(x).std.mean().item() == pytest.approx(residual, rel=1e-3)

    def test_a_mixture_has_one_calibration_or_none(self):
        posterior, held_out = self.fitted()
        calibrated = posterior.calibrated(held_out)
        for pair in ([calibrated, posterior], [posterior, calibrated]):
            merged = pm.merge(pair)
            assert merged.network.likelihood == posterior.network.likelihood
            assert "calibration" not in merged.record
        assert pm.merge([calibrated, calibrated]).network.likelihood == calibrated.network.likelihood

    def test_new_networks_do_not_inherit_a_calibration(self):
        posterior, held_out = self.fitted()
        calibrated = posterior.calibrated(held_out)
        again = pm.fit(
            pm.methods.Single(),
            lambda: pm.models.MLP(1, 1, (20,)),
            held_out,
            likelihood=calibrated.network.likelihood,
            epochs=1,
            progress=False,
        )
        assert again.network.likelihood == posterior.network.likelihood

    def test_too_few_points_are_refused(self):
        posterior, held_out = self.fitted()
        with pytest.raises(InputError, match="5 held-out points are too few to calibrate on"):
            posterior.calibrated(held_out.taken(torch.arange(5)))
