"""How a run comes to its backend: what is measured, what compiling costs and gains, and what fails."""

import json
import math
import sys
import warnings

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME
from polymode.methods import DeepEnsemble, Single
from polymode.networks import recording
from polymode.training.loop import backends, compilation
from polymode.training.loop.compilation import Note
from tolerances import assert_equal_up_to_rounding

SGD = pm.Optimizer("SGD", lr=0.05)
ENSEMBLE = DeepEnsemble(3, of=Single(optimizer=SGD))
STEP = {"loop": 0.015, "vmap": 0.005, "compiled": 0.002}  # seconds
MLP = BY_NAME["mlp"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Notes of this test alone, graphs that run one by one, and none from other tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    monkeypatch.setattr(recording, "COMPILER", "aot_eager")
    monkeypatch.setattr(recording, "_programs", {})
    return tmp_path / "graphs" / "polymode" / "aot_eager"


@pytest.fixture
def seconds(monkeypatch):
    """Steps are taken as always, but take as long as these say."""
    told, measure = dict(STEP), backends._step_seconds

    def measured(material, backend, counts, repeats=backends.REPEATS):
        measure(material, backend, counts, 1)
        return {(backend, count): told[backend] for count in counts}

    monkeypatch.setattr(backends, "_step_seconds", measured)
    return told


@pytest.fixture
def cheap(monkeypatch):
    """To compile takes a thousandth of a second, so that even these trainings gain by it."""
    monkeypatch.setattr(compilation, "WORTH_A_LOOK", 0.01)
    monkeypatch.setattr(compilation, "COMPILE_SECONDS", 1e-3)
    monkeypatch.setattr(compilation, "FIND_SECONDS", 1e-3)
    monkeypatch.setattr(compilation, "IMPORT_SECONDS", 0.0)


def fitted(backend="auto", method=ENSEMBLE, case=MLP, data=None, **options):
    options = {"epochs": 2, "progress": False, "threads": 1} | options
    data = case.data() if data is None else data
    return pm.fit(method, case.double_factory, data, likelihood=case.likelihood, backend=backend, **options)


def weights(posterior):
    [block] = posterior.draw()
    return block.stacked


def with_one_warning(match, **options):
    """A fit that says one thing, however often it could have said it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        posterior = fitted(**options)
    messages = [str(warning.message) for warning in said]
    assert len(messages) == 1, messages
    assert match in messages[0]
    return posterior


def refuse(monkeypatch, reason="g++ is not here"):
    def fail(graph, tensors):
        raise RuntimeError(reason)

    monkeypatch.setattr(recording, "_compile", fail)


# --- whether it pays ---------------------------------------------------------------------------------


@pytest.fixture
def imported(monkeypatch):
    """PyTorch's compiler is imported already."""
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", sys)


def known(folder, name, *content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content))


def threshold(note, num_graphs):
    """The shortest training that is worth compiling, by halving."""
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if note.is_worth_it(middle, num_graphs) else (middle, high)
    return high


@pytest.mark.parametrize("num_graphs", [1, 3])
def test_without_notes_the_constants_decide(folder, imported, num_graphs):
    """Saved are T(1 − ratio) seconds, spent as many as graphs take: T > 1.1 · graphs · cost/(1 − ratio)."""
    expected = compilation.MARGIN * num_graphs * compilation.COMPILE_SECONDS / (1 - compilation.RATIO)
    assert threshold(Note(folder / "own.json"), num_graphs) == pytest.approx(expected)
    assert threshold(Note(None), num_graphs) == pytest.approx(expected)


