"""Scripts of the experiments as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def load_script(path: Path) -> ModuleType:
    """A script as a module; it finds those beside it as it does when it is run."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module
