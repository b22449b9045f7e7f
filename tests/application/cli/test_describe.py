"""``polymode data describe``: what becomes of every column of a table."""

import json
import shlex

import numpy as np
import pytest
from command_line import polymode, the_line

from polymode.application.datasets.loading import load_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a table of numbers with gaps, names, dates, a constant and a column of its own values."""
    folder = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    lines = ["id,size,colour,sold,always,price"]
    for row in range(60):
        size = "" if row % 10 == 0 else f"{random.normal():.3f}"
        colour = ("red", "green", "[blue]")[row % 3]
        sold = f"2024-{1 + row % 12:02d}-{1 + row % 28:02d}"
        lines.append(f"customer {row},{size},{colour},{sold},1,{random.normal():.4f}")
    (folder / "shop.csv").write_text("\n".join(lines) + "\n")
    return folder


def described(folder, *options):
    return json.loads(polymode("data", "describe", "shop.csv", *options, "--json", cwd=folder).stdout)


def test_every_column_has_its_kind_and_as_many_inputs_as_the_network_sees(folder):
    found = described(folder)
    columns = {column["name"]: column for column in found["columns"]}
    assert list(columns) == ["id", "size", "colour", "sold", "always"]
    assert found["target"] == "price"
    assert found["meaning"].startswith("regression, one noise level for all rows")
    assert "a trial on validation rows decides" in found["meaning"]
    assert columns["id"]["inputs"] == columns["always"]["inputs"] == 0  # left out
    assert columns["size"]["inputs"] == 2  # itself, and whether it is missing
    assert columns["colour"]["inputs"] >= 3
    split = load_task(str(folder / "shop.csv"), {}).splits[0]
    inputs = sum(column["inputs"] for column in found["columns"])
    assert inputs == split.train.inputs.shape[1] == len(split.preprocessing.features)
    assert all(column["about"] for column in found["columns"])


def test_the_table_on_the_screen_says_the_same(folder):
    said = polymode("data", "describe", "shop.csv", cwd=folder, COLUMNS="200").stdout
    for column in described(folder)["columns"]:
        [line] = [line for line in said.splitlines() if line.strip().startswith(f"{column['name']} ")]
        assert line.split()[1:2] == column["kind"].split()[:1]
        assert column["about"] in " ".join(line.split())
    assert "60 rows, of which 12 to test on" in said
    [following] = [line for line in said.splitlines() if line.startswith("next")]
    assert shlex.split(following)[1:4] == ["polymode", "compare", "--data=shop.csv"]


def test_options_of_the_table_are_followed(folder):
    found = described(folder, "--set", "data.target=colour", "--set", "data.drop=[id,sold]")
    assert [column["name"] for column in found["columns"]] == ["size", "always", "price"]
    assert found["meaning"] == "3 classes: [blue], green, red"
    said = polymode("data", "describe", "shop.csv", "--set", "data.test_share=0.5", cwd=folder).stdout
    assert "60 rows, of which 30 to test on" in said
    # The command that comes next has the same options: groups and orders must not get lost.
    [following] = [line for line in said.splitlines() if line.startswith("next")]
    assert shlex.split(following)[1:] == [
        "polymode",
        "compare",
        "--data=shop.csv",
        '--set=data.target="price"',
        "--set=data.test_share=0.5",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Name one table: polymode data describe FILE"),
        (["shop.csv", "shop.csv"], 2, "Name one table: polymode data describe FILE"),
        (["two_moons"], 2, "two_moons is not a table with named columns"),
        (["none.csv"], 1, "none.csv"),
        (["shop.csv", "--set", "data.target=prize"], 2, "Did you mean 'price'"),
    ],
)
def test_mistakes_get_one_line(folder, arguments, code, message):
    assert message in the_line(polymode("data", "describe", *arguments, cwd=folder, code=code))


def test_nothing_is_left_behind(folder):
    assert [path.name for path in folder.iterdir()] == ["shop.csv"]
