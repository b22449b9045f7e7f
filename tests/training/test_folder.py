"""The folder of a run: what is written when, what a reader without polymode finds, what is refused."""

import json
import os
import re
import resource
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import polymode as pm
from documents import edit
from forks import fork
from polymode import storage
from polymode.errors import CheckpointError
from polymode.storage import DIGEST, write_document
from polymode.training import epochs_of, read_events
from polymode.training.keeping.events import EventLog
from polymode.training.keeping.interruption import Interruption

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
DATA = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=20)


def fit(folder, epochs=3, **options):
    options = {"progress": False, "backend": "loop", "run_dir": folder, "likelihood": "categorical"} | options
    return pm.fit(
        pm.methods.DeepEnsemble(2, of=pm.methods.Single(schedule=pm.schedules.Cosine())),
        lambda: pm.models.MLP(3, 2, (4,)),
        DATA,
        epochs=epochs,
        **options,
    )


def test_a_finished_folder_reads_without_polymode(tmp_path):
    posterior = fit(tmp_path, validation=DATA, options={"data": "mine", "epochs": 3})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["options"] == {"data": "mine", "epochs": 3}
    assert manifest["method"]["of"]["schedule"] == {"type": "Cosine", "final": 0.0}
    assert manifest["spent"][0]["member_epochs"] == 6
    assert manifest["record"]["backend"] == "loop"
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["hardware"]["cpus"] == os.cpu_count()
    assert len(manifest["signature"]["data"][0]) == 64
    stored = load_file(tmp_path / "posterior-0" / "members-00000.safetensors")
    drawn = next(iter(posterior.draw()))
    assert any(torch.equal(t, drawn.stacked["1.weight"]) for t in stored.values())
    assert not (tmp_path / "checkpoint").exists()


def test_events_hold_loss_rate_and_validation_of_every_epoch_and_member(tmp_path):
    seen = []
    fit(tmp_path, validation=DATA, observer=seen.append)
    kinds = [event["event"] for event in read_events(tmp_path)]
    assert kinds == ["begin", "members", "epoch", "epoch", "epoch", "end"]
    labels = next(e for e in read_events(tmp_path) if e["event"] == "members")["labels"]
    assert labels == [[0, 0, 0], [0, 1, 0]]
    for event, epoch in zip(epochs_of(tmp_path), seen, strict=True):
        assert event["losses"] == pytest.approx(epoch.losses.tolist(), rel=1e-5)
        assert event["validation"]["nll"] == pytest.approx(epoch.validation["nll"].tolist(), rel=1e-5)
        assert event["learning_rates"]["all"] == pytest.approx(1e-3 * epoch.rate, rel=1e-5)
    assert seen[0].rate > seen[2].rate > 0


def test_a_torn_last_line_spoils_nothing(tmp_path):
    log = EventLog(tmp_path)
    log.write("epoch", epochs_done=1, losses=[float("nan"), 1.0])
    with log.path.open("a") as file:
        file.write('{"event": "epoch", "epochs_do')  # a kill in the middle of a write
    log.write("epoch", epochs_done=2)
    log.write("epoch", epochs_done=2, again=True)
    with pytest.warns(UserWarning, match=r"events.jsonl: 1 damaged line was passed over\."):
        assert [e["epochs_done"] for e in read_events(tmp_path)] == [1, 2, 2]
    with pytest.warns(UserWarning, match="1 damaged line"):
        first, second = epochs_of(tmp_path)
    assert first["losses"] == [None, 1.0]
    assert second["again"] is True
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        list(read_events(tmp_path / "elsewhere"))


