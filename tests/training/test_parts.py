"""A run that is worked on in parts is the run of one process."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import polymode as pm
from cases import BY_NAME
from contract.sketches import Masked
from polymode.errors import CannotVectorise, CheckpointError, InputError, NonFiniteLoss, PolymodeError
from polymode.storage import read_document
from polymode.training import epochs_of
from polymode.training.keeping.events import read_events
from polymode.training.keeping.progress import Silent
from polymode.training.loop import engine, work
from polymode.training.loop.engine import Needs
from polymode.training.loop.material import Request
from polymode.training.loop.parts import DividedRun, Share, shares_of
from polymode.training.loop.settings import Computing, Keeping
from polymode.training.loop.work import Orders, Outcome
from tolerances import assert_equal_up_to_rounding

CASE = BY_NAME["mlp"]
METHOD = pm.methods.SequentialAnchored(
    3, prior_std=1.0, walk=pm.samplers.GuidedWalk(3.0), short_epochs=1, optimizer=pm.Optimizer("SGD", lr=0.1)
)


def network():
    return pm.models.MLP(4, 3, (6,)).double()


class Broken(torch.nn.Module):
    """Works in the process that made it, as it does when bad luck strikes elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3).double()
        self.home = os.getpid()

    def forward(self, x):
        if os.getpid() != self.home and self.training:
            raise RuntimeError("no memory left")
        return self.layer(x)


def fitted(**options):
    options = {"epochs": 4, "progress": False, "backend": "loop"} | options
    model = options.pop("model", network)
    data = options.pop("data", CASE.data())
    method = options.pop("method", METHOD)
    return pm.fit(method, model, data, likelihood="categorical", **options)


def weights(posterior):
    blocks = list(posterior.draw())
    found = {name: torch.cat([b.stacked[name] for b in blocks]) for name in blocks[0].stacked}
    return found | {"labels": torch.cat([b.labels for b in blocks])}


def assert_same(first, second):
    assert_equal_up_to_rounding(weights(first), weights(second))


def test_data_sets_are_divided_first_then_chains():
    assert [share.chains for share in shares_of(1, range(2, 9), 3)] == [range(2, 4), range(4, 6), range(6, 9)]
    assert shares_of(3, range(2), 2) == [Share(range(1), range(2)), Share(range(1, 3), range(2))]
    assert shares_of(2, range(3), 4) == [
        Share(data, chains) for data in (range(1), range(1, 2)) for chains in (range(1), range(1, 3))
    ]
    for sets, chains, workers in itertools.product((1, 2, 5), (1, 3, 4), (1, 2, 7, 100)):
        shares = shares_of(sets, range(chains), workers)
        units = [unit for share in shares for unit in itertools.product(share.data_sets, share.chains)]
        assert sorted(units) == list(itertools.product(range(sets), range(chains)))  # each once
        assert len(shares) <= workers


def test_results_do_not_depend_on_the_number_of_processes(tmp_path):
    data = [CASE.data(), CASE.data(17, seed=2)]
    alone = fitted(data=data)
    for folder in (None, tmp_path / "run"):
        several = fitted(data=data, processes=2, run_dir=folder)
        for one, other in zip(alone, several, strict=True):
            assert_same(one, other)
            assert other.record["member_epochs"] == pytest.approx(one.record["member_epochs"])
            assert other.record["findings"] == one.record["findings"]
    assert not (tmp_path / "run" / "parts").exists()
    again = fitted(data=data, processes=2, run_dir=tmp_path / "run", resume=True)
    assert_same(again[0], alone[0])
    in_one = fitted(data=data, run_dir=tmp_path / "run", resume=True)  # a finished run is one run
    assert_same(in_one[1], alone[1])


def test_what_members_are_measured_by_is_logged_by_all_processes(tmp_path):
    method = pm.methods.DeepEnsemble(3, of=Masked())
    fitted(method=method, run_dir=tmp_path / "one")
    fitted(method=method, run_dir=tmp_path / "two", processes=2)
    alone, joined = (
        [epoch["measures"]["sparsity"] for epoch in epochs_of(tmp_path / name)] for name in ("one", "two")
    )
    assert [len(members) for members in joined] == [3] * 4
    assert joined == alone  # shares of zeros, which masks alone decide


def test_damaged_data_and_logs_of_parts_do_no_harm(tmp_path, monkeypatch):
    """Data are written anew by whoever goes on; lines of a part's log that are gone are left out."""
    alone = fitted(method=pm.methods.DeepEnsemble(2))
    cut, work_through = tmp_path / "cut", work.work_through

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "work_through", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted(method=pm.methods.DeepEnsemble(2), run_dir=cut, processes=2)
    [data] = (cut / "parts" / "shared").glob("data-*")
    content = bytearray(data.read_bytes())
    content[-20] ^= 1
    data.write_bytes(content)

    def then_damaged(*arguments):
        work_through(*arguments)
        log = cut / "parts" / "001" / "events.jsonl"
        lines = [line for line in log.read_text().splitlines() if '"epochs_done": 1,' not in line]
        flipped = [line.replace('"epochs_done": 3', '"epochs_done": 9') for line in lines]
        log.write_text("\n".join(flipped) + "\n")

    monkeypatch.setattr(work, "work_through", then_damaged)
    with pytest.warns(UserWarning, match="1 damaged line was passed over"):
        assert_same(fitted(method=pm.methods.DeepEnsemble(2), run_dir=cut, resume=True, processes=2), alone)
    found = epochs_of(cut)
    assert [epoch["epochs_done"] for epoch in found] == [2, 3, 4]
    assert all(len(epoch["losses"]) == 2 for epoch in found)


