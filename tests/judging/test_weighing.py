"""Stacking: weights on the simplex that maximise the held-out log score."""

import pytest
import torch

import polymode as pm
from polymode.errors import InputError


def test_weights_meet_the_conditions_of_the_maximum():
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(6, 200, generator=generator, dtype=torch.float64)
    weights = pm.held_out_weights(logs)
    assert weights.sum().item() == pytest.approx(1)
    slopes = (logs.exp() / (weights @ logs.exp())).mean(1)
    # Karush-Kuhn-Tucker: no member's slope above one, those with weight at one.
    assert float(slopes.max()) < 1 + 1e-5
    assert torch.allclose(slopes[weights > 1e-3], torch.ones(1).double(), atol=1e-3)


def test_two_members_have_the_weights_of_calculus():
    # Member 0 gives density 1 to the first 30 of 100 points and 0.2 to the others, member 1 the reverse.
    # (0.3/(w + 0.2(1 − w)) − 0.7/(1 − w + 0.2 w)) = 0 at w = 0.2.
    first = torch.tensor([1.0] * 30 + [0.2] * 70).double()
    second = torch.tensor([0.2] * 30 + [1.0] * 70).double()
    weights = pm.held_out_weights(torch.stack([first, second]).log())
    share = 0.3 * (1 - 0.2) / 0.8
    expected = (0.3 * 1.2 - 0.2) / 0.8
    assert share == pytest.approx(0.3)
    assert weights[0].item() == pytest.approx(expected, abs=1e-3)


def test_stacked_draws_predict_held_out_data_better():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(120, 4, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(120, generator=generator) > 0).long()
    data = pm.ArrayData(x[:60], y[:60], batch_size=20)
    held_out = pm.ArrayData(x[60:], y[60:])
    method = pm.methods.ECMP(optimizer=pm.Optimizer("Adam", lr=0.02))
    posterior = pm.fit(
        method, lambda: pm.models.MLP(4, 2, (8,)), data, likelihood="categorical", epochs=20, progress=False
    )
    stacked = pm.weigh_members(posterior, held_out, 50)
    assert 1 <= stacked.num_members < 50
    before = posterior.log_prob(x[60:], y[60:], 50).mean()
    after = stacked.log_prob(x[60:], y[60:]).mean()
    assert after > before


def test_mistakes_are_named():
    with pytest.raises(InputError, match=r"must be \[members, observations\], got \[3\]"):
        pm.held_out_weights(torch.zeros(3))
    with pytest.raises(InputError, match="no density at all"):
        pm.held_out_weights(torch.tensor([[0.0, -torch.inf]]))
