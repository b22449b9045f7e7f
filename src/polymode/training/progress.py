"""Progress of a run: a bar on a terminal, silence elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """Epochs of all phases as one bar, with the phase, the mean loss and the time that remains."""

    def __init__(self, title: str, num_epochs: int, *, show: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} epochs"),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (show and sys.stderr.isatty()),
            transient=True,
        )
        self._task = self._progress.add_task(title, total=num_epochs, detail="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, epochs: float, detail: str) -> None:
        self._progress.update(self._task, completed=epochs, detail=detail)
