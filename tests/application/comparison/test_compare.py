"""Judging a posterior, and comparing methods as a library function."""

import importlib
import io
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import polymode as pm
from polymode.application.comparison import Judging, compare, judge, verdict_of, whole
from polymode.data import Preprocessing, Split, Task
from polymode.data.division import with_validation
from polymode.errors import CheckpointError, InputError
from polymode.metrics import Bins
from polymode.training.keeping.progress import Lines

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(90, 3, generator=GENERATOR)
Y = (X.sum(1) + 0.5 * torch.randn(90, generator=GENERATOR) > 0).long()


def classes(**options):
    split = Split(pm.ArrayData(X[:60], Y[:60], batch_size=20), pm.ArrayData(X[60:], Y[60:]), **options)
    return Task("toy", [split], "categorical", 2, ood=pm.ArrayData(X[:20] * 9, Y[:20]))


def numbers(scale=1.0):
    y = X[:, 0] * 2 + 0.3 * torch.randn(90, generator=torch.Generator().manual_seed(1))
    data = [pm.ArrayData(X[a:b], y[a:b], batch_size=20) for a, b in ((0, 60), (60, 90))]
    return Split(*data, preprocessing=Preprocessing(target_scale=scale))


def fitted(split, likelihood, outputs, members=3, epochs=15):
    return pm.fit(
        pm.methods.DeepEnsemble(members, of=pm.methods.Single(optimizer=pm.Optimizer("Adam", lr=0.02))),
        lambda: pm.models.MLP(3, outputs, (8,)),
        split.train,
        likelihood=likelihood,
        epochs=epochs,
        progress=False,
    )


def member_outputs(posterior, inputs):
    return torch.cat([outputs for _, outputs, _ in posterior.outputs(inputs)])


def test_scores_and_curves_of_classes_follow_from_the_members():
    task = classes()
    [split] = task.splits
    posterior = fitted(split, "categorical", 2)
    judgement = judge(posterior, split, task.ood)
    assert judgement.scores.items() >= pm.evaluate(posterior, split.test, ood=task.ood).items()
    probabilities = member_outputs(posterior, X[60:]).softmax(-1).double()  # [M, N, C]
    labels = probabilities.argmax(-1)
    pairs = [(labels[i] != labels[j]).double().mean().item() for i in range(3) for j in range(3) if i != j]
    assert judgement.scores["disagreement"] == pytest.approx(sum(pairs) / 6)
    for count in (1, 2, 3):
        mean = probabilities[:count].mean(0)
        nll = -mean[torch.arange(30), Y[60:]].log().mean().item()
        assert judgement.curves["nll_by_members"][count - 1] == pytest.approx(nll, rel=1e-5)
    assert judgement.curves["nll_by_members"][-1] == pytest.approx(judgement.scores["nll"], rel=1e-6)
    reliability = judgement.curves["reliability"]
    assert sum(reliability["counts"]) == 30
    assert sum(reliability["correct"]) == pytest.approx(30 * judgement.scores["accuracy"])
    for quantity in ("confidence", "entropy"):
        assert sum(judgement.curves[quantity]["ordinary"]) == 30
        assert sum(judgement.curves[quantity]["foreign"]) == 20
    assert judgement.curves["confidence"]["ordinary"][:9] == [0] * 9  # two classes: never below one half
    weights = torch.cat([t.flatten(1) for t in next(iter(posterior.draw())).stacked.values()], 1).double()
    cosine = torch.nn.functional.cosine_similarity(weights[0], weights[1], 0).item()
    assert judgement.curves["cosine"][0][1] == pytest.approx(cosine, rel=1e-6)
    torch.testing.assert_close(judgement.predictions["mean"], probabilities.mean(0).float())


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_scores_of_numbers_are_in_the_units_of_the_raw_targets(scale):
    split = numbers(scale)
    posterior = fitted(split, pm.likelihoods.FixedGaussian(std=0.3), 1)
    judgement = judge(posterior, split)
    means = member_outputs(posterior, X[60:])[..., 0].double()
    targets = split.test.targets.double()
    rmse = (means.mean(0) - targets).square().mean().sqrt().item()
    assert judgement.scores["rmse"] == pytest.approx(scale * rmse, rel=1e-5)
    # The mixture's density in raw units, written out.
    normal = torch.distributions.Normal(means * scale, 0.3 * scale)
    density = normal.log_prob(targets * scale).logsumexp(0) - math.log(3)
    assert judgement.scores["log_density"] == pytest.approx(density.mean().item(), rel=1e-5)
    cdf = normal.cdf(targets * scale).mean(0)
    inside = ((cdf - 0.5).abs() <= 0.25).double().mean().item()
    coverage = judgement.curves["coverage"]
    assert coverage["observed"][coverage["nominal"].index(0.5)] == pytest.approx(inside)
    difference = (means[0] - means[1]).square().mean().sqrt() / targets.std()
    assert judgement.curves["difference"][0][1] == pytest.approx(difference.item(), rel=1e-5)


