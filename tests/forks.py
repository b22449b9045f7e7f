"""Processes that can be killed or limited, without the seconds that importing torch takes in each.

They are forks of a server that has imported it and done nothing else, so that they begin as a fresh process
does.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
# The second is what the first step of any optimiser imports.
FORKS.set_forkserver_preload(["polymode", "torch._dynamo"])


def fork(target: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """Call a function, which is found by its name, in a process of its own."""
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    return process
