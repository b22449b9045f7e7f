"""Surveys go on where they were interrupted, and believe no file that is not about the same survey."""

import copy
import functools
import importlib
import pickle

import numpy as np
import pytest
import torch
from networks_by_hand import at, flat, mlp, points, scores, trained_elsewhere
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polymode as pm
from polymode.errors import InputError
from polymode.landscape import Points, WeightSpace, judged, survey

COUNT = 70  # three blocks of at most 32


class Interrupted(Exception):
    pass


@pytest.fixture
def made(monkeypatch):
    """A space, its points and a reference; what is done is written after every block."""
    monkeypatch.setattr(importlib.import_module("polymode.landscape.survey"), "KEEP_SECONDS", -1.0)
    modules, posterior = trained_elsewhere(mlp, 2)
    generator = torch.Generator().manual_seed(3)
    space = WeightSpace.of(posterior)
    where = flat(modules[0]) + torch.randn(COUNT, space.dimension, generator=generator, dtype=torch.float64)
    data = points()
    references = judged(posterior.network, next(posterior.draw()), data.inputs, data.targets).answers
    return modules, space, where, data, references


def counting(vectors):
    """Points that note which of them were asked for."""
    asked, plain = [], Points.of(vectors)

    def at_(start, stop):
        asked.extend(range(start, stop))
        return plain.at(start, stop)

    return asked, Points(plain.count, at_, plain.identity)


def assert_same(found, expected):
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.error, expected.error)
    assert torch.equal(found.difference, expected.difference)


def interrupted(after, **options):
    """Run a survey until so many points are done."""

    def stop(done, total):
        assert total == COUNT
        if done >= after:
            raise Interrupted

    with pytest.raises(Interrupted):
        survey(progress=stop, **options)


def test_a_survey_is_each_network_by_itself(made):
    modules, space, where, data, references = made
    found = survey(space, Points.of(where), data, references=references)
    labels = [scores(module, data)[2] for module in modules]
    for index in (0, 31, 32, 69):
        loss, error, said = scores(at(modules[0], where[index]), data)
        assert float(found.loss[index]) == pytest.approx(loss, rel=1e-10)
        assert float(found.error[index]) == pytest.approx(error)
        apart = [float((said != other).double().mean()) for other in labels]
        assert found.difference[index].tolist() == pytest.approx(apart, abs=1e-6)
    assert bool(found.loss.isfinite().all())


def test_only_the_rest_is_evaluated_and_arrays_are_the_same(made, tmp_path):
    _, space, where, data, references = made
    whole = survey(space, Points.of(where), data, references=references)
    keep = tmp_path / "deep/kept.npz"
    options = {"space": space, "data": data, "references": references, "keep": keep}
    interrupted(32, points=Points.of(where), **options)
    asked, numbered = counting(where)
    told = []
    found = survey(points=numbered, progress=lambda done, total: told.append((done, total)), **options)
    assert asked == list(range(32, COUNT))
    assert told == [(64, COUNT), (COUNT, COUNT)]
    assert_same(found, whole)
    asked, numbered = counting(where)
    assert_same(survey(points=numbered, **options), whole)
    assert asked == []
    assert sorted(path.name for path in keep.parent.iterdir()) == ["kept.npz"]  # nothing is left beside it


def test_without_a_file_nothing_is_written(made, tmp_path, monkeypatch):
    _, space, where, data, _ = made
    monkeypatch.chdir(tmp_path)
    survey(space, Points.of(where), data)
    assert list(tmp_path.iterdir()) == []


def changed(made, what):
    """The same survey but for one thing."""
    modules, space, where, data, references = made
    if what == "inputs":
        data = pm.ArrayData(data.inputs + 1e-9, data.targets, batch_size=data.batch_size)
    elif what == "targets":
        data = pm.ArrayData(data.inputs, data.targets.roll(1), batch_size=data.batch_size)
    elif what == "points":
        where = where.clone()
        where[-1, -1] += 1e-9
    elif what == "references":
        references = references.flip(0)
    elif what == "likelihood":
        # The third class is ignored: the same outputs, another loss.
        likelihood = pm.likelihoods.Categorical(ignore_index=2)
        _, posterior = trained_elsewhere(mlp, 2, likelihood)
        space = WeightSpace.of(posterior)
        references = references[:, data.targets != 2]
    elif what == "activation":
        factory = functools.partial(pm.models.MLP, 4, 3, (6,), activation=nn.Tanh)
        states = [module.state_dict() for module in modules]
        space = WeightSpace.of(
            pm.from_state_dicts(lambda: factory().double(), states, likelihood="categorical")
        )
    return {"space": space, "points": where, "data": data, "references": references}


