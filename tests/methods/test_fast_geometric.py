"""The rates of fast geometric ensembling as published, step by step, and where members are taken."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import DeepEnsemble, FastGeometric
from polymode.networks.surgery import build
from polymode.seeds import derive_generator, draw_seed

STEPS = 4  # in an epoch


def published(epoch: int, step: int, cycle: int, high: float, low: float) -> float:
    """The cyclic rate of the authors' code, of a step of an epoch, both counted from 0."""
    t = ((epoch % cycle) + step / STEPS) / cycle
    if t < 0.5:
        return high * (1 - 2 * t) + low * 2 * t
    return high * (2 * t - 1) + low * (2 - 2 * t)


def of_the_paper(i: int, cycle: int, high: float, low: float) -> float:
    """α(i) of Garipov et al. (2018), §5, for iterations counted from 1; cycle: in iterations."""
    t = ((i - 1) % cycle + 1) / cycle
    if t <= 0.5:
        return (1 - 2 * t) * high + 2 * t * low
    return (2 - 2 * t) * low + (2 * t - 1) * high


def rates(method, epochs):
    """The learning rate of every step, and the weights of members: on a linear loss a step moves by the rate.

    With targets at distance 1e6 the gradient of the squared loss is constant to 1e-4.
    """
    seen = []

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            seen.append(self.w.item())
            return self.w.expand(len(x), 1) * 1.0

    data = pm.ArrayData(torch.zeros(8, 1), torch.full((8, 1), 1e6, dtype=torch.float64), batch_size=2)
    posterior = pm.fit(
        method,
        Sum(),
        data,
        likelihood=pm.likelihoods.FixedGaussian(),
        epochs=epochs,
        progress=False,
        backend="loop",
    )
    [block] = posterior.draw()
    path = [*seen[-STEPS * epochs :], block.stacked["w"][-1].item()]
    return torch.tensor(path, dtype=torch.float64).diff().float(), path, block.stacked["w"].flatten().tolist()


