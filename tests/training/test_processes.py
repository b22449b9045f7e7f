"""Chains divided among processes are the chains of one process."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import polymode as pm
from cases import BY_NAME
from contract.sketches import Masked
from forks import FORKS
from polymode.errors import CheckpointError, InputError, PolymodeError
from polymode.training import epochs_of
from polymode.training.loop import processes as processes_module
from polymode.training.loop.processes import divided
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


@pytest.fixture
def forked(monkeypatch):
    """Processes that begin at once; what they get travels as it does to spawned ones."""
    monkeypatch.setattr(processes_module.multiprocessing, "get_context", lambda kind: FORKS)


def weights(posterior):
    blocks = list(posterior.draw())
    found = {name: torch.cat([b.stacked[name] for b in blocks]) for name in blocks[0].stacked}
    return found | {"labels": torch.cat([b.labels for b in blocks])}


def assert_same(first, second):
    assert_equal_up_to_rounding(weights(first), weights(second))


def test_chains_are_divided_evenly():
    assert divided(range(2, 9), 3) == [range(2, 4), range(4, 6), range(6, 9)]
    assert divided(range(3), 3) == [range(1), range(1, 2), range(2, 3)]


def test_results_do_not_depend_on_the_number_of_processes(tmp_path, forked):
    data = [CASE.data(), CASE.data(17, seed=2)]
    alone = fitted(data=data)
    for folder in (None, tmp_path / "run"):
        several = fitted(data=data, processes=2, run_dir=folder)
        for one, other in zip(alone, several, strict=True):
            assert_same(one, other)
            assert other.record["member_epochs"] == pytest.approx(one.record["member_epochs"])
            assert other.record["findings"] == one.record["findings"]
    assert not (tmp_path / "run" / "processes").exists()
    again = fitted(data=data, processes=2, run_dir=tmp_path / "run", resume=True)
    assert_same(again[0], alone[0])
    in_one = fitted(data=data, run_dir=tmp_path / "run", resume=True)  # a finished run is one run
    assert_same(in_one[1], alone[1])


def test_what_members_are_measured_by_is_logged_by_all_processes(tmp_path, forked):
    method = pm.methods.DeepEnsemble(3, of=Masked())
    fitted(method=method, run_dir=tmp_path / "one")
    fitted(method=method, run_dir=tmp_path / "two", processes=2)
    alone, joined = (
        [epoch["measures"]["sparsity"] for epoch in epochs_of(tmp_path / name)] for name in ("one", "two")
    )
    assert [len(members) for members in joined] == [3] * 4
    assert joined == alone  # shares of zeros, which masks alone decide


def test_more_processes_than_chains_and_models_that_cannot_travel():
    with pytest.raises(InputError, match="processes=4, but sequential_anchored has 3 chain"):
        fitted(processes=4)
    with pytest.raises(InputError, match="processes must be a whole number of at least 1, got 0"):
        fitted(processes=0)
    with pytest.raises(InputError, match="method and model travel to other processes"):
        fitted(processes=2, model=lambda: network())
    with pytest.raises(InputError, match="observer= and extend= need processes=1"):
        fitted(processes=2, observer=print)


@pytest.mark.filterwarnings("ignore:.* trains several chains of one module")
def test_a_failure_in_a_process_is_told(forked):
    with pytest.raises(PolymodeError, match=r"In process [01]: .*no memory left"):
        fitted(processes=2, model=Broken())


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import polymode as pm
from cases import BY_NAME
from training.test_processes import METHOD, network
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
def test_an_interrupted_run_goes_on(tmp_path, forked, undisturbed, to):
    """Ctrl-C reaches every process, or the first one alone; each keeps what it has done.

    The script spawns its processes, as fit does.
    """
    tests = os.path.dirname(os.path.dirname(__file__))
    script = tmp_path / "script.py"
    folder = tmp_path / "run"
    script.write_text(SCRIPT.format(tests=tests, folder=str(folder)))
    process = subprocess.Popen([sys.executable, script], start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(folder.glob("processes/*/checkpoint/state-*"))) < 2:
        time.sleep(0.05)
    if to == "all":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)  # a scheduler tells the first process only
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert len(list(folder.glob("processes/*/checkpoint/state-*"))) >= 2
    assert not (folder / "posterior-0").exists()
    for number in (1, 3):
        with pytest.raises(CheckpointError, match="was begun with processes=2: go on with that number"):
            fitted_long(folder, processes=number, resume=True)
    fitted_long(folder, processes=2, resume=True)
    posterior, one = undisturbed
    assert_same(pm.load_posterior(folder, network), posterior)
    several = epochs_of(folder)
    assert [e["epochs_done"] for e in several] == [e["epochs_done"] for e in one]
    assert several[-1]["losses"] == pytest.approx(one[-1]["losses"])
    assert several[-1]["member_epochs"] == pytest.approx(one[-1]["member_epochs"])