def test_tokens_that_are_ignored_do_not_count():
    tokens = torch.randint(1, 6, (40, 5), generator=torch.Generator().manual_seed(2))
    following = tokens.roll(-1, 1)
    following[:, -1] = 0
    data = pm.ArrayData(tokens, following, batch_size=20)
    posterior = pm.fit(
        pm.methods.DeepEnsemble(2),
        lambda: torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6)),
        data,
        likelihood=pm.likelihoods.Categorical(ignore_index=0),
        epochs=1,
        progress=False,
    )
    judgement = judge(posterior, Split(data, data))
    labels = member_outputs(posterior, tokens)[:, :, :4].argmax(-1)
    expected = (labels[0] != labels[1]).double().mean().item()
    assert judgement.scores["disagreement"] == pytest.approx(expected)
    assert judgement.curves["nll_by_members"][-1] == pytest.approx(judgement.scores["nll"], rel=1e-6)


def methods():
    return {"single": pm.methods.Single(), "pair": pm.methods.DeepEnsemble(2)}


def run(folder, task=None, **options):
    options = {"budget": 4, "seeds": [3, 4], "options": {"budget": 4}, "backend": "loop"} | options
    return compare(task or classes(), lambda: pm.models.MLP(3, 2, (4,)), methods(), folder, **options)


def test_a_replicate_is_what_it_would_be_alone(tmp_path):
    """In double precision, where rounding is far below 1e-9 and scores by rank are decided by no tie."""
    found = run(tmp_path / "both", precision="double")
    for index, seed in enumerate((3, 4)):
        alone = run(tmp_path / f"alone{seed}", seeds=[seed], precision="double")
        for ours, theirs in zip(found.results, alone.results, strict=True):
            assert ours.replicates[index]["scores"] == pytest.approx(
                theirs.replicates[0]["scores"], rel=1e-9, abs=1e-9
            )
    assert found.results[0].replicates[0]["scores"] != found.results[0].replicates[1]["scores"]
    assert [r.price["member_epochs"] for r in found.results] == [4, 4]
    assert [r.epochs for r in found.results] == [4, 2]
    stored = load_file(tmp_path / "both/pair/predictions-1.safetensors")
    accuracy = (stored["mean"].argmax(-1) == stored["targets"]).double().mean().item()
    assert found.results[1].replicates[1]["scores"]["accuracy"] == pytest.approx(accuracy)


def test_a_comparison_reads_back_and_another_is_refused(tmp_path):
    first = run(tmp_path / "c")
    again = run(tmp_path / "c")
    assert again.rows() == first.rows()
    with pytest.raises(CheckpointError, match="another comparison: its budget is 4, now it is 6"):
        run(tmp_path / "c", budget=6, options={"budget": 6})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="is not empty and holds no comparison"):
        run(tmp_path / "mine")


