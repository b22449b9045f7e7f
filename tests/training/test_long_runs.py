"""Long runs stay light: what is written and held does not grow with what was done, and nothing is lost."""

import gc
import itertools
import math
import os
import signal
import time
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import polymode as pm
from polymode import storage
from polymode.errors import CheckpointError, InputError
from polymode.networks.members import Members
from polymode.posteriors import particles
from polymode.posteriors.particles import MemberStore, StoredMembers, rows_of
from polymode.training import epochs_of, read_events
from polymode.training.contract.epoch import Epoch
from polymode.training.keeping import checkpoint, events
from polymode.training.keeping.folder import RunFolder
from polymode.training.loop import history, run
from polymode.training.loop.history import History

pytestmark = pytest.mark.filterwarnings("ignore:A chain's anchor walks")  # chains are short here

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
DATA = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=20)  # one step an epoch
METHODS = {
    "single": pm.methods.Single(),
    "sequential": pm.methods.SequentialAnchored(num_chains=2, first_epochs=2, short_epochs=1),
    "trajectory": pm.methods.Trajectory(pm.methods.Single()),
}


class Stop(Exception):
    pass


def fit(folder, epochs=12, method="single", **options):
    return pm.fit(
        METHODS[method],
        options.pop("model", lambda: pm.models.MLP(3, 2, (4,))),
        DATA,
        likelihood="categorical",
        epochs=epochs,
        **{"progress": False, "backend": "loop", "run_dir": folder, "threads": 1} | options,
    )


def stop_after(epochs):
    def observer(epoch):
        if epoch.epochs_done == epochs:
            raise Stop

    return observer


def interrupted(folder, after, **options):
    with pytest.raises(Stop):
        fit(folder, observer=stop_after(after), **options)


def assert_same(one, other):
    for a, b in zip(one.draw(), other.draw(), strict=True):
        assert all(torch.equal(t, b.stacked[name]) for name, t in a.stacked.items())
        assert torch.equal(a.labels, b.labels)
    assert one.record["history"] == other.record["history"]


# --- checkpoints ------------------------------------------------------------------------------------


def test_a_checkpoint_does_not_grow_with_the_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "STRETCH", 50)
    sizes = {}
    for epochs in (210, 2010):  # ten epochs beyond the stretches each
        folder = tmp_path / str(epochs)
        interrupted(folder, epochs, epochs=3000, checkpoint_seconds=3600.0, validation=DATA)
        state = max((folder / "checkpoint").glob("state-*"))
        sizes[epochs] = state.stat().st_size, (folder / "checkpoint" / "checkpoint.json").stat().st_size
        assert len(list((folder / "history").iterdir())) == epochs // 50
    (few, few_named), (many, many_named) = sizes.values()
    digests = 32 * (2000 - 200) // 50
    assert abs(many - few - digests) <= 64  # numbers in the header have more digits
    assert abs(many_named - few_named) <= 64


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [1, 9, 10, 16, 17, 23])
def test_a_run_that_ends_before_its_checkpoint_is_named_goes_on_to_the_same_bits(
    method, number, tmp_path, monkeypatch
):
    """Everything that a checkpoint rests on is written by then: stretches, members and its tensors."""
    monkeypatch.setattr(history, "STRETCH", 4)
    monkeypatch.setattr(particles, "WAITING_ENTRIES", 3)
    expected = fit(tmp_path / "undisturbed", method=method, validation=DATA)
    options = {"method": method, "validation": DATA, "checkpoint_seconds": 0.0, "resume": True}
    with monkeypatch.context() as patched:
        numbers = itertools.count(1)

        def end(*arguments):
            if next(numbers) == number:
                raise Stop
            storage.write_document(*arguments)

        patched.setattr(checkpoint, "write_document", end)
        with pytest.raises(Stop):
            fit(tmp_path / "run", **options)
    again = fit(tmp_path / "run", **options)
    assert_same(again, expected)
    assert_same(fit(None, method=method, validation=DATA), expected)
    assert not (tmp_path / "run" / "history").exists()
    assert [e["epochs_done"] for e in epochs_of(tmp_path / "run")] == list(range(1, 13))
    files = [
        sorted((tmp_path / name / "posterior-0").glob("*.safetensors")) for name in ("run", "undisturbed")
    ]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_stretch_gives_way_to_the_predecessor_that_does_without_it(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "STRETCH", 4)
    expected = fit(None)
    interrupted(tmp_path, 8, checkpoint_seconds=0.0)  # the predecessor is that of step 8, after 7 epochs
    _spoil(tmp_path / "history" / "epochs-00001.safetensors", missing=missing)
    with pytest.warns(UserWarning, match=r"epochs-00001.* is (damaged|missing).*predecessor"):
        again = fit(tmp_path, resume=True)
    assert_same(again, expected)


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_stretch_that_every_checkpoint_needs_is_refused(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "STRETCH", 4)
    interrupted(tmp_path, 8, checkpoint_seconds=0.0)
    _spoil(tmp_path / "history" / "epochs-00000.safetensors", missing=missing)
    with pytest.raises(CheckpointError, match=r"No checkpoint .* can be used.*epochs-00000"):
        fit(tmp_path, resume=True)


