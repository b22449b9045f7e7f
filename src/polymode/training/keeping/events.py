"""The event log of a run: one JSON object a line, only ever appended to, readable by anything."""

import json
import re
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polymode.errors import CheckpointError
from polymode.storage import finite, writing

EVENTS = "events.jsonl"
_CRC = re.compile(r', "crc32": (\d+)}$')  # the end of a line: the CRC-32 of the line without it


class EventLog:
    """Appends events to ``events.jsonl`` in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS

    def write(self, event: str, **content: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3)} | finite(_rounded(content)))
        line = f'{line[:-1]}, "crc32": {zlib.crc32(line.encode())}}}\n'
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                if file.tell() and _last_byte(self.path) != b"\n":  # a kill cut the last line short
                    line = "\n" + line
                file.write(line.encode())


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


def _rounded(value: Any) -> Any:
    """Six digits are enough for a log."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
