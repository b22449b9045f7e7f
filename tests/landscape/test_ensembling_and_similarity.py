"""Ensembles of subsets, means over pairs and maps, against loops and by hand."""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch
from networks_by_hand import flat, mlp, points, trained_elsewhere

import polymode as pm
from cases import BY_NAME
from polymode.errors import InputError
from polymode.landscape import (
    WeightSpace,
    by_ensemble_size,
    cosine_matrix,
    embedding,
    function_values,
    jackknife,
    networks_of,
    within_and_between,
)


def probabilities(runs=4, count=50, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(runs, count, classes, generator=generator, dtype=torch.float64).softmax(-1)


# --- ensembles of subsets ----------------------------------------------------------------------------


def test_every_subset_of_runs_counts_once():
    p = probabilities()
    labels = torch.randint(3, (50,), generator=torch.Generator().manual_seed(1))
    found = by_ensemble_size(p, labels)
    assert [each.num_runs for each in found] == [1, 2, 3, 4]
    for size, each in enumerate(found, start=1):
        accuracy, nll, brier = [], [], []
        for subset in itertools.combinations(range(4), size):
            mean = np.mean([p[i].numpy() for i in subset], axis=0)
            right = [row.argmax() == y for row, y in zip(mean, labels.tolist(), strict=True)]
            accuracy.append(np.mean(right))
            nll.append(np.mean([-math.log(row[y]) for row, y in zip(mean, labels.tolist(), strict=True)]))
            each_brier = [
                sum((row[c] - (c == y)) ** 2 for c in range(3))
                for row, y in zip(mean, labels.tolist(), strict=True)
            ]
            brier.append(np.mean(each_brier))
        assert each.num_subsets == len(accuracy) == math.comb(4, size)
        for name, values in (("accuracy", accuracy), ("nll", nll), ("brier", brier)):
            assert each.scores[name] == pytest.approx(np.mean(values), abs=1e-6), name
            if len(values) > 1:
                assert each.spreads[name] == pytest.approx(np.std(values, ddof=1), abs=1e-6), name
            else:
                assert math.isnan(each.spreads[name])
    # −log is convex: an ensemble is never worse than its members are on average.
    assert [each.scores["nll"] for each in found] == sorted((e.scores["nll"] for e in found), reverse=True)


def test_too_many_subsets_and_logits_are_refused():
    labels = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match=r"20 runs have \d+ subsets of \d+: give fewer runs"):
        by_ensemble_size(torch.full((20, 2, 2), 0.5), labels)
    with pytest.raises(InputError, match=r"\[runs, points, classes\], got \[2, 3\]"):
        by_ensemble_size(torch.zeros(2, 3), labels)
    with pytest.raises(InputError, match="softmax"):
        by_ensemble_size(torch.randn(2, 2, 3) * 5, labels)


# --- pairs -------------------------------------------------------------------------------------------


def test_pairs_within_runs_and_between_them_by_hand():
    matrix = torch.tensor(
        [
            [0.0, 1.0, 5.0, 6.0, 9.0],
            [3.0, 0.0, 7.0, 8.0, 9.0],
            [5.0, 7.0, 0.0, 4.0, 9.0],
            [6.0, 8.0, 6.0, 0.0, 9.0],
            [1.0, 1.0, 1.0, 1.0, 0.0],
        ]
    ).double()
    inside, across = within_and_between(matrix, [7, 7, 3, 3, 5])
    assert (inside.mean, inside.count) == (pytest.approx((2 + 5) / 2), 2)  # (1 + 3)/2 and (4 + 6)/2
    assert inside.standard_error == pytest.approx(np.std([2, 5], ddof=1) / math.sqrt(2))
    pairs = [6.5, 5.0, 5.0]  # of runs: (7, 3), (7, 5) and (3, 5), both directions of each
    assert (across.mean, across.count) == (pytest.approx(np.mean(pairs)), 3)
    # The jackknife: (R − 1)/R Σ (θ₋ᵣ − θ̄)², and of three runs each leaves one pair.
    assert across.standard_error == pytest.approx(math.sqrt(2 / 3 * np.sum((pairs - np.mean(pairs)) ** 2)))


