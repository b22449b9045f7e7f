"""Plain PyTorch, written as one would without a library: the loops of ``run.py``, one network after another.

Networks are trained with batches from memory or from a ``DataLoader``. With batches from memory convolutions
are given everything that makes them fast on a CPU (``channels_last``, a fused optimiser).
"""

import math
from collections.abc import Callable

import run as plain
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from league.jobs import (
    CNN_MOMENTUM,
    CNN_RATE,
    DROPOUT,
    FRICTION,
    NOISE_STD,
    NUM_CLASSES,
    NUM_HIDDEN,
    NUM_INPUTS,
    PRIOR_STD,
    RATE,
    Sizes,
    Timed,
    classification,
    hmc_data,
    hmc_weights,
    images,
    regression,
)
from league.networks import MLP, SmallCNN, loader, moments, tensors


def _batches(x: Tensor, y: Tensor, batch_size: int, from_memory: bool) -> Callable:
    if from_memory:
        return plain.in_memory_batches(x, y, batch_size)
    batches = loader(x, y, batch_size)
    return lambda: batches


def _training(sizes: Sizes, from_memory: bool, train: Callable[[Callable, int], None]) -> Timed:
    """``train(batches, epochs)`` on the rows of a regression; an epoch of it goes before."""
    x, y = tensors(regression(sizes.rows))
    batches = _batches(x, y, sizes.batch_size, from_memory)
    return Timed(lambda: train(batches, sizes.epochs), lambda: train(batches, 1))


def ensemble(sizes: Sizes, from_memory: bool) -> Timed:
    def train(batches: Callable, epochs: int) -> None:
        for _ in range(sizes.members):
            plain.train_alone(MLP(), batches, F.mse_loss, epochs)

    return _training(sizes, from_memory, train)


def cnn_ensemble(sizes: Sizes, from_memory: bool) -> Timed:
    x, y = tensors(images(sizes.rows))
    layout = torch.channels_last if from_memory else torch.contiguous_format
    batches = _batches(x.contiguous(memory_format=layout), y, sizes.batch_size, from_memory)

    def run() -> None:
        for _ in range(sizes.members):
            module = SmallCNN().to(memory_format=layout)
            sgd = torch.optim.SGD(
                module.parameters(), lr=CNN_RATE, momentum=CNN_MOMENTUM, fused=from_memory or None
            )
            plain.train_alone(module, batches, F.cross_entropy, sizes.epochs, sgd)

    return Timed(run)


