"""Progress of runs: nested bars on a terminal, plain lines or JSON lines elsewhere, or silence."""

import json
import sys
import time
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# How often a bar moves within an epoch, and a line is printed, at most.
BAR_SECONDS, LINE_SECONDS = 0.1, 5.0


class Reporter(Protocol):
    """What a run tells while it goes on; ``epochs`` counts those done, with the fraction of the present.

    A run either begins, advances and ends, or is skipped because it is finished already.
    """

    def begin(self, title: str, num_epochs: int, done: float = 0) -> None: ...

    def advance(self, epochs: float, detail: str) -> None: ...

    def end(self, title: str) -> None: ...

    def skip(self, title: str) -> None: ...

    def say(self, message: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Says nothing."""

    def begin(self, title: str, num_epochs: int, done: float = 0) -> None: ...

    def advance(self, epochs: float, detail: str) -> None: ...

    def end(self, title: str) -> None: ...

    def skip(self, title: str) -> None: ...

    def say(self, message: str) -> None: ...

    def close(self) -> None: ...


class Bars:
    """A bar for the run and, with ``num_runs``, one above it for all runs, with the time that remains."""

    def __init__(self, num_runs: int = 0) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._runs, self._num_runs = None, num_runs
        if num_runs:
            self._runs = self.progress.add_task("all runs", total=num_runs, amount="", detail="")
        self._task: Any = None
        self._total, self._done = 1, 0
        self._next = 0.0

    def begin(self, title: str, num_epochs: int, done: float = 0) -> None:
        self.progress.start()
        self._total = num_epochs
        self._task = self.progress.add_task(title, total=num_epochs, amount="", detail="")
        self.progress.update(self._task, completed=done)
        self._show_runs(0.0)

    def advance(self, epochs: float, detail: str) -> None:
        now = time.monotonic()
        if now < self._next and epochs < self._total:
            return
        self._next = now + BAR_SECONDS
        digits = 0 if self._total >= 100 else 1
        amount = f"{epochs:.{digits}f}/{self._total} epochs"
        self.progress.update(self._task, completed=epochs, detail=detail, amount=amount)
        self._show_runs(epochs / self._total)

    def _show_runs(self, fraction: float) -> None:
        if self._runs is not None:
            amount = f"{min(self._done + 1, self._num_runs)} of {self._num_runs}"
            self.progress.update(self._runs, completed=self._done + fraction, amount=amount)

    def end(self, title: str) -> None:
        self._done += 1
        if self._task is not None:
            self.progress.remove_task(self._task)
            self._task = None
        if self._runs is None:
            self.progress.stop()
        self._show_runs(0.0)

    def skip(self, title: str) -> None:
        self._done += 1
        self._show_runs(0.0)

    def say(self, message: str) -> None:
        self.progress.console.print(message, highlight=False, markup=False)

    def close(self) -> None:
        self.progress.stop()


class Lines:
    """Plain lines, at most one every few seconds, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self._title, self._total = "", 1
        self._began = self._next = 0.0
        self._from = (0.0, 0.0)  # since when the time is taken, and the epochs done then

    def begin(self, title: str, num_epochs: int, done: float = 0) -> None:
        self._title, self._total = title, num_epochs
        self._began = time.monotonic()
        self._from = self._began, done
        self._next = self._began + LINE_SECONDS
        self.say(
            f"{title}: {f'goes on at epoch {round(done, 1):g} of' if done else 'begins,'} {num_epochs} epochs"
        )

    def advance(self, epochs: float, detail: str) -> None:
        now = time.monotonic()
        if epochs <= self._from[1]:  # workers begin, or go on from checkpoints that are further back
            self._from = now, epochs
        if now >= self._next:
            self._next = now + LINE_SECONDS
            line = f"{self._title}: epoch {epochs:.1f}/{self._total}, {detail}"
            began, before = self._from
            if epochs > before:
                line += f", eta {(now - began) * (self._total - epochs) / (epochs - before):.0f} s"
            self.say(line)

    def end(self, title: str) -> None:
        self.say(f"{title}: done in {time.monotonic() - self._began:.1f} s")

    def skip(self, title: str) -> None:
        self.say(f"{title}: finished earlier, read back")

    def say(self, message: str) -> None:
        print(message, file=self.stream, flush=True)

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line: for programs that watch."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self._title, self._total = "", 1
        self._next = 0.0

    def begin(self, title: str, num_epochs: int, done: float = 0) -> None:
        self._title, self._total = title, num_epochs
        self._write(progress="begin", run=title, num_epochs=num_epochs)

    def advance(self, epochs: float, detail: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_SECONDS
            self._write(
                progress="epoch", run=self._title, epochs=epochs, num_epochs=self._total, detail=detail
            )

    def end(self, title: str) -> None:
        self._write(progress="end", run=title)

    def skip(self, title: str) -> None:
        self._write(progress="skip", run=title)

    def say(self, message: str) -> None:
        self._write(message=message)

    def _write(self, **content: Any) -> None:
        print(json.dumps(content), file=self.stream, flush=True)

    def close(self) -> None: ...


def reporter_for(show: bool | Reporter) -> Reporter:
    """The reporter that ``fit(progress=...)`` means: a bar on a terminal, silence elsewhere."""
    if not isinstance(show, bool):
        return show
    return Bars() if show and sys.stderr.isatty() else Silent()
