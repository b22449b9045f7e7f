"""Counts and numbers with heavy tails from a table to a page, to predictions and to a reference."""

import csv
import json
import math
import re

import numpy as np
import pytest
from command_line import polymode

SMALL = ("--set", "model.hidden=[8]", "--set", "all.optimizer.lr=0.02", "--quiet")
ALONE = ("--validation", "none", "--baselines", "none", "--set", "data.splits=1")


def write(path, names, columns):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(*columns, strict=True))


def read(path):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: np.array([row[name] if name == "unlike" else float(row[name]) for row in rows])
        for name in rows[0]
    }


def write_counts(folder, number=900):
    """Two groups of visitors, with rates of 1.5 and 6."""
    group = np.arange(number) % 2
    visits = np.random.default_rng(0).poisson(np.where(group == 1, 6.0, 1.5))
    write(folder / "counts.csv", ("group", "visits"), (group.tolist(), visits.tolist()))


def test_counts_from_a_table_to_a_page_and_predictions(tmp_path):
    write_counts(tmp_path)
    polymode(
        *("compare", "--data", "counts.csv", "--likelihood", "poisson", "--methods", "single,deep_ensemble"),
        *("--budget", "300", "--seeds", "2", "--run", "out", *SMALL, *ALONE),
        cwd=tmp_path,
    )
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"single", "deep_ensemble"}
    for row in rows:
        # The best there is are the entropies of the two laws, 1.539 and 2.299 nats. Log masses of
        # counts deviate by about 0.7; there are 180 test counts.
        assert row["log_density"] == pytest.approx(-(1.539 + 2.299) / 2, abs=4 * 0.7 / math.sqrt(180))
        assert row["coverage90"] >= 0.9 - 4 * math.sqrt(0.09 / 180)
        assert 0 < row["crps"] < row["rmse"]
    page = (tmp_path / "out/report.html").read_text()
    titles = re.findall(r'"title":\{"font":\{"size":16\},"text":"([^"]*)"', page)
    for beginning in ("Coverage", "Predictive standard deviation", "deep_ensemble: how members differ"):
        assert any(title.startswith(beginning) for title in titles)
    assert "standard deviation (counts)" in page
    assert "NLL is minus the log mass, of targets in counts." in page

    polymode("predict", "out/deep_ensemble", "counts.csv", "--out", "p.csv", "--quiet", cwd=tmp_path)
    found, visits = read(tmp_path / "p.csv"), read(tmp_path / "counts.csv")
    assert list(found) == ["row", "mean", "std", "member_std", "q0.05", "q0.95", "strangeness", "unlike"]
    for group, rate in ((0, 1.5), (1, 6.0)):
        mine = visits["group"] == group
        # Of 720 training rows some 360 are of each group: their mean is known to √(λ/360).
        np.testing.assert_allclose(found["mean"][mine], rate, atol=5 * math.sqrt(rate / 360))
        variance = found["mean"][mine] + found["member_std"][mine] ** 2
        np.testing.assert_allclose(found["std"][mine] ** 2, variance, rtol=1e-4)
        for name in ("q0.05", "q0.95"):
            assert (found[name][mine] == found[name][mine].round()).all()
    for data in ((), ("--data", "counts.csv")):  # its own test rows, and a file of counts
        said = polymode("evaluate", "out/deep_ensemble", "--json", *data, cwd=tmp_path).stdout
        scores = json.loads(said)["posteriors"][0]
        assert scores.keys() >= {"log_density", "crps", "coverage95"}
    rmse = math.sqrt(((found["mean"] - visits["visits"]) ** 2).mean())
    assert scores["rmse"] == pytest.approx(rmse, rel=1e-4)


def test_heavy_tails_from_a_table_to_a_page_and_predictions(tmp_path):
    random = np.random.default_rng(1)
    x = random.uniform(-1, 1, 600)
    y = 100 + 20 * x + 2 * random.standard_t(3, 600)
    write(tmp_path / "heavy.csv", ("x", "y"), (x.tolist(), y.tolist()))
    polymode(
        *("compare", "--data", "heavy.csv", "--likelihood", "student_t", "--methods", "single,deep_ensemble"),
        *("--budget", "200", "--seeds", "1", "--run", "out", *SMALL, *ALONE),
        cwd=tmp_path,
    )
    assert "standard deviation (standardised units)" in (tmp_path / "out/report.html").read_text()
    polymode("predict", "out/deep_ensemble", "heavy.csv", "--out", "p.csv", "--quiet", cwd=tmp_path)
    found = read(tmp_path / "p.csv")
    # In the units of the table. The noise has a deviation of 2 √3, the line is learned to a part of it.
    assert np.abs(found["mean"] - (100 + 20 * x)).mean() < 2 * math.sqrt(3) / 3
    assert np.median(found["std"]) == pytest.approx(2 * math.sqrt(3), rel=0.5)
    inside = (y >= found["q0.05"]) & (y <= found["q0.95"])
    assert (
        abs(inside.mean() - 0.9) < 4 * math.sqrt(0.09 / 600) + 0.02
    )  # t₄ in the place of t₃: less than 0.02


@pytest.mark.parametrize(
    ("likelihood", "units"), [("poisson", "counts"), ("student_t", "standardised units")]
)
def test_references(tmp_path, likelihood, units):
    write_counts(tmp_path, 60)
    polymode(
        *("reference", "--data", "counts.csv", "--likelihood", likelihood, "--passes", "400"),
        *("--set", "model.hidden=[2]", "--set", "hmc.num_chains=2", "--force", "--out", "r.npz", "--quiet"),
        cwd=tmp_path,
        expected_warnings=True,
    )
    with np.load(tmp_path / "r.npz") as file:
        samples, about = file["samples"], json.loads(str(file["about"]))
    assert samples.shape == (1000, 12)
    assert about["units"] == units
    assert set(about["noise_floor"]) == {"wasserstein1", "wasserstein2"}
    are_counts = bool((samples == samples.round()).all() and (samples >= 0).all())
    assert are_counts == (likelihood == "poisson")
    said = polymode(
        *("compare", "--data", "counts.csv", "--likelihood", likelihood, "--methods", "single"),
        *("--budget", "20", "--run", "out", "--reference", "r.npz", "--set", "model.hidden=[2]"),
        *("--baselines", "none", "--seeds", "1"),
        cwd=tmp_path,
        expected_warnings=True,
    )
    assert f"between halves of its own chains, in {units}" in " ".join(said.stdout.split())
    [row] = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert 0 < row["wasserstein1"] <= row["wasserstein2"]


@pytest.mark.parametrize("bad", ["-2", "1.5"])
def test_what_is_no_count_is_refused(tmp_path, bad):
    write(tmp_path / "bad.csv", ("x", "visits"), (range(40), ["1", "2", "3"] + [bad] * 37))
    command = ("train", "--data", "bad.csv", "--likelihood", "poisson", "--quiet")
    said = polymode(*command, cwd=tmp_path, code=1)
    assert f"Counts must be whole numbers of 0 or more, got {bad}, first at position" in said.stderr


def test_a_likelihood_says_how_a_column_is_read(tmp_path):
    """Counts of few values would be classes, were the likelihood not asked."""
    write_counts(tmp_path, 60)
    command = (
        "train",
        "--data",
        "counts.csv",
        "--likelihood",
        "poisson",
        "--set",
        "data.task=classification",
    )
    said = polymode(*command, cwd=tmp_path, code=1)
    assert "the likelihood 'poisson' is of a regression: leave one of them out" in said.stderr
