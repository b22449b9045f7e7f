"""Verdicts: pure functions of results, here made by hand."""

from dataclasses import replace

import pytest
import torch

from polymode.application.comparison import Comparison, Result, verdict_of
from polymode.application.comparison.verdict import WORTH
from polymode.likelihoods import Categorical, LearnedGaussian

NUMBER = 50  # of test rows


def result(label, validation, *, passes=1, seconds=1.0, baseline=False, mark="", log_prob=None, test=None):
    """A method with validation NLLs, one a seed; log_prob: of the test rows, the same for all seeds."""
    rows = torch.zeros(NUMBER) if log_prob is None else log_prob
    nll = -rows.mean().item() if test is None else test
    replicates = [
        {
            "split": 0,
            "seed": seed,
            "scores": {"nll": nll} | ({} if value is None else {"validation_nll": value}),
            "log_prob": rows,
        }
        for seed, value in enumerate(validation)
    ]
    price = {"member_epochs": 1.0, "seconds": seconds, "parameters": 1, "passes": passes}
    return Result(label, {"name": label}, 1, replicates, price, is_baseline=baseline, mark=mark)


def comparison(*results, likelihood=None):
    return Comparison("test", likelihood or Categorical(), results, {}, {}, {})


def recommended(*results):
    return verdict_of(comparison(*results)).recommended.label


@pytest.mark.parametrize(
    ("ahead", "taken"),
    [(0.0, "cheap"), (0.9 * WORTH, "cheap"), (1.1 * WORTH, "dear"), (0.5, "dear"), (-0.5, "cheap")],
)
def test_a_higher_price_must_be_worth_a_hundredth_of_a_nat(ahead, taken):
    cheap, dear = result("cheap", [1.0] * 3), result("dear", [1.0 - ahead] * 3, passes=5)
    for order in ((cheap, dear), (dear, cheap)):
        verdict = verdict_of(comparison(*order))
        assert verdict.recommended.label == taken
        assert verdict.best.label == ("cheap" if ahead < 0 else "dear") or ahead == 0


def test_a_standard_error_of_the_difference_is_allowed_for():
    """Differences of 0.01, 0.03 and 0.05 are 0.03 ± 0.0115, beyond 0.0215; those of 0, 0.02 and 0.04 not."""
    dear = result("dear", [1.0, 2.0, 3.0], passes=5)
    far = result("cheap", [1.01, 2.03, 3.05])
    near = result("cheap", [1.0, 2.02, 3.04])
    error = 0.02 / 3**0.5
    assert 0.02 < WORTH + error < 0.03
    assert recommended(far, dear) == "dear"
    assert recommended(near, dear) == "cheap"
    # What all seeds have in common does not count: the difference is taken seed by seed.
    assert recommended(result("cheap", [1.05, 2.05, 3.05]), dear) == "dear"


def test_passes_of_a_prediction_come_before_seconds_of_training():
    slow, quick = result("slow", [1.0], seconds=9.0), result("quick", [1.0], passes=2, seconds=1.0)
    assert recommended(quick, slow) == "slow"
    assert recommended(replace(slow, price=slow.price | {"passes": 2}), quick) == "quick"


def test_baselines_are_never_recommended_and_the_best_of_them_is_the_rival():
    network = result("network", [1.0])
    worse, better = (
        result(label, [nll], baseline=True, seconds=0.1) for label, nll in (("worse", 2.0), ("better", 0.5))
    )
    verdict = verdict_of(comparison(network, worse, better))
    assert (verdict.recommended.label, verdict.baseline.label) == ("network", "better")
    alone = verdict_of(comparison(network))
    assert (alone.baseline, alone.gain) == (None, None)
    assert not any("worth it" in line for line in alone.lines)
    assert alone.config() == {
        "recommended": "network",
        "best_on_validation": "network",
        "baseline": None,
        "gain_over_baseline": None,
        "gain_over_baseline_se": None,
    }


NOISE = torch.randn(NUMBER, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("shift", "noise", "sentence"),
    [
        (0.5, 0.1, "yes: NLL is better than that of forest (scikit-learn, 0.3 s) by 0.5"),
        (-0.5, 0.1, "no: forest (scikit-learn, 0.3 s) has a better NLL by 0.4"),
        (0.05, 1.0, "undecided: network is ahead of forest (scikit-learn, 0.3 s) in NLL by 0."),
    ],
)
def test_whether_a_network_is_worth_it_is_told_by_the_test_rows(shift, noise, sentence):
    """The gain is the mean of the differences of rows; its error is theirs, however the seeds agree."""
    rows = 0.3 * torch.randn(NUMBER, generator=torch.Generator().manual_seed(1))
    network = result("network", [1.0, 1.0], log_prob=rows + shift + noise * NOISE)
    forest = result("forest", [1.0, 1.0], log_prob=rows, baseline=True, seconds=0.3)
    verdict = verdict_of(comparison(network, forest))
    each = (shift + noise * NOISE).double()
    error = each.std().item() / NUMBER**0.5
    assert verdict.gain.mean == pytest.approx(each.mean().item(), rel=1e-4)
    assert verdict.gain.standard_error == pytest.approx(error, rel=1e-4)
    assert (abs(each.mean().item()) > 2 * error) == (not sentence.startswith("undecided"))
    [line] = [line for line in verdict.lines if line.startswith("worth it?")]
    assert line.removeprefix("worth it?").strip().startswith(sentence)
    assert line.endswith(f"{abs(verdict.gain.mean):.4f} ±{error:.4f} on the test rows")
    assert verdict.config()["gain_over_baseline"] == verdict.gain.mean


def test_what_is_recommended_is_told_with_its_price_and_its_mark():
    cheap = result("cheap", [1.0], seconds=2.04, mark="under-trained")
    dear = result("dear", [0.995], passes=5)
    first, second = verdict_of(comparison(cheap, dear)).lines
    assert first == (
        "recommended  cheap (1 forward pass a prediction, 2.0 s of training), chosen on validation data by "
        "quality and price; dear is not better by more than 0.01 nats and its error"
    )
    assert second.strip() == "but it is under-trained: give it another budget before you rely on it"
    [only] = verdict_of(comparison(result("dear", [1.0], passes=5))).lines
    assert only.startswith("recommended  dear (5 forward passes a prediction, ")
    assert only.endswith("by quality and price")


def test_without_validation_there_is_no_verdict():
    assert verdict_of(comparison(result("a", [None]), result("b", [None]))) is None
    # Baselines alone are no choice, and a method that some seed has no score of cannot be chosen.
    rival = result("forest", [0.1], baseline=True)
    assert verdict_of(comparison(result("a", [None]), rival)) is None
    partly = result("partly", [0.1, None])
    assert recommended(partly, result("known", [1.0, 1.0], passes=5)) == "known"


def test_what_is_better_higher_is_chosen_by_it():
    def numbers(label, density, **options):
        made = result(label, [0.0], **options)
        [replicate] = made.replicates
        scores = {"log_density": density, "validation_log_density": density}
        return replace(made, replicates=[replicate | {"scores": scores}])

    low, high = numbers("low", -2.0), numbers("high", -1.0, passes=5)
    assert verdict_of(comparison(low, high, likelihood=LearnedGaussian())).recommended is high
