"""Learning-rate schedules: functions of progress that multiply the base rate.

Any callable ``(Progress) -> float`` is a schedule; those below are plain dataclasses, so that a run
can be written down and read back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from polymode.errors import InputError, shortened


@dataclass(frozen=True)
class Progress:
    """Where a phase stands: ``step`` of ``num_steps`` (counted from 0) in ``num_epochs`` epochs."""

    step: int
    num_steps: int
    num_epochs: int

    @property
    def fraction(self) -> float:
        """Progress in [0, 1)."""
        return self.step / self.num_steps

    @property
    def epoch(self) -> float:
        """Epochs completed, with the fraction of the present one."""
        return self.fraction * self.num_epochs


Schedule = Callable[[Progress], float]

MOST = 1e6  # times the base rate, and epochs: what is more is a slip of the pen


def _check(kind: object, **values: Any) -> None:
    """Raise an ``InputError`` unless all values are numbers from 0 that a rate can be multiplied by."""
    for name, value in values.items():
        number: Any = value
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= number <= MOST:
            raise InputError(
                f"{name} of {type(kind).__name__} must be a number from 0 to {MOST:g}, got "
                f"{shortened(repr(value))}."
            )


def _check_schedule(kind: object, value: Any) -> None:
    if not callable(value) or isinstance(value, type):
        raise InputError(
            f"{type(kind).__name__} takes a schedule, such as Cosine(), got {shortened(repr(value))}."
        )


@dataclass(frozen=True)
class Constant:
    """Always ``factor`` times the base rate."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        _check(self, factor=self.factor)

    def __call__(self, progress: Progress) -> float:
        return self.factor


@dataclass(frozen=True)
class Cosine:
    """final + ½ (1 − final)(1 + cos πt): from the base rate to ``final`` times it."""

    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, final=self.final)

    def __call__(self, progress: Progress) -> float:
        return self.final + 0.5 * (1 - self.final) * (1 + math.cos(math.pi * progress.fraction))


@dataclass(frozen=True)
class Drops:
    """Multiply by ``factor`` at each of the ``epochs``."""

    epochs: tuple[float, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, tuple | list):
            raise InputError(f"Drops takes a tuple of epochs, such as (60, 90), got {self.epochs!r}.")
        for epoch in self.epochs:
            _check(self, epochs=epoch)
        _check(self, factor=self.factor)
        if self.factor > 1 and len(self.epochs) * math.log10(self.factor) > math.log10(MOST):
            raise InputError(f"Drops by {self.factor!r} at {len(self.epochs)} epochs rise beyond {MOST:g}.")

    def __call__(self, progress: Progress) -> float:
        return self.factor ** sum(progress.epoch >= epoch for epoch in self.epochs)


@dataclass(frozen=True)
class Linear:
    """Constant until epoch ``start``, linear to ``final`` times the base rate at ``end``, constant after."""

    start: float
    end: float
    final: float

    def __post_init__(self) -> None:
        _check(self, start=self.start, end=self.end, final=self.final)
        if not 0 <= self.start < self.end:
            raise InputError(f"Linear needs 0 <= start < end, got {self.start} and {self.end}.")

    def __call__(self, progress: Progress) -> float:
        done = (progress.epoch - self.start) / (self.end - self.start)
        return 1 + (self.final - 1) * min(max(done, 0.0), 1.0)


@dataclass(frozen=True)
class Warmup:
    """Linear from near zero during the first ``epochs``, times the schedule ``then``."""

    epochs: float
    then: Schedule = Constant()

    def __post_init__(self) -> None:
        _check(self, epochs=self.epochs)
        _check_schedule(self, self.then)

    def __call__(self, progress: Progress) -> float:
        steps = self.epochs * progress.num_steps / progress.num_epochs
        return min(1.0, (progress.step + 1) / max(steps, 1.0)) * self.then(progress)


@dataclass(frozen=True)
class Pieces:
    """Straight lines through ``points`` (fraction of the phase, factor), constant before and after them.

    Two points at one fraction are a jump.

    >>> halves = Pieces(((0, 1.0), (0.5, 1.0), (0.5, 0.1), (1, 0.1)))
    >>> [halves(Progress(step, 4, 1)) for step in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        pairs = isinstance(self.points, tuple | list) and all(
            isinstance(point, tuple | list) and len(point) == 2 for point in self.points
        )
        if not pairs:
            raise InputError(f"Pieces takes points (fraction, factor), got {shortened(repr(self.points))}.")
        for fraction, factor in self.points:
            _check(self, fraction=fraction, factor=factor)
        fractions = [point[0] for point in self.points]
        if not fractions or sorted(fractions) != fractions or not 0 <= fractions[0] <= fractions[-1] <= 1:
            raise InputError(
                f"Pieces needs points (fraction, factor) whose fractions go from 0 to 1, got {self.points!r}."
            )

    def __call__(self, progress: Progress) -> float:
        at = progress.fraction
        before = [point for point in self.points if point[0] <= at]
        after = [point for point in self.points if point[0] > at]
        if not before or not after:
            return float(before[-1][1] if before else after[0][1])
        (start, low), (end, high) = before[-1], after[0]
        return low + (high - low) * (at - start) / (end - start)


@dataclass(frozen=True)
class Triangle:
    """From ``low`` linearly to ``high`` in the middle of a cycle and back, ``cycles`` times in a phase.

    >>> [Triangle(0.25)(Progress(step, 4, 1)) for step in range(4)]
    [0.25, 0.625, 1.0, 0.625]
    """

    low: float
    high: float = 1.0
    cycles: int = 1

    def __post_init__(self) -> None:
        _check(self, low=self.low, high=self.high)
        if not 0 <= self.low <= self.high:
            raise InputError(f"Triangle needs 0 <= low <= high, got low={self.low!r} and high={self.high!r}.")
        if isinstance(self.cycles, bool) or not isinstance(self.cycles, int) or self.cycles < 1:
            raise InputError(f"Triangle needs a whole number of cycles, got {self.cycles!r}.")

    def __call__(self, progress: Progress) -> float:
        at = progress.fraction * self.cycles % 1
        return self.low + (self.high - self.low) * (1 - abs(2 * at - 1))


@dataclass(frozen=True)
class Scaled:
    """``factor`` times another schedule."""

    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        _check_schedule(self, self.schedule)
        _check(self, factor=self.factor)

    def __call__(self, progress: Progress) -> float:
        return self.factor * self.schedule(progress)


@dataclass(frozen=True)
class Part:
    """A schedule of ``epochs`` epochs, seen by the stretch of them that begins after ``before``."""

    schedule: Schedule
    before: int
    epochs: int

    def __call__(self, progress: Progress) -> float:
        each = progress.num_steps // progress.num_epochs
        return self.schedule(Progress(self.before * each + progress.step, self.epochs * each, self.epochs))


# Those that a run is described with; a ``Part`` is made of one by the methods that need it.
SCHEDULES = (Constant, Cosine, Drops, Linear, Pieces, Scaled, Triangle, Warmup)
