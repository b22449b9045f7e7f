"""Gaussians over weights: the law they reach, sparsity that was planted, and what is particular to them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.weights.gaussian import INCLUSION, RHO

SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9)


def linear_gaussian(num_examples=40, noise=0.5, prior=0.8):
    """Data of a linear model, and the posterior N(m, S) of its weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_examples, 3, generator=generator, dtype=torch.float64)
    x[:, 2] += 0.8 * x[:, 1]  # correlated, so that the mean field is not the posterior
    y = x @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    y = (y + noise * torch.randn(num_examples, generator=generator, dtype=torch.float64))[:, None]
    precision = x.T @ x / noise**2 + torch.eye(3, dtype=torch.float64) / prior**2
    return x, y, torch.linalg.solve(precision, x.T @ y / noise**2)[:, 0], precision


def test_the_law_of_a_linear_gaussian_model_is_reached():
    """The mean field of N(m, S) that minimises KL(q ‖ p) is N(m, 1/diag S⁻¹) (Bishop 2006, §10.1.2)."""
    x, y, mean, precision = linear_gaussian()
    falling = pm.schedules.Pieces(((0, 1.0), (0.3, 1.0), (1, 0.001)))
    method = pm.methods.MeanField(
        prior_std=0.8, rho=-2.0, optimizer=pm.Optimizer("Adam", lr=0.03), schedule=falling
    )
    posterior = pm.fit(
        method,
        lambda: nn.Linear(3, 1, bias=False).double(),
        pm.ArrayData(x, y, batch_size=len(x)),
        likelihood=pm.likelihoods.FixedGaussian(std=0.5),
        epochs=6000,
        progress=False,
    )
    [block] = posterior.blocks
    found, sigma = block.stacked["weight"].flatten(), F.softplus(block.stacked[RHO]).flatten()
    expected = precision.diagonal().rsqrt()
    # The noise of the last steps, at rates that fall to 3e-5, is far below the widths themselves.
    torch.testing.assert_close(found, mean, atol=0.1 * expected.min().item(), rtol=0)
    torch.testing.assert_close(sigma, expected, rtol=0.05, atol=0)
    wrong = torch.linalg.inv(precision).diagonal().sqrt()  # the marginal widths of the posterior
    assert (wrong[1:] / expected[1:]).min() > 1.2  # which the comparison would tell apart
    drawn = torch.cat([b.stacked["weight"] for b in posterior.draw(4000)])[:, 0]
    torch.testing.assert_close(drawn.std(0), sigma, rtol=5 / (2 * 4000) ** 0.5, atol=0)
    torch.testing.assert_close(drawn.mean(0), found, atol=(5 * sigma.max() / 4000**0.5).item(), rtol=0)


def test_planted_sparsity_is_recovered_exactly():
    """Of 12 hidden units 3 were planted: after training just as many remain, and all predictions fit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 5, generator=generator, dtype=torch.float64)
    teacher = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    y = torch.tanh(1.5 * x @ teacher.T) @ torch.tensor([[2.0], [-2.0], [1.5]], dtype=torch.float64)
    y = y + 0.1 * torch.randn(600, 1, generator=generator, dtype=torch.float64)
    network = lambda: pm.models.MLP(5, 1, (12,), activation=nn.Tanh, output_bias=False).double()  # noqa: E731
    method = pm.methods.SpikeSlab(
        prior_std=1.0,
        rho=-4.0,
        inclusion=0.9,
        prior_inclusion=1e-3,
        optimizer=pm.Optimizer("Adam", lr=0.01),
        schedule=pm.schedules.Pieces(((0, 1.0), (0.5, 1.0), (1, 0.01))),
    )
    posterior = pm.fit(
        method,
        network,
        pm.ArrayData(x, y, batch_size=100),
        likelihood=pm.likelihoods.FixedGaussian(std=0.1),
        epochs=400,
        progress=False,
    )
    gamma = posterior.blocks[0].stacked[INCLUSION].sigmoid().flatten()
    print(gamma)
    assert int((gamma > 0.5).sum()) == 3
    assert ((gamma < 0.05) | (gamma > 0.95)).all()
    error = (posterior.means().predict(x).mean - y).square().mean().sqrt()
    assert error < 0.2
