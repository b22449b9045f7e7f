"""Recordings give what the function gives, or are not made."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import polymode as pm
from polymode.errors import CannotCompile
from polymode.networks import recording as recording_module
from polymode.networks.recording import compiled, record
from polymode.training.contract import recordings as recordings_module
from tolerances import PASS, assert_equal_up_to_rounding


def test_a_recording_replays_gradients_at_other_values():
    def evaluate(weights, x):
        leaf = weights["w"].detach().requires_grad_()
        loss = torch.vmap(lambda w: (x @ w).tanh().square().sum())(leaf)
        return loss.detach(), {"w": torch.autograd.grad(loss.sum(), leaf)[0]}

    generator = torch.Generator().manual_seed(0)
    first, second = (
        ({"w": torch.randn(3, 4, generator=generator)}, torch.randn(5, 4, generator=generator))
        for _ in range(2)
    )
    recording = record(evaluate, first)
    assert recording is not None
    for arguments in (first, second):
        replay = recording.bind(*arguments)
        for _ in range(2):  # with the values that the tensors have by then
            losses, gradients = replay()
            expected, expected_gradients = evaluate(*arguments)
            assert_equal_up_to_rounding(losses, expected, PASS)
            assert_equal_up_to_rounding(gradients, expected_gradients, PASS)
            arguments[0]["w"].mul_(1.5)


def test_what_depends_on_values_is_not_recorded():
    def branching(x):
        return x * 2 if x.sum().item() > 0 else x

    assert record(branching, (torch.ones(3),)) is None

    calls = []

    def changing(x):
        calls.append(0)
        return x * len(calls)  # never twice the same: a recording would be wrong

    assert record(changing, (torch.ones(3),)) is None


def test_rounding_does_not_decide_whether_there_is_a_recording():
    calls = []

    def rounding(x):
        calls.append(0)
        return x * (1 + len(calls) * torch.finfo(torch.float64).eps)

    assert record(rounding, (torch.ones(3, dtype=torch.float64),)) is not None
    assert len(calls) == 2


def test_hmc_replays_and_ends_with_the_same_weights(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    data = pm.ArrayData(x, x[:, 0].sin(), batch_size=20)
    replays = []

    def fitted():
        return pm.fit(
            pm.methods.HMC(3, 0.7, num_samples=4, descent=0),
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
            data,
            likelihood=pm.likelihoods.FixedGaussian(std=0.3),
            epochs=60,
            progress=False,
            backend="vmap",
        )

    def counting(function, arguments):
        recording = record(function, arguments)
        assert recording is not None

        def program(*tensors):
            replays.append(0)
            return recording.program(*tensors)

        return replace(recording, program=program)

    monkeypatch.setattr(recordings_module, "record", counting)
    [recorded] = fitted().draw()
    assert len(replays) >= 60
    monkeypatch.setattr(recordings_module, "record", lambda function, arguments: None)
    [direct] = fitted().draw()
    assert_equal_up_to_rounding(recorded.stacked, direct.stacked)


# --- what is recorded and what is compiled -------------------------------------------------------


@pytest.fixture(autouse=True)
def operations_run_one_by_one(monkeypatch):
    """Graphs go through all of torch.compile's stages but the last, and every test compiles its own."""
    monkeypatch.setattr(recording_module, "COMPILER", "aot_eager")
    monkeypatch.setattr(recording_module, "_programs", {})


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def backends(monkeypatch, change=lambda result: result):
    """The graphs that are compiled from now on; change: what is done to their results."""
    graphs = []

    def lookup(name):
        def compiler(graph, tensors):
            graphs.append(graph)
            return lambda *arguments: [change(result) for result in graph.forward(*arguments)]

        return compiler

    monkeypatch.setattr("torch._dynamo.lookup_backend", lookup)
    return graphs


both = pytest.mark.parametrize("make", [record, compiled], ids=["recorded", "compiled"])


@both
def test_changes_in_place_are_replayed(make):
    def move(state, x):
        state["running"].mul_(0.9).add_(x.sum(0), alpha=0.1)
        state["count"].add_(1)
        return (state["running"] * 2).sum(), state["count"] * 3

    def fresh():
        return {"running": numbers(3), "count": torch.tensor(5)}

    arguments, x = fresh(), numbers(4, 3)
    found = make(move, (arguments, x))
    assert found is not None
    assert torch.equal(arguments["running"], fresh()["running"])  # to record is not to move
    assert arguments["count"].item() == 5
    ours, theirs = fresh(), fresh()
    replay = found.bind(ours)
    for step in range(1, 4):
        result, expected = replay(x * step), move(theirs, x * step)
        assert_equal_up_to_rounding(ours["running"], theirs["running"], PASS)
        assert ours["count"].item() == theirs["count"].item() == 5 + step
        assert_equal_up_to_rounding(result[0], expected[0], PASS)
        assert result[1].item() == expected[1].item()


