"""Calibration on validation rows: train, evaluate and predict take it from a run's folder."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from command_line import polymode, the_line
from safetensors.torch import load_file

from polymode.application.cli.runs import StoredRun
from polymode.application.comparison import CALIBRATION_FILE
from polymode.storage import write_document

SMALL = ("--set", "model.hidden=[8]", "--quiet", "--epochs", "60")
# Networks that are trained for too long to be as sure as they should be, as no best epoch is kept.
SURE = ("--set", "single.keep=last", "--set", "all.optimizer.lr=0.05")
MOONS = ("--data", "two_moons", "--set", "data.num_train=100", "--set", "data.noise=0.5")
MANY = ("--validation", "0.4")
TRAIN = ("train", *MOONS, *SMALL, *SURE, *MANY, "--method", "single")
GAP = ("train", "--data", "gap_regression", *SMALL, *MANY, "--method", "single")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs that differ in --calibrate only, and one of a regression."""
    folder = tmp_path_factory.mktemp("calibrated")
    polymode(*TRAIN, "--run", "plain", cwd=folder)
    polymode(*TRAIN, "--run", "calibrated", "--calibrate", cwd=folder)
    polymode(*GAP, "--run", "numbers", "--calibrate", cwd=folder)
    return folder


def judged(folder, run, *options):
    said = json.loads(polymode("evaluate", run, "--json", *options, cwd=folder).stdout)
    return said["posteriors"][0], said.get("calibrated", [None])[0]


def learned(folder, run="calibrated"):
    [config] = json.loads((folder / run / CALIBRATION_FILE).read_text())["likelihoods"]
    return config


def test_the_temperature_is_the_best_there_is_on_the_validation_rows(runs):
    """Against all temperatures of a fine grid, on logits of the one member."""
    stored = StoredRun.open(str(runs / "plain"))
    validation = stored.own_task.splits[0].validation
    assert validation.num_examples == 40
    [(_, logits, _)] = list(stored.posterior(0).outputs(validation.inputs))
    logits = logits[0].double()

    def nll(temperature):
        return torch.nn.functional.cross_entropy(logits / temperature, validation.targets).item()

    temperature = learned(runs)["temperature"]
    grid = np.exp(np.linspace(-3, 3, 6001))  # steps of a thousandth
    assert temperature == pytest.approx(grid[np.argmin([nll(t) for t in grid])], rel=2e-3)
    assert temperature > 1.2  # it was too sure


def test_evaluate_shows_both_and_scores_of_the_tempered_outputs(runs):
    before, after = judged(runs, "calibrated")
    plain, none = judged(runs, "plain")
    assert none is None
    # Calibration changes nothing but what is said with it. The two runs hold the same networks.
    assert before == plain
    stored = StoredRun.open(str(runs / "plain"))
    test = stored.own_task.splits[0].test
    [(_, logits, _)] = list(stored.posterior(0).outputs(test.inputs))
    tempered = logits[0].double() / learned(runs)["temperature"]
    expected = torch.nn.functional.cross_entropy(tempered, test.targets).item()
    assert after["nll"] == pytest.approx(expected, rel=1e-5)
    assert after["nll"] < before["nll"]
    assert after["accuracy"] == before["accuracy"]
    shown = polymode("evaluate", "calibrated", cwd=runs).stdout
    assert "calibrated" in shown.splitlines()[1] + shown.splitlines()[2]
    [line] = [line for line in shown.splitlines() if line.strip().startswith("NLL")]
    assert line.split()[1:3] == [f"{before['nll']:.4f}", f"{after['nll']:.4f}"]
    polymode("evaluate", "calibrated", "--out", "s.json", cwd=runs)
    assert json.loads((runs / "s.json").read_text()) == [before | {"calibrated": after}]


def test_training_says_both_and_keeps_them(runs):
    said = polymode(*TRAIN, "--run", "calibrated", "--calibrate", cwd=runs).stdout  # reads it back
    before, after = judged(runs, "calibrated")
    [line] = [line for line in said.splitlines() if line.strip().startswith("NLL")]
    assert line.split()[1:3] == [f"{before['nll']:.4f}", f"{after['nll']:.4f}"]
    [replicate] = json.loads((runs / "calibrated/scores.json").read_text())["replicates"]
    assert replicate["scores"]["nll"] == before["nll"]
    assert replicate["calibrated"]["nll"] == pytest.approx(after["nll"], rel=1e-6)
    assert replicate["calibrated"]["temperature"] == learned(runs)["temperature"]


def predicted(folder, run, *options):
    said = polymode("predict", run, "two_moons", "--json", *options, cwd=folder).stdout
    return {name: np.array(values) for name, values in json.loads(said).items()}


def test_predictions_are_calibrated_where_the_run_was(runs):
    plain, calibrated = predicted(runs, "plain"), predicted(runs, "calibrated")
    again = predicted(runs, "calibrated", "--calibrate")
    temperature = learned(runs)["temperature"]
    for name in calibrated:
        assert (calibrated[name] == again[name]).all()
    assert (plain["label"] == calibrated["label"]).all()
    # Of one member log odds are divided by the temperature.
    odds = [np.log(found["p_upper"] / found["p_lower"]) for found in (plain, calibrated)]
    sure = np.abs(odds[0]) < 10  # where single precision tells them
    np.testing.assert_allclose(odds[1][sure], odds[0][sure] / temperature, rtol=1e-2, atol=1e-4)


