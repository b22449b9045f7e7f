"""Correlation times and spreads of chains, against series whose law is known and against naive sums."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from polymode.samplers import Spread, correlation_time

# At most eight numbers are looked at in one test: by chance 4.5 standard errors are exceeded once in 10,000.
FITS = 4.5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def autoregressive(correlation: float, length: int, number: int) -> Tensor:
    """Stationary series x_t = ρ x_{t−1} + √(1 − ρ²) z_t, [length, number]; their τ is (1 + ρ)/(1 − ρ)."""
    z = normal(length, number)
    series = [z[0]]
    for noise in z[1:]:
        series.append(correlation * series[-1] + math.sqrt(1 - correlation**2) * noise)
    return torch.stack(series)


def naive_time(series: Tensor) -> float:
    """τ of one series, lag by lag."""
    length, x = len(series), (series - series.mean()).tolist()
    variance, time = sum(v * v for v in x), 1.0
    for lag in range(1, length):
        time += 2 * sum(x[t] * x[t + lag] for t in range(length - lag)) / variance
        if lag >= 5 * time:
            break
    return min(max(time, 1.0), float(length))


# --- correlation times ------------------------------------------------------------------------------


@pytest.mark.parametrize("correlation", [0.3, 0.7, 0.9])
def test_the_time_of_autoregressive_series(correlation):
    """Errors are those of the mean of independent series.

    Without its mean, a series of length T has correlations that are lower by τ/T, at about 5 τ lags which
    count twice: τ is found too low by 10 τ²/T. What lies beyond the last lag is a share ρ^(5 τ) < 1e-4 of it.
    """
    length, number = 6000, 200
    expected = (1 + correlation) / (1 - correlation)
    found = correlation_time(autoregressive(correlation, length, number))
    assert found.shape == (number,)
    error = found.std().item() / math.sqrt(number)
    assert found.mean().item() == pytest.approx(expected, abs=FITS * error + 10 * expected**2 / length)
    # Sokal: the variance of one estimate with a last lag W is 2 (2 W + 1) τ²/T; about, W being random.
    predicted = math.sqrt(2 * (2 * 5 * expected + 1) / length) * expected
    assert found.std().item() == pytest.approx(predicted, rel=0.3)


def test_the_time_predicts_the_error_of_a_mean():
    """The variance of a mean over T states is σ² τ/T; over 2,000 series it is known to √(2/2000)."""
    length, number = 1000, 2000
    series = autoregressive(0.8, length, number)
    predicted = correlation_time(series).mean().item() / length
    assert series.mean(0).var().item() == pytest.approx(predicted, rel=FITS * math.sqrt(2 / number) + 0.05)


def test_independent_draws_have_the_time_one():
    """Five lags are summed, each known to 1/√T: τ is 1 up to 2 √(5/T), and what is below 1 is cut off."""
    length = 20_000
    found = correlation_time(normal(length, 100))
    assert found.min() >= 1
    error = 2 * math.sqrt(5 / length)
    assert found.max() < 1 + FITS * error
    assert found.mean().item() == pytest.approx(1 + error / math.sqrt(2 * math.pi), abs=FITS * error / 10)
    # Series that swing to and fro are worth more than independent draws, and count as these.
    assert torch.equal(correlation_time(autoregressive(-0.5, length, 3)), torch.ones(3, dtype=torch.float64))


def test_the_time_is_that_of_sums_lag_by_lag():
    """Of series of every kind, a trend among them, and of any shape [..., T, K]."""
    length = 80
    steps = torch.linspace(0, 1, length, dtype=torch.float64)
    kinds = [
        *autoregressive(0.6, length, 4).T,
        *normal(length, 4, seed=3).T,
        *normal(length, 2, seed=4).cumsum(0).T,
        steps,
        (steps > 0.4).double(),
    ]
    series = torch.stack(kinds, 1)
    expected = torch.tensor([naive_time(kind) for kind in kinds], dtype=torch.float64)
    torch.testing.assert_close(correlation_time(series), expected, rtol=1e-10, atol=0)
    folded = series.view(length, 2, 3, 2).permute(1, 2, 0, 3)  # [2, 3, T, 2]
    torch.testing.assert_close(correlation_time(folded), expected.view(2, 3, 2), rtol=1e-10, atol=0)


def test_units_and_offsets_change_nothing():
    series = autoregressive(0.7, 500, 5)
    expected = correlation_time(series)
    torch.testing.assert_close(correlation_time(1e-6 * series), expected)
    torch.testing.assert_close(correlation_time(1000 + 3 * series), expected)
    found = correlation_time(series.float())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e8])
def test_a_series_that_never_moves_is_worth_one_draw(value):
    """0.1 is no binary fraction: its mean may differ from it."""
    length = 300
    series = normal(length, 3)
    series[:, 1] = value
    found = correlation_time(series)
    assert found[1].item() == pytest.approx(length)
    torch.testing.assert_close(found[[0, 2]], correlation_time(series[:, [0, 2]]))


def test_a_trend_is_worth_few_draws():
    """Sums end where the lag is five times the time: no series that moves has much more than a fifth of T."""
    length = 400
    trend = torch.arange(length, dtype=torch.float64)[:, None]
    assert 5 < length / correlation_time(trend).item() < 8


def test_one_state_is_one_draw():
    assert correlation_time(normal(1, 4)).tolist() == [1.0] * 4


# --- spreads ----------------------------------------------------------------------------------------


def measured(values: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The state after values [T, G, D] with weights [T, G]."""
    state = Spread.begin(values[0])
    for value, weight in zip(values, weights, strict=True):
        Spread.update(state, value, weight)
    return state


