"""What every method of the registry must do, on every kind of network."""

import copy
import functools
import json
from dataclasses import replace

import pytest
import torch

import polymode as pm
from cases import BY_NAME, NETWORKS, redrawn
from contract.registry import FEW, REASONS, REFUSED, SMALL, accepts, beginning
from polymode.errors import CheckpointError, InputError
from polymode.methods import METHODS
from polymode.networks.members import Tensors
from polymode.training.contract import Problem, describe
from polymode.trees import leaves
from tolerances import PASS, assert_equal_up_to_rounding

methods = pytest.mark.parametrize("name", METHODS)


def on(cases):
    """Every method on every one of some networks that it accepts."""
    pairs = [(name, case) for name in METHODS for case in cases if accepts(name, case.name)]
    return pytest.mark.parametrize(("name", "case"), pairs, ids=[f"{n}-{c.name}" for n, c in pairs])


def run(name, case, **options):
    options = {"backend": "loop", "progress": False, "epochs": FEW.get(name, 2)} | options
    data, method = options.pop("data", None) or case.data(), SMALL[name]()
    options = beginning(method, case) | options
    return pm.fit(method, case.double_factory, data, likelihood=case.likelihood, **options)


@functools.cache
def trained(name, network):
    """The ordinary run of a method on a network, which many tests read and none changes."""
    return run(name, BY_NAME[network])


def draws(posterior):
    """A few of a posterior that draws without end, all members of any other."""
    return 12 if posterior.num_members is None else None


def weights(posterior) -> Tensors:
    """The weights of all members, or of some draws, [M, ...]."""
    blocks = posterior.draw(draws(posterior))
    drawn = [block.member(i) for block in blocks for i in range(block.num_members)]
    return {name: torch.stack([member[name] for member in drawn]) for name in drawn[0]}


def own_weights(posterior) -> Tensors:
    drawn = list(posterior.draw())
    return {name: torch.cat([block.stacked[name] for block in drawn]) for name in drawn[0].stacked}


def predictions(posterior, case):
    return posterior.predict(case.data(seed=5).inputs, draws(posterior), batch_size=7)


def test_every_method_has_a_small_instance():
    assert SMALL.keys() == METHODS.keys()
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert (method.__doc__ or "").strip()


@pytest.mark.parametrize(("name", "network"), [(n, c) for n, cases in REFUSED.items() for c in sorted(cases)])
def test_networks_that_a_method_cannot_be_fitted_to_are_refused(name, network):
    with pytest.raises(InputError, match=REASONS[name]):
        run(name, BY_NAME[network])


@on(NETWORKS)
def test_fits_every_network_and_replays(name, case):
    first, second, other = trained(name, case.name), run(name, case), run(name, case, seed=1)
    ours, again, others = weights(first), weights(second), weights(other)
    for key, tensor in ours.items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor, again[key]), key
    assert torch.equal(predictions(first, case).mean, predictions(second, case).mean)
    assert any(not torch.equal(tensor, others[key]) for key, tensor in ours.items())


