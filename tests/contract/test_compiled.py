"""What is compiled gives what vmap gives: for every method, with every kind of network and of data."""

import os
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import polymode as pm
from cases import BY_NAME, NETWORKS
from contract.registry import SGD, SMALL, accepts
from contract.test_methods import predictions, run, weights
from polymode.errors import CannotVectorise
from polymode.methods import METHODS, DeepEnsemble, MeanField, Single
from polymode.networks import recording
from polymode.training.keeping.progress import Silent
from tolerances import assert_equal_up_to_rounding

REALLY_COMPILED = ("deep_ensemble", "mean_field", "microcanonical")


def pairs(networks):
    """Every method with each of some networks that it accepts."""
    found = [(name, network) for network in networks for name in METHODS if accepts(name, network)]
    return pytest.mark.parametrize(("name", "network"), found)


@pytest.fixture
def recorded_only(monkeypatch):
    """Graphs go through all of torch.compile's stages but the last: their operations run one by one."""
    monkeypatch.setattr(recording, "COMPILER", "aot_eager")


@pytest.fixture
def real_compiler():
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if not any(map(shutil.which, compilers)):
        pytest.skip(f"PyTorch has no C++ compiler to compile kernels with: no {' or '.join(compilers)} here")


def both(fit):
    """What ``fit(backend=...)`` gives under vmap and compiled; anything that is said is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that nothing was compiled
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            vmap = fit(backend="vmap")
        except CannotVectorise:
            pytest.skip("vmap cannot run it")
        compiled = fit(backend="compiled")
    return vmap, compiled


def assert_same_weights(compiled, vmap):
    assert compiled.record["backend"] == "compiled"
    found = weights(compiled)
    for key, tensor in weights(vmap).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-9)


def compare(name, network):
    case = BY_NAME[network]
    vmap, compiled = both(lambda backend: run(name, case, backend=backend))
    assert_same_weights(compiled, vmap)
    assert_equal_up_to_rounding(predictions(compiled, case).mean, predictions(vmap, case).mean)


@pairs(["mlp"])
def test_a_compiled_step_is_the_step(name, network, recorded_only):
    compare(name, network)


@pytest.mark.slow
@pairs([case.name for case in NETWORKS if case.name != "mlp"])
def test_a_compiled_step_is_the_step_on_every_network(name, network, recorded_only):
    compare(name, network)


@pytest.mark.parametrize("name", REALLY_COMPILED)
def test_kernels_give_what_the_step_gives(name, real_compiler):
    compare(name, "mlp")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in REALLY_COMPILED])
def test_kernels_give_what_the_step_gives_for_every_method(name, real_compiler):
    compare(name, "mlp")


# --- kinds of networks and of data ------------------------------------------------------------------


DATA = BY_NAME["mlp"].data()


def fitted(method, data, backend, factory=BY_NAME["mlp"].double_factory, **options):
    options = {"likelihood": "categorical", "epochs": 3, "progress": False} | options
    return pm.fit(method, factory, data, backend=backend, **options)


def ensemble(num_members=2, of=None):
    return DeepEnsemble(num_members, of=of or Single(prior_std=1.0, optimizer=SGD))


@pytest.mark.parametrize("network", ["batch_norm", "convolution", "dropout"])
def test_running_statistics_and_noise_move_as_under_vmap(network, recorded_only):
    case = BY_NAME[network]
    data = case.data(21)  # the last batch has five

    def fit(backend):
        return fitted(ensemble(), data, backend, case.double_factory)

    vmap, compiled = both(fit)
    assert_same_weights(compiled, vmap)  # running means and counts are among them
    if network != "dropout":
        counts = [t for n, t in weights(compiled).items() if n.endswith("num_batches_tracked")]
        assert [t.tolist() for t in counts] == [[9, 9]]  # three epochs of three batches
    assert_equal_up_to_rounding(compiled.predict(data.inputs).mean, vmap.predict(data.inputs).mean)


def test_dropout_draws_what_it_draws_under_vmap(recorded_only):
    compare("mc_dropout", "batch_norm_and_dropout")


@pytest.mark.parametrize("network", ["mlp", "batch_norm"])
def test_data_sets_of_different_lengths_side_by_side(network, recorded_only):
    """Cohorts of three, three and two batches an epoch, whose last batches differ in size."""
    case = BY_NAME[network]
    sets = [case.data(size, seed=size) for size in (13, 24, 21)]
    vmap, compiled = both(lambda backend: fitted(ensemble(), sets, backend, case.double_factory))
    for one, other in zip(compiled, vmap, strict=True):
        assert_same_weights(one, other)
        assert one.record["member_epochs"] == other.record["member_epochs"]
    alone = fitted(ensemble(), sets[0], "compiled", case.double_factory)
    assert_same_weights(alone, compiled[0])


@pytest.mark.parametrize("name", ["batch_ensemble", "late_phase"])
def test_groups_that_share_weights_do_so_compiled(name, recorded_only):
    vmap, compiled = both(lambda backend: fitted(ensemble(of=SMALL[name]()), DATA, backend))
    assert_same_weights(compiled, vmap)


def test_groups_that_share_weights_on_data_sets_of_different_lengths(recorded_only):
    sets = [BY_NAME["mlp"].data(size, seed=size) for size in (11, 18)]
    vmap, compiled = both(lambda backend: fitted(ensemble(of=SMALL["batch_ensemble"]()), sets, backend))
    for one, other in zip(compiled, vmap, strict=True):
        assert_same_weights(one, other)


def test_a_graph_sees_what_a_schedule_makes_of_the_penalty(recorded_only):
    """The weight of the KL term is another one at every step: a number that was recorded would stay."""
    falling = pm.schedules.Linear(0.0, 4.0, final=0.2)
    method = MeanField(prior_std=1.0, rho=-3.0, optimizer=SGD, annealing=falling)
    vmap, compiled = both(lambda backend: fitted(ensemble(of=method), DATA, backend))
    assert_same_weights(compiled, vmap)
    steady = fitted(ensemble(of=replace(method, annealing=None)), DATA, "vmap")
    assert any(not torch.allclose(t, weights(vmap)[n]) for n, t in weights(steady).items())


def test_a_graph_sees_sample_weights(recorded_only):
    weighted = pm.ArrayData(
        DATA.inputs,
        DATA.targets,
        weights=torch.linspace(0.0, 2.0, len(DATA.targets), dtype=torch.float64),
        batch_size=7,
    )
    vmap, compiled = both(lambda backend: fitted(ensemble(), weighted, backend))
    assert_same_weights(compiled, vmap)
    plain = fitted(ensemble(), pm.ArrayData(DATA.inputs, DATA.targets, batch_size=7), "compiled")
    assert any(not torch.allclose(t, weights(vmap)[n]) for n, t in weights(plain).items())


class Sentences(Dataset):
    """Tokens of different lengths; the class is the first token's remainder."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return 1 + (torch.arange(1 + row % 3) + row) % 6, (1 + row % 6) % 3


