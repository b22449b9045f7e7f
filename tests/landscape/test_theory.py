"""Disagreement at a given accuracy, against labels that are drawn as the theory says."""

import math

import numpy as np
import pytest
import torch

from polymode.errors import InputError
from polymode.landscape.theory import (
    family,
    fit_exponent,
    independent_disagreement,
    perturbed_disagreement,
)

NUM_POINTS = 200_000
SETTINGS = [(2, 0.7), (3, 0.6), (10, 0.9), (100, 0.35)]


def one(value):
    return torch.tensor([value], dtype=torch.float64)


def right_with(probability, truth, num_classes, random):
    """Labels that are right with a probability, and else any of the others."""
    wrong = (truth + random.integers(1, num_classes, len(truth))) % num_classes
    return np.where(random.random(len(truth)) < probability, truth, wrong)


def share(events):
    """A share of points and its standard error: points are independent draws."""
    mean = events.mean()
    return mean, math.sqrt(mean * (1 - mean) / len(events))


def flipped(base, truth, right, wrong, num_classes, random):
    """The labels of a network, flipped to any other with p₊ where they are right and p₋ where wrong."""
    flips = random.random(len(base)) < np.where(base == truth, right, wrong)
    return np.where(flips, (base + random.integers(1, num_classes, len(base))) % num_classes, base)


@pytest.mark.parametrize(("num_classes", "base"), SETTINGS)
def test_independent_mistakes_give_the_upper_limit(num_classes, base):
    random = np.random.default_rng(num_classes)
    truth = random.integers(0, num_classes, NUM_POINTS)
    for accuracy in (0.15, 0.5, 0.8):
        first = right_with(base, truth, num_classes, random)
        second = right_with(accuracy, truth, num_classes, random)
        found, error = share(first != second)
        expected = independent_disagreement(one(accuracy), base, num_classes).item()
        assert found == pytest.approx(expected, abs=4 * error)
    perfect = independent_disagreement(one(1.0), base, num_classes).item()
    assert perfect == pytest.approx(1 - base)  # it disagrees where the other one errs


@pytest.mark.parametrize(("num_classes", "base"), SETTINGS)
def test_labels_flipped_at_random_give_the_lower_limit(num_classes, base):
    random = np.random.default_rng(num_classes + 1)
    truth = random.integers(0, num_classes, NUM_POINTS)
    first = right_with(base, truth, num_classes, random)
    slope = (num_classes - 1) / (num_classes * base - 1)  # of the curve, in the accuracy
    for flip in (0.05, 0.3, 0.9):
        second = flipped(first, truth, flip, flip, num_classes, random)
        accuracy, accuracy_error = share(second == truth)
        found, error = share(first != second)
        expected = perturbed_disagreement(one(accuracy), base, num_classes).item()
        assert expected == pytest.approx(
            slope * (base - accuracy)
        )  # the published form, in which a is at a* − …
        # The base's own accuracy is a draw, too: each share has an error of its own, and they add up at most.
        base_error = slope * math.sqrt(base * (1 - base) / NUM_POINTS)
        assert found == pytest.approx(expected, abs=4 * (error + slope * accuracy_error + base_error))


@pytest.mark.parametrize(("num_classes", "base"), SETTINGS)
@pytest.mark.parametrize("exponent", [0.22, 1.0, 2.5])
def test_the_family_is_what_flips_of_two_rates_give(num_classes, base, exponent):
    random = np.random.default_rng(7)
    truth = random.integers(0, num_classes, NUM_POINTS)
    first = right_with(base, truth, num_classes, random)
    for flip in (0.03, 0.4, 0.85):
        second = flipped(first, truth, flip, flip**exponent, num_classes, random)
        accuracy, apart = family(one(flip), exponent, base, num_classes)
        for found, expected in ((second == truth, accuracy), (first != second, apart)):
            mean, error = share(found)
            assert mean == pytest.approx(expected.item(), abs=4 * error)


@pytest.mark.parametrize(("num_classes", "base"), SETTINGS)
def test_ends_and_special_cases(num_classes, base):
    assert perturbed_disagreement(one(base), base, num_classes).item() == 0
    flips = torch.linspace(0, 1, 21, dtype=torch.float64)
    accuracy, apart = family(flips, 1.0, base, num_classes)  # p₊ = p₋
    torch.testing.assert_close(apart, perturbed_disagreement(accuracy, base, num_classes))
    torch.testing.assert_close(apart, flips)
    none = family(one(0.0), 0.5, base, num_classes)
    assert (none[0].item(), none[1].item()) == (base, 0)
    # The worst case: right labels flip and wrong ones do not, so that d = a* − a.
    accuracy, apart = family(flips[:-1], 1e6, base, num_classes)
    torch.testing.assert_close(apart, base - accuracy)


