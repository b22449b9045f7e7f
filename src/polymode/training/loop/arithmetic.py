"""How a run computes: with how many threads, and what happens to the smallest numbers."""

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from polymode.errors import require
from polymode.seeds import free_in_children


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


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one, in a process that was told to give it back at once.

    Dask starts its workers so (``MALLOC_TRIM_THRESHOLD_``). A training takes and frees the same tensors at
    every step: with a page fault for each page of them, eight small MLPs took 1.6 times as long. What is set
    here is what glibc would come to by itself.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        with suppress(OSError, AttributeError):  # another system, or another library of C
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_MMAP_THRESHOLD, 2**25)
            mallopt(M_TRIM_THRESHOLD, 2**26)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MOST_THREADS = 1024  # each is a thread of the system: more would bring a machine down

# PyTorch has a number of threads for each thread of Python, and new threads begin with the latest one that
# anybody has set. So a thread that begins while a run computes in another one finds the run's number, which
# is nobody's wish: the number that its caller has stands first here.
_lock = free_in_children(threading.Lock())
_wished: list[int] = []
_set_by_runs: set[int] = set()


class _Depth(threading.local):
    number = 0


_depth = _Depth()


def available_threads() -> int:
    """The number of threads that the caller has set, or that PyTorch takes by itself."""
    now = torch.get_num_threads()
    with _lock:
        return _wished[0] if _wished and not _depth.number and now in _set_by_runs else now


def recorded_threads(record: Any) -> int | None:
    """The threads in the record of a run, but no more than there are here; None where it tells none."""
    number = record.get("threads") if isinstance(record, Mapping) else None
    return min(number, available_threads()) if isinstance(number, int) and number >= 1 else None


@contextmanager
def with_threads(number: int | None) -> Iterator[None]:
    """Compute with so many threads (None: as they are) and give the caller's own number back afterwards."""
    require(
        number is None or 1 <= number <= MOST_THREADS,
        f"threads must be between 1 and {MOST_THREADS}, got {number}.",
    )
    before = available_threads()
    with _lock:
        _wished.append(before)
        if number is not None:
            _set_by_runs.add(number)
    _depth.number += 1
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _depth.number -= 1
        with _lock:
            _wished.remove(before)
            if not _wished:
                _set_by_runs.clear()
