import pytest

from polymode.errors import InputError
from polymode.metrics import corruption_mean, mean_corruption_error, relative_corruption_error

ERRORS = {"fog": [0.1, 0.2, 0.3, 0.4, 0.5], "snow": [0.2, 0.2, 0.2, 0.2, 0.2]}  # sums 1.5 and 1
BASELINE = {"snow": [0.4, 0.4, 0.4, 0.4, 0.4], "fog": [0.2, 0.3, 0.4, 0.5, 0.6]}  # sums 2 and 2


def test_hand_worked_numbers():
    assert corruption_mean(ERRORS) == pytest.approx(2.5 / 10)
    assert mean_corruption_error(ERRORS, BASELINE) == pytest.approx(100 * (1.5 / 2 + 1 / 2) / 2)
    # fog: (1.5 − 5 · 0.05) / (2 − 5 · 0.1), snow: (1 − 5 · 0.05) / (2 − 5 · 0.1)
    relative = relative_corruption_error(ERRORS, 0.05, BASELINE, 0.1)
    assert relative == pytest.approx(100 * (1.25 / 1.5 + 0.75 / 1.5) / 2)
    assert mean_corruption_error(BASELINE, BASELINE) == pytest.approx(100)
    assert relative_corruption_error(BASELINE, 0.1, BASELINE, 0.1) == pytest.approx(100)
    # Two severities: the clean error is subtracted twice.
    some = relative_corruption_error({"fog": [0.3, 0.5]}, 0.1, {"fog": [0.4, 0.4]}, 0.2)
    assert some == pytest.approx(100 * 0.6 / 0.4)


def test_a_mean_of_ratios_is_not_a_ratio_of_means():
    errors, baseline = {"a": [0.1], "b": [0.8]}, {"a": [0.1], "b": [0.4]}
    assert mean_corruption_error(errors, baseline) == pytest.approx(150)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corruption_mean({}), "no scores of corruptions"),
        (lambda: corruption_mean({"fog": []}), "no scores of corruptions"),
        (lambda: corruption_mean({"fog": [0.1], "snow": [0.1, 0.2]}), "same number of severities"),
        (lambda: mean_corruption_error(ERRORS, {"fog": [0.1] * 5}), "only one of both has snow"),
        (lambda: mean_corruption_error({"fog": [0.1]}, {"fog": [0.1, 0.2]}), "has 2 severities, not 1"),
        (lambda: mean_corruption_error({"fog": [0.1]}, {"fog": [0.0]}), "no errors with fog"),
        (lambda: relative_corruption_error({"a": [0.2]}, 0.1, {"a": [0.3]}, 0.3), "as many as on clean"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
