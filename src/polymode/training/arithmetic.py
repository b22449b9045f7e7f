"""How a run computes: with how many threads, and what happens to the smallest numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_denormals() -> Iterator[None]:
    """Let numbers below 1e-38 (in 32 bits) be zero, where the processor can.

    Moments of weights that no example touches (rare words of an embedding, pulled to their anchors) decay to
    such numbers within a training, and arithmetic with them takes the processor's slow path: epochs of a
    network with 20,000 words took about three times as long.
    """
    had_denormals = bool(torch.tensor([1e-310], dtype=torch.float64) * 1.0)
    changed = had_denormals and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if changed:
            torch.set_flush_denormal(False)


@contextmanager
def with_threads(number: int | None) -> Iterator[None]:
    """Compute with so many threads (None: as they are) and give the caller's own number back afterwards."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