def test_the_first_in_a_process_has_to_import_the_compiler(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    cost = compilation.COMPILE_SECONDS + compilation.IMPORT_SECONDS
    expected = compilation.MARGIN * cost / (1 - compilation.RATIO)
    assert threshold(Note(folder / "own.json"), 1) == pytest.approx(expected)


def test_notes_of_others_tell_what_to_expect(folder, imported):
    """The median of what compiling took, and of what it left of a step."""
    for number, (took, ratio) in enumerate([(2.0, 0.5), (10.0, 0.9), (4.0, 0.1)]):
        known(folder, f"other-{number}", took, ratio)
    assert threshold(Note(folder / "own.json"), 2) == pytest.approx(compilation.MARGIN * 2 * 4.0 / (1 - 0.5))


def test_a_run_that_was_compiled_before_finds_its_graphs(folder, imported):
    known(folder, "other", 100.0, 0.9)
    Note(folder / "own.json").write(50.0, 0.2)
    cost = compilation.MARGIN * 20 * compilation.FIND_SECONDS
    assert threshold(Note(folder / "own.json"), 20) == pytest.approx(cost / (1 - 0.2))
    Note(folder / "own.json").write(0.5, 0.4)  # found this time: what it took at first is kept
    assert json.loads((folder / "own.json").read_text()) == [50.0, 0.4]
    assert threshold(Note(folder / "own.json"), 20) == pytest.approx(cost / (1 - 0.4))


@pytest.mark.parametrize("ratio", [1.0, 1.3, math.inf])
def test_what_was_slower_once_is_not_tried_again(folder, imported, ratio):
    Note(folder / "own.json").write(5.0, ratio)
    assert not Note(folder / "own.json").is_worth_it(1e9, 1)


def test_short_trainings_are_never_worth_it(folder, imported):
    known(folder, "own", 1e-9, 1e-9)
    note = Note(folder / "own.json")
    assert not note.is_worth_it(compilation.WORTH_A_LOOK * 0.99, 1)
    assert note.is_worth_it(compilation.WORTH_A_LOOK * 1.01, 1)


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", "[1, 2, 3]", "[0, 1]", "[-1, 0.5]", '["a", "b"]', "null"]
)
def test_damaged_notes_say_nothing(folder, imported, content):
    folder.mkdir(parents=True)
    (folder / "own.json").write_text(content)
    assert threshold(Note(folder / "own.json"), 1) == pytest.approx(threshold(Note(None), 1))


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    Note(tmp_path / "file" / "note.json").write(1.0, 0.5)
    assert (tmp_path / "file").read_text() == ""


# --- what is chosen ----------------------------------------------------------------------------------


def test_short_trainings_are_not_compiled(folder, seconds, monkeypatch):
    refuse(monkeypatch)  # whoever tries fails
    record = fitted().record
    assert record["backend"] == "vmap"
    assert record["step_seconds"] == {"loop": 0.015, "vmap": 0.005}
    assert not folder.exists()


def test_trainings_are_compiled_where_that_pays(folder, seconds, cheap):
    """Two epochs of three steps of five thousandths of a second; six tenths of it are saved."""
    record = fitted().record
    assert record["backend"] == "compiled"
    assert record["step_seconds"] == STEP
    [note] = folder.glob("*.json")
    took, ratio = json.loads(note.read_text())
    assert ratio == pytest.approx(STEP["compiled"] / STEP["vmap"])
    assert 0 < took < record["choice_seconds"] + 0.01
    fitted()  # the same kind of run has the same note
    assert list(folder.glob("*.json")) == [note]
    fitted("compiled", method=DeepEnsemble(4, of=Single(optimizer=SGD)))
    assert len(list(folder.glob("*.json"))) == 2


def test_the_bill_is_made_for_the_whole_training(seconds, cheap, monkeypatch):
    """Steps of 0.005 s, three an epoch: its cost is compared with what is saved of 0.015 s an epoch."""
    saved = backends.BESIDE * 0.015 * (1 - compilation.RATIO)
    monkeypatch.setattr(compilation, "COMPILE_SECONDS", 3.5 * saved / compilation.MARGIN)
    assert fitted(epochs=3).record["backend"] == "vmap"
    assert fitted(epochs=4).record["backend"] == "compiled"


