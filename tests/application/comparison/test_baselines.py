"""Baselines of scikit-learn against closed forms and loops written by hand."""

import math
import sys

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold

from polymode.application.comparison import baselines
from polymode.application.comparison.baselines import (
    CLASSIFICATION_BASELINES,
    GP_ROWS,
    REGRESSION_BASELINES,
    fit_baseline,
    left_out,
)
from polymode.errors import InputError, UnknownName

NORMAL_95 = 1.6448536269514722


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    monkeypatch.setattr(baselines, "TREES", 20)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(num_rows=80, num_columns=4, noise=0.5, seed=0):
    inputs = normal(num_rows, num_columns, seed=seed)
    slopes = torch.arange(1, num_columns + 1, dtype=torch.float64)
    return inputs, inputs @ slopes + 3 + noise * normal(num_rows, seed=seed + 1000)


def blobs(num_rows=90, num_classes=3, seed=0):
    labels = torch.arange(num_rows) % num_classes
    return normal(num_rows, 2, seed=seed) + 3 * torch.stack([labels, labels**2], 1), labels


def fit_any(name, inputs, targets, num_classes=None, **options):
    """A baseline that is fitted, and its answer for the same inputs as one tensor."""
    fitted = fit_baseline(name, inputs, targets, num_classes, **options)
    answer = torch.stack(fitted.moments(inputs)) if num_classes is None else fitted.probabilities(inputs)
    return fitted, answer


def check_answer(answer, num_rows, num_classes):
    assert answer.dtype == torch.float64
    assert answer.isfinite().all()
    if num_classes is None:
        assert answer.shape == (2, num_rows)
        assert (answer[1] > 0).all()
    else:
        assert answer.shape == (num_rows, num_classes)
        assert (answer > 0).all()
        torch.testing.assert_close(answer.sum(1), torch.ones(num_rows, dtype=torch.float64))


EVERY = [(name, None) for name in REGRESSION_BASELINES] + [(name, 4) for name in CLASSIFICATION_BASELINES]


def rows_for(num_classes, num_rows=8, num_columns=3):
    inputs = normal(num_rows, num_columns)
    return inputs, normal(num_rows, seed=9) if num_classes is None else torch.arange(num_rows) % 2


# Numbers


def test_the_constant_is_the_mean_and_the_standard_deviation():
    inputs, targets = linear()
    fitted, (mean, std) = fit_any("constant", inputs, targets)
    torch.testing.assert_close(mean, targets.mean().expand(80))
    torch.testing.assert_close(std, targets.std(correction=0).expand(80))
    assert fitted.num_parameters == 2


@pytest.mark.parametrize("weights", [None, torch.arange(83) % 3])
def test_the_noise_of_ridge_is_that_of_a_loop_over_folds(weights):
    inputs, targets = linear(83)
    fitted, (mean, std) = fit_any("ridge", inputs, targets, seed=7, weights=weights)
    often = torch.ones(83) if weights is None else weights
    x, y, w = (t[often > 0].numpy() for t in (inputs, targets, often))
    squares, total = 0.0, 0.0
    for rest, held in KFold(5, shuffle=True, random_state=7).split(x):
        model = RidgeCV(np.logspace(-3, 6, 19)).fit(x[rest], y[rest], sample_weight=w[rest])
        squares += (w[held] * (y[held] - model.predict(x[held])) ** 2).sum()
        total += w[held].sum()
    assert fitted.noise == pytest.approx(math.sqrt(squares / total), rel=1e-6)
    assert (std == fitted.noise).all()
    model = RidgeCV(np.logspace(-3, 6, 19)).fit(x, y, sample_weight=w)
    torch.testing.assert_close(mean, torch.from_numpy(model.predict(inputs.numpy())))
    assert fitted.num_parameters == 4 + 1 + 1


def test_intervals_of_ridge_cover_what_they_promise():
    inside = []
    for seed in range(40):
        inputs, targets = linear(300, seed=seed)
        mean, std = fit_baseline("ridge", inputs[:200], targets[:200]).moments(inputs[200:])
        inside.append(((targets[200:] - mean).abs() < NORMAL_95 * std).double().mean().item())
    # Tables are independent, so their own spread tells the error of the mean.
    assert np.mean(inside) == pytest.approx(0.9, abs=4 * np.std(inside) / math.sqrt(40) + 0.005)


