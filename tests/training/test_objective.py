"""Losses and gradients of all members against each member alone, in plain autograd."""

import copy
from dataclasses import replace

import pytest
import torch

import polymode as pm
from cases import BY_NAME, NETWORKS
from polymode.data import ArrayData
from polymode.networks.surgery import prepare, tensors_of, trainable_names
from polymode.posteriors.network import Network
from polymode.training.contract import Execution, Objective
from polymode.training.contract.state import State
from polymode.training.loop.batches import Batches
from polymode.trees import map_tree
from polymode.weights.priors import gaussian_penalty, gaussian_prior


def setup(case, sizes=(16,), total_chains=3, batch_size=8, backend="loop", penalty=None, weights=None):
    data = []
    for index, size in enumerate(sizes):
        made = case.data(size, batch_size, seed=index)
        data.append(ArrayData(made.inputs, made.targets, batch_size=batch_size, weights=weights))
    batches = Batches(data, range(total_chains), [0] * len(sizes), shared_order=False)
    modules = [case.likelihood.prepare(prepare(case.double_factory())) for _ in range(batches.num_groups)]
    names = trainable_names(modules[0])
    states = []
    for group, module in zip(batches.groups, modules, strict=True):
        generator = torch.Generator().manual_seed(group.chain)
        tensors = {n: t[None].clone() for n, t in tensors_of(module).items() if "first_ex" not in n}
        states.append(State(pm.Members(tensors)).as_chain(generator, group.data_set, group.chain))
    state = State.side_by_side(states)
    network = Network(copy.deepcopy(modules[0]), case.likelihood)
    network.module.train()
    counts = torch.tensor([g.num_examples for g in batches.groups])
    execution = Execution(torch.device("cpu"), backend)
    prior = None if penalty is None else gaussian_prior(dict.fromkeys(names, penalty))
    return Objective(network, names, execution, counts, prior), state, batches, modules


def alone(objective, state, batch, modules, group):
    """Loss and gradients of one member by ordinary means."""
    piece = batch.only(group).pieces[0]
    part = lambda t: t[0]  # noqa: E731
    inputs = map_tree(part, piece.examples.inputs)
    module = modules[group].train()
    for name, buffer in module.named_buffers():
        if name.endswith("seed"):
            buffer.copy_(state.noise[group])
    outputs = (
        module(**inputs)
        if isinstance(inputs, dict)
        else module(*inputs)
        if isinstance(inputs, tuple)
        else module(inputs)
    )
    likelihood = objective.network.likelihood
    log_prob = likelihood.log_prob(outputs, piece.examples.targets[0])
    if piece.examples.weights is not None:
        log_prob = log_prob * piece.examples.weights[0].reshape(-1, *[1] * (log_prob.ndim - 1))
    per_token = likelihood.kind == "categorical"
    targets = piece.examples.targets[0]
    loss = -log_prob.sum() / (targets.numel() if per_token else len(targets))
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if objective.penalty is not None:
        count = objective.num_observations[group]
        squares = torch.stack([p.square().sum() for p in parameters.values()]).sum()
        loss = loss + squares / (2 * 0.5**2) / count
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss, dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize(
    "case", [c for c in NETWORKS if c.name != "functional_dropout"], ids=lambda c: c.name
)
def test_each_gradient_is_what_it_would_be_alone(case, backend):
    if backend == "vmap" and not case.vectorises:
        pytest.skip("vmap cannot run it")
    objective, state, batches, modules = setup(case, backend=backend, penalty=0.5)
    [batch] = next(iter(batches.epoch(0, 1)))
    losses, gradients = objective.losses_and_gradients(state, batch)
    for group in range(batches.num_groups):
        loss, expected = alone(objective, state, batch, modules, group)
        torch.testing.assert_close(losses[group].double(), loss.detach(), rtol=1e-6, atol=1e-7)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients.stacked[name][group], gradient)
        for name, tensor in modules[group].named_buffers():  # running statistics too
            if name in state.members.stacked:
                torch.testing.assert_close(state.members.stacked[name][group], tensor)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_ragged_data_sets_give_the_same_gradients(backend):
    """Three data sets of 18, 8 and 13 rows: pieces of different sizes, some groups idle."""
    case = BY_NAME["batch_norm"]
    objective, state, batches, modules = setup(case, (18, 8, 13), 2, batch_size=8, backend=backend)
    seen = torch.zeros(batches.num_groups, dtype=torch.int64)
    for [batch] in batches.epoch(0, 1):
        losses, gradients = objective.losses_and_gradients(state, batch)
        active = [g for piece in batch.pieces for g in range(piece.groups.start, piece.groups.stop)]
        assert losses.isnan().nonzero().flatten().tolist() == sorted(
            set(range(batches.num_groups)) - set(active)
        )
        for group in active:
            seen[group] += batch.only(group).pieces[0].batch_size
            _, expected = alone(objective, state, batch, modules, group)
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients.stacked[name][group], gradient)
    assert seen.tolist() == [g.num_examples for g in batches.groups]
    assert state.gradient_examples.tolist() == seen.tolist()