@both
def test_tensors_from_elsewhere_are_seen_as_they_are_by_then(make):
    scale, offset, index = torch.tensor(2.0, dtype=torch.float64), numbers(3), torch.tensor([2, 0])
    found = make(lambda x: (x * (scale + 1) + offset)[index], (numbers(3),))
    assert found is not None
    x = numbers(1, 3)[0]
    for _ in range(3):
        expected = (x * (scale + 1) + offset)[index]
        assert_equal_up_to_rounding(found.bind()(x), expected, PASS)
        scale.mul_(3)
        offset.add_(1)
        index.copy_(index.flip(0))
    assert {id(constant) for constant in found.constants} == {id(scale), id(offset), id(index)}


def test_equal_graphs_are_compiled_once(monkeypatch):
    """Functions that differ in the tensors that they hold, as those of two phases do, are one graph."""
    graphs = backends(monkeypatch)

    def function_of(constant):
        return lambda x: (x * constant).sin()

    x = numbers(3)
    for constant in (numbers(3), numbers(3) + 1):
        found = compiled(function_of(constant), (x,))
        assert_equal_up_to_rounding(found.bind()(x), (x * constant).sin(), PASS)
    assert len(graphs) == 1
    compiled(lambda x: (x * 2.0).sin(), (x,))  # another text
    assert len(graphs) == 2
    compiled(function_of(numbers(4)), (numbers(4),))  # tensors of another form
    assert len(graphs) == 3
    compiled(function_of(numbers(3).float()), (x.float(),))
    assert len(graphs) == 4
    compiled(function_of(numbers(3)), (x,))
    assert len(graphs) == 4


def test_programs_beyond_the_most_are_forgotten(monkeypatch):
    graphs = backends(monkeypatch)
    monkeypatch.setattr(recording_module, "MOST_PROGRAMS", 2)
    for size in (1, 2, 3, 3, 2, 1):  # the first is forgotten for the third
        compiled(torch.sin, (numbers(size),))
    assert [next(iter(g.graph.nodes)).meta["val"].shape[0] for g in graphs] == [1, 2, 3, 1]
    assert len(recording_module._programs) == 2


def listed(x):
    return x * torch.tensor(x.tolist(), dtype=x.dtype)


def by_numpy(x):
    return x * float(x.detach().numpy().max())


def branching(x):
    return x * 2 if (x > 0).any() else x


@pytest.mark.parametrize("function", [listed, by_numpy, branching])
def test_what_looks_at_values_is_neither_recorded_nor_compiled(function):
    x = numbers(5)
    assert record(function, (x,)) is None
    with pytest.raises(CannotCompile, match="cannot record"):
        compiled(function, (x,))


def scaled_by_its_sum(x):
    return x * x.sum().item()


def positive(x):
    return x[x > 0]


