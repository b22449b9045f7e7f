"""Seeds derived from what they are for, so that no result depends on what else was drawn."""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
# Multipliers and shifts of the "lowbias32" integer hash (C. Wellons, 2018).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_GOLDEN = 0x9E3779B9


def mix(value: Tensor) -> Tensor:
    """Hash 32-bit integers held in int64 into 32-bit integers."""
    value = ((value ^ (value >> 16)) * _FIRST) & _MASK32
    value = ((value ^ (value >> 15)) * _SECOND) & _MASK32
    return value ^ (value >> 16)


def fold(seed: Tensor) -> Tensor:
    """Hash seeds of up to 63 bits into 32 bits."""
    return mix((seed ^ (seed >> 32)) & _MASK32)


def uniform(keys: Tensor, count: int) -> Tensor:
    """Uniform numbers in [0, 1), [B, count], from 32-bit keys [B]: a counter-based generator.

    They depend on the keys alone: not on the device, the order or what else was drawn.
    """
    counter = torch.arange(1, count + 1, device=keys.device)
    bits = mix((keys[:, None] + counter * _GOLDEN) & _MASK32)
    return bits.to(torch.float64) / 2**32


def uniform16(keys: Tensor, count: int) -> Tensor:
    """As ``uniform`` in steps of 2⁻¹⁶, in the middle of each: two numbers from every hash, for choices."""
    counter = torch.arange(1, (count + 1) // 2 + 1, device=keys.device)
    offsets = ((counter * _GOLDEN) & _MASK32).to(torch.int32)
    bits = _mix_narrow(keys.to(torch.int32)[:, None] + offsets)
    halves = torch.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF], -1).flatten(1)[:, :count]
    return (halves.to(torch.float32) + 0.5) / 2**16


def _mix_narrow(value: Tensor) -> Tensor:
    """``mix`` of 32-bit integers that wrap around: the same bits in half the memory."""
    value = (value ^ ((value >> 16) & 0xFFFF)) * _FIRST
    value = (value ^ ((value >> 15) & 0x1FFFF)) * (_SECOND - 2**32)
    return value ^ ((value >> 16) & 0xFFFF)


def open_uniform(keys: Tensor, count: int) -> Tensor:
    """Uniform numbers in (0, 1), where logarithms and normal quantiles are finite; as ``uniform``."""
    return uniform(keys, count) + 2.0**-33


def example_keys(seeds: Tensor, rows: Tensor) -> Tensor:
    """32-bit keys [G, B] of examples, from a seed of each group [G] and places in a data set [G, B]."""
    return mix((fold(seeds).to(rows.device)[:, None] + rows * _GOLDEN) & _MASK32)


def derive_seed(*parts: int | str) -> int:
    """Hash the parts (seed, purpose, chain, epoch, ...) into 63 bits."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def derive_generator(*parts: int | str) -> torch.Generator:
    """Make a CPU generator that depends on the parts alone."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed from a generator."""
    return int(torch.randint(2**62, (), generator=generator))


def free_in_children(lock: Any) -> Any:
    """The lock, which a forked process finds free: the thread that held it does not exist there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # as the standard library has it
    return lock


# There is one global random state for all threads: who seeds it keeps the others out until it is restored.
_global_state = free_in_children(threading.RLock())


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed the global generators inside the block and restore them after it; one thread at a time.

    Code of the user's that draws from the global state (a model factory, ``F.dropout``) is the
    only reason to touch it.
    """
    with _global_state:
        cuda = torch.cuda.is_initialized()
        saved, saved_cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []
        # torch.manual_seed would also queue a call for every kind of device that is not initialised.
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        try:
            yield
        finally:
            torch.set_rng_state(saved)
            if cuda:
                torch.cuda.set_rng_state_all(saved_cuda)
