import csv
import io
import math

import numpy as np
import pytest
import torch

from polymode.application.cli.output import price_table
from polymode.application.comparison import Comparison, Result, Summary
from polymode.application.comparison.learning import training_mark
from polymode.likelihoods import LIKELIHOODS, Categorical, FixedGaussian


def result(label, *, num_seeds=None, **scores):
    count = len(next(iter(scores.values())))
    num_seeds = num_seeds or count
    replicates = [
        {
            "split": i // num_seeds,
            "seed": i % num_seeds,
            "scores": {key: values[i] for key, values in scores.items()},
            "curves": {},
        }
        for i in range(count)
    ]
    price = {"member_epochs": 10, "seconds": 2.0, "parameters": 5, "passes": 1}
    return Result(label, {"name": label}, 3, replicates, price)


def comparison(*results, likelihood=None):
    return Comparison("test", likelihood or Categorical(), results, {}, {}, {})


def test_standard_errors_are_those_of_a_mean():
    summary = Summary.of([1.0, 2.0, 4.0])
    assert summary.mean == pytest.approx(7 / 3)
    variance = sum((v - 7 / 3) ** 2 for v in (1, 2, 4)) / 2
    assert summary.standard_error == pytest.approx(math.sqrt(variance / 3))
    assert summary.text(2) == "2.33 ±0.88"
    assert Summary.of([1.0]).text(1) == "1.0"
    assert Summary.of([81289.1183]).text(4) == "81289"
    assert Summary.of([-27.24084, -27.24084]).text(4) == "-27.241 ±0.000"


def test_seeds_of_one_split_are_no_independent_repetitions():
    """Two splits that differ by 10, three seeds each that agree: the error of the mean is 5, not 2.2."""
    found = result("a", num_seeds=3, nll=[0.0, 0.1, 0.2, 10.0, 10.1, 10.2])
    assert found.values("nll") == pytest.approx([0.1, 10.1])
    assert found.summary("nll").standard_error == pytest.approx(5.0)
    assert comparison(found).repetitions == "2 splits"
    assert comparison(result("a", nll=[1.0, 2.0, 3.0])).repetitions == "3 seeds"
    assert comparison(result("a", nll=[1.0])).repetitions == ""


# --- errors over test rows -----------------------------------------------------------------------------

REPEATED = 4000  # simulated experiments: a deviation is known to 1/√(2 · 4,000) = 1.1 %


def simulated(scores, *, same_rows):
    """The deviation of the mean over experiments, and what each experiment says of it (root mean square).

    scores: [experiments, units, rows].
    """
    values = scores.mean(-1)
    errors = scores.std(-1, ddof=1) / np.sqrt(scores.shape[-1])
    told = [Summary.of(v, e, same_rows=same_rows) for v, e in zip(values, errors, strict=True)]
    np.testing.assert_allclose([each.mean for each in told], values.mean(1))
    return values.mean(1).std(), np.sqrt(np.mean([each.standard_error**2 for each in told]))


@pytest.mark.parametrize(("by_seed", "by_row"), [(0.0, 1.0), (0.3, 1.0), (1.0, 0.1)])
def test_seeds_on_the_same_rows_leave_the_error_of_these_rows(by_seed, by_row):
    """Seeds and rows add up: the error is that of another experiment with other seeds and other rows."""
    random = np.random.default_rng(0)
    seeds = by_seed * random.normal(size=(REPEATED, 4, 1))
    rows = by_row * random.normal(size=(REPEATED, 1, 30))
    truth, told = simulated(1.0 + seeds + rows, same_rows=True)
    assert told == pytest.approx(truth, rel=0.05)
    # Errors over seeds alone would say next to nothing where rows count.
    if by_seed == 0:
        assert Summary.of((1.0 + seeds + rows)[0].mean(-1)).standard_error < 1e-12


def test_what_seeds_say_of_single_rows_makes_the_error_larger_never_smaller():
    """Rows of which every seed says something else: their error is counted in each of the two parts."""
    random = np.random.default_rng(1)
    truth, told = simulated(random.normal(size=(REPEATED, 4, 30)), same_rows=True)
    # The truth is 1/(4 · 30); the rows of each seed say 1/30, and the seeds 1/(4 · 30).
    assert truth == pytest.approx(math.sqrt(1 / 120), rel=0.05)
    assert told == pytest.approx(math.sqrt(5 / 120), rel=0.05)