def test_every_kind_of_batch_is_a_graph_to_pay_for(seconds, cheap, monkeypatch):
    """Of 20 rows the last batch has four, of 24 it has eight as all others: two graphs or one."""
    saved = backends.BESIDE * 0.015 * 4 * (1 - compilation.RATIO)
    monkeypatch.setattr(compilation, "COMPILE_SECONDS", 0.7 * saved / compilation.MARGIN)
    assert fitted(epochs=4, data=MLP.data(24)).record["backend"] == "compiled"
    assert fitted(epochs=4, data=MLP.data(20)).record["backend"] == "vmap"


def test_what_is_compiled_and_slower_is_not_taken(folder, seconds, cheap):
    seconds["compiled"] = 0.01
    record = fitted().record
    assert record["backend"] == "vmap"
    assert record["step_seconds"] == STEP | {"compiled": 0.01}
    assert "compiled" not in fitted().record["step_seconds"]  # and not tried again: there is a note


def test_large_networks_are_not_compiled(seconds, cheap, monkeypatch):
    """A member that takes longer than the cost of calling kernels has nothing to gain."""
    refuse(monkeypatch)
    slow = 3 * backends.WORTH_COMPILING * 1.01
    seconds |= {"loop": slow, "vmap": slow}
    assert fitted().record["backend"] in ("loop", "vmap")


def test_what_vmap_slows_down_is_not_compiled(seconds, cheap, monkeypatch):
    refuse(monkeypatch)
    seconds |= {"loop": 0.002, "vmap": 0.002 * backends.WORTH_RECORDING * 1.01}
    assert fitted().record["backend"] == "loop"


def test_what_is_wanted_compiled_is_compiled_at_any_price(seconds):
    seconds["compiled"] = 1.0
    record = fitted("compiled").record
    assert record["backend"] == "compiled"
    assert record["step_seconds"]["compiled"] == 1.0


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_what_is_wanted_otherwise_is_not(backend, seconds, cheap, monkeypatch):
    refuse(monkeypatch)
    assert fitted(backend).record["backend"] == backend


def test_one_network_is_compiled_where_that_pays(seconds, cheap):
    seconds |= {"loop": 0.0025, "compiled": 0.001}
    record = fitted(method=Single(optimizer=SGD)).record
    assert record["backend"] == "compiled"


def test_one_network_on_one_thread_is_timed_too(cheap, monkeypatch):
    """Whether compiling pays is a question of its time, although there is nothing else to choose."""
    monkeypatch.setattr(compilation, "WORTH_A_LOOK", 0.0)
    monkeypatch.setattr(compilation, "COMPILE_SECONDS", 1e-9)
    record = fitted(method=Single(optimizer=SGD), epochs=4).record
    assert "compiled" in record["step_seconds"]


def test_a_compiled_choice_trains_to_the_same_weights(seconds, cheap):
    compiled, vmap = fitted(), fitted("vmap")
    assert compiled.record["backend"] == "compiled"
    assert_equal_up_to_rounding(weights(compiled), weights(vmap))


# --- what fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "compiled"])
def test_without_a_compiler_members_run_under_vmap(backend, folder, seconds, cheap, monkeypatch):
    expected = weights(fitted("vmap"))
    refuse(monkeypatch)
    posterior = with_one_warning("g++ is not here", backend=backend)
    assert posterior.record["backend"] == "vmap"
    assert "compiled" not in posterior.record["step_seconds"]
    assert_equal_up_to_rounding(weights(posterior), expected)
    assert not list(folder.glob("*.json"))  # nothing was learned of what it gains


