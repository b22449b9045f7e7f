"""The experiment's table and figure."""

import csv
import subprocess
import sys

import pytest

from scripts import EXPERIMENTS, load_script

SCRIPT = EXPERIMENTS / "late_phase/quadratic.py"
TABLE = SCRIPT.parent / "results/quadratic.csv"
steady_loss_figure = load_script(SCRIPT.with_name("steady_loss.py")).steady_loss_figure


def test_the_figure_shows_losses_and_their_ratio_to_one_over_the_members():
    curve = {"members": [1, 4], "loss": [0.2, 0.1], "error": [0.01, 0.02]}
    drawn = steady_loss_figure({"a": {"late phase": curve, "independent": curve}}, one={"a": 0.2})
    law, loss, share, *_ = drawn.data
    assert list(law.y) == pytest.approx([0.2, 0.05])
    assert list(loss.y) == [0.2, 0.1]
    assert list(share.y) == pytest.approx([1.0, 2.0])
    assert list(share.error_y.array) == pytest.approx([0.05, 0.4])
    assert [trace.name for trace in drawn.data if trace.showlegend] == [
        "1/K",
        "a, late phase",
        "a, independent",
    ]
    assert [trace.yaxis for trace in drawn.data[1:]] == ["y", "y2", "y", "y2"]


def test_the_table_holds_what_the_docs_say():
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    found = {
        (row["kind"], float(row["rate"]), int(row["num_steps"]), int(row["num_members"])): row for row in rows
    }
    for (kind, rate, steps, count), row in found.items():
        share = float(row["times_members"])
        if rate <= 0.01:
            assert share == pytest.approx(1, abs=0.1)
            other = found["independent", rate, steps, count]
            assert float(row["loss"]) == pytest.approx(float(other["loss"]), rel=0.03)
            assert float(row["loss"]) == pytest.approx(float(row["theory"]), rel=0.02)
        elif steps == 100_000:
            assert float(row["loss"]) == pytest.approx(float(row["theory"]), rel=0.03)
        elif count == 25:
            assert share > 1.3, kind


def test_the_script_computes_nothing_twice(tmp_path):
    (tmp_path / "quadratic.csv").write_bytes(TABLE.read_bytes())
    shown = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, check=True
    ).stdout
    assert shown == ""
    assert (tmp_path / "quadratic.csv").read_bytes() == TABLE.read_bytes()
    assert "1/K" in (tmp_path / "quadratic.html").read_text()