@pytest.mark.filterwarnings("ignore:The targets have a mean of 1e")
@pytest.mark.parametrize(("cycle", "members", "epochs"), [(2, 4, 10), (4, 3, 13), (6, 1, 5)])
def test_rates_are_the_published_ones(cycle, members, epochs):
    method = FastGeometric(
        members, cycle, high=0.5, low=0.05, optimizer=pm.Optimizer("SGD", lr=1e-6), schedule=lambda p: 1.0
    )
    found, path, kept = rates(method, epochs)
    of_cycles = cycle // 2 + (members - 1) * cycle
    first = epochs - of_cycles
    expected = [1.0] * (STEPS * first)
    expected += [published(e, s, cycle, 0.5, 0.05) for e in range(of_cycles) for s in range(STEPS)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    # In the paper a step has the rate of its end: what we have at step i it has at i − 1. Members are the
    # same; the lowest rate itself is that of the paper's step before a member, and of ours after it.
    paper = [of_the_paper(i, STEPS * cycle, 0.5, 0.05) for i in range(1, STEPS * of_cycles)]
    torch.testing.assert_close(torch.tensor(expected[STEPS * first + 1 :]), torch.tensor(paper))
    # Members are taken when epochs of the cycles are at its half, as the code does.
    ends = [first + e + 1 for e in range(of_cycles) if e % cycle + 1 == cycle // 2]
    assert kept == [path[STEPS * end] for end in ends]
    assert len(kept) == members


@pytest.mark.filterwarnings("ignore:The targets have a mean of 1e")
def test_the_first_training_has_the_first_four_fifths_of_the_published_schedule():
    """Of B epochs the published one is 1 until B/2, then linear to 0.01 at 0.9 B; here are 0.8 B of it."""
    method = FastGeometric(1, 2, optimizer=pm.Optimizer("SGD", lr=1e-6))
    found, _, _ = rates(method, 17)
    whole = 16 / 0.8
    expected = []
    for step in range(16 * STEPS):
        alpha = step / STEPS / whole
        expected.append(1.0 if alpha <= 0.5 else 1 - (alpha - 0.5) / 0.4 * 0.99)
    # 0.26 stands for 0.2575 at its end.
    torch.testing.assert_close(found[: 16 * STEPS], torch.tensor(expected), rtol=0, atol=0.003)
    down = [published(0, step, 2, 0.5, 0.005) for step in range(STEPS)]
    assert found[16 * STEPS :].tolist() == pytest.approx(down, rel=1e-4)


# --- a whole training -----------------------------------------------------------------------------

SGD = pm.Optimizer("SGD", lr=0.2, momentum=0.9)


def network():
    return pm.models.MLP(4, 3, (5,), batch_norm=True).double()


def data(n=30):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, torch.randint(3, (n,), generator=generator), batch_size=8)


def fitted(method, epochs, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop"} | options
    return pm.fit(method, network, data(), epochs=epochs, **options)


def by_hand(chain, first, cycle, members):
    """The authors' loop: a training at a falling rate, then cycles; moments go on through all of it."""
    source, module = data(), build(network, draw_seed(derive_generator(0, "chain", chain)))
    n, kept = source.num_examples, []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(first + cycle // 2 + (members - 1) * cycle):
        order = torch.randperm(n, generator=derive_generator(0, "order", chain, epoch, n))
        for step, batch in enumerate(order.split(8)):
            factor = 0.5 * (1 + math.cos(math.pi * (epoch + step / STEPS) / first))
            if epoch >= first:
                factor = published(epoch - first, step, cycle, 0.6, 0.02)
            optimizer.param_groups[0]["lr"] = 0.2 * factor
            optimizer.zero_grad()
            F.cross_entropy(module(source.inputs[batch]), source.targets[batch]).backward()
            optimizer.step()
        if epoch >= first and (epoch - first) % cycle + 1 == cycle // 2:
            kept.append({name: t.detach().clone() for name, t in module.state_dict().items()})
    return kept


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_it_is_the_loop_by_hand(backend):
    method = FastGeometric(3, 4, high=0.6, low=0.02, optimizer=SGD, schedule=pm.schedules.Cosine())
    posterior = fitted(DeepEnsemble(2, of=method), 13, backend=backend)
    assert posterior.labels.tolist() == [[0, chain, number] for chain in range(2) for number in range(3)]
    [members] = posterior.draw()
    for index, weights in enumerate([*by_hand(0, 3, 4, 3), *by_hand(1, 3, 4, 3)]):
        for name, tensor in members.stacked.items():
            torch.testing.assert_close(tensor[index], weights[name], rtol=1e-9, atol=1e-11, msg=name)


def test_budgets_and_numbers():
    method = FastGeometric(3, 4)  # 2 + 2 · 4 epochs of cycles
    assert method.for_budget(50) == (method, 50)
    assert method.for_budget(3) == (method, 11)
    assert method.chain_members == 3
    assert method.num_parameters(network()) == 3 * pm.methods.Single().num_parameters(network())
    assert fitted(FastGeometric(3, 4, optimizer=SGD), 11).num_members == 3


def test_too_few_epochs_are_refused_with_numbers():
    message = "10 epochs are too few: 3 members in cycles of 4 take 10 after a first training"
    with pytest.raises(InputError, match=message):
        fitted(FastGeometric(3, 4), 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members must be a whole number"),
        ({"cycle_epochs": 3}, "cycle_epochs must be even, got 3"),
        ({"cycle_epochs": 0}, "cycle_epochs must be a whole number of at least 2, got 0"),
        ({"high": 0.1, "low": 0.2}, "0 < low <= high, got 0.2 and 0.1"),
        ({"low": 0}, "0 < low <= high, got 0 and 0.5"),
        ({"optimizer": "SGD"}, "optimizer must be a description"),
        ({"schedule": pm.schedules.Cosine}, "schedule must be an instance"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        FastGeometric(**options)
