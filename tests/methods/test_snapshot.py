"""Snapshots against plain PyTorch with a rate that restarts; how epochs are divided; what is refused."""

import math

import pytest
import torch
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import DeepEnsemble, Snapshot
from polymode.networks.surgery import build
from polymode.seeds import derive_generator, draw_seed

SGD = pm.Optimizer("SGD", lr=0.2, momentum=0.9)
PRIOR = 0.7


def network():
    return pm.models.MLP(4, 3, (5,), batch_norm=True).double()


def data(n=30):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, torch.randint(3, (n,), generator=generator), batch_size=8)


def fitted(method, epochs, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop"} | options
    return pm.fit(method, network, data(), epochs=epochs, **options)


def by_hand(chain, cycles):
    """One module, one torch.optim.SGD; the rate is ½ (1 + cos) of the place in the cycle, step by step."""
    source, module = data(), build(network, draw_seed(derive_generator(0, "chain", chain)))
    n, done, members = source.num_examples, 0, []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    for epochs in cycles:
        for epoch in range(epochs):
            order = torch.randperm(n, generator=derive_generator(0, "order", chain, done, n))
            done += 1
            for step, batch in enumerate(order.split(8)):
                place = (4 * epoch + step) / (4 * epochs)
                optimizer.param_groups[0]["lr"] = 0.2 * 0.5 * (1 + math.cos(math.pi * place))
                optimizer.zero_grad()
                loss = F.cross_entropy(module(source.inputs[batch]), source.targets[batch])
                penalty = sum(p.square().sum() for p in module.parameters()) / (2 * PRIOR**2)
                (loss + penalty / n).backward()
                optimizer.step()
        members.append({name: t.detach().clone() for name, t in module.state_dict().items()})
    return members


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize(("epochs", "cycles"), [(6, [2, 2, 2]), (11, [4, 4, 3]), (3, [1, 1, 1])])
def test_members_are_the_ends_of_cycles(backend, epochs, cycles):
    method = DeepEnsemble(2, of=Snapshot(3, prior_std=PRIOR, optimizer=SGD))
    posterior = fitted(method, epochs, backend=backend)
    assert posterior.labels.tolist() == [[0, chain, number] for chain in range(2) for number in range(3)]
    [members] = posterior.draw()
    expected = [*by_hand(0, cycles), *by_hand(1, cycles)]
    for index, weights in enumerate(expected):
        for name, tensor in members.stacked.items():  # with running statistics
            # Some dozen steps of double precision, whose rounding momentum passes on.
            torch.testing.assert_close(tensor[index], weights[name], rtol=1e-9, atol=1e-11, msg=name)
    assert posterior.record["member_epochs"] == pytest.approx(2 * epochs)


def test_a_cycle_is_a_training_and_the_next_one_begins_at_its_end():
    """One cycle is a plain training; the second begins where it ended, at the full rate."""
    epochs = []
    one = fitted(Snapshot(1, optimizer=SGD), 4)
    two = fitted(Snapshot(2, optimizer=SGD), 8, observer=epochs.append)
    plain = fitted(pm.methods.Single(optimizer=SGD, schedule=pm.schedules.Cosine()), 4)
    [a], [b], [c] = one.draw(), two.draw(), plain.draw()
    for name, tensor in c.stacked.items():
        assert torch.equal(a.stacked[name], tensor)
        assert torch.equal(b.stacked[name][:1], tensor)
    rates = [epoch.rate for epoch in epochs]  # at the last of four steps of every epoch
    expected = [0.5 * (1 + math.cos(math.pi * (4 * epoch + 3) / 16)) for epoch in range(4)]
    assert rates == pytest.approx(2 * expected)
    assert [epoch.restart for epoch in epochs] == [True, False, False, False] * 2


def test_it_predicts_with_the_mean_over_cycles():
    posterior, x = fitted(Snapshot(3, optimizer=SGD), 6), data().inputs
    module, parts = network().eval(), []
    for block in posterior.draw():
        for index in range(block.num_members):
            parts.append(torch.func.functional_call(module, block.member(index), (x,)).softmax(-1))
    torch.testing.assert_close(posterior.predict(x).mean, torch.stack(parts).mean(0).detach())


def test_budgets_and_numbers():
    method = Snapshot(4)
    assert method.for_budget(40) == (method, 40)
    assert method.for_budget(1) == (method, 4)
    assert (method.chain_members, method.total_chains) == (4, 1)
    single = pm.methods.Single().num_parameters(network())
    assert method.num_parameters(network()) == 4 * single


def test_too_few_epochs_are_refused_with_numbers():
    with pytest.raises(InputError, match="2 epochs are too few for 3 cycles of at least one"):
        fitted(Snapshot(3), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members must be a whole number"),
        ({"optimizer": "SGD"}, "optimizer must be a description"),
        ({"prior_std": -1.0}, "prior_std must be a positive number"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        Snapshot(**options)
