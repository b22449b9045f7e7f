"""Networks that were trained elsewhere say as a posterior what they said as modules."""

import copy
import functools
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import polymode as pm
from cases import BY_NAME, TiedTokens, conv_net
from polymode.errors import CheckpointError, InputError
from polymode.landscape import flatness
from polymode.networks.surgery import tensors_of
from tolerances import PASS, assert_equal_up_to_rounding

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (12,), generator=torch.Generator().manual_seed(1))


def mlp(**options):
    return pm.models.MLP(4, 3, (6,), **options)


def trained(factory=mlp, count=3):
    """Modules whose weights and running statistics are not those of a fresh one."""
    modules = []
    for seed in range(count):
        module, generator = factory(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in tensors_of(module).items():
                if tensor.is_floating_point():
                    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                    tensor.copy_(drawn.square() + 0.5 if "var" in name else 0.6 * drawn)
        modules.append(module.eval())
    return modules


@torch.no_grad()
def said(modules, inputs):
    return torch.stack([module(inputs).softmax(-1) for module in modules])


def assert_says(posterior, modules, inputs):
    """The posterior says what its modules say, one by one and on average."""
    expected = said(modules, inputs)
    assert posterior.num_members == len(modules)
    found = pm.landscape.function_values(posterior, inputs)
    assert_equal_up_to_rounding(found, expected, PASS)
    mean = posterior.predict(inputs).mean
    assert_equal_up_to_rounding(mean.to(expected.dtype), expected.mean(0), PASS)


# --- where states come from --------------------------------------------------------------------------


def as_dict(module, path):
    return module.state_dict()


def as_pt(module, path):
    torch.save(module.state_dict(), path := path.with_suffix(".pt"))
    return path


def as_old_pt(module, path):
    torch.save(module.state_dict(), path := path.with_suffix(".pth"), _use_new_zipfile_serialization=False)
    return str(path)


def as_safetensors(module, path):
    save_file(
        {n: t.contiguous() for n, t in module.state_dict().items()}, path := path.with_suffix(".safetensors")
    )
    return str(path)


def as_trainer(place, module, path):
    content = {"epoch": 3, place: module.state_dict(), "optimizer": {"lr": 0.1}}
    torch.save(content, path := path.with_suffix(".ckpt"))
    return path


def with_prefix(prefix, module, path):
    state = OrderedDict((prefix + name, tensor) for name, tensor in module.state_dict().items())
    torch.save({"state_dict": state}, path := path.with_suffix(".pt"))
    return path


FORMS = {
    "dict": as_dict,
    "pt": as_pt,
    "old pt": as_old_pt,
    "safetensors": as_safetensors,
    "state_dict": functools.partial(as_trainer, "state_dict"),
    "model": functools.partial(as_trainer, "model"),
    "model_state_dict": functools.partial(as_trainer, "model_state_dict"),
    "module.": functools.partial(with_prefix, "module."),
    "_orig_mod.": functools.partial(with_prefix, "_orig_mod."),
    "compiled in parallel": functools.partial(with_prefix, "module._orig_mod."),
    "Lightning": functools.partial(with_prefix, "model."),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_posterior_says_what_its_modules_say(form, tmp_path):
    modules = trained()
    states = [FORMS[form](module, tmp_path / f"{i}") for i, module in enumerate(modules)]
    assert_says(pm.from_state_dicts(mlp, states, likelihood="categorical"), modules, X)


def test_modules_as_torch_wraps_them(tmp_path):
    """What DataParallel and torch.compile really write, not what their prefixes are thought to be."""
    modules = trained()
    states = [
        nn.DataParallel(modules[0]).state_dict(),
        torch.compile(modules[1], backend="eager").state_dict(),
    ]
    states.append(modules[2].state_dict())
    assert next(iter(states[0])).startswith("module.")
    assert next(iter(states[1])).startswith("_orig_mod.")
    assert_says(pm.from_state_dicts(mlp(), states, likelihood="categorical"), modules, X)


def tokens(count=12):
    return torch.randint(7, (count, 5), generator=torch.Generator().manual_seed(2))


def images(count=12):
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("factory", "inputs"),
    [
        (functools.partial(mlp, batch_norm=True), X),
        (functools.partial(mlp, dropout=0.5), X),
        (functools.partial(mlp, batch_norm=True, dropout=0.3), X),
        (TiedTokens, tokens()),
        (conv_net, images()),
        (lambda: conv_net().to(memory_format=torch.channels_last), images()),
        (BY_NAME["random_features"].factory, X),
        (BY_NAME["lstm"].factory, torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(4))),
    ],
    ids=["batch norm", "dropout", "both", "tied", "convolution", "channels last", "buffers", "lstm"],
)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_networks_of_every_kind(factory, inputs, backend, tmp_path):
    if backend == "vmap" and factory is BY_NAME["lstm"].factory:
        pytest.skip("vmap cannot run it")
    modules = trained(factory)
    states = [as_pt(module, tmp_path / f"{i}") for i, module in enumerate(modules)]
    posterior = pm.from_state_dicts(factory, states, likelihood="categorical", backend=backend)
    assert_says(posterior, modules, inputs)
    folder = posterior.save(tmp_path / "saved")
    again = pm.load_posterior(folder, factory)
    torch.testing.assert_close(again.predict(inputs).mean, posterior.predict(inputs).mean)