def test_scores_are_taken_again_when_the_test_data_or_the_draws_change(tmp_path):
    before = run(tmp_path / "c").rows()
    [split] = classes().splits
    wrong = replace(classes(), splits=[replace(split, test=pm.ArrayData(X[60:], 1 - Y[60:]))])
    after = run(tmp_path / "c", wrong).rows()
    for old, new in zip(before, after, strict=True):
        assert new["accuracy"] == pytest.approx(1 - old["accuracy"])
    trained = json.loads((tmp_path / "c/pair/manifest.json").read_text())
    assert trained["status"] == "finished"
    saved = json.loads((tmp_path / "c/pair/scores.json").read_text())["about"]
    run(tmp_path / "c", wrong, judging=Judging(num_draws=7))
    again = json.loads((tmp_path / "c/pair/scores.json").read_text())["about"]
    assert (saved["num_draws"], again["num_draws"]) == (100, 7)


def test_scores_are_taken_again_when_the_bins_change(tmp_path):
    before = run(tmp_path / "c").results[1].replicates
    after = run(tmp_path / "c", judging=Judging(bins=Bins(20, min_count=5))).results[1].replicates
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        stored = load_file(tmp_path / f"c/pair/predictions-{index}.safetensors")
        for name, values in (("ece", pm.metrics.ece), ("mce", pm.metrics.mce)):
            assert old["scores"][name] == pytest.approx(values(stored["mean"], stored["targets"]))
            expected = values(stored["mean"], stored["targets"], 20, min_count=5)
            assert new["scores"][name] == pytest.approx(expected)
        assert len(new["curves"]["reliability"]["counts"]) == 20


def test_a_budget_that_cannot_be_kept_is_said(tmp_path):
    stream = io.StringIO()
    found = run(tmp_path, budget=1, options={}, reporter=Lines(stream))
    assert [r.price["member_epochs"] for r in found.results] == [1, 2]
    assert "pair: it spent 2 member-epochs, the budget is 1" in stream.getvalue()


def test_validation_is_logged_and_becomes_a_curve(tmp_path):
    task = classes(validation=pm.ArrayData(X[60:], Y[60:]))
    found = run(tmp_path, task)
    learning = found.results[1].learning
    assert learning["member_epochs"] == [2.0, 4.0]
    events = [json.loads(line) for line in (tmp_path / "pair/events.jsonl").read_text().splitlines()]
    nll = [e["validation"]["nll"] for e in events if e["event"] == "epoch"]
    assert learning["validation_nll"] == pytest.approx([sum(v) / 4 for v in nll])


# --- validation rows -----------------------------------------------------------------------------------


def validated(weights=None, **options):
    """The toy with 45 rows to train on and 15 to validate on."""
    parts = [pm.ArrayData(X[a:b], Y[a:b], batch_size=20) for a, b in ((0, 45), (45, 60), (60, 90))]
    train, validation, test = parts
    if weights is not None:
        train = pm.ArrayData(X[:45], Y[:45], batch_size=20, weights=weights)
    return Task("toy", [Split(train, test, validation, **options)], "categorical", 2)


def test_validation_rows_become_scores_that_the_page_does_not_show(tmp_path):
    found = run(tmp_path, validated(), seeds=[3])
    [replicate] = found.results[1].replicates
    posterior = pm.load_posterior(tmp_path / "pair", lambda: pm.models.MLP(3, 2, (4,)))
    expected = pm.evaluate(posterior, pm.ArrayData(X[45:60], Y[45:60]))["nll"]
    assert replicate["scores"]["validation_nll"] == pytest.approx(expected, rel=1e-6)
    assert "validation_nll" not in {column.key for column in found.shown_columns()}
    plain = run(tmp_path / "plain", classes(), seeds=[3]).results[1].replicates[0]["scores"]
    assert "validation_nll" not in plain


def test_samplers_train_on_validation_rows_and_are_not_judged_on_them(tmp_path):
    """They lose no rows; what they have learned from is not held out for them, nor calibrated on."""
    sampled = {"single": pm.methods.Single(), "hmc": pm.methods.HMC(num_chains=2, num_samples=3)}
    found = compare(
        validated(),
        lambda: pm.models.MLP(3, 2, (4,)),
        sampled,
        tmp_path,
        budget=8,
        judging=Judging(calibrate=True),
    )
    single, hmc = found.results
    assert (single.record["num_examples"], hmc.record["num_examples"]) == (45, 60)
    assert "validation_nll" in single.replicates[0]["scores"]
    assert "validation_nll" not in hmc.replicates[0]["scores"]
    assert single.calibrated[0].keys() >= {"nll", "temperature"}
    assert not hmc.calibrated
    assert [path.parent.name for path in tmp_path.glob("*/calibration.json")] == ["single"]
    verdict = verdict_of(found)
    assert (verdict.recommended.label, verdict.best.label) == ("single", "single")