def test_noise_of_trees_comes_from_rows_they_have_not_seen():
    inputs, targets = normal(150, 3), normal(150, seed=1)  # nothing to learn
    for name in ("random_forest", "boosting"):
        fitted, (mean, std) = fit_any(name, inputs, targets)
        assert (mean - targets).square().mean().sqrt() < 0.8 * std[0]
        assert fitted.noise == pytest.approx(targets.std().item(), rel=0.25)


def test_trees_and_process_learn_what_is_not_linear():
    inputs = normal(300, 2)
    targets = torch.sin(2 * inputs[:, 0]) + 0.1 * normal(300, seed=1)
    for name in ("gaussian_process", "random_forest", "boosting"):
        mean, _ = fit_baseline(name, inputs[:200], targets[:200]).moments(inputs[200:])
        assert (mean - targets[200:]).square().mean() < 0.2 * targets.var(), name


def test_a_gaussian_process_knows_its_noise_and_what_it_has_not_seen():
    inputs = normal(150, 1)
    targets = torch.sin(2 * inputs[:, 0]) + 0.2 * normal(150, seed=1)
    fitted = fit_baseline("gaussian_process", inputs, targets)
    _, near = fitted.moments(torch.zeros(1, 1))
    mean, far = fitted.moments(torch.full((1, 1), 100.0))
    assert near.item() == pytest.approx(0.2, rel=0.3)
    assert far.item() > 2 * near.item()
    assert mean.item() == pytest.approx(targets.mean().item(), abs=1e-6)
    assert fitted.noise is None
    assert fitted.num_parameters == 150


def test_a_gaussian_process_says_that_it_knows_no_weights():
    inputs, targets = linear(20)
    assert (
        "weights" in fit_baseline("gaussian_process", inputs, targets, weights=1 + torch.arange(20.0)).remark
    )
    assert fit_baseline("gaussian_process", inputs, targets, weights=torch.ones(20)).remark == ""


