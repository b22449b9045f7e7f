import csv
import io
import math

import pytest

from polymode.application.cli.output import price_table
from polymode.application.comparison import Comparison, Result, Summary
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
