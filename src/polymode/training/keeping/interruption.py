"""Ctrl-C as a request that is honoured between two steps, where the state of a run is whole."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Interruption:
    """While active, the first Ctrl-C is kept until ``check`` is called; a second one ends at once.

    The same holds for a termination, where the program has it raise ``KeyboardInterrupt`` too. Signals belong
    to the main thread: elsewhere, and for signals that someone else handles, nothing changes.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held: list[signal.Signals] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is signal.default_int_handler:
                    signal.signal(number, self._ask)
                    self._held.append(number)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._let_go()

    def _let_go(self) -> None:
        for number in self._held:
            signal.signal(number, signal.default_int_handler)

    def check(self, anybody: Callable[[bool], bool] = bool) -> None:
        """Raise the ``KeyboardInterrupt`` that was asked for; anybody: whether others were asked, too."""
        if anybody(self.asked):
            raise KeyboardInterrupt

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._let_go()
        if self.asked and kind is None:  # asked for after the last step: the run is complete, but say so
            raise KeyboardInterrupt
