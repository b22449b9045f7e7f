"""The page: it stands alone, escapes what it is told, and shows what was measured."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import polymode as pm
from polymode.comparison import compare
from polymode.data import Split, Task
from polymode.errors import InputError
from polymode.report import write_page

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
EVIL = "<img src=x onerror=alert(1)></script><b>"


def task(likelihood):
    y = (X[:, 0] > 0).long() if likelihood == "categorical" else X[:, 0]
    data = pm.ArrayData(X, y, batch_size=20)
    ood = pm.ArrayData(X * 9, y) if likelihood == "categorical" else None
    outputs = 2 if likelihood == "categorical" else 1
    return Task("toy", [Split(data, data, validation=data)], likelihood, outputs, ood=ood)


def made(folder, likelihood, labels=("one", "two"), seeds=(0, 1)):
    chosen = task(likelihood)
    return compare(
        chosen,
        lambda: pm.models.MLP(3, chosen.num_outputs, (4,)),
        dict(zip(labels, (pm.methods.Single(), pm.methods.DeepEnsemble(3)), strict=False)),
        folder,
        budget=6,
        seeds=seeds,
    )


class Reader(HTMLParser):
    """Collects tags, addresses and the text of tables."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses, self.cells = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("td", "b", "span"):
            self.cells.append(data.strip())


def read(path):
    text = path.read_text()
    reader = Reader()
    reader.feed(text)
    return text, reader


@pytest.mark.parametrize(
    ("likelihood", "titles"),
    [
        (
            "categorical",
            [
                "Is it worth",
                "NLL against",
                "Reliability",
                "Confidence, in",
                "Entropy, in",
                "two: how members",
            ],
        ),
        ("gaussian", ["Is it worth", "NLL against", "Coverage", "Predictive standard", "two: how members"]),
    ],
)
def test_the_page_stands_alone_and_shows_every_figure(tmp_path, likelihood, titles):
    found = made(tmp_path / "c", likelihood)
    text, reader = read(write_page(found, tmp_path / "page.html", command="polymode compare --x"))
    assert reader.addresses == ["data:,"]  # nothing is fetched
    drawn = re.findall(r'"title":\{"font":\{"size":16\},"text":"([^"]*)"', text)
    assert len(drawn) == len(titles)
    for title, expected in zip(drawn, titles, strict=True):
        assert title.startswith(expected)
    assert "polymode compare --x" in text
    assert f"torch {torch.__version__}" in text
    for column in found.shown_columns():
        for result in found.results:
            summary = result.summary(column.key)
            if summary is not None:
                assert any(summary.text(column.digits) in cell for cell in reader.cells)


def test_strings_are_escaped_everywhere(tmp_path):
    found = made(tmp_path / "c", "categorical")
    evil = replace(
        found,
        title=EVIL,
        results=[replace(result, label=EVIL + result.label) for result in found.results],
        options={"data": EVIL},
    )
    text, reader = read(write_page(evil, tmp_path / "page.html", command=EVIL))
    assert "<img" not in text.split("</style>")[1]
    assert "img" not in reader.tags
    scripts = text.count("<script")
    assert scripts == text.count("</script>") == len(re.findall("plotly-graph-div", text)) + 1


def test_one_method_and_one_seed_make_a_page_too(tmp_path):
    found = made(tmp_path / "c", "categorical", labels=("one",), seeds=(0,))
    text, _ = read(write_page(found, tmp_path / "page.html"))
    assert "add others with --methods" in text
    assert "±" not in text.split("<h2>Scores</h2>")[1].split("</table>")[0]


def test_without_plotly_the_error_says_what_to_install(tmp_path, monkeypatch):
    import sys

    found = made(tmp_path / "c", "categorical", labels=("one",), seeds=(0,))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"pip install 'polymode\[report\]'"):
        write_page(found, tmp_path / "page.html")
    assert json.loads((tmp_path / "c/results.json").read_text())["rows"]  # the results are there all the same
