"""Every command from end to end; those that are about the process itself in one of their own."""

import csv
import html
import http.server
import json
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import begin, polymode, polymode_process, the_line
from safetensors.torch import load_file

import polymode as pm
from polymode.judging.reference import Reference
from polymode.storage import read_document

ROOT = Path(__file__).parents[3]
UCI = ROOT.parent / "shared/data/uci"
SMALL = ["--set", "data.num_train=100", "--set", "model.hidden=[8]"]
MOONS = ["--data", "two_moons", *SMALL]
ALL_ROWS = ["--validation", "none"]
ALONE = [*ALL_ROWS, "--baselines", "none"]  # of comparisons that are about the methods


# --- reference ---------------------------------------------------------------------------------------


GAP = ["--data", "gap_regression", "--set", "model.hidden=[4]", "--likelihood", "fixed_gaussian"]


WIDE = ["--set", "hmc.prior_std=1.0", "--set", "hmc.num_samples=40", "--passes", 2500, "--run", "hmc"]
JUDGED = [*MOONS, *ALONE, "--budget", 20, "--seeds", 2]
JUDGED += ["--methods", "single,hmc", "--set", "all.prior_std=1.0", "--set", "hmc.num_samples=20"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A folder with a reference, r.npz, and what the command said that made it."""
    folder = tmp_path_factory.mktemp("sampled")
    return folder, polymode("reference", *MOONS, *WIDE, "--out", "r.npz", cwd=folder)


@pytest.fixture(scope="module")
def judged(sampled):
    """That folder with a comparison in out/, judged without the reference and then by it."""
    folder, _ = sampled
    plain = polymode("compare", *JUDGED, "--run", "out", cwd=folder)
    page = (folder / "out/report.html").read_text()
    by_reference = polymode("compare", *JUDGED, "--run", "out", "--reference", "r.npz", cwd=folder)
    return folder, (plain.stdout, page), by_reference


def floor_of(folder):
    """The reference's noise floor, and how it is told."""
    floor = Reference.load(folder / "r.npz").noise_floor
    return floor, f"agreement {floor['agreement']:.4f}, TV {floor['total_variation']:.4f}"


def beside(folder):
    return f"noise floor of the reference: {floor_of(folder)[1]} between halves of its own chains"


def test_a_reference_of_classes_is_made_with_a_verdict_and_its_noise_floor(sampled):
    folder, made = sampled
    assert "fit as a reference   yes" in made.stdout
    assert "120" in made.stdout  # samples of three chains
    floor, told = floor_of(folder)
    assert 0.5 < floor["agreement"] <= 1
    assert 0 < floor["total_variation"] < 0.2
    assert told in made.stdout


def test_a_reference_is_sampled_from_all_training_rows(sampled):
    """By default commands hold rows out; a posterior is that of all of them."""
    folder, _ = sampled
    record = read_document(folder / "hmc/posterior-0/posterior.json", "posterior")["record"]
    assert record["num_examples"] == 100


def test_a_reference_is_shown(sampled):
    folder, _ = sampled
    shown = polymode("reference", "--show", "r.npz", cwd=folder).stdout
    assert "1000 × 2" in shown
    assert "two_moons" in shown
    assert floor_of(folder)[1] in " ".join(shown.split())


def test_the_same_reference_is_not_sampled_again(sampled):
    folder, _ = sampled
    again = polymode("reference", *MOONS, *WIDE, "--out", "s.npz", cwd=folder)
    assert "read back" in again.stderr
    first, second = (np.load(folder / name)["probabilities"] for name in ("r.npz", "s.npz"))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_a_comparison_without_a_reference_has_no_word_of_one(judged):
    _, (said, page), _ = judged
    assert "TV" not in said
    assert "halves" not in said + page


def test_a_comparison_is_judged_again_by_a_reference(judged):
    folder, _, compared = judged
    assert "agreement ↑" in compared.stdout
    assert "TV ↓" in compared.stdout
    assert beside(folder) in compared.stdout
    assert beside(folder)[1:] in html.unescape((folder / "out/report.html").read_text())  # a sentence there
    assert json.loads((folder / "out/results.json").read_text())["noise_floor"] == floor_of(folder)[0]
    with (folder / "out/replicates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(0 < float(row["agreement"]) <= 1 and 0 < float(row["total_variation"]) < 1 for row in rows)


def test_a_run_is_evaluated_by_a_reference(judged):
    folder, _, _ = judged
    evaluated = polymode("evaluate", "out/single", "--reference", "r.npz", cwd=folder)
    assert "total variation distance to the reference" in evaluated.stdout
    assert beside(folder) in evaluated.stdout
    foreign = polymode("evaluate", "out/single", "--reference", "r.npz:probabilities", cwd=folder)
    assert "the reference's own noise floor is not known" in foreign.stdout


def test_a_reference_about_other_points_is_refused_before_training(sampled):
    folder, _ = sampled
    other = [*JUDGED, "--set", "data.noise=0.5", "--run", "other", "--reference", "r.npz"]
    refused = polymode("compare", *other, cwd=folder, code=1)
    assert "about other test points" in refused.stderr
    assert not (folder / "other").exists()


def test_a_sample_that_has_not_mixed_is_no_reference_unless_forced(tmp_path):
    short = ["--passes", 12, "--run", "hmc"]
    refused = polymode("reference", *GAP, *short, cwd=tmp_path, code=1)
    assert "This sample is no reference" in refused.stderr
    assert "fit as a reference" in refused.stdout
    assert not list(tmp_path.glob("**/reference.npz"))
    forced = polymode("reference", *GAP, *short, "--force", cwd=tmp_path)
    assert "hmc/reference.npz" in forced.stdout
    shown = polymode("reference", "--show", "hmc/reference.npz", cwd=tmp_path).stdout
    assert "NO: " in shown
    compared = polymode(
        "compare",
        *GAP,
        "--methods",
        "anchored",
        "--baselines",
        "none",
        "--seeds",
        1,
        "--budget",
        10,
        "--reference",
        "hmc/reference.npz",
        cwd=tmp_path,
        expected_warnings=True,
    )
    assert "was written by force, it is not fit as a reference" in compared.stderr
    assert "W1 ↓" in compared.stdout
    assert "W2 ↓" in compared.stdout


def test_a_reference_is_made_of_microcanonical_chains(tmp_path):
    """At an energy variance that is fit to judge by; short chains are told from good ones."""
    short = ["--method", "microcanonical", "--passes", 120, "--run", "mc"]
    short += ["--set", "microcanonical.num_samples=5"]
    refused = polymode("reference", *GAP, *short, cwd=tmp_path, code=1, expected_warnings=True)
    assert "This sample is no reference" in refused.stderr
    assert "Microcanonical Langevin dynamics" in refused.stdout
    for row in ("energy variance", "of all chains after warm-up", "of all steps, which were undone"):
        assert row in refused.stdout
    assert "acceptance" not in refused.stdout
    forced = polymode("reference", *GAP, *short, "--force", cwd=tmp_path, expected_warnings=True)
    assert "mc/reference.npz" in forced.stdout
    assert "read back" in forced.stderr  # nothing is sampled again
    about = Reference.load(tmp_path / "mc/reference.npz").about
    assert (about["method"]["name"], about["method"]["energy_variance"]) == ("microcanonical", 5e-4)
    assert (about["num_samples"], about["member_epochs"]) == (20, 480)
    shown = " ".join(polymode("reference", "--show", "mc/reference.npz", cwd=tmp_path).stdout.split())
    assert "sampler microcanonical, begun at optima of a descent of 39 epochs" in shown
    assert "NO: " in shown


def test_a_reference_shows_its_sampler_and_its_start(sampled):
    folder, made = sampled
    assert "begun at" in made.stdout
    shown = " ".join(polymode("reference", "--show", "r.npz", cwd=folder).stdout.split())
    assert "sampler hmc, begun at optima of a descent of 100 epochs" in shown


def test_references_need_samples_of_several_chains_whatever_the_sampler(tmp_path):
    for options in (["--passes", 9], ["--set", "microcanonical.num_chains=1"]):
        refused = polymode("reference", "--method", "microcanonical", *GAP, *options, cwd=tmp_path, code=2)
        assert "raise microcanonical.num_chains, microcanonical.num_samples or --passes" in the_line(refused)
    seeds = polymode("reference", "--method", "microcanonical", "--seeds", 2, cwd=tmp_path, code=2)
    assert "--set microcanonical.num_chains=4" in the_line(seeds)


# --- compare -----------------------------------------------------------------------------------------


def test_a_method_that_is_of_no_use_at_the_budget_says_what_it_takes(tmp_path):
    result = polymode(
        *("compare", *MOONS, *ALONE, "--seeds", 1, "--budget", 4, "--methods", "single,microcanonical"),
        *("--set", "microcanonical.passes=200", "--set", "microcanonical.num_chains=2", "--json"),
        cwd=tmp_path,
    )
    single, sampler = json.loads(result.stdout)["rows"]
    assert (single["member_epochs"], sampler["member_epochs"]) == (4, 400)
    said = (
        "microcanonical: it takes 400 member-epochs, the least that it is of use with, not 4 as others would"
    )
    assert said in result.stderr


# What is measured may be another backend in the run that is repeated.
COMPARED = ["compare", *MOONS, *ALONE, "--backend", "loop", "--seeds", 2]
TWO = [*COMPARED, "--methods", "single,deep_ensemble", "--budget", 10, "--run", "out"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A folder with a comparison of two methods in out/, and what the command said."""
    folder = tmp_path_factory.mktemp("compared")
    return folder, polymode_process(*TWO, cwd=folder)


def rows_of(folder):
    return {row["method"]: row for row in json.loads((folder / "out/results.json").read_text())["rows"]}


def replicates_of(folder):
    with (folder / "out/replicates.csv").open() as file:
        return list(csv.DictReader(file))


def test_compare_says_what_it_does(compared):
    _, said = compared
    assert "gain over single, and price" in said.stdout
    assert "out/report.html" in said.stdout
    assert "two_moons: 2 classes (upper, lower) of 'moon', 100 to train on, 1000 to test on" in said.stderr
    assert "single: begins, 10 epochs" in said.stderr  # plain lines, as there is no terminal
    assert "\x1b" not in said.stdout + said.stderr


def test_methods_are_compared_at_one_price(compared):
    rows = rows_of(compared[0])
    assert rows["single"]["member_epochs"] == rows["deep_ensemble"]["member_epochs"] == 10
    assert rows["deep_ensemble"]["epochs"] == 2
    one = 2 * 8 + 8 + 8 * 2 + 2
    assert (rows["single"]["parameters"], rows["deep_ensemble"]["parameters"]) == (one, 5 * one)


def test_tables_of_a_comparison_are_means_and_errors_of_its_replicates(compared):
    folder, _ = compared
    replicates = replicates_of(folder)
    assert [(r["method"], r["seed"]) for r in replicates] == [
        (method, seed) for method in ("single", "deep_ensemble") for seed in ("0", "1")
    ]
    with (folder / "out/results.csv").open() as file:
        table = {row["method"]: row for row in csv.DictReader(file)}
    for method, row in rows_of(folder).items():
        values = [float(r["nll"]) for r in replicates if r["method"] == method]
        assert row["nll"] == pytest.approx(np.mean(values))
        # The seeds have the same test rows: what these leave open does not become less by more seeds.
        files = [folder / f"out/{method}/predictions-{index}.safetensors" for index in range(2)]
        rows = [load_file(file)["log_prob"].double().numpy() for file in files]
        by_rows = np.mean([np.var(each, ddof=1) / len(each) for each in rows])
        assert row["nll_se"] == pytest.approx(np.sqrt(np.var(values, ddof=1) / 2 + by_rows), rel=1e-4)
        assert float(table[method]["nll"]) == pytest.approx(np.mean(values))


def test_the_same_comparison_is_read_back(compared):
    folder, said = compared
    manifest = folder / "out/single/manifest.json"
    before = manifest.stat().st_mtime_ns
    again = polymode(*TWO, "--quiet", cwd=folder)
    assert again.stdout.splitlines()[3:5] == said.stdout.splitlines()[3:5]
    assert again.stderr == ""
    assert manifest.stat().st_mtime_ns == before


def test_another_method_joins_a_comparison(compared, tmp_path):
    shutil.copytree(compared[0], tmp_path, dirs_exist_ok=True)
    pair = [*COMPARED, "--budget", 10, "--run", "out", "--methods", "pair=deep_ensemble", "--json", "--quiet"]
    rows = json.loads(polymode(*pair, cwd=tmp_path).stdout)["rows"]
    assert [row["method"] for row in rows] == ["single", "deep_ensemble", "pair"]
    assert rows[2]["nll"] == rows[1]["nll"]  # the same seeds under another label


def test_another_budget_is_another_comparison(compared):
    other = polymode(*COMPARED, "--budget", 20, "--run", "out", "--quiet", cwd=compared[0], code=1)
    assert "belongs to another comparison: its budget is 10.0, now it is 20.0" in the_line(other)


def test_the_manifest_of_a_comparison_is_a_config(compared):
    """Without --run, the options would lead to a folder of their own."""
    folder, _ = compared
    config = ["--config", "out/comparison.json", "--json", "--run", "two", "--quiet"]
    repeated = json.loads(polymode("compare", *config, cwd=folder).stdout)["rows"]
    assert {row["method"]: row["nll"] for row in repeated} == {
        method: row["nll"] for method, row in rows_of(folder).items()
    }


def test_the_manifest_of_a_run_is_a_config_of_train(compared):
    """It leads to the very same weights."""
    folder, _ = compared
    config = ["--config", "out/deep_ensemble/manifest.json", "--run", "three", "--quiet"]
    polymode("train", *config, cwd=folder)
    weights = "posterior-1/members-00000.safetensors"
    assert (folder / "three" / weights).read_bytes() == (folder / "out/deep_ensemble" / weights).read_bytes()


def test_compare_all_runs_every_method_that_competes(tmp_path):
    from polymode.methods import COMPARED_WHERE_SMALL, METHODS

    result = polymode(
        *("compare", *MOONS, "--methods", "all", "--budget", 10, "--seeds", 1, "--json", *ALONE),
        *("--set", "sequential_anchored.walk.step=3"),
        cwd=tmp_path,
    )
    found = [row["method"] for row in json.loads(result.stdout)["rows"]]
    others = ("tunnel", *COMPARED_WHERE_SMALL)  # it begins at given networks; they have a budget of their own
    assert found == [name for name, method in METHODS.items() if not method.reference and name not in others]
    for line in result.stderr.splitlines():
        assert isinstance(json.loads(line), dict)


@pytest.mark.skipif(not UCI.is_dir(), reason="the UCI collection is not here")
def test_compare_trains_all_splits_of_a_uci_set_in_one_stacked_run(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/uci").symlink_to(UCI)
    result = polymode(
        *("compare", "--data", "uci-yacht", "--methods", "deep_ensemble", "--budget", 10, *ALONE),
        *("--run", "out", "--json", "--quiet"),
        cwd=tmp_path,
        POLYMODE_DATA=str(tmp_path / "data"),
    )
    [row] = json.loads(result.stdout)["rows"]
    assert row["replicates"] == 20
    manifest = json.loads((tmp_path / "out/deep_ensemble/manifest.json").read_text())
    assert len(manifest["posteriors"]) == 20
    events = (tmp_path / "out/deep_ensemble/events.jsonl").read_text().splitlines()
    members = next(json.loads(line) for line in events if '"members"' in line)
    assert len(members["labels"]) == 100  # twenty splits of five members step side by side
    assert manifest["record"]["backend"] == "vmap"
    # In the target's own units: the first epochs leave about its standard deviation, 15.
    assert 5 < row["rmse"] < 25


def test_chains_may_have_the_same_epochs_instead_of_the_same_price(tmp_path):
    common = (
        "compare",
        *MOONS,
        *ALONE,
        "--methods",
        "single,deep_ensemble",
        "--seeds",
        1,
        "--json",
        "--quiet",
    )
    equal = (*common, "--equal", "epochs")
    rows = json.loads(polymode(*equal, "--epochs", 3, cwd=tmp_path).stdout)["rows"]
    assert [(row["epochs"], row["member_epochs"]) for row in rows] == [(3, 3), (3, 15)]
    rows = json.loads(polymode(*equal, "--budget", 20, cwd=tmp_path).stdout)["rows"]
    assert [(row["epochs"], row["member_epochs"]) for row in rows] == [(4, 4), (4, 20)]  # a fifth of it


def test_small_tables_are_divided_several_times_and_stand_beside_baselines(tmp_path):
    regression_table(tmp_path / "train.csv", rows=60)
    common = ("compare", "--data", "train.csv", "--set", "data.target=price", "--likelihood", "gaussian")
    common += ("--methods", "single", "--budget", 5, "--json", "--quiet")
    said = json.loads(polymode(*common, "--baselines", "constant,ridge", cwd=tmp_path).stdout)
    assert [(row["method"], row["replicates"]) for row in said["rows"]] == [
        ("single", 3),
        ("constant", 3),
        ("ridge", 3),
    ]
    assert said["rows"][2]["rmse"] < 5 < 25 < said["rows"][1]["rmse"]  # a line with noise of 1, spread by 50
    assert said["verdict"]["baseline"] == "ridge"
    one = json.loads(polymode(*common, "--set", "data.splits=1", *ALONE, cwd=tmp_path).stdout)
    assert [row["replicates"] for row in one["rows"]] == [3]  # seeds
    assert "verdict" not in one
    line = polymode(*common, "--baselines", "rigde", cwd=tmp_path, code=2).stderr.splitlines()[-1]
    assert "Unknown baseline 'rigde'. Did you mean 'ridge'" in line


# --- interruptions -----------------------------------------------------------------------------------

LONG = [*MOONS, *ALONE, "--methods", "deep_ensemble", "--budget", "4500", "--seeds", "1", "--backend", "loop"]


def wait_for_epochs(path, count, process):
    began = time.monotonic()
    while time.monotonic() - began < 120:
        if path.exists() and path.read_text().count('"epoch",') >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    pytest.fail("no epochs were logged")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    polymode("compare", *LONG, "--run", "out", "--quiet", cwd=folder)
    return (folder / "out/deep_ensemble/posterior-0/members-00000.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_cut_goes_on_to_the_same_bits(tmp_path, undisturbed, number):
    process = begin("compare", *LONG, "--run", "out", cwd=tmp_path)
    run = tmp_path / "out/deep_ensemble"
    wait_for_epochs(run / "events.jsonl", 20, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "Interrupted. What was trained is kept; the same command goes on with it" in errors
        assert "polymode compare --data two_moons" in errors
        assert "Traceback" not in errors
    assert json.loads((run / "manifest.json").read_text())["status"] == "running"
    logged = (run / "events.jsonl").read_text().count('"epoch",')
    polymode("compare", *LONG, "--run", "out", "--quiet", cwd=tmp_path)
    assert (run / "posterior-0/members-00000.safetensors").read_bytes() == undisturbed
    if number != signal.SIGKILL:  # nothing was done twice
        assert logged < 900 == (run / "events.jsonl").read_text().count('"epoch",')


def test_a_termination_counts_where_ctrl_c_is_ignored(tmp_path):
    """As for a job that a script has put into the background."""

    def in_background():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = begin("compare", *LONG, "--run", "out", cwd=tmp_path, preexec_fn=in_background)
    wait_for_epochs(tmp_path / "out/deep_ensemble/events.jsonl", 20, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Interrupted" in errors
    assert (tmp_path / "out/deep_ensemble/checkpoint/checkpoint.json").exists()


# --- train, evaluate, predict ------------------------------------------------------------------------

OWN_CODE = """
import torch
from torch import nn
import polymode as pm

def build(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))

def load(shift=0.0):
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0)) + shift
    y = (x[:, 0] > shift).long()
    return {"train": pm.ArrayData(x[:80], y[:80], batch_size=20), "test": (x[80:], y[80:]), "ood": x + 50}