def test_a_log_that_is_missing_is_told_of(tmp_path, monkeypatch):
    work_through = work.work_through

    def then_removed(*arguments):
        work_through(*arguments)
        (tmp_path / "run" / "parts" / "000" / "events.jsonl").unlink()

    monkeypatch.setattr(work, "work_through", then_removed)
    with pytest.warns(UserWarning, match="log of a part of the run"):
        fitted(method=pm.methods.DeepEnsemble(2), run_dir=tmp_path / "run", processes=2)
    assert epochs_of(tmp_path / "run") == []


@pytest.mark.filterwarnings("ignore:.* trains several chains of one module")
def test_one_worker_is_a_process_of_its_own():
    """joblib would do the work of one worker where it is; what crashes there takes the caller along."""
    home = os.getpid()
    data = CASE.data()
    method = pm.methods.DeepEnsemble(2)
    with pytest.raises(PolymodeError, match="no memory left"):  # only in another process
        fitted(method=method, data=data, model=Broken(), engine=pm.Engine("local", workers=1), epochs=1)
    assert os.getpid() == home


def test_who_divided_the_work_is_nobodys_orphan(tmp_path, monkeypatch):
    """Work may be done where it was divided; the shell that started that process may end (nohup)."""
    own, other = Orders(tmp_path), Orders(tmp_path, leader=os.getpid() + 1)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert other.is_orphaned
    assert not own.is_orphaned


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(InputError, match="processes must be a whole number of at least 1, got 0"):
        fitted(processes=0)
    lock = threading.Lock()
    with pytest.raises(InputError, match=r"What travels to other processes .* cannot"):
        fitted(processes=2, model=lambda: (lock, network())[1])
    with pytest.raises(InputError, match="observer= and extend= are about a run in this process"):
        fitted(processes=2, observer=print)
    with pytest.raises(InputError, match="an engine is given, too: leave one out"):
        fitted(processes=2, engine="local")
    with pytest.raises(InputError, match=r"engine 'spark'.*local"):
        fitted(engine="spark")
    with pytest.raises(InputError, match="engine='ray' needs run_dir"):
        fitted(engine="ray")
    with pytest.raises(InputError, match="goes with it"):
        pm.Engine("local", "tcp://here:1")
    for needs in ({"gpus": 1000}, {"memory": 10**18}, {"cores": 10**6}):
        with pytest.raises(InputError, match=r"This machine does not have what a part needs .*: ask for"):
            fitted(engine=pm.Engine("local", workers=2, **needs))


def test_errors_of_workers_are_what_they_met():
    text = str(CannotVectorise("it looks at a value."))
    error = Outcome(f"a part: {text}", CannotVectorise).exception
    assert isinstance(error, CannotVectorise)
    assert str(error) == f"a part: {text}"
    assert Outcome("a part", NonFiniteLoss).exception.posterior is None


def test_as_many_work_on_this_machine_as_it_has_room_for(monkeypatch):
    monkeypatch.setattr(engine, "available_threads", lambda: 16)
    monkeypatch.setattr(engine, "whole_memory", lambda: 32)

    def workers(**asked):
        with engine.crew_of(pm.Engine("local", workers=asked.pop("workers", None)), Needs(**asked)) as crew:
            return crew.workers

    assert [workers(), workers(cores=5), workers(memory=8), workers(memory=20)] == [16, 3, 4, 1]
    assert workers(memory=8, workers=6) == 6  # whoever says so


def test_parts_that_nobody_takes_up_go_to_a_crew_that_is_counted_anew(tmp_path, monkeypatch):
    """As when a machine of a full cluster is gone: those who have nothing to do keep their places."""
    alone = fitted()
    monkeypatch.setattr(work, "IDLE_PATIENCE", 0.3)
    monkeypatch.setattr(work, "PATIENCE", 0.3)
    worked, counted, stuck = [], [], threading.Event()
    real = work.crew_of

    @contextmanager
    def crew_of(*arguments):
        with real(*arguments) as crew:
            at_work, recount = crew.work, crew.recount

            def first_for_ever(*tasks):
                worked.append(tasks)
                if len(worked) == 1:
                    return stuck.wait(60)
                monkeypatch.setattr(work, "IDLE_PATIENCE", 60.0)
                return at_work(*tasks)

            monkeypatch.setattr(crew, "work", first_for_ever)
            monkeypatch.setattr(crew, "release", stuck.set)
            monkeypatch.setattr(crew, "recount", lambda: counted.append(recount()))
            yield crew

    monkeypatch.setattr(work, "crew_of", crew_of)
    told = []

    class Reporter(Silent):
        def say(self, text):
            told.append(text)

    assert_same(fitted(processes=2, progress=Reporter(), run_dir=tmp_path / "run"), alone)
    assert (len(worked), len(counted)) == (2, 1)
    assert stuck.is_set()
    [line] = told
    assert "nobody has taken up any part" in line


