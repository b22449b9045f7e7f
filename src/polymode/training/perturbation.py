"""Random data for each chain, the same in every epoch: what turns optima into posterior samples."""

from dataclasses import replace

import torch
from torch import Tensor

from polymode.likelihoods import Likelihood
from polymode.seeds import example_keys, open_uniform
from polymode.training.batches import Batch, Piece
from polymode.trees import map_tree


def perturbed(batch: Batch, seeds: Tensor, likelihood: Likelihood) -> Batch:
    """The batch with each chain's own random targets or weights of examples.

    seeds: [G], one a chain. An example's randomness depends on its chain's seed and its place in the data
    set alone, so that every epoch shows a chain the same data.
    """
    return replace(
        batch, pieces=[_perturbed(piece, seeds[piece.groups], likelihood) for piece in batch.pieces]
    )


def _perturbed(piece: Piece, seeds: Tensor, likelihood: Likelihood) -> Piece:
    piece = piece if piece.has_groups else _for_each_group(piece, len(seeds))
    keys = example_keys(seeds, piece.rows).to(piece.targets.device)

    def draw(count: int) -> Tensor:
        return open_uniform(keys.flatten(), count).unflatten(0, keys.shape)

    targets, weights = likelihood.randomised(piece.targets, draw)
    if weights is not None and piece.weights is not None:
        weights = weights * piece.weights
    return replace(piece, targets=targets, weights=piece.weights if weights is None else weights)


def _for_each_group(piece: Piece, count: int) -> Piece:
    """The same examples for every group, without copying the inputs."""

    def expand(tensor: Tensor) -> Tensor:
        return tensor.expand(count, *tensor.shape)

    return replace(
        piece,
        inputs=map_tree(expand, piece.inputs),
        targets=expand(piece.targets),
        weights=None if piece.weights is None else expand(piece.weights),
        rows=expand(piece.rows),
        has_groups=True,
    )


def draw_data_seed(generator: torch.Generator) -> Tensor:
    """The seed of one chain's random data, [1]."""
    return torch.randint(2**62, (1,), generator=generator)
