"""The trial that finds which noise the targets of a table have."""

import io
import json
from dataclasses import replace

import pytest
import torch

import polymode as pm
from polymode.application.comparison.pilot import PILOT_FILE, _choice, settle_likelihood
from polymode.data import Split, Task
from polymode.errors import CheckpointError
from polymode.likelihoods import HeteroscedasticGaussian, LearnedGaussian, StudentT
from polymode.training.keeping.progress import Lines, Silent

KINDS = (LearnedGaussian(), HeteroscedasticGaussian())
MEMBER = pm.methods.Single(optimizer=pm.Optimizer("Adam", lr=0.02))


def simulated(noise, number=400, seed=0, **options):
    """A line with noise of a deviation that may depend on the input, half to train on."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(number, 1, generator=generator) - 1
    y = x[:, 0] + noise(x[:, 0]) * torch.randn(number, generator=generator)
    first, second = (
        pm.ArrayData(x[part], y[part], batch_size=50) for part in (slice(0, 200), slice(200, None))
    )
    options = {"likelihoods": KINDS} | options
    return Task("simulated", [Split(first, second, validation=second)], KINDS[0], 1, **options)


def model_for(likelihood):
    outputs = 2 if isinstance(likelihood, HeteroscedasticGaussian) else 1
    return lambda: pm.models.MLP(1, outputs, (8,))


def settle(task, folder=None, epochs=40, reporter=None):
    options = {"backend": "loop", "threads": 1}
    return settle_likelihood(task, model_for, MEMBER, epochs, folder, reporter or Silent(), **options)


def test_noise_that_depends_on_the_inputs_is_found(tmp_path):
    """Deviations of 0.05 and 0.5: to know them is worth log(0.355 / √(0.05 · 0.5)) = 0.8 nats a row."""
    stream = io.StringIO()
    task = simulated(lambda x: torch.where(x > 0, 0.5, 0.05))
    found = settle(task, tmp_path, reporter=Lines(stream))
    assert isinstance(found.likelihood, HeteroscedasticGaussian)
    assert (found.num_outputs, found.likelihoods) == (2, ())
    assert "noise that depends on the inputs" in stream.getvalue()
    plain, other = json.loads((tmp_path / PILOT_FILE).read_text())["validation_log_density"]
    # Half of what there is to gain, at least, after a short trial.
    assert other - plain > 0.4
    assert found.splits == task.splits


@pytest.mark.parametrize("seed", [0, 1])
def test_the_plain_law_stays_where_noise_is_the_same_everywhere(seed):
    found = settle(simulated(lambda x: 0.3, seed=seed))
    assert isinstance(found.likelihood, LearnedGaussian)
    assert (found.num_outputs, found.likelihoods) == (1, ())


def test_what_was_found_is_read_back_without_another_trial(tmp_path, monkeypatch):
    task = simulated(lambda x: torch.where(x > 0, 0.5, 0.05))
    first = settle(task, tmp_path)

    def fit(*arguments, **options):
        raise AssertionError("another trial")

    monkeypatch.setattr("polymode.application.comparison.pilot.fit", fit)
    again = settle(task, tmp_path)
    assert again.likelihood == first.likelihood
    foreign = replace(task, likelihoods=(LearnedGaussian(), StudentT()))
    with pytest.raises(CheckpointError, match="its trial was about other likelihoods"):
        settle(foreign, tmp_path)
    path = tmp_path / PILOT_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"chosen": 2}))
    with pytest.raises(CheckpointError):
        settle(task, tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError):
        settle(task, tmp_path)


def test_nothing_is_tried_where_there_is_no_choice_or_nothing_to_choose_by(monkeypatch):
    monkeypatch.setattr("polymode.application.comparison.pilot.fit", None)
    one = simulated(lambda x: 0.3, likelihoods=KINDS[:1])
    assert settle(one) is one
    several = simulated(lambda x: 0.3)
    blind = replace(several, splits=[replace(several.splits[0], validation=None)])
    assert settle(blind) is blind


def test_the_first_stays_unless_another_is_ahead_by_a_standard_error():
    first = torch.tensor([0.0, 0.0, 0.0, 0.0])
    ahead = torch.tensor([1.0, -1.0, 1.0, -1.0])  # its standard error is 1.155 / 2
    assert _choice([first, first + 0.5 + ahead]) == 0
    assert _choice([first, first + 0.6 + ahead]) == 1
    assert _choice([first, first + 0.6 + ahead, first + 0.7]) == 2
    assert _choice([first, first - 1]) == 0
    # Paired: rows that are hard for all do not count.
    hard = torch.tensor([100.0, -100.0, 0.0, 50.0])
    assert _choice([hard, hard + 0.1]) == 1