def test_ctrl_c_waits_for_those_who_work(tmp_path):
    orders, put_down = Orders(tmp_path), []

    class Crew:
        workers = 1

        def work(self, function, tasks):
            while not orders.is_stopped:
                time.sleep(0.01)
            time.sleep(0.3)
            put_down.append(True)
            return [Outcome()]

    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        work._followed([], [], Crew(), orders, Silent())  # type: ignore[arg-type]
    assert put_down


def test_nobody_listens_at_the_address(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            InputError, match=rf"No ray cluster was reached at '{address}' .*: start one there"
        ):
            fitted(engine=pm.Engine("ray", address), run_dir=tmp_path / "run")


def test_functions_without_a_name_travel_and_data_and_networks_travel_by_files(tmp_path):
    data = CASE.data()
    initial = fitted(method=pm.methods.DeepEnsemble(2))
    options = {"method": pm.methods.DeepEnsemble(2), "model": lambda: network(), "initial": initial}
    alone = fitted(**options, data=data, validation=data)
    apart = fitted(**options, data=data, validation=data, processes=2)
    assert_same(alone, apart)
    request = Request(
        method=METHOD,
        model=network,
        sources=[data, data],
        validation=None,
        likelihood=pm.likelihoods.make_likelihood("categorical"),
        epochs=1,
        seeds=[0, 1],
        chains=range(3),
        device=torch.device("cpu"),
        precision="full",
        shared_order=False,
        data_sets=range(2),
    )
    run = DividedRun(request, tmp_path, Computing(), Keeping(progress=False))
    run.begin(2)
    parts = run.parts(1, {})
    assert all(part.request.sources == () for part in parts)
    [file] = {each.path for part in parts for each in part.sources}  # once for all
    read = parts[0].whole_request().sources[0]
    assert torch.equal(read.inputs, data.inputs)
    assert torch.equal(read.targets, data.targets)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        parts[1].whole_request()


@pytest.mark.filterwarnings("ignore:.* trains several chains of one module")
def test_a_failure_in_a_process_is_told():
    with pytest.raises(PolymodeError, match=r"sequential_anchored, chains .*no memory left"):
        fitted(processes=2, model=Broken())


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import polymode as pm
from cases import BY_NAME
from training.test_parts import METHOD, network
if __name__ == "__main__":
    pm.fit(
        METHOD, network, BY_NAME["mlp"].data(200, batch_size=2), likelihood="categorical", epochs=10,
        processes=2, run_dir={folder!r}, resume=True, backend="loop", progress=False, checkpoint_seconds=0.1,
    )
"""


def fitted_long(folder, **options):
    """What the script does."""
    return fitted(data=CASE.data(200, batch_size=2), epochs=10, run_dir=folder, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return fitted_long(folder), epochs_of(folder)


@pytest.mark.parametrize("to", ["all", "parent"])
def test_an_interrupted_run_goes_on(tmp_path, undisturbed, to):
    """Ctrl-C reaches every process, or the first one alone; each keeps what it has done.

    The script spawns its processes, as fit does.
    """
    tests = os.path.dirname(os.path.dirname(__file__))
    script = tmp_path / "script.py"
    folder = tmp_path / "run"
    script.write_text(SCRIPT.format(tests=tests, folder=str(folder)))
    process = subprocess.Popen([sys.executable, script], start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(folder.glob("parts/*/checkpoint/state-*"))) < 2:
        time.sleep(0.05)
    if to == "all":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)  # a scheduler tells the first process only
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert len(list(folder.glob("parts/*/checkpoint/state-*"))) >= 2
    assert not (folder / "posterior-0").exists()
    with pytest.raises(CheckpointError, match="was begun in 2 parts: go on with an engine"):
        fitted_long(folder, resume=True)
    fitted_long(folder, processes=3, resume=True)  # it stays in two parts
    posterior, one = undisturbed
    assert_same(pm.load_posterior(folder, network), posterior)
    several = epochs_of(folder)
    assert [e["epochs_done"] for e in several] == [e["epochs_done"] for e in one]
    assert several[-1]["losses"] == pytest.approx(one[-1]["losses"])
    assert several[-1]["member_epochs"] == pytest.approx(one[-1]["member_epochs"])
    record = read_document(folder / "manifest.json", "run")["record"]
    assert [part["backend"] for part in record["parts"]] == ["loop", "loop"]
    assert len(record["shares"]) == 2
    begun = [event["event"] for event in read_events(folder) if event["event"] in ("begin", "resume")]
    assert begun == ["begin", "resume"]