def _spoil(path, *, missing):
    if missing:
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def test_an_unfinished_run_of_format_3_goes_on(tmp_path, monkeypatch):
    """Its checkpoints hold all epochs, and every finished member has a file."""
    expected = fit(None, method="sequential")
    with monkeypatch.context() as earlier:
        earlier.setattr(storage, "FORMAT_VERSION", 3)
        earlier.setattr(History, "content", lambda self: self._between(0, len(self)))
        earlier.setattr(particles, "WAITING_ENTRIES", 1)
        interrupted(tmp_path, 8, method="sequential")
    assert_same(fit(tmp_path, method="sequential", resume=True), expected)


def test_a_history_gives_back_the_rows_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "STRETCH", 3)
    kept, expected = History(tmp_path), []
    assert math.isnan(kept.loss)
    for number in range(1, 12):
        scores = {"nll": torch.tensor([number, math.inf])} if number in (2, 3, 10) else {}
        measures = {"size": torch.tensor([number, number + 1])} if number > 6 else {}
        phase = "first" if number < 6 else "second"
        losses = torch.tensor([1.0, number])
        kept.add(
            Epoch(phase, number, losses, scores, measures, torch.zeros(2, 3), 1.0, {}, number, 0.0, False)
        )
        row = {"phase": phase, "epoch": number, "loss": (1 + number) / 2}
        row |= {"validation_nll": math.inf} if scores else {}
        row |= {"measure_size": number + 0.5} if measures else {}
        expected.append(row)
        content = kept.content()
        assert len(content["kind"]) == number % 3  # the others are in files
        again = History.of_content(content, tmp_path)
        assert again.rows == kept.rows == expected
        assert [list(row) for row in again.rows] == [list(row) for row in expected]
        assert again.loss == kept.loss == expected[-1]["loss"]


# --- finished members -------------------------------------------------------------------------------


def test_members_in_one_file_are_those_that_were_appended(tmp_path, monkeypatch):
    monkeypatch.setattr(particles, "WAITING_ENTRIES", 3)
    here, there = MemberStore(), MemberStore(tmp_path)
    generator = torch.Generator().manual_seed(0)
    weight, shared = torch.empty(4, 5), torch.empty(2, 3)
    members = Members({"weight": weight}, {"shared": shared}, 2)
    first = there.of_group(1)
    for number in range(1, 8):
        weight.normal_(generator=generator)  # members in training move on, what was appended does not
        shared.normal_(generator=generator)
        here.append(members)
        there.append(members)
        assert len(first) == len(there) == number
        assert len(list(tmp_path.iterdir())) == number // 3  # the others wait
    digests = there.digests()
    assert len(digests) == len(list(tmp_path.iterdir())) == 3
    restored = MemberStore(tmp_path)
    restored.restore(digests, 2, 2)
    for store in (there, restored):
        assert all(isinstance(block, StoredMembers) for block in store.blocks)
        for group in range(2):
            blocks = zip(here.of_group(group).blocks, store.of_group(group).blocks, strict=True)
            for one, other in blocks:
                a, b = rows_of(one, 0, 2), rows_of(other, 0, 2)
                assert torch.equal(a.stacked["weight"], b.stacked["weight"])
                assert torch.equal(a.shared["shared"], b.shared["shared"])
                assert torch.equal(a.labels, b.labels)
                assert other.num_bytes == 4 * (2 * 5 + 3) + 2 * 4 + 2 * 3 * 8  # weights, log-weights, labels


# --- the log ----------------------------------------------------------------------------------------