@on([c for c in NETWORKS if c.vectorises])
def test_backends_agree_in_float64(name, case):
    loop, vmap = trained(name, case.name), run(name, case, backend="vmap")
    assert vmap.record["backend"] == "vmap"
    vectorised = weights(vmap)
    for key, tensor in weights(loop).items():
        torch.testing.assert_close(tensor, vectorised[key], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(predictions(loop, case).mean, predictions(vmap, case).mean)


@methods
def test_members_differ(name):
    posterior = trained(name, "mlp")
    for tensor in own_weights(posterior).values():
        if posterior.num_members is None:  # draws of few components meet again
            assert len(tensor.unique(dim=0)) > 1
            continue
        for i in range(len(tensor)):
            for j in range(i):
                assert not torch.allclose(tensor[i], tensor[j])


@methods
def test_training_lowers_the_loss(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(4, 3, generator=generator, dtype=torch.float64)).argmax(-1)
    data = pm.ArrayData(x, y, batch_size=20)
    posterior = run(name, BY_NAME["mlp"], data=data, epochs=60)
    losses = [entry["loss"] for entry in posterior.record["history"]]
    assert losses[-1] < 0.8 * losses[0]
    assert pm.metrics.accuracy(posterior.predict(x).mean, y) > 0.8


@on([BY_NAME[name] for name in ("batch_norm", "learned_noise", "random_features", "convolution")])
def test_save_and_load(name, case, tmp_path):
    posterior = trained(name, case.name)
    posterior.save(tmp_path / "saved")
    loaded = pm.load_posterior(tmp_path / "saved", case.double_factory)
    assert loaded.num_members == posterior.num_members
    for key, tensor in weights(posterior).items():
        assert torch.equal(tensor, weights(loaded)[key]), key
    assert_equal_up_to_rounding(predictions(loaded, case).mean, predictions(posterior, case).mean, PASS)
    assert loaded.record["method"] == describe(SMALL[name]())
    json.dumps(loaded.record)  # readable without polymode
    with pytest.raises(CheckpointError, match="belongs to another network"):
        pm.load_posterior(tmp_path / "saved", lambda: pm.models.MLP(4, 5, (7, 7)))


@redrawn
@methods
def test_frozen_weights_of_a_module_are_saved_too(name, tmp_path):
    case = replace(BY_NAME["mlp"], factory=lambda: pm.models.MLP(4, 3, (6, 6)))
    module = case.double_factory()
    module[3].requires_grad_(False)  # neither the first layer nor the last one
    method = SMALL[name]()
    begun = beginning(method, case, module)
    posterior = pm.fit(
        method,
        module,
        case.data(),
        likelihood="categorical",
        epochs=FEW.get(name, 2),
        progress=False,
        **begun,
    )
    posterior.save(tmp_path / "saved")
    fresh = pm.load_posterior(tmp_path / "saved", case.double_factory)
    assert_equal_up_to_rounding(predictions(fresh, case).mean, predictions(posterior, case).mean, PASS)


@methods
@pytest.mark.parametrize("sizes", [(24,), (24, 13)], ids=["one set", "two sets"])
def test_measured_budget_equals_declared(name, sizes):
    case, method = BY_NAME["mlp"], SMALL[name]()
    data = [case.data(size) for size in sizes]
    begun = beginning(method, case, num_data_sets=len(sizes))
    posteriors = pm.fit(
        method, case.double_factory, data, likelihood=case.likelihood, epochs=3, progress=False, **begun
    )
    problem = _problem(case)
    for posterior in posteriors:
        assert posterior.record["member_epochs"] == pytest.approx(method.declared_budget(problem, 3))


@methods
@pytest.mark.parametrize("ensemble", [False, True], ids=["alone", "ensemble"])
def test_chains_leave_as_many_networks_as_they_declare(name, ensemble):
    case, method = BY_NAME["mlp"], SMALL[name]()
    method = pm.methods.DeepEnsemble(2, of=method) if ensemble else method
    options = {"epochs": 12, "progress": False} | beginning(method, case)
    posterior = pm.fit(method, case.double_factory, case.data(), likelihood=case.likelihood, **options)
    if method.chain_members is not None:
        assert posterior.num_members == method.chain_members * method.total_chains


@methods
def test_for_budget_spends_what_it_is_given(name):
    method, epochs = SMALL[name]().for_budget(30)
    assert method.declared_budget(_problem(BY_NAME["mlp"]), epochs) == pytest.approx(30)


def _problem(case):
    from polymode.networks.surgery import trainable_names
    from polymode.posteriors.network import Network
    from polymode.training.contract import Execution

    module = case.double_factory()
    names = trainable_names(module)
    execution = Execution(torch.device("cpu"))
    network = Network(copy.deepcopy(module), case.likelihood)
    return Problem(network, names, frozenset(), lambda chain, generator: {}, execution, torch.tensor([24]))


@redrawn
@on([BY_NAME[name] for name in ("batch_norm", "dropout", "tied_tokens", "lstm")])
def test_the_users_module_is_untouched(name, case):
    module = case.double_factory()
    before, description = copy.deepcopy(module.state_dict()), repr(module)
    data = case.data()
    inputs = [leaf.clone() for leaf in leaves(data.inputs)]
    method = SMALL[name]()
    options = {"epochs": FEW.get(name, 2), "progress": False, "backend": "loop"} | beginning(method, case)
    pm.fit(method, module, data, likelihood=case.likelihood, **options)
    assert repr(module) == description
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(inputs, leaves(data.inputs), strict=True))


@methods
def test_measured_choice_is_recorded_and_kept(name, tmp_path):
    case = BY_NAME["mlp"]
    posterior = run(name, case, backend="auto", run_dir=tmp_path / "run")
    assert posterior.record["backend"] in ("vmap", "loop")
    again = run(name, case, backend="auto", run_dir=tmp_path / "run", resume=True)
    assert again.record["backend"] == posterior.record["backend"]
    assert_equal_up_to_rounding(predictions(again, case).mean, predictions(posterior, case).mean, PASS)
