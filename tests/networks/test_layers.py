"""Replayable dropout: masks are fair, independent and functions of their key."""

import math

import torch
from torch import nn

from polymode.networks.layers import SeededDropout, mask_numbers
from polymode.networks.members import call_module
from polymode.networks.surgery import prepare, tensors_of

ZERO = torch.zeros((), dtype=torch.int64)


def draws(seed: int, layer: int = 0, shape=(400, 250)) -> torch.Tensor:
    return mask_numbers(torch.tensor(seed), layer, ZERO, torch.Size(shape))


def test_uniform_has_the_moments_and_bins_of_a_uniform():
    u = draws(3)
    n = u.numel()
    # Five standard errors: 1/sqrt(12 n) for the mean, 1/sqrt(180 n) for the variance.
    assert abs(u.mean().item() - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(u.var().item() - 1 / 12) < 5 / math.sqrt(180 * n)
    counts = torch.histc(u.float(), 20, 0, 1).double()
    chi_squared = ((counts - n / 20).square() / (n / 20)).sum().item()
    assert chi_squared < 19 + 5 * math.sqrt(2 * 19)


def test_neighbouring_keys_are_uncorrelated():
    """Neighbours in seed, layer, example and unit: |r| < 5/sqrt(n)."""
    u = draws(3)
    pairs = {
        "seed": (u, draws(4)),
        "layer": (u, draws(3, layer=1)),
        "example": (u[1:], u[:-1]),
        "unit": (u[:, 1:], u[:, :-1]),
    }
    for name, (a, b) in pairs.items():
        r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(r) < 5 / math.sqrt(a.numel()), name


def test_mask_keeps_the_mean_and_drops_the_rate():
    layer = SeededDropout(0.3, layer=0).train()
    out = layer(torch.ones(300, 200))
    n = out.numel()
    assert abs((out == 0).double().mean().item() - 0.3) < 5 * math.sqrt(0.21 / n)
    torch.testing.assert_close(out[out > 0].unique(), torch.tensor([1 / 0.7]))
    assert torch.equal(layer.eval()(out), out)


def test_a_layer_used_twice_in_a_pass_draws_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.drop(x), self.drop(x)])

    prepared = prepare(Twice()).train()
    weights = tensors_of(prepared)
    x = torch.ones(5, 40)
    first, again = (call_module(prepared, weights, x) for _ in range(2))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, again)


def test_channel_dropout_drops_whole_channels():
    out = SeededDropout(0.5, layer=0, original=nn.Dropout2d).train()(torch.ones(50, 8, 3, 3))
    flat = out.flatten(2)
    assert torch.equal(flat.amin(-1), flat.amax(-1))
    assert 0 < (flat[..., 0] == 0).sum() < 400


def test_narrow_and_wide_hashes_have_the_same_bits():
    from polymode.seeds import _GOLDEN, _MASK32, mix, uniform16

    keys = mix(torch.arange(50) * 7919)
    counter = torch.arange(1, 5)
    bits = mix((keys[:, None] + counter * _GOLDEN) & _MASK32)
    halves = torch.stack([bits & 0xFFFF, bits >> 16], -1).flatten(1)[:, :7]
    assert torch.equal(uniform16(keys, 7), (halves.float() + 0.5) / 2**16)
    numbers = uniform16(keys, 20_000).double()
    # Mean and variance of uniform numbers: a million of them.
    assert abs(numbers.mean() - 0.5) < 4.5 * (1 / 12 / 1e6) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 4.5 * (1 / 180 / 1e6) ** 0.5
    neighbours = torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]))[0, 1]
    assert abs(neighbours) < 4.5 / 1e3
