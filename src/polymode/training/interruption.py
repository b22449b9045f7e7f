"""Ctrl-C as a request that is honoured between two steps, where the state of a run is whole."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interruption:
    """While active, the first Ctrl-C is kept until ``check`` is called; a second one ends at once.

    Signals belong to the main thread: elsewhere, or where someone else handles Ctrl-C, nothing changes.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise the ``KeyboardInterrupt`` that was asked for."""
        if self.asked:
            raise KeyboardInterrupt

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if self.asked and kind is None:  # asked for after the last step: the run is complete, but say so
            raise KeyboardInterrupt