def test_the_jackknife_knows_that_pairs_share_runs():
    """|x_i − x_j| of runs x ~ N(0, 1): beside the deviation over many such experiments.

    The jackknife's variance of a U-statistic is too large by a share of order 1/R rather than too small; the
    naive error, over pairs as if they were independent, is about half of the truth for ten runs.
    """
    generator = torch.Generator().manual_seed(0)
    means, ours = [], []
    for _ in range(400):
        x = torch.randn(10, generator=generator, dtype=torch.float64)
        _, across = within_and_between((x[:, None] - x).abs(), list(range(10)))
        means.append(across.mean)
        ours.append(across.standard_error**2)
    # A deviation of 400 experiments has a relative error of 1/√800 = 3.5 %.
    assert math.sqrt(np.mean(ours)) == pytest.approx(np.std(means, ddof=1), rel=4 / math.sqrt(800) + 0.1)
    values = [3.0, 5.0, 10.0, 2.0]  # of a mean the jackknife is the usual standard error
    left_out = [(sum(values) - v) / 3 for v in values]
    assert jackknife(left_out) == pytest.approx(np.std(values, ddof=1) / 2)
    assert math.isnan(jackknife([1.0, 2.0]))


def test_pairs_that_are_not_there():
    matrix = torch.rand(3, 3)
    inside, across = within_and_between(matrix, [0, 1, 2])
    assert inside is None
    assert across.count == 3
    inside, across = within_and_between(matrix, [4, 4, 4])
    off = [float(matrix[i, j]) for i in range(3) for j in range(3) if i != j]
    assert inside.mean == pytest.approx(np.mean(off))
    assert math.isnan(inside.standard_error)
    assert across is None
    with pytest.raises(InputError, match="2 runs are named for a matrix of 3 networks"):
        within_and_between(matrix, [0, 1])


def test_networks_of_runs_need_not_stand_together():
    matrix = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    runs = [0, 1, 0, 2, 1, 0]
    order = sorted(range(6), key=lambda i: runs[i])
    mixed = within_and_between(matrix, runs)
    sorted_ = within_and_between(matrix[order][:, order], [runs[i] for i in order])
    for one, other in zip(mixed, sorted_, strict=True):
        assert one.mean == pytest.approx(other.mean)
        assert one.standard_error == pytest.approx(other.standard_error)


# --- maps --------------------------------------------------------------------------------------------


def clusters(each=8, seed=0):
    """Three groups of functions, far from each other beside how they vary."""
    generator = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(3, 1, 20, 2, generator=generator)
    values = centres + 0.1 * torch.randn(3, each, 20, 2, generator=generator)
    return values.flatten(0, 1).softmax(-1), [place for place in range(3) for _ in range(each)]


@pytest.mark.parametrize("perplexity", [None, 4.0])
def test_groups_of_functions_stay_apart(perplexity):
    values, groups = clusters()
    places = embedding(values, perplexity=perplexity)
    distances = torch.cdist(places, places)
    distances.fill_diagonal_(torch.inf)
    assert [groups[i] for i in distances.argmin(1).tolist()] == groups
    same = torch.tensor(groups)[:, None] == torch.tensor(groups)
    same.fill_diagonal_(False)
    assert float(distances[same].max()) < float(
        distances[torch.tensor(groups)[:, None] != torch.tensor(groups)].min()
    )


def test_maps_repeat_and_do_not_depend_on_how_functions_are_turned():
    values, _ = clusters()
    first = embedding(values, seed=3)
    assert torch.equal(embedding(values, seed=3), first)
    assert first.shape == (24, 2)
    assert bool(first.isfinite().all())
    assert torch.equal(embedding(values.flatten(1), seed=3), first)


def test_maps_that_cannot_be_are_refused():
    values, _ = clusters()
    with pytest.raises(InputError, match="at least four networks, got 3"):
        embedding(values[:3])
    with pytest.raises(InputError, match="nothing to map"):
        embedding(values[:1].expand(6, -1, -1))
    for perplexity in (0.0, -1.0, 24.0, math.nan):
        with pytest.raises(InputError, match="perplexity must be above 0 and below the 24 networks"):
            embedding(values, perplexity=perplexity)
    assert embedding(values[:4]).shape == (4, 2)  # few are mapped all the same


# --- networks ----------------------------------------------------------------------------------------


def rows(posterior, count=None):
    return [block.member(i) for block in posterior.draw(count) for i in range(block.num_members)]