@both
@pytest.mark.parametrize("function", [scaled_by_its_sum, positive])
def test_values_that_a_graph_can_look_at_are_not_frozen(function, make):
    """Numbers and lengths that come from values: refused, or looked up again at every replay."""
    x = numbers(5)
    try:
        found = make(function, (x,))
    except CannotCompile:
        return
    if found is not None:
        for other in (x, -x, x * 3):
            assert_equal_up_to_rounding(found.bind()(other), function(other), PASS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_that_computes_something_else_is_refused(monkeypatch, dtype):
    backends(monkeypatch, lambda result: result + 1e-2)
    with pytest.raises(CannotCompile, match="other numbers"):
        compiled(torch.sin, (numbers(50, dtype=dtype),))


def test_a_program_that_rounds_otherwise_is_not(monkeypatch):
    backends(monkeypatch, lambda result: result * (1 + 4 * torch.finfo(result.dtype).eps))
    x = numbers(50)
    assert_equal_up_to_rounding(compiled(torch.sin, (x,)).bind()(x), x.sin(), PASS)


@pytest.mark.parametrize(
    "change",
    [
        lambda result: torch.where(result == result.max(), torch.nan, result),
        lambda result: result.float(),
        lambda result: result[:-1],
        lambda result: -result,
    ],
    ids=["not a number", "type", "shape", "sign"],
)
def test_programs_of_other_results_are_refused(monkeypatch, change):
    backends(monkeypatch, change)
    with pytest.raises(CannotCompile, match="other numbers"):
        compiled(torch.sin, (numbers(50),))


def test_a_program_that_forgets_a_change_in_place_is_refused(monkeypatch):
    def lookup(name):
        return lambda graph, tensors: lambda *arguments: graph.forward(*(t.clone() for t in arguments))

    monkeypatch.setattr("torch._dynamo.lookup_backend", lookup)

    def move(x):
        x.add_(1)
        return x * 2

    with pytest.raises(CannotCompile, match="other numbers"):
        compiled(move, (numbers(3),))


LARGE = 10_000.0


def difference(x):
    return x - LARGE


def test_differences_of_large_numbers_may_differ_as_much_as_rounding_moves_them(monkeypatch):
    """x of about 10⁴ has an ulp of 10⁻³ in single precision: x − 10⁴ has no digits beyond, though it is 1."""
    x = LARGE + numbers(64, dtype=torch.float32)
    error = 4 * torch.finfo(torch.float32).eps * LARGE
    assert error > 2**10 * torch.finfo(torch.float32).eps * difference(x).abs().max()  # none of an ordinary 1
    backends(monkeypatch, lambda result: result + error)
    found = compiled(difference, (x,)).bind()(x)
    torch.testing.assert_close(found, difference(x), rtol=0, atol=1.01 * error)


def test_errors_beyond_that_are_found(monkeypatch):
    x = LARGE + numbers(64, dtype=torch.float32)
    backends(monkeypatch, lambda result: result + 10)
    with pytest.raises(CannotCompile, match="other numbers"):
        compiled(difference, (x,))


def test_a_difference_in_double_precision_is_as_sharp_as_its_digits(monkeypatch):
    backends(monkeypatch, lambda result: result + 1e-2)
    with pytest.raises(CannotCompile, match="other numbers"):
        compiled(difference, (LARGE + numbers(64),))


def test_compilers_that_fail_say_why(monkeypatch):
    def lookup(name):
        def fail(graph, tensors):
            raise RuntimeError("no compiler here\nand a long story")

        return fail

    monkeypatch.setattr("torch._dynamo.lookup_backend", lookup)
    with pytest.raises(CannotCompile, match=r"no compiler here$"):
        compiled(torch.sin, (numbers(3),))


LAYOUTS = {
    "expanded": numbers(1, 4).expand(3, 4),
    "expanded in the middle": numbers(3, 1, 2).expand(3, 4, 2),
    "one number": numbers(1)[0].expand(3, 4),
    "transposed": numbers(4, 3).T,
    "every second row": numbers(6, 4)[::2],
    "every second column": numbers(3, 8)[:, 1::2],
    "of length one with any stride": numbers(3, 4).as_strided((1, 4), (0, 1)),
    "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@both
@pytest.mark.parametrize("name", LAYOUTS)
def test_arguments_may_lie_in_memory_as_they_like(name, make):
    x = LAYOUTS[name]
    before = x.clone()
    function = torch.vmap(lambda row: (row * 3).cumsum(0).sin())
    found = make(function, (x,))
    assert found is not None
    assert_equal_up_to_rounding(found.bind()(x), function(x), PASS)
    assert torch.equal(x, before)


@both
def test_a_strided_argument_is_changed_where_it_lies(make):
    """Only every second row of a stack belongs to the members that move."""

    def move(x):
        x.mul_(2).add_(1)
        return x.sum(1)

    stack = numbers(6, 4)
    found = make(move, (stack[::2],))
    assert found is not None
    expected = stack.clone()
    sums = move(expected[::2])
    assert_equal_up_to_rounding(found.bind(stack[::2])(), sums, PASS)
    assert_equal_up_to_rounding(stack, expected, PASS)


@both
def test_a_result_has_the_form_of_the_functions(make):
    def function(x):
        return {"b": [x + 1, None], "a": (x.sum(), x.flip(0))}

    x = numbers(3)
    found = make(function, (x,))
    assert found is not None
    result = found.bind()(x)
    assert list(result) == ["b", "a"]
    assert result["b"][1] is None
    assert_equal_up_to_rounding(result["b"][0], x + 1, PASS)
    assert_equal_up_to_rounding(result["a"][1], x.flip(0), PASS)
