import numpy as np
import pandas as pd
import pytest

from polymode.application.datasets.frames import as_frame, frames_of, is_frame, read_frame
from polymode.errors import InputError

LINES = "name,size,price\nÄpfel,1,2.5\nBirnen,2,3.5\n"
VALUES = [["Äpfel", 1, 2.5], ["Birnen", 2, 3.5]]


def written(tmp_path, content, name="a.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_are_seen(tmp_path, encoding):
    frame = read_frame(written(tmp_path, LINES.encode(encoding)))
    assert list(frame.columns) == ["name", "size", "price"]
    assert frame.to_numpy().tolist() == VALUES


def test_what_windows_writes_is_read_with_a_warning(tmp_path):
    path = written(tmp_path, LINES.encode("cp1252"))
    with pytest.warns(UserWarning, match=r"a\.csv is not UTF-8 and is read as cp1252") as said:
        frame = read_frame(path)
    assert len(said) == 1
    assert frame.to_numpy().tolist() == VALUES
    assert read_frame(path, encoding="cp1252").to_numpy().tolist() == VALUES


def test_letters_may_lie_across_the_blocks_that_are_looked_at(tmp_path):
    line = "ä" * 1000 + ",1\n"
    path = written(tmp_path, "aa,b\n" + line * (2**24 // len(line.encode()) + 2))
    assert set(read_frame(path)["aa"]) == {"ä" * 1000}


@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ";"), ("b.csv", "\t"), ("c.csv", ","), ("d.tsv", ","), ("e.csv", "|")]
)
def test_the_separator_is_seen_in_the_first_line(tmp_path, name, separator):
    frame = read_frame(written(tmp_path, LINES.replace(",", separator), name))
    assert frame.to_numpy().tolist() == VALUES


def test_separators_within_quotes_are_none(tmp_path):
    frame = read_frame(written(tmp_path, '"a;b;c","d;e",f\n"x,y",1,"2\n3"\n'))
    assert list(frame.columns) == ["a;b;c", "d;e", "f"]
    assert frame.to_numpy().tolist() == [["x,y", 1, "2\n3"]]


def test_a_decimal_comma_that_is_asked_for(tmp_path):
    path = written(tmp_path, "a;b\n1.234,5;0,25\n2,5;1,125\n")
    assert read_frame(path, decimal=",").to_numpy().tolist() == [[1234.5, 0.25], [2.5, 1.125]]
    path = written(tmp_path, "a;b\n1,234.5;0.25\n")
    assert read_frame(path, decimal=".").to_numpy().tolist() == [[1234.5, 0.25]]
    assert read_frame(written(tmp_path, "a,b\n1.5,2\n"), decimal=".").to_numpy().tolist() == [[1.5, 2]]


def test_rows_keep_their_numbers_and_empty_ones_are_skipped(tmp_path):
    frame = read_frame(written(tmp_path, "a,b\n1,2\n\n,\n3,\n"))
    assert frame.index.tolist() == [0, 3]
    np.testing.assert_array_equal(frame.to_numpy(), [[1, 2], [3, np.nan]])


def test_a_separator_at_the_end_of_every_line_makes_no_column(tmp_path):
    frame = read_frame(written(tmp_path, "a,b,\n1,2,\n3,4,\n"))
    assert {name: frame[name].tolist() for name in frame} == {"a": [1, 3], "b": [2, 4]}
    frame = read_frame(written(tmp_path, "a,b,\n1,2,7\n3,4,\n"))
    assert frame["Unnamed: 2"].tolist()[0] == 7


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ("", {}, "cannot be read as a table"),
        ("\n\n", {}, "cannot be read as a table"),
        ("a,b\n", {}, "has no rows"),
        ("a,b\n,\n", {}, "has no rows"),
        (b"\0" * 100, {}, "has no rows"),
        ("1,2\n3,4\n", {}, r"first line .* holds numbers \(1, 2\)"),
        ("1,1\n3,4\n", {}, "first line .* holds numbers"),
        ("a,b\n1,2\n3,4,5\n", {}, "cannot be read as a table .*Expected 2 fields in line 3, saw 3"),
        ("a,b\n1,2,3\n4,5,6\n", {}, "cannot be read as a table .*Length of header"),
        ('a,b\n"1,2\n', {}, "cannot be read as a table .*EOF inside string"),
        ('a,b,"a",y,b\n1,2,3,4,5\n', {}, "^.* has more than one column named 'a', 'b'[^\n]*$"),
        (LINES, {"encoding": "klingon"}, "unknown encoding"),
        (LINES, {"encoding": "utf-16"}, "does not start with BOM"),
        (LINES, {"encoding": "ascii"}, "cannot be read as a table"),
        (LINES, {"separator": ", "}, "separator=', ' must be a character"),
        (LINES, {"separator": 3}, "separator=3 must be a character"),
        (LINES, {"separator": ";"}, "has one column.* Set separator=','"),
        (LINES, {"decimal": "x"}, "decimal='x': allowed are"),
        (LINES, {"decimal": ","}, "is what .* is split at"),
    ],
)
def test_files_that_cannot_be_read_are_explained(tmp_path, content, options, reason):
    with pytest.raises(InputError, match=reason):
        read_frame(written(tmp_path, content), **options)


