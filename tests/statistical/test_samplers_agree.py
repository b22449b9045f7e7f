"""Two samplers of one posterior, which know nothing of each other, must predict the same.

Weights cannot be compared, as hidden units may change places; probabilities can. A noise floor is the
distance between halves of a sampler's own chains; all of them are half as far from the truth (judging/
diagnostics.py). So, of samplers whose floors are f and g, predictions are expected to be √(f² + g²)/2 apart.
The distance is a mean over points of absolute Gaussian errors, which deviate by 0.76 of their mean; few of
them are independent, say five: 0.34 of it. 4.5 such deviations above, and a fifth for the noise of the floors
themselves, are 3 times of what is expected. (Over five seeds it was 0.7 to 1.7 times.)
"""

import math

import pytest
import torch

import polymode as pm
from polymode.judging.contents import contents_for
from polymode.judging.diagnostics import noise_floor
from polymode.methods import HMC, Microcanonical

MOST = 3.0


def data():
    """Labels that no line divides, and points all around them to predict."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(40, generator=generator, dtype=torch.float64)
    points = 4 * torch.rand(100, 2, generator=generator, dtype=torch.float64) - 2
    train = pm.ArrayData(x, (x[:, 0] * x[:, 1] + noise > 0).long(), batch_size=40)
    return train, pm.ArrayData(points, torch.zeros(100, dtype=torch.long))


def fitted(method, passes):
    return pm.fit(
        method,
        lambda: pm.models.MLP(2, 2, (3,)).double(),
        data()[0],
        likelihood="categorical",
        epochs=passes,
        progress=False,
        backend="vmap",
    )


def times_expected(first, second) -> float:
    """How far apart two samplers' predictions are, in units of what their noise floors let expect."""
    points = data()[1]
    contents = contents_for(first.network.likelihood)
    predicted = [contents.predicted(posterior, points.inputs) for posterior in (first, second)]
    floors = [noise_floor(posterior, points)["total_variation"] for posterior in (first, second)]
    return contents.distances(*predicted)["total_variation"] / (math.hypot(*floors) / 2)


@pytest.mark.parametrize(
    ("variance", "passes"), [(0.01, 1000), pytest.param(5e-4, 4000, marks=pytest.mark.slow)]
)
def test_microcanonical_chains_predict_what_hmc_predicts(variance, passes):
    hmc = fitted(HMC(8, 0.7, num_samples=30), passes)
    method = Microcanonical(8, 0.7, num_samples=30, energy_variance=variance, scale="variances")
    assert times_expected(fitted(method, passes), hmc) < MOST


@pytest.mark.slow
def test_chains_at_another_temperature_predict_something_else():
    """With this many samples the bound tells posteriors apart."""
    hmc = fitted(HMC(8, 0.7, num_samples=30), 4000)
    method = Microcanonical(8, 0.7, num_samples=30, energy_variance=5e-4, scale="variances", temperature=0.25)
    assert times_expected(fitted(method, 4000), hmc) > MOST


@pytest.mark.slow
def test_hmc_from_the_prior_predicts_what_it_predicts_from_optima():
    first, second = (fitted(HMC(8, 0.7, num_samples=30, start=start), 4000) for start in ("optimum", "prior"))
    assert times_expected(first, second) < MOST