@pytest.mark.parametrize("block", [None, 1, 3])
def test_cosines_are_those_of_all_weights(block, monkeypatch):
    modules, posterior = trained_elsewhere(mlp, 5)
    if block:
        size = 8 * WeightSpace.of(posterior).dimension * block
        monkeypatch.setattr(importlib.import_module("polymode.landscape.networks"), "BLOCK_BYTES", size)
    found = cosine_matrix([posterior.only([0, 1]), posterior.only([2, 3, 4])])
    for i, j in itertools.product(range(5), repeat=2):
        a, b = flat(modules[i]), flat(modules[j])
        assert float(found[i, j]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-12)
    torch.testing.assert_close(found, found.T, rtol=0, atol=1e-14)


def test_cosines_of_networks_of_different_forms_are_refused():
    _, one = trained_elsewhere(mlp, 1)
    _, two = trained_elsewhere(lambda: pm.models.MLP(4, 3, (5,)).double(), 1)
    with pytest.raises(InputError, match="different forms"):
        cosine_matrix([one, two])


def test_vectors_and_networks_are_each_other():
    modules, posterior = trained_elsewhere(lambda: mlp(batch_norm=True, dropout=0.2), 3)
    space = WeightSpace.of(posterior)
    vectors = space.vectors(posterior)
    assert space.dimension == sum(p.numel() for p in modules[0].parameters())
    members = space.members(vectors)
    for index, weights in enumerate(rows(posterior)):
        made = members.member(index)
        for name, tensor in weights.items():
            if name in space.names:
                assert torch.equal(made[name], tensor), name
            elif "running" in name:  # statistics are those of the last network
                assert torch.equal(made[name], rows(posterior)[-1][name])


def fitted(method, case=BY_NAME["batch_norm"]):
    return pm.fit(
        method, case.double_factory, case.data(), likelihood=case.likelihood, epochs=2, progress=False
    )


def test_networks_of_late_phase_weights_are_whole():
    posterior = fitted(pm.methods.LatePhase(3, start=0.5, noise=0.1, keep_members=True))
    found = networks_of(posterior)
    assert found.num_members == 3
    x = BY_NAME["batch_norm"].data(10, seed=4).inputs
    torch.testing.assert_close(function_values(found, x), function_values(posterior, x))
    vectors = WeightSpace.of(found).vectors(found)
    apart = (vectors[0] != vectors[1]).double().mean()
    # Six scales, six shifts and the head are members' own; the first layer is the same in all.
    assert float(apart) == pytest.approx((6 + 6 + 21) / 63)


def test_networks_of_a_gaussian_are_its_means_unless_drawn():
    posterior = fitted(pm.methods.MeanField(prior_std=1.0, rho=-1.0), BY_NAME["mlp"])
    means = networks_of(posterior)
    assert means.num_members == 1
    expected = next(posterior.means().draw()).member(0)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rows(means)[0].items())
    drawn = networks_of(posterior, 400, seed=3)
    assert drawn.num_members == 400
    space = WeightSpace.of(means)
    found, [centre] = space.vectors(drawn), space.vectors(means)
    spread = found.std(0)
    assert float(spread.min()) > 0.1  # log(1 + e⁻¹) = 0.31 at the start
    assert float(((found.mean(0) - centre) / spread).abs().max()) < 5 / math.sqrt(400)
    again = WeightSpace.of(means).vectors(networks_of(posterior, 400, seed=3))
    assert torch.equal(again, found)


def test_networks_of_a_posterior_without_end_are_draws():
    posterior = fitted(pm.methods.EMP(num_components=3, statistics="component", prior_std=1.0))
    assert posterior.num_members is None
    found = networks_of(posterior)
    assert found.num_members == 10
    vectors = WeightSpace.of(found).vectors(found)
    assert len({row.sum().item() for row in vectors}) > 1
    assert torch.equal(WeightSpace.of(found).vectors(networks_of(posterior)), vectors)
    assert networks_of(posterior, 4).num_members == 4


def test_function_values_are_what_modules_say():
    modules, posterior = trained_elsewhere(mlp, 3)
    x = points().inputs
    with torch.no_grad():
        expected = torch.stack([module(x).softmax(-1) for module in modules])
    torch.testing.assert_close(function_values(posterior, x), expected)
    [plain], numbers = trained_elsewhere(
        lambda: pm.models.MLP(4, 2, (6,)).double(), 1, pm.likelihoods.FixedGaussian(std=0.5)
    )
    torch.testing.assert_close(function_values(numbers, x)[0], plain(x).detach())
