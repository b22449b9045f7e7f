"""Trees of tensors: a tensor, None, or a tuple, list or dictionary of trees."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from polymode.errors import InputError

Tree = Any


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply ``function`` to each tensor of ``tree``, beside the same place of the others; None stays None."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if tree is None:
        return None
    if isinstance(tree, (tuple, list)):  # faster than a union
        if others:
            parts = [map_tree(function, *parts) for parts in zip(tree, *others, strict=True)]
        else:
            parts = [map_tree(function, part) for part in tree]
        make: Any = getattr(tree, "_make", type(tree))  # a named tuple is made of its parts one by one
        return make(parts)
    if isinstance(tree, dict):
        return {
            key: map_tree(function, value, *(other[key] for other in others)) for key, value in tree.items()
        }
    raise InputError(
        f"Expected a tensor or a tuple, list or dictionary of tensors, got {type(tree).__name__}."
    )


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors of a tree in order."""
    found: list[Tensor] = []
    map_tree(found.append, tree)
    yield from found


def filled(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    """A tree of the same form with other tensors, in the order of ``leaves``."""
    values = iter(tensors)
    return map_tree(lambda _: next(values), tree)


def length(tree: Tree) -> int:
    """Length of the first axis, which all tensors of the tree must share."""
    lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves(tree)}
    if len(lengths) != 1 or None in lengths:
        raise InputError(f"Tensors that belong together differ in length: {sorted(map(str, lengths))}.")
    return lengths.pop()  # type: ignore[return-value]  # None is excluded above
