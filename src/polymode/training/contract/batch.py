"""Batches of examples for many chains at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.posteriors.network import Network
from polymode.trees import Tree, map_tree


@dataclass(frozen=True)
class Piece:
    """Batches of equal size for neighbouring groups.

    inputs, targets and weights are [G, B, ...], or [B, ...] where all groups see the same examples.
    rows: the examples' places in their own data set, of the same leading axes.
    """

    groups: slice
    inputs: Tree
    targets: Tensor
    weights: Tensor | None
    rows: Tensor
    has_groups: bool

    @property
    def batch_size(self) -> int:
        return self.targets.shape[1 if self.has_groups else 0]

    def on(self, device: torch.device, network: Network) -> "Piece":
        """The same examples on a device, their inputs in the network's memory format."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        inputs = network.arrange(map_tree(move, self.inputs), has_groups=self.has_groups)
        weights = None if self.weights is None else move(self.weights)
        return replace(self, inputs=inputs, targets=move(self.targets), weights=weights)


@dataclass(frozen=True)
class Batch:
    """One minibatch of every active chain; cohorts are the sets of chains that step together."""

    pieces: Sequence[Piece]
    cohorts: Sequence[int]

    @property
    def groups(self) -> range:
        """The active chains; a step must leave everything of the others alone, their generators too."""
        return range(self.pieces[0].groups.start, self.pieces[-1].groups.stop)

    def on(self, device: torch.device, network: Network) -> "Batch":
        return replace(self, pieces=[piece.on(device, network) for piece in self.pieces])

    def only(self, group: int) -> "Batch":
        """The part of the batch that belongs to one group."""
        for piece in self.pieces:
            if piece.groups.start <= group < piece.groups.stop:
                row = group - piece.groups.start
                part = replace(piece, groups=slice(group, group + 1))
                if piece.has_groups:

                    def cut(tensor: Tensor, row: int = row) -> Tensor:
                        return tensor[row : row + 1]

                    weights = None if piece.weights is None else cut(piece.weights)
                    inputs, rows = map_tree(cut, piece.inputs), cut(piece.rows)
                    part = replace(
                        part, inputs=inputs, targets=cut(piece.targets), weights=weights, rows=rows
                    )
                return replace(self, pieces=[part])
        raise InputError(f"Group {group} is not active in this batch.")
