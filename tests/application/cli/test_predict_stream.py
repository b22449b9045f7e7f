"""``polymode predict`` in parts: the same predictions, files and words as of all rows at once."""

import csv
import json
import os
import threading

import numpy as np
import pytest
from command_line import polymode, the_line

from polymode.application.cli.predict import ahead
from polymode.application.cli.predictions import csv_text
from polymode.application.datasets import new_rows

NUMBER = 150


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with members, one that is drawn from without end, and a table of new rows."""
    folder = tmp_path_factory.mktemp("stream")
    random = np.random.default_rng(0)
    lines = [
        (f"{a:.4f}", f"{b:.4f}" if b > -1.5 else "", ("red", "blue", "=green")[i % 3], f"{a * b:.3f}")
        for i, (a, b) in enumerate(random.normal(size=(300, 2)))
    ]
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("a", "b", "c", "y"), *lines])
    with (folder / "new.csv").open("w", newline="") as file:
        odd = [("9", "", "red", 'x, "y"'), ("word", "1", "pink", "-z")]
        rows = [(*line[:3], f"{i:03d}") for i, line in enumerate(lines[:NUMBER])]
        csv.writer(file).writerows([("a", "b", "c", "id"), *rows[:40], (), *rows[40:], *odd])
    train = ("--epochs", "1", "--quiet", "--set", "model.hidden=[8]")
    members = ("--method", "deep_ensemble", "--set", "deep_ensemble.num_members=3")
    polymode("train", "--data", "train.csv", *members, "--run", "numbers", *train, cwd=folder)
    drop = ("--method", "mc_dropout")
    polymode("train", "--data", "train.csv", *drop, "--run", "draws", *train, cwd=folder)
    return folder


def predicted(folder, run, *options, rows, monkeypatch):
    monkeypatch.setattr(new_rows, "ROWS", rows)
    return polymode("predict", run, "new.csv", *options, cwd=folder, expected_warnings=True)


@pytest.mark.parametrize("run", ["numbers", "draws"])
def test_parts_are_predicted_as_the_whole(made, run, monkeypatch):
    """Also noise that belongs to an example, and draws that belong to a seed."""

    def told(rows):
        said = predicted(made, run, "--json", "--quiet", "--keep", "id", rows=rows, monkeypatch=monkeypatch)
        return json.loads(said.stdout), said.stderr

    whole, words = told(10_000)
    assert "1 of 152 cells of 'a' hold no number (the first 'word' in row 153)" in words
    assert whole["row"] == [row for row in range(1, 154) if row != 41]
    for rows in (19, 64, 151):
        parts, also = told(rows)
        assert also == words
        assert parts.keys() == whole.keys()
        for name, values in whole.items():
            if isinstance(values[0], float):
                np.testing.assert_allclose(parts[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
            else:
                assert parts[name] == values


@pytest.mark.parametrize("name", ["row", "strangeness", "unlike"])
def test_names_of_predictions_are_not_kept(made, name):
    said = polymode("predict", "numbers", "new.csv", "--keep", name, cwd=made, code=2)
    assert f"--keep {name}: the predictions have a column of that name" in the_line(said)


def test_what_is_kept_has_all_its_digits(made, monkeypatch):
    """Integers with gaps, in a part of the rows only, and floating-point numbers of a file with types."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.read_csv(made / "new.csv", dtype={"a": str}).iloc[:30].drop(columns=["id", "c"])
    frame["a"] = frame["a"].astype(float)
    frame["c"] = "red"
    numbers = [1234567890123456789 + i for i in range(30)]
    frame["key"] = pandas.array([None if i == 25 else n for i, n in enumerate(numbers)], dtype="Int64")
    frame["amount"] = [123456789.25 + i if i != 7 else float("nan") for i in range(30)]
    frame.to_parquet(made / "kept.parquet")
    monkeypatch.setattr(new_rows, "ROWS", 10)
    out = ("--keep", "key,amount", "--out", "kept.csv", "--quiet")
    polymode("predict", "numbers", "kept.parquet", *out, cwd=made, expected_warnings=True)
    with (made / "kept.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == ["" if i == 25 else str(n) for i, n in enumerate(numbers)]
    assert [row["amount"] for row in rows] == [str(123456789.25 + i) if i != 7 else "" for i in range(30)]


def test_the_file_that_is_read_is_not_written(made):
    before = (made / "new.csv").read_bytes()
    (made / "link.csv").symlink_to(made / "new.csv")
    (made / "loop.csv").symlink_to(made / "loop.csv")
    for name in ("new.csv", "link.csv"):
        said = polymode("predict", "numbers", "new.csv", "--out", name, cwd=made, code=2)
        assert f"--out {name} is the file with the examples: choose another name" in the_line(said)
    said = polymode("predict", "numbers", "new.csv", "--out", "loop.csv", cwd=made, code=2)
    assert "--out 'loop.csv' cannot be written" in the_line(said)
    os.mkfifo(made / "pipe")
    (made / "pipe.csv").symlink_to(made / "pipe")
    (made / "folder.csv").mkdir()
    for name in ("pipe.csv", "folder.csv"):
        said = polymode("predict", "numbers", "new.csv", "--out", name, cwd=made, code=2)
        assert f"--out {name} is there, and is no ordinary file: choose another name" in the_line(said)
    assert (made / "pipe").is_fifo()
    (made / "link.npz").symlink_to(made / "blob")
    polymode(
        "predict", "numbers", "new.csv", "--out", "link.npz", "--quiet", cwd=made, expected_warnings=True
    )
    assert "mean" in np.load(made / "blob")
    assert (made / "new.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("option", "value"), [("--num-draws", "0"), ("--seed", str(2**70)), ("--seed", "-1")]
)
def test_draws_that_cannot_be_made_are_refused(made, option, value):
    said = polymode("predict", "draws", "new.csv", option, value, cwd=made, code=2)
    assert f"{option} must be" in the_line(said)
    assert f"got {value}" in the_line(said)


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_files_written_in_parts_hold_the_same(made, suffix, monkeypatch):
    keep = ("--keep", "id,c", "--out", f"p.{suffix}")
    said = [predicted(made, "numbers", *keep, rows=10_000, monkeypatch=monkeypatch).stdout]
    whole = (made / f"p.{suffix}").read_bytes()
    content = [_columns(made / f"p.{suffix}")]
    for rows in (19, 150):
        said.append(predicted(made, "numbers", *keep, rows=rows, monkeypatch=monkeypatch).stdout)
        content.append(_columns(made / f"p.{suffix}"))
    assert len(set(said)) == 1  # the least sure and the strange ones of all rows
    assert "152 predictions in p." in said[0]
    for other in content[1:]:
        assert other.keys() == content[0].keys()
        for name, values in content[0].items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(other[name], values, rtol=1e-4, atol=1e-5)
            else:
                assert other[name].tolist() == values.tolist()
    assert content[0]["id"].tolist()[-2:] == ['x, "y"', "'-z" if suffix == "csv" else "-z"]
    if suffix == "csv":
        assert b"\r" not in whole
        assert not list(made.glob(".*.partial"))


def _columns(path):
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    texts = {"id", "c", "unlike"}
    columns = zip(header, zip(*rows, strict=True), strict=True)
    return {name: np.array(values, dtype=str if name in texts else float) for name, values in columns}


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_a_failure_in_the_middle_leaves_the_file_as_it_was(made, tmp_path, suffix, monkeypatch):
    (made / f"kept.{suffix}").write_text("before")
    with (made / "broken.csv").open("w") as file:
        file.write("a,b,c\n" + "1,1,red\n" * 100 + "1,1,red,9,9,9\n")
    monkeypatch.setattr(new_rows, "ROWS", 10)
    line = the_line(polymode("predict", "numbers", "broken.csv", "--out", f"kept.{suffix}", cwd=made, code=1))
    assert "broken.csv cannot be read as a table" in line
    assert (made / f"kept.{suffix}").read_text() == "before"
    assert not [path for path in made.iterdir() if path.name.startswith((".", "tmp"))]


def test_lines_are_those_of_the_csv_module():
    columns = {
        "row": np.arange(1, 4),
        "=name": np.array(["=1+1", "-5", 'say "a, b"\nc']),
        "f": np.array([0.1, np.nan, 1e-20]),
        "s": np.array([1 / 3, 2, -np.inf], dtype=np.float32),
        "yes": np.array([True, False, True]),
    }
    lines = list(csv.reader(csv_text(columns, with_names=True).splitlines(keepends=True)))
    assert lines == [
        ["row", "'=name", "f", "s", "yes"],
        ["1", "'=1+1", "0.1", "0.33333334", "True"],
        ["2", "-5", "nan", "2", "False"],
        ["3", 'say "a, b"\nc', "1e-20", "-inf", "True"],
    ]
    assert csv_text(columns, with_names=False) == csv_text(columns, with_names=True).split("\n", 1)[1]


def test_items_made_ahead_come_in_order_and_errors_where_they_happen():
    def items(number):
        yield from range(number)
        raise KeyError("end")

    made = ahead(items(20))
    assert [next(made) for _ in range(20)] == list(range(20))
    with pytest.raises(KeyError, match="end"):
        next(made)


def test_a_maker_ends_when_nobody_wants_more():
    closed, before = [], threading.active_count()

    def items():
        try:
            yield from range(10**9)
        finally:
            closed.append(True)

    numbers = ahead(items())
    assert next(numbers) == 0
    numbers.close()
    assert closed == [True]
    assert threading.active_count() == before
