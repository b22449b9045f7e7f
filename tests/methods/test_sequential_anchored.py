"""Algorithm 2 against itself written by hand, the budget rule, and what is refused."""

import warnings

import pytest
import torch
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import SequentialAnchored, split_budget
from polymode.networks.surgery import build
from polymode.samplers import Autoregressive, GuidedWalk, draw_prior
from polymode.schedules import Cosine, Progress
from polymode.seeds import derive_generator, draw_seed

PRIOR = 0.8
SGD = pm.Optimizer("SGD", lr=0.1, momentum=0.9)
SHORT = pm.Optimizer("Adam", lr=0.02)
WALK = GuidedWalk(3.0)


def network():
    return pm.models.MLP(4, 3, (5,)).double()


def data(n=30):
    generator = torch.Generator().manual_seed(1)
    return pm.ArrayData(
        torch.randn(n, 4, generator=generator, dtype=torch.float64),
        torch.randint(3, (n,), generator=generator),
        batch_size=8,
    )


def fitted(method, epochs, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop"} | options
    return pm.fit(method, network, data(), epochs=epochs, **options)


def by_hand(chain, first_epochs, short_epochs, num_short, *, restart):
    """One chain with plain torch: nn.Module, torch.optim, one minibatch after another."""
    source = data()
    n = source.num_examples
    generator = derive_generator(0, "chain", chain)
    module = build(network, draw_seed(generator))
    names = sorted(name for name, _ in module.named_parameters())
    stds = dict.fromkeys(names, PRIOR)
    anchor = draw_prior(stds, dict(module.named_parameters()), generator)
    memory = WALK.begin(anchor, generator)
    draw_seed(generator)  # the seed of the member's noise
    members, epochs_done, optimizer = [], 0, None
    for index in range(1 + num_short):
        epochs = first_epochs if index == 0 else short_epochs
        if index:
            WALK.advance(anchor, memory, stds, generator)
        kind, lr = (torch.optim.SGD, 0.1) if index == 0 or not restart else (torch.optim.Adam, 0.02)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        if optimizer is None or restart:
            optimizer = kind(module.parameters(), lr=lr, **options)
        steps_per_epoch = 4
        for epoch in range(epochs):
            order = torch.randperm(n, generator=derive_generator(0, "order", chain, epochs_done, n))
            epochs_done += 1
            for step, rows in enumerate(order.split(8)):
                progress = Progress(epoch * steps_per_epoch + step, epochs * steps_per_epoch, epochs)
                factor = Cosine(0.1)(progress)
                if index and not restart:
                    factor = 0.1  # where the first schedule has ended
                optimizer.param_groups[0]["lr"] = lr * factor
                optimizer.zero_grad()
                fit = F.cross_entropy(module(source.inputs[rows]), source.targets[rows])
                pull = sum(
                    (p - anchor[name]).square().sum() / (2 * PRIOR**2)
                    for name, p in module.named_parameters()
                )
                (fit + pull / n).backward()
                optimizer.step()
        members.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return members


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_it_is_algorithm_2(restart, backend):
    method = SequentialAnchored(
        num_chains=2,
        prior_std=PRIOR,
        walk=WALK,
        first_epochs=5,
        short_epochs=2,
        optimizer=SGD,
        schedule=Cosine(0.1),
        short_optimizer=SHORT if restart else None,
        restart=restart,
    )
    posterior = fitted(method, 5 + 2 * 3, backend=backend)
    assert posterior.num_members == 2 * 4
    assert posterior.record["member_epochs"] == pytest.approx(2 * 11)
    [members] = posterior.draw()
    expected = [*by_hand(0, 5, 2, 3, restart=restart), *by_hand(1, 5, 2, 3, restart=restart)]
    assert members.labels[:, 1].tolist() == [0] * 4 + [1] * 4
    for index, weights in enumerate(expected):
        for name, tensor in weights.items():
            torch.testing.assert_close(members.stacked[name][index], tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("budget", "short", "chains", "members"),
    [
        *[(200, 2, 1, 51), (500, 2, 2, 152), (1000, 2, 3, 351), (10_000, 2, 10, 4510)],
        *[(200, 10, 1, 11), (500, 10, 2, 32), (1000, 10, 3, 72), (10_000, 10, 10, 910)],
    ],
)
def test_budgets_of_tables_4_and_5(budget, short, chains, members):
    method, epochs = SequentialAnchored(short_epochs=short).for_budget(budget)
    first, num_short = method.lengths(epochs)
    assert (method.num_chains, first) == (chains, 100)
    assert chains * (1 + num_short) == members
    assert budget - chains * short < chains * epochs <= budget


def test_a_small_budget_is_divided_in_halves_unless_the_first_training_is_given():
    method, epochs = SequentialAnchored().for_budget(40)
    assert method.lengths(epochs) == (20, 10)
    with pytest.raises(InputError, match=r"A budget of 40 member-epochs is shorter .* first_epochs=100"):
        SequentialAnchored(first_epochs=100).for_budget(40)
    with pytest.raises(InputError, match="40 epochs are fewer than the first training"):
        fitted(SequentialAnchored(first_epochs=100), 40)
    assert split_budget(150) == (1, 25)


def test_a_number_of_chains_that_is_given_is_kept():
    method, epochs = SequentialAnchored(num_chains=4).for_budget(200)
    assert (method.num_chains, method.lengths(epochs)) == (4, (25, 12))
    with pytest.raises(InputError, match="the first training of each of 3 chains, first_epochs=100"):
        SequentialAnchored(num_chains=3, first_epochs=100).for_budget(200)
    assert SequentialAnchored().total_chains == 1


def test_epochs_left_over_go_into_the_first_training():
    assert SequentialAnchored(first_epochs=4, short_epochs=3).lengths(12) == (6, 2)


def test_a_walk_too_short_to_span_the_prior_is_warned_of_and_reported():
    method = SequentialAnchored(walk=GuidedWalk(0.02), first_epochs=2, short_epochs=1, optimizer=SGD)
    with pytest.warns(UserWarning, match="walks 4 steps, but crossing the prior takes about 251"):
        posterior = fitted(method, 6)
    assert posterior.record["findings"] == [{"walk_steps": 4, "traversal_steps": 250.7}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(SequentialAnchored(walk=Autoregressive(0.9), first_epochs=2, short_epochs=1, optimizer=SGD), 6)


def test_the_best_weights_of_every_training_can_be_kept():
    method = SequentialAnchored(
        walk=WALK, first_epochs=3, short_epochs=3, optimizer=pm.Optimizer("SGD", lr=0.8), keep="best"
    )
    with pytest.raises(InputError, match="kept by validation"):
        fitted(method, 9)
    best = fitted(method, 9, validation=data(20))
    last = fitted(
        SequentialAnchored(walk=WALK, first_epochs=3, short_epochs=3, optimizer=method.optimizer), 9
    )
    [a], [b] = best.draw(), last.draw()
    assert any(not torch.equal(t, b.stacked[n]) for n, t in a.stacked.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_chains": 0}, "num_chains must be a whole number of at least 1, got 0"),
        ({"short_epochs": 0}, "short_epochs must be a whole number"),
        ({"first_epochs": -1}, "first_epochs must be a whole number"),
        ({"prior_std": 0.0}, "prior_std must be a positive number, got 0.0"),
        ({"walk": "guided"}, "walk must be one of polymode.samplers"),
        ({"restart": False, "short_optimizer": SHORT}, "leave short_optimizer"),
        ({"optimizer": "Adam"}, "optimizer must be a description"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        SequentialAnchored(**options)
