"""Batches of examples for many chains at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from polymode.data import Examples
from polymode.errors import InputError
from polymode.trees import map_tree


@dataclass(frozen=True)
class Piece:
    """Batches of equal size for neighbouring groups.

    examples: [G, B, ...], or [B, ...] where all groups see the same ones.
    rows: the examples' places in their own data set, of the same leading axes.
    joined: examples that one pass through the network takes at once.
    whole: examples of the batch where several ranks share it, and the place of the first of these in it.
    counts: whether they do; a rank that has no share of a small batch runs one example for nothing.
    """

    groups: slice
    examples: Examples
    rows: Tensor
    has_groups: bool
    joined: int = 1
    whole: tuple[int, int] | None = None
    counts: bool = True

    @property
    def batch_size(self) -> int:
        return self.examples.targets.shape[1 if self.has_groups else 0]

    @property
    def num_passes(self) -> int:
        """Passes through the network that the batch takes, of all ranks: what a budget counts."""
        return (self.batch_size if self.whole is None else self.whole[0]) // self.joined


@dataclass(frozen=True)
class Batch:
    """One minibatch of every active chain; cohorts are the sets of chains that step together."""

    pieces: Sequence[Piece]
    cohorts: Sequence[int]

    @property
    def groups(self) -> range:
        """The active chains; a step must leave everything of the others alone, their generators too."""
        return range(self.pieces[0].groups.start, self.pieces[-1].groups.stop)

    def only(self, group: int) -> "Batch":
        """The part of the batch that belongs to one group."""
        for piece in self.pieces:
            if piece.groups.start <= group < piece.groups.stop:
                examples, rows = piece.examples, piece.rows
                if piece.has_groups:
                    row = group - piece.groups.start
                    examples, rows = map_tree(lambda t, row=row: t[row : row + 1], (examples, rows))
                only = replace(piece, groups=slice(group, group + 1), examples=examples, rows=rows)
                return replace(self, pieces=[only])
        raise InputError(f"Group {group} is not active in this batch.")
