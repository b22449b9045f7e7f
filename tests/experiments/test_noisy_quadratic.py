"""The noisy quadratic problem against closed forms; tolerances come from the number of independent values."""

import math

import pytest
import torch

from polymode.errors import InputError
from scripts import EXPERIMENTS, load_script

script = load_script(EXPERIMENTS / "late_phase/noisy_quadratic.py")
NoisyQuadratic, _Factored = script.NoisyQuadratic, script._Factored

MEMBERS = (1, 2, 5, 10, 25)


def relative_error(losses):
    """Standard errors of the means over seeds, relative to them."""
    return losses.std(1) / losses.shape[1] ** 0.5 / losses.mean(1)


def test_loss_and_curvature():
    problem = NoisyQuadratic(3)
    assert problem.curvature.tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    weights = torch.tensor([[1.0, 1.0, 1.0], [2.0, 3.0, -2.0]], dtype=torch.float64)
    assert problem.loss(weights).tolist() == pytest.approx([0, 0.5 * (1 + 4 / 2 + 9 / 3)])
    assert problem.steps_to_rest(0.01) == 300


def test_plain_descent_has_the_variance_of_an_autoregression():
    dim, rate, seeds, steps = 10, 0.1, 40, 4000
    problem = NoisyQuadratic(dim)
    losses = problem.plain(rate, MEMBERS, num_seeds=seeds, num_steps=steps)
    # The mean over n steps of the x² of an autoregression with factor ρ varies by 2 σ⁴ (1 + ρ²)/(1 − ρ²)/n.
    h = problem.curvature
    squares = (1 - rate * h).square()
    part = 0.5 * rate * h / (2 - rate * h)
    spread = float(
        (2 * part.square() * (1 + squares) / (1 - squares) / (steps / 2)).sum().sqrt() / part.sum()
    )
    for count, values in zip(MEMBERS, losses, strict=True):
        groups = seeds * (max(MEMBERS) // count)  # the models of a seed make so many means of K
        expected = problem.plain_loss(rate, count)
        assert float(values.mean()) == pytest.approx(expected, rel=4 * spread / groups**0.5)
    assert 4 * spread / seeds**0.5 < 0.05  # of the largest K: the test can tell


def test_one_weight_in_closed_form():
    # var = η²/(1 − (1 − η)²) = η/(2 − η)
    assert NoisyQuadratic(1).plain_loss(0.5) == pytest.approx(0.5 * 0.5 / 1.5)
    assert NoisyQuadratic(1).plain_loss(0.5, 4) == pytest.approx(0.125 * 0.5 / 1.5)
    # With θ = φ = 1 a step moves w by 2 η g.
    assert NoisyQuadratic(1)._rates(1.0).tolist() == pytest.approx([2.0])


def test_a_step_has_the_mean_and_covariance_of_the_updates(generator):
    """The noise of a step is not drawn gradient by gradient, but it has the distribution it would have."""
    count, dim, rate, rows = 3, 4, 0.1, 200_000
    problem, gamma = NoisyQuadratic(dim), 0.4
    walk = _Factored([count], rows, problem, rate, gamma)
    theta = torch.tensor([0.7, -0.4, 1.3, 0.9], dtype=torch.float64)
    phi = torch.tensor([1.2, 0.5, -0.8], dtype=torch.float64)
    h = problem.curvature
    walk.scaled = (h.sqrt() * theta).repeat(rows, 1)
    walk.factors = phi.repeat(rows, 1)
    walk.step(torch.randn(rows, walk.num_columns, generator=generator, dtype=torch.float64))
    found = torch.cat([walk.scaled / h.sqrt(), walk.factors], 1)

    gradients = h * (phi[:, None] * theta - 1)  # [members, dim], without noise
    mean = torch.cat([theta - rate * gamma * phi @ gradients, phi - rate * gradients @ theta])
    # dz/dε of every member: Hε_k has the covariance H.
    noise = torch.zeros(dim + count, count, dim, dtype=torch.float64)
    for member in range(count):
        noise[:dim, member] = gamma * phi[member] * torch.diag(h.sqrt())
        noise[dim + member, member] = theta * h.sqrt()
    noise = rate * noise.flatten(1)
    covariance = noise @ noise.T
    assert torch.all((found.mean(0) - mean).abs() < 5 * (covariance.diag() / rows).sqrt())
    sizes = torch.outer(covariance.diag(), covariance.diag()) + covariance.square()
    assert torch.all((torch.cov(found.T) - covariance).abs() < 5 * (sizes / rows).sqrt())


def test_members_that_do_not_exist_take_no_part(generator):
    """K = 2 beside K = 5 descends as K = 2 alone does."""
    problem = NoisyQuadratic(6)
    wide, narrow = _Factored([2, 5], 1, problem, 0.1, None), _Factored([2], 1, problem, 0.1, None)
    for _ in range(20):
        noise = torch.randn(2, 5 + 6, generator=generator, dtype=torch.float64)
        wide.step(noise)
        narrow.step(torch.cat([noise[:1, :2], noise[:1, 5:]], 1))
    torch.testing.assert_close(wide.weights()[:1], narrow.weights())
    assert torch.equal(wide.factors[0, 2:], torch.zeros(3, dtype=torch.float64))


def test_late_phase_weights_are_worth_as_many_independent_models():
    """1/K within 10 %, and on a par with independent models, where the rate is small."""
    problem, rate, seeds = NoisyQuadratic(10), 0.01, 80
    late = problem.late_phase(rate, MEMBERS, num_seeds=seeds)
    apart = problem.factored(rate, MEMBERS, num_seeds=seeds // 4)
    one = float(apart[0].mean())  # the mean of 500 models
    assert one == pytest.approx(problem.factored_loss(rate), rel=4 * float(relative_error(apart)[0]))
    for index, count in enumerate(MEMBERS):
        ours, theirs = float(late[index].mean()), float(apart[index].mean())
        assert count * ours / one == pytest.approx(1, rel=0.1)
        assert ours / theirs == pytest.approx(1, rel=0.1)
        tolerance = 4 * relative_error(late)[index]
        assert tolerance < 0.08
        assert ours == pytest.approx(problem.late_phase_loss(rate, count), rel=float(tolerance))


def test_a_large_rate_leaves_a_bias_that_does_not_shrink_with_members():
    """At K = 25 even independent models are off 1/K, and theory says by how much."""
    problem, rate, seeds, count = NoisyQuadratic(10), 0.05, 40, 25
    apart = problem.factored(rate, [1, count], num_seeds=seeds)
    too_much = count * float(apart[1].mean() / apart[0].mean())
    assert 1.15 < too_much < 1.6
    expected = problem.factored_loss(rate, count)
    # Of relative order η tr H/4, what the theory leaves out.
    left_out = rate * float(problem.curvature.sum()) / 4
    assert float(apart[1].mean()) == pytest.approx(
        expected, rel=4 * float(relative_error(apart)[1]) + left_out
    )


def test_in_the_long_run_the_factors_drift_and_members_are_worth_less():
    """Noise moves φ² from 1 to √K, and K · loss to (√K + 1/√K)/2 of one model's."""
    dim, rate, count, seeds = 4, 0.04, 9, 40
    problem = NoisyQuadratic(dim)
    trace = float(problem.curvature.sum())
    # Near its place of rest φ² moves there by a share of 2 η² tr H/(dim + K) a step: e⁻⁴ of the way is left
    # in the middle of the steps.
    steps = round(4 * (dim + count) / (rate**2 * trace))
    losses = problem.late_phase(rate, [1, count], num_seeds=seeds, num_steps=steps)
    tolerance = (
        4 * relative_error(losses) + rate * trace / 4
    )  # and terms of that order that theory leaves out
    one, many = losses.mean(1).tolist()
    assert one == pytest.approx(problem.late_phase_loss(rate), rel=float(tolerance[0]))
    rested = problem.late_phase_loss(rate, count, square=math.sqrt(count))
    assert many == pytest.approx(rested, rel=float(tolerance[1]))
    assert count * many / one == pytest.approx((3 + 1 / 3) / 2, rel=0.05)
    assert many > 1.4 * problem.late_phase_loss(rate, count)


@pytest.mark.slow
def test_the_law_at_the_size_of_the_paper():
    problem, rate, seeds = NoisyQuadratic(100), 0.005, 10
    late = problem.late_phase(rate, MEMBERS, num_seeds=seeds)
    apart = problem.factored(rate, MEMBERS, num_seeds=seeds)
    one = apart[0].mean()
    counts = torch.tensor(MEMBERS)
    for losses in (late, apart):
        assert torch.all((counts * losses.mean(1) / one - 1).abs() < 0.1)
    assert torch.all((late.mean(1) / apart.mean(1) - 1).abs() < 0.1)


def test_the_same_numbers_again_and_others_from_another_generator(generator):
    problem = NoisyQuadratic(3)
    for run in (problem.plain, problem.factored, problem.late_phase):
        first = run(0.1, [1, 3], num_seeds=2)
        assert first.shape == (2, 2)
        assert torch.equal(run(0.1, [1, 3], num_seeds=2), first)
        assert not torch.equal(run(0.1, [1, 3], num_seeds=2, generator=generator), first)


def test_base_scale_is_the_mean_unless_given():
    problem = NoisyQuadratic(3)
    first = problem.late_phase(0.05, [4], num_seeds=2)
    assert torch.equal(problem.late_phase(0.05, [4], num_seeds=2, base_scale=0.25), first)
    assert float(problem.late_phase(0.05, [4], num_seeds=2, base_scale=1.0).mean()) > float(first.mean())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: NoisyQuadratic(0), "dim must be a whole number"),
        (lambda p: p.late_phase(-0.1, [2]), "rate must be a positive number"),
        (lambda p: p.steps_to_rest(float("inf")), "rate must be a positive number"),
        (lambda p: p.factored(0.1, []), "at least one"),
        (lambda p: p.plain(0.1, [0]), "A number of members must be a whole number"),
        (lambda p: p.plain(0.1, [2], num_seeds=0), "num_seeds"),
        (lambda p: p.late_phase(0.1, [2], num_steps=1), "num_steps"),
        (lambda p: p.late_phase(0.1, [2], base_scale=0.0), "base_scale"),
        (lambda p: p.plain(2.5, [2]), "must be below 2"),
        (lambda p: p.late_phase(1.0, [2]), "must be below"),
        (lambda p: p.late_phase(0.1, [25], base_scale=100.0), "take a smaller one"),
        (lambda p: p.plain_loss(2.5), "must be below 2"),
        (lambda p: p.factored_loss(0.1, 0), "num_members"),
        (lambda p: p.late_phase_loss(0.1, 2, square=0.0), "square"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call(NoisyQuadratic(5))