def test_other_precisions_become_the_module_s():
    modules = trained()
    double = [{n: t.double() for n, t in module.state_dict().items()} for module in modules]
    assert_says(pm.from_state_dicts(mlp, double, likelihood="categorical"), modules, X)
    exact = pm.from_state_dicts(lambda: mlp().double(), double, likelihood="categorical")
    assert_says(exact, [copy.deepcopy(m).double() for m in modules], X.double())


def test_nothing_given_is_changed_or_held_on_to():
    module, [other] = mlp(dropout=0.1).train(), trained(functools.partial(mlp, dropout=0.1), 1)
    before = copy.deepcopy(module.state_dict())
    state = other.state_dict()
    kept = copy.deepcopy(state)
    posterior = pm.from_state_dicts(module, [state], likelihood="categorical")
    first = posterior.predict(X).mean
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    assert torch.equal(posterior.predict(X).mean, first)
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert any(bool(tensor.any()) for tensor in kept.values())


# --- what can be done with it ------------------------------------------------------------------------


def test_members_collapse_to_their_modules():
    [module] = trained(functools.partial(mlp, batch_norm=True), 1)
    posterior = pm.from_state_dicts(
        functools.partial(mlp, batch_norm=True), [module.state_dict()], likelihood="categorical"
    )
    collapsed = posterior.collapse().eval()
    assert all(torch.equal(t, module.state_dict()[n]) for n, t in collapsed.state_dict().items())


