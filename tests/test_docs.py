"""Every Python block of the README and the guides runs, in order, as a reader would type it."""

import re
import runpy
import tomllib
import warnings
from pathlib import Path

import pytest

from polymode.application.cli.methods import as_typed
from polymode.errors import InputError
from polymode.methods import METHODS
from polymode.options import options_of

ROOT = Path(__file__).parent.parent
option_tables = runpy.run_path(str(ROOT / "docs/option_tables.py"))
PAGES = ["README.md", "docs/guide.md", "docs/own-loop.md", "docs/data.md", "docs/landscape.md"]
PAGES += ["docs/compaction.md", "docs/tables.md"]
PAGES += ["experiments/late_phase/quadratic.md"]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
METHOD_PAGES = sorted((ROOT / "docs/methods").glob("*.md"))
PAGES += [str(page.relative_to(ROOT)) for page in METHOD_PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend((ROOT / page).parent)  # pages of experiments import what lies beside them
    scope: dict = {"__name__": "docs"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning advises about workers and loggers
        for block in blocks:
            exec(compile(block, page, "exec"), scope)


def test_every_method_has_a_page_and_the_readme_links_to_it():
    readme = (ROOT / "README.md").read_text()
    for name in METHODS:
        page = f"docs/methods/{name}.md"
        assert (ROOT / page).exists()
        assert page in readme


def test_links_of_the_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_a_method_has_the_options_that_it_declares(name):
    page = (ROOT / f"docs/methods/{name}.md").read_text()
    assert page == option_tables["with_table"](page, METHODS[name]), "make docs brings it up to date"
    listed = re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S", page, re.MULTILINE)
    for each in options_of(METHODS[name]):
        assert (each.name, as_typed(each.default)) in listed


def test_a_page_without_a_place_for_its_options_is_named():
    with pytest.raises(InputError, match="page of single has no place for its options"):
        option_tables["with_table"]("# single\n", METHODS["single"])


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_layers_of_contributing_are_those_that_are_checked():
    [text] = re.findall(r"## Layers\n\n`([^`]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    described = [{name.strip() for name in layer.split(",")} for layer in text.split("←")]
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    [checked] = [c for c in contracts if c["type"] == "layers" and "containers" not in c]
    layers = [
        {name.strip().removeprefix("polymode.") for name in layer.split("|")} for layer in checked["layers"]
    ]
    assert described == layers[::-1]


def test_what_is_named_exists():
    """Extras of the package and targets of make, wherever a reader is told to use them."""
    extras = PYPROJECT["project"]["optional-dependencies"].keys()
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("src/**/*.py"),
        ROOT / "pyproject.toml",
    ]
    for page in pages:
        text = page.read_text()
        for names in re.findall(r"polymode\[([\w,]+)\]'?[`.: )]", text):
            assert set(names.split(",")) <= extras, f"{page.name}: polymode[{names}]"
        for target in re.findall(r"`make ([\w-]+)", text):
            assert target in targets, f"{page.name}: make {target}"
