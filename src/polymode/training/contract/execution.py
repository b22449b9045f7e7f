"""How the members of a run are computed."""

from dataclasses import dataclass
from typing import Literal

import torch

from polymode.networks.members import BACKENDS, Backend

TrainingBackend = Backend | Literal["compiled"]
TRAINING_BACKENDS: tuple[TrainingBackend, ...] = (*BACKENDS, "compiled")
Precision = Literal["full", "bfloat16", "double"]  # double is a matter of the weights and the data


@dataclass(frozen=True)
class Execution:
    """Decided once, at the start of a run, and then kept.

    backend: of gradients; "compiled" is what vmap does, recorded and compiled as one graph.
    """

    device: torch.device
    backend: TrainingBackend = "loop"
    prediction_backend: Backend = "loop"  # in evaluation mode some modules take other kernels
    precision: Precision = "full"
    threads: int = 1

    @property
    def mapping(self) -> Backend:
        """How members run where nothing is compiled: in passes without gradients."""
        return "vmap" if self.backend == "compiled" else self.backend
