import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest

import polymode as pm


def test_every_name_is_that_of_its_module():
    """What is there when it is asked for is what type checkers are told, and that they may pass on."""
    tree = ast.parse(inspect.getsource(pm))
    [block] = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    told = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            assert name.asname == name.name  # typing's mark of a name that is passed on
            # Python's own rule of `from module import name`: what the module holds, or else a module in it.
            scope = {}
            exec(f"from {node.module} import {name.name}", scope)
            told[name.name] = scope[name.name]
    assert {*told, "__version__"} == set(pm.__all__)
    for name, value in told.items():
        assert getattr(pm, name) is value
    assert set(pm.__all__) <= set(dir(pm))
    assert pm.compare is import_module("polymode.application.comparison.compare").compare


def test_all_names_can_be_imported_at_once():
    scope = {}
    exec("from polymode import *", scope)
    assert {name: scope[name] for name in pm.__all__} == {name: getattr(pm, name) for name in pm.__all__}


def test_names_are_found_in_an_archive_too(tmp_path):
    """As zipapps keep packages: there are no files to read beside the module."""
    package = Path(pm.__file__).parent
    with ZipFile(tmp_path / "packed.zip", "w") as archive:
        for file in ("__init__.py", "_version.py", "errors.py"):
            archive.write(package / file, f"polymode/{file}")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'packed.zip')!r}); import polymode as pm"
    code += "; print(pm.errors.__file__, len(pm.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "packed.zip/polymode/errors.py"), str(len(pm.__all__))]


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