def weights_like(values: Tensor) -> Tensor:
    return torch.rand(values.shape[:2], generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_spreads_are_weighted_deviations(dtype, offset):
    """Rounding: each of 200 means is off by an eps of the offset, at most, and a deviation by as much."""
    values = (offset + torch.linspace(0.1, 3, 7).double() * normal(200, 4, 7)).to(dtype)
    weights = weights_like(values)
    weights[50:60, 1] = 0
    weights[100:, 2] *= 1e3  # steps may grow
    state = measured(values, weights)
    x, w = values.double().numpy(), weights.numpy()[:, :, None].repeat(7, 2)
    mean = np.average(x, axis=0, weights=w)
    std = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=w))
    tolerance = 10 * torch.finfo(dtype).eps * max(1.0, offset)
    assert Spread.std(state).dtype == state["mean"].dtype == dtype
    torch.testing.assert_close(state["mean"].double(), torch.from_numpy(mean), rtol=0, atol=tolerance)
    torch.testing.assert_close(Spread.std(state).double(), torch.from_numpy(std), rtol=0, atol=tolerance)
    torch.testing.assert_close(state["weight"], weights.sum(0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_without_a_weight_nothing_is_seen(bad):
    """Before the first value, between values and after the last one; bits of the other chains included."""
    values = normal(20, 3, 5)
    weights = weights_like(values)
    weights[0, 0] = weights[7:9, 0] = weights[-1, 0] = 0
    weights[:, 2] = 0
    spoilt = torch.where(weights[:, :, None] > 0, values, bad)
    plain, found = measured(values, weights), measured(spoilt, weights)
    for name, tensor in found.items():
        assert torch.equal(tensor, plain[name])
    seen = weights[:, 0] > 0
    alone = measured(values[seen][:, :1], weights[seen][:, :1])
    torch.testing.assert_close(Spread.std(found)[:1], Spread.std(alone))
    assert torch.equal(Spread.std(found)[2], torch.zeros(5, dtype=torch.float64))
    assert torch.equal(found["mean"][2], torch.zeros(5, dtype=torch.float64))


def test_only_ratios_of_weights_count():
    values = normal(30, 2, 4)
    weights = weights_like(values)
    expected = Spread.std(measured(values, weights))
    for factor in (1e-12, 1e6):
        torch.testing.assert_close(Spread.std(measured(values, factor * weights)), expected)
    alike = Spread.std(measured(values, torch.full_like(weights, 0.3)))
    torch.testing.assert_close(alike, values.std(0, correction=0))


def test_one_value_and_equal_values_have_no_spread():
    one = torch.full((1, 3), 0.1, dtype=torch.float64)
    state = Spread.begin(one)
    for _ in range(10):
        Spread.update(state, one, torch.full((1,), 0.7, dtype=torch.float64))
        assert torch.equal(Spread.std(state), torch.zeros_like(one))
        torch.testing.assert_close(state["mean"], one)


def test_what_was_forgotten_does_not_count():
    values = normal(40, 2, 4)
    weights = weights_like(values)
    state = measured(100 + values[:20], weights[:20])
    tensors = dict(state)
    Spread.forget(state)
    for value, weight in zip(values[20:], weights[20:], strict=True):
        Spread.update(state, value, weight)
    for name, expected in measured(values[20:], weights[20:]).items():
        assert state[name] is tensors[name]
        assert torch.equal(state[name], expected)


def test_units_are_spreads_above_a_tenth_of_their_median():
    """In each chain for itself: the second one has spreads of a hundredth."""
    stds = torch.tensor([0.001, 0.05, 1.0, 2.0, 30.0], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)  # deviations are the values themselves
    values = signs[:, None, None] * torch.stack([stds, 0.01 * stds])
    state = measured(values, torch.ones(2, 2, dtype=torch.float64))
    torch.testing.assert_close(Spread.std(state), torch.stack([stds, 0.01 * stds]))
    floored = torch.tensor([0.1, 0.1, 1.0, 2.0, 30.0], dtype=torch.float64)
    scale = torch.full((2, 5), 0.5, dtype=torch.float64)
    factor = Spread.rescale(scale, state, torch.tensor([True, True]))
    torch.testing.assert_close(scale, torch.stack([floored, 0.01 * floored]))
    # A step of the same length in the new units.
    torch.testing.assert_close(factor * scale.norm(dim=1), torch.full((2,), 0.5 * 5**0.5).double())


def test_a_chain_that_has_not_moved_keeps_its_units():
    state = measured(torch.ones(4, 2, 3).double(), torch.ones(4, 2).double())
    scale = torch.tensor([[0.5, 1.0, 2.0]] * 2, dtype=torch.float64)
    assert Spread.rescale(scale, state, torch.tensor([True, True])).tolist() == [1.0, 1.0]
    assert scale.tolist() == [[0.5, 1.0, 2.0]] * 2
    moved = measured(
        torch.tensor([[[1.0, 2.0, 3.0]] * 2, [[0.0] * 3] * 2]).double(), torch.ones(2, 2).double()
    )
    Spread.rescale(scale, moved, torch.tensor([True, False]))
    assert scale.tolist() == [[0.5, 1.0, 1.5], [0.5, 1.0, 2.0]]
