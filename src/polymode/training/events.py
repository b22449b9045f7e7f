"""The event log of a run: one JSON object a line, only ever appended to, readable by anything."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polymode.errors import CheckpointError
from polymode.storage import finite, writing

EVENTS = "events.jsonl"


class EventLog:
    """Appends events to ``events.jsonl`` in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS

    def write(self, event: str, **content: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3)} | finite(_rounded(content))) + "\n"
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                if file.tell() and _last_byte(self.path) != b"\n":  # a kill cut the last line short
                    line = "\n" + line
                file.write(line.encode())


def read_events(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in order; a line that a kill cut short is passed over.

    Epochs that a killed run had to repeat occur twice: the later ones count.
    """
    path = Path(folder) / EVENTS
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is not the folder of a run.") from None
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


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