def test_ctrl_c_ends_between_steps_and_the_run_goes_on_to_the_same_bits(tmp_path):
    undisturbed = fit(tmp_path / "undisturbed", epochs=4)

    def interrupt(epoch):
        if epoch.epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"is kept in .*run: the same call with resume=True goes on"):
        fit(tmp_path / "run", epochs=4, observer=interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        fit(None, epochs=4, observer=interrupt)  # nothing is kept, and nobody says so
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "running"
    again = fit(tmp_path / "run", epochs=4, resume=True)
    for a, b in zip(undisturbed.draw(), again.draw(), strict=True):
        assert all(torch.equal(t, b.stacked[name]) for name, t in a.stacked.items())
    assert [e["epochs_done"] for e in read_events(tmp_path / "run") if e["event"] == "epoch"] == [1, 2, 3, 4]
    assert "resume" in [e["event"] for e in read_events(tmp_path / "run")]


def interrupt_twice():
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert interruption.asked
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_a_second_ctrl_c_does_not_wait():
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert time.monotonic() - began < 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_are_left_alone_outside_the_main_thread(tmp_path):
    failures = []

    def work():
        try:
            fit(tmp_path, epochs=1)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not the folder of a run: it has no manifest.json, but notes.txt"),
        ('{"format_version": 1, "what": "run", "sta', "manifest.json is damaged"),
        ('{"any": "thing"}', "is not a run of polymode"),
        ('{"format_version": 99, "what": "run"}', "has format 99, this polymode reads up to"),
    ],
)
def test_foreign_damaged_and_newer_folders_are_refused(tmp_path, content, message):
    (tmp_path / "notes.txt").write_text("mine")
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, resume=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_folder_of_another_run_is_refused(tmp_path):
    fit(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another run: its epochs is 3, now it is 5"):
        fit(tmp_path, epochs=5, resume=True)


def test_folders_of_an_earlier_version_are_read_when_finished_and_refused_when_not(tmp_path, monkeypatch):
    """Format 2 named some options and tensors otherwise."""
    with monkeypatch.context() as earlier:
        earlier.setattr(storage, "FORMAT_VERSION", 2)
        finished = fit(tmp_path / "finished")

        def stop(epoch):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "cut", observer=stop)
    again = fit(tmp_path / "finished", resume=True)
    assert torch.equal(again.predict(X).mean, finished.predict(X).mean)
    with pytest.raises(CheckpointError, match=r"written by an earlier version.*unfinished runs cannot go on"):
        fit(tmp_path / "cut", resume=True)
    with pytest.raises(CheckpointError, match=r"its epochs is .*made by an earlier version"):
        fit(tmp_path / "finished", resume=True, epochs=7)


def test_data_that_differ_are_told_by_their_sizes_and_not_by_hashes(tmp_path):
    def resumed(data, folder=tmp_path / "run", **options):
        options = {"progress": False, "backend": "loop", "likelihood": "categorical", "epochs": 1} | options
        model = lambda: pm.models.MLP(3, 2, (4,))  # noqa: E731
        return pm.fit(pm.methods.Single(), model, data, run_dir=folder, resume=True, **options)

    def refused(data, message, **options):
        with pytest.raises(CheckpointError, match=message) as error:
            resumed(data, **options)
        assert not re.search("[0-9a-f]{20}", str(error.value))

    resumed(DATA, validation=DATA)
    half, other = DATA.subset(range(30)), pm.ArrayData(X + 1, DATA.targets, batch_size=20)
    refused(
        half,
        r"its training data differ, 60 examples in batches of 20 there and 30 examples in batches of 20 now\."
        " Resume with the same data",
        validation=DATA,
    )
    refused(other, "60 examples in batches of 20 there and now, but not the same", validation=DATA)
    refused(DATA, "its validation data differ, 60 examples", validation=other)
    refused(DATA, "it has 1 sets of validation data, now there are 0")
    many = tmp_path / "many"
    resumed([DATA, DATA], folder=many)
    refused([DATA, half], r"its training data number 1 \(counted from 0\) differ, 60", folder=many)
    # Folders that do not know the sizes say which data differ all the same.
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["signature"]["sizes"], manifest[DIGEST]
    write_document(path, "run", manifest)
    refused(half, r"its training data differ\. Resume", validation=DATA)
    resumed(DATA, validation=DATA)


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    def collide(epoch):
        with pytest.raises(CheckpointError, match="Another run is working in"):
            fit(tmp_path, resume=True)

    fit(tmp_path, epochs=1, observer=collide)
    fit(tmp_path, epochs=1, resume=True)  # the folder is free again


def test_a_final_save_that_fails_costs_no_training(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pm.Particles, "save", full)
        with pytest.raises(OSError, match="No space"):
            fit(tmp_path, epochs=4)
    trained = []
    again = fit(tmp_path, epochs=4, resume=True, observer=trained.append)
    assert trained == []
    undisturbed = fit(None, epochs=4)
    for a, b in zip(undisturbed.draw(), again.draw(), strict=True):
        assert all(torch.equal(t, b.stacked[name]) for name, t in a.stacked.items())