def test_penalty_does_not_depend_on_the_batch_size():
    case = BY_NAME["mlp"]
    differences = []
    for batch_size in (2, 16):
        gradients = []
        for penalty in (None, 0.5):
            torch.manual_seed(1234)
            objective, state, batches, _ = setup(case, batch_size=batch_size, penalty=penalty)
            [batch] = next(iter(batches.epoch(0, 1)))
            gradients.append(objective.losses_and_gradients(state, batch)[1].stacked)
        differences.append({n: gradients[1][n] - gradients[0][n] for n in gradients[0]})
        weights = state.members.stacked
    for name, difference in differences[0].items():
        torch.testing.assert_close(difference, differences[1][name])
        torch.testing.assert_close(difference, weights[name] / 0.5**2 / 16)


def test_sample_weights_are_multiplicities():
    """Weight 2 on a row of the whole data set is that row twice, up to the overall scale N."""
    case = BY_NAME["mlp"]
    weights = torch.ones(16, dtype=torch.float64)
    weights[3] = 2.0
    torch.manual_seed(1234)
    objective, state, batches, _ = setup(case, batch_size=16, total_chains=1, weights=weights)
    [batch] = next(iter(batches.epoch(0, "full")))
    weighted = objective.losses_and_gradients(state, batch)[1].stacked
    data = case.data(16, 16)
    rows = [*range(16), 3]
    doubled = data.subset(rows)
    twice = Batches([ArrayData(doubled.inputs, doubled.targets, batch_size=17)], [0], [0], shared_order=False)
    [batch] = next(iter(twice.epoch(0, "full")))
    expected = objective.losses_and_gradients(state, batch)[1].stacked
    for name, gradient in weighted.items():
        torch.testing.assert_close(gradient, expected[name] * 17 / 16)


def test_unused_weights_have_zero_gradients():
    case = BY_NAME["named_outputs"]
    objective, state, batches, _ = setup(case)
    likelihood = pm.likelihoods.HeteroscedasticGaussian(output="features")
    network = Network(objective.network.module, likelihood)
    network.module.train()
    objective = replace(objective, network=network)
    [batch] = next(iter(batches.epoch(0, 1)))
    targets = torch.zeros(3, 8, 3, dtype=torch.float64)
    [piece] = batch.pieces
    batch = replace(batch, pieces=[replace(piece, examples=piece.examples._replace(targets=targets))])
    for backend in ("loop", "vmap"):
        objective = replace(objective, execution=replace(objective.execution, backend=backend))
        _, gradients = objective.losses_and_gradients(state, batch)
        assert gradients.stacked["head.weight"].abs().max() == 0
        assert gradients.stacked["body.weight"].abs().max() > 0


def test_gaussian_penalty_with_a_centre():
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    centre = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([1.0])}
    assert gaussian_penalty(weights, 2.0, centre).item() == pytest.approx((1 + 1 + 4) / 8)
    with pytest.raises(pm.errors.InputError, match="prior_std must be a positive number, got 0"):
        gaussian_penalty(weights, 0.0)


@pytest.mark.parametrize("total_chains", [1, 2])
def test_members_that_share_added_weights_have_the_sum_of_their_gradients(total_chains):
    """Autograd gives one tensor for two weights that are added: it must not be added to for both."""

    class Added(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(3, 1)
            self.a, self.b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return torch.tanh(self.line(x) * (1 + (self.a + self.b)))

    data = pm.ArrayData(torch.randn(8, 3).double(), torch.randn(8, 1).double(), batch_size=8)
    method = pm.methods.BatchEnsemble(3, optimizer=pm.Optimizer("SGD", lr=0.1))
    method = pm.methods.DeepEnsemble(total_chains, of=method)
    options = {"likelihood": "fixed_gaussian", "epochs": 1, "progress": False}
    loop, vmap = (
        pm.fit(method, lambda: Added().double(), data, backend=backend, **options)
        for backend in ("loop", "vmap")
    )
    for first, second in zip(loop.draw(), vmap.draw(), strict=True):
        for one, other in zip(pm.unstack(first), pm.unstack(second), strict=True):
            torch.testing.assert_close(one, other)
