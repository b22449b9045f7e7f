"""Stochastic-gradient kernels against the stationary laws that their recursions have in closed form.

On U = λθ²/2 both kernels are linear maps of a Gaussian state plus Gaussian noise: their stationary covariance
Σ solves Σ = A Σ Aᵀ + Q, whatever the step. Rows are independent chains, so errors of moments over n rows are
those of n independent normal numbers: v √(2/n) of a variance v, √((v w + c²)/n) of a covariance c.
"""

import math

import pytest
import torch

from polymode.samplers import hamiltonian_step, langevin_step

CURVATURES = torch.tensor([0.5, 4.0, 20.0], dtype=torch.float64)  # λ of three directions
ROWS, STEPS = 8_000, 400
# Rate, temperature and N of one half of the rows, and of the other.
HALVES = [(0.5, 1.0, 10.0), (1.0, 0.25, 40.0)]
# Twelve numbers or fewer a test, all within 4.5 standard errors in all but one of 12,000 tests.
WITHIN = 4.5


def column(place: int) -> torch.Tensor:
    """What every row has of the settings, [G, 1]."""
    first, second = (half[place] for half in HALVES)
    values = torch.tensor([first, second], dtype=torch.float64)
    return values.repeat_interleave(ROWS // 2)[:, None]


RATE, TEMPERATURE, NUMBER = column(0), column(1), column(2)


def gradient(position):
    """Of U/N."""
    return position * CURVATURES / NUMBER


def normal(generator):
    return torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)


def assert_moments(samples, expected, what):
    """Second moments [D] of samples [n, D] with mean 0, against variances."""
    n = len(samples)
    mean, found = samples.mean(0), samples.square().mean(0)
    assert (mean.abs() < WITHIN * (expected / n).sqrt()).all(), what
    assert ((found - expected).abs() < WITHIN * expected * math.sqrt(2 / n)).all(), what


def test_langevin_has_the_variance_of_its_recursion(generator):
    """θ' = (1 − hλ/N) θ + √(2hT/N) ε: v = (2hT/N)/(1 − (1 − hλ/N)²) = T/(λ (1 − hλ/(2N)))."""
    position = torch.zeros(ROWS, 3, dtype=torch.float64)
    for _ in range(STEPS):
        langevin_step(position, gradient(position), RATE, normal(generator), TEMPERATURE / NUMBER)
    for part, (h, t, n) in zip(position.split(ROWS // 2), HALVES, strict=True):
        expected = t / (CURVATURES * (1 - h * CURVATURES / (2 * n)))
        # What is left of the start at 0: (1 − hλ/N)^(2 · 400), 4e-5 of the slowest variance.
        assert (1 - h * CURVATURES / n).abs().max() ** (2 * STEPS) < 1e-4
        assert_moments(part, expected, (h, t, n))
        assert expected.max() > 0.9 * t / CURVATURES.min()  # and as h → 0 that of exp(−U/T)


@pytest.mark.parametrize("friction", [0.1, 0.9, 1.0])
def test_hamiltonian_has_the_covariance_of_its_recursion(friction, generator):
    """(θ, m)' = A (θ, m) + (s, s) ε with A = [[1 − hκ, 1 − α], [−hκ, 1 − α]], κ = λ/N and s² = 2hαT/N."""
    position, momentum = (torch.zeros(ROWS, 3, dtype=torch.float64) for _ in range(2))
    for _ in range(STEPS):
        hamiltonian_step(
            *(position, momentum, gradient(position), RATE, friction),
            *(normal(generator), TEMPERATURE / NUMBER),
        )
    parts = zip(position.split(ROWS // 2), momentum.split(ROWS // 2), HALVES, strict=True)
    for theta, m, (h, t, n) in parts:
        for place, curvature in enumerate(CURVATURES.tolist()):
            pull = h * curvature / n
            a = torch.tensor([[1 - pull, 1 - friction], [-pull, 1 - friction]], dtype=torch.float64)
            q = torch.full((2, 2), 2 * h * friction * t / n, dtype=torch.float64)
            left = torch.eye(4, dtype=torch.float64) - torch.kron(a, a)
            expected = torch.linalg.solve(left, q.flatten()).reshape(2, 2)
            torch.testing.assert_close(a @ expected @ a.T + q, expected)
            # The start is forgotten to a hundredth of the smallest error, √(2/4,000) = 2.2 %.
            assert torch.linalg.eigvals(a).abs().max() ** (2 * STEPS) < 1e-4
            state = torch.stack([theta[:, place], m[:, place]])
            found = state @ state.T / state.shape[1]
            spread = expected.diag()[:, None] * expected.diag() + expected.square()
            error = (spread / state.shape[1]).sqrt()
            assert ((found - expected).abs() < WITHIN * error).all(), (h, t, n, curvature)
            means = state.mean(1).abs()
            assert (means < WITHIN * (expected.diag() / state.shape[1]).sqrt()).all()


def test_as_steps_get_smaller_both_sample_the_posterior():
    """The closed forms above, not samples: T/λ up to a share of order h."""
    for h in (1e-1, 1e-3, 1e-5):
        for t, n in ((1.0, 10.0), (0.25, 40.0)):
            pull = h * CURVATURES / n
            langevin = t / (CURVATURES * (1 - pull / 2))
            torch.testing.assert_close(langevin, t / CURVATURES, rtol=float(pull.max()), atol=0)
            for place, curvature in enumerate(CURVATURES.tolist()):
                a = torch.tensor([[1 - pull[place], 0.1], [-pull[place], 0.1]], dtype=torch.float64)
                q = torch.full((2, 2), 2 * h * 0.9 * t / n, dtype=torch.float64)
                left = torch.eye(4, dtype=torch.float64) - torch.kron(a, a)
                variance = torch.linalg.solve(left, q.flatten())[0].item()
                assert variance == pytest.approx(t / curvature, rel=float(pull[place]))


def test_without_noise_they_descend():
    start = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    force = torch.tensor([[0.3, 0.1, -4.0]], dtype=torch.float64)
    rate, spread = (torch.full((1, 1), value, dtype=torch.float64) for value in (0.2, 7.0))
    position = start.clone()
    langevin_step(position, force, rate, None, spread)
    torch.testing.assert_close(position, start - 0.2 * force)
    position, momentum = start.clone(), torch.ones_like(start)
    hamiltonian_step(position, momentum, force, rate, 0.75, None, spread)
    torch.testing.assert_close(momentum, 0.25 - 0.2 * force)
    torch.testing.assert_close(position, start + momentum)


def test_without_momentum_the_two_are_one_kernel(generator):
    """α = 1 forgets the momentum before it is used: the same position from the same noise."""
    first, second = (torch.full((ROWS, 3), 0.3, dtype=torch.float64) for _ in range(2))
    momentum = normal(generator)
    for _ in range(3):
        noise = normal(generator)
        langevin_step(first, gradient(first), RATE, noise, TEMPERATURE / NUMBER)
        hamiltonian_step(second, momentum, gradient(second), RATE, 1.0, noise, TEMPERATURE / NUMBER)
        torch.testing.assert_close(first, second)
