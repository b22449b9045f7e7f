import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import polymode as pm
from polymode.application.estimators import EXPECTED_FAILED_CHECKS
from polymode.errors import InputError

QUICK = {"epochs": 30, "backend": "vmap", "threads": 1, "random_state": 0}


def mixed_frame(number=240):
    """Rows of a number with gaps, a category and a date, with a target of known noise."""
    random = np.random.default_rng(0)
    size = random.normal(size=number)
    city = random.choice(["Berlin", "Oslo", "Rome"], number)
    day = pd.Timestamp("2024-01-01") + pd.to_timedelta(random.integers(0, 700, number), unit="D")
    target = 100 + 20 * size + np.select([city == "Oslo", city == "Rome"], [30.0, -10.0], 0.0)
    target = target + random.normal(scale=5, size=number)
    frame = pd.DataFrame({"size": size, "city": city, "day": day})
    frame.loc[::17, "size"] = np.nan
    return frame, target


@pytest.mark.parametrize(
    "estimator",
    [
        pm.EnsembleClassifier("deep_ensemble", **QUICK),
        pm.EnsembleRegressor("deep_ensemble", likelihood="gaussian", **QUICK),
    ],
    ids=["classifier", "regressor"],
)
def test_scikit_learn_checks(estimator, recwarn):
    check_estimator(estimator, expected_failed_checks=EXPECTED_FAILED_CHECKS, on_skip=None)
    recwarn.clear()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["single", "mc_dropout", "anchored"])
@pytest.mark.parametrize("kind", [pm.EnsembleClassifier, pm.EnsembleRegressor])
def test_scikit_learn_checks_of_other_methods(method, kind, recwarn):
    check_estimator(kind(method, **QUICK), expected_failed_checks=EXPECTED_FAILED_CHECKS, on_skip=None)
    recwarn.clear()


def test_a_regression_of_mixed_columns_is_as_good_as_its_noise_allows():
    frame, target = mixed_frame()
    made = pm.EnsembleRegressor(**QUICK | {"epochs": 60}).fit(frame[:180], target[:180])
    mean, std = made.predict(frame[180:], return_std=True)
    errors = mean - target[180:]
    # The noise is 5; a linear model that sees the category as places has about that error, too.
    places = pd.get_dummies(frame[["city"]]).assign(size=frame["size"].fillna(0))
    linear = LinearRegression().fit(places[:180], target[:180])
    rival = np.sqrt(np.mean((linear.predict(places[180:]) - target[180:]) ** 2))
    assert np.sqrt(np.mean(errors**2)) < 1.6 * rival
    quantiles = made.predict_quantiles(frame[180:], (0.05, 0.5, 0.95))
    assert (np.diff(quantiles, axis=1) > 0).all()
    inside = (quantiles[:, 0] <= target[180:]) & (target[180:] <= quantiles[:, 2])
    assert inside.mean() > 0.9 - 3 * np.sqrt(0.09 / 60)
    assert np.median(std) < target.std()


def test_probabilities_are_those_of_the_posterior_and_labels_keep_their_type():
    frame, target = mixed_frame()
    labels = np.where(target > 100, "high", "low")
    made = pm.EnsembleClassifier(**QUICK).fit(frame, labels)
    probabilities = made.predict_proba(frame)
    assert made.classes_.tolist() == ["high", "low"]
    assert np.allclose(probabilities.sum(1), 1)
    assert (made.predict(frame) == made.classes_[probabilities.argmax(1)]).all()
    assert made.score(frame, labels) > 0.85
    doubt = made.predict_uncertainty(frame)
    assert np.allclose(doubt["entropy"], -(probabilities * np.log(probabilities)).sum(1), atol=1e-5)
    assert (doubt["mutual_information"] <= doubt["entropy"] + 1e-6).all()