@pytest.mark.parametrize("what", ["inputs", "targets", "points", "references", "likelihood", "activation"])
def test_another_survey_starts_anew(made, what, tmp_path):
    """… and what it finds is what it finds without the file."""
    _, space, where, data, references = made
    keep = tmp_path / "kept.npz"
    first = survey(space, Points.of(where), data, references=references, keep=keep)
    options = changed(made, what)
    asked, numbered = counting(options.pop("points"))
    expected = survey(points=numbered, **options)
    asked.clear()
    found = survey(points=numbered, keep=keep, **options)
    assert asked == list(range(COUNT))
    assert_same(found, expected)
    if what in ("targets", "likelihood", "activation"):
        assert not torch.allclose(found.loss, first.loss)


def test_loaders_are_told_apart_by_what_they_hold(made, tmp_path):
    _, space, where, data, _ = made
    loaders = [
        DataLoader(TensorDataset(data.inputs, targets), batch_size=20)
        for targets in (data.targets, data.targets.roll(1))
    ]
    keep = tmp_path / "kept.npz"
    for loader in loaders:
        plain = survey(space, Points.of(where[:5]), loader)
        assert_same(survey(space, Points.of(where[:5]), loader, keep=keep), plain)


class Malicious:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def spoilt(kind, path, whole, touched):
    """What a file may hold that a survey finds at its place."""
    arrays = dict(np.load(path))
    if kind == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "garbage":
        path.write_bytes(bytes(range(256)) * 20)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "damaged":
        path.write_bytes(whole[:200] + bytes(100) + whole[300:])
    elif kind == "foreign":
        np.savez(path, x=np.zeros(3))
    elif kind == "one array":
        with path.open("wb") as file:
            np.save(file, np.zeros(COUNT))
    elif kind == "shape":
        np.savez(path, **arrays | {"loss": arrays["loss"][:-1]})
    elif kind == "too much":
        np.savez(path, **arrays | {"done": np.array(COUNT + 1)})
    elif kind == "many counts":
        np.savez(path, **arrays | {"done": np.array([1, 2])})
    elif kind == "words":
        np.savez(path, **arrays | {"loss": np.array(["x"] * COUNT)})
    elif kind == "pickle":
        objects = np.empty(COUNT, dtype=object)
        objects[:] = Malicious(touched)
        np.savez(path, **arrays | {"loss": objects})
    elif kind == "bare pickle":
        path.write_bytes(pickle.dumps(Malicious(touched)))


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "garbage",
        "empty",
        "damaged",
        "foreign",
        "one array",
        "shape",
        "too much",
        "many counts",
        "words",
        "pickle",
        "bare pickle",
    ],
)
def test_files_that_are_not_this_survey_are_left_out(made, kind, tmp_path):
    _, space, where, data, references = made
    keep, touched = tmp_path / "kept.npz", tmp_path / "touched"
    options = {"space": space, "data": data, "references": references, "keep": keep}
    expected = survey(points=Points.of(where), **options)
    whole = keep.read_bytes()
    spoilt(kind, keep, whole, touched)
    asked, numbered = counting(where)
    assert_same(survey(points=numbered, **options), expected)
    assert asked == list(range(COUNT))
    assert not touched.exists()
    assert dict(np.load(keep)).keys() >= {"loss", "error", "difference", "done", "signature"}  # written anew


def test_files_with_any_byte_changed_raise_nothing(made, tmp_path):
    """A file that was changed gives what the survey gives, or the survey is done again."""
    _, space, where, data, references = made
    keep, where = tmp_path / "kept.npz", where[:2]
    options = {"space": space, "data": data, "references": references, "keep": keep}
    expected = survey(points=Points.of(where), **options)
    whole, random = keep.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        content = bytearray(whole)
        content[random.integers(len(content))] = random.integers(256)
        keep.write_bytes(content)
        assert_same(survey(points=Points.of(where), **options), expected)


def test_losses_without_end_are_not_computed_again(tmp_path):
    """Far from the solutions a loss may be NaN: that is what is there."""
    modules, posterior = trained_elsewhere(mlp, 1)
    where = torch.stack([flat(modules[0]), torch.full_like(flat(modules[0]), 1e200)])
    space, keep = WeightSpace.of(posterior), tmp_path / "kept.npz"
    first = survey(space, Points.of(where), points(), keep=keep)
    assert first.loss.isfinite().tolist() == [True, False]
    asked, numbered = counting(where)
    again = survey(space, numbered, points(), keep=keep)
    assert asked == []
    np.testing.assert_array_equal(again.loss, first.loss)


# --- running statistics ------------------------------------------------------------------------------