def padded(examples):
    tokens, targets = zip(*examples, strict=True)
    return nn.utils.rnn.pad_sequence(list(tokens), batch_first=True), torch.tensor(targets)


class MeanToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens).sum(1)))


def test_batches_whose_lengths_change_are_compiled_for_every_length(recorded_only, monkeypatch):
    """Two sentences a batch, of one to three tokens: batches of several lengths in every order."""
    seen, lookup = set(), recording._compile

    def noticing(graph, tensors):
        seen.update(tuple(t.shape) for t in tensors if not t.is_floating_point())
        return lookup(graph, tensors)

    monkeypatch.setattr(recording, "_compile", noticing)
    monkeypatch.setattr(recording, "_programs", {})
    loader = DataLoader(Sentences(), batch_size=2, collate_fn=padded)
    method = ensemble(of=Single(optimizer=SGD))
    vmap, compiled = both(
        lambda backend: fitted(
            method, loader, backend, lambda: MeanToken().double(), epochs=2, shared_order=True
        )
    )
    assert_same_weights(compiled, vmap)
    lengths = {shape[-1] for shape in seen if shape[-2:-1] == (2,)}
    assert {2, 3} <= lengths


class Pairs(Dataset):
    """Two inputs of one shape, by name."""

    def __len__(self) -> int:
        return len(DATA.targets)

    def __getitem__(self, row: int) -> tuple[dict[str, Tensor], Tensor]:
        x = DATA.inputs[row]
        named = {"b": x.flip(0), "a": x} if row % 2 else {"a": x, "b": x.flip(0)}
        return named, DATA.targets[row]


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.first(a) * 3 + self.second(b).tanh()


def test_inputs_are_told_apart_by_their_names(recorded_only):
    """Batches whose first example names its inputs in another order are in that order themselves."""
    loader = DataLoader(Pairs(), batch_size=3)
    method = ensemble(of=Single(optimizer=SGD))
    vmap, compiled = both(
        lambda backend: fitted(method, loader, backend, lambda: OfPairs().double(), shared_order=True)
    )
    assert_same_weights(compiled, vmap)


# --- going on ----------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class StopAfter(Silent):
    """Interrupts a run after so many steps; ends of epochs count, too."""

    def __init__(self, number: int) -> None:
        self.left = number

    def advance(self, epochs: float, detail: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop


def assert_resumes_to_the_same_bits(name, network, folder, monkeypatch, moment):
    case = BY_NAME[network]
    options = {"data": case.data(24, batch_size=4), "epochs": 6, "threads": 1, "checkpoint_seconds": 3600.0}
    expected = weights(run(name, case, backend="compiled", **options))
    with pytest.raises(Stop):
        run(name, case, backend="compiled", run_dir=folder, **options | {"progress": StopAfter(moment)})
    monkeypatch.setattr(recording, "_programs", {})  # as another process would begin
    resumed = run(name, case, backend="compiled", run_dir=folder, resume=True, **options)
    assert resumed.record["backend"] == "compiled"
    for key, tensor in weights(resumed).items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize(
    ("name", "network", "moment"),
    [
        ("deep_ensemble", "batch_norm_and_dropout", 12),
        ("mean_field", "mlp", 3),
        pytest.param("hmc", "mlp", 5, marks=pytest.mark.slow),
        pytest.param("microcanonical", "mlp", 8, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_run_that_is_cut_goes_on_to_the_same_bits(
    name, network, moment, tmp_path, recorded_only, monkeypatch
):
    """In the middle of an epoch of six batches, the end of which is told apart from its last step."""
    assert_resumes_to_the_same_bits(name, network, tmp_path, monkeypatch, moment)


def test_kernels_go_on_to_the_same_bits(tmp_path, real_compiler, monkeypatch):
    assert_resumes_to_the_same_bits("deep_ensemble", "mlp", tmp_path, monkeypatch, 4)
