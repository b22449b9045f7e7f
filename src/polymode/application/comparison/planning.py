"""What a comparison will cost on any number of workers, from what was measured of its methods."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polymode.storage import finite
from polymode.training.loop.forecast import Forecast
from polymode.training.loop.parts import shares_of

Size = tuple[int, int]  # data sets, chains on each


def divided(size: Size, workers: int) -> list[Size]:
    """The parts that a run of some size is divided into among so many workers."""
    shares = shares_of(size[0], range(size[1]), workers)
    return [(len(share.data_sets), len(share.chains)) for share in shares]


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last of some jobs ends, each begun in turn on whichever worker is free."""
    busy = [0.0] * workers
    for each in seconds:
        heapq.heapreplace(busy, busy[0] + each)
    return max(busy)


@dataclass(frozen=True)
class Measured:
    """A forecast that a fresh process has made.

    base_bytes: that it held before it had read any data. start_seconds: until then.
    """

    forecast: Forecast
    base_bytes: int
    start_seconds: float

    @property
    def size(self) -> Size:
        return self.forecast.num_data_sets, self.forecast.num_chains


@dataclass(frozen=True)
class MethodPlan:
    """What one method will cost.

    whole: all of it in one process. part: the smallest part that it is divided into, where it is; in between
    lies a straight line in the number of chains. passes: of a prediction.
    """

    label: str
    passes: int
    whole: Measured
    part: Measured | None = None

    @property
    def size(self) -> Size:
        return self.whole.size

    def seconds_of(self, size: Size) -> float:
        """Seconds of a part with so many data sets and chains."""
        return self._between(size, *(each.forecast.seconds for each in self._ends))

    def memory_of(self, size: Size) -> int:
        """Most bytes that the process of such a part holds."""
        return round(self._between(size, *(each.forecast.memory_bytes for each in self._ends)))

    @property
    def _ends(self) -> tuple[Measured, Measured]:
        return self.part or self.whole, self.whole

    def _between(self, size: Size, small: float, large: float) -> float:
        few, many = (each.size[0] * each.size[1] for each in self._ends)
        if few == many:
            return large
        return small + (large - small) * (size[0] * size[1] - few) / (many - few)

    def seconds_on(self, workers: int) -> float:
        """Seconds of training on so many workers that do nothing else."""
        return _on_workers([self], workers)

    def memory_on(self, workers: int) -> int:
        """Most bytes that one of the workers holds."""
        return max(self.memory_of(size) for size in divided(self.size, workers))

    def config(self, workers: Sequence[int]) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "label": self.label,
            "passes": self.passes,
            "base_bytes": self.whole.base_bytes,
            "forecast": self.whole.forecast.config(),
            "part": None if self.part is None else self.part.forecast.config(),
            "on_workers": {
                str(n): {
                    "seconds": self.seconds_on(n),
                    "memory_bytes": self.memory_on(n),
                    "parts": [list(size) for size in divided(self.size, n)],
                }
                for n in workers
            },
        }


@dataclass(frozen=True)
class Plan:
    """What a comparison will cost. refused: labels of methods that nothing could be measured of, and why."""

    title: str
    methods: Sequence[MethodPlan]
    refused: Mapping[str, str]
    workers: Sequence[int]

    @property
    def judging_seconds(self) -> float:
        return sum(method.whole.forecast.judging.seconds for method in self.methods)

    def seconds_on(self, workers: int) -> float:
        """Until all is trained, on workers that take its parts in turn, and judged, in one process."""
        return _on_workers(self.methods, workers) + self.judging_seconds if self.methods else 0.0

    def config(self) -> dict[str, Any]:
        """All of it as JSON values."""
        numbers = [method.whole.forecast for method in self.methods]
        return finite(
            {
                "title": self.title,
                "workers": list(self.workers),
                "methods": [method.config(self.workers) for method in self.methods],
                "refused": dict(self.refused),
                "total": {
                    "member_epochs": sum(each.member_epochs * each.num_data_sets for each in numbers),
                    "judging_seconds": self.judging_seconds,
                    "seconds_on_workers": {str(n): self.seconds_on(n) for n in self.workers},
                    "disk_running": disk_running(numbers),
                    "disk_finished": sum(each.disk_finished for each in numbers),
                },
            }
        )


def disk_running(forecasts: Sequence[Forecast]) -> int:
    """Most bytes on disk at once, of runs that follow each other: the finished ones stay."""
    finished, most = 0, 0
    for each in forecasts:
        most = max(most, finished + each.disk_running)
        finished += each.disk_finished
    return most


def _on_workers(methods: Sequence[MethodPlan], workers: int) -> float:
    jobs = [method.seconds_of(size) for method in methods for size in divided(method.size, workers)]
    start = max(method.whole.start_seconds for method in methods) if workers > 1 else 0.0
    return start + makespan(jobs, workers)
