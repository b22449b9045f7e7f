"""Forecasts: counts and bytes are those of the run itself, and a trial leaves no trace."""

import warnings
from dataclasses import replace

import pytest
import torch

import polymode as pm
from polymode.errors import InputError
from polymode.training import epochs_of
from polymode.training.contract.execution import Execution
from polymode.training.keeping.folder import MEMBERS, RunFolder
from polymode.training.loop.fit import prepared
from polymode.training.loop.forecast import Forecast, Judged, PhaseForecast, forecast
from polymode.training.loop.settings import Computing
from polymode.training.loop.training import Training

X = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
DATA = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=16)
SMALLER = pm.ArrayData(X[:40], (X[:40].sum(1) > 0).long(), batch_size=16)

METHODS = {
    "single": lambda: (pm.methods.Single(keep="best"), 4),
    "deep_ensemble": lambda: (pm.methods.DeepEnsemble(3), 4),
    "sequential_anchored": lambda: (pm.methods.SequentialAnchored(2, prior_std=1.0, short_epochs=1), 12),
    "late_phase": lambda: (pm.methods.LatePhase(2, start=0.5), 4),
    "swag": lambda: (pm.methods.SWAG(pm.methods.Single(), start=1, num_draws=7, rank=2), 4),
    "snapshot": lambda: (pm.methods.Snapshot(3), 6),
    "cyclical_sgmcmc": lambda: (
        pm.methods.CyclicalSGMCMC(num_cycles=2, samples_per_cycle=3, prior_std=1.0),
        12,
    ),
    "sequential_bnn": lambda: (
        pm.methods.SequentialBNN(pm.methods.MeanField(prior_std=1.0), 3, at_once=1),
        8,
    ),
    "trajectory": lambda: (pm.methods.Trajectory(pm.methods.Single(), every=2, start=2), 9),
    "hmc": lambda: (pm.methods.HMC(2, prior_std=1.0, num_samples=6, burn_in=0.5), 60),
    "microcanonical": lambda: (pm.methods.Microcanonical(2, prior_std=1.0, num_samples=6), 80),
}


def network():
    return pm.models.MLP(3, 2, (100, 60))


COMPUTING = Computing(backend="vmap", threads=1)


def asked(name, data, **options):
    method, epochs = METHODS[name]()
    return prepared(
        method,
        network,
        data,
        likelihood="categorical",
        epochs=epochs,
        validation=data,
        seed=list(range(len(data))),
        **options,
    ).request


