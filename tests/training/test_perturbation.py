"""Random data of a chain: always the same for it, others for other chains, with the noise that is meant."""

import pytest
import torch

import polymode as pm
from polymode.errors import InputError
from polymode.likelihoods import Categorical, FixedGaussian
from polymode.training.contract.perturbation import perturbed
from polymode.training.loop.batches import Batches
from tolerances import PASS, assert_equal_up_to_rounding

N = 600


def seen(likelihood, targets, *, shared_order=False, epoch=0, batch_size=37, weights=None, chains=3):
    """Targets and weights by example, [chains, N], as the chains see them in one epoch."""
    data = pm.ArrayData(torch.arange(N), targets, batch_size=batch_size, weights=weights)
    batches = Batches([data], range(chains), [0], shared_order=shared_order)
    seeds = torch.tensor([5, 6, 7])[:chains]
    found = torch.full((2, chains, N), torch.nan, dtype=torch.float64)
    for [batch] in batches.epoch(epoch, 1):
        for piece in perturbed(batch, seeds, likelihood).pieces:
            assert piece.has_groups
            for row, group in enumerate(range(piece.groups.start, piece.groups.stop)):
                places = piece.examples.inputs[row]
                found[0, group, places] = piece.examples.targets[row].double()
                if piece.examples.weights is not None:
                    found[1, group, places] = piece.examples.weights[row].double()
    return found


def test_targets_are_drawn_again_with_the_noise_of_the_likelihood():
    targets = torch.linspace(-3, 3, N, dtype=torch.float64)
    found, weights = seen(FixedGaussian(std=0.4), targets)
    assert weights.isnan().all()  # no weights
    z = (found - targets) / 0.4
    assert z.mean().abs() < 4.5 / (3 * N) ** 0.5
    assert (z.var() - 1).abs() < 4.5 * (2 / (3 * N)) ** 0.5
    assert torch.corrcoef(z).fill_diagonal_(0).abs().max() < 4.5 / N**0.5  # chains are independent


def test_a_chain_sees_the_same_data_in_every_epoch_whatever_the_order_and_batch():
    targets = torch.linspace(-3, 3, N, dtype=torch.float64)
    likelihood = FixedGaussian(std=0.4)
    first = seen(likelihood, targets)[0]
    for others in ({"epoch": 3}, {"batch_size": 100}, {"shared_order": True}):
        assert_equal_up_to_rounding(seen(likelihood, targets, **others)[0], first, PASS)
    assert_equal_up_to_rounding(seen(likelihood, targets, chains=1)[0], first[:1], PASS)


def test_labels_get_exponential_weights():
    labels = torch.arange(N) % 3
    found, weights = seen(Categorical(), labels)
    assert torch.equal(found, labels.double().expand(3, N))
    assert (weights.mean() - 1).abs() < 4.5 / (3 * N) ** 0.5
    assert (weights.var() - 1).abs() < 4.5 * (8 / (3 * N)) ** 0.5  # fourth central moment 9
    assert weights.min() > 0
    with pytest.raises(InputError, match="perturb_data=True and sample weights cannot be combined"):
        seen(Categorical(), labels, weights=torch.ones(N))