def test_rows_that_are_put_back_keep_their_places_and_weights():
    weights = torch.arange(45.0)
    [split] = validated(weights).splits
    again = whole(split)
    assert again.validation is None
    assert torch.equal(again.train.inputs, X[:60])
    assert torch.equal(again.train.targets, Y[:60])
    assert torch.equal(again.train.weights, torch.cat([weights, torch.ones(15)]))
    assert again.test is split.test
    assert whole(validated().splits[0]).train.weights is None
    assert whole(again) is again


def test_holding_rows_out_never_touches_test_rows():
    """Whatever the share: test data are the same objects, and no row of them is trained or validated on."""
    task = classes()
    for share in (None, 0.1, 0.5):
        [split] = with_validation(task, share).splits
        assert split.test is task.splits[0].test
        seen = torch.cat([split.train.inputs, split.validation.inputs])
        assert sorted(seen[:, 0].tolist()) == sorted(X[:60, 0].tolist())  # every training row once
        assert not set(seen[:, 0].tolist()) & set(X[60:, 0].tolist())
        assert split.validation.num_examples == round(60 * (share or 0.15))
    own = validated()
    assert with_validation(own).splits[0] is own.splits[0]


def test_calibration_takes_validation_rows(tmp_path):
    with pytest.raises(InputError, match="To calibrate takes held-out rows, and toy has none"):
        run(tmp_path, judging=Judging(calibrate=True))
    assert list(tmp_path.iterdir()) == []


# --- what methods have in common -----------------------------------------------------------------------


def test_every_chain_has_the_same_epochs_where_they_are_equal(tmp_path):
    found = run(tmp_path, equal="epochs", budget=3, options={"budget": 3})
    assert [result.epochs for result in found.results] == [3, 3]
    assert [result.price["member_epochs"] for result in found.results] == [3, 6]  # pairs cost twice as much
    assert "3 epochs a chain" in found.title
    assert "budget 4 member-epochs" in run(tmp_path / "budget").title


# --- baselines -----------------------------------------------------------------------------------------


def with_baselines(folder, task=None, baselines=("prior", "logistic"), **options):
    return run(folder, task, baselines=baselines, **options)


def test_baselines_stand_below_the_methods_with_scores_of_their_own(tmp_path):
    found = with_baselines(tmp_path, validated())
    assert [row["method"] for row in found.rows()] == ["single", "pair", "prior", "logistic"]
    assert [row["baseline"] for row in found.rows()] == [False, False, True, True]
    assert [r.label for r in found.baselines] == ["prior", "logistic"]
    assert [r.label for r in found.methods] == ["single", "pair"]
    prior, logistic = found.baselines
    # Laplace's rule: one row more of each class.
    counts = torch.bincount(Y[:45], minlength=2).double()
    probabilities = (counts + 1) / (counts.sum() + 2)
    for replicate in prior.replicates:
        assert replicate["scores"]["nll"] == pytest.approx(
            -probabilities[Y[60:]].log().mean().item(), rel=1e-3
        )
        expected = -probabilities[Y[45:60]].log().mean().item()
        assert replicate["scores"]["validation_nll"] == pytest.approx(expected, rel=1e-5)
    assert logistic.summary("nll").mean < prior.summary("nll").mean  # a line divides the classes
    assert prior.price["member_epochs"] == 0
    assert prior.price["seconds"] > 0
    verdict = verdict_of(found)
    assert verdict.baseline.label == "logistic"
    assert verdict.recommended.label in ("single", "pair")
    stored = load_file(tmp_path / "logistic/predictions-1.safetensors")
    accuracy = (stored["mean"].argmax(-1) == stored["targets"]).double().mean().item()
    assert logistic.replicates[1]["scores"]["accuracy"] == pytest.approx(accuracy)


