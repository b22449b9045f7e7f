"""``kill -9`` at any moment, and the run still ends with the bits of an undisturbed one."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import polymode as pm
from cases import BY_NAME
from contract.registry import SMALL
from polymode.errors import CheckpointError, InputError
from polymode.methods import METHODS

WORKER = Path(__file__).parent / "worker.py"


def start(method, network, folder) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, WORKER, method, network, folder])


def finish(method, network, folder) -> None:
    assert start(method, network, folder).wait(timeout=120) == 0


def posterior_bits(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "posterior-0").glob("*.safetensors"))}


# Six processes a case: one network for every method, the global random state once.
@pytest.mark.parametrize(
    ("method", "network"),
    [*((name, "batch_norm_and_dropout") for name in METHODS), ("deep_ensemble", "functional_dropout")],
)
def test_killed_runs_end_with_the_same_bits(method, network, tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    finish(method, network, undisturbed)
    kills = 0
    for number in (3, 11, 30):  # checkpoints seen before the kill: in the first epochs and later
        process = start(method, network, disturbed)
        seen: set[str] = set()
        while process.poll() is None and len(seen) < number:
            seen |= {p.name for p in (disturbed / "checkpoint").glob("state-*")}
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        if (disturbed / "run.json").exists():
            break
    assert kills >= 2
    finish(method, network, disturbed)
    assert posterior_bits(disturbed) == posterior_bits(undisturbed)


def run(folder, *, epochs=3, case="mlp", **options):
    network = BY_NAME[case]
    options = {
        "progress": False,
        "backend": "loop",
        "run_dir": folder,
        "checkpoint_seconds": 0.0,
    } | options
    return pm.fit(
        SMALL["deep_ensemble"](),
        options.pop("model", network.double_factory),
        options.pop("data", network.data()),
        likelihood=network.likelihood,
        epochs=epochs,
        **options,
    )


class Stop(Exception):
    pass


def stop_after(epochs):
    def observer(epoch):
        if epoch.epoch == epochs:
            raise Stop

    return observer


def interrupted(folder, **options):
    with pytest.raises(Stop):
        run(folder, observer=stop_after(2), **options)


def weights(posterior):
    [block] = posterior.draw()
    return block.stacked


def test_a_damaged_checkpoint_falls_back_to_its_predecessor(tmp_path):
    expected = weights(run(None))
    interrupted(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoint").glob("state-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"damaged.*predecessor"):
        resumed = weights(run(tmp_path / "run", resume=True))
    assert all(torch.equal(t, expected[n]) for n, t in resumed.items())
    assert len(list((tmp_path / "run" / "checkpoint").glob("state-*"))) == 2  # newest and predecessor


def test_nothing_readable_is_an_error(tmp_path):
    interrupted(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").glob("state-*"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"No checkpoint .* can be read"):
        run(tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": lambda: pm.models.MLP(4, 3, (9,)).double()}, "another network: '1.bias'"),
        ({"epochs": 4}, "its epochs is 3, now it is 4"),
        ({"seed": 5}, "its seeds is \\[0\\], now it is \\[5\\]"),
        ({"data": BY_NAME["mlp"].data(seed=7)}, "its data is"),
    ],
    ids=["network", "epochs", "seed", "data"],
)
def test_a_checkpoint_of_another_run_is_refused(changed, message, tmp_path):
    interrupted(tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        run(tmp_path / "run", resume=True, **changed)
    run(tmp_path / "run", resume=True)  # and is still there
    with pytest.raises(CheckpointError, match=message):  # a finished run is not taken for another
        run(tmp_path / "run", resume=True, **changed)


def test_a_run_folder_is_never_overwritten(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(InputError, match="not empty"):
        run(tmp_path / "run")


@pytest.mark.parametrize("damage", ["not json", '{"format_version": 99}', "{}"])
def test_foreign_posteriors_are_refused(damage, tmp_path):
    run(None).save(tmp_path / "saved")
    (tmp_path / "saved" / "posterior.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"damaged|update polymode|no format_version"):
        pm.load_posterior(tmp_path / "saved", BY_NAME["mlp"].double_factory)
    with pytest.raises(CheckpointError, match="is missing"):
        pm.load_posterior(tmp_path / "nowhere", BY_NAME["mlp"].double_factory)


def test_a_damaged_posterior_is_refused(tmp_path):
    run(None).save(tmp_path / "saved")
    path = tmp_path / "saved" / "members-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        pm.load_posterior(tmp_path / "saved", BY_NAME["mlp"].double_factory)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    from polymode import storage

    storage.write_json(tmp_path / "a.json", {"format_version": 1, "old": True})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        storage.write_json(tmp_path / "a.json", {"format_version": 1, "old": False})
    assert storage.read_json(tmp_path / "a.json", "test")["old"] is True
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_pack_and_unpack_are_inverse():
    from polymode.storage import pack, unpack

    generator = torch.Generator().manual_seed(3)
    value = {"a": [1, 2.5, None, "x", True], 0: {"t": torch.arange(3)}, "g": generator}
    tensors: dict = {}
    packed = pack(value, tensors)
    back = unpack(packed, tensors)
    assert back["a"] == value["a"]
    assert torch.equal(back[0]["t"], torch.arange(3))
    assert torch.equal(torch.rand(3, generator=back["g"]), torch.rand(3, generator=generator))
    with pytest.raises(CheckpointError, match="cannot be written"):
        pack({"f": print}, {})
