"""Whether compiling a step pays, judged by what it took and gained on this machine before."""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from polymode.networks import recording
from polymode.training.loop.material import Material

# Where nothing is known yet: seconds that a graph takes to compile, and to find on disk where it was compiled
# before; and the time of a compiled step of a small network over that of the step as it is.
COMPILE_SECONDS, FIND_SECONDS, RATIO = 4.0, 0.6, 0.3
IMPORT_SECONDS = 1.5  # of PyTorch's compiler, once in a process
WORTH_A_LOOK = 3.0  # seconds of training below which nothing can be gained
MARGIN = 1.1  # how far the gain must exceed the cost


@dataclass(frozen=True)
class Note:
    """What is known of compiling runs of one kind: a small file beside PyTorch's own compiled graphs.

    Who empties PyTorch's folder removes the graphs and what is said about them.
    """

    path: Path | None

    @staticmethod
    def of(material: Material, threads: int) -> "Note":
        request, members = material.request, material.state.members
        content = {
            "network": material.problem.network.fingerprint,
            "likelihood": request.likelihood.config(),
            "method": request.method.config(),
            "members": [members.num_members, members.num_groups],
            "batch_size": material.batches.batch_size,
            "rows": [group.num_examples for group in material.batches.groups],
            "precision": request.precision,
            "device": str(request.device),
            "threads": threads,
            "version": torch.__version__,
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
        folder = _folder()
        return Note(None if folder is None else folder / f"{digest}.json")

    def is_worth_it(self, seconds: float, num_graphs: int) -> bool:
        """Whether compiling so many graphs saves more than it costs, in a training of so many seconds."""
        if seconds < WORTH_A_LOOK:
            return False
        own = self._read(self.path)
        if own is not None:
            compile_seconds, ratio = FIND_SECONDS, own[1]
        else:
            others = [known for path in self._others() if (known := self._read(path)) is not None]
            compile_seconds = median([known[0] for known in others] or [COMPILE_SECONDS])
            ratio = median([known[1] for known in others] or [RATIO])
        cost = num_graphs * compile_seconds
        if "torch._inductor.compile_fx" not in sys.modules:
            cost += IMPORT_SECONDS
        return seconds * (1 - ratio) > MARGIN * cost

    def write(self, seconds: float, ratio: float) -> None:
        """Keep what compiling took the first time, and the newest ratio of times of a step."""
        if self.path is None:
            return
        known = self._read(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps([known[0] if known else round(seconds, 2), round(ratio, 3)]))
        except OSError:
            pass  # nowhere to write: the next run will know as little

    def _others(self) -> list[Path]:
        return [] if self.path is None else sorted(self.path.parent.glob("*.json"))[:100]

    @staticmethod
    def _read(path: Path | None) -> tuple[float, float] | None:
        try:
            seconds, ratio = map(float, json.loads(path.read_text()[:100])) if path else (0.0, 0.0)
        except (OSError, ValueError, TypeError):
            return None
        return (seconds, ratio) if seconds > 0 and ratio > 0 else None


def _folder() -> Path | None:
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return Path(cache_dir()) / "polymode" / recording.COMPILER
    except (ImportError, OSError):
        return None