def test_baselines_are_fitted_once_and_again_where_their_rows_change(tmp_path, monkeypatch):
    first = with_baselines(tmp_path)
    fitted = []

    def refuse(name, *arguments, **options):
        fitted.append(name)
        raise RuntimeError("fitted again")

    module = importlib.import_module("polymode.application.comparison.compare")
    with monkeypatch.context() as patch:
        patch.setattr(module, "fit_baseline", refuse)
        again = with_baselines(tmp_path)
        assert again.rows() == first.rows()  # prices included
        for ours, theirs in zip(first.baselines, again.baselines, strict=True):
            assert ours.replicates[0]["curves"] == theirs.replicates[0]["curves"]
            torch.testing.assert_close(ours.replicates[0]["log_prob"], theirs.replicates[0]["log_prob"])
        assert fitted == []
        [split] = classes().splits
        wrong = replace(classes(), splits=[replace(split, test=pm.ArrayData(X[60:], 1 - Y[60:]))])
        with pytest.raises(RuntimeError, match="fitted again"):
            with_baselines(tmp_path, wrong)
        assert fitted == ["prior"]
    after = with_baselines(tmp_path, wrong)
    for old, new in zip(first.rows(), after.rows(), strict=True):
        assert new["accuracy"] == pytest.approx(1 - old["accuracy"])


def test_damaged_scores_of_a_baseline_are_made_again(tmp_path):
    first = with_baselines(tmp_path)
    path = tmp_path / "logistic/predictions-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.warns(UserWarning, match="judged again"):
        again = with_baselines(tmp_path)
    assert again.rows()[3]["nll"] == pytest.approx(first.rows()[3]["nll"], rel=1e-9)


def test_baselines_of_numbers_are_judged_in_the_units_of_the_targets(tmp_path):
    found = compare(
        Task("numbers", [numbers(50.0)], "gaussian", 1),
        lambda: pm.models.MLP(3, 1, (4,)),
        {"single": pm.methods.Single()},
        tmp_path,
        budget=2,
        baselines=["constant", "ridge"],
    )
    constant, ridge = found.baselines
    [split] = Task("numbers", [numbers(50.0)], "gaussian", 1).splits
    y = [part.targets.double() for part in (split.train, split.test)]
    law = torch.distributions.Normal(50 * y[0].mean(), 50 * y[0].std(correction=0))
    assert constant.summary("log_density").mean == pytest.approx(
        law.log_prob(50 * y[1]).mean().item(), rel=1e-4
    )
    assert constant.summary("rmse").mean == pytest.approx(
        50 * (y[1] - y[0].mean()).square().mean().sqrt().item(), rel=1e-4
    )
    assert ridge.summary("rmse").mean < 0.5 * constant.summary("rmse").mean


def test_baselines_that_do_not_suit_are_refused_before_training(tmp_path):
    with pytest.raises(InputError, match="Unknown baseline for the likelihood 'categorical' 'ridge'"):
        with_baselines(tmp_path, baselines=["ridge"])
    with pytest.raises(InputError, match="label of a method and of a baseline"):
        compare(
            classes(),
            lambda: pm.models.MLP(3, 2),
            {"prior": pm.methods.Single()},
            tmp_path,
            budget=1,
            baselines=["prior"],
        )
    assert list(tmp_path.iterdir()) == []


def test_baselines_that_are_left_out_are_said_to_be(tmp_path):
    stream = io.StringIO()
    few = pm.ArrayData(X[:3], torch.tensor([0, 1, 0]))
    found = with_baselines(tmp_path, Task("few", [Split(few, few)], "categorical", 2), reporter=Lines(stream))
    assert not found.baselines
    assert "prior: left out, baselines need at least 4 training rows, there are 3" in stream.getvalue()


def test_nothing_to_compare_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no methods to compare"):
        compare(classes(), lambda: pm.models.MLP(3, 2), {}, tmp_path, budget=1)