class RankOneLinear(nn.Module):
    """y_k = ((x ∘ v_k) Wᵀ) ∘ u_k + b for K members at once: [K, B, inputs] -> [K, B, outputs]."""

    def __init__(self, num_members: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.shared = nn.Linear(num_inputs, num_outputs)
        self.v = nn.Parameter(1 + 0.5 * torch.randn(num_members, 1, num_inputs))
        self.u = nn.Parameter(1 + 0.5 * torch.randn(num_members, 1, num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.v, self.shared.weight) * self.u + self.shared.bias


def batch_ensemble(sizes: Sizes, from_memory: bool) -> Timed:
    def train(batches: Callable, epochs: int) -> None:
        first = RankOneLinear(sizes.members, NUM_INPUTS, NUM_HIDDEN)
        module = nn.Sequential(first, nn.ReLU(), RankOneLinear(sizes.members, NUM_HIDDEN, 1))
        plain.train_alone(module, batches, lambda outputs, y: (outputs - y).square().mean(), epochs)

    return _training(sizes, from_memory, train)


def dropout_training(sizes: Sizes, from_memory: bool) -> Timed:
    def train(batches: Callable, epochs: int) -> None:
        plain.train_alone(MLP(dropout=DROPOUT), batches, F.mse_loss, epochs)

    return _training(sizes, from_memory, train)


def dropout_prediction(sizes: Sizes, from_memory: bool) -> Timed:
    module = MLP(dropout=DROPOUT).train()
    x, _ = tensors(regression(sizes.points))

    @torch.no_grad()
    def run() -> None:
        for _ in range(sizes.calls):
            moments(torch.stack([module(x) for _ in range(sizes.draws)]))

    return Timed(run)


def _swag_draws(weights: Tensor, num_draws: int) -> Tensor:
    """Networks drawn around those that were collected, all as vectors; Maddox et al. (2019), Algorithm 1."""
    mean, std = weights.mean(0), weights.std(0, correction=0)
    deviations = (weights - mean) / math.sqrt(len(weights) - 1)
    own, common = torch.randn(num_draws, len(mean)), torch.randn(num_draws, len(weights))
    return mean + math.sqrt(0.5) * (own * std + common @ deviations)


def swag(sizes: Sizes, from_memory: bool) -> Timed:
    def train(batches: Callable, epochs: int) -> None:
        module, collected = MLP(), epochs // 2
        adam = torch.optim.Adam(module.parameters())
        plain.train_alone(module, batches, F.mse_loss, epochs - collected, adam)
        seen = []
        for _ in range(collected):
            plain.train_alone(module, batches, F.mse_loss, 1, adam)
            seen.append(nn.utils.parameters_to_vector(module.parameters()).detach())
        if len(seen) > 1:
            _swag_draws(torch.stack(seen), sizes.draws)

    return _training(sizes, from_memory, train)


def mean_field(sizes: Sizes, from_memory: bool) -> Timed:
    def train(batches: Callable, epochs: int) -> None:
        module = MLP()
        means = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        rhos = {name: torch.full_like(mean, -6.0).requires_grad_() for name, mean in means.items()}
        adam = torch.optim.Adam([*means.values(), *rhos.values()])
        for _ in range(epochs):
            for x, y in batches():
                stds = {name: F.softplus(rho) for name, rho in rhos.items()}
                drawn = {name: mean + stds[name] * torch.randn_like(mean) for name, mean in means.items()}
                kl = sum(
                    (
                        (std.square() + means[name].square()) / (2 * PRIOR_STD**2) - (std / PRIOR_STD).log()
                    ).sum()
                    for name, std in stds.items()
                )
                errors = functional_call(module, drawn, (x,)) - y
                loss = errors.square().mean() / (2 * NOISE_STD**2) + kl / sizes.rows
                adam.zero_grad()
                loss.backward()
                adam.step()

    return _training(sizes, from_memory, train)


def prediction(sizes: Sizes, from_memory: bool) -> Timed:
    modules = [MLP(NUM_CLASSES).eval() for _ in range(sizes.members)]
    x, _ = tensors(classification(sizes.points))

    @torch.no_grad()
    def run() -> None:
        for _ in range(sizes.calls):
            torch.stack([module(x).softmax(-1) for module in modules]).mean(0)

    return Timed(run)


def sgmcmc(sizes: Sizes, from_memory: bool) -> Timed:
    """h is the rate of the mean loss with the prior's part, and 1/N the temperature, as in polymode."""
    friction = 1.0 if sizes.kernel == "sgld" else FRICTION
    noise = math.sqrt(2 * RATE * friction / sizes.rows)

    def sample(batches: Callable, epochs: int) -> None:
        module = MLP()
        weights = list(module.parameters())
        momenta = [torch.zeros_like(weight) for weight in weights]
        for _ in range(epochs):
            for x, y in batches():
                squares = sum(weight.square().sum() for weight in weights)
                loss = (module(x) - y).square().mean() / (2 * NOISE_STD**2)
                loss = loss + squares / (2 * PRIOR_STD**2 * sizes.rows)
                gradients = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
                        momentum.mul_(1 - friction).sub_(gradient, alpha=RATE)
                        momentum.add_(torch.randn_like(weight), alpha=noise)
                        weight.add_(momentum)

    def train(batches: Callable, epochs: int) -> None:
        for _ in range(sizes.members):
            sample(batches, epochs)

    return _training(sizes, from_memory, train)


def hmc(sizes: Sizes, from_memory: bool) -> Timed:
    plain.TRANSITIONS, plain.LEAPS = sizes.transitions, sizes.leaps  # where its chain reads them
    x, y = tensors(hmc_data())

    def run() -> None:
        for seed in range(sizes.members):
            module = MLP(2, 8)
            module.load_state_dict({n: torch.from_numpy(w) for n, w in hmc_weights(seed).items()})
            plain.leapfrog_chain(module, x, y)

    return Timed(run)
