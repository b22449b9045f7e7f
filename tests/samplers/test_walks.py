"""Every walk keeps N(0, s²), reaches it from elsewhere, and moves as its docstring says.

Each scalar is a chain of its own, so that n scalars after any number of steps are n independent draws: errors
of moments are those of n independent normal numbers.
"""

import math

import pytest
import torch

from polymode.errors import InputError
from polymode.samplers import WALKS, Autoregressive, GuidedWalk, Independent, RandomWalk, draw_prior

NUMBER, STD = 40_000, 0.7
walks = pytest.mark.parametrize(
    "walk",
    [GuidedWalk(0.5), RandomWalk(0.8), Autoregressive(0.4), Independent()],
    ids=lambda w: type(w).__name__,
)


def walked(walk, start, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    position = {"a": start.clone()}
    memory = walk.begin(position, generator)
    path = []
    for _ in range(steps):
        walk.advance(position, memory, {"a": STD}, generator)
        path.append(position["a"].clone())
    return torch.stack(path)


def assert_is_the_prior(draws):
    z, n = draws / STD, len(draws)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = math.sqrt(variance / n)
        assert abs(z.pow(power).mean().item() - expected) < 4.5 * error, power
    inside = (z.abs() < 1).double().mean().item()
    assert abs(inside - 0.6827) < 4.5 * math.sqrt(0.6827 * 0.3173 / n)


def prior(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return draw_prior({"a": STD}, {"a": torch.zeros(NUMBER, dtype=torch.float64)}, generator)["a"]


def test_every_walk_is_tested():
    tested = {GuidedWalk, RandomWalk, Autoregressive, Independent}
    assert tested == set(WALKS)


def test_draws_of_the_prior():
    assert_is_the_prior(prior())


@walks
def test_the_prior_is_kept(walk):
    path = walked(walk, prior(), 7)
    for position in path:
        assert_is_the_prior(position)


@walks
def test_the_prior_is_reached_from_elsewhere(walk):
    start = torch.full((NUMBER,), 2.5 * STD, dtype=torch.float64)
    assert_is_the_prior(walked(walk, start, 150)[-1])


@walks
def test_a_wrong_width_is_noticed(walk):
    with pytest.raises(AssertionError):
        assert_is_the_prior(1.03 * walked(walk, prior(), 3)[-1])


def test_the_guided_walk_is_algorithm_3_scalar_by_scalar():
    walk, generator, replay = GuidedWalk(0.6), *(torch.Generator().manual_seed(3) for _ in range(2))
    position = {"a": torch.linspace(-2, 2, 50, dtype=torch.float64)}
    start = position["a"].clone()
    memory = walk.begin(position, generator)
    directions = [-1.0 if u < 0.5 else 1.0 for u in torch.rand(50, generator=replay, dtype=torch.float64)]
    assert set(directions) == {-1.0, 1.0}
    a = start.tolist()
    for _ in range(30):
        walk.advance(position, memory, {"a": STD}, generator)
        z = torch.randn(50, generator=replay, dtype=torch.float64).tolist()
        u = torch.rand(50, generator=replay, dtype=torch.float64).tolist()
        for j in range(50):
            y = a[j] + directions[j] * abs(0.6 * STD * z[j])
            if u[j] <= min(1, math.exp((a[j] ** 2 - y**2) / (2 * STD**2))):
                a[j] = y
            else:
                directions[j] = -directions[j]
    torch.testing.assert_close(position["a"], torch.tensor(a, dtype=torch.float64))
    assert memory["a"].tolist() == directions


def test_the_guided_walk_crosses_the_prior_in_its_traversal():
    """From −2 s inwards nothing is rejected before the centre: half of the traversal leads there."""
    walk, generator = GuidedWalk(0.05), torch.Generator().manual_seed(0)
    position = {"a": torch.full((2000,), -2 * STD, dtype=torch.float64)}
    memory = {"a": torch.ones(2000, dtype=torch.float64)}
    for _ in range(round(walk.traversal / 2)):
        walk.advance(position, memory, {"a": STD}, generator)
    assert abs(position["a"].mean().item()) < 0.05 * STD
    assert walk.traversal == pytest.approx(4 / (math.sqrt(2 / math.pi) * 0.05))


def test_correlations_of_neighbours():
    start = prior()
    for walk, expected in ((Autoregressive(0.4), math.sqrt(1 - 0.16)), (Independent(), 0.0)):
        after = walked(walk, start, 1)[0]
        assert torch.corrcoef(torch.stack([start, after]))[0, 1].item() == pytest.approx(
            expected, abs=4.5 / math.sqrt(NUMBER)
        )
    # A random walk forgets more slowly than a guided one with the same steps.
    far = {type(w): walked(w, start, 30)[-1] for w in (GuidedWalk(0.2), RandomWalk(0.2))}
    kept = {kind: torch.corrcoef(torch.stack([start, after]))[0, 1].abs() for kind, after in far.items()}
    assert kept[GuidedWalk] < kept[RandomWalk]


@pytest.mark.parametrize("walk", [GuidedWalk, RandomWalk, Autoregressive])
@pytest.mark.parametrize("step", [0, -0.1, math.inf, "a"])
def test_bad_steps(walk, step):
    with pytest.raises(InputError, match=rf"{walk.__name__}\(step=\.\.\.\) must be a positive number, got"):
        walk(step)


def test_an_autoregressive_step_is_at_most_one():
    with pytest.raises(InputError, match=r"between 0 and 1, got 1\.5"):
        Autoregressive(1.5)
    assert Autoregressive(1.0).traversal == 1.0
