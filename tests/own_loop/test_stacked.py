"""StackedModule in one's own loop equals the same loop over separate modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from tolerances import PASS, assert_equal_up_to_rounding


def build():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("own_batches", [False, True])
def test_training_equals_separate_modules(backend, own_batches):
    modules = [build() for _ in range(3)]
    stacked = pm.StackedModule(modules, backend=backend)
    optimizer = torch.optim.Adam(stacked.parameters(), lr=0.01)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in modules]
    for _ in range(5):
        x = torch.randn(3, 8, 4, dtype=torch.float64)
        y = torch.randint(3, (3, 8))
        if not own_batches:
            x, y = x[0].expand_as(x), y[0].expand_as(y)
        inputs = x if own_batches else x[0]
        targets = y if own_batches else y[0]
        outputs = stacked(inputs, inputs_have_members=own_batches)
        losses = pm.member_losses("categorical", outputs, targets, targets_have_members=own_batches)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        for m, (module, alone) in enumerate(zip(modules, optimizers, strict=True)):
            alone.zero_grad()
            loss = F.cross_entropy(module(x[m]), y[m])
            torch.testing.assert_close(losses[m].detach(), loss.detach())
            loss.backward()
            alone.step()
    for index, state in enumerate(pm.unstack(stacked.members)):
        for name, tensor in modules[index].state_dict().items():
            torch.testing.assert_close(state[name], tensor)
    x = torch.randn(9, 4, dtype=torch.float64)
    expected = torch.stack([m.eval()(x).softmax(-1) for m in modules]).mean(0)
    posterior = stacked.posterior("categorical")
    torch.testing.assert_close(posterior.predict(x).mean, expected)
    stacked.eval()
    torch.testing.assert_close(stacked(x).softmax(-1).mean(0), expected)


def test_it_is_an_ordinary_module():
    stacked = pm.StackedModule([build() for _ in range(2)])
    state = stacked.state_dict()
    other = pm.StackedModule([build() for _ in range(2)])
    other.load_state_dict(state)
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(stacked.eval()(x), other.eval()(x))
    assert sum(p.numel() for p in stacked.parameters()) == 2 * sum(p.numel() for p in build().parameters())


def test_dropout_masks_change_from_step_to_step_and_between_members():
    module = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5))
    stacked = pm.StackedModule([module, module])
    x = torch.ones(3, 4)
    first, second = stacked(x), stacked(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert_equal_up_to_rounding(stacked.eval()(x)[0], stacked(x)[1], PASS)


def test_bad_modules_and_shapes():
    with pytest.raises(InputError, match="at least one"):
        pm.StackedModule([])
    with pytest.raises(InputError, match="same tensors"):
        pm.StackedModule([nn.Linear(2, 3), nn.Linear(2, 4)])
    stacked = pm.StackedModule([nn.Linear(4, 1) for _ in range(2)])
    x = torch.randn(8, 4)
    with pytest.raises(InputError, match=r"gives \[8, 1\] for targets \[8, 3\]"):
        pm.member_losses(pm.likelihoods.FixedGaussian(), stacked(x), torch.randn(8, 3))
    with pytest.raises(InputError, match=r"LearnedGaussian\(\).prepare"):
        pm.member_losses("gaussian", stacked(x), torch.randn(8, 1))


def test_learned_noise_in_ones_own_loop():
    likelihood = pm.likelihoods.LearnedGaussian()
    stacked = pm.StackedModule([likelihood.prepare(nn.Linear(4, 1)) for _ in range(2)])
    x, y = torch.randn(8, 4), torch.randn(8)
    losses = pm.member_losses(likelihood, stacked(x), y)
    for loss, state in zip(losses, pm.unstack(stacked.members), strict=True):
        mean = x @ state["network.weight"].T + state["network.bias"]
        std = F.softplus(state["noise"]) + likelihood.min_std
        expected = -torch.distributions.Normal(mean[:, 0], std).log_prob(y).mean()
        torch.testing.assert_close(loss, expected)
    assert stacked.posterior(likelihood).predict(x).std.shape == (8, 1)
