"""BatchEnsemble against the tiled batch of the published algorithm, written with plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.posteriors import LateMembers
from polymode.seeds import derive_generator
from polymode.weights.late import LEFT, RIGHT

K, N, BATCH, EPOCHS = 4, 24, 8, 3


def network() -> nn.Module:
    return pm.models.MLP(4, 3, (6,)).double()


def toy() -> pm.ArrayData:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, dtype=torch.float64, generator=g)
    return pm.ArrayData(x, torch.randint(3, (N,), generator=g), batch_size=BATCH)


def fitted(module, base, late, epochs=EPOCHS, **options):
    method = pm.methods.BatchEnsemble(K, optimizer=base, late_optimizer=late, **options)
    made = pm.fit(
        method, module, toy(), likelihood="categorical", epochs=epochs, progress=False, backend="loop"
    )
    assert isinstance(made, LateMembers)
    [members] = made.blocks
    return members


class Tiled(nn.Module):
    """Fast weights: y = ((x ∘ v_k) Wᵀ) ∘ u_k + b for the k-th K-th of a batch that is tiled K times."""

    def __init__(self, layer: nn.Linear, left: torch.Tensor, right: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(p.detach().clone()) for p in (layer.weight, layer.bias))
        self.left, self.right = nn.Parameter(left.clone()), nn.Parameter(right.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = len(x) // K
        left, right = (t.repeat_interleave(each, 0) for t in (self.left, self.right))
        return (x * right) @ self.weight.T * left + self.bias


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_training_against_a_tiled_batch(clip_norm):
    module = network()
    still = pm.Optimizer("SGD", lr=1e-300)  # leaves the factors as they are drawn
    begun = fitted(module, still, still, epochs=1)
    names = [n for n, p in module.named_parameters() if p.ndim == 2]
    layers = [
        Tiled(layer, begun.stacked[LEFT + name], begun.stacked[RIGHT + name])
        for layer, name in zip((m for m in module if isinstance(m, nn.Linear)), names, strict=True)
    ]
    factors = [p for layer in layers for p in (layer.left, layer.right)]
    shared = [p for layer in layers for p in (layer.weight, layer.bias)]
    optimizer = torch.optim.SGD(
        [{"params": shared, "weight_decay": 0.01}, {"params": factors, "lr": 0.05}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    data = toy()
    for epoch in range(EPOCHS):
        order = torch.randperm(N, generator=derive_generator(0, "order", 0, epoch, N))
        for rows in order.split(BATCH):
            x, y = data.inputs[rows].repeat(K, 1), data.targets[rows].repeat(K)
            loss = F.cross_entropy(layers[1](torch.relu(layers[0](x))), y)  # the mean over the tiled batch
            optimizer.zero_grad()
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(shared, clip_norm)
                for k in range(K):  # of each member by itself
                    norm = torch.stack([p.grad[k].norm() for p in factors]).norm()
                    for p in factors:
                        p.grad[k] *= (clip_norm / (norm + 1e-6)).clamp(max=1)
            optimizer.step()

    def sgd(lr, **options):
        return pm.Optimizer("SGD", lr=lr, momentum=0.9, nesterov=True, clip_norm=clip_norm, **options)

    got = fitted(module, sgd(0.1, weight_decay=0.01), sgd(0.05, weight_decay=0.5))  # factors never decay
    for layer, name in zip(layers, names, strict=True):
        for found, expected in (
            (got.shared[name][0], layer.weight),
            (got.shared[name.replace("weight", "bias")][0], layer.bias),
            (got.stacked[LEFT + name], layer.left),
            (got.stacked[RIGHT + name], layer.right),
        ):
            torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)
    moved = got.stacked[LEFT + names[0]] - begun.stacked[LEFT + names[0]]
    assert moved.abs().max() > 1e-3


def test_the_prior_counts_once_in_the_mean():
    """Of one loss (1/K) Σ_k [NLL_k + penalty_k/N], the factors' gradient has a K-th of each term."""
    module, prior_std, lr = network(), 0.5, 1e-3
    still = pm.Optimizer("SGD", lr=1e-300)
    begun = fitted(module, still, still, epochs=1)
    [name, *_] = [n for n, p in module.named_parameters() if p.ndim == 2]
    got = [
        fitted(module, still, pm.Optimizer("SGD", lr=lr), epochs=1, prior_std=s) for s in (prior_std, None)
    ]
    # Without momentum the difference of two trainings is, to first order in the rate, the prior's own steps.
    u, v, w = begun.stacked[LEFT + name], begun.stacked[RIGHT + name], begun.shared[name][0]
    of_prior = (w.square() * v.square()[:, None]).sum(-1) * u / prior_std**2
    steps = N // BATCH
    expected = -lr * steps * of_prior / N / K
    found = got[0].stacked[LEFT + name] - got[1].stacked[LEFT + name]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-7)
