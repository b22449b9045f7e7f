"""Networks around a solution, against closed forms of what they are drawn from."""

import copy
import math

import numpy as np
import pytest
import torch
from networks_by_hand import at, flat, mlp, points, scores, trained_elsewhere
from scipy import stats
from torch import nn

import polymode as pm
from polymode.errors import InputError
from polymode.landscape import WeightSpace, judged, networks_of
from polymode.landscape.subspaces import (
    FOR_ENSEMBLES,
    FOR_PLANE,
    PUBLISHED_LENGTH,
    Acceptance,
    DiagonalGaussian,
    LowRankGaussian,
    RandomDirections,
    WeightAverage,
    WeightDropout,
    principal_directions,
    relative_to_length,
    sample,
)

# Kolmogorov's statistic of n draws is above 1.95/√n with a probability of 1e-3.
KOLMOGOROV = 1.95


def recent(count=6, dimension=9, seed=0):
    """Checkpoints [K, D] of a made-up trajectory, with different spreads along their axes."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    return 2 + steps * torch.linspace(0.1, 3, dimension, dtype=torch.float64)


def draws(rule, checkpoints, count, seed=1):
    draw, generator = rule.around(checkpoints), torch.Generator().manual_seed(seed)
    return torch.stack([draw(generator) for _ in range(count)])


# --- rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
def test_random_steps_have_uniform_lengths_and_directions(relative):
    checkpoints, count = recent(), 3000
    reach = 0.4 if relative else 5.0
    steps = draws(RandomDirections(reach, relative=relative), checkpoints, count) - checkpoints[-1]
    longest = reach * (checkpoints[-1].norm().item() if relative else 1.0)
    lengths = steps.norm(dim=1)
    assert float(lengths.max()) <= longest
    found = stats.kstest(lengths.numpy() / longest, "uniform")
    assert found.statistic < KOLMOGOROV / math.sqrt(count)
    directions = steps / lengths[:, None]
    # Coordinates on the sphere of D dimensions have mean 0 and variance 1/D.
    assert float(directions.mean(0).abs().max()) < 4 / math.sqrt(9 * count)
    second = directions.T @ directions / count
    error = math.sqrt(2) / 9 / math.sqrt(count)  # E v_i⁴ = 3/(D (D + 2)) < 3/D², so the deviation is < √2/D
    assert float((second - torch.eye(9).double() / 9).abs().max()) < 4 * error


def test_dropout_has_uniform_rates_and_scales_what_is_left():
    checkpoints, count = recent(dimension=400), 1500
    kept = draws(WeightDropout(0.3), checkpoints, count) / checkpoints[-1]
    scale = kept.max(1).values
    assert bool(((kept == 0) | ((kept - scale[:, None]).abs() < 1e-12)).all())
    rates = 1 - 1 / scale
    found = stats.kstest(rates.numpy() / 0.3, "uniform")
    assert found.statistic < KOLMOGOROV / math.sqrt(count)
    dropped = float((kept == 0).sum())
    expected = float(rates.sum() * 400)
    assert dropped == pytest.approx(expected, abs=4 * float((400 * rates * (1 - rates)).sum().sqrt()))
    # Given its rate every weight keeps its mean: E[θ] = θ₀, with a variance of d/(1 − d) each.
    error = math.sqrt(float((rates / (1 - rates)).mean()) / (400 * count))
    assert float(kept.mean()) == pytest.approx(1, abs=4 * error)


@pytest.mark.parametrize(("scale", "varied"), [(1.0, False), (2.5, False), (10.0, True)])
def test_a_diagonal_gaussian_has_the_moments_of_the_checkpoints(scale, varied):
    """Population deviations; a scale u·s with u ~ U(0, 1) gives s²/3 of the variance."""
    checkpoints, count = recent(), 4000
    found = draws(DiagonalGaussian(scale, varied=varied), checkpoints, count)
    mean = np.mean(checkpoints.numpy(), axis=0)
    variance = scale**2 * np.var(checkpoints.numpy(), axis=0) / (3 if varied else 1)
    error = np.sqrt(variance / count)
    assert np.all(np.abs(found.mean(0).numpy() - mean) < 4 * error)
    squares = (found.numpy() - mean) ** 2
    # Var x² is 2 σ⁴ for a Gaussian, and (9 · 3/5 − 1) σ⁴ where E u⁴ = 1/5 and σ² = s²/3.
    spread = variance * math.sqrt((9 * 3 / 5 - 1 if varied else 2) / count)
    assert np.all(np.abs(squares.mean(0) - variance) < 4 * spread)
    correlation = np.corrcoef(found.numpy().T) - np.eye(9)
    assert np.abs(correlation).max() < 5 / math.sqrt(count) * (math.sqrt(9 / 5) if varied else 1)


@pytest.mark.parametrize("relative", [False, True])
def test_a_low_rank_gaussian_lies_in_the_span_of_its_directions(relative):
    checkpoints, rank, count = recent(), 3, 3000
    rule = LowRankGaussian(rank, 0.7, relative=relative)
    scale = 0.7 * (checkpoints[-1].norm().item() if relative else 1.0)
    found = draws(rule, checkpoints, count).numpy()
    mean = checkpoints.numpy().mean(0)
    _, _, directions = np.linalg.svd(checkpoints.numpy() - mean, full_matrices=False)
    ours = principal_directions(checkpoints, rank).numpy()
    np.testing.assert_allclose(np.abs(np.sum(ours * directions[:rank], axis=1)), 1, atol=1e-10)  # up to signs
    np.testing.assert_allclose(ours @ ours.T, np.eye(rank), atol=1e-12)
    along = (found - mean) @ directions[:rank].T
    np.testing.assert_allclose(found - mean, along @ directions[:rank], atol=1e-10 * scale)
    assert np.all(np.abs(along.mean(0)) < 4 * scale / math.sqrt(count))
    # Unit directions: the same variance along each, however far checkpoints vary along it.
    assert np.all(np.abs((along**2).mean(0) / scale**2 - 1) < 4 * math.sqrt(2 / count))


def test_an_average_is_the_mean():
    checkpoints = recent()
    assert torch.equal(draws(WeightAverage(), checkpoints, 2), checkpoints.mean(0).expand(2, -1))


def test_checkpoints_have_to_be_enough():
    checkpoints = recent(3)
    LowRankGaussian(2).around(checkpoints)
    with pytest.raises(InputError, match="rank=3 directions need more than 3 checkpoints, there are 3"):
        LowRankGaussian(3).around(checkpoints)
    on_a_line = checkpoints[0] + torch.arange(5).double()[:, None] * checkpoints[1]
    LowRankGaussian(1).around(on_a_line)
    with pytest.raises(InputError, match="span fewer than 2 directions"):
        LowRankGaussian(2).around(on_a_line)
    with pytest.raises(InputError, match="span fewer than 1 directions"):
        LowRankGaussian(1).around(checkpoints[:1].expand(4, -1))
    with pytest.raises(InputError, match="at least two checkpoints, this trajectory has 1"):
        DiagonalGaussian().around(checkpoints[:1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomDirections(0.0), "reach"),
        (lambda: RandomDirections(-1.0), "reach"),
        (lambda: WeightDropout(1.0), "largest_rate lies between 0 and 1, got 1.0"),
        (lambda: WeightDropout(0.0), "largest_rate"),
        (lambda: DiagonalGaussian(math.nan), "scale"),
        (lambda: LowRankGaussian(0), "rank"),
        (lambda: LowRankGaussian(2, 0.0), "scale"),
        (lambda: Acceptance(None, 1.5), "least_accuracy lies between 0 and 1, got 1.5"),
        (lambda: Acceptance(None, 0.5, tries=0), "tries"),
        (lambda: relative_to_length({}, 0.0), "length"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_the_published_settings():
    """FACTS §4.2: steps to 10 and 70, rates to 0.1, deviations of 1 and up to 10, rank 5 with 1 and 6."""
    assert dict(FOR_ENSEMBLES) == {
        "random": RandomDirections(10.0),
        "diagonal": DiagonalGaussian(1.0),
        "low rank": LowRankGaussian(5, 1.0),
        "average": WeightAverage(),
    }
    assert dict(FOR_PLANE) == {
        "random": RandomDirections(70.0),
        "dropout": WeightDropout(0.1),
        "diagonal": DiagonalGaussian(10.0, varied=True),
        "low rank": LowRankGaussian(5, 6.0),
    }
    assert Acceptance(None, 0.7).tries == 5


def test_settings_are_carried_over_to_other_lengths():
    carried = relative_to_length(FOR_PLANE, 200.0)
    assert carried["random"] == RandomDirections(0.35, relative=True)
    assert carried["low rank"] == LowRankGaussian(5, 0.03, relative=True)
    assert carried["dropout"] == FOR_PLANE["dropout"]
    assert carried["diagonal"] == FOR_PLANE["diagonal"]
    assert relative_to_length(carried, 3.0) == carried  # what is relative already stays
    # For a solution of that length they are the same draws.
    checkpoints = recent()
    checkpoints[-1] *= PUBLISHED_LENGTH / checkpoints[-1].norm()
    for name, rule in relative_to_length(
        {"random": RandomDirections(10.0), "low rank": LowRankGaussian(2)}
    ).items():
        plain = {"random": RandomDirections(10.0), "low rank": LowRankGaussian(2)}[name]
        torch.testing.assert_close(draws(rule, checkpoints, 3), draws(plain, checkpoints, 3))


# --- samples -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trajectory():
    return trained_elsewhere(mlp, 12)


def vectors(posterior):
    return WeightSpace.of(posterior).vectors(posterior)


def test_a_sample_is_around_the_last_network(trajectory):
    modules, posterior = trajectory
    found = sample(RandomDirections(1e-3), posterior, 4, seed=2)
    steps = vectors(found) - flat(modules[-1])
    assert bool((steps.norm(dim=1) <= 1e-3).all())
    assert bool((steps.norm(dim=1) > 0).all())
    assert found.num_members == 4
    assert found.record["left_out"] == 0
    assert found.labels[:, 2].tolist() == [0, 1, 2, 3]
    x = points().inputs
    by_hand = torch.stack([at(modules[0], v)(x).softmax(-1) for v in vectors(found)]).mean(0).detach()
    torch.testing.assert_close(found.predict(x).mean.double(), by_hand, rtol=1e-6, atol=1e-7)


def test_only_recent_checkpoints_count(trajectory):
    modules, posterior = trajectory
    thetas = torch.stack([flat(module) for module in modules])
    torch.testing.assert_close(vectors(sample(WeightAverage(), posterior, 1))[0], thetas[-10:].mean(0))
    torch.testing.assert_close(
        vectors(sample(WeightAverage(), posterior, 1, recent=3))[0], thetas[-3:].mean(0)
    )
    every = sample(WeightAverage(), posterior, 1, recent=None)
    torch.testing.assert_close(vectors(every)[0], thetas.mean(0))
    torch.testing.assert_close(vectors(sample(WeightAverage(), posterior, 1, recent=99)), vectors(every))


def test_the_seed_decides_and_draws_are_numbered(trajectory):
    _, posterior = trajectory
    for rule in (RandomDirections(2.0), WeightDropout(), DiagonalGaussian(), LowRankGaussian(4)):
        first = vectors(sample(rule, posterior, 3, seed=1))
        assert torch.equal(vectors(sample(rule, posterior, 3, seed=1)), first)
        assert torch.equal(vectors(sample(rule, posterior, 2, seed=1)), first[:2])
        assert not torch.equal(vectors(sample(rule, posterior, 3, seed=2)), first)
        assert len({row.sum().item() for row in first}) == 3


def test_dropout_drops_biases_too(trajectory):
    _, posterior = trajectory
    found = sample(WeightDropout(0.9), posterior, 20)
    [block] = found.draw()
    for name, weights in block.stacked.items():
        share = float((weights == 0).double().mean())
        assert 0.2 < share < 0.7, name  # rates are 0.45 on average


def test_random_samples_are_a_trajectory_for_principal_directions(trajectory):
    _, posterior = trajectory
    around = sample(RandomDirections(3.0), posterior, 8)
    found = vectors(sample(LowRankGaussian(4), around, 5, recent=None))
    thetas = vectors(around).numpy()
    _, _, directions = np.linalg.svd(thetas - thetas.mean(0), full_matrices=False)
    inside = (found.numpy() - thetas.mean(0)) @ directions[:4].T
    np.testing.assert_allclose(found.numpy() - thetas.mean(0), inside @ directions[:4], atol=1e-10)


def solvable(trajectory, count=60):
    """Labels that the last network gets right, but for some."""
    modules, _ = trajectory
    data = points(count)
    labels = scores(modules[-1], data)[2]
    labels[:6] = (labels[:6] + 1) % 3
    return pm.ArrayData(data.inputs, labels)


def test_draws_below_the_bound_are_rejected(trajectory):
    modules, posterior = trajectory
    data = solvable(trajectory)
    rule, bound = RandomDirections(8.0), 0.75
    free = sample(rule, posterior, 12)
    below = [scores(at(modules[0], v), data)[1] > 1 - bound for v in vectors(free)]
    assert any(below)
    found = sample(rule, posterior, 12, accept=Acceptance(data, bound, tries=2))
    assert found.num_members + found.record["left_out"] == 12
    assert 0 < found.record["left_out"] < sum(below)  # a second try helps some of them
    assert all(scores(at(modules[0], v), data)[1] <= 1 - bound for v in vectors(found))
    # First tries are the draws without a bound; those that were good stay where they were.
    kept = {int(place): v for place, v in zip(found.labels[:, 2], vectors(found), strict=True)}
    for place, (vector, bad) in enumerate(zip(vectors(free), below, strict=True)):
        assert bad == (place not in kept or not torch.equal(kept[place], vector))
    assert found.record["tried"] == 12 + sum(below)


def test_a_bound_that_nothing_reaches_is_told(trajectory):
    _, posterior = trajectory
    with pytest.raises(InputError, match=r"None of 6 draws reached an accuracy of 1\.0: take shorter steps"):
        sample(RandomDirections(1.0), posterior, 2, accept=Acceptance(solvable(trajectory), 1.0, tries=3))


def test_accuracy_is_about_labels():
    _, posterior = trained_elsewhere(
        lambda: pm.models.MLP(4, 1, (6,)).double(), 2, pm.likelihoods.FixedGaussian(std=0.5)
    )
    with pytest.raises(InputError, match="Accuracy is about labels; this likelihood is 'fixed_gaussian'"):
        sample(RandomDirections(1.0), posterior, 2, accept=Acceptance(points(), 0.5))
    assert sample(RandomDirections(1.0), posterior, 2).num_members == 2
    with pytest.raises(InputError, match="num_draws"):
        sample(RandomDirections(1.0), posterior, 0)
    with pytest.raises(InputError, match="recent"):
        sample(RandomDirections(1.0), posterior, 2, recent=0)


@torch.no_grad()
def with_own_statistics(module, inputs):
    module = copy.deepcopy(module).train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.momentum = 1.0
    module(inputs)
    return module.eval()


def test_draws_have_running_statistics_of_their_own():
    modules, posterior = trained_elsewhere(lambda: mlp(batch_norm=True), 3)
    inputs = 1 + 3 * points(90, seed=9).inputs
    with pytest.raises(InputError, match="pass statistics="):
        sample(DiagonalGaussian(), posterior, 2)
    found = sample(DiagonalGaussian(), posterior, 2, statistics=inputs)
    data = points()
    for block in found.draw():
        losses = judged(found.network, block, data.inputs, data.targets).loss
        for index in range(block.num_members):
            vector = WeightSpace.of(found).vector(block.member(index))
            module = with_own_statistics(at(modules[0], vector), inputs)
            assert float(losses[index]) == pytest.approx(scores(module, data)[0], rel=1e-9)
            torch.testing.assert_close(
                {n: b for n, b in module.named_buffers() if "running" in n},
                {n: t for n, t in block.member(index).items() if "running" in n},
            )


def test_a_sample_can_do_what_a_posterior_can(trajectory, tmp_path):
    _, posterior = trajectory
    found = sample(LowRankGaussian(2), posterior, 3)
    x = points().inputs
    folder = found.save(tmp_path / "saved")
    torch.testing.assert_close(pm.load_posterior(folder, mlp).predict(x).mean, found.predict(x).mean)
    assert networks_of(found).num_members == 3
    merged = pm.merge([found, sample(RandomDirections(1.0), posterior, 2)])
    assert merged.num_members == 5
