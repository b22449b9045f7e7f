"""Training: the contract of a method, the one loop that runs it, and what is kept of a run."""

from polymode.training.keeping.events import epochs_of, read_events
from polymode.training.loop.engine import Engine
from polymode.training.loop.fit import fit

__all__ = ["Engine", "epochs_of", "fit", "read_events"]