def test_saved_and_pickled_estimators_predict_the_same(tmp_path):
    frame, target = mixed_frame()
    made = pm.EnsembleRegressor(**QUICK).fit(frame, target)
    expected = made.predict_quantiles(frame)
    loaded = pm.EnsembleRegressor.load(made.save(tmp_path / "kept"))
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.suffix in (".pkl", ".pickle", ".pt")]
    assert np.array_equal(loaded.predict_quantiles(frame), expected)
    again = pickle.loads(pickle.dumps(made))
    assert np.array_equal(again.predict_quantiles(frame), expected)
    with pytest.raises(InputError, match="holds an estimator already"):
        made.save(tmp_path / "kept")
    with pytest.raises(InputError, match="holds a 'EnsembleRegressor', not a EnsembleClassifier"):
        pm.EnsembleClassifier.load(tmp_path / "kept")


def test_pipelines_searches_and_cross_validation():
    x, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), pm.EnsembleClassifier(**QUICK))
    assert cross_val_score(pipeline, x, y, cv=3).mean() > 0.85
    search = GridSearchCV(pm.EnsembleClassifier(**QUICK), {"method": ["single", "deep_ensemble"]}, cv=2)
    search.fit(x, y)
    assert search.best_params_["method"] in ("single", "deep_ensemble")
    frame, target = mixed_frame()
    columns = ColumnTransformer([("numbers", StandardScaler(), ["size"])], remainder="passthrough")
    columns.set_output(transform="pandas")
    model = make_pipeline(columns, pm.EnsembleRegressor(likelihood="gaussian", **QUICK))
    assert model.fit(frame, target).score(frame, target) > 0.5


def test_a_network_and_a_method_of_ones_own():
    x, y = load_diabetes(return_X_y=True)

    def network(num_inputs, num_outputs):
        return torch.nn.Sequential(
            torch.nn.Linear(num_inputs, 8), torch.nn.Tanh(), torch.nn.Linear(8, num_outputs)
        )

    method = pm.methods.DeepEnsemble(3)
    made = pm.EnsembleRegressor(method, model=network, likelihood="gaussian", **QUICK).fit(x, y)
    assert made.posterior_.num_members == 3
    assert made.posterior_.network.module.network[0].weight.shape == (8, 10)
    assert clone(made).method == method


def test_weights_count_rows_more():
    x = np.repeat(np.linspace(-1, 1, 60)[:, None], 2, 0)
    y = np.tile([0.0, 10.0], 60) + 0.01 * np.random.default_rng(0).normal(size=120)
    weights = np.tile([1.0, 9.0], 60)
    options = QUICK | {"epochs": 150, "likelihood": "gaussian", "validation": None}
    plain = pm.EnsembleRegressor("single", **options).fit(x, y)
    weighted = pm.EnsembleRegressor("single", **options).fit(x, y, sample_weight=weights)
    # Least squares: the mean is 5 without weights and 9 with them.
    assert abs(plain.predict(x).mean() - 5) < 0.5
    assert abs(weighted.predict(x).mean() - 9) < 0.5


def test_calibrated_intervals_are_conformal_on_the_rows_held_out():
    frame, target = mixed_frame(600)
    made = pm.EnsembleRegressor(calibrate=True, **QUICK).fit(frame[:400], target[:400])
    assert made.posterior_.record["calibration"]["points"] == 60  # 15 % of 400
    quantiles = made.predict_quantiles(frame[400:], (0.05, 0.95))
    inside = (quantiles[:, 0] <= target[400:]) & (target[400:] <= quantiles[:, 1])
    # Coverage given 60 calibration rows is Beta-distributed around 0.9, then binomial over 200 test rows.
    error = np.sqrt(0.9 * 0.1 / 60 + 0.9 * 0.1 / 200)
    assert abs(inside.mean() - 0.9) < 3 * error
    with pytest.raises(InputError, match="calibrate=True takes held-out rows"):
        pm.EnsembleRegressor(calibrate=True, validation=None, **QUICK).fit(frame, target)


def test_a_run_that_was_cut_goes_on(tmp_path):
    frame, target = mixed_frame()
    options = QUICK | {"likelihood": "gaussian", "run_dir": str(tmp_path / "run")}
    first = pm.EnsembleRegressor(**options).fit(frame, target).predict(frame)
    again = pm.EnsembleRegressor(**options).fit(frame, target).predict(frame)  # read back
    assert np.array_equal(first, again)
