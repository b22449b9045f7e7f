"""Properties of scores: against oracles in NumPy, and under changes that may not change them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymode import metrics
from polymode.likelihoods import make_likelihood

SHAPES = {"points": st.integers(1, 12), "classes": st.integers(2, 5), "members": st.integers(1, 4)}


@st.composite
def labelled(draw):
    """Probabilities [N, C] in double precision, many of them tied or zero, and labels [N]."""
    points, classes = draw(SHAPES["points"]), draw(SHAPES["classes"])
    parts = st.one_of(st.integers(0, 3).map(float), st.floats(1e-6, 1.0))
    rows = draw(
        st.lists(
            st.lists(parts, min_size=classes, max_size=classes).filter(lambda row: sum(row) > 1e-3),
            min_size=points,
            max_size=points,
        )
    )
    weights = np.array(rows)
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=points, max_size=points))
    return torch.from_numpy(weights / weights.sum(1, keepdims=True)), torch.tensor(labels)


SCORES = {
    "accuracy": metrics.accuracy,
    "nll": metrics.nll,
    "brier": metrics.brier,
    "ece": metrics.ece,
    "mce": metrics.mce,
}


@pytest.mark.parametrize("name", SCORES)
@given(case=labelled(), chance=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(name, case, chance):
    probabilities, labels = case
    order = list(range(len(labels)))
    chance.shuffle(order)
    one = SCORES[name](probabilities, labels)
    other = SCORES[name](probabilities[order], labels[order])
    assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


@given(case=labelled())
def test_scores_are_those_of_numpy(case):
    probabilities, labels = case
    p, y = probabilities.numpy(), labels.numpy()
    own = p[np.arange(len(y)), y]
    with np.errstate(divide="ignore"):
        expected = -np.log(own).mean()
    assert metrics.nll(probabilities, labels) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert metrics.bits_per_character(probabilities, labels) == pytest.approx(
        expected / math.log(2), rel=1e-9, abs=1e-12
    )
    truth = np.eye(p.shape[1])[y]
    assert metrics.brier(probabilities, labels) == pytest.approx(((p - truth) ** 2).sum(1).mean(), abs=1e-9)
    assert metrics.accuracy(probabilities, labels, top=p.shape[1]) == 1
    assert 0 <= metrics.brier(probabilities, labels) <= 2


@given(
    case=labelled(),
    bins=st.integers(1, 20),
    binning=st.sampled_from(["width", "mass"]),
    least=st.integers(0, 3),
)
def test_calibration_errors_lie_between_zero_and_one(case, bins, binning, least):
    error = metrics.ece(*case, num_bins=bins, binning=binning, min_count=least)
    largest = metrics.mce(*case, num_bins=bins, binning=binning, min_count=least)
    assert 0 <= error <= largest + 1e-12 <= 1 + 1e-9


@given(case=labelled())
def test_one_bin_compares_means(case):
    probabilities, labels = case
    confidence, answers = probabilities.numpy().max(1), probabilities.numpy().argmax(1)
    expected = abs((answers == labels.numpy()).mean() - confidence.mean())
    assert metrics.ece(*case, num_bins=1) == pytest.approx(expected, abs=1e-6)


@given(
    truth=st.lists(st.floats(0.01, 1), min_size=2, max_size=5),
    chance=st.data(),
)
def test_no_forecast_beats_the_truth_on_average(truth, chance):
    """NLL and Brier are proper: their means under a distribution are least where it is forecast."""
    truth = torch.tensor(truth, dtype=torch.float64)
    truth = truth / truth.sum()
    other = chance.draw(st.lists(st.floats(0.01, 1), min_size=len(truth), max_size=len(truth)))
    other = torch.tensor(other, dtype=torch.float64)
    other = other / other.sum()
    labels = torch.arange(len(truth))
    for score in (metrics.nll, metrics.brier):
        expected = [
            sum(
                float(share) * score(forecast[None], label[None])
                for share, label in zip(truth, labels, strict=True)
            )
            for forecast in (truth, other)
        ]
        assert expected[0] <= expected[1] + 1e-12


VALUES = st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=12)


@given(ordinary=VALUES, foreign=VALUES, shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_auroc_is_the_share_of_pairs_and_knows_order_only(ordinary, foreign, shift, scale):
    a, b = torch.tensor(ordinary, dtype=torch.float64), torch.tensor(foreign, dtype=torch.float64)
    pairs = (b[:, None] > a).double() + 0.5 * (b[:, None] == a).double()
    found = metrics.ood_scores(a, b)
    assert found.auroc == pytest.approx(pairs.mean().item(), abs=1e-6)
    assert 0 <= found.fpr95 <= 1
    assert 0 <= found.aupr <= 1 + 1e-6
    for change in (lambda t: scale * t + shift, torch.arctan, lambda t: t**3):
        again = metrics.ood_scores(change(a), change(b))
        assert again.auroc == pytest.approx(found.auroc, abs=1e-6)
        assert again.fpr95 == pytest.approx(found.fpr95, abs=1e-6)
    assert metrics.ood_scores(b, a).auroc == pytest.approx(1 - found.auroc, abs=1e-6)


@given(case=labelled(), chance=st.randoms(use_true_random=False))
def test_risks_lie_between_the_least_and_the_largest_error(case, chance):
    probabilities, labels = case
    confidence = probabilities.amax(1)
    errors = (probabilities.argmax(1) != labels).double()
    coverage, risk = metrics.risk_coverage(confidence, errors)
    assert coverage[-1] == 1
    assert bool((coverage.diff() > 0).all())
    assert risk[-1].item() == pytest.approx(errors.mean().item())
    assert bool(((risk >= errors.min() - 1e-12) & (risk <= errors.max() + 1e-12)).all())
    order = list(range(len(labels)))
    chance.shuffle(order)
    assert metrics.aurc(confidence[order], errors[order]) == pytest.approx(metrics.aurc(confidence, errors))
    assert metrics.aurc(-errors, errors) <= metrics.aurc(confidence, errors) + 1e-12  # an oracle is best


LIKELIHOODS = {"categorical": 3, "bernoulli": 1, "heteroscedastic_gaussian": 2}


@st.composite
def outputs_of_members(draw, width):
    members, points = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(members, points, width, generator=generator, dtype=torch.float64)
    weights = torch.rand(members, generator=generator, dtype=torch.float64) + 0.01
    return outputs * draw(st.sampled_from([0.1, 1.0, 10.0])), weights


def pieces(draw, number):
    cuts = sorted(draw(st.sets(st.integers(1, number - 1)))) if number > 1 else []
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, number], strict=True)]


@pytest.mark.parametrize("kind", LIKELIHOODS)
@given(chance=st.data())
def test_a_stream_in_any_pieces_is_what_comes_at_once(kind, chance):
    """Blocks of rows and of members in any order of members: the predictive is that of all together."""
    likelihood = make_likelihood(kind)
    outputs, weights = chance.draw(outputs_of_members(LIKELIHOODS[kind]))
    members, points = outputs.shape[:2]
    at_once = likelihood.accumulator(points)
    at_once.update(outputs, weights, slice(0, points))
    order = chance.draw(st.permutations(range(members)))
    shuffled, shares = outputs[order], weights[order]
    streamed = likelihood.accumulator(points)
    for rows in pieces(chance.draw, points):
        for some in pieces(chance.draw, members):
            streamed.update(shuffled[some, rows], shares[some], rows)
    one, other = at_once.result().tensors(), streamed.result().tensors()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


@given(chance=st.data())
def test_mixtures_of_probabilities_are_the_means_of_members(chance):
    likelihood = make_likelihood("categorical")
    outputs, weights = chance.draw(outputs_of_members(4))
    accumulator = likelihood.accumulator(outputs.shape[1])
    accumulator.update(outputs, weights, slice(0, outputs.shape[1]))
    p = np.exp(outputs.numpy() - np.logaddexp.reduce(outputs.numpy(), axis=-1, keepdims=True))
    shares = weights.numpy() / weights.numpy().sum()
    expected = np.einsum("m,mnc->nc", shares, p)
    np.testing.assert_allclose(accumulator.result().mean.numpy(), expected, rtol=1e-5, atol=1e-7)


@given(case=labelled(), chance=st.randoms(use_true_random=False))
def test_distances_between_predictives_are_distances(case, chance):
    ours, order = case[0], list(range(len(case[0])))
    chance.shuffle(order)
    theirs = ours[order].flip(1)
    variation = metrics.total_variation(ours, theirs)
    assert 0 <= variation <= 1 + 1e-9
    assert variation == pytest.approx(metrics.total_variation(theirs, ours))
    assert metrics.total_variation(ours, ours) == 0
    assert 0 <= metrics.agreement(ours, theirs) <= 1
