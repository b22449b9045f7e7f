"""Paths between networks, against plain modules at places that are interpolated by hand."""

import math

import pytest
import torch
from networks_by_hand import at, flat, mlp, points, scores, trained_elsewhere
from torch import nn

import polymode as pm
from polymode.errors import InputError
from polymode.landscape import WeightSpace, judged, sheet, walk


@pytest.fixture(scope="module")
def made():
    modules, posterior = trained_elsewhere(mlp, 3)
    return modules, WeightSpace.of(posterior), torch.stack([flat(module) for module in modules]), points()


def answers(space, modules, data):
    return torch.stack([scores(module, data)[2] for module in modules])


def test_a_straight_line_is_linear_interpolation(made):
    modules, space, thetas, data = made
    references = answers(space, modules[:2], data)
    found = walk(space, thetas[:2], data, num_between=4, references=references)
    assert found.place.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert found.is_corner.tolist() == [True, False, False, False, False, True]
    for index, share in enumerate((0, 0.2, 0.4, 0.6, 0.8, 1)):
        loss, error, said = scores(at(modules[0], (1 - share) * thetas[0] + share * thetas[1]), data)
        assert float(found.loss[index]) == pytest.approx(loss, rel=1e-10)
        assert float(found.error[index]) == pytest.approx(error)
        apart = (said != references).double().mean(-1).tolist()
        assert found.difference[index].tolist() == pytest.approx(apart, abs=1e-6)
    assert found.difference[0, 0] == found.difference[-1, 1] == 0


def test_a_bent_path_leads_through_its_corners(made):
    """Every segment by itself; places are those of the perpendicular on the line between the ends."""
    modules, space, thetas, data = made
    found = walk(space, thetas[[0, 2, 1]], data, num_between=2)
    line = thetas[1] - thetas[0]
    bend = float((thetas[2] - thetas[0]) @ line / (line @ line))
    places = [0, bend / 3, 2 * bend / 3, bend, bend + (1 - bend) / 3, bend + 2 * (1 - bend) / 3, 1]
    assert found.place.tolist() == pytest.approx(places)
    assert found.is_corner.tolist() == [True, False, False, True, False, False, True]
    for index, module in zip((0, 3, 6), (modules[0], modules[2], modules[1]), strict=True):
        assert float(found.loss[index]) == pytest.approx(scores(module, data)[0], rel=1e-12)
    middle = at(modules[0], thetas[2] + (thetas[1] - thetas[2]) * 2 / 3)
    assert float(found.loss[5]) == pytest.approx(scores(middle, data)[0], rel=1e-10)
    corners_only = walk(space, thetas[[0, 2, 1]], data, num_between=0)
    torch.testing.assert_close(corners_only.loss, found.loss[[0, 3, 6]])
    assert corners_only.is_corner.tolist() == [True] * 3


def test_paths_that_are_none_are_refused(made):
    _, space, thetas, data = made
    with pytest.raises(InputError, match="at least two networks"):
        walk(space, thetas[:1], data)
    with pytest.raises(InputError, match="ends where it begins"):
        walk(space, thetas[[0, 1, 0]], data)
    with pytest.raises(InputError, match="num_between"):
        walk(space, thetas, data, num_between=-1)
    with pytest.raises(InputError, match="through the origin"):
        sheet(space, torch.stack([thetas[0], -thetas[0]]), torch.ones(2), data, num_between=1)


def circle(*angles):
    """Networks y = w·x whose two weights lie on the unit circle."""
    return torch.tensor([[math.cos(a), math.sin(a)] for a in angles], dtype=torch.float64)


def test_a_sheet_has_the_angles_and_radii_of_its_triangles():
    """Two segments of a known turn: chords, whose middle has the length cos(turn/2)."""

    def linear():
        return nn.Linear(2, 1, bias=False, dtype=torch.float64)

    corners = circle(0.3, 0.3 + math.pi / 3, 0.3 + math.pi / 3 + 0.4)
    posterior = pm.from_state_dicts(
        linear, [{"weight": row[None]} for row in corners], likelihood=pm.likelihoods.FixedGaussian(std=1.0)
    )
    x = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data, space = pm.ArrayData(x, x[:, 0].clone()), WeightSpace.of(posterior)
    shares = torch.tensor([0.0, 0.5, 1.0, 1.25])
    found = sheet(space, corners, shares, data, num_between=1)
    turned = [0, math.pi / 6, math.pi / 3, math.pi / 3 + 0.2, math.pi / 3 + 0.4]
    assert found.angle.tolist() == pytest.approx(turned)
    assert found.corner_angles.tolist() == pytest.approx([0, math.pi / 3, math.pi / 3 + 0.4])
    lengths = [1, math.cos(math.pi / 6), 1, math.cos(0.2), 1]
    for row, share in enumerate(shares.tolist()):
        assert found.radius[row].tolist() == pytest.approx([share * length for length in lengths])
        for column, (angle, length) in enumerate(zip(turned, lengths, strict=True)):
            weights = share * length * circle(0.3 + angle)[0]
            wrong = x @ weights - x[:, 0]
            expected = float(wrong.square().mean() / 2 + 0.5 * math.log(2 * math.pi))
            assert float(found.loss[row, column]) == pytest.approx(expected)
            assert float(found.error[row, column]) == pytest.approx(float(wrong.square().mean().sqrt()))


def test_a_sheet_at_the_path_is_the_path(made, tmp_path):
    modules, space, thetas, data = made
    references = answers(space, modules[:2], data)
    options = {"num_between": 2, "references": references}
    along = walk(space, thetas, data, **options)
    shares = torch.tensor([0.5, 1.0])
    keep = tmp_path / "kept.npz"
    found = sheet(space, thetas, shares, data, keep=keep, **options)
    torch.testing.assert_close(found.loss[1], along.loss)
    torch.testing.assert_close(found.difference[1], along.difference)
    half = at(modules[0], thetas[0] / 2)
    assert float(found.loss[0, 0]) == pytest.approx(scores(half, data)[0])
    asked = []
    again = sheet(
        space, thetas, shares, data, keep=keep, progress=lambda *done: asked.append(done), **options
    )
    assert asked == []
    assert torch.equal(again.loss, found.loss)


def test_answers_are_those_that_judged_gives(made):
    modules, space, _, data = made
    _, posterior = trained_elsewhere(mlp, 3)
    found = judged(posterior.network, next(posterior.draw()), data.inputs, data.targets)
    assert torch.equal(found.answers, answers(space, modules, data))
    assert found.loss.tolist() == pytest.approx([scores(module, data)[0] for module in modules])
    assert found.error.tolist() == pytest.approx([scores(module, data)[1] for module in modules])
