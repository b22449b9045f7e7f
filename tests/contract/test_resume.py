"""``kill -9`` at any moment, and the run still ends with the bits of an undisturbed one."""

import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME
from contract import worker
from contract.registry import SMALL, accepts
from forks import fork
from polymode.errors import CheckpointError, InputError
from polymode.methods import METHODS
from polymode.storage import checksum, read_document


def network_for(method: str) -> str:
    """Running statistics and noise as part of the state, where the method can have them."""
    return "batch_norm_and_dropout" if accepts(method, "batch_norm_and_dropout") else "layer_norm"


def finish(method, network, folder) -> None:
    process = fork(worker.main, method, network, folder)
    process.join(timeout=300)
    assert process.exitcode == 0


def states(folder: Path) -> set[str]:
    """The checkpoints that are there now; the run makes and removes their folder meanwhile."""
    try:
        return {name for name in os.listdir(folder / "checkpoint") if name.startswith("state-")}
    except FileNotFoundError:
        return set()


def posterior_bits(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "posterior-0").glob("*.safetensors"))}


# Five processes a case: one network for every method, the global random state once.
@pytest.mark.parametrize(
    ("method", "network"),
    [*((name, network_for(name)) for name in METHODS), ("deep_ensemble", "functional_dropout")],
)
def test_killed_runs_end_with_the_same_bits(method, network, tmp_path):
    # Checkpoints seen before the kill: in the first epochs and later.
    assert kill_and_compare(method, network, tmp_path, (3, 11, 30)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_dozen_kills(method, tmp_path):
    """Every kill comes a few checkpoints after the last one, at whatever moment that is."""
    moments = (1, 2, 3, 4, 5, 4, 3, 2, 1, 6, 7, 8)
    assert kill_and_compare(method, network_for(method), tmp_path, moments) >= 10


def kill_and_compare(method, network, folder, moments) -> int:
    """Kill a run at some moments, let it end, compare its bits; returns how many kills met it alive."""
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    finish(method, network, undisturbed)
    kills = 0
    for number in moments:
        process = fork(worker.main, method, network, disturbed)
        seen: set[str] = set()
        while process.is_alive() and len(seen) < number:
            seen |= states(disturbed)
            time.sleep(0.0005)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if (disturbed / "posterior-0").exists():
            break
    finish(method, network, disturbed)
    assert posterior_bits(disturbed) == posterior_bits(undisturbed)
    return kills


def run(folder, *, epochs=3, case="mlp", **options):
    network = BY_NAME[case]
    options = {
        "progress": False,
        "backend": "loop",
        "run_dir": folder,
        "checkpoint_seconds": 0.0,
    } | options
    return pm.fit(
        options.pop("method", None) or SMALL["deep_ensemble"](),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_cut_within_an_epoch_goes_on_to_the_same_bits(tmp_path, dtype):
    """Batches of 7 × 5 numbers fill no whole vectors: where they stand in memory decides how they round."""
    stop_at: list[int] = []

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)

        def forward(self, x):
            if self.training and stop_at:
                stop_at[0] -= 1
                if stop_at[0] == 0:
                    raise Stop
            return self.layers(x)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 5, generator=generator).to(dtype)
    data = pm.ArrayData(inputs, torch.arange(60) % 3, batch_size=7)
    expected = weights(run(None, model=Cut, data=data))
    for step in (4, 9, 15):
        stop_at[:] = [2 * step]  # two members
        with pytest.raises(Stop):
            run(tmp_path / str(step), model=Cut, data=data)
        stop_at.clear()
        resumed = weights(run(tmp_path / str(step), model=Cut, data=data, resume=True))
        assert all(torch.equal(t, expected[n]) for n, t in resumed.items())


def test_a_damaged_checkpoint_falls_back_to_its_predecessor(tmp_path):
    expected = weights(run(None))
    interrupted(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoint").glob("state-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"damaged.*predecessor"):
        resumed = weights(run(tmp_path / "run", resume=True))
    assert all(torch.equal(t, expected[n]) for n, t in resumed.items())
    assert not (tmp_path / "run" / "checkpoint").exists()  # all is in the posterior now