def test_nothing_is_missing_in_the_log_of_an_interrupted_run(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "GATHERING_SECONDS", 3600.0)

    def interrupt(epoch):
        if epoch.epochs_done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, observer=interrupt)
    assert [e["event"] for e in read_events(tmp_path)] == ["begin", "members", *["epoch"] * 5]
    fit(tmp_path, resume=True)
    logged = [e["epochs_done"] for e in read_events(tmp_path) if e["event"] == "epoch"]
    assert logged == list(range(1, 13))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_missing_in_the_log_of_a_run_that_fails_within_a_step(error, tmp_path, monkeypatch):
    monkeypatch.setattr(events, "GATHERING_SECONDS", 3600.0)
    seen = []

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs):
            if self.training and len(seen) == 5:
                raise error
            return self.layer(inputs)

    with pytest.raises(error):
        fit(tmp_path, model=Failing, observer=seen.append)
    assert [e["epochs_done"] for e in epochs_of(tmp_path)] == [1, 2, 3, 4, 5]


def test_the_log_has_every_epoch_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "GATHERING_SECONDS", 3600.0)
    logged = []
    monkeypatch.setattr(
        RunFolder, "save", _after(RunFolder.save, lambda: logged.append(len(epochs_of(tmp_path))))
    )
    fit(tmp_path, epochs=3, checkpoint_seconds=0.0)
    # At the beginning, after every step and every epoch, and at the end.
    assert logged == [0, 0, 1, 1, 2, 2, 3, 3]


def _after(function, then):
    def call(*arguments):
        function(*arguments)
        then()

    return call


def test_a_log_can_be_watched(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(events, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock.now))
    seen = []

    def watch(epoch):
        seen.append(len(epochs_of(tmp_path)))
        clock.now += 0.4

    fit(tmp_path, epochs=7, observer=watch)
    # The first epoch comes 0 seconds after the beginning was written; one a second later brings all.
    assert seen == [0, 0, 0, 4, 4, 4, 7]


# --- memory -----------------------------------------------------------------------------------------


def test_memory_grows_by_the_numbers_of_the_history_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "GATHERING_SECONDS", 0.0)  # what waits is not what is held
    monkeypatch.setattr(history, "STRETCH", 64)
    held, first, last = {}, 200, 800

    def look(epoch):
        if epoch.epochs_done in (first, last):
            gc.collect()
            held[epoch.epochs_done] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        fit(tmp_path, epochs=last, validation=DATA, observer=look)
    finally:
        tracemalloc.stop()
    numbers = 6  # kind, epoch, loss and three scores; an array has room for a sixteenth more
    allowed = numbers * 8 * (last - first + last / 16)
    caches = 96 * (last - first)  # of the interpreter; a row of Python objects has more than 300 bytes
    assert held[last] - held[first] <= allowed + caches


# --- how often --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "writing", "pause"),
    [
        (None, 0.01, 60),  # a small state: once a minute
        (None, 0.6, 60),
        (None, 2.0, 200),  # a large one: a hundred times what it takes
        (None, 7.5, 750),
        (20, 7.5, 20),  # what the user says is obeyed
        (0, 2.0, 0),
    ],
)
def test_checkpoints_take_a_hundredth_of_the_time_unless_told_otherwise(
    given, writing, pause, tmp_path, monkeypatch
):
    clock, begun = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(
        run, "time", SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    )

    def save(*arguments):
        begun.append(clock.now)
        clock.now += writing

    def wait(epoch):
        clock.now += 10

    monkeypatch.setattr(RunFolder, "save", save)
    fit(tmp_path, epochs=300, observer=wait, checkpoint_seconds=given)
    *within, _ = begun  # the end has one in any case
    pauses = [later - earlier - writing for earlier, later in itertools.pairwise(within)]
    if given == 0:
        assert max(pauses) <= 10  # after every step and every epoch
        return
    assert len(pauses) >= 3
    assert all(pause - 1e-6 <= seconds < pause + 10 + 1e-6 for seconds in pauses)
    if given is None:
        assert sum(writing for _ in pauses) <= 0.01 * (within[-1] - within[0]) + 1e-6


def test_a_cadence_that_is_none_or_a_number_is_taken(tmp_path):
    with pytest.raises(InputError, match="checkpoint_seconds must be None or a number of at least 0, got -1"):
        fit(tmp_path, checkpoint_seconds=-1)
