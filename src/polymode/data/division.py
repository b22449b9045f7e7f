"""Rows of a data set in two parts: at random, by class, by group, or in the order of time."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polymode.data.sources import ArrayData
from polymode.data.task import Split, Task
from polymode.errors import require
from polymode.likelihoods import make_likelihood
from polymode.seeds import derive_generator

# What is held out of the training rows to choose epochs by, unless told otherwise; of large data sets less.
VALIDATION_SHARE, MOST_VALIDATION = 0.15, 10_000


def divided(
    num_rows: int,
    num_last: int,
    generator: torch.Generator,
    *,
    labels: Tensor | None = None,
    groups: Tensor | None = None,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows of the first part and of the last one, which has about ``num_last`` of them.

    labels: classes that both parts have in the same proportions; a class of one row is in the first part.
    groups: rows of one group stay together. ordered: the last rows are the last part, and nothing is
    shuffled. Otherwise rows are drawn.
    """
    require(0 < num_last < num_rows, f"{num_last} of {num_rows} rows cannot be held out.")
    if ordered:
        return torch.arange(num_rows - num_last), torch.arange(num_rows - num_last, num_rows)
    order = torch.randperm(num_rows, generator=generator)
    if groups is not None:
        return _by_group(order, groups, num_last)
    if labels is not None:
        return _by_class(order, labels, num_last)
    return order[: num_rows - num_last], order[num_rows - num_last :]


def _by_group(order: Tensor, groups: Tensor, num_last: int) -> tuple[Tensor, Tensor]:
    _, first_seen = torch.unique(groups[order], return_inverse=True)
    # Groups in the order in which their first rows were drawn: those that bring the part nearer its size.
    names = list(dict.fromkeys(first_seen.tolist()))
    require(len(names) > 1, "There is one group only, whose rows stay together: nothing can be held out.")
    sizes = torch.bincount(first_seen)
    last, taken = [], 0
    for name in names[:-1]:
        size = int(sizes[name])
        if abs(taken + size - num_last) <= num_last - taken:  # nearer than without it
            last.append(name)
            taken += size
    last = last or [min(names, key=lambda name: int(sizes[name]))]
    is_last = torch.isin(first_seen, torch.tensor(last))
    return order[~is_last], order[is_last]


def _by_class(order: Tensor, labels: Tensor, num_last: int) -> tuple[Tensor, Tensor]:
    labels = labels[order]
    # Every class is cut at the same place between its rows, as near as whole rows allow.
    _, label, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    by_label = torch.argsort(label, stable=True)
    starts = counts.cumsum(0) - counts
    within = torch.empty(len(order), dtype=torch.float64)  # the place of a row among those of its class
    within[by_label] = (torch.arange(len(order)) - starts[label[by_label]]).double()
    place = (within + 0.5) / counts[label]
    place[within == 0] = -1.0  # no class may be without a row to learn from
    require(len(counts) < len(order), "Every class has one row: there is none to test on. Give more rows.")
    cut = torch.argsort(place, stable=True, descending=True)[: min(num_last, len(order) - len(counts))]
    is_last = torch.zeros(len(order), dtype=torch.bool)
    is_last[cut] = True
    return order[~is_last], order[is_last]


def with_validation(task: Task, share: float | None = None) -> Task:
    """The task with a share of the training rows held out in every split that has no validation data.

    None takes ``VALIDATION_SHARE``, at most ``MOST_VALIDATION`` rows. Splits whose training data are no
    arrays in memory stay as they are. Test rows are never touched.
    """
    is_labels = make_likelihood(task.likelihood).reads == "labels"
    splits = [_held_out(split, share, is_labels, number) for number, split in enumerate(task.splits)]
    return replace(task, splits=splits)


def _held_out(split: Split, share: float | None, is_labels: bool, number: int) -> Split:
    train = split.train
    if split.validation is not None or not isinstance(train, ArrayData):
        return split
    count = round(train.num_examples * (VALIDATION_SHARE if share is None else share))
    count = min(count, MOST_VALIDATION) if share is None else count
    if not 0 < count < train.num_examples:
        require(
            share is None,
            f"A share of {share} of {train.num_examples} training examples is {count} to validate on, which "
            "leaves nothing on one side: give another share.",
        )
        return split
    return with_held_out(split, count, is_labels, derive_generator(0, "validation rows", number))


def with_held_out(split: Split, count: int, is_labels: bool, generator: torch.Generator) -> Split:
    """The split with about so many of its training rows to validate on: by class, by group or in order."""
    train = split.train
    assert isinstance(train, ArrayData)
    plain = is_labels and train.targets.ndim == 1 and not train.targets.is_floating_point()
    first, last = divided(
        train.num_examples,
        count,
        generator,
        labels=train.targets if plain else None,
        groups=split.groups,
        ordered=split.ordered,
    )
    groups = None if split.groups is None else split.groups[first]
    return replace(split, train=train.taken(first), validation=train.taken(last), groups=groups)


def group_numbers(names: Sequence[str]) -> Tensor:
    """A number for every group, in the order in which they occur."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])
