"""One exploration, then phases that end in a member each: how epochs are divided, and how rates go."""

from typing import Literal, get_args

from polymode.errors import InputError, unknown_name
from polymode.schedules import Cosine, Pieces, Scaled, Schedule
from polymode.training.contract.phase import Keep, KeepBest, keep_rule

Rates = Literal["stepwise", "cosine", "linear-fge", "linear-1"]

PHASE_EPOCHS = (
    "of each phase after the exploration, which takes what is left; None means two thirds of what the "
    "exploration takes (100 and 150 in the paper)"
)
RATES = (
    'how the rate goes in each phase after the exploration: `"stepwise"` (high in its first half, low in its '
    'second), `"cosine"` (from high to low), `"linear-1"` (the same, linearly) or `"linear-fge"` (up and '
    "down again)"
)
HIGH, LOW = (
    f"the {name} rate of those phases, as a share of that of the exploration" for name in ("high", "low")
)


def check_rates(rates: str, high: float, low: float) -> None:
    """Check the options of ``phase_schedule`` when a method is made."""
    if rates not in get_args(Rates):
        raise unknown_name("rates", rates, get_args(Rates))
    if not 0 < low <= high:
        raise InputError(f"The rates of a phase need 0 < low <= high, got low={low!r} and high={high!r}.")


def phase_schedule(rates: Rates, high: float, low: float, *, first: bool) -> Schedule:
    """The schedule of a phase after the exploration, whose rate is 1; first: no other phase comes before."""
    if rates == "stepwise":
        return Pieces(((0, high), (0.5, high), (0.5, low), (1, low)))
    if rates == "cosine":
        return Scaled(Cosine(final=low / high), high)
    if rates == "linear-1":
        return Pieces(((0, high), (1, low)))
    return Pieces(((0, 1.0 if first else low), (0.5, high), (1, low)))


def phase_keep(keep: Keep, epochs: int) -> KeepBest | None:
    """Which epoch of a phase is kept; "best" is that of the lowest error in its second half."""
    return KeepBest("error", from_epoch=epochs // 2 + 1) if keep == "best" else keep_rule(keep)


def divide_epochs(epochs: int, num_phases: int, phase_epochs: int | None) -> tuple[int, int]:
    """Epochs of the exploration, and of each of the phases after it.

    >>> divide_epochs(450, 3, None), divide_epochs(450, 3, 40)
    ((150, 100), (330, 40))
    """
    each = phase_epochs or max(1, int(epochs / (num_phases + 1.5)))
    first = epochs - num_phases * each
    if first < 1:
        length = f"{each} epoch{'s'[: each > 1]}"
        given = f"{num_phases} phases of {length}" if num_phases > 1 else f"a phase of {length}"
        raise InputError(
            f"{epochs} epochs are too few for an exploration of at least one epoch and {given}: raise epochs "
            "(or the budget), or ask for fewer members or shorter phases."
        )
    return first, each


def num_blocks(number: int, most: int) -> int:
    """Into how many stretches of equal length, each of at most so many, a number is divided."""
    return -(-number // most)


def in_blocks(number: int, most: int) -> list[tuple[int, int]]:
    """How often which length: stretches of ``most``, and what is left.

    >>> in_blocks(60, 25)
    [(2, 25), (1, 10)]
    """
    return [(count, size) for count, size in ((number // most, most), (1, number % most)) if count and size]


def equal_parts(epochs: int, number: int) -> list[int]:
    """Epochs of each of some parts of one training; those that are left over go to the first ones.

    >>> equal_parts(11, 3)
    [4, 4, 3]
    """
    return [epochs // number + (place < epochs % number) for place in range(number)]