@pytest.mark.parametrize(("num_classes", "base"), SETTINGS)
@pytest.mark.parametrize("exponent", [0.22, 0.6, 1.0, 2.0])
def test_an_exponent_is_found_again(num_classes, base, exponent):
    accuracy, apart = family(torch.linspace(0.02, 0.7, 25, dtype=torch.float64), exponent, base, num_classes)
    below = accuracy <= base
    found = fit_exponent(accuracy[below].tolist(), apart[below].tolist(), base, num_classes)
    assert found == pytest.approx(exponent, rel=1e-2)


def test_curves_whose_accuracy_rises_again_are_followed_until_it_does():
    """Of two classes a wrong label that flips is right: with a large e accuracy has a minimum inside."""
    flips = torch.linspace(0.02, 0.6, 25, dtype=torch.float64)
    for base, exponent in ((0.55, 2.0), (0.6, 4.0), (0.55, 8.0)):
        whole = family(torch.linspace(0, 1, 101, dtype=torch.float64), exponent, base, 2)[0]
        lowest = float(whole.argmin()) / 100
        assert lowest < 1
        accuracy, apart = family(flips * lowest, exponent, base, 2)
        assert fit_exponent(accuracy.tolist(), apart.tolist(), base, 2) == pytest.approx(exponent, rel=1e-2)


def test_networks_beyond_a_curve_are_compared_with_its_end():
    """Two that are better than any perturbation could be: d of the best place on the curve is what counts."""
    base, num_classes = 0.8, 10
    accuracy, apart = family(torch.linspace(0.05, 0.7, 20, dtype=torch.float64), 0.5, base, num_classes)
    flips = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    on, far = family(flips, 0.5, base, num_classes)
    best = float(far[on.argmax()])
    found = fit_exponent([*accuracy.tolist(), 0.99, 1.0], [*apart.tolist(), best, best], base, num_classes)
    assert found == pytest.approx(0.5, rel=1e-2)


def on_curve(accuracy, exponent, base, num_classes):
    """d at an accuracy below the base's, by bisection of the flips."""
    low, high = 1e-3, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        above = family(one(middle), exponent, base, num_classes)[0].item() > accuracy
        low, high = (middle, high) if above else (low, middle)
    return family(one(low), exponent, base, num_classes)[1].item()


@pytest.mark.parametrize("exponent", [0.4, 1.5])
def test_an_exponent_is_found_among_sampling_noise(exponent):
    """ê − e ≈ Σ g r / Σ g², g = ∂d/∂e at the accuracy of a network and r its distance from the curve.

    r = (d̂ − d) − s (â − a), s the slope of the curve: of every point an event with a deviation of at most
    √(d (1 − d)) + |s| √(a (1 − a)), and networks have points of their own here.
    """
    num_classes, base, count = 10, 0.8, 20_000
    random = np.random.default_rng(11)
    accuracies, distances, numerator, denominator = [], [], 0.0, 0.0
    for flip in np.linspace(0.1, 0.8, 20):
        truth = random.integers(0, num_classes, count)
        first = right_with(base, truth, num_classes, random)
        second = flipped(first, truth, flip, flip**exponent, num_classes, random)
        accuracies.append((second == truth).mean())
        distances.append((first != second).mean())
        a, d = (value.item() for value in family(one(flip), exponent, base, num_classes))
        step = 1e-4
        g = (on_curve(a, exponent + step, base, num_classes) - d) / step
        slope = (on_curve(a + step, exponent, base, num_classes) - d) / step
        deviation = math.sqrt(d * (1 - d)) + abs(slope) * math.sqrt(a * (1 - a))
        numerator += g**2 * deviation**2 / count
        denominator += g**2
    bound = 4 * math.sqrt(numerator) / denominator
    assert bound < 0.2 * exponent  # it would tell the exponents of this test apart
    assert fit_exponent(accuracies, distances, base, num_classes) == pytest.approx(exponent, abs=bound)


def test_what_has_no_limits_is_refused():
    with pytest.raises(InputError, match=r"better than chance, 1/10; the accuracy is 0.1"):
        perturbed_disagreement(one(0.1), 0.1, 10)
    with pytest.raises(InputError, match=r"between 0 and 1, got 1\.2"):
        independent_disagreement(one(0.5), 1.2, 10)
    with pytest.raises(InputError, match="num_classes"):
        family(one(0.5), 1.0, 0.5, 1)
    with pytest.raises(InputError, match="As many accuracies as disagreements are needed, got 2 and 1"):
        fit_exponent([0.5, 0.6], [0.1], 0.8, 10)
    with pytest.raises(InputError, match="got 0 and 0"):
        fit_exponent([], [], 0.8, 10)
