"""Errors that name the thing, the value seen, what is allowed and what to do."""

import difflib
import math
from collections.abc import Iterable, Sequence

# Values that a message repeats may be of any length, such as a cell of a table.
LONGEST_MESSAGE, LONGEST_VALUE = 2000, 200


def shortened(text: str, longest: int = LONGEST_VALUE) -> str:
    """The text, without its middle where it is long."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"


class PolymodeError(Exception):
    """Root of every error raised on purpose by this library."""

    def __str__(self) -> str:
        return shortened(super().__str__(), LONGEST_MESSAGE)


class InputError(PolymodeError, ValueError):
    """An argument, a data set or a module that cannot be used as given."""


class CannotRedraw(InputError):
    """Weights that only the user knows how to draw."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason} Pass a function instead of the module: one that builds it with weights drawn anew, or "
            "lambda: copy.deepcopy(module) to start from these weights everywhere."
        )


class UnknownName(InputError):
    """A name that is not in the list it should be in."""


class NeedsData(PolymodeError):
    """A posterior whose draws need data was asked to draw without it."""


class NotCollapsible(PolymodeError):
    """A posterior that is not equal to any single network was asked to become one."""


class CannotVectorise(PolymodeError):
    """A module that the ``vmap`` backend cannot run, although it was demanded."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"The vmap backend cannot run this module: {reason} Use backend='loop', or "
            "backend='auto' to let a measurement choose."
        )


class CannotCompile(PolymodeError):
    """A computation that cannot be compiled here, or not rightly."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"The computation cannot be compiled: {reason}")


class CheckpointError(PolymodeError):
    """A saved run or posterior that is damaged, foreign or belongs to another network."""


class UntrustedImport(PolymodeError):
    """Code that a file of a run names, and that nobody at the keyboard has.

    again: the options of a command that name it again, with all else that would be refused next; none where
    no option stands for it.
    """

    def __init__(self, spec: str, source: str, again: Sequence[str]) -> None:
        self.again = again
        super().__init__(
            f"{source} wants {shortened(spec)!r} imported, which may run any code. Nothing that a run folder "
            "names is imported unless you name it too, or trust the folder."
        )


class NonFiniteLoss(PolymodeError, ArithmeticError):
    """A member's loss became infinite or NaN.

    posterior: the weights before that step, of several data sets a list; None where no member was finished.
    """

    posterior: object = None


def require(condition: bool, message: str) -> None:
    """Raise an ``InputError`` with the message unless the condition holds."""
    if not condition:
        raise InputError(message)


def require_positive(name: str, value: float) -> float:
    """Return a value that is a positive, finite number; otherwise raise an error that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{name} must be a positive number, got {value!r}.")
    return value


def require_whole(name: str, value: int, least: int = 1) -> int:
    """Return a whole number that is large enough; otherwise raise an error that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    return value


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> UnknownName:
    """Build the error for a name that is not in a list, with the nearest one that is."""
    allowed = sorted(allowed)
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    nearest = difflib.get_close_matches(str(name)[:LONGEST_VALUE].lower(), by_lower, n=1, cutoff=0.5)
    hint = f" Did you mean {by_lower[nearest[0]]!r}?" if nearest else ""
    return UnknownName(f"Unknown {kind} {shortened(repr(name))}.{hint} Known: {', '.join(allowed)}.")