def test_it_is_judged_like_any_posterior():
    modules = trained()
    posterior = pm.from_state_dicts(mlp, [m.state_dict() for m in modules], likelihood="categorical")
    data = pm.ArrayData(X, Y)
    scores = pm.evaluate(posterior, data)
    mean = said(modules, X).double().mean(0)
    assert scores["nll"] == pytest.approx(float(-mean[range(12), Y].log().mean()), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(float((mean.argmax(-1) == Y).double().mean()))
    found = flatness(posterior, data, scales=(0.0, 0.1), num_draws=2)
    losses = [float(nn.functional.cross_entropy(m(X).detach(), Y)) for m in modules]
    assert found.loss.tolist() == pytest.approx(losses, rel=1e-5)
    assert not found.increases[0].any()


def test_training_goes_on_from_it():
    modules = trained(count=2)
    posterior = pm.from_state_dicts(mlp, [m.state_dict() for m in modules], likelihood="categorical")
    still = pm.methods.DeepEnsemble(2, of=pm.methods.Single(optimizer=pm.Optimizer("SGD", lr=1e-12)))
    options = {"likelihood": "categorical", "epochs": 1, "progress": False}
    found = pm.fit(still, mlp, pm.ArrayData(X, Y, batch_size=6), initial=posterior, **options)
    torch.testing.assert_close(pm.landscape.function_values(found, X), said(modules, X), rtol=1e-5, atol=1e-6)
    moved = pm.methods.DeepEnsemble(2, of=pm.methods.Single(optimizer=pm.Optimizer("SGD", lr=0.1)))
    trained_on = pm.fit(moved, mlp, pm.ArrayData(X, Y, batch_size=6), initial=posterior, **options)
    losses = [-pm.evaluate(p, pm.ArrayData(X, Y))["nll"] for p in (posterior, trained_on)]
    assert losses[1] > losses[0]


# --- noise levels ------------------------------------------------------------------------------------


def regression():
    return pm.models.MLP(4, 1, (6,))


def test_a_noise_level_that_was_never_learned_is_refused():
    states = [module.state_dict() for module in trained(regression)]
    with pytest.raises(
        InputError, match=r"learns .* beside the network, and State 0 does not hold it.*calibrate=data"
    ):
        pm.from_state_dicts(regression, states, likelihood="gaussian")
    fixed = pm.from_state_dicts(regression, states, likelihood=pm.likelihoods.FixedGaussian(std=0.3))
    with torch.no_grad():
        means = torch.stack([m(X) for m in trained(regression)])
    predicted = fixed.predict(X)
    assert_equal_up_to_rounding(predicted.mean.reshape(12, 1), means.mean(0), PASS)


def test_a_noise_level_that_was_learned_elsewhere_is_taken(tmp_path):
    data = pm.ArrayData(X, X.sum(1), batch_size=6)
    fitted = pm.fit(
        pm.methods.DeepEnsemble(2), regression, data, likelihood="gaussian", epochs=2, progress=False
    )
    states = [block.member(i) for block in fitted.draw() for i in range(block.num_members)]
    paths = []
    for index, state in enumerate(states):
        torch.save(dict(state), path := tmp_path / f"{index}.pt")
        paths.append(path)
    for given in (states, paths):
        posterior = pm.from_state_dicts(regression, given, likelihood="gaussian")
        found, expected = pm.evaluate(posterior, data), pm.evaluate(fitted, data)
        assert found["log_density"] == pytest.approx(expected["log_density"], rel=1e-5)
        assert found["rmse"] == pytest.approx(expected["rmse"], rel=1e-5)


def test_outputs_that_give_a_noise_level_need_none():
    def factory():
        return pm.models.MLP(4, 2, (6,))

    modules = trained(factory)
    posterior = pm.from_state_dicts(
        factory, [m.state_dict() for m in modules], likelihood="heteroscedastic_gaussian"
    )
    with torch.no_grad():
        means = torch.stack([m(X)[:, 0] for m in modules]).mean(0)
    assert_equal_up_to_rounding(posterior.predict(X).mean.reshape(12), means, PASS)


# --- what is refused ---------------------------------------------------------------------------------


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_nothing_in_a_file_is_executed(old, inside, tmp_path):
    touched, path = tmp_path / "touched", tmp_path / "evil.pt"
    content = Malicious(touched)
    torch.save(
        {"state_dict": {"a": content}} if inside else content, path, _use_new_zipfile_serialization=not old
    )
    with pytest.raises(CheckpointError, match=r"evil\.pt .*could run code: it is not read"):
        pm.from_state_dicts(mlp, [path], likelihood="categorical")
    assert not touched.exists()


def test_a_pickled_module_is_refused_with_what_to_do(tmp_path):
    torch.save(mlp(), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match=r"holds more than tensors.*Save module\.state_dict\(\) alone"):
        pm.from_state_dicts(mlp, [tmp_path / "whole.pt"], likelihood="categorical")


def replaced(name, change):
    def changed(state):
        state[name] = change(state[name])
        return state

    return changed


def without(name):
    return lambda state: {n: t for n, t in state.items() if n != name}


def with_extra(state):
    return state | {"extra.weight": torch.zeros(2)}


def with_nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[3] = torch.nan
    return tensor


FIRST, *_ = mlp().state_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(FIRST), f"it lacks '{FIRST}', which this MLP has"),
        (with_extra, "it holds 'extra.weight', which this MLP does not have"),
        (replaced(FIRST, lambda t: t[:, :2]), rf"'{FIRST}' is \[6, 2\] there and \[6, 4\] in this MLP"),
        (replaced(FIRST, lambda t: t.T), rf"'{FIRST}' is \[4, 6\] there"),
        (replaced(FIRST, with_nan), f"'{FIRST}' holds numbers that are NaN, infinite"),
        (replaced(FIRST, lambda t: t / 0), "NaN, infinite"),
        (replaced(FIRST, lambda t: "words"), f"'{FIRST}' is str there"),
        (replaced(FIRST, lambda t: t.long()), f"'{FIRST}' is torch.int64 there and torch.float32"),
        (replaced(FIRST, lambda t: t.to(torch.complex64)), f"'{FIRST}' is torch.complex64 there"),
        (lambda state: {}, "it lacks"),
        (lambda state: {0: torch.zeros(1)}, "belongs to another network"),
    ],
)
def test_states_of_other_networks_are_refused(change, words):
    first, second = (module.state_dict() for module in trained(count=2))
    with pytest.raises(CheckpointError, match=f"State 1.*{words}"):
        pm.from_state_dicts(mlp, [first, change(dict(second))], likelihood="categorical")