def test_names_like_those_that_pandas_gives_to_repeated_ones_are_allowed(tmp_path):
    frame = read_frame(written(tmp_path, "a,a.1,y\n1,2,3\n"))
    assert frame.to_dict("list") == {"a": [1], "a.1": [2], "y": [3]}


@pytest.mark.parametrize("kind", ["feather", "parquet", "xlsx"])
def test_other_files_hold_the_same(tmp_path, kind):
    data = pd.DataFrame(
        {"a": [1, 2], "b": ["x", "y"], "c": pd.to_datetime(["2020-01-01 00:00", "2021-02-03 04:05"])}
    )
    path = tmp_path / f"a.{kind}"
    if kind == "xlsx":
        data.to_excel(path, index=False)
    else:
        (data.to_feather if kind == "feather" else data.to_parquet)(path)
    frame = read_frame(path)
    assert {name: frame[name].tolist() for name in frame} == {name: data[name].tolist() for name in data}


def test_sheets_are_chosen_by_name_or_number(tmp_path):
    path = tmp_path / "a.xlsx"
    with pd.ExcelWriter(path) as file:
        pd.DataFrame({"a": [1]}).to_excel(file, sheet_name="first", index=False)
        pd.DataFrame({"b": [2]}).to_excel(file, sheet_name="second", index=False)
        pd.DataFrame([[1, 2]], columns=["b", "b"]).to_excel(file, sheet_name="twice", index=False)
        pd.DataFrame([[1, 2]], columns=[3, 4]).to_excel(file, sheet_name="numbers", index=False)
        pd.DataFrame().to_excel(file, sheet_name="empty", index=False)
    assert read_frame(path).to_dict("list") == {"a": [1]}
    for sheet in (1, "second"):
        assert read_frame(path, sheet=sheet).to_dict("list") == {"b": [2]}
    for sheet, reason in (
        ("third", "sheet 'third'"),
        (9, "sheet 9"),
        (None, "must be the name of a sheet"),
        ("twice", "more than one column named 'b'"),
        ("numbers", "holds numbers"),
        ("empty", "has no rows"),
    ):
        with pytest.raises(InputError, match=reason):
            read_frame(path, sheet=sheet)


def test_frames_of_pandas_are_taken_with_names_of_text():
    data = pd.DataFrame({1: [5, 6], "b": ["x", None]}, index=[3, 3])
    frame = as_frame(data)
    assert list(frame.columns) == ["1", "b"]
    assert (frame.index.tolist(), frame["1"].tolist()) == ([0, 1], [5, 6])
    assert list(data.columns) == [1, "b"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (pd.DataFrame({"a": []}), "has no rows"),
        (pd.DataFrame(), "has no rows"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "more than one column named 'a'"),
        (pd.DataFrame([[1, 2]], columns=[1, "1"]), "more than one column named '1'"),
        (pd.DataFrame([[1]], columns=pd.MultiIndex.from_tuples([("a", "b")])), "2 rows of column names"),
        (pd.Series([1]), "is a Series, not a data frame"),
    ],
)
def test_frames_that_cannot_be_used_are_explained(value, reason):
    with pytest.raises(InputError, match=reason):
        as_frame(value)


def test_frames_of_polars_hold_the_same():
    polars = pytest.importorskip("polars")
    data = polars.DataFrame({"a": [1, None], "b": ["x", "y"]})
    for value in (data, data.lazy()):
        assert is_frame(value)
        assert as_frame(data)["b"].tolist() == ["x", "y"]
        np.testing.assert_array_equal(as_frame(value)["a"], [1, np.nan])


def test_kept_columns_are_text_as_it_stands_in_the_file(tmp_path):
    path = written(tmp_path, "id,a\n007,1\n\n,2\nNA,3\n")
    [(_, kept)] = frames_of(path, None, keep=["a", "id", "a"])
    assert {name: values.tolist() for name, values in kept.items()} == {
        "a": ["1", "2", "3"],
        "id": ["007", "", "NA"],
    }
    with pytest.raises(InputError, match="Unknown column to keep"):
        list(frames_of(path, None, keep=["b"]))


@pytest.mark.parametrize("word", [b"numpy_type", b"index_columns", b"columns", b"start", b"unicode"])
@pytest.mark.parametrize("kind", ["feather", "parquet"])
def test_damage_to_what_pandas_writes_of_columns_is_read_or_refused(tmp_path, word, kind):
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})
    path = tmp_path / f"a.{kind}"
    getattr(frame, f"to_{kind}")(path)
    path.write_bytes(path.read_bytes().replace(word, word[:-1] + b"?"))
    try:
        found = read_frame(path)
    except InputError as error:
        assert f"a.{kind} cannot be read as {kind.title()}" in str(error)  # noqa: PT017
    else:
        pd.testing.assert_frame_equal(found, frame, check_dtype=False)
