"""When two computations of the same numbers count as equal.

Bits are equal only where the same kernel sees the same shapes, places in memory included: a resumed run, a
repeated seed, and whatever moves, hashes or counts numbers without rounding them. Another batch size, another
number of members, another place in a stack, another backend or another number of processes may take another
kernel, which adds up in another order. Whether it does depends on the processor, so such comparisons need a
tolerance everywhere. Where they have to be sharp, they run in double precision.
"""

from collections.abc import Mapping
from typing import Any

import torch

# A pass through one of the small networks here, forwards and backwards, adds up some hundred numbers.
PASS = 2.0**8
# Trainings of these tests take up to some hundred steps, and each passes the errors of the last on.
TRAINING = 2.0**20


def assert_equal_up_to_rounding(found: Any, expected: Any, ulps: float = TRAINING, name: str = "") -> None:
    """Tensors, or mappings of them, that differ by at most so many ulps of their largest value (at least 1).

    In double precision a whole training has 2²⁰ ε = 2e-10 and a pass 6e-14; in single precision a pass has
    3e-5, and a training none that would tell a defect from rounding.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert_equal_up_to_rounding(found[key], tensor, ulps, f"{name}{key}")
        return
    if not expected.is_floating_point():
        assert torch.equal(found, expected), name
        return
    assert ulps <= PASS or expected.dtype == torch.float64, "compare trainings in double precision"
    tolerance = ulps * torch.finfo(expected.dtype).eps * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance, msg=lambda message: f"{name}: {message}"
    )
