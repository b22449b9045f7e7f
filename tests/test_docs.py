"""Every Python block of the README and the guides runs, in order, as a reader would type it."""

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md", "docs/own-loop.md", "docs/data.md", "docs/landscape.md"]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
METHOD_PAGES = sorted((ROOT / "docs/methods").glob("*.md"))
PAGES += [str(page.relative_to(ROOT)) for page in METHOD_PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "docs"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning advises about workers and loggers
        for block in blocks:
            exec(compile(block, page, "exec"), scope)


def test_every_method_has_a_page_and_the_readme_links_to_it():
    from polymode.methods import METHODS

    readme = (ROOT / "README.md").read_text()
    for name in METHODS:
        page = f"docs/methods/{name}.md"
        assert (ROOT / page).exists()
        assert page in readme


def test_links_of_the_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
