"""Predictions of compiled graphs are those of vmap, whoever asks and however points are cut."""

import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME
from contract.registry import SMALL
from polymode.methods import DeepEnsemble, MCDropout, Single
from polymode.networks import members as members_module
from polymode.networks import recording
from polymode.networks.members import forward_members, stack
from polymode.networks.surgery import prepare, tensors_of
from polymode.trees import leaves
from tolerances import PASS, assert_equal_up_to_rounding

SGD = pm.Optimizer("SGD", lr=0.05)
ENSEMBLE = DeepEnsemble(3, of=Single(optimizer=SGD))


@pytest.fixture(autouse=True)
def operations_run_one_by_one(monkeypatch):
    monkeypatch.setattr(recording, "COMPILER", "aot_eager")


def fitted(method=ENSEMBLE, network="mlp"):
    case = BY_NAME[network]
    return pm.fit(
        method,
        case.double_factory,
        case.data(),
        likelihood=case.likelihood,
        epochs=2,
        backend="loop",
        progress=False,
    )


@pytest.fixture
def programs(monkeypatch):
    """The forms of all that is compiled during a test, one entry a graph that runs."""
    made = []

    def noticing(function, arguments):
        found = recording.compiled(function, arguments)
        made.append(recording.form_of(arguments))
        return found

    monkeypatch.setattr(members_module, "compiled", noticing)
    return made


def both(posterior):
    return posterior.with_backend("vmap"), posterior.with_backend("compiled")


def assert_same_prediction(found, expected):
    assert type(found) is type(expected)
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert_equal_up_to_rounding(one, other, PASS, field.name)
        elif isinstance(other, dict):
            assert one.keys() == other.keys()
            for key in other:
                assert_equal_up_to_rounding(one[key], other[key], PASS)
        else:
            assert one == other, field.name


