"""``polymode plan``: the laws that it reckons by, what it prints, and what it refuses."""

import itertools
import json

import pytest
import torch
from command_line import polymode

from polymode.application.cli.plan import duration, size
from polymode.application.comparison.planning import Measured, MethodPlan, Plan, divided, makespan
from polymode.training.contract.execution import Execution
from polymode.training.loop.forecast import Forecast, Judged, PhaseForecast

MOONS = ["--data", "two_moons", "--set", "data.num_train=100", "--set", "model.hidden=[8]"]
QUICK = [*MOONS, "--trial", 0.02, "--validation", "none"]


def test_a_run_is_divided_by_data_sets_first_then_by_chains():
    assert divided((3, 5), 1) == [(3, 5)]
    assert divided((3, 5), 2) == [(1, 5), (2, 5)]
    assert divided((3, 5), 4) == [(1, 5)] * 3
    assert divided((3, 5), 6) == [(1, 2), (1, 3)] * 3
    assert divided((1, 5), 8) == [(1, 1)] * 5
    for data_sets, chains, workers in itertools.product(range(1, 5), range(1, 5), range(1, 20)):
        parts = divided((data_sets, chains), workers)
        assert len(parts) <= workers
        assert sum(d * c for d, c in parts) == data_sets * chains


def test_jobs_end_no_later_than_the_bound_of_lists():
    assert makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0
    assert makespan([5.0], 3) == 5.0
    assert makespan([1.0, 2.0, 3.0], 1) == 6.0
    assert makespan([1.0, 1.0, 2.0], 2) == 3.0  # in turn: the longest first would be 2
    chance = torch.Generator().manual_seed(0)
    for workers in (2, 3):
        jobs = torch.rand(6, generator=chance).tolist()
        places = itertools.product(range(workers), repeat=len(jobs))
        best = min(
            max(sum(j for j, p in zip(jobs, where, strict=True) if p == w) for w in range(workers))
            for where in places
        )
        assert best <= makespan(jobs, workers) + 1e-9 <= best * (2 - 1 / workers) + 2e-9  # Graham


def measured(data_sets, chains, seconds, memory):
    phases = (PhaseForecast("train", 1, 1, 1, seconds, 0.0, 0.0, 1),)
    found = Forecast(
        Execution(torch.device("cpu")),
        data_sets,
        chains,
        *(chains, 1, float(chains)),
        phases,
        *(0.0, 0.0),
        Judged(2.0, 5),
        memory,
        *(10, 20, 20, 0, 7, 1),
    )
    return Measured(found, 50, 0.5)


def test_parts_between_the_measured_sizes_lie_on_a_line_and_fill_the_workers():
    first = MethodPlan("first", 4, measured(2, 4, 34.0, 180), measured(1, 1, 6.0, 110))  # 2 + 4 x chains
    for chains in range(1, 9):
        assert first.seconds_of((1, chains)) == pytest.approx(2 + 4 * chains)
        assert first.memory_of((1, chains)) == pytest.approx(100 + 10 * chains)
    assert first.seconds_on(1) == 34.0
    assert first.seconds_on(2) == pytest.approx(0.5 + 18.0)
    assert first.seconds_on(8) == pytest.approx(0.5 + 6.0)
    assert first.memory_on(8) == 110
    second = MethodPlan("second", 1, measured(1, 1, 20.0, 90))
    plan = Plan("both", [first, second], {}, [1, 2])
    assert plan.seconds_on(1) == pytest.approx(34.0 + 20.0 + 2 * 2.0)
    assert plan.seconds_on(2) == pytest.approx(0.5 + 18.0 + 20.0 + 4.0)  # in turn: 18, 18, then 20
    total = plan.config()["total"]
    assert total["disk_finished"] == 2 * (7 + 1 + 5)
    assert total["disk_running"] == (7 + 1 + 5) + (10 + 20 + 7 + 1)  # the first is finished, the second runs
    assert total["member_epochs"] == 2 * 4.0 + 1.0


def test_amounts_are_told_in_units_that_suit_them():
    assert [duration(s) for s in (0.123, 9.94, 42.4, 150, 3000, 7200, 360_000)] == [
        *("0.12 s", "9.9 s", "42 s", "2.5 min", "50 min", "2 h", "100 h")
    ]
    assert [size(b) for b in (5, 1234, 56_700_000, 8e9, 12e15)] == [
        *("5 B", "1.23 kB", "56.7 MB", "8 GB", "1.2e+04 TB")
    ]


def test_a_plan_as_json_has_what_the_comparison_then_spends(tmp_path):
    same = [*MOONS, "--validation", "none", "--budget", 12, "--seeds", 2, "--methods", "single,deep_ensemble"]
    same += ["--set", "deep_ensemble.num_members=3"]
    said = polymode("plan", *same, "--trial", 0.02, "--workers", 4, "--json", cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    plan = json.loads(said.stdout)
    assert set(plan) == {"title", "workers", "methods", "refused", "total"}
    assert plan["workers"] == [1, 4]
    polymode("compare", *same, "--baselines", "none", "--run", "out", cwd=tmp_path)
    for method in plan["methods"]:
        found, label = method["forecast"], method["label"]
        manifest = json.loads((tmp_path / "out" / label / "manifest.json").read_text())
        spent = [each["member_epochs"] for each in manifest["spent"]]
        assert spent == [pytest.approx(found["member_epochs"])] * found["num_data_sets"]
        assert found["memory_bytes"] > method["base_bytes"] > 0
        assert set(method["on_workers"]) == {"1", "4"}
    first, second = plan["methods"]
    assert (first["label"], first["passes"], first["part"]["num_data_sets"]) == ("single", 1, 1)
    assert (second["passes"], second["forecast"]["num_members"]) == (3, 3)
    assert second["on_workers"]["4"]["parts"] == [[1, 1], [1, 2]] * 2
    assert plan["total"]["member_epochs"] == 4 * 12


def test_a_table_says_what_each_method_costs_or_why_it_cannot_be_told(tmp_path):
    said = polymode(
        "plan",
        *QUICK,
        "--budget",
        10,
        "--seeds",
        1,
        "--workers",
        1,
        "--methods",
        "single,tunnel",
        cwd=tmp_path,
    )
    line = next(line for line in said.stdout.splitlines() if line.strip().startswith("single"))
    assert line.split()[1:5] == ["1", "1", "10", "10"]  # chain, member, epochs, member-epochs
    assert "tunnel: not planned, tunnel begins at networks that others have trained" in said.stdout
    assert "all, judged" in said.stdout
    assert "single: measuring 1 x 1 chains" in said.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "-1"], "--workers must be at least 0, got -1."),
        (["--trial", "-1"], "--trial must be between 0 and 600 seconds, got -1.0."),
        (["--methods", "nothing"], "Unknown method 'nothing'"),
        (["--budget", "0"], "--budget must be from 1 to 1,000,000,000 member-epochs, got 0.0."),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_measured(words, message, tmp_path):
    said = polymode("plan", *words, cwd=tmp_path, code=2)
    assert message in said.stderr
