import os
import signal
import sys
from pathlib import Path

# The networks are small: threads would mostly wait for each other, for minutes where the machine is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from polymode.imports import _LIMIT

sys.path.insert(0, str(Path(__file__).parent))

# Importing other_kernels exchanges kernels: only -p other_kernels may. Sketches are known by one name only.
collect_ignore = ["other_kernels.py", "contract/sketches.py"]
# Shells start background jobs with Ctrl-C ignored, which children inherit: some tests are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def global_random_state_is_left_alone():
    """The library never touches the global random state: every test checks it."""
    torch.manual_seed(1234)
    yield
    # Tests themselves may draw; what must not happen is a seed set by the library that stays.
    assert torch.initial_seed() == 1234


@pytest.fixture(autouse=True)
def imports_are_unlimited():
    """A command ends with its process, and with it what it may import; here the next test follows."""
    yield
    _LIMIT.set(None)


@pytest.fixture
def float64():
    """Networks and tensors of double precision, where a comparison has to be sharp."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
