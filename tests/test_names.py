import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import polymode as pm


def test_every_name_is_that_of_its_module():
    """What is there when it is asked for is what type checkers are told."""
    tree = ast.parse(inspect.getsource(pm))
    [block] = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            inside = node.module in ("polymode", "polymode.application", "polymode.weights")
            told[name.name] = (
                import_module(f"{node.module}.{name.name}")
                if inside
                else getattr(import_module(node.module), name.name)
            )
    assert {*told, "__version__"} == set(pm.__all__)
    for name, value in told.items():
        assert getattr(pm, name) is value
    assert set(pm.__all__) <= set(dir(pm))


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="module 'polymode' has no attribute 'fitt'"):
        pm.fitt  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'fitt'"):
        from polymode import fitt  # noqa: F401  # pyright: ignore
    assert not hasattr(pm, "__wrapped__")


@pytest.mark.parametrize("arguments", [[], ["--version"], ["--help"]])
def test_nobody_waits_for_torch_who_does_not_use_it(arguments):
    called = (
        f"from polymode.application.cli import main; main({arguments})" if arguments else "import polymode"
    )
    check = "import sys; print(sorted({'torch', 'numpy', 'pandas'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{called}; {check}"], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