@pytest.mark.parametrize(("by_split", "most"), [(0.0, 1.15), (1.0, 1.05)])
def test_splits_have_rows_of_their_own_which_are_not_counted_twice(by_split, most):
    random = np.random.default_rng(2)
    splits = by_split * random.normal(size=(REPEATED, 10, 1))
    truth, told = simulated(splits + random.normal(size=(REPEATED, 10, 30)), same_rows=False)
    # Where splits do not differ, the larger of two estimates of one error is a little above it: of a
    # chi-square over its 9 degrees, E max(χ²/9, 1) = 1 + 0.4 √(2/9) = 1.19, and the root of it.
    assert 0.95 < told / truth < most


def test_rows_bound_the_error_of_few_splits_from_below():
    assert Summary.of([1.0, 1.0], [0.2, 0.4]).standard_error == pytest.approx(math.sqrt(0.1 / 2))
    assert Summary.of([1.0, 3.0], [0.2, 0.4]).standard_error == pytest.approx(1.0)
    assert Summary.of([1.0], [0.2]).standard_error == pytest.approx(0.2)
    assert Summary.of([1.0], [0.2], same_rows=True).standard_error == pytest.approx(0.2)


def with_rows(made, *log_prob, **errors):
    replicates = [
        dict(replicate) | {"log_prob": rows, "errors": {key: values[i] for key, values in errors.items()}}
        for i, (replicate, rows) in enumerate(zip(made.replicates, log_prob, strict=True))
    ]
    return Result(made.label, made.method, made.epochs, replicates, made.price)


def test_a_result_counts_its_test_rows_where_they_are_known():
    plain = result("a", nll=[1.0, 2.0], accuracy=[0.5, 0.5])
    known = with_rows(plain, None, None, nll=[0.3, 0.5])
    assert plain.summary("nll").standard_error == pytest.approx(0.5)
    assert known.summary("nll").standard_error == pytest.approx(math.sqrt(0.25 + (0.09 + 0.25) / 2))
    assert known.summary("accuracy").standard_error == 0.0  # nothing is known of its rows
    assert comparison(known).repetitions == "2 seeds and the test rows"
    one = with_rows(result("a", nll=[1.0]), None, nll=[0.3])
    assert comparison(one).repetitions == "the test rows"


def test_gains_are_paired_over_test_rows():
    """Rows that are hard for both methods do not count as noise of the difference."""
    generator = torch.Generator().manual_seed(0)
    hard = 10 * torch.randn(40, generator=generator)
    apart = [0.1 * torch.randn(40, generator=generator) for _ in range(2)]
    base = with_rows(result("a", nll=[1.0, 1.2]), hard, hard)
    better = with_rows(result("b", nll=[0.8, 1.1]), *(hard + each for each in apart))
    error = comparison(base, better).gain(better).standard_error
    over_rows = np.mean([each.double().var().item() / 40 for each in apart])
    assert error == pytest.approx(math.sqrt(0.05**2 + over_rows), rel=1e-4)
    unlike = with_rows(better, hard, hard[:30])
    assert comparison(base, unlike).gain(unlike).standard_error == pytest.approx(0.05)  # no pairs of rows


# --- marks of trainings ----------------------------------------------------------------------------------

FALLING = [2.0 - 0.1 * i for i in range(20)]
TURNING = [1.0, 0.5, 0.3, 0.2, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6]
SETTLED = [1.0, 0.5, 0.3, 0.21, 0.205, 0.202, 0.2, 0.2, 0.2, 0.2]


@pytest.mark.parametrize(
    ("curve", "stopped", "keeps", "mark"),
    [
        (SETTLED, False, False, ""),
        (SETTLED, False, True, ""),
        (TURNING, False, False, "over-trained"),
        (TURNING, True, False, "over-trained"),
        (TURNING, False, True, ""),  # it goes back to its best epoch
        (TURNING, True, True, ""),
        (FALLING, False, False, "under-trained"),
        (FALLING, False, True, "under-trained"),
        ([4 - 0.1 * i for i in range(40)], False, False, "under-trained"),  # steep to the end
        (FALLING, True, True, ""),  # patience has ended it
        (FALLING[:3], False, False, ""),  # too short to tell
        ([], False, False, ""),
        ([*SETTLED[:-1], 0.2 + 0.049], False, False, ""),
        ([*SETTLED[:-1], 0.2 + 0.051], False, False, "over-trained"),
        ([*SETTLED[:-1], 0.2 - 0.019], False, True, ""),
        ([*SETTLED[:-1], 0.2 - 0.021], False, True, "under-trained"),
    ],
)
def test_marks_of_trainings(curve, stopped, keeps, mark):
    assert training_mark(curve, stopped=stopped, keeps=keeps) == mark


