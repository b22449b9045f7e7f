"""Metrics against hand-worked numbers, naive loops, torchmetrics and scikit-learn."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from torchmetrics.functional.classification import multiclass_calibration_error

import polymode as pm
from polymode import metrics
from polymode.errors import InputError
from polymode.metrics.curves import histogram
from polymode.metrics.diversity import disagreement_matrix
from polymode.metrics.ranks import ranks_of, rounding_of


@pytest.fixture
def sample():
    generator = torch.Generator().manual_seed(0)
    probabilities = (2 * torch.randn(500, 4, generator=generator)).softmax(-1)
    labels = torch.randint(4, (500,), generator=generator)
    return probabilities, labels


def test_hand_worked_numbers():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    y = torch.tensor([0, 1])
    assert metrics.accuracy(p, y) == 0.5
    assert metrics.accuracy(p, y, top=2) == 1.0
    assert metrics.nll(p, y) == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2, rel=1e-6)
    first = 0.7**2 + 0.2**2 + 0.1**2 - 1.4 + 1
    second = 0.1**2 + 0.3**2 + 0.6**2 - 0.6 + 1
    assert metrics.brier(p, y) == pytest.approx((first + second) / 2, rel=1e-6)


def test_scores_against_scikit_learn(sample):
    p, y = sample
    assert metrics.accuracy(p, y, top=3) == pytest.approx(sk.top_k_accuracy_score(y, p.double(), k=3))
    assert metrics.nll(p, y) == pytest.approx(
        sk.log_loss(y, p.double().numpy() / p.double().numpy().sum(1, keepdims=True)), rel=1e-6
    )


def naive_ece(p, y, edges, min_count=0):
    confidence, predicted = p.double().max(-1)
    gaps, counts = [], []
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.sum() > min_count:
            gap = (predicted[inside] == y[inside]).double().mean() - confidence[inside].mean()
            gaps.append(abs(gap.item()))
            counts.append(inside.sum().item())
    weighted = sum(g * c for g, c in zip(gaps, counts, strict=True)) / len(y)
    return weighted, max(gaps)


@pytest.mark.parametrize("num_bins", [10, 15, 20])
@pytest.mark.parametrize("min_count", [0, 5, 40])
def test_ece_and_mce_against_a_naive_loop(sample, num_bins, min_count):
    p, y = sample
    edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
    expected = naive_ece(p, y, edges, min_count)
    assert metrics.ece(p, y, num_bins, min_count=min_count) == pytest.approx(expected[0], abs=1e-12)
    assert metrics.mce(p, y, num_bins, min_count=min_count) == pytest.approx(expected[1], abs=1e-12)


def test_ece_against_torchmetrics(sample):
    p, y = sample
    for norm, ours in (("l1", metrics.ece), ("max", metrics.mce)):
        theirs = multiclass_calibration_error(p, y, num_classes=4, n_bins=15, norm=norm).item()
        assert ours(p, y) == pytest.approx(theirs, abs=1e-5)


def test_equal_mass_bins_hold_equal_numbers(sample):
    p, y = sample
    bins = metrics.calibration_bins(p, y, 7, "mass")
    assert bins.counts.max() - bins.counts.min() <= 1
    confidence, predicted = p.double().max(-1)
    order = confidence.argsort(stable=True)
    chunks = np.array_split(order.numpy(), 7)
    sizes = sorted(len(c) for c in chunks)
    assert sorted(bins.counts.tolist()) == sizes
    assert (bins.confidence.diff() > 0).all()
    total = (bins.confidence * bins.counts).sum() / 500
    assert total.item() == pytest.approx(confidence.mean().item())
    assert (bins.accuracy * bins.counts).sum().item() == pytest.approx((predicted == y).sum().item())
    assert bins.edges[-1] == confidence.max()


def test_a_calibrated_predictor_has_a_small_error():
    """Labels drawn from the probabilities: E[ECE] is of the order sqrt(bins/n)."""
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(20_000, 3, generator=generator).softmax(-1)
    y = torch.multinomial(p, 1, generator=generator).squeeze(1)
    assert metrics.ece(p, y) < math.sqrt(15 / 20_000)
    assert metrics.ece(p.pow(3) / p.pow(3).sum(-1, keepdim=True), y) > 0.1


def test_risk_coverage():
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.6])
    errors = torch.tensor([0.0, 1.0, 0.0, 1.0])
    coverage, risk = metrics.risk_coverage(confidence, errors)
    torch.testing.assert_close(coverage, torch.tensor([0.25, 0.5, 0.75, 1.0]).double())
    torch.testing.assert_close(risk, torch.tensor([0.0, 0.5, 1 / 3, 0.5]).double())
    assert metrics.aurc(confidence, errors) == pytest.approx((0 + 0.5 + 1 / 3 + 0.5) / 4)
    tied = torch.full((4,), 0.5)
    assert metrics.aurc(tied, errors) == metrics.aurc(tied, errors.flip(0)) == 0.5


def test_regression_scores():
    means, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0])
    assert metrics.rmse(means, targets) == pytest.approx(math.sqrt(2))
    low, high = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0])
    assert metrics.interval_coverage(low, high, targets) == 0.5
    with pytest.raises(InputError, match="differ"):
        metrics.rmse(torch.zeros(2, 2), targets)
    with pytest.raises(InputError, match="above"):
        metrics.interval_coverage(high, low, targets)


@pytest.mark.parametrize("ties", [False, True])
def test_ood_scores_against_scikit_learn(ties):
    generator = torch.Generator().manual_seed(2)
    ordinary = torch.randn(300, generator=generator).double() * 10
    foreign = torch.randn(200, generator=generator).double() * 10 + 10
    if ties:
        ordinary, foreign = ordinary.round(), foreign.round()
    scores = torch.cat([ordinary, foreign]).numpy()
    labels = np.r_[np.zeros(300), np.ones(200)]
    ours = metrics.ood_scores(ordinary, foreign)
    assert ours.auroc == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-6)
    assert ours.aupr == pytest.approx(sk.average_precision_score(labels, scores), abs=1e-6)
    false_positive, true_positive, _ = sk.roc_curve(labels, scores, drop_intermediate=False)
    assert ours.fpr95 == pytest.approx(false_positive[true_positive >= 0.95].min(), abs=1e-6)


def test_one_large_score_does_not_make_the_others_ties():
    ordinary, foreign = torch.rand(100) * 0.5, torch.rand(100) * 0.5 + 0.6
    large = torch.cat([ordinary, torch.tensor([1e6])])
    # Of 100 · 101 pairs only those with the outlier are in the wrong order.
    assert metrics.ood_scores(large, foreign).auroc == pytest.approx(100 / 101)


def test_ranks_against_a_naive_loop():
    values = torch.randn(400, generator=torch.Generator().manual_seed(6), dtype=torch.float64).round(
        decimals=2
    )
    for tolerance in (0.0, 0.015, 0.1, 10.0):
        first, rank, expected = None, -1, {}
        for value in sorted(set(values.tolist())):
            if first is None or value > first + tolerance:
                first, rank = value, rank + 1
            expected[value] = rank
        assert ranks_of(values, tolerance).tolist() == [expected[value] for value in values.tolist()]
    steps = 1 + 0.5 * rounding_of(torch.ones(1)).item() * torch.arange(7)
    assert ranks_of(steps).tolist() == [0, 0, 0, 1, 1, 1, 2], "ties do not chain"
    assert ranks_of(torch.tensor([3, 1, 3, 2])).tolist() == [2, 0, 2, 1]
    with pytest.raises(InputError, match="1 of 2 scores are NaN or infinite"):
        ranks_of(torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_decide_scores_by_rank(dtype):
    """Scores with many ties, and the same with a noise of some ulps, as if from other kernels."""
    generator = torch.Generator().manual_seed(7)
    ordinary = torch.randint(60, (300,), generator=generator).to(dtype) / 30
    foreign = torch.randint(10, 70, (200,), generator=generator).to(dtype) / 30
    errors = torch.randint(2, (300,), generator=generator)
    p = 0.55 + ordinary / 5  # the confidence of two classes
    probabilities = torch.stack([p, 1 - p], -1)

    def noisy(values):
        ulps = torch.randint(-4, 5, values.shape, generator=generator)
        return values + ulps * torch.finfo(dtype).eps * values.abs().clamp(min=1)

    expected = metrics.ood_scores(ordinary, foreign)
    risks = metrics.risk_coverage(ordinary, errors)[1]
    gap = metrics.ece(probabilities, errors, 7, "mass")
    for _ in range(5):
        assert metrics.ood_scores(noisy(ordinary), noisy(foreign)) == expected
        assert torch.equal(metrics.risk_coverage(noisy(ordinary), errors)[1], risks)
        p = noisy(probabilities[:, 0])
        found = metrics.ece(torch.stack([p, 1 - p], -1), errors, 7, "mass")
        assert found == pytest.approx(gap, abs=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("num_classes", [2, 10, 300])
def test_members_that_agree_tell_nothing_by_their_mutual_information(num_classes):
    def predictive(scale, seed):
        logits = torch.randn(200, num_classes, generator=torch.Generator().manual_seed(seed))
        accumulator = pm.likelihoods.Categorical().accumulator(200)
        accumulator.update((scale * logits).expand(5, -1, -1), torch.full((5,), 0.2), slice(0, 200))
        return accumulator.result()

    ordinary, foreign = predictive(4.0, 0), predictive(0.5, 1)
    epsilon = torch.finfo(torch.float32).eps
    assert max(p.mutual_information.max().item() for p in (ordinary, foreign)) < 8 * epsilon
    found = metrics.ood_scores(ordinary.mutual_information, foreign.mutual_information)
    assert (found.auroc, found.aupr, found.fpr95) == (0.5, 0.5, 1.0)
    assert metrics.ood_scores(ordinary.entropy, foreign.entropy).auroc > 0.9


def test_uncertainty_scores_point_the_same_way():
    sure = pm.CategoricalPredictive(torch.tensor([[0.98, 0.01, 0.01]]), torch.tensor([0.1]), 2)
    unsure = pm.CategoricalPredictive(torch.tensor([[0.4, 0.3, 0.3]]), torch.tensor([0.1]), 2)
    for score in metrics.ood.OOD_SCORES:
        assert unsure.uncertainty(score) > sure.uncertainty(score)
    with pytest.raises(InputError, match="Did you mean 'entropy'"):
        sure.uncertainty("entropi")


def test_fidelity():
    p = torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    q = torch.tensor([[0.5, 0.5 - 1e-6], [0.7, 0.3]])
    assert metrics.agreement(p, q) == 0.5
    assert metrics.total_variation(p, q) == pytest.approx((0.1 + 0.5) / 2, abs=1e-5)
    with pytest.raises(InputError, match="same points and classes"):
        metrics.agreement(p, q[:1])


@pytest.mark.parametrize(("n", "m"), [(40, 40), (40, 25), (7, 60)])
def test_wasserstein_against_scipy_and_definition(n, m):
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(n, 5, generator=generator)
    b = torch.randn(m, 5, generator=generator) * 2 + 1
    expected = np.mean([stats.wasserstein_distance(a[:, i], b[:, i]) for i in range(5)])
    assert metrics.wasserstein1(a, b) == pytest.approx(expected, rel=1e-6)
    # W2 by repeating every sample until both lists are equally long.
    x = a.double().sort(0).values.repeat_interleave(m, 0)
    y = b.double().sort(0).values.repeat_interleave(n, 0)
    assert metrics.wasserstein2(a, b) == pytest.approx((x - y).square().mean(0).sqrt().mean().item())
    assert metrics.wasserstein2(a, b) >= metrics.wasserstein1(a, b)


def test_wasserstein_of_shifted_gaussians_is_the_shift():
    a = torch.randn(4000, 3, generator=torch.Generator().manual_seed(4))
    assert metrics.wasserstein1(a, a + 0.7) == pytest.approx(0.7, rel=1e-5)
    assert metrics.wasserstein2(a, a + 0.7) == pytest.approx(0.7, rel=1e-5)


def test_diversity_against_naive_loops():
    p = torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(5)).softmax(-1).double()
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    differ = [(p[i].argmax(-1) != p[j].argmax(-1)).double().mean() for i, j in pairs]
    assert metrics.disagreement(p) == pytest.approx(torch.stack(differ).mean().item())
    kl = [(p[i] * (p[i].log() - p[j].log())).sum(-1).mean() for i, j in pairs]
    assert metrics.pairwise_kl(p) == pytest.approx(torch.stack(kl).mean().item())
    mean = p.mean(0)
    each = [(q * (q.log() - mean.log())).sum(-1).mean() for q in p]
    assert metrics.jensen_shannon(p) == pytest.approx(torch.stack(each).mean().item())
    assert torch.equal(disagreement_matrix(p).diagonal(), torch.zeros(4).double())
    same = p[:1].expand(3, -1, -1)
    assert metrics.disagreement(same) == 0
    assert metrics.pairwise_kl(same) == pytest.approx(0, abs=1e-12)
    with pytest.raises(InputError, match="at least two members"):
        metrics.disagreement(p[:1])


def naive_kl(p, q):
    """In nats, point by point and class by class; 0 log 0 is 0."""
    terms = [
        sum(a * (math.log(a) - math.log(b)) for a, b in zip(r, s, strict=True) if a > 0)
        for r, s in zip(p, q, strict=True)
    ]
    return sum(terms) / len(terms)


def test_matrices_of_pairs_against_naive_loops():
    p = torch.randn(5, 20, 4, generator=torch.Generator().manual_seed(6)).softmax(-1).double()
    p[0, :7] = torch.tensor([0.5, 0.5, 0.0, 0.0]).double()
    p[1, :7] = torch.tensor(
        [0.25, 0.25, 0.5, 0.0]
    ).double()  # zero where the others are not, and the same zero
    differ, kl, js = metrics.disagreement_matrix(p), metrics.kl_matrix(p), metrics.js_matrix(p)
    each = p.tolist()
    for i, j in itertools.product(range(5), repeat=2):
        labels = [[row.index(max(row)) for row in each[member]] for member in (i, j)]
        assert float(differ[i, j]) == pytest.approx(np.mean([a != b for a, b in zip(*labels, strict=True)]))
        if j not in (0, 1) or (i, j) in ((0, 0), (0, 1), (1, 1)):  # others have mass where these have none
            assert float(kl[i, j]) == pytest.approx(naive_kl(each[i], each[j]), abs=1e-12)
        middle = [
            [(a + b) / 2 for a, b in zip(r, s, strict=True)] for r, s in zip(each[i], each[j], strict=True)
        ]
        expected = (naive_kl(each[i], middle) + naive_kl(each[j], middle)) / 2
        assert float(js[i, j]) == pytest.approx(expected, abs=1e-12)
        if i != j:
            assert float(js[i, j]) == pytest.approx(metrics.jensen_shannon(p[[i, j]]), abs=1e-12)
    assert float(kl[1, 0]) > 50  # without end in truth: what was impossible happens in a third of all points
    assert float(js.max()) <= math.log(2)
    assert torch.equal(js.diagonal(), torch.zeros(5).double())
    assert torch.equal(differ, differ.T)
    # Of single precision, too: a page reads what somebody has saved.
    torch.testing.assert_close(metrics.js_matrix(p.float()), js, rtol=1e-4, atol=1e-6)
    apart = torch.eye(2).double()[:, None].expand(2, 3, 2)
    assert float(metrics.js_matrix(apart)[0, 1]) == pytest.approx(math.log(2))
    for matrix in (metrics.disagreement_matrix, metrics.kl_matrix, metrics.js_matrix):
        with pytest.raises(InputError, match="at least two members"):
            matrix(p[:1])
        with pytest.raises(InputError, match=r"got \[5, 20\]"):
            matrix(p[..., 0])


def test_cosine_of_weights():
    members = pm.Members({"a": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "b": torch.tensor([1.0, 2.0])})
    similarity = metrics.cosine_similarity(members)
    expected = 2 / (math.sqrt(2) * math.sqrt(8))
    torch.testing.assert_close(
        similarity, torch.tensor([[1.0, expected], [expected, 1.0]], dtype=torch.float64)
    )


def test_logits_are_refused():
    with pytest.raises(InputError, match="Apply softmax"):
        metrics.nll(torch.randn(5, 3) * 4, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(InputError, match="labels"):
        metrics.nll(torch.full((5, 2), 0.5), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("infinite", [math.inf, -math.inf, math.nan])
def test_histograms_count_what_is_a_number(infinite):
    values = torch.tensor([0.0, 0.5, 1.0, 2.0])
    known = histogram([values], 2.0)
    assert known["end"] == 2.0
    assert sum(known["ordinary"]) == 4
    assert (known["ordinary"][0], known["ordinary"][5], known["ordinary"][-1]) == (1, 1, 1)
    mixed = torch.cat([values, torch.tensor([infinite])])
    # Where the end is given, what is no number is left out; where it is none, the largest number is the end.
    assert histogram([mixed], 2.0) == known
    assert histogram([mixed], math.inf) == histogram([mixed], math.nan) == known


def test_histograms_of_two_kinds_of_points_end_at_the_largest_number_of_both():
    ordinary, foreign = torch.tensor([1.0, math.inf]), torch.tensor([4.0, 2.0])
    found = histogram([ordinary, foreign], math.inf)
    assert found["end"] == 4.0
    assert (sum(found["ordinary"]), sum(found["foreign"])) == (1, 2)


@pytest.mark.parametrize("values", [torch.tensor([math.inf, math.inf]), torch.tensor([])])
def test_histograms_without_any_number_are_empty(values):
    found = histogram([values], math.inf)
    assert found["end"] == 0.0
    assert found["ordinary"] == [0.0] * 20