def fitted(name, data, **options):
    method, epochs = METHODS[name]()
    seeds = list(range(len(data)))
    options = {"backend": "vmap", "threads": 1, "progress": False, "likelihood": "categorical"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these are too short for what they are meant for
        return pm.fit(method, network, data, epochs=epochs, validation=data, seed=seeds, **options)


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", METHODS)
def test_counts_and_bytes_are_those_of_the_run(name, tmp_path, monkeypatch):
    data = [DATA, SMALLER]
    found = forecast(asked(name, data), COMPUTING, trial_seconds=0.01)
    steps, take = [0], Training.steps

    def counted(self, phase):
        for each in take(self, phase):
            steps[0] += 1
            yield each

    monkeypatch.setattr(Training, "steps", counted)
    members, remove = [], RunFolder._remove_unfinished

    def watched(self):
        members.append(size_of(self.path / MEMBERS))
        remove(self)

    monkeypatch.setattr(RunFolder, "_remove_unfinished", watched)
    posteriors = fitted(name, data, run_dir=tmp_path / "run")
    assert found.steps == steps[0]
    assert found.epochs == len(epochs_of(tmp_path / "run"))
    assert found.member_epochs == pytest.approx(posteriors[0].record["member_epochs"])
    assert found.num_members == posteriors[0].num_members
    assert found.num_data_sets == 2
    assert found.num_chains == METHODS[name]()[0].total_chains
    written = sum(size_of(folder) for folder in (tmp_path / "run").glob("posterior-*"))
    assert found.posterior_bytes == pytest.approx(written, rel=0.05)  # each file and record has a header
    assert found.members_bytes == pytest.approx(members[0], rel=0.05)  # files have headers, too


@pytest.mark.parametrize("name", ["single", "deep_ensemble", "late_phase", "sequential_anchored"])
def test_checkpoints_are_as_large_as_those_of_the_run(name, tmp_path):
    found = forecast(asked(name, [DATA, SMALLER]), COMPUTING, trial_seconds=0.01)

    class Enough(Exception):
        pass

    def stop(epoch):
        if epoch.epochs_done == 1:
            raise Enough

    with pytest.raises(Enough):
        fitted(name, [DATA, SMALLER], run_dir=tmp_path, observer=stop)
    first, second = sorted((tmp_path / "checkpoint").glob("state-*"))
    first, second = (
        path.stat().st_size + (tmp_path / "checkpoint" / name).stat().st_size
        for path, name in ((first, "previous.json"), (second, "checkpoint.json"))
    )
    assert found.first_checkpoint_bytes == pytest.approx(first, rel=0.01)
    if name == "late_phase":  # its last phase looks at the members, without any optimiser
        assert found.last_checkpoint_bytes < found.checkpoint_bytes
    else:
        assert found.last_checkpoint_bytes == found.checkpoint_bytes
    if name in ("single", "deep_ensemble"):  # whose one phase is that of all checkpoints
        assert found.checkpoint_bytes == pytest.approx(second, rel=0.01)
    assert found.checkpoint_bytes > 0.99 * second


def test_a_trial_leaves_no_trace(tmp_path):
    request = asked("sequential_anchored", [DATA, SMALLER])
    before = fitted("sequential_anchored", [DATA, SMALLER])
    drawn, threads = torch.get_rng_state(), torch.get_num_threads()
    inputs = X.clone()
    forecast(request, COMPUTING, trial_seconds=0.01, folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.get_num_threads() == threads
    assert torch.equal(X, inputs)
    assert not list(tmp_path.iterdir())
    after = fitted("sequential_anchored", [DATA, SMALLER])
    for one, other in zip(before, after, strict=True):
        for first, second in zip(one.draw(), other.draw(), strict=True):
            for weight in first.stacked:
                assert torch.equal(first.stacked[weight], second.stacked[weight])


def test_a_part_costs_its_share_of_member_epochs_and_members():
    whole = asked("deep_ensemble", [DATA, SMALLER])
    part = replace(whole, sources=[DATA], validation=[DATA], seeds=[0], chains=range(2), data_sets=range(1))
    found = forecast(part, COMPUTING, trial_seconds=0.01)
    assert (found.num_data_sets, found.num_chains, found.num_members) == (1, 2, 2)
    assert found.member_epochs == 8.0


def test_judging_is_told_for_as_many_members_as_there_will_be():
    seen = []

    def judge(posteriors):
        seen.append(posteriors[0].num_members)
        return Judged(3.0 + 0.5 * seen[-1], 100)

    found = forecast(asked("sequential_anchored", [DATA]), COMPUTING, judge=judge, trial_seconds=0.01)
    assert found.num_members is not None
    assert found.num_members > seen[0]
    assert found.judging.seconds == pytest.approx(3.0 + 0.5 * found.num_members)
    assert found.judging.bytes == 100


def test_a_network_that_a_method_refuses_is_an_input_error():
    request = prepared(pm.methods.Tunnel(3), network, DATA, likelihood="categorical", epochs=3).request
    with pytest.raises(InputError, match="initial"):
        forecast(request, COMPUTING)


def of(phases, **changes):
    numbers = {
        "setup_seconds": 5.0,
        "save_seconds": 0.5,
        "first_checkpoint_bytes": 10,
        "checkpoint_bytes": 30,
        "last_checkpoint_bytes": 25,
        "members_bytes": 7,
        "posterior_bytes": 20,
        "log_bytes": 3,
    }
    return Forecast(
        Execution(torch.device("cpu")),
        *(1, 1, 1, 1, 1.0),
        phases,
        judging=Judged(0.0, 4),
        memory_bytes=0,
        **numbers | changes,
    )


def test_seconds_and_bytes_follow_from_their_laws():
    phases = (PhaseForecast("a", 2, 10, 4, 0.5, 1.0, 0.25, 9), PhaseForecast("b", 1, 5, 1, 2.0, 0.0, 0.0, 0))
    short = of(phases)
    assert short.steps == 45
    assert short.step_seconds == pytest.approx((40 * 0.5 + 5 * 2.0) / 45)
    assert short.num_saves == 0
    assert short.training_seconds == pytest.approx(2 * 0.25 + 10 * (4 * 0.5 + 1.0) + 5 * 2.0)
    assert short.seconds == pytest.approx(5.0 + short.training_seconds)
    assert short.disk_running == 10 + 25 + 20 + 7 + 3  # the first and the last checkpoint, the posterior
    assert short.disk_finished == 20 + 3 + 4
    once = of((replace(phases[0], epochs=30),))  # 90.5 s: one checkpoint between the first and the last
    assert once.disk_running == max(10 + 30 + 25, 30 + 25 + 20) + 7 + 3
    long = of((replace(phases[0], epochs=1000),))  # 3,000.5 s: a checkpoint a minute
    assert long.num_saves == 50
    assert long.training_seconds == pytest.approx(3000.5 + 50 * 0.5)
    assert long.disk_running == 30 + 30 + 30 + 7 + 3  # while a third is written