def test_a_damaged_manifest_falls_back_too_and_checkpoints_go_on(tmp_path):
    expected = weights(run(None))
    interrupted(tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "checkpoint.json").write_text('{"format')
    with pytest.warns(UserWarning, match=r"damaged.*predecessor"):
        resumed = weights(run(tmp_path / "run", resume=True))
    assert all(torch.equal(t, expected[n]) for n, t in resumed.items())


def test_newest_and_predecessor_are_kept(tmp_path):
    interrupted(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint"
    documents = [read_document(folder / f"{name}.json", "checkpoint") for name in ("previous", "checkpoint")]
    stored = sorted(folder.glob("state-*"))  # named by the numbers of their steps
    assert [path.name for path in stored] == [document["tensors"] for document in documents]
    assert [checksum(path) for path in stored] == [document["checksum"] for document in documents]


@pytest.mark.parametrize("case", ["convolution", "batch_norm_and_dropout", "lstm"])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "Adagrad", "RMSprop", "LBFGS", "Adafactor"])
def test_every_optimiser_resumes_exactly(case, optimizer, tmp_path):
    """Moments go back to the weights they belong to, whatever the memory format; so do the best weights."""
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    method = pm.methods.DeepEnsemble(
        2,
        of=pm.methods.Single(
            optimizer=pm.Optimizer(optimizer, lr=0.01, **options),
            schedule=functools.partial(_halved, by=2.0),
            keep="best",
        ),
    )
    validation = BY_NAME[case].data(16, seed=3)
    expected = weights(run(None, case=case, method=method, validation=validation))
    interrupted(tmp_path / "run", case=case, method=method, validation=validation)
    resumed = weights(run(tmp_path / "run", resume=True, case=case, method=method, validation=validation))
    assert all(torch.equal(t, expected[n]) for n, t in resumed.items())


def _halved(progress, by):
    return 1 / (1 + progress.step / by)


def test_an_observer_that_raises_loses_nothing(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path / "run", observer=stop_after(2), checkpoint_seconds=3600.0)
    seen = []
    run(tmp_path / "run", resume=True, observer=seen.append)
    assert [epoch.epoch for epoch in seen] == [3]


def test_nothing_readable_is_an_error(tmp_path):
    interrupted(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").glob("state-*"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"No checkpoint .* can be used"):
        run(tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": lambda: pm.models.MLP(4, 3, (9,)).double()}, "another network: '1.bias'"),
        ({"epochs": 4}, "its epochs is 3, now it is 4"),
        ({"seed": 5}, "its seeds is \\[0\\], now it is \\[5\\]"),
        ({"data": BY_NAME["mlp"].data(seed=7)}, "its training data differ"),
        ({"validation": BY_NAME["mlp"].data(seed=8)}, "it has 0 sets of validation data, now there are 1"),
    ],
    ids=["network", "epochs", "seed", "data", "validation"],
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
    with pytest.raises(CheckpointError, match="no such folder"):
        pm.load_posterior(tmp_path / "nowhere", BY_NAME["mlp"].double_factory)


def test_the_folder_of_a_run_can_be_loaded(tmp_path):
    posterior = run(tmp_path / "run")
    loaded = pm.load_posterior(tmp_path / "run", BY_NAME["mlp"].double_factory)
    assert all(torch.equal(t, weights(posterior)[n]) for n, t in weights(loaded).items())
    with pytest.raises(InputError, match="holds a posterior already"):
        loaded.save(tmp_path / "run" / "posterior-0")
    interrupted(tmp_path / "cut")
    with pytest.raises(CheckpointError, match="has not ended"):
        pm.load_posterior(tmp_path / "cut", BY_NAME["mlp"].double_factory)


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

    storage.write_document(tmp_path / "a.json", "test", {"old": True})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device\. Whatever was written before is whole"
    ):
        storage.write_document(tmp_path / "a.json", "test", {"old": False})
    assert storage.read_document(tmp_path / "a.json", "test")["old"] is True
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