@torch.no_grad()
def re_estimated(module, batches):
    """Statistics by hand: each batch's own, in training mode, averaged over examples."""
    module = copy.deepcopy(module)
    [norm] = [part for part in module.modules() if isinstance(part, nn.BatchNorm1d)]
    norm.momentum = 1.0
    means, variances = [], []
    for batch in batches:
        module.train()
        module(batch)
        means.append(len(batch) * norm.running_mean.clone())
        variances.append(len(batch) * norm.running_var.clone())
    count = sum(map(len, batches))
    norm.running_mean.copy_(sum(means) / count)
    norm.running_var.copy_(sum(variances) / count)
    return module.eval()


@pytest.mark.parametrize(("count", "parts"), [(50, [50]), (600, [300, 300]), (641, [213, 214, 214])])
def test_statistics_are_estimated_at_every_point(count, parts):
    modules, posterior = trained_elsewhere(lambda: mlp(batch_norm=True), 2)
    data, space = points(), WeightSpace.of(posterior)
    generator = torch.Generator().manual_seed(8)
    inputs = 3 + 2 * torch.randn(count, 4, generator=generator, dtype=torch.float64)
    where = torch.stack([flat(module) for module in modules] + [flat(modules[0]) / 2])
    found = survey(space, Points.of(where), data, statistics=inputs)
    for index, vector in enumerate(where):
        module = re_estimated(at(modules[0], vector), inputs.split(parts))
        loss, error, _ = scores(module, data)
        assert float(found.loss[index]) == pytest.approx(loss, rel=1e-9)
        assert float(found.error[index]) == pytest.approx(error)
    labelled = pm.ArrayData(inputs, torch.zeros(count, dtype=torch.int64))
    assert_same(survey(space, Points.of(where), data, statistics=labelled), found)


def test_statistics_are_part_of_what_a_file_is_about(tmp_path):
    modules, posterior = trained_elsewhere(lambda: mlp(batch_norm=True), 1)
    data, space, keep = points(), WeightSpace.of(posterior), tmp_path / "kept.npz"
    where = Points.of(flat(modules[0])[None])
    found = [survey(space, where, data, statistics=s * data.inputs, keep=keep).loss for s in (1, 2)]
    again = survey(space, where, data, statistics=2 * data.inputs).loss
    assert torch.equal(found[1], again)
    assert found[0] != found[1]


def test_batch_norm_without_statistics_is_refused():
    modules, posterior = trained_elsewhere(lambda: mlp(batch_norm=True), 1)
    with pytest.raises(InputError, match=r"has BatchNorm, .* pass statistics="):
        survey(WeightSpace.of(posterior), Points.of(flat(modules[0])[None]), points())


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
def test_networks_of_numbers(outputs):
    """Loss: −log N(y | f, s²); error: a root mean square; differences over the spread of the targets."""
    modules, posterior = trained_elsewhere(
        lambda: pm.models.MLP(4, outputs, (6,)).double(), 2, pm.likelihoods.FixedGaussian(std=0.5)
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(*((30, outputs) if outputs > 1 else (30,)), generator=generator, dtype=torch.float64)
    data, space = pm.ArrayData(x, y), WeightSpace.of(posterior)
    references = judged(posterior.network, next(posterior.draw()), x, y).answers
    where = torch.stack([flat(modules[0]), (flat(modules[0]) + flat(modules[1])) / 2])
    found = survey(space, Points.of(where), data, references=references)
    with torch.no_grad():
        ends = [module(x).reshape(y.shape) for module in modules]
        for index, vector in enumerate(where):
            mean = at(modules[0], vector)(x).reshape(y.shape)
            density = torch.distributions.Normal(mean, 0.5).log_prob(y).reshape(30, -1).sum(1)
            assert float(found.loss[index]) == pytest.approx(float(-density.mean()))
            assert float(found.error[index]) == pytest.approx(float((mean - y).square().mean().sqrt()))
            apart = [float((mean - end).square().mean().sqrt() / y.std()) for end in ends]
            assert found.difference[index].tolist() == pytest.approx(apart, abs=1e-7)
    assert found.difference[0, 0] == 0
    assert found.difference[0, 1] > 0.1


def test_ignored_tokens_do_not_count():
    modules, posterior = trained_elsewhere(mlp, 1, pm.likelihoods.Categorical(ignore_index=2))
    data, space = points(), WeightSpace.of(posterior)
    seen = data.targets != 2
    found = survey(space, Points.of(flat(modules[0])[None]), data)
    rest = pm.ArrayData(data.inputs[seen], data.targets[seen])
    loss, error, _ = scores(modules[0], rest)
    assert float(found.loss) == pytest.approx(loss)
    assert float(found.error) == pytest.approx(error)
