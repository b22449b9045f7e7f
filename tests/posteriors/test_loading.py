"""Saved posteriors are read into the network they were made with, and into no other."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import CheckpointError
from polymode.networks.surgery import structure_of
from polymode.storage import DIGEST, write_document

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=10)


def net(activation=nn.ReLU, dropout=0.1, **options):
    return nn.Sequential(nn.Linear(4, 5), activation(**options), nn.Dropout(dropout), nn.Linear(5, 2))


def saved(tmp_path, model, method=None, likelihood="categorical", data=DATA):
    method = method or pm.methods.Single()
    posterior = pm.fit(method, model, data, likelihood=likelihood, epochs=1, progress=False, backend="loop")
    return posterior.save(tmp_path / "saved")


def test_another_activation_is_refused(tmp_path):
    folder = saved(tmp_path, net)
    with pytest.raises(
        CheckpointError, match=r"another network: '1' is ReLU\(\) there and Tanh\(\) in the mod"
    ):
        pm.load_posterior(folder, partial(net, nn.Tanh))
    with pytest.raises(CheckpointError, match=r"'1' is ReLU\(\) there and LeakyReLU\(negative_slope=0.01\)"):
        pm.load_posterior(folder, net(nn.LeakyReLU))
    pm.load_posterior(folder, partial(net, nn.Tanh), check_structure=False)


def test_options_of_a_layer_count_under_one_version_of_torch(tmp_path):
    folder = saved(tmp_path, partial(net, nn.LeakyReLU, negative_slope=0.3))
    with pytest.raises(
        CheckpointError, match=r"negative_slope=0.3\) there and LeakyReLU\(negative_slope=0.2\)"
    ):
        pm.load_posterior(folder, partial(net, nn.LeakyReLU, negative_slope=0.2))
    path = folder / "posterior.json"
    manifest = json.loads(path.read_text())
    manifest["structure"]["torch"] = "1.0.0"
    del manifest[DIGEST]
    write_document(path, "posterior", manifest)
    pm.load_posterior(folder, partial(net, nn.LeakyReLU, negative_slope=0.2))
    with pytest.raises(CheckpointError, match=r"LeakyReLU\(.*\) there and Tanh"):
        pm.load_posterior(folder, partial(net, nn.Tanh))


def test_files_without_a_structure_load_as_before(tmp_path):
    folder = saved(tmp_path, net)
    path = folder / "posterior.json"
    manifest = json.loads(path.read_text())
    del manifest["structure"], manifest[DIGEST]
    write_document(path, "posterior", manifest)
    pm.load_posterior(folder, partial(net, nn.Tanh))


class Spoken(nn.Module):
    """Says of itself what is another text each time."""

    def __init__(self, function, said=""):
        super().__init__()
        self.inner, self.function, self.said = nn.Linear(4, 2), function, said

    def forward(self, x):
        return self.function(self.inner(x))

    def extra_repr(self):
        return f"{self.function}, {self.said}"


def test_what_does_not_matter_is_not_refused(tmp_path):
    folder = saved(tmp_path, partial(net, nn.ReLU, inplace=True))
    pm.load_posterior(folder, net().eval())  # another mode, another rate of dropout, which is off
    pm.load_posterior(folder, partial(net, dropout=0.7))
    pm.load_posterior(folder, net(nn.ReLU, inplace=False))
    assert structure_of(Spoken(lambda x: x)) == structure_of(Spoken(lambda x: x))  # places in memory
    assert structure_of(Spoken(partial(F.relu, inplace=True))) == structure_of(Spoken(partial(F.relu)))
    assert structure_of(Spoken(F.relu)) != structure_of(Spoken(torch.tanh))
    for device in ("device=cpu", "device=cuda:0", "device=device(type='cuda', index=0)"):
        assert structure_of(Spoken(F.relu, f"a=1, {device}, b=2"))[""].endswith("a=1, b=2)")


def test_a_layer_that_cannot_describe_itself_is_told_by_its_class(tmp_path):
    class Broken(nn.Linear):
        def extra_repr(self):
            raise AttributeError

    assert structure_of(Broken(2, 2)) == {"": "Broken()"}


def test_rates_of_dropout_that_acts_count(tmp_path):
    folder = saved(tmp_path, net, pm.methods.MCDropout())
    pm.load_posterior(folder, net)
    with pytest.raises(CheckpointError, match=r"'2' is Dropout\(p=0.1\) there and Dropout\(p=0.7\)"):
        pm.load_posterior(folder, partial(net, dropout=0.7))


def test_learned_noise_is_not_part_of_the_users_network(tmp_path):
    numbers = pm.ArrayData(X, X[:, :2], batch_size=10)
    folder = saved(tmp_path, net, likelihood="gaussian", data=numbers)
    pm.load_posterior(folder, net)
    with pytest.raises(CheckpointError, match=r"'network.1' is ReLU"):
        pm.load_posterior(folder, partial(net, nn.Tanh))