def test_a_run_that_was_not_calibrated_is_when_it_predicts(runs):
    now, before = predicted(runs, "plain", "--calibrate"), predicted(runs, "calibrated")
    np.testing.assert_allclose(now["confidence"], before["confidence"], rtol=1e-4)
    assert not (runs / "plain" / CALIBRATION_FILE).exists()  # nothing is changed by it


def test_intervals_of_numbers_cover_what_they_should_on_the_validation_rows(runs):
    """Split conformal prediction: of n scores, the ⌈(n + 1) 0.9⌉-th smallest is the end of the interval."""
    stored = StoredRun.open(str(runs / "numbers"))
    ready = stored.preprocessing(0)
    validation = stored.own_task.splits[0].validation
    raw = ready.raw(validation.inputs).flatten().tolist()
    with (runs / "validation.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["x"], *([value] for value in raw)])
    np.savez(runs / "validation.npz", x=np.array(raw)[:, None])
    said = polymode("predict", "numbers", "validation.npz", "--json", cwd=runs).stdout
    found = json.loads(said)
    y = (validation.targets * ready.target_scale + ready.target_shift).flatten().numpy()
    inside = (y >= np.array(found["q0.05"]) - 1e-4) & (y <= np.array(found["q0.95"]) + 1e-4)
    number = len(y)
    assert inside.sum() == int(np.ceil((number + 1) * 0.9))
    before, after = judged(runs, "numbers")
    assert after["log_density"] != before["log_density"]
    assert after["rmse"] == pytest.approx(before["rmse"], rel=1e-5)  # means stay


def test_what_cannot_be_calibrated_is_refused(runs, tmp_path):
    all_rows = ("--validation", "none")
    few = ("train", *MOONS, "--quiet", "--epochs", "1", "--method", "single")
    refused = polymode(*few, *all_rows, "--calibrate", "--run", "no", cwd=tmp_path, code=1)
    assert "To calibrate takes held-out rows, and two_moons has none" in the_line(refused)
    assert not (tmp_path / "no").exists()
    polymode(*few, *all_rows, "--run", "blind", cwd=tmp_path)
    refused = polymode("predict", "blind", "two_moons", "--calibrate", cwd=tmp_path, code=2)
    assert "--calibrate takes validation rows, and blind held none out" in the_line(refused)
    polymode("predict", "blind", "two_moons", "--json", cwd=tmp_path)  # without it all is well
    refused = polymode(*few, "--method", "hmc", "--calibrate", "--run", "no", cwd=tmp_path, code=2)
    assert "hmc is trained on all of them" in the_line(refused)


def refused(folder, words):
    """Every command that takes the calibration refuses it in a line."""
    for command in (("predict", "run", "two_moons"), ("evaluate", "run")):
        line = polymode(*command, "--quiet", cwd=folder, code=1).stderr.strip().splitlines()[-1]
        assert "calibration.json" in line
        assert words in line


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1", "2"),
        lambda text: "",
        lambda text: "3",
    ],
)
def test_a_damaged_calibration_is_refused(runs, tmp_path, change):
    shutil.copytree(runs / "calibrated", tmp_path / "run")
    path = tmp_path / "run" / CALIBRATION_FILE
    path.write_text(change(path.read_text()))
    refused(tmp_path, "")


@pytest.mark.parametrize(
    ("likelihoods", "words"),
    [
        ([{"kind": "bernoulli", "temperature": 2.0}], "it is about another likelihood than the run's"),
        (["student_t"], "it is about another likelihood than the run's"),
        ([], "is not as polymode writes it"),
        (3, "is damaged"),
        ([3], "is damaged"),
        ([{"kind": "categorical", "temperature": -1.0}], "is damaged: temperature must be a positive number"),
        ([{"kind": "categorical", "temperatrue": 2.0}], "is damaged: Unknown option"),
        ([{"kind": "categorical", "temperature": "hot"}], "is damaged: temperature"),
    ],
)
def test_a_calibration_of_something_else_is_refused(runs, tmp_path, likelihoods, words):
    shutil.copytree(runs / "calibrated", tmp_path / "run")
    write_document(tmp_path / "run" / CALIBRATION_FILE, "calibration", {"likelihoods": likelihoods})
    refused(tmp_path, words)


def test_comparisons_show_scores_before_and_after(tmp_path):
    compare = ("compare", *MOONS, "--set", "model.hidden=[8]", "--methods", "single", "--baselines", "none")
    compare += ("--budget", "10", "--seeds", "1", "--run", "out", "--calibrate")
    said = polymode(*compare, cwd=tmp_path).stdout
    assert "before and after calibration on validation rows" in said
    [replicate] = json.loads((tmp_path / "out/single/scores.json").read_text())["replicates"]
    before, after = replicate["scores"]["nll"], replicate["calibrated"]["nll"]
    assert f"{before:.4f} → {after:.4f}" in said
    assert f"{before:.4f} → {after:.4f}" in (tmp_path / "out/report.html").read_text()
    logits = load_file(tmp_path / "out/single/predictions-0.safetensors")
    assert -logits["log_prob"].double().mean().item() == pytest.approx(before, rel=1e-5)
    refused = polymode(*compare, "--validation", "none", cwd=tmp_path, code=1)
    assert "To calibrate takes held-out rows" in refused.stderr