@pytest.mark.parametrize("name", REGRESSION_BASELINES)
def test_units_of_targets_change_nothing_else(name):
    inputs, targets = linear(40)
    _, plain = fit_any(name, inputs, targets)
    _, other = fit_any(name, inputs, 1e-9 * targets + 5e-8)
    torch.testing.assert_close((other[0] - 5e-8) * 1e9, plain[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(other[1] * 1e9, plain[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", REGRESSION_BASELINES)
def test_the_noise_has_a_floor(name):
    inputs = normal(30, 2)
    _, (mean, std) = fit_any(name, inputs, torch.full((30,), 0.1))
    torch.testing.assert_close(mean, torch.full((30,), 0.1).double(), rtol=0, atol=1e-6)
    assert (std >= 1e-3 * (1 - 1e-12)).all()
    _, (mean, std) = fit_any(name, inputs, 5 * inputs[:, 0])
    assert (std >= 1e-3 * 5 * inputs[:, 0].std(correction=0) * (1 - 1e-12)).all()


# Classes


def test_the_prior_is_laplace_smoothed():
    inputs, labels = normal(10, 2), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 3])
    fitted, found = fit_any("prior", inputs, labels, 5)
    expected = torch.tensor([7, 4, 1, 2, 1], dtype=torch.float64) / 15
    torch.testing.assert_close(found, expected.expand(10, 5))
    assert fitted.num_parameters == 5
    _, weighted = fit_any("prior", inputs, labels, 5, weights=torch.tensor([2.0] * 6 + [1.0] * 4))
    torch.testing.assert_close(weighted[0], torch.tensor([13, 4, 1, 2, 1], dtype=torch.float64) / 21)


@pytest.mark.parametrize("name", CLASSIFICATION_BASELINES)
def test_absent_and_single_classes_get_a_small_probability(name):
    inputs, labels = blobs()
    labels = torch.where(labels == 2, 4, labels)
    labels[0] = 3  # the only one of its class; 2 has none
    fitted, found = fit_any(name, inputs, labels, 6)
    check_answer(found, 90, 6)
    assert (found[:, [2, 5]] < 0.02).all()
    assert fitted.noise is None
    if name != "prior":
        assert (found.argmax(1) == labels).double().mean() > 0.9


def test_a_forest_has_one_more_tree_that_votes_by_frequencies():
    inputs, labels = blobs()
    fitted, found = fit_any("random_forest", inputs, labels, 4)
    votes = np.concatenate([fitted.model.predict_proba(inputs.numpy()), np.zeros((90, 1))], 1)
    prior = np.array([31, 31, 31, 1]) / 94
    torch.testing.assert_close(found, torch.from_numpy((20 * votes + prior) / 21))


@pytest.mark.parametrize("name", ["logistic", "boosting"])
def test_other_classifiers_see_one_more_row_of_each_class(name):
    inputs, labels = blobs()
    fitted, found = fit_any(name, inputs, labels, 3)
    own = torch.from_numpy(fitted.model.predict_proba(inputs.numpy()))
    torch.testing.assert_close(found, (90 * own + 1) / 93)


def test_logistic_regression_is_penalised_more_where_there_is_nothing_to_learn():
    inputs = normal(60, 20)
    nothing = fit_baseline("logistic", inputs, torch.arange(60) % 2, 2)
    clear = fit_baseline("logistic", inputs, (inputs[:, 0] > 0).long(), 2)
    assert nothing.model.C == 0.01
    assert clear.model.C > 0.01
    assert clear.num_parameters == 21


@pytest.mark.parametrize("name", CLASSIFICATION_BASELINES)
def test_one_class_only_falls_back_to_the_prior(name):
    inputs = normal(12, 2)
    fitted, found = fit_any(name, inputs, torch.ones(12, dtype=torch.int64), 3)
    check_answer(found, 12, 3)
    assert (found.argmax(1) == 1).all()
    assert ("prior" in fitted.remark) == (name != "prior")


# All of them


@pytest.mark.parametrize(("name", "num_classes"), EVERY)
def test_the_same_seed_gives_the_same_numbers(name, num_classes):
    inputs, targets = rows_for(num_classes, 40)
    _, once = fit_any(name, inputs, targets, num_classes, seed=2**40 + 5)
    torch.rand(3), np.random.rand(3)  # a global state that moved on
    _, again = fit_any(name, inputs, targets, num_classes, seed=2**40 + 5)
    assert torch.equal(once, again)


@pytest.mark.parametrize("table", ["tiny", "no columns", "constant columns", "wide", "smallest", "one-hot"])
@pytest.mark.parametrize(("name", "num_classes"), EVERY)
def test_small_and_odd_tables(name, num_classes, table):
    num_rows = 4 if table == "smallest" else 8
    inputs, targets = rows_for(num_classes, num_rows)
    if table == "no columns":
        inputs = inputs[:, :0]
    elif table == "constant columns":
        inputs = torch.full_like(inputs, 2.5)
    elif table == "wide":
        inputs = normal(8, 30)
    elif table == "one-hot":
        inputs = torch.eye(300)[torch.arange(8) * 7]
    fitted, answer = fit_any(name, inputs.float(), targets, num_classes)
    check_answer(answer, num_rows, num_classes)
    assert fitted.seconds > 0
    assert isinstance(fitted.num_parameters, int)
    empty = inputs[:0].float()
    check_answer(
        torch.stack(fitted.moments(empty)) if num_classes is None else fitted.probabilities(empty),
        0,
        num_classes,
    )


@pytest.mark.parametrize(("name", "num_classes"), EVERY)
def test_rows_of_weight_zero_are_not_there(name, num_classes):
    inputs, targets = rows_for(num_classes, 30)
    weights = (torch.arange(30) % 3 > 0).double()
    _, weighted = fit_any(name, inputs, targets, num_classes, weights=weights)
    plain = fit_baseline(name, inputs[weights > 0], targets[weights > 0], num_classes)
    other = torch.stack(plain.moments(inputs)) if num_classes is None else plain.probabilities(inputs)
    assert torch.equal(weighted, other)


@pytest.mark.parametrize(("name", "num_classes"), EVERY)
def test_answers_do_not_depend_on_pieces(name, num_classes, monkeypatch):
    inputs, targets = rows_for(num_classes, 20)
    _, whole = fit_any(name, inputs, targets, num_classes)
    monkeypatch.setattr(baselines, "PREDICTED_ROWS", 7)
    _, pieces = fit_any(name, inputs, targets, num_classes)
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_classes", [None, 3])
def test_early_stopping_where_rows_suffice(num_classes):
    inputs = normal(1200, 2)
    targets = inputs[:, 0] if num_classes is None else (inputs[:, 0] > 0).long()
    fitted, answer = fit_any(
        "boosting",
        inputs,
        targets + 0.5 * normal(1200, seed=1) if num_classes is None else targets,
        num_classes,
    )
    assert fitted.model.do_early_stopping_
    check_answer(answer, 1200, num_classes)
    if num_classes is not None:
        targets[0] = 2  # cannot be both held out and learnt from
        fitted, answer = fit_any("boosting", inputs, targets, num_classes)
        assert not fitted.model.do_early_stopping_
        check_answer(answer, 1200, num_classes)


@pytest.mark.parametrize(
    ("name", "num_classes"),
    [case for case in EVERY if case[0] in ("random_forest", "boosting", "ridge", "logistic")],
)
def test_many_rows_are_thinned_out(name, num_classes, monkeypatch):
    monkeypatch.setattr(baselines, "TREE_ROWS", 50)
    monkeypatch.setattr(baselines, "LINEAR_CELLS", 100)
    monkeypatch.setattr(baselines, "FOLDED_ROWS", 30)
    inputs, targets = rows_for(num_classes, 2000)
    fitted, answer = fit_any(name, inputs, targets, num_classes)
    assert fitted.remark == "fitted to 50 of 2,000 rows, drawn at random"
    check_answer(answer, 2000, num_classes)
    assert torch.equal(fit_any(name, inputs, targets, num_classes)[1], answer)


def test_many_rows_are_judged_by_one_fold(monkeypatch):
    monkeypatch.setattr(baselines, "FOLDED_ROWS", 50)
    inputs, targets = linear(100)
    rest, held = next(KFold(5, shuffle=True, random_state=0).split(inputs))
    model = RidgeCV(np.logspace(-3, 6, 19)).fit(inputs[rest].numpy(), targets[rest].numpy())
    expected = ((targets[held].numpy() - model.predict(inputs[held].numpy())) ** 2).mean() ** 0.5
    assert fit_baseline("ridge", inputs, targets).noise == pytest.approx(expected, rel=1e-6)


def test_what_is_left_out():
    assert left_out("gaussian_process", GP_ROWS) is None
    assert (
        left_out("gaussian_process", GP_ROWS + 1)
        == "it is fitted to at most 1,000 training rows, there are 1,001"
    )
    assert left_out("boosting", 10**6) is None
    assert "at least 4" in str(left_out("prior", 3))
    with pytest.raises(UnknownName, match="Did you mean 'boosting'"):
        left_out("boostin", 10)
    with pytest.raises(InputError, match=r"'gaussian_process' is left out.*1,000"):
        fit_baseline("gaussian_process", torch.zeros(GP_ROWS + 1, 1), torch.zeros(GP_ROWS + 1))


def test_the_wrong_question():
    inputs, targets = linear(10)
    with pytest.raises(InputError, match=r"'ridge' of numbers has no probabilities"):
        fit_baseline("ridge", inputs, targets).probabilities(inputs)
    fitted = fit_baseline("prior", inputs, torch.arange(10) % 2, 2)
    with pytest.raises(InputError, match="'prior' of classes has no moments"):
        fitted.moments(inputs)
    with pytest.raises(InputError, match="fitted to 4 columns, got 2"):
        fitted.probabilities(inputs[:, :2])


def test_bad_input():
    inputs, targets = linear(10)
    labels = torch.arange(10) % 2
    infinite = inputs.clone()
    infinite[3, 1] = math.inf
    for message, name, arguments, options in [
        ("Unknown baseline 'prior'", "prior", (inputs, targets), {}),
        ("Unknown baseline 'ridge'", "ridge", (inputs, labels, 2), {}),
        (r"floats, got torch.int64 of shape \(10, 4\)", "ridge", (inputs.long(), targets), {}),
        (r"shape \(10,\)", "ridge", (inputs[:, 0], targets), {}),
        ("Inputs .* finite, got inf in row 3", "ridge", (infinite, targets), {}),
        ("Targets .* finite, got nan in row 0", "ridge", (inputs, targets * math.nan), {}),
        (r"targets \[10\], got \(10, 1\)", "ridge", (inputs, targets[:, None]), {}),
        ("labels need num_classes", "ridge", (inputs, labels), {}),
        ("Labels are int64", "prior", (inputs, targets, 2), {}),
        (r"range\(2\), got 3 in row 1", "prior", (inputs, 3 * labels, 2), {}),
        ("num_classes must be", "prior", (inputs, labels, 0), {}),
        ("seed must be", "prior", (inputs, labels, 2), {"seed": -1}),
        ("not negative, got -1.0 in row 0", "ridge", (inputs, targets), {"weights": -torch.ones(10)}),
        (r"shape \[10\], got \(9,\)", "ridge", (inputs, targets), {"weights": torch.ones(9)}),
        ("at least 4 training rows, there are 0", "ridge", (inputs, targets), {"weights": torch.zeros(10)}),
    ]:
        with pytest.raises(InputError, match=message):
            fit_baseline(name, *arguments, **options)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r"pip install 'polymode\[data\]', or --baselines none"):
        fit_baseline("ridge", *linear(10))
