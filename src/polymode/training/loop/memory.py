"""How much memory there is for what a run wants to hold at once."""

from collections.abc import Sequence
from pathlib import Path

import torch

from polymode.data import ArrayData, Data
from polymode.errors import InputError
from polymode.trees import Tree, leaves

MEMORY_INFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be had on a device; None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = MEMORY_INFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def check_whole_fits(sources: Sequence[Data], example: Tree, device: torch.device, where: str) -> None:
    """Raise an ``InputError`` where data sets that a step needs as a whole cannot be held at once.

    example: inputs [1, ...]. Data in memory are gathered once more for the network.
    """
    each = sum(leaf.numel() * leaf.element_size() for leaf in leaves(example))
    distinct = {id(source): source.num_examples for source in sources}
    needed, free = each * sum(distinct.values()), free_bytes(device)
    if free is not None and needed > free:
        kind = "examples" if all(isinstance(s, ArrayData) for s in sources) else "examples of a loader"
        raise InputError(
            f"Each step of {where} needs all {sum(distinct.values()):,} {kind} at once, {needed / 2**30:.1f} "
            f"GB of inputs, and {free / 2**30:.1f} GB are free: take fewer examples, or a method that sees "
            "minibatches (microcanonical does with minibatch=True)."
        )
