"""Saved posteriors are read into the network they were made with, and into no other."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import CheckpointError
from polymode.networks.adaptations import Sampling
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
    same = pm.load_posterior(folder, net).predict(X).mean
    write_document(path, "posterior", manifest)
    assert torch.equal(pm.load_posterior(folder, net).predict(X).mean, same)
    loaded = pm.load_posterior(folder, partial(net, nn.Tanh))  # nothing says that it was another one
    [members] = loaded.draw()
    hidden = F.linear(X, members.stacked["0.weight"][0], members.stacked["0.bias"][0]).tanh()
    outputs = F.linear(hidden, members.stacked["3.weight"][0], members.stacked["3.bias"][0])
    torch.testing.assert_close(loaded.predict(X).mean, outputs.softmax(-1))


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


def rewritten(folder, change):
    """Let ``change`` do something to the document of a posterior."""
    path = folder / "posterior.json"
    manifest = json.loads(path.read_text())
    del manifest[DIGEST]
    change(manifest)
    write_document(path, "posterior", manifest)


def predicted(posterior):
    return posterior.predict(X, generator=torch.Generator().manual_seed(1)).mean


@pytest.mark.parametrize("method", [pm.methods.MCDropout(where="output", masks="draw"), pm.methods.Single()])
def test_posteriors_of_the_version_before_load_as_they_were(method, tmp_path):
    folder = saved(tmp_path, net, method)
    expected = pm.load_posterior(folder, net)

    def as_before(manifest):
        stored = manifest.pop("adaptations")
        fields = [{k: v for k, v in each.items() if k != "kind"} for each in stored]
        manifest |= {"sampling": fields[0] if fields else None, "adapted_by": ""}

    rewritten(folder, as_before)
    loaded = pm.load_posterior(folder, net)
    assert loaded.network.adaptations == expected.network.adaptations
    assert torch.equal(predicted(loaded), predicted(expected))


def test_a_change_that_the_version_before_did_not_store_is_refused(tmp_path):
    folder = saved(tmp_path, net)
    rewritten(folder, lambda m: (m.pop("adaptations"), m.update(sampling=None, adapted_by="shifting")))
    with pytest.raises(CheckpointError, match=r"shifting changed the network .* did not store how"):
        pm.load_posterior(folder, net)


def test_adaptations_that_are_not_known_or_do_not_fit_are_refused(tmp_path):
    folder = saved(tmp_path, net, pm.methods.MCDropout(where="output"))
    [sampling] = json.loads((folder / "posterior.json").read_text())["adaptations"]
    assert sampling == {"kind": "sampling", "masks": "example", "added": {"3": 0.1}}
    for stored, message in (
        ([{"kind": "mine"}], r"'mine' is not known: import the module that defines it first"),
        ([{"kind": "os:system"}], r"'os:system' is not known"),
        ([sampling | {"layers": 3}], r"Unknown field of the adaptation 'sampling' 'layers'"),
        ([sampling | {"masks": "both"}], r"Unknown masks 'both'"),
        ([sampling | {"added": 3}], r"'sampling' cannot be made of .*'added': 3"),
        ([sampling | {"added": {"9": 0.1}}], r"another network: There is no layer '9'"),
        ([sampling | {"added": {"0": 0.1}}], r"another network: '0.input_dropout.first_example' is absent"),
        ([sampling, 3], "An adaptation is a kind with its fields, got 3"),
        ([{"kind": ["sampling"]}], r"The adaptation \['sampling'\] is not known"),
        ({"kind": "sampling"}, r"adaptations"),
        ([], r"another network: '3.input_dropout.first_example' is .* there and absent"),
    ):
        rewritten(folder, lambda manifest, stored=stored: manifest.update(adaptations=stored))
        with pytest.raises(CheckpointError, match=message):
            pm.load_posterior(folder, net)


def test_sampled_dropout_of_trained_networks_is_stored_and_repeated(tmp_path):
    folder = saved(tmp_path, net)
    sampled = pm.sample_dropout(pm.load_posterior(folder, net), "draw")
    sampled.save(tmp_path / "sampled")
    loaded = pm.load_posterior(tmp_path / "sampled", net)
    assert loaded.network.adaptations == sampled.network.adaptations == (Sampling("draw"),)
    assert torch.equal(predicted(loaded), predicted(sampled))