def test_tied_weights_have_one_value_under_any_of_their_names(tmp_path):
    [module] = trained(TiedTokens, 1)
    state = module.state_dict()
    save_model(module, tmp_path / "tied.safetensors")  # leaves one of the names out
    for given in (
        tmp_path / "tied.safetensors",
        without("output.weight")(state),
        without("embedding.weight")(state),
    ):
        assert_says(pm.from_state_dicts(TiedTokens, [given], likelihood="categorical"), [module], tokens())
    with pytest.raises(
        CheckpointError, match=r"'embedding.weight' and 'output.weight' differ there, and are one"
    ):
        pm.from_state_dicts(
            TiedTokens, [state | {"output.weight": state["output.weight"] + 1}], likelihood="categorical"
        )
    neither = without("embedding.weight")(without("output.weight")(state))
    with pytest.raises(CheckpointError, match=r"it lacks 'embedding.weight'"):
        pm.from_state_dicts(TiedTokens, [neither], likelihood="categorical")


def test_networks_whose_tensors_are_not_all_known_are_refused():
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(InputError, match="lazy layers, whose shapes are not known yet"):
        pm.from_state_dicts(lazy, [{}], likelihood="categorical")
    [module] = trained(count=1)
    with pytest.raises(
        CheckpointError, match=r"holds 'inner._extra_state', which only the module itself can"
    ):
        pm.from_state_dicts(
            mlp, [module.state_dict() | {"inner._extra_state": b"x"}], likelihood="categorical"
        )


def test_files_are_named(tmp_path):
    [module] = trained(count=1)
    save_file(without(FIRST)(module.state_dict()), tmp_path / "short.safetensors")
    with pytest.raises(CheckpointError, match=r"short\.safetensors belongs to another network: it lacks"):
        pm.from_state_dicts(mlp, [tmp_path / "short.safetensors"], likelihood="categorical")
    with pytest.raises(CheckpointError, match=r"none\.pt is missing"):
        pm.from_state_dicts(mlp, [tmp_path / "none.pt"], likelihood="categorical")
    with pytest.raises(CheckpointError, match=r"is missing: name a .safetensors or .pt file"):
        pm.from_state_dicts(mlp, [tmp_path], likelihood="categorical")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match=r"list\.pt holds a list, not a dictionary"):
        pm.from_state_dicts(mlp, [tmp_path / "list.pt"], likelihood="categorical")
    torch.save({"epoch": 3, "loss": 0.1}, tmp_path / "other.pt")
    with pytest.raises(
        CheckpointError, match=r"holds epoch, loss, and none of state_dict, .* is a dictionary"
    ):
        pm.from_state_dicts(mlp, [tmp_path / "other.pt"], likelihood="categorical")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_damaged_files_are_told(suffix, tmp_path):
    """Cut anywhere, or with bytes exchanged: an error of ours, or what was written."""
    [module] = trained(count=1)
    path = Path((as_pt if suffix == "pt" else as_safetensors)(module, tmp_path / "whole"))
    whole, random, errors = path.read_bytes(), np.random.default_rng(0), []
    for number in range(60):
        content = bytearray(whole)
        if number % 2:
            content = content[: random.integers(len(content))]
        else:
            content[random.integers(min(600, len(content)))] = random.integers(256)
        path.write_bytes(content)
        try:
            pm.from_state_dicts(mlp, [path], likelihood="categorical")
        except CheckpointError as error:
            errors.append(str(error))
    assert len(errors) >= 30
    assert all(path.name in error for error in errors)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="whole"):
        pm.from_state_dicts(mlp, [path], likelihood="categorical")


def test_what_is_not_a_list_of_states_is_refused(tmp_path):
    [module] = trained(count=1)
    path = as_pt(module, tmp_path / "one")
    for given in (path, str(path), module.state_dict()):
        with pytest.raises(InputError, match="put yours into a list"):
            pm.from_state_dicts(mlp, given, likelihood="categorical")
    with pytest.raises(InputError, match="at least one state"):
        pm.from_state_dicts(mlp, [], likelihood="categorical")
    for given in (module, torch.zeros(3), None):
        with pytest.raises(InputError, match=r"State 0 is a \w+: states are dictionaries of tensors"):
            pm.from_state_dicts(mlp, [given], likelihood="categorical")
    with pytest.raises(InputError, match="Unknown likelihood"):
        pm.from_state_dicts(mlp, [path], likelihood="categoricla")