def new():
    return torch.zeros(5, 3)

def no_network():
    return 3
"""


def test_the_users_own_model_and_data(tmp_path):
    (tmp_path / "shop.py").write_text(OWN_CODE)
    own = [
        "--model",
        "shop:build",
        "--data",
        "shop:load",
        "--set",
        "model.width=6",
        "--set",
        "data.shift=0.5",
    ]
    result = polymode(
        *("train", *own, "--method", "deep_ensemble", "--epochs", 5, "--run", "out"),
        *("--set", "deep_ensemble.num_members=2", "--tensorboard"),
        cwd=tmp_path,
    )
    assert "OOD AUROC" in result.stdout
    assert list((tmp_path / "out/tensorboard").glob("events.out.tfevents.*"))
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["options"]["set"] == {"model": {"width": 6}, "data": {"shift": 0.5}}
    assert manifest["method"]["num_members"] == 2
    assert manifest["signature"]["network"]["0.weight"] == ["float32", 6, 3]
    stored = json.loads((tmp_path / "out/scores.json").read_text())["replicates"][0]["scores"]
    for trusted in (own[:4], ["--trust"]):  # own data named again are those of the run, OOD data included
        judged = polymode("evaluate", "out", "--json", *trusted, cwd=tmp_path).stdout
        assert json.loads(judged)["posteriors"][0] == stored
    binned = polymode(
        "evaluate", "out", "--trust", "--bins", 4, "--bin-min-count", 5, "--json", cwd=tmp_path
    ).stdout
    predictions = load_file(tmp_path / "out/predictions-0.safetensors")
    expected = pm.metrics.ece(predictions["mean"], predictions["targets"], 4, min_count=5)
    assert json.loads(binned)["posteriors"][0]["ece"] == pytest.approx(expected)
    predict = ("predict", "out", "shop:new", "--model", "shop:build")
    predicted = polymode_process(*predict, cwd=tmp_path).stdout.splitlines()
    assert predicted[0] == "label,confidence,entropy,mutual_information,p_0,p_1"
    assert len(predicted) == 6
    assert len(set(predicted[1:])) == 1  # the same example five times

    bad = polymode(
        "train", "--model", "shop:no_network", "--data", "shop:load", "--quiet", cwd=tmp_path, code=1
    )
    assert "shop:no_network returned a int: it must return an nn.Module" in the_line(bad)
    bad = polymode("train", "--model", "shop:biuld", "--data", "shop:load", cwd=tmp_path, code=2)
    assert "Unknown name in shop 'biuld'. Did you mean 'build'" in the_line(bad)


def regression_table(path, rows=200, target=True):
    generator = np.random.RandomState(0)
    x = generator.randn(rows, 2) * [10, 0.1] + [100, -3]
    y = 1000 + 50 * (x[:, 0] - 100) / 10 + generator.randn(rows)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["price", "width", "height"][0 if target else 1 :])
        for (a, b), t in zip(x, y, strict=True):
            writer.writerow(([t] if target else []) + [a, b])
    return x, y


def test_a_table_of_ones_own_from_training_to_predictions_in_its_units(tmp_path):
    _, y = regression_table(tmp_path / "train.csv")
    regression_table(tmp_path / "new.csv", target=False)
    polymode(
        *("train", "--data", "train.csv", "--set", "data.target=price", "--epochs", 120, "--run", "out"),
        *("--set", "all.optimizer.lr=0.02", "--set", "deep_ensemble.num_members=3"),
        cwd=tmp_path,
    )
    result = polymode("predict", "out", "new.csv", "--out", "p.csv", "--quantiles", "0.1,0.9", cwd=tmp_path)
    names = "row, mean, std, member_std, q0.1, q0.9, strangeness, unlike"
    assert f"200 predictions in p.csv: {names}" in result.stdout
    with (tmp_path / "p.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if k != "unlike"} for row in csv.DictReader(file)]
    error = np.array([row["mean"] for row in rows]) - y
    assert np.sqrt(np.mean(error**2)) < 10  # the target spreads by 50 around 1000
    for row in rows:
        assert row["q0.1"] < row["mean"] < row["q0.9"]
        assert 0 <= row["member_std"] <= row["std"]
    polymode("predict", "out", "new.csv", "--out", "p.npz", cwd=tmp_path)
    with np.load(tmp_path / "p.npz") as arrays:
        np.testing.assert_allclose(arrays["mean"], [row["mean"] for row in rows], rtol=1e-5)
    judged = polymode("evaluate", "out", "--data", "train.csv", "--out", "s.json", "--json", cwd=tmp_path)
    [scores] = json.loads(judged.stdout)["posteriors"]
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-3)
    assert json.loads((tmp_path / "s.json").read_text()) == [scores]
    # The same rows through a function of one's own: prepared as the run was, not by themselves.
    (tmp_path / "own.py").write_text(
        "from polymode.application.datasets.loading import load_task\n"
        "def load():\n"
        "    return load_task('train.csv', {'target': 'price', 'test_share': 0.5})\n"
    )
    other = polymode("evaluate", "out", "--data", "own:load", "--json", cwd=tmp_path)
    [through] = json.loads(other.stdout)["posteriors"]
    assert through["rmse"] == pytest.approx(scores["rmse"], rel=0.3)
    assert through["log_density"] == pytest.approx(scores["log_density"], abs=0.3)
    # A table that has grown is divided otherwise: its test rows may have been trained on.
    with (tmp_path / "train.csv").open("a") as file:
        file.write("1000,100,-3\n")
    changed = polymode("evaluate", "out", cwd=tmp_path, code=1)
    assert "train.csv has changed since the run was trained on it" in changed.stderr.splitlines()[-1]
    # The network does not need the training data any more.
    (tmp_path / "train.csv").unlink()
    polymode("predict", "out", "new.csv", cwd=tmp_path)


def test_predictions_carry_the_rows_and_columns_of_the_table(tmp_path):
    rows = "".join(f"{i % 7},{i % 5},{3 * (i % 7)}.5\n" for i in range(60))
    (tmp_path / "train.csv").write_text("size,age,price\n" + rows)
    (tmp_path / "new.csv").write_text('id,size,name,age\n007,3,Ann,2\n,,,\n\n010,1,"B, C",2\n011,3,,2\n')
    polymode("train", "--data", "train.csv", "--epochs", 3, "--run", "out", "--quiet", cwd=tmp_path)

    def predicted(*options):
        polymode("predict", "out", "new.csv", *options, "--out", "p.csv", cwd=tmp_path)
        with (tmp_path / "p.csv").open() as file:
            return list(csv.DictReader(file))

    plain, kept = predicted(), predicted("--keep", "id,name")
    found = ["mean", "std", "member_std", "q0.05", "q0.95", "strangeness", "unlike"]
    assert list(plain[0]) == ["row", *found]
    assert list(kept[0]) == ["row", "id", "name", *found]
    # Empty rows are not predicted, and do not shift the others.
    assert [(row["row"], row["id"], row["name"]) for row in kept] == [
        ("1", "007", "Ann"),
        ("4", "010", "B, C"),
        ("5", "011", ""),
    ]
    assert [row["mean"] for row in kept] == [row["mean"] for row in plain]
    assert kept[0]["mean"] == kept[2]["mean"] != kept[1]["mean"]
    said = polymode("predict", "out", "new.csv", "--out", "p.npz", "--keep", "size, id", cwd=tmp_path).stdout
    assert "3 predictions in p.npz: row, size, id, mean" in said
    assert "(counted from 1)" in said
    with np.load(tmp_path / "p.npz") as arrays:
        assert arrays["id"].tolist() == ["007", "010", "011"]
    wrong = polymode("predict", "out", "new.csv", "--keep", "nmae", cwd=tmp_path, code=2)
    assert "Unknown column to keep of new.csv 'nmae'. Did you mean 'name'" in the_line(wrong)
    for name in ("row", "mean"):
        (tmp_path / "new.csv").write_text(f"{name},size,age\n1,3,2\n")
        wrong = polymode("predict", "out", "new.csv", "--keep", name, cwd=tmp_path, code=2)
        assert f"--keep {name}: the predictions have a column of that name" in the_line(wrong)
    np.savez(tmp_path / "new.npz", x=np.ones((2, 2)))
    wrong = polymode("predict", "out", "new.npz", cwd=tmp_path, code=1)
    assert "The network was trained on a table with names; new.npz has arrays" in the_line(wrong)
    x = np.random.default_rng(0).normal(size=(40, 2))
    np.savez(tmp_path / "train.npz", x=x, y=x.sum(1))
    polymode("train", "--data", "train.npz", "--epochs", 1, "--run", "arrays", "--quiet", cwd=tmp_path)
    wrong = polymode("predict", "arrays", "new.npz", "--keep", "id", cwd=tmp_path, code=1)
    assert "new.npz have no columns to keep" in the_line(wrong)
    predicted = json.loads(polymode("predict", "arrays", "new.npz", "--json", cwd=tmp_path).stdout)
    assert predicted["row"] == [1, 2]


def test_a_column_that_is_constant_in_training_is_left_out_and_said_to_be(tmp_path):
    rows = "".join(f"{i % 7},0,{i % 5},{3 * (i % 7)}.5\n" for i in range(60))
    (tmp_path / "train.csv").write_text("size,rare,age,price\n" + rows)
    (tmp_path / "new.csv").write_text("size,rare,age\n3,0,2\n3,1,2\n")
    said = polymode("train", "--data", "train.csv", "--epochs", 3, "--run", "out", cwd=tmp_path)
    assert "; left out rare (polymode data describe)" in said.stderr
    predicted = json.loads(polymode("predict", "out", "new.csv", "--json", cwd=tmp_path).stdout)
    first, twin = predicted["mean"]
    assert first == pytest.approx(twin, rel=1e-5)


def test_images_of_ones_own(tmp_path):
    from PIL import Image

    for name, colour in (("cat", (250, 0, 0)), ("dog", (0, 0, 250))):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for index in range(12):
            shade = tuple(max(0, c - index) for c in colour)
            Image.new("RGB", (8, 8), shade).save(tmp_path / f"pets/{name}/{index}.png")
    polymode("train", "--data", "pets", "--epochs", 20, "--run", "out", "--quiet", cwd=tmp_path)
    Image.new("RGB", (16, 16), (240, 0, 5)).save(tmp_path / "new.png")
    out = polymode("predict", "out", "new.png", "--json", cwd=tmp_path).stdout
    assert json.loads(out)["label"] == ["cat"]
    # Some of the classes only, all of the images, by name: as the run was prepared, not by themselves.
    (tmp_path / "some/dog").mkdir(parents=True)
    (tmp_path / "some/cat").mkdir()
    for index, (name, colour) in enumerate([("dog", (0, 0, 240))] * 3 + [("cat", (240, 0, 0))]):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"some/{name}/{index}.png")
    judged = polymode("evaluate", "out", "--data", "some", cwd=tmp_path).stdout
    assert "on some (4 examples)" in judged
    [scores] = json.loads(polymode("evaluate", "out", "--data", "some", "--json", cwd=tmp_path).stdout)[
        "posteriors"
    ]
    assert scores["accuracy"] == 1.0
    (tmp_path / "some/cat").rename(tmp_path / "some/wolf")
    refused = polymode("evaluate", "out", "--data", "some", cwd=tmp_path, code=2)
    assert "Unknown class folder in some 'wolf'" in refused.stderr


# --- mistakes ----------------------------------------------------------------------------------------


def test_a_mistake_gets_one_line_and_an_exit_code(tmp_path):
    result = polymode_process("compare", "--methods", "deep_ensembel", cwd=tmp_path, code=2)
    assert the_line(result).startswith("polymode compare: Unknown method 'deep_ensembel'. Did you mean")
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path):
    result = polymode("evaluate", "nowhere", "--debug", cwd=tmp_path, code=1)
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("polymode evaluate: ")


def test_help_and_version(tmp_path):
    assert "compare" in polymode("--help", cwd=tmp_path).stdout
    assert polymode(cwd=tmp_path, code=2).stdout.startswith("usage: polymode COMMAND")
    assert "--methods NAMES" in polymode("compare", "--help", cwd=tmp_path).stdout
    assert polymode_process("--version", cwd=tmp_path).stdout.startswith("polymode ")


def test_methods_are_listed_and_explained(tmp_path):
    assert "deep_ensemble" in polymode("methods", cwd=tmp_path).stdout
    explained = polymode("methods", "single", cwd=tmp_path).stdout
    for words in (
        "Σ_n log p(y_n | x_n, θ)",
        "cost: one member-epoch an epoch",
        "prior_std",
        "any of torch.optim",
    ):
        assert words in explained
    listed = json.loads(polymode("methods", "--json", cwd=tmp_path).stdout)["methods"]
    assert {entry["name"] for entry in listed} >= {"single", "deep_ensemble"}


def test_methods_count_what_they_keep_of_a_network(tmp_path):
    some = ["methods", "emp,norm=emp", "--model", "resnet20", "--count", "--set", "norm.where=norm"]
    shown = polymode(*some, cwd=tmp_path).stdout
    assert "single" not in shown
    content = json.loads(polymode(*some, "--json", cwd=tmp_path).stdout)
    counted = content["methods"]
    channels = 16 * 7 + 32 * 7 + 64 * 7
    assert counted["norm"]["parameters"] == 272_474 + 4 * 2 * channels
    assert counted["emp"]["parameters"] == 272_474 + 4 * (2 * channels + 650)
    assert f"{counted['emp']['parameters']:,}" in shown
    without = json.loads(polymode(*some, "--json", "--without-norm", cwd=tmp_path).stdout)["methods"]
    assert without["norm"]["parameters"] == 272_474 + 3 * 2 * channels
    assert content["network"] == {
        "parameters": 272_474,
        "multiplications": 40_813_184,
        "as_jantre_2022": {"parameters": 268_346, "multiplications": 40_551_050},
        "note": "",
    }
    assert "one network: 272,474 parameters, 40,813,184 multiplications a pass" in shown
    assert "as Jantre et al. (2022) count: 268,346 parameters, 40,551,050 multiplications" in shown
    assert counted["emp"]["multiplications"] is None
    assert "--count needs --model" in the_line(polymode("methods", "--count", cwd=tmp_path, code=2))
    wrong = polymode("methods", "--model", "resnet20", "--count", "--shape", "big", cwd=tmp_path, code=2)
    assert "--shape 'big': write sizes with commas" in the_line(wrong)


def test_methods_count_a_network_that_cannot_run_on_an_example(tmp_path):
    own = ["methods", "single,deep_ensemble", "--count", "--model", "polymode.models:resnet20"]

    def shown(*more):
        return " ".join(polymode(*own, *more, cwd=tmp_path).stdout.split())

    of_convolutions = 40_813_184 - 640
    assert f"{5 * (of_convolutions // 16 + 640):,}" in shown("--shape", "3,8,8")
    for words, more in (
        ("the shape of an example, which is not known. --shape gives that of an example.", []),
        ("note: This ResNet cannot run on inputs [1, 3, 32] torch.float32:", ["--shape", "3,32"]),
    ):
        told = shown(*more)
        assert words in told
        assert "one network: 272,474 parameters, – multiplications a pass" in told
    wrong = polymode(*own, "--shape", "3,0", cwd=tmp_path, code=2)
    assert "--shape '3,0': write sizes with commas" in the_line(wrong)


# --- data --------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path):
    """A local server that stands in for the official addresses."""
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, directory=str(folder), **options)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(not UCI.is_dir(), reason="the UCI collection is not here")
def test_data_are_fetched_checked_and_used(tmp_path, mirror):
    folder, address = mirror
    (folder / "uci").symlink_to(UCI)
    where = {"POLYMODE_DATA": str(tmp_path / "data"), "POLYMODE_MIRROR": address}
    listed = json.loads(polymode("data", "--json", cwd=tmp_path, **where).stdout)
    assert listed["folder"] == str(tmp_path / "data")
    states = {entry["name"]: entry["state"] for entry in listed["data"]}
    assert (states["digits"], states["uci-yacht"]) == ("built in", "to fetch")
    assert "ready in" in polymode("data", "fetch", "uci-yacht", cwd=tmp_path, **where).stdout
    assert "features: 6" in polymode("data", "check", "uci-yacht", cwd=tmp_path, **where).stdout
    assert "here" in polymode("data", cwd=tmp_path, **where).stdout
    (tmp_path / "data/uci/yacht/data.txt").write_text("1 2 3\n")
    polymode("data", "check", "uci-yacht", cwd=tmp_path, code=1, **where)


def test_no_network_says_what_to_fetch_where(tmp_path):
    closed = "http://127.0.0.1:9"  # the discard port: nothing listens
    where = {"POLYMODE_DATA": str(tmp_path / "data"), "POLYMODE_MIRROR": closed}
    line = the_line(polymode("data", "fetch", "mnist", cwd=tmp_path, code=1, **where))
    assert closed in line
    assert str(tmp_path / "data/MNIST/raw/train-images-idx3-ubyte.gz") in line


def test_a_wrong_download_is_not_kept(tmp_path, mirror):
    folder, address = mirror
    (folder / "MNIST/raw").mkdir(parents=True)
    (folder / "MNIST/raw/train-images-idx3-ubyte.gz").write_bytes(b"something else")
    where = {"POLYMODE_DATA": str(tmp_path / "data"), "POLYMODE_MIRROR": address}
    line = the_line(polymode("data", "fetch", "mnist", cwd=tmp_path, code=1, **where))
    assert "f68b3c2dcbeaaa9fbdd348bbdeb94873" in line
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]


@pytest.mark.parametrize("method", ["spike_slab", "emp"])
def test_what_any_method_finds_of_its_training_is_shown(method, tmp_path):
    """Findings may be counts for each layer, and draws may share weights in groups of unequal size."""
    options = ("train", *MOONS, "--method", "trajectory", "--epochs", 6, "--run", "run")
    result = polymode(*options, "--set", f"trajectory.of={{name: {method}}}", cwd=tmp_path)
    next_command = {"spike_slab": "landscape run", "emp": "predict run"}[method]  # draws have no order
    assert f"next     polymode {next_command}" in result.stdout
    if method == "spike_slab":
        record = read_document(tmp_path / "run" / "posterior-0" / "posterior.json", "posterior")["record"]
        [(layer, (kept, number)), *_] = record["findings"][0]["units"].items()
        assert f"{layer} {kept} of {number}" in result.stdout
