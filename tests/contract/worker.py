"""A run for a process of its own, so that it can be killed."""

import time
from pathlib import Path

import torch

import polymode as pm
from cases import BY_NAME
from contract.registry import SMALL, beginning


def main(method: str, network: str, folder: Path, checkpoint_seconds: float = 0.0) -> None:
    """Train; with checkpoints after every step unless there is some time between them."""
    torch.set_num_threads(1)
    case = BY_NAME[network]
    small = SMALL[method]()
    pm.fit(
        small,
        case.double_factory,
        case.data(40, batch_size=4),
        likelihood=case.likelihood,
        epochs=6,
        validation=case.data(16, seed=3),
        run_dir=folder,
        resume=True,
        backend="loop",
        progress=False,
        checkpoint_seconds=checkpoint_seconds,
        observer=lambda epoch: time.sleep(0.01),
        **beginning(small, case),
    )
