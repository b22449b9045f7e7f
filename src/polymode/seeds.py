"""Seeds derived from what they are for, so that no result depends on what else was drawn."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed the global generators inside the block and restore them after it.

    Code of the user's that draws from the global state (a model factory, ``F.dropout``) is the
    only reason to touch it.
    """
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
