"""How much memory there is for what a run wants to hold at once."""

from collections.abc import Sequence

import torch

from polymode.data import ArrayData, Data
from polymode.errors import InputError
from polymode.sizes import ALWAYS_THERE, free_memory, said
from polymode.training.contract.state import State
from polymode.trees import Tree, leaves


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be had on a device; None where nobody tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_memory()


def bytes_of_a_chain(state: State, sources: Sequence[Data]) -> int:
    """The least that one of some chains has to hold: the data, its tensors, gradients and two moments."""
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves(list(state.tensors.values())))
    arrays = {id(data): data for data in sources if isinstance(data, ArrayData)}
    rows = sum(
        leaf.numel() * leaf.element_size()
        for data in arrays.values()
        for leaf in leaves((data.inputs, data.targets))
    )
    return rows + 4 * size // state.members.num_groups


def check_chains_fit(state: State, number: int, device: torch.device, method: str) -> None:
    """Raise an ``InputError`` where so many chains like one with this state cannot be held at once."""
    each = sum(leaf.numel() * leaf.element_size() for leaf in leaves(list(state.tensors.values())))
    free = free_bytes(device)
    if free is not None and each * number > max(free, ALWAYS_THERE):
        raise InputError(
            f"{number:,} chains of {method} side by side need at least {said(each * number)} of memory, "
            f"{said(each)} each, and {said(free)} are free: train fewer, take a method that finishes one "
            "member after another (sequential_anchored), or divide them among machines (engine=...)."
        )


def check_whole_fits(
    sources: Sequence[Data], num_chains: int, example: Tree, device: torch.device, where: str
) -> None:
    """Raise an ``InputError`` where data sets that a step needs as a whole cannot be held at once.

    example: inputs [1, ...]. Data in memory are gathered once more for the network: once for all chains on
    one data set, for every chain where there are several.
    """
    each = sum(leaf.numel() * leaf.element_size() for leaf in leaves(example))
    several = len({id(source) for source in sources}) > 1
    number = num_chains * sum(s.num_examples for s in sources) if several else sources[0].num_examples
    needed, free = each * number, free_bytes(device)
    if free is not None and needed > free:
        raise InputError(
            f"Each step of {where} needs all {number:,} examples at once, {needed / 2**30:.1f} GB of inputs, "
            f"and {free / 2**30:.1f} GB are free: take fewer examples (or data sets one at a time), or a "
            "method that sees minibatches (microcanonical does with minibatch=True)."
        )
