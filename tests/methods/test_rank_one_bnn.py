"""Gaussian rank-one factors against a loop by hand, their law, counts, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import RankOneBNN
from polymode.networks.surgery import build
from polymode.seeds import derive_generator, draw_seed
from polymode.training.contract import next_noise
from polymode.weights.gaussian import RHO

SGD = pm.Optimizer("SGD", lr=0.1, momentum=0.9, weight_decay=0.01)
FACTORS = ("left/1.weight", "right/1.weight", "left/3.weight", "right/3.weight")
SIZES = (6, 4, 3, 6)


def network():
    return pm.models.MLP(4, 3, (6,), activation=nn.Tanh).double()


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, torch.randint(3, (n,), generator=generator), batch_size=8)


def fitted(method, epochs=3, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop"} | options
    return pm.fit(method, options.pop("model", network), data(), epochs=epochs, **options)


def by_hand(count, std, prior):
    """All members on every minibatch, the loss their mean; KL annealed over 80 % of the training."""
    source, generator = data(), derive_generator(0, "chain", 0)
    module = build(network, draw_seed(generator))
    base = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    signs = torch.randint(2, (count, sum(SIZES)), generator=generator).double() * 2 - 1
    jitter = torch.randn(count, sum(SIZES), generator=generator, dtype=torch.float64)
    means = signs.clone().requires_grad_()
    rho = (math.log(math.expm1(std)) + 0.1 * jitter).requires_grad_()
    noise = torch.tensor([draw_seed(generator) for _ in range(count)])
    groups = [
        {"params": list(base.values()), "weight_decay": 0.01},
        {"params": [means, rho], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    step = 0
    for epoch in range(3):
        order = torch.randperm(24, generator=derive_generator(0, "order", 0, epoch, 24))
        for rows in order.split(8):
            noise = next_noise(noise)
            losses = []
            for k in range(count):
                epsilon = torch.randn(
                    sum(SIZES), generator=torch.Generator().manual_seed(int(noise[k])), dtype=torch.float64
                )
                u1, v1, u2, v2 = (means[k] + F.softplus(rho[k]) * epsilon).split(SIZES)
                hidden = source.inputs[rows] @ (base["1.weight"] * u1[:, None] * v1).T + base["1.bias"]
                outputs = torch.tanh(hidden) @ (base["3.weight"] * u2[:, None] * v2).T + base["3.bias"]
                q = torch.distributions.Normal(means[k], F.softplus(rho[k]))
                p = torch.distributions.Normal(1.0, torch.tensor(prior, dtype=torch.float64))
                kl = torch.distributions.kl_divergence(q, p).sum()
                weight = min(1.0, (step / 9) / 0.8)
                losses.append(F.cross_entropy(outputs, source.targets[rows]) + weight * kl / 24)
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            step += 1
    factors = dict(zip(FACTORS, means.detach().split(SIZES, 1), strict=True))
    return factors | {RHO: rho.detach()}, {name: t.detach() for name, t in base.items()}


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_a_training_is_the_loop_by_hand(backend):
    posterior = fitted(RankOneBNN(3, prior_std=0.7, std=0.2, optimizer=SGD), backend=backend)
    [block] = posterior.blocks
    own, shared = by_hand(3, 0.2, 0.7)
    for name, tensor in own.items():
        torch.testing.assert_close(block.stacked[name], tensor, rtol=1e-9, atol=1e-11, msg=name)
    for name, tensor in shared.items():
        torch.testing.assert_close(block.shared[name][0], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_draws_are_products_of_factors():
    posterior = fitted(RankOneBNN(2, std=0.3, optimizer=SGD))
    [block] = posterior.blocks
    means = posterior.means()
    [networks] = means.draw()
    expected = (
        block.shared["1.weight"]
        * block.stacked["left/1.weight"][:, :, None]
        * block.stacked["right/1.weight"][:, None, :]
    )
    torch.testing.assert_close(networks.stacked["1.weight"], expected)
    drawn = torch.cat([b.stacked["1.weight"] for b in posterior.draw(40_000)][:1])
    sigma = dict(zip(FACTORS, F.softplus(block.stacked[RHO][0]).split(SIZES), strict=True))
    u, v = (block.stacked[f"{side}/1.weight"][0] for side in ("left", "right"))
    su, sv = sigma["left/1.weight"], sigma["right/1.weight"]
    second = (u**2 + su**2)[:, None] * (v**2 + sv**2)
    deviation = (block.shared["1.weight"][0].square() * (second - (u[:, None] * v) ** 2)).sqrt()
    error = (drawn.mean(0) - expected[0]) / (deviation / math.sqrt(len(drawn)))
    assert error.abs().max() < 5


def test_counts():
    module = network()
    dense = sum(p.numel() for p in module.parameters())
    assert RankOneBNN(3).num_parameters(module) == dense + 2 * 3 * sum(SIZES)
    assert fitted(RankOneBNN(3, optimizer=SGD)).num_parameters == dense + 2 * 3 * sum(SIZES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RankOneBNN(0), "num_members"),
        (lambda: RankOneBNN(prior_std=0), "prior_std"),
        (lambda: RankOneBNN(std=-1), "std"),
        (lambda: RankOneBNN(optimizer=pm.Optimizer("LBFGS")), "another draw"),
        (lambda: fitted(RankOneBNN(matrices="nothing")), "fits no matrix"),
        (lambda: fitted(RankOneBNN(), model=Scale), "matrices"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


class Scale(nn.Module):
    """A network without matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return (x * self.scale)[:, :3]
