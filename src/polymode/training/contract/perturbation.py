"""Random data for each chain, the same in every epoch: what turns optima into posterior samples."""

from dataclasses import replace

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.likelihoods import Likelihood
from polymode.seeds import example_keys, open_uniform
from polymode.training.contract.batch import Batch, Piece
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
    if piece.examples.weights is not None:
        # A multiplicity w needs noise of σ/√w, or a weight of Gamma(w): the law below would be another one.
        raise InputError("perturb_data=True and sample weights cannot be combined: leave one of them out.")
    examples, rows = piece.examples, piece.rows
    if not piece.has_groups:  # the same examples for every group, without copying the inputs
        examples, rows = map_tree(lambda t: t.expand(len(seeds), *t.shape), (examples, rows))
    keys = example_keys(seeds, rows).to(examples.targets.device)

    def draw(count: int) -> Tensor:
        return open_uniform(keys.flatten(), count).unflatten(0, keys.shape)

    targets, weights = likelihood.randomised(examples.targets, draw)
    examples = examples._replace(targets=targets, weights=weights)
    return replace(piece, examples=examples, rows=rows, has_groups=True)


def draw_data_seed(generator: torch.Generator) -> Tensor:
    """The seed of one chain's random data, [1]."""
    return torch.randint(2**62, (1,), generator=generator)
