"""Minibatches that several processes share give what one process gives."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import polymode as pm
from polymode.errors import InputError
from polymode.training.contract.ranks import Ranks
from polymode.training.loop.run import Run
from training.ranks_worker import CASES

TESTS = Path(__file__).parents[1]
# What gloo needs to begin anew on one machine after a process has died.
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(TESTS),
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "OMP_NUM_THREADS": "1",
}
TOGETHER = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the worker finds alone, and as each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, command in (("one", [sys.executable]), ("two", TOGETHER)):
        (folder / name).mkdir()
        worker = str(TESTS / "training" / "ranks_worker.py")
        done = subprocess.run(
            [*command, worker, str(folder / name)],
            env=ENVIRONMENT,
            capture_output=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()[-3000:]
    files = [folder / "one" / "alone.json", folder / "two" / "0.json", folder / "two" / "1.json"]
    return [json.loads(path.read_text()) for path in files]


@pytest.mark.parametrize(("network", "method", "backend"), CASES[:8], ids=str)
def test_two_processes_train_as_one(found, network, method, backend):
    """Over 56 steps, in double precision: losses, budget and predictions; both hold the same members."""
    one, first, second = (each[f"{network}-{method}-{backend}"] for each in found)
    double = {"dtype": torch.float64}
    losses = (torch.tensor(each["losses"], **double) for each in (first, one))
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9, equal_nan=True)
    before, after = torch.tensor(one["mean"], **double), torch.tensor(first["mean"], **double)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
    # The first holds its members, the others read them: in blocks of other shapes.
    torch.testing.assert_close(torch.tensor(second["mean"], **double), after, rtol=1e-13, atol=1e-13)
    assert first["member_epochs"] == pytest.approx(one["member_epochs"])
    assert second["losses"] == []  # the first one tells
    if backend == "loop":
        assert [each["typical"] for each in (one, first, second)] == [9, 4, 5]


@pytest.mark.parametrize("case", ["tokens", "few tokens under a prior"])
def test_shares_without_any_observation_do_not_count(found, case):
    """Minibatches of which no rank has any have the prior alone."""
    one, first, _ = (torch.tensor(each[case]["losses"], dtype=torch.float64) for each in found)
    assert len(one) == 8
    torch.testing.assert_close(first, one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("statistics-single-loop", "depends on the minibatch around it"),
        ("stateless-single-loop", "depends on the minibatch around it"),
        ("centred-single-loop", "depends on the minibatch around it"),
        ("global-single-loop", "draws random numbers by itself"),
        ("plain-hmc-loop", "hmc moves by the gradient of all data"),
    ],
)
def test_what_would_differ_is_refused(found, case, message):
    one, first, second = (each[case] for each in found)
    assert "losses" in one
    assert message in first["error"]
    assert message in second["error"]


def test_processes_that_were_told_different_things_do_not_wait_for_each_other(found):
    for each in found[1:]:
        assert (
            "epochs is 2 on rank 0 and 3 on rank 1. Start all of them with the same" in each["told otherwise"]
        )


def test_a_folder_that_not_all_processes_see_is_refused(tmp_path):
    class Apart(Ranks):
        def first(self, value):
            return value

        def all_of(self, value):
            return [value, False]

    run = SimpleNamespace(ranks=Apart(2, 0))
    with pytest.raises(InputError, match=r"is not seen by rank 1\. Choose a run_dir"):
        Run._check_shared(run, tmp_path / "run")  # type: ignore[arg-type]
    assert list((tmp_path / "run").iterdir()) == []


def test_shares_are_parts_of_a_batch_and_small_ones_do_not_count():
    shares = [Ranks(3, rank).share(slice(10, 18)) for rank in range(3)]
    assert [place for part, counts in shares if counts for place in range(18)[part]] == list(range(10, 18))
    shares = [Ranks(3, rank).share(slice(4, 6)) for rank in range(3)]
    assert [counts for _, counts in shares] == [False, True, True]
    assert [part for part, _ in shares] == [slice(4, 5), slice(4, 5), slice(5, 6)]


def test_without_others_it_is_refused():
    data = pm.ArrayData(torch.randn(8, 2), torch.arange(8) % 2)
    options = {"likelihood": "categorical", "epochs": 1, "data_parallel": True}
    with pytest.raises(InputError, match="init_process_group"):
        pm.fit(pm.methods.Single(), lambda: pm.models.MLP(2, 2, (3,)), data, **options)
    with pytest.raises(InputError, match="leave engine"):
        pm.fit(pm.methods.Single(), lambda: pm.models.MLP(2, 2, (3,)), data, **options, processes=2)


def network():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def test_a_killed_rank_is_started_again_and_the_command_goes_on(tmp_path):
    """torchrun starts all ranks anew; the run goes on to the bits of an undisturbed one."""
    train = [
        "-m",
        "--",
        "polymode",
        "train",
        "--data",
        "digits",
        "--model",
        "ranks_worker_net:build",
        "--quiet",
    ]
    (tmp_path / "ranks_worker_net.py").write_text(
        "import torch\n\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    train += ["--method", "single", "--epochs", "60", "--threads", "1", "--backend", "loop"]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{TESTS}:{tmp_path}"}
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    options = {"env": environment, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": tmp_path}
    subprocess.run([*TOGETHER, *train, "--run", str(undisturbed)], timeout=300, check=True, **options)
    together = [*TOGETHER, "--max-restarts", "2", *train, "--run", str(disturbed)]
    process = subprocess.Popen(together, **options)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (disturbed / "checkpoint").exists():
        time.sleep(0.02)
    ranks = subprocess.run(
        ["pgrep", "-f", f"polymode train.*{disturbed}"], capture_output=True, text=True, check=False
    ).stdout.split()
    victim = max(int(each) for each in ranks if int(each) != process.pid)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-3000:]
    for path in sorted((undisturbed / "posterior-0").glob("*.safetensors")):
        assert path.read_bytes() == (disturbed / "posterior-0" / path.name).read_bytes()
    # Begun in one process, it goes on in two.
    alone = tmp_path / "alone"
    process = subprocess.Popen([sys.executable, *train[:1], *train[2:], "--run", str(alone)], **options)
    while time.monotonic() < deadline and not (alone / "checkpoint").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert json.loads((alone / "manifest.json").read_text())["status"] == "running"
    subprocess.run([*TOGETHER, *train, "--run", str(alone)], timeout=300, check=True, **options)
    inputs = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before, after = (
        pm.load_posterior(each / "posterior-0", network).predict(inputs).mean for each in (undisturbed, alone)
    )
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
