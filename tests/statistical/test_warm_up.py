"""What samplers find before they sample: step sizes, and the spread of every weight in its chain.

The posterior of a linear network on orthogonal inputs is known weight by weight. Errors are estimated from
chains, which are independent of each other.
"""

import math

import pytest
import torch
from torch import nn

import polymode as pm
from polymode.methods import HMC, Microcanonical

NOISE, PRIOR, CHAINS = 0.5, 5.0, 40
# Of each weight, in the posterior: the prior's width is off by 3 to 50.
WIDTHS = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6], dtype=torch.float64)
D = len(WIDTHS)
# At most ten numbers are looked at in one test, with errors of 40 chains: by chance a deviation of 4.5
# standard errors happens once in 1,600 such tests (Student's t with 39 degrees of freedom).
FITS = 4.5


def problem():
    """Data, and the posterior's means; its deviations are WIDTHS."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(30, D, generator=generator, dtype=torch.float64))[0]
    x = x * NOISE * (WIDTHS**-2 - PRIOR**-2).sqrt()
    y = x.sum(1) + NOISE * torch.randn(30, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, y, batch_size=30), WIDTHS.square() * (x.T @ y) / NOISE**2


def run(method, epochs):
    """Samples [chains, samples, D], the scale of every chain [chains, D], and what chains say."""
    scales, findings = [], type(method).findings

    def look(self, problem, state):
        scales.append(state.own["scale"][0].clone())
        return findings(self, problem, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "findings", look)
        posterior = pm.fit(
            method,
            lambda: nn.Linear(D, 1, bias=False).double(),
            problem()[0],
            likelihood=pm.likelihoods.FixedGaussian(std=NOISE),
            epochs=epochs,
            progress=False,
            backend="vmap",
        )
    weights = torch.cat([block.stacked["weight"][:, 0] for block in posterior.draw()])
    return weights.unflatten(0, (CHAINS, -1)), torch.stack(scales), posterior.record["findings"]


VARIANCE = 0.01


@pytest.fixture(scope="module")
def microcanonical():
    method = Microcanonical(
        CHAINS, PRIOR, num_samples=20, scale="variances", energy_variance=VARIANCE, temperature=1.0
    )
    return run(method, 3000)


@pytest.fixture(scope="module")
def hmc():
    return run(HMC(CHAINS, PRIOR, num_samples=20, scale="variances"), 3000)


def test_the_energy_has_the_variance_that_was_asked_for(microcanonical):
    """Steps are found and judged in different stretches of a chain: the error is that of the chains."""
    found = torch.tensor([chain["energy_variance"] for chain in microcanonical[2]], dtype=torch.float64)
    error = found.std().item() / math.sqrt(CHAINS)
    assert error < 0.2 * VARIANCE  # it says something
    assert found.mean().item() == pytest.approx(VARIANCE, abs=FITS * error)


def test_chains_find_the_spread_of_their_weights(microcanonical):
    """A deviation of n independent draws scatters by r = 1/√(2n) and is 3/(4n) = 1.5 r² too small on average:
    1/(2n) as its mean is that of the same draws, 1/(4n) as a root.

    At this energy variance the step itself makes variances up to 9 % smaller, so deviations 5 %.
    """
    ratio = microcanonical[1] / WIDTHS
    scatter = ratio.std(0)
    assert scatter.max() < 0.4
    expected = 1 - 1.5 * scatter.square()
    assert ((ratio.mean(0) - expected).abs() < FITS * scatter / math.sqrt(CHAINS) + 0.05).all()
    assert len({chain["step_size"] for chain in microcanonical[2]}) == CHAINS


def test_hmc_finds_the_spread_of_its_weights(hmc):
    """Its trajectories are cut while they are in units of the prior: wide directions are not yet crossed."""
    ratio = hmc[1] / WIDTHS
    assert (ratio.mean(0) > 0.5).all()
    assert (ratio.mean(0) < 1.5).all()
    assert not torch.equal(ratio[0], ratio[1])  # every chain has its own
    assert len({chain["step_size"] for chain in hmc[2]}) == CHAINS


def test_hmc_in_units_of_the_spread_samples_the_posterior(hmc):
    samples, _, findings = hmc
    z = (samples - problem()[1]) / WIDTHS
    found = torch.cat([z, z.square() - 1], -1).mean(1)
    error = found.std(0) / math.sqrt(CHAINS)
    assert error.max() < 0.1
    assert (found.mean(0) / error).abs().max() < FITS
    # A quarter of a period takes a few leaps, in units of the prior about (π/2)/(2 · 0.1/5) = 40.
    assert max(chain["leapfrog_steps"] for chain in findings) < 10


@pytest.mark.parametrize("method", [HMC, Microcanonical])
def test_units_of_the_prior_stay_those_of_the_prior(method):
    few = {"num_chains": CHAINS, "prior_std": PRIOR, "num_samples": 2}
    _, scales, _ = run(method(**few, scale="prior"), 100)
    torch.testing.assert_close(scales, torch.full((CHAINS, D), PRIOR, dtype=torch.float64))
