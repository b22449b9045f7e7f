"""What a run wants to hold at once against what there is, before anything is trained."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import polymode as pm
from polymode import sizes
from polymode.errors import InputError
from polymode.methods import HMC, Microcanonical
from polymode.training.loop import memory

CPU = torch.device("cpu")
FEW = {"num_chains": 1, "num_samples": 2, "descent": 0, "step_size": 0.01}


def data(n=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=generator)  # 64 bytes a row
    return pm.ArrayData(x, x[:, 0], batch_size=8)


def fitted(method, source, **options):
    options = {"epochs": 9, "progress": False, "backend": "vmap"} | options
    likelihood = pm.likelihoods.FixedGaussian()
    return pm.fit(method, lambda: torch.nn.Linear(16, 1), source, likelihood=likelihood, **options)


def test_free_memory_is_read_where_the_system_tells(monkeypatch, tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 4000 kB\nMemFree: 100 kB\nMemAvailable:    2048 kB\n")
    monkeypatch.setattr(sizes, "MEMORY_INFO", info)
    monkeypatch.setattr(sizes, "CONTROL_GROUP", tmp_path)
    assert memory.free_bytes(CPU) == 2048 * 1024
    for content in ("MemTotal: 4000 kB\n", "MemAvailable: much kB\n", ""):
        info.write_text(content)
        assert memory.free_bytes(CPU) is None
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 0\n")
    assert memory.free_bytes(CPU) == 4000
    # Files that a container has read stay in memory until it is wanted for something else.
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 600\ninactive_file 700\nslab 9\n")
    assert memory.free_bytes(CPU) == 1300
    info.write_text("MemTotal: 4000 kB\nMemAvailable:    1 kB\n")
    assert memory.free_bytes(CPU) == 1024
    assert sizes.whole_memory() == 5000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) == 1024
    assert sizes.whole_memory() == 4000 * 1024


def test_a_checkpoint_that_does_not_fit_now_is_not_damaged(monkeypatch, tmp_path):
    """The one before would be taken, and the newest removed."""

    def stopped(epoch):
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    options = {"run_dir": tmp_path / "run", "epochs": 4, "resume": True, "backend": "loop"}
    with pytest.raises(KeyboardInterrupt):
        fitted(pm.methods.Single(), data(), observer=stopped, **options)
    checkpoints = sorted((tmp_path / "run" / "checkpoint").iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "free_memory", lambda: 0)
        patch.setattr(sizes, "ALWAYS_THERE", 0)
        with pytest.raises(InputError, match=r"needs .* of memory, and 0 bytes are free"):
            fitted(pm.methods.Single(), data(), **options)
    assert sorted((tmp_path / "run" / "checkpoint").iterdir()) == checkpoints
    fitted(pm.methods.Single(), data(), **options)


def test_nothing_is_refused_where_nobody_tells(monkeypatch):
    monkeypatch.setattr(sizes, "MEMORY_INFO", Path("/nowhere/meminfo"))
    monkeypatch.setattr(sizes, "CONTROL_GROUP", Path("/nowhere"))
    assert memory.free_bytes(CPU) is None
    assert fitted(Microcanonical(**FEW, warm_up=0.0), data()).num_members == 2


@pytest.mark.parametrize("method", [HMC(**FEW), Microcanonical(**FEW)], ids=lambda m: m.name)
def test_data_that_do_not_fit_are_refused_before_training(monkeypatch, method):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 64 * 64 - 1)
    message = (
        rf"Each step of phase '\w+' of {method.name} needs all 64 examples at once, 0.0 GB of inputs, and "
        r"0.0 GB are free: take fewer examples.*minibatch=True"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "init", lambda *_: pytest.fail("chains were begun"))
        with pytest.raises(InputError, match=message):
            fitted(method, data())
    monkeypatch.setattr(memory, "free_bytes", lambda device: 64 * 64)
    fitted(method, data())


def test_gigabytes_are_named(monkeypatch):
    """50,000 images of 3 · 224 · 224 numbers of 4 bytes."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * 2**29)
    images = SimpleNamespace(num_examples=50_000)
    expected = r"all 50,000 examples at once, 28\.0 GB of inputs, and 1\.5 GB are free"
    with pytest.raises(InputError, match=expected):
        memory.check_whole_fits([images], 5, torch.empty(1, 3, 224, 224), CPU, "a method")


def test_one_data_set_is_held_once_and_several_for_every_chain(monkeypatch):
    """Two seeds of one data set see the same rows; chains on two data sets each have theirs beside them."""
    one, other = data(), data(seed=1)
    method = Microcanonical(**FEW | {"num_chains": 2}, warm_up=0.0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 64 * 64)
    assert len(fitted(method, [one, one], seed=[0, 1])) == 2
    monkeypatch.setattr(memory, "free_bytes", lambda device: 64 * 256 - 1)
    with pytest.raises(InputError, match="needs all 256 examples at once"):
        fitted(method, [one, other])


def test_minibatches_need_no_more_than_themselves(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert fitted(Microcanonical(**FEW, warm_up=0.0, minibatch=True), data()).num_members == 2
    fitted(pm.methods.Single(), data(), epochs=1)