@pytest.mark.parametrize("backend", ["auto", "compiled"])
def test_graphs_that_give_other_numbers_are_not_used(backend, seconds, cheap, monkeypatch):
    expected = weights(fitted("vmap"))
    monkeypatch.setattr(
        recording,
        "_compile",
        lambda graph, tensors: lambda *arguments: [t + 1e-2 for t in graph.forward(*arguments)],
    )
    posterior = with_one_warning("other numbers", backend=backend)
    assert posterior.record["backend"] == "vmap"
    assert_equal_up_to_rounding(weights(posterior), expected)


class Tabled(nn.Module):
    """Branches on a property that only Python sees: recorded rightly once, and never the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        calls.append(0)
        return self.layer(x) * (1 + 1e-3 * len(calls))


calls: list[int] = []


def test_networks_that_cannot_be_recorded_run_under_vmap(seconds, cheap):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        posterior = pm.fit(
            ENSEMBLE,
            lambda: Tabled().double(),
            MLP.data(),
            likelihood="categorical",
            epochs=2,
            backend="compiled",
            progress=False,
            threads=1,
        )
    assert ["cannot record" in str(w.message) for w in said] == [True]
    assert posterior.record["backend"] == "vmap"


@pytest.mark.parametrize("case", ["data_dependent", "lstm"])
@pytest.mark.parametrize("method", [ENSEMBLE, Single(optimizer=SGD)], ids=["ensemble", "single"])
def test_modules_that_vmap_cannot_run_are_trained_one_by_one(case, method, seconds):
    expected = weights(fitted("loop", method, BY_NAME[case]))
    seconds["loop"] = 0.002
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        posterior = fitted("compiled", method, BY_NAME[case])
    messages = [str(warning.message) for warning in said]
    assert "The backend is loop, as nothing can be compiled" in messages[-1]
    assert len(set(messages)) == len(messages)
    assert posterior.record["backend"] == "loop"
    assert_equal_up_to_rounding(weights(posterior), expected)


def test_networks_that_draw_by_themselves_are_not_compiled(seconds, cheap):
    with pytest.warns(UserWarning, match="draws random numbers by itself"):
        posterior = fitted("compiled", case=BY_NAME["functional_dropout"])
    assert posterior.record["backend"] == "loop"


def test_a_form_that_cannot_be_compiled_runs_under_vmap(seconds, monkeypatch):
    """The last batch has four rows and a graph of its own: it fails, the other one stays compiled."""
    data, compile_ = MLP.data(20), recording._compile
    expected = weights(fitted("vmap", data=data))
    compiled: list[int] = []

    def only_full_batches(graph, tensors):
        if any(t.shape[:2] == (3, 4) and t.dtype == torch.int64 for t in tensors):
            raise RuntimeError("too few rows")
        compiled.append(0)
        return compile_(graph, tensors)

    monkeypatch.setattr(recording, "_compile", only_full_batches)
    posterior = with_one_warning("not compiled: too few rows", backend="compiled", data=data)
    assert posterior.record["backend"] == "compiled"
    assert len(compiled) == 1
    assert_equal_up_to_rounding(weights(posterior), expected)


def test_a_resumed_run_stays_compiled(seconds, cheap, tmp_path):
    def stop(epoch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(run_dir=tmp_path / "run", observer=stop)
    seconds["compiled"] = 1.0  # nobody measures again
    resumed = fitted(run_dir=tmp_path / "run", resume=True)
    assert resumed.record["backend"] == "compiled"
    assert resumed.record["step_seconds"] == STEP
    assert all(torch.equal(t, weights(fitted("compiled"))[n]) for n, t in weights(resumed).items())


def test_a_run_that_is_resumed_without_a_compiler_ends_under_vmap(seconds, cheap, tmp_path, monkeypatch):
    def stop(epoch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(run_dir=tmp_path / "run", observer=stop)
    expected = weights(fitted("vmap"))
    monkeypatch.setattr(recording, "_programs", {})
    refuse(monkeypatch)
    resumed = with_one_warning("g++ is not here", run_dir=tmp_path / "run", resume=True)
    assert_equal_up_to_rounding(weights(resumed), expected)
