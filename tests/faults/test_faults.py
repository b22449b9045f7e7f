"""Whatever happens to a training: the same bits in the end, or an error that says what to do."""

import importlib.util
import random

import pytest

from faults.catalogue import ENGINES, ONE_PROCESS, SAME, TOLD


@pytest.fixture(scope="module", autouse=True)
def trainings(tmp_path_factory):
    """A folder for what is trained once for several faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYMODE_FAULTS", str(tmp_path_factory.mktemp("undisturbed")))
        yield


@pytest.mark.parametrize("fault", ONE_PROCESS)
def test_one_process(fault, tmp_path):
    assert ONE_PROCESS[fault](tmp_path, random.Random(1)) in (SAME, TOLD)


# Of the faults of each kind of cluster one is tried always.
SLOW = ("killed_ray_worker", "killed_dask_node", "killed_node_of_a_full_cluster")


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in ENGINES]
)
def test_engines(fault, tmp_path):
    for kind, module in (("ray", "ray"), ("dask", "distributed")):
        if kind in fault and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    assert ENGINES[fault](tmp_path, random.Random(0)) == SAME
