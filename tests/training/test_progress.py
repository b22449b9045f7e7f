import io
import json

import pytest

from polymode.training.keeping import progress
from polymode.training.keeping.progress import JsonLines, Lines, Silent, reporter_for


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_come_at_most_every_few_seconds(clock):
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin("deep_ensemble", 10)
    for step in range(40):
        clock[0] += 1.0
        lines.advance(step / 4 + 0.25, "5 members, loss 0.5")
    lines.end("deep_ensemble")
    shown = stream.getvalue().splitlines()
    assert shown[0] == "deep_ensemble: begins, 10 epochs"
    assert shown[1] == "deep_ensemble: epoch 1.2/10, 5 members, loss 0.5, eta 35 s"
    assert len(shown) == 1 + 8 + 1
    assert shown[-1] == "deep_ensemble: done in 40.0 s"


def test_the_time_that_remains_does_not_count_epochs_of_earlier_sessions(clock):
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin("single", 100, 90)
    clock[0] += 10
    lines.advance(91, "loss 1")
    assert stream.getvalue().splitlines() == [
        "single: goes on at epoch 90 of 100 epochs",
        "single: epoch 91.0/100, loss 1, eta 90 s",
    ]


def test_nothing_is_said_of_the_time_that_remains_before_anything_is_done(clock):
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin("single", 100, 90)
    clock[0] += 10
    lines.advance(90, "2 workers")
    assert stream.getvalue().splitlines()[-1] == "single: epoch 90.0/100, 2 workers"


def test_what_workers_need_to_begin_and_repeat_is_not_the_time_of_an_epoch(clock):
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin("in parts", 100, 50)
    for seconds, epochs in ((60, 50), (1, 40), (10, 50)):
        clock[0] += seconds
        lines.advance(epochs, "2 workers")
    assert stream.getvalue().splitlines()[-1] == "in parts: epoch 50.0/100, 2 workers, eta 50 s"


def test_json_lines_are_json(clock):
    stream = io.StringIO()
    lines = JsonLines(stream)
    lines.begin("single", 4)
    clock[0] += 6
    lines.advance(2.5, "loss 1")
    lines.say("judging")
    lines.end("single")
    content = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert content[1] == {
        "progress": "epoch",
        "run": "single",
        "epochs": 2.5,
        "num_epochs": 4,
        "detail": "loss 1",
    }
    assert [c.get("progress") for c in content] == ["begin", "epoch", None, "end"]


def test_without_a_terminal_fit_is_silent():
    assert isinstance(reporter_for(True), Silent)
    assert isinstance(reporter_for(False), Silent)
    mine = Lines(io.StringIO())
    assert reporter_for(mine) is mine
