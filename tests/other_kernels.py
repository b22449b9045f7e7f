"""Matrix products as another processor might round them: ``pytest -p other_kernels`` with tests/ on the path.

Every product is off by up to two ulps, by a pattern that depends on its shape alone. So the same kernel with
the same shapes still gives the same bits, and anything else does not: a comparison of bits that would fail on
some other machine fails here.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("aten", "IMPL")


@functools.cache
def pattern(shape: tuple[int, ...], depth: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(hash((shape, depth)) % 2**31)
    return 1 + torch.finfo(dtype).eps * torch.randint(-2, 3, shape, generator=generator).to(dtype)


def replace(name: str, first: int) -> None:
    """Replace an operation that multiplies its arguments ``first`` and ``first + 1``."""
    exact = getattr(torch.ops.aten, name).out

    def kernel(*arguments: Any, **options: Any) -> Tensor:
        left, right = arguments[first], arguments[first + 1]
        out = left.new_empty(*left.shape[:-1], right.shape[-1])
        exact(*arguments, **options, out=out)
        if out.is_floating_point():
            out.mul_(pattern(tuple(out.shape), left.shape[-1], out.dtype))
        return out

    LIBRARY.impl(name, kernel, "CPU")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that a kernel is replaced
    for name, first in (("mm", 0), ("addmm", 1), ("bmm", 0), ("baddbmm", 1)):
        replace(name, first)
