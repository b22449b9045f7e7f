"""How the members of a run are computed."""

from dataclasses import dataclass
from typing import Literal

import torch

from polymode.networks.members import Backend
from polymode.training.contract.ranks import ALONE, Ranks

Precision = Literal["full", "bfloat16", "double"]  # double is a matter of the weights and the data


@dataclass(frozen=True)
class Execution:
    """Decided once, at the start of a run, and then kept.

    backend: of gradients; "compiled" is what vmap does, recorded and compiled as one graph. ranks: who
    shares minibatches; alone while ways to compute are tried.
    """

    device: torch.device
    backend: Backend = "loop"
    prediction_backend: Backend = "loop"  # in evaluation mode some modules take other kernels
    precision: Precision = "full"
    threads: int = 1
    ranks: Ranks = ALONE
