"""Processes that torchrun has started: they train one run together, and the first of them tells."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from polymode.application.cli.options import UsageError
from polymode.errors import PolymodeError
from polymode.training.contract.ranks import ALONE, Ranks

# The others wait while the first one chooses a backend or writes a large posterior. One that has died is
# noticed by torchrun, not by waiting.
PATIENCE = timedelta(days=1)


def started() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def require_alone(command: str) -> None:
    """Raise where several processes run a command that is one process's."""
    if started() > 1:
        raise UsageError(
            f"torchrun has started {started()} processes, and polymode {command} runs in one: start it "
            "without torchrun. (polymode train shares the minibatches of one run among them; --engine "
            "divides runs.)"
        )


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that torchrun has started, able to talk to each other; this one alone without it."""
    if started() == 1:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, timeout=PATIENCE)
    try:
        yield Ranks.joined()
        distributed.barrier()  # nobody leaves while another one still talks
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, distributed.DistError):
            raise
        raise PolymodeError(
            "Another process of this run has ended, so this one ends, too; the other one's message says why. "
            "The same command goes on from the last checkpoint."
        ) from error
    finally:
        distributed.destroy_process_group()


def local_device() -> str:
    """The device of this process, where every one on a machine has its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