def fit_large(folder, stop_after=None):
    """A run whose checkpoints are larger than 100 kB."""

    def observer(epoch):
        if epoch.epochs_done == stop_after:
            raise RuntimeError("full")

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return pm.fit(
        pm.methods.Single(),
        lambda: pm.models.MLP(64, 2, (256,)),
        pm.ArrayData(x, (x.sum(1) > 0).long()),
        likelihood="categorical",
        epochs=3,
        run_dir=folder,
        resume=True,
        checkpoint_seconds=0,
        progress=False,
        backend="loop",
        observer=observer,
    )


def fit_in_little_room(folder, note):
    """A limit on the size of files is the closest thing to a full disk that needs no rights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        fit_large(folder)
    except CheckpointError as error:
        note.write_text(str(error))


def test_no_room_for_a_checkpoint_is_said_and_nothing_earlier_is_lost(tmp_path):
    folder, note = tmp_path / "run", tmp_path / "note.txt"
    process = fork(fit_in_little_room, folder, note)  # which keeps the limit to itself
    process.join(timeout=300)
    assert process.exitcode == 0
    said = note.read_text()
    assert "cannot be written" in said
    assert "Whatever was written before is whole" in said
    assert not list(folder.rglob("*.partial"))
    fit_large(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"


def test_no_room_in_the_middle_of_a_run_keeps_the_epochs_before(tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with pytest.raises(RuntimeError, match="full"):
        fit_large(cut, stop_after=2)
    assert [e["epochs_done"] for e in epochs_of(cut)] == [1, 2]
    fit_large(cut)
    fit_large(whole)
    logged = [e["epochs_done"] for e in read_events(cut) if e["event"] == "epoch"]
    assert logged == [1, 2, 3]  # the third only: nothing was trained twice
    weights = "posterior-0/members-00000.safetensors"
    assert (cut / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.parametrize("network", [None, {"0.weight": None}, [3]])
def test_a_signature_of_another_form_is_refused(tmp_path, network):
    fit(tmp_path / "run")
    path = tmp_path / "run/manifest.json"
    edit(path, signature__network=network)
    with pytest.raises(CheckpointError):
        fit(tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "names 0 posteriors of 1 data sets"),
        (["posterior-0"] * 2, "names 2 posteriors of 1 data sets"),
        (["x" * 5000], "does not lie in that folder"),
        (["é" * 200], "does not lie in that folder"),
        (["\ud800"], "does not lie in that folder"),
        (["a\nb"], "does not lie in that folder"),
    ],
)
def test_posteriors_of_other_names_or_number_are_refused(tmp_path, names, message):
    fit(tmp_path / "run")
    edit(tmp_path / "run/manifest.json", posteriors=names)
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path / "run", resume=True)


def unpacked(packed, *steps):
    """A value of a checkpoint, as a pair of its name and itself, by the names that lead to it."""
    for step in steps:
        pair = next(pair for pair in packed["items"] if pair[0] == step)
        packed = pair[1]
    return pair


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (("record", "backend"), None, "Unknown backend of the checkpoint None"),
        (("record", "prediction_backend"), "gpu", "Unknown prediction_backend of the checkpoint 'gpu'"),
        (("record", "threads"), "2", "threads of the checkpoint must be a whole number"),
        (("seconds",), [], "not as polymode writes it"),
        (("training", "rate"), "fast", "not as polymode writes it"),
        (("training", "position", "step"), "1", "step of the position is '1'"),
        (("training", "position", "epoch"), -1, "epoch of the position is -1"),
        (("training", "position", "phase"), 10**9, "position"),
        (("training", "position", "entered"), 1, "entered of the position is 1"),
    ],
)
def test_a_checkpoint_of_another_form_is_refused(tmp_path, steps, value, message):
    def stop(epoch):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fit(tmp_path / "run", observer=stop)
    path = tmp_path / "run/checkpoint/checkpoint.json"
    (tmp_path / "run/checkpoint/previous.json").unlink(missing_ok=True)
    content = json.loads(path.read_text())["content"]
    unpacked(content, *steps)[1] = {"value": value}
    edit(path, content=content)
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path / "run", resume=True)


def test_a_history_without_losses_is_refused(tmp_path):
    def stop(epoch):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fit(tmp_path / "run", observer=stop)
    path = tmp_path / "run/checkpoint/checkpoint.json"
    (tmp_path / "run/checkpoint/previous.json").unlink(missing_ok=True)
    content = json.loads(path.read_text())["content"]
    unpacked(content, "training", "history", "columns", "loss")[0] = "lost"
    edit(path, content=content)
    with pytest.raises(CheckpointError, match=r"not as polymode writes it .KeyError: 'loss'"):
        fit(tmp_path / "run", resume=True)
