"""Trainings for processes of their own, so that they can be killed, starved or confused."""

import errno
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import polymode as pm
from cases import BY_NAME
from contract import worker
from contract.registry import accepts
from polymode import storage
from polymode.errors import PolymodeError
from polymode.training.loop import work


def network_for(method: str) -> str:
    """Running statistics and noise as part of the state, where the method can have them."""
    return "batch_norm_and_dropout" if accepts(method, "batch_norm_and_dropout") else "layer_norm"


def train(method: str, folder: Path, checkpoint_seconds: float = 0.0) -> None:
    worker.main(method, network_for(method), folder, checkpoint_seconds)


def train_and_die_writing(method: str, folder: Path, operation: int) -> None:
    """Train, and be killed at the so-many-th time that a file is made, synchronised, renamed or removed."""
    left = [operation]

    def deadly(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for owner, name in (
        (os, "fsync"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "touch"),
        (storage.safetensors.torch, "save_file"),
    ):
        setattr(owner, name, deadly(getattr(owner, name)))
    train(method, folder)


def train_with_short_files(method: str, folder: Path, longest: int, note: Path) -> None:
    """Train where writes end in the middle of a file, at so many bytes; says in a note how that ended."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, before[1]))
    try:
        train(method, folder)
        told = "it ended well"
    except PolymodeError as error:
        told = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    note.write_text(told)


def train_without_room(method: str, folder: Path, write: int, note: Path) -> None:
    """Train on a disk that is full from the so-many-th file on; says in a note how that ended."""
    left, sync = [write], os.fsync

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    os.fsync = full  # type: ignore[assignment]
    try:
        train(method, folder)
    except PolymodeError as error:
        note.write_text(f"{type(error).__name__}: {error}")


def train_with_jumping_clock(method: str, folder: Path, seed: int) -> None:
    """Train while the time of day jumps by years, forwards and backwards."""
    jumps, real = random.Random(seed), time.time
    time.time = lambda: real() + jumps.uniform(-1e8, 1e8)
    train(method, folder)


ENGINE_METHOD = pm.methods.SequentialAnchored(
    4, prior_std=1.0, walk=pm.samplers.GuidedWalk(3.0), short_epochs=1, optimizer=pm.Optimizer("SGD", lr=0.1)
)


def engine_network() -> torch.nn.Module:
    return pm.models.MLP(4, 3, (6,)).double()


def train_apart(folder: str, kind: str, address: str, epochs: int = 20) -> None:
    """Four chains in two parts, wherever they are worked on."""
    work.IDLE_PATIENCE = 30.0  # a test need not wait for as long
    pm.fit(
        ENGINE_METHOD,
        engine_network,
        BY_NAME["mlp"].data(200, batch_size=2),
        likelihood="categorical",
        epochs=epochs,
        engine=pm.Engine(kind, address, workers=2),  # type: ignore[arg-type]
        run_dir=folder,
        resume=True,
        backend="loop",
        threads=1,
        progress=False,
        checkpoint_seconds=0.3,
    )


if __name__ == "__main__":
    train_apart(*sys.argv[1:4])
