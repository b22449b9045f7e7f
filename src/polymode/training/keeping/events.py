"""The event log of a run: one JSON object a line, only ever appended to, readable by anything."""

import itertools
import json
import re
import time
import warnings
import zlib
from collections.abc import Iterator
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from typing import Any

from polymode.errors import CheckpointError
from polymode.storage import writing

EVENTS = "events.jsonl"
GATHERING_SECONDS = 1.0  # that events wait for others, at most
_CRC = re.compile(r', "crc32": (\d+)}$')  # the end of a line: the CRC-32 of the line without it


class EventLog:
    """Appends events to ``events.jsonl`` in the folder of a run; those gathered wait for a second at most."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        self._waiting: list[tuple[str, float, dict[str, Any]]] = []  # what, when, and its content
        self._written_at = -inf

    def write(self, event: str, **content: Any) -> None:
        """Append an event, and those that wait before it."""
        self._waiting.append((event, time.time(), content))
        self.flush()

    def gather(self, event: str, **content: Any) -> None:
        """Append an event together with others: one by one they would cost more than small networks do."""
        self._waiting.append((event, time.time(), content))
        if time.monotonic() - self._written_at >= GATHERING_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Append what waits. Cut short it may be appended twice, which readers bear, but is never lost."""
        if not self._waiting:
            return
        lines = "".join(itertools.starmap(_line, self._waiting))
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                if file.tell() and _last_byte(self.path) != b"\n":  # a kill cut the last line short
                    lines = "\n" + lines
                file.write(lines.encode())
        self._waiting.clear()
        self._written_at = time.monotonic()


def _line(event: str, moment: float, content: dict[str, Any]) -> str:
    """An event as JSON, with its checksum."""
    told = f", {_json(content)[1:]}" if content else "}"
    line = f'{{"event": {json.dumps(event)}, "time": {moment:.3f}{told}'
    return f'{line[:-1]}, "crc32": {zlib.crc32(line.encode())}}}\n'


_word = lru_cache(maxsize=1024)(json.dumps)  # a name, true, false or null: they come again in every line


@lru_cache(maxsize=64)
def _pattern(count: int) -> str:
    """The format of so many numbers at once, which takes half the time of one after another."""
    return f"[{', '.join(['%.6g'] * count)}]"


def _json(value: Any) -> str:
    """JSON with six digits of every number, enough for a log; NaN and infinity, which it lacks, are null.

    Written at once, in two thirds of the time that rounding first takes: epochs may be over in milliseconds.
    """
    if isinstance(value, float):
        return f"{value:.6g}" if isfinite(value) else "null"
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {float}:
            text = _pattern(len(value)) % tuple(value)
            if "n" not in text:  # neither nan nor inf
                return text
        return f"[{', '.join(map(_json, value))}]"
    if isinstance(value, dict):
        texts = [f"{_word(key)}: {_json(item)}" for key, item in value.items()]
        return f"{{{', '.join(texts)}}}"
    return str(value) if value.__class__ is int else _word(value)


def read_events(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in order; lines that are damaged or cut short are counted in a warning.

    Epochs that a killed run had to repeat occur twice: the later ones count.
    """
    path = Path(folder) / EVENTS
    try:
        lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is not the folder of a run.") from None
    damaged, has_checksums = 0, False
    for line in filter(None, lines):
        found = _CRC.search(line)
        has_checksums = has_checksums or found is not None  # earlier versions wrote none
        event = _event(line, found)
        if event is None or (found is None and has_checksums):
            damaged += 1
        else:
            yield event
    if damaged:
        warnings.warn(
            f"{path}: {damaged} damaged line{'s were' if damaged > 1 else ' was'} passed over.", stacklevel=2
        )


def _event(line: str, found: re.Match | None) -> dict[str, Any] | None:
    """What a line says, if it is whole."""
    if found is not None:
        line = line[: found.start()] + "}"
        if zlib.crc32(line.encode()) != int(found[1]):
            return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None


def epochs_of(folder: str | Path) -> list[dict[str, Any]]:
    """The epochs of a run, each once, in order."""
    latest = {event["epochs_done"]: event for event in read_events(folder) if event["event"] == "epoch"}
    return [latest[number] for number in sorted(latest)]


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1)
