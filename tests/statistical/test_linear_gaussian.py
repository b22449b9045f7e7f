"""Linear regression with Gaussian noise and prior has a posterior in closed form: N(m, S).

S = (XᵀX/σ² + I/s²)⁻¹ and m = S Xᵀy/σ². A converged MAP estimate is m; an ensemble of a convex model is
that point many times over, whatever its spread looks like before it has converged.
"""

import pytest
import torch
from torch import nn

import polymode as pm
from polymode.methods import DeepEnsemble, Single

NOISE, PRIOR = 0.3, 0.7


def problem(n: int = 60, d: int = 4) -> tuple[pm.ArrayData, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    truth = PRIOR * torch.randn(d, generator=generator, dtype=torch.float64)
    y = x @ truth + NOISE * torch.randn(n, generator=generator, dtype=torch.float64)
    covariance = torch.linalg.inv(x.T @ x / NOISE**2 + torch.eye(d, dtype=torch.float64) / PRIOR**2)
    return pm.ArrayData(x, y, batch_size=n), covariance @ x.T @ y / NOISE**2, covariance


def linear() -> nn.Module:
    return nn.Linear(4, 1, bias=False).double()


def fitted(method, data, epochs):
    return pm.fit(
        method,
        linear,
        data,
        likelihood=pm.likelihoods.FixedGaussian(std=NOISE),
        epochs=epochs,
        progress=False,
    )


@pytest.mark.parametrize(
    ("optimizer", "epochs"),
    [
        (pm.Optimizer("LBFGS", lr=1.0, tolerance_change=0.0), 5),
        (pm.Optimizer("SGD", lr=0.03, momentum=0.9), 400),
    ],
    ids=["LBFGS", "SGD"],
)
def test_map_is_the_posterior_mean_and_an_ensemble_of_it_a_point(optimizer, epochs):
    data, mean, covariance = problem()
    posterior = fitted(DeepEnsemble(4, of=Single(PRIOR, optimizer)), data, epochs)
    [members] = posterior.draw()
    weights = members.stacked["weight"][:, 0]
    for member in weights:
        torch.testing.assert_close(member, mean, rtol=0, atol=1e-6)
    predictive = posterior.predict(data.inputs)
    assert predictive.member_variance.max() < 1e-10  # the posterior's would be xᵀ S x
    assert (data.inputs @ covariance * data.inputs).sum(1).min() > 1e-6
    torch.testing.assert_close(predictive.std, torch.full_like(predictive.std, NOISE))


def test_a_wider_prior_shrinks_less():
    data, _, _ = problem(n=6)
    optimizer = pm.Optimizer("LBFGS", lr=1.0, tolerance_change=0.0)
    sizes = []
    for prior in (0.05, 0.2, 5.0):
        [members] = fitted(Single(prior, optimizer), data, 5).draw()
        sizes.append(members.stacked["weight"].norm().item())
    assert sizes[0] < sizes[1] < sizes[2]