NETWORKS = [
    "mlp",
    "batch_norm_and_dropout",
    "convolution",
    "transformer",
    "tied_tokens",
    "keyword_inputs",
    "named_outputs",
    "random_features",
    "multi_label",
    "learned_noise",
    "input_dependent_noise",
    "counts",
    "heavy_tails",
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_predicts_what_it_predicts_under_vmap(network, programs):
    vmap, compiled = both(fitted(network=network))
    inputs = BY_NAME[network].data(11, seed=3).inputs
    for _ in range(2):  # as it is compiled, and as it is found
        assert_same_prediction(compiled.predict(inputs), vmap.predict(inputs))
    assert len(programs) == 1
    assert_same_prediction(compiled.predict(inputs, batch_size=4), vmap.predict(inputs, batch_size=4))


@pytest.mark.parametrize("network", ["mlp", "learned_noise"])
def test_one_point_some_draws_quantiles_and_means_of_outputs(network):
    vmap, compiled = both(fitted(network=network))
    inputs = BY_NAME[network].data(9, seed=3).inputs
    assert_same_prediction(compiled.predict(inputs[:1]), vmap.predict(inputs[:1]))
    assert_same_prediction(compiled.predict(inputs, 2), vmap.predict(inputs, 2))
    options = {"average": "outputs"}
    assert_same_prediction(compiled.predict(inputs, **options), vmap.predict(inputs, **options))
    if network == "learned_noise":
        levels = {"quantiles": (0.1, 0.5, 0.9)}
        found, expected = compiled.predict(inputs, **levels), vmap.predict(inputs, **levels)
        torch.testing.assert_close(found.quantiles, expected.quantiles, rtol=1e-6, atol=1e-6)
    targets = BY_NAME[network].data(9, seed=3).targets
    assert_equal_up_to_rounding(compiled.log_prob(inputs, targets), vmap.log_prob(inputs, targets), PASS)


def test_predictions_do_not_depend_on_how_points_are_cut(programs):
    """Batches of four: two forms of inputs, each with a graph of its own; all points at once: a third."""
    vmap, compiled = both(fitted())
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    whole = vmap.predict(inputs)
    assert_same_prediction(compiled.predict(inputs, batch_size=4), whole)
    assert len(programs) == 2
    assert_same_prediction(compiled.predict(inputs), whole)
    assert len(programs) == 3


def test_weights_of_members_count(programs):
    posterior = fitted()
    [block] = posterior.blocks
    uneven = replace(posterior, blocks=[replace(block, log_weights=torch.tensor([0.0, -1.0, 2.0]).double())])
    vmap, compiled = both(uneven)
    even = posterior.with_backend("compiled")
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    assert_same_prediction(compiled.predict(inputs), vmap.predict(inputs))
    assert_same_prediction(even.predict(inputs), posterior.with_backend("vmap").predict(inputs))
    assert not torch.allclose(even.predict(inputs).mean, compiled.predict(inputs).mean)


def test_a_graph_is_about_no_particular_weights(programs):
    """Two posteriors of one module: what was compiled for one is used for the other, with its weights."""
    posterior = fitted()
    [block] = posterior.blocks
    other = replace(posterior, blocks=[block.map(lambda t: t * 1.5)])
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    for each in (posterior, other):
        vmap, compiled = both(each)
        assert_same_prediction(compiled.predict(inputs), vmap.predict(inputs))
    assert len(programs) == 1


def test_likelihoods_with_other_numbers_have_other_graphs():
    posterior = fitted()
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    vmap, compiled = both(posterior)
    compiled.predict(inputs)
    warm = compiled.calibrated(BY_NAME["mlp"].data(20, seed=9))
    assert_same_prediction(warm.predict(inputs), warm.with_backend("vmap").predict(inputs))
    assert not torch.allclose(warm.predict(inputs).mean, compiled.predict(inputs).mean)
    assert_same_prediction(compiled.predict(inputs), vmap.predict(inputs))


@pytest.mark.parametrize("name", ["batch_ensemble", "late_phase"])
def test_members_that_share_weights(name):
    method = SMALL[name]()
    if name == "late_phase":
        method = replace(method, keep_members=True)
    vmap, compiled = both(fitted(method))
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    assert_same_prediction(compiled.predict(inputs), vmap.predict(inputs))
    assert_same_prediction(compiled.predict(inputs, batch_size=3), vmap.predict(inputs, batch_size=3))


@pytest.mark.parametrize("name", ["mean_field", "swag", "ecmp", "rank_one_bnn", "mimo", "dropconnect"])
def test_draws_of_every_kind_of_posterior(name):
    vmap, compiled = both(fitted(SMALL[name]()))
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    draws = 6 if vmap.num_members is None else None
    found, expected = (
        each.predict(inputs, draws, torch.Generator().manual_seed(4), batch_size=4)
        for each in (compiled, vmap)
    )
    assert_same_prediction(found, expected)


def test_noise_of_dropout_depends_on_the_place_of_a_point_only():
    """Draws of MC dropout: their masks are those of the examples, whichever batch they come in."""
    vmap, compiled = both(fitted(MCDropout(optimizer=SGD), "batch_norm_and_dropout"))
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    whole = vmap.predict(inputs, 5, torch.Generator().manual_seed(1))
    for batch_size in (4, 10):
        found = compiled.predict(inputs, 5, torch.Generator().manual_seed(1), batch_size=batch_size)
        assert_same_prediction(found, whole)
    shifted, expected = (
        [outputs for _, outputs, _ in each.outputs(inputs[4:], 5, torch.Generator().manual_seed(1), **where)]
        for each, where in ((compiled, {"first_example": 4}), (vmap, {"first_example": 4}))
    )
    elsewhere = [o for _, o, _ in vmap.outputs(inputs[4:], 5, torch.Generator().manual_seed(1))]
    for one, other, at_first in zip(shifted, expected, elsewhere, strict=True):
        assert_equal_up_to_rounding(one, other, PASS)
        assert not torch.allclose(one, at_first)  # there the masks of other examples


@pytest.mark.parametrize("method", [ENSEMBLE, MCDropout(optimizer=SGD)], ids=["ensemble", "dropout"])
def test_kernels_predict_what_vmap_predicts(method, monkeypatch):
    """With the real compiler: seeds of masks are whole numbers that overflow, and must do so alike."""
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if not any(map(shutil.which, compilers)):
        pytest.skip(f"PyTorch has no C++ compiler to compile kernels with: no {' or '.join(compilers)} here")
    monkeypatch.setattr(recording, "COMPILER", "inductor")
    posterior = fitted(method, "batch_norm_and_dropout")
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    draws = 5 if posterior.num_members is None else None
    vmap, compiled = (each.predict(inputs, draws) for each in both(posterior))
    assert_same_prediction(compiled, vmap)


# --- passes of members ---------------------------------------------------------------------------------


def made(network, num_members=3):
    case = BY_NAME[network]
    modules = [prepare(case.double_factory()) for _ in range(num_members)]
    template = prepare(case.double_factory())
    return template, stack([tensors_of(module) for module in modules])


def test_training_mode_is_not_compiled(programs):
    """Running statistics move in training mode, and masks are drawn: as under vmap, and not recorded."""
    template, members = made("batch_norm_and_dropout")
    inputs, other = BY_NAME["mlp"].data().inputs, members.clone()
    template.train()
    with torch.no_grad():
        found = forward_members(template, members, inputs, backend="compiled")
        expected = forward_members(template, other, inputs, backend="vmap")
    assert_equal_up_to_rounding(found, expected, PASS)
    assert_equal_up_to_rounding(members.stacked, other.stacked, PASS)
    assert not programs
    template.eval()
    with torch.no_grad():
        found = forward_members(template, members, inputs, backend="compiled")
    assert len(programs) == 1
    assert_equal_up_to_rounding(found, forward_members(template, other, inputs, backend="vmap"), PASS)
    template.train()
    with torch.no_grad():
        again = forward_members(template, members, inputs, backend="compiled")
    assert not torch.allclose(again, found)
    assert_equal_up_to_rounding(again, forward_members(template, other, inputs, backend="vmap"), PASS)


def test_gradients_go_through_a_pass_that_wants_them():
    template, members = made("mlp")
    template.eval()
    inputs = BY_NAME["mlp"].data().inputs.requires_grad_()
    gradients = [
        torch.autograd.grad(forward_members(template, members, inputs, backend=backend).sum(), inputs)[0]
        for backend in ("compiled", "vmap")
    ]
    assert_equal_up_to_rounding(*gradients, PASS)


@pytest.mark.parametrize("have_members", [False, True], ids=["one for all", "one for each"])
def test_inputs_of_all_members_or_of_each(have_members, programs):
    template, members = made("mlp")
    template.eval()
    inputs = torch.randn(3, 4, dtype=torch.float64)  # three points, or as many as members: the same form
    inputs = torch.stack([inputs, -inputs, 2 * inputs]) if have_members else inputs
    options = {"inputs_have_members": have_members}
    with torch.no_grad():
        found = forward_members(template, members, inputs, backend="compiled", **options)
        expected = forward_members(template, members, inputs, backend="vmap", **options)
    assert_equal_up_to_rounding(found, expected, PASS)
    assert len(programs) == 1


def test_beyond_the_most_forms_members_run_under_vmap(programs, monkeypatch):
    monkeypatch.setattr(members_module, "MOST_PASSES", 2)
    template, members = made("mlp")
    template.eval()
    inputs = BY_NAME["mlp"].data().inputs
    for count in (1, 2, 3, 4, 2, 1):
        with torch.no_grad():
            found = forward_members(template, members, inputs[:count], backend="compiled")
            expected = forward_members(template, members, inputs[:count], backend="vmap")
        assert_equal_up_to_rounding(found, expected, PASS)
    assert len(programs) == 2


def test_inference_mode_and_ordinary_calls_share_a_graph():
    template, members = made("batch_norm_and_dropout")
    template.eval()
    inputs = BY_NAME["mlp"].data().inputs
    expected = forward_members(template, members, inputs, backend="vmap")
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            found = forward_members(template, members, inputs, backend="compiled")
        assert_equal_up_to_rounding(found.clone(), expected.detach(), PASS)


class TwoAlike(nn.Module):
    """Two inputs and two layers of one shape, which only their names tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, a, b):
        return self.first(a) - 2 * self.second(b).tanh()


def test_inputs_and_weights_are_told_apart_by_their_names(generator):
    """A dictionary may name its entries in any order."""
    modules = [prepare(TwoAlike().double()) for _ in range(3)]
    template, members = modules[0].eval(), stack([tensors_of(module) for module in modules])
    backwards = replace(members, stacked=dict(reversed(list(members.stacked.items()))))
    a, b = (torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    with torch.no_grad():
        expected = forward_members(template, members, {"a": a, "b": b}, backend="vmap")
        for each in (members, backwards):
            for inputs in ({"a": a, "b": b}, {"b": b, "a": a}, (a, b)):
                found = forward_members(template, each, inputs, backend="compiled")
                assert_equal_up_to_rounding(found, expected, PASS)


def test_a_prediction_in_training_mode_is_not_that_of_evaluation_mode():
    """Masks and statistics of batches, where the module is put into training mode; both ways."""
    for first in (True, False):
        posterior = fitted(network="batch_norm_and_dropout")
        inputs = BY_NAME["mlp"].data(10, seed=3).inputs
        for training in (first, not first):
            found = []
            for each in both(posterior):
                fresh = replace(each, blocks=[block.clone() for block in posterior.blocks])
                fresh.network.module.train(training)
                found.append(fresh.predict(inputs))
            assert_same_prediction(*found)


def test_mixed_precision_is_asked_for_at_every_call():
    """Whoever predicts under autocast gets what vmap gives there, and nobody else does."""
    case = BY_NAME["mlp"]
    posterior = pm.fit(
        ENSEMBLE,
        case.factory,
        case.data(),
        likelihood=case.likelihood,
        epochs=1,
        backend="loop",
        progress=False,
    )
    vmap, compiled = both(posterior)
    inputs = case.data(10, seed=3).inputs.float()
    for mixed in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            found, expected = compiled.predict(inputs), vmap.predict(inputs)
        torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-2 if mixed else 1e-6)


# --- what cannot be compiled ---------------------------------------------------------------------------


def refuse(monkeypatch):
    def fail(graph, tensors):
        raise RuntimeError("g++ is not here")

    monkeypatch.setattr(recording, "_compile", fail)
    monkeypatch.setattr(recording, "_programs", {})


def test_without_a_compiler_predictions_are_those_of_vmap(monkeypatch):
    vmap, compiled = both(fitted())
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    refuse(monkeypatch)
    with pytest.warns(UserWarning, match="g\\+\\+ is not here"):
        found = compiled.predict(inputs)
    assert_same_prediction(found, vmap.predict(inputs))
    assert_same_prediction(compiled.predict(inputs), found)  # and it is not said again


@pytest.mark.parametrize("network", ["data_dependent", "lstm"])
def test_networks_that_vmap_cannot_run_predict_one_by_one(network):
    posterior = fitted(network=network)
    inputs = BY_NAME[network].data(10, seed=3).inputs
    expected = posterior.with_backend("loop")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for count in (10, 9, 8):
            found = posterior.with_backend("compiled").predict(inputs[:count])
            assert_same_prediction(found, expected.predict(inputs[:count]))
    messages = [str(warning.message) for warning in said]
    assert any("one after another" in message for message in messages)
    assert len(set(messages)) == len(messages)  # nothing is said twice


def test_compact_networks_of_different_shapes_predict_compiled():
    posterior = fitted(SMALL["dst_ensemble"]())
    compact = posterior.compact(None)
    inputs = BY_NAME["mlp"].data(10, seed=3).inputs
    vmap, compiled = both(compact)
    assert_same_prediction(compiled.predict(inputs), vmap.predict(inputs))


def test_inputs_of_a_wrong_shape_are_refused_as_ever():
    compiled = fitted().with_backend("compiled")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(pm.errors.InputError, match="cannot run on a batch of these inputs"):
            compiled.predict(torch.zeros(3, 7, dtype=torch.float64))


# --- threads -------------------------------------------------------------------------------------------


def test_eight_threads_get_the_answers_of_one():
    """Eight threads ask at once, before anything is compiled, for two posteriors of one module."""
    posterior = fitted(network="batch_norm_and_dropout")
    [block] = posterior.blocks
    posteriors = [posterior, replace(posterior, blocks=[block.map(lambda t: t * 2)])]
    inputs = BY_NAME["mlp"].data(12, seed=3).inputs
    jobs = [(index % 2, 1 + index % 4) for index in range(80)]
    expected = [posteriors[which].with_backend("vmap").predict(inputs[:count]) for which, count in jobs]

    def answer(job):
        which, count = job
        return posteriors[which].with_backend("compiled").predict(inputs[:count])

    with ThreadPoolExecutor(8) as pool:
        for found, other in zip(pool.map(answer, jobs), expected, strict=True):
            assert_same_prediction(found, other)


def test_passes_leave_inputs_and_members_as_they_are():
    posterior = fitted(network="batch_norm_and_dropout").with_backend("compiled")
    inputs = BY_NAME["mlp"].data(12, seed=3).inputs
    before, [block] = inputs.clone(), posterior.blocks
    weights = block.clone()
    posterior.predict(inputs)
    assert torch.equal(inputs, before)
    assert all(torch.equal(t, weights.stacked[n]) for n, t in block.stacked.items())
    assert all(not leaf.requires_grad for leaf in leaves(block.stacked))
