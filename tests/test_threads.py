"""One posterior in many threads, many fits in many threads, and the threads that a run computes with."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import polymode as pm
from polymode import seeds
from polymode.networks import recording
from polymode.networks.members import BACKENDS, Backend
from polymode.seeds import global_seed
from polymode.training.loop import backends
from polymode.training.loop.arithmetic import with_threads

NUM_THREADS = 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


INPUTS, TARGETS = numbers(60, 6), torch.arange(60) % 3
DATA = pm.ArrayData(INPUTS, TARGETS, batch_size=20)


def layered() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)
    )


class DrawsByItself(nn.Module):
    """A network whose noise comes from the global random state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x).tanh(), 0.3, self.training))


class Jittered(Dataset):
    """Examples that are changed at random."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return INPUTS[row] + 0.1 * torch.randn(6), TARGETS[row]


def in_threads(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(function, arguments))


def fitted(method: pm.Method, backend: Backend) -> pm.Posterior:
    posterior = pm.fit(method, layered, DATA, likelihood="categorical", epochs=2, backend=backend)
    return posterior.with_backend(backend)


METHODS = {
    "deep_ensemble": (pm.methods.DeepEnsemble(3), 1000),
    "ecmp": (pm.methods.ECMP(), 1000),
    "mc_dropout": (pm.methods.MCDropout(), 200),
    "late_phase": (pm.methods.LatePhase(num_members=2, keep_members=True), 200),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_predictions_from_many_threads_are_those_of_one(name: str, backend: Backend) -> None:
    method, num_calls = METHODS[name]
    posterior = fitted(method, backend)
    draws = 3 if posterior.num_members is None else None
    points = [numbers(1 + index % 5, 6, seed=index) for index in range(100)]

    def predict(inputs: Tensor) -> Tensor:
        return posterior.predict(inputs, draws).mean

    alone = [predict(inputs) for inputs in points]
    together = in_threads(predict, points * (num_calls // len(points)))
    assert len(together) == num_calls
    for index, after in enumerate(together):
        # Weights of another thread change a probability by hundredths, other kernels by rounding.
        torch.testing.assert_close(after, alone[index % len(alone)], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_and_evaluations_from_many_threads_are_those_of_one(backend: Backend) -> None:
    posterior = fitted(pm.methods.ECMP(), backend)

    def judged(seed: int) -> tuple[Tensor, dict[str, float]]:
        [block] = posterior.draw(4, torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed)
        return block.stacked["5.weight"], pm.evaluate(posterior, DATA, num_draws=4, generator=generator)

    seeds = [index % 10 for index in range(80)]
    alone = {seed: judged(seed) for seed in set(seeds)}
    for seed, (weights, scores) in zip(seeds, in_threads(judged, seeds), strict=True):
        assert torch.equal(weights, alone[seed][0])
        assert scores == pytest.approx(alone[seed][1], abs=1e-6)


def test_a_module_that_others_predict_with_stays_as_it_is() -> None:
    posterior = fitted(pm.methods.DeepEnsemble(2), "loop")
    module = posterior.network.module
    before = {name: (id(t), t.clone()) for name, t in module.state_dict(keep_vars=True).items()}

    def predict_or_look(index: int) -> bool:
        if index % 2:
            posterior.predict(INPUTS)
            return True
        tensors = module.state_dict(keep_vars=True)
        return all(id(t) == before[n][0] and torch.equal(t, before[n][1]) for n, t in tensors.items())

    assert all(in_threads(predict_or_look, range(200)))


FITS = {
    "draws by itself": (pm.methods.DeepEnsemble(2), DrawsByItself, DATA, "loop", 2),
    "vmap": (pm.methods.DeepEnsemble(2), layered, DATA, "vmap", 2),
    "components": (pm.methods.ECMP(), layered, DATA, "loop", 2),
    "augmented": (pm.methods.Single(), layered, DataLoader(Jittered(), batch_size=20), "loop", 2),
    "late weights": (pm.methods.LatePhase(num_members=2), layered, DATA, "vmap", 4),
    "recorded": (
        pm.methods.HMC(num_chains=2, num_samples=4, prior_std=1.0),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
        DATA,
        "vmap",
        20,
    ),
}


def test_fits_in_many_threads_are_those_of_one() -> None:
    def fit(job: tuple[str, int]) -> Tensor:
        method, model, data, backend, epochs = FITS[job[0]]
        posterior = pm.fit(
            method,
            model,
            data,
            likelihood="categorical",
            epochs=epochs,
            validation=DATA,
            seed=job[1],
            backend=backend,
            threads=1,
        )
        return posterior.predict(INPUTS).mean

    jobs = [(name, seed) for seed in range(5) for name in FITS]
    state = torch.get_rng_state()
    alone = [fit(job) for job in jobs]
    for job, before, after in zip(jobs, alone, in_threads(fit, jobs), strict=True):
        assert torch.equal(before, after), job
    assert torch.equal(torch.get_rng_state(), state)


# --- the number of threads that a run computes with -------------------------------------------


def fit_with(threads: int | None = None, **options: Any) -> pm.Posterior:
    return pm.fit(
        pm.methods.DeepEnsemble(2),
        layered,
        DATA,
        likelihood="categorical",
        epochs=3,
        threads=threads,
        **options,
    )


def test_a_run_computes_with_the_threads_it_is_given_and_gives_them_back() -> None:
    with with_threads(2):
        seen: list[int] = []
        posterior = fit_with(3, observer=lambda epoch: seen.append(torch.get_num_threads()))
        assert seen == [3, 3, 3]
        assert posterior.record["threads"] == 3
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError, match="stop"):
            fit_with(1, observer=_stop)
        assert torch.get_num_threads() == 2
    with pytest.raises(pm.errors.InputError, match="threads must be a whole number of at least 1, got 0"):
        fit_with(0)


def _stop(epoch: pm.Epoch) -> None:
    raise RuntimeError("stop")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({("loop", 1): 3.0, ("vmap", 1): 1.0, ("loop", 4): 2.0, ("vmap", 4): 0.9}, ("vmap", 1)),
        ({("loop", 1): 3.0, ("vmap", 1): 1.0, ("loop", 4): 2.0, ("vmap", 4): 0.86}, ("vmap", 4)),
        ({("loop", 1): 2.0, ("vmap", 1): 1.9, ("loop", 4): 1.0, ("vmap", 4): 1.8}, ("loop", 4)),
        ({("loop", 1): 1.0, ("vmap", 1): 2.0, ("loop", 4): 5.0, ("vmap", 4): 5.0}, ("loop", 1)),
    ],
)
def test_more_threads_than_one_must_be_faster_by_15_per_cent(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[Backend, int], float], expected: tuple[Backend, int]
) -> None:
    def measured(
        material: Any, backend: Backend, counts: Sequence[int], repeats: int = 0
    ) -> dict[tuple[Backend, int], float]:
        return {(backend, count): seconds[backend, count] / 100 for count in counts}

    monkeypatch.setattr(backends, "_step_seconds", measured)
    with with_threads(4):
        record = fit_with().record
    assert (record["backend"], record["threads"]) == expected
    assert record["step_seconds"]["vmap, 4 threads"] == pytest.approx(seconds["vmap", 4] / 100)


def test_a_resumed_run_takes_the_threads_it_began_with(tmp_path: Any) -> None:
    whole = fit_with(2, backend="vmap")
    for folder, threads in (("as recorded", None), ("others", 1)):
        with pytest.raises(RuntimeError, match="stop"):
            fit_with(2, backend="vmap", run_dir=tmp_path / folder, observer=_stop)
        seen: list[int] = []
        options: dict[str, Any] = {"run_dir": tmp_path / folder, "resume": True}
        options["observer"] = lambda epoch, seen=seen: seen.append(torch.get_num_threads())
        if threads is None:
            resumed = fit_with(None, **options)
            assert seen == [2, 2]
            assert torch.equal(resumed.predict(INPUTS).mean, whole.predict(INPUTS).mean)
        else:
            with pytest.warns(UserWarning, match="began with threads=2 and goes on with threads=1"):
                assert fit_with(threads, **options).record["threads"] == 1
            assert seen == [1, 1]


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # as a caller does it
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_runs_that_overlap_give_the_callers_threads_back() -> None:
    began, may_end, seen = threading.Event(), threading.Event(), []

    def wait(epoch: pm.Epoch) -> None:
        began.set()
        may_end.wait(60)

    def let_the_first_end(epoch: pm.Epoch) -> None:
        may_end.set()
        first.join()

    def second() -> None:
        fit_with(1, observer=let_the_first_end)
        look()

    def look() -> None:
        seen.append(torch.get_num_threads())

    first = threading.Thread(target=lambda: fit_with(1, observer=wait))
    first.start()
    began.wait(60)
    for target in (second, look):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    look()
    assert seen == [3, 3, 3]


def test_a_number_of_threads_that_no_machine_has_is_refused() -> None:
    with pytest.raises(pm.errors.InputError, match="threads must be at most 1024, got 1000000"):
        fit_with(10**6)


def test_locks_that_another_thread_holds_are_free_in_a_forked_process() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with global_seed(0), recording.alone:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:  # the thread above does not exist here
        free = recording.alone.acquire(timeout=5) and seeds._global_state.acquire(timeout=5)
        os._exit(0 if free else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
