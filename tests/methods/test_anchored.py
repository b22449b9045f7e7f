"""Anchors, starts, budgets and what is refused; the law of the members is in tests/statistical."""

import pytest
import torch

import polymode as pm
from polymode.errors import InputError
from polymode.methods import Anchored
from polymode.schedules import Constant
from polymode.weights.priors import FanIn


def network():
    return pm.models.MLP(4, 3, (5,)).double()


def data(n=30):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, torch.randint(3, (n,), generator=generator), batch_size=8)


def weights(method, **options):
    options = {"epochs": 1, "likelihood": "categorical", "progress": False, "backend": "loop"} | options
    [members] = pm.fit(method, network, data(), **options).draw()
    return members.stacked


STILL = pm.Optimizer("SGD", lr=1e-12)


def test_it_starts_at_the_network_or_at_the_anchor():
    own = weights(Anchored(40, 3.0, optimizer=STILL))
    deep = weights(pm.methods.DeepEnsemble(40, of=pm.methods.Single(optimizer=STILL)))
    for name, tensor in own.items():  # the draw of the anchor leaves the initialisation alone
        torch.testing.assert_close(tensor, deep[name])
    anchored = weights(Anchored(40, {"*.weight": 3.0, "*": 0.1}, begin_at="anchor", optimizer=STILL))
    for name, tensor in anchored.items():
        expected = 3.0 if name.endswith("weight") else 0.1
        error = 4.5 / (2 * tensor.numel()) ** 0.5
        assert tensor.std().item() == pytest.approx(expected, rel=error), name
        assert abs(tensor.mean().item()) < 4.5 * expected / tensor.numel() ** 0.5, name
        assert len(tensor.unique(dim=0)) == 40  # each member has an anchor of its own


def test_a_tight_prior_pulls_members_to_their_anchors():
    """s = 0.01 and N = 30: the pull has curvature 1/(s² N) = 333, the data less than 1."""
    anchors = weights(Anchored(3, 0.01, begin_at="anchor", optimizer=STILL))
    method = Anchored(3, 0.01, optimizer=pm.Optimizer("SGD", lr=0.002), schedule=Constant())
    far = weights(Anchored(3, 0.01, optimizer=STILL))
    near = weights(method, epochs=40)
    for name, tensor in near.items():
        assert (far[name] - anchors[name]).abs().max() > 0.01  # it has begun elsewhere
        torch.testing.assert_close(tensor, anchors[name], rtol=0, atol=0.004)


def test_perturbed_data_changes_members_but_not_their_anchors():
    plain = weights(Anchored(2, FanIn(), begin_at="anchor", optimizer=STILL))
    perturbed = weights(Anchored(2, FanIn(), begin_at="anchor", perturb_data=True, optimizer=STILL))
    for name, tensor in plain.items():
        torch.testing.assert_close(tensor, perturbed[name])
    sgd = pm.Optimizer("SGD", lr=0.1)
    plain = weights(Anchored(2, FanIn(), optimizer=sgd), epochs=3)
    perturbed = weights(Anchored(2, FanIn(), perturb_data=True, optimizer=sgd), epochs=3)
    assert any(not torch.allclose(t, perturbed[n]) for n, t in plain.items())


@pytest.mark.parametrize("num_members", [1, 5])
def test_a_budget_is_divided_among_the_members_and_spent(num_members):
    method = Anchored(num_members, FanIn(), begin_at="anchor", optimizer=STILL)
    assert method.for_budget(1000) == (method, 1000 / num_members)
    sized, epochs = method.for_budget(2 * num_members)
    posterior = pm.fit(sized, network, data(), likelihood="categorical", epochs=epochs, progress=False)
    assert posterior.record["member_epochs"] == 2 * num_members
    assert posterior.num_members == num_members


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members must be a whole number of at least 1, got 0"),
        ({"prior_std": -0.1}, "prior_std must be a positive number, got -0.1"),
        ({"begin_at": "anker"}, "Unknown begin_at 'anker'. Did you mean 'anchor'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        Anchored(**options)


def test_a_pattern_that_fits_nothing_is_found_before_training():
    with pytest.raises(InputError, match=r"weight or pattern in prior_std 'hidden\.weight'"):
        weights(Anchored(2, {"hidden.weight": 1.0, "*": 1.0}))