def test_marks_look_at_the_last_tenth():
    """One bad epoch at the end of a hundred is no over-training; ten of them are."""
    assert training_mark([0.2] * 99 + [0.5], stopped=False, keeps=False) == ""
    assert training_mark([0.2] * 90 + [0.5] * 10, stopped=False, keeps=False) == "over-trained"


def test_infinite_scores_are_shown_and_become_null_in_json():
    from polymode.storage import finite

    assert Summary.of([math.inf, 1.0]).mean == math.inf
    assert finite({"a": [math.nan, 1.0], "b": (math.inf,)}) == {"a": [None, 1.0], "b": [None]}


def test_gains_are_paired_over_replicates():
    """Seeds that are hard for both methods do not count as noise of the difference."""
    base, better = result("a", nll=[1.0, 5.0, 9.0]), result("b", nll=[0.9, 4.8, 8.9])
    both = comparison(base, better)
    gain = both.gain(better)
    assert gain.mean == pytest.approx(0.4 / 3)
    assert gain.standard_error == pytest.approx(math.sqrt(((1 / 30) ** 2 * 2 + (2 / 30) ** 2) / 2 / 3))
    assert both.gain(base) is None
    density = comparison(
        result("a", log_density=[1.0]), result("b", log_density=[3.0]), likelihood=FixedGaussian()
    )
    assert density.gain(density.results[1]).mean == 2.0  # higher is better here


@pytest.mark.parametrize(
    ("values", "decided"),
    [
        ([0.1, 0.2], True),  # 0.15 ±0.05: three standard errors
        ([-0.1, -0.2], True),
        ([0.1, 0.4], False),  # 0.25 ±0.15: 1.7
        ([0.0, 0.0], False),
        ([5.0], False),  # no standard error
        ([math.inf, 1.0], False),
    ],
)
def test_a_difference_is_decided_beyond_two_standard_errors(values, decided):
    assert Summary.of(values).is_decided == decided


def test_the_table_of_gains_says_which_are_undecided():
    base, sure = result("a", nll=[1.0, 2.0, 3.0]), result("b", nll=[0.9, 1.8, 2.9])
    other, worse = result("c", nll=[0.9, 2.1, 2.9]), result("d", nll=[1.1, 2.2, 3.1])
    [_, *gains] = price_table(comparison(base, sure, other, worse)).columns[1].cells
    assert gains == [
        "[green]+0.1333 ±0.0333[/]",
        "+0.0333 ±0.0667 undecided",
        "[red]-0.1333 ±0.0333[/]",
    ]
    alone = comparison(result("a", nll=[1.0]), result("b", nll=[0.5]))
    assert list(price_table(alone).columns[1].cells) == ["–", "+0.5000 undecided"]


def test_the_best_of_a_column_goes_its_way():
    both = comparison(
        result("a", accuracy=[0.9], nll=[0.3], ece=[0.01234]),
        result("b", accuracy=[0.8], nll=[0.2], ece=[0.01229]),
        result("c", accuracy=[0.9], nll=[0.25], ece=[0.5]),
    )
    by_key = {column.key: both.best(column) for column in both.shown_columns()}
    # The digits shown do not tell 0.01234 from 0.01229.
    assert by_key == {"accuracy": {"a", "c"}, "nll": {"b"}, "ece": {"a", "b"}}
    coverage = comparison(
        result("a", coverage90=[0.99]), result("b", coverage90=[0.87]), likelihood=FixedGaussian()
    )
    assert coverage.best(FixedGaussian.columns["coverage90"]) == {"b"}  # nearer to 0.9
    assert comparison(result("a", nll=[0.1])).best(Categorical.columns["nll"]) == set()  # alone is not best


def test_a_score_that_some_replicates_lack_is_not_shown_for_the_method():
    one, two = result("a", nll=[1.0, 2.0]), result("b", nll=[1.0, 2.0], disagreement=[0.1, 0.2])
    both = comparison(one, two)
    assert one.summary("disagreement") is None
    [first, second] = list(csv.DictReader(io.StringIO(both.csv())))
    assert (first["disagreement"], second["disagreement"]) == ("", str(Summary.of([0.1, 0.2]).mean))
    assert len(both.replicates_csv().splitlines()) == 5


def test_every_likelihood_has_columns_and_a_quality():
    for likelihood in LIKELIHOODS.values():
        assert likelihood.columns[likelihood.quality].better in ("high", "low")
        assert all(column.key == key for key, column in likelihood.columns.items())
