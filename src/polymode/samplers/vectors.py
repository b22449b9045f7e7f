"""The weights of every chain as one vector: where a sampler moves all of them at once."""

import itertools

import torch
from torch import Tensor

from polymode.networks.members import Tensors


def as_vectors(tensors: Tensors) -> Tensor:
    """Tensors [G, ...] side by side, [G, D]; copied."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors.values()], 1)


def views_of(vectors: Tensor, like: Tensors) -> Tensors:
    """The parts of vectors [G, D] in the shapes of the tensors that ``as_vectors`` was given, without copies.

    >>> both = {"weight": torch.ones(1, 2, 3), "bias": torch.zeros(1, 2)}
    >>> views_of(as_vectors(both), both)["bias"]
    tensor([[0., 0.]])
    """
    ends = itertools.accumulate(tensor[0].numel() for tensor in like.values())
    starts = itertools.chain([0], ends)
    return {
        name: vectors[:, start : start + tensor[0].numel()].view(len(vectors), *tensor.shape[1:])
        for (name, tensor), start in zip(like.items(), starts, strict=False)
    }
