"""Planes of weight space, against plain modules whose weights are set by hand."""

import math

import pytest
import torch
from networks_by_hand import at, flat, mlp, points, scores, trained_elsewhere

import polymode as pm
from polymode.errors import InputError
from polymode.landscape import Plane, WeightSpace, cut, judged, margins


def vectors(count, dimension=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dimension, generator=generator, dtype=torch.float64)


def place(plane, x, y):
    return plane.origin + x * plane.first + y * plane.second


def test_a_radial_plane_holds_the_origin_and_both_solutions():
    a, b = vectors(2)
    plane = Plane.radial(a, b)
    assert plane.distance(torch.zeros(7).double()) == 0
    assert plane.coordinates(torch.zeros(7).double()) == (0, 0)
    for vector in (a, b, 2 * a - 3 * b):
        assert plane.distance(vector) == pytest.approx(0, abs=1e-12)
        torch.testing.assert_close(place(plane, *plane.coordinates(vector)), vector)
    assert plane.coordinates(a) == pytest.approx((a.norm().item(), 0))
    angle = math.acos(float(a @ b / (a.norm() * b.norm())))
    x, y = plane.coordinates(b)
    assert math.atan2(y, x) == pytest.approx(angle)  # angles and lengths are those of weight space
    assert math.hypot(x, y) == pytest.approx(b.norm().item())


def test_a_plane_through_three_points():
    a, b, c = vectors(3, seed=1)
    plane = Plane.spanned(a, b, c)
    gram = torch.stack([plane.first, plane.second]) @ torch.stack([plane.first, plane.second]).T
    torch.testing.assert_close(gram, torch.eye(2).double())
    for vector in (a, b, c):
        assert plane.distance(vector) == pytest.approx(0, abs=1e-12)
    for x, y in ((0.0, 0.0), (1.5, -2.0), (-3.0, 0.25)):
        assert plane.coordinates(place(plane, x, y)) == pytest.approx((x, y), abs=1e-12)
    # Beside the plane: the foot of the perpendicular, and its length.
    beside = vectors(1, seed=2)[0]
    beside = beside - (beside @ plane.first) * plane.first - (beside @ plane.second) * plane.second
    assert plane.coordinates(place(plane, 1.0, 2.0) + beside) == pytest.approx((1, 2))
    assert plane.distance(place(plane, 1.0, 2.0) + beside) == pytest.approx(beside.norm().item())


def test_points_on_one_line_are_refused():
    a, b = vectors(2)
    with pytest.raises(InputError, match="lie on one line"):
        Plane.spanned(a, b, a + 0.3 * (b - a))
    with pytest.raises(InputError, match="the origin counts"):
        Plane.radial(a, 2 * a)
    with pytest.raises(InputError, match="the origin counts"):
        Plane.radial(a, -a)
    with pytest.raises(InputError, match="are the same"):
        Plane.spanned(a, a, b)
    with pytest.raises(InputError, match="on one line"):
        Plane.spanned(a, b, b)


def test_a_grid_runs_along_x_first():
    plane = Plane.spanned(*vectors(3))
    xs, ys = torch.arange(3).double(), torch.tensor([10.0, 20.0]).double()
    grid = plane.points(xs, ys)
    assert grid.count == 6
    found = [plane.coordinates(vector) for vector in grid.at(0, 6)]
    expected = [(x, y) for y in (10.0, 20.0) for x in (0.0, 1.0, 2.0)]
    assert torch.allclose(torch.tensor(found), torch.tensor(expected))
    assert torch.equal(grid.at(2, 5), grid.at(0, 6)[2:5])


def test_margins():
    assert margins([0.0, 2.0, 1.0], 5).tolist() == [-0.5, 0.25, 1.0, 1.75, 2.5]
    assert margins([3.0, 3.0], 3).tolist() == [2.75, 3.0, 3.25]  # one place has room around it, too


def test_a_cut_is_the_modules_at_its_places():
    """At every place of the grid: the weights set by hand, a plain pass, loss, error and labels by hand."""
    modules, posterior = trained_elsewhere(mlp, 3)
    data, space = points(), WeightSpace.of(posterior)
    thetas = [flat(module) for module in modules]
    torch.testing.assert_close(space.vectors(posterior), torch.stack(thetas), rtol=0, atol=0)
    plane = Plane.spanned(*thetas)
    x, y = torch.linspace(-2, 6, 4).double(), torch.linspace(-1, 5, 3).double()
    references = torch.cat(
        [judged(posterior.network, b, data.inputs, data.targets).answers for b in posterior.draw()]
    )
    found = cut(space, plane, x, y, data, references=references[:2])
    assert found.loss.shape == found.error.shape == (3, 4)
    labels = [scores(module, data)[2] for module in modules]
    for row in range(3):
        for column in range(4):
            module = at(modules[0], place(plane, float(x[column]), float(y[row])))
            loss, error, said = scores(module, data)
            assert float(found.loss[row, column]) == pytest.approx(loss, rel=1e-10)
            assert float(found.error[row, column]) == error
            for reference in range(2):
                apart = float((said != labels[reference]).double().mean())
                assert float(found.difference[row, column, reference]) == pytest.approx(apart, abs=1e-6)
    assert not torch.allclose(found.loss[:, 0], found.loss[:, -1])


def test_a_cut_at_the_solutions_themselves():
    modules, posterior = trained_elsewhere(mlp, 2)
    data, space = points(), WeightSpace.of(posterior)
    plane = Plane.radial(*space.vectors(posterior))
    a, b = (plane.coordinates(flat(module)) for module in modules)
    x, y = torch.tensor([0.0, a[0], b[0]]).double(), torch.tensor([0.0, b[1]]).double()
    references = judged(posterior.network, next(posterior.draw()), data.inputs, data.targets).answers
    found = cut(space, plane, x, y, data, references=references)
    assert float(found.loss[0, 0]) == pytest.approx(math.log(3))  # all weights are zero there
    for (row, column), module in zip(((0, 1), (1, 2)), modules, strict=True):
        assert float(found.loss[row, column]) == pytest.approx(scores(module, data)[0])
    assert found.difference[0, 1, 0] == found.difference[1, 2, 1] == 0
    assert found.difference[0, 1, 1] == found.difference[1, 2, 0] > 0


def test_cuts_and_networks_have_to_fit():
    _, posterior = trained_elsewhere(mlp, 2)
    space = WeightSpace.of(posterior)
    plane = Plane.radial(*space.vectors(posterior))
    with pytest.raises(InputError, match="number of values of x"):
        cut(space, plane, torch.zeros(1), torch.zeros(3), points())
    other = pm.from_state_dicts(
        module := pm.models.MLP(4, 3, (5,)).double(), [module.state_dict()], likelihood="categorical"
    )
    with pytest.raises(InputError, match=r"different forms .* 'linear|different forms"):
        space.vectors(other)
