import sys

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from polymode.application.datasets.new_rows import read_rows, read_table
from polymode.application.datasets.tables import table
from polymode.application.datasets.targets import is_better_on_log_scale
from polymode.data.encoding import LeftOut
from polymode.data.task import Preprocessing
from polymode.errors import InputError

ROWS = 20


def frame():
    number = np.arange(ROWS)
    return pd.DataFrame(
        {
            "age": number + 0.5,
            "member": number % 2 == 0,
            "kind": [("cat", "dog", "ant")[row % 3] for row in number],
            "price": 2.25 * number,
        }
    )


@pytest.fixture(params=["csv", "tsv", "parquet", "feather", "xlsx", "frame"])
def source(request, tmp_path):
    data, kind = frame(), request.param
    path = tmp_path / f"houses.{kind}"
    if kind == "frame":
        return data
    if kind in ("csv", "tsv"):
        data.to_csv(path, index=False, sep="," if kind == "csv" else "\t")
    elif kind == "xlsx":
        data.to_excel(path, index=False)
    else:
        (data.to_parquet if kind == "parquet" else data.to_feather)(path)
    return path


def write_csv(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text)
    return path


def raw_inputs(data, ready):
    return data.inputs * torch.tensor(ready.input_scale) + torch.tensor(ready.input_shift)


def numbers_of(data, ready):
    return data.targets * ready.target_scale + ready.target_shift


def test_the_last_column_is_regressed_where_it_holds_fractions(source):
    task = table(source, drop=["kind"], batch_size=3)
    assert task.name == ("table" if isinstance(source, pd.DataFrame) else "houses")
    assert (task.likelihood.kind, task.num_outputs, len(task.splits)) == ("gaussian", 1, 1)
    for split in task.splits:
        ready = split.preprocessing
        assert (ready.columns, ready.target, ready.source) == (("age", "member"), "price", "table")
        assert (split.train.num_examples, split.test.num_examples, split.train.batch_size) == (16, 4, 3)
        seen = []
        for data in (split.train, split.test):
            raw, prices = ready.raw(data.inputs), numbers_of(data, ready)
            torch.testing.assert_close(prices, 2.25 * (raw[:, 0] - 0.5), atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(raw[:, 1], 1 - (raw[:, 0] - 0.5).round() % 2, atol=1e-4, rtol=1e-4)
            seen += (prices / 2.25).round().int().tolist()
        assert sorted(seen) == list(range(ROWS))
        assert split.train.targets.mean().item() == pytest.approx(0, abs=1e-6)


def test_numbers_are_scaled_by_their_quartiles_and_pressed_together(source):
    split = table(source, drop=["kind"]).splits[0]
    ready = split.preprocessing
    ages = (numbers_of(split.train, ready) / 2.25 + 0.5).double().numpy()
    low, middle, high = np.quantile(ages, [0.25, 0.5, 0.75])
    scaled = (ages - middle) / ((high - low) / stats.norm.ppf(0.75) / 2)
    expected = scaled / np.sqrt(1 + (scaled / ready.bound) ** 2)
    np.testing.assert_allclose(split.train.inputs[:, 0], expected, rtol=1e-3, atol=1e-5)
    far, _ = read_table(pd.DataFrame({"age": [1e9, -1e9], "member": [True, False]}), ready)
    torch.testing.assert_close(far[:, 0], torch.tensor([3.0, -3.0]))


def test_a_number_that_is_mostly_one_value_is_scaled_by_its_deviation():
    rare = np.where(np.arange(100) % 10 == 0, 5.0, 0.0)
    split = table(pd.DataFrame({"rare": rare, "y": np.random.RandomState(0).randn(100)}), splits=1).splits[0]
    ready = split.preprocessing
    train = ready.raw(split.train.inputs)[:, 0].round().numpy()
    assert ready.input_shift[0] == pytest.approx(train.mean())
    assert ready.input_scale[0] == pytest.approx(train.std())


def test_text_is_classified_with_sorted_classes(source):
    task = table(source, target="kind", num_validation=3, splits=2)
    assert (task.likelihood.kind, task.num_outputs, len(task.splits)) == ("categorical", 3, 2)
    for split in task.splits:
        assert split.preprocessing.classes == ("ant", "cat", "dog")
        parts = (split.train, split.validation, split.test)
        assert [part.num_examples for part in parts] == [13, 3, 4]
        number = (split.preprocessing.raw(split.test.inputs)[:, 0] - 0.5).round().int()
        assert split.test.targets.tolist() == [(1, 2, 0)[row % 3] for row in number.tolist()]
        assert split.test.targets.dtype == torch.int64
        assert sorted(split.validation.targets.tolist()) == [0, 1, 2]
    first, second = (set(split.test.inputs[:, 0].tolist()) for split in task.splits)
    assert first != second


def test_the_training_file_gives_exactly_the_inputs_of_the_split(source):
    split = table(source, splits=1, test_share=0.3).splits[0]
    inputs, targets = read_table(source, split.preprocessing, need_target=True)
    known = {number: row for row, number in zip(inputs, targets.tolist(), strict=True)}
    assert len(known) == ROWS
    for data in (split.train, split.test):
        for row, target in zip(data.inputs, data.targets.tolist(), strict=True):
            assert torch.equal(known[target], row)


def test_new_tables_are_read_by_column_name(source, tmp_path):
    ready = table(source, drop=["kind"]).splits[0].preprocessing
    new = pd.DataFrame({"price": [4.0], "extra": ["text"], "member": [True], "age": [2.5]})
    new.to_csv(tmp_path / "new.csv", index=False)
    inputs, targets = read_table(tmp_path / "new.csv", ready, need_target=True)
    assert ready.raw(inputs).tolist() == [pytest.approx([2.5, 1.0], rel=1e-5)]
    assert targets.tolist() == [pytest.approx((4 - ready.target_shift) / ready.target_scale, rel=1e-5)]
    assert torch.equal(read_table(new, ready)[0], inputs)
    new.drop(columns="price").to_csv(tmp_path / "new.csv", index=False)
    assert read_table(tmp_path / "new.csv", ready)[1] is None
    with pytest.raises(InputError, match=r"has no column 'price', the target.*polymode predict needs none"):
        read_table(tmp_path / "new.csv", ready, need_target=True)
    new.drop(columns=["age", "member"]).to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(InputError, match=r"lacks 2 of the columns .*: age, member"):
        read_table(tmp_path / "new.csv", ready)


def test_a_document_without_names_still_knows_the_columns_it_encodes():
    ready = table(frame()).splits[0].preprocessing
    nameless = Preprocessing.from_config(ready.config() | {"columns": []})
    assert torch.equal(read_table(frame(), nameless)[0], read_table(frame(), ready)[0])
    with pytest.raises(InputError, match="lacks 1 of the columns"):
        read_table(frame().drop(columns="kind"), nameless)


def test_rows_unlike_those_of_training_are_named():
    ready = table(frame()).splits[0].preprocessing
    new = pd.DataFrame({"age": [3.0, 99.0, np.nan], "member": [True] * 3, "kind": ["cat", "eel", "cat"]})
    [(inputs, about)] = read_rows(new, ready, ["kind", "kind"])
    assert about["unlike"].tolist() == ["", "age; kind", "age"]
    assert about["row"].tolist() == [1, 2, 3]
    assert about["kind"].tolist() == ["cat", "eel", "cat"]
    assert bool(inputs.isfinite().all())


def test_kept_columns_are_those_of_the_file(tmp_path):
    path = write_csv(
        tmp_path, "code,a,y\n" + "".join(f"00{i},{i % 4},{i / 3}\n" for i in range(9)) + "\n007,1,2\n"
    )
    ready = table(path, drop=["code"]).splits[0].preprocessing
    [(_, about)] = read_rows(path, ready, ["a", "code", "a"])
    assert about["code"].tolist() == [f"00{i}" for i in range(9)] + ["007"]
    assert about["row"].tolist() == [*range(1, 10), 11]
    with pytest.raises(InputError, match="Unknown column to keep"):
        list(read_rows(path, ready, ["b"]))


def test_a_class_that_was_not_trained_on_is_an_error(source, tmp_path):
    ready = table(source, target="kind", drop=["price"]).splits[0].preprocessing
    new = pd.DataFrame({"age": [1, 2], "member": [True, False], "kind": ["dog", "cta"]})
    new.to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(InputError, match=r"'cta'. Did you mean 'cat'"):
        read_table(tmp_path / "new.csv", ready, need_target=True)
    new["kind"] = ["dog", "ant"]
    new.to_csv(tmp_path / "new.csv", index=False)
    assert read_table(tmp_path / "new.csv", ready, need_target=True)[1].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("values", "task", "likelihood", "num_outputs"),
    [
        (list(range(5)) * 10, None, "categorical", 5),
        (list(range(25)) * 2, None, "gaussian", 1),
        (list(range(25)) * 2, "classification", "categorical", 25),
        (list(range(5)) * 10, "regression", "gaussian", 1),
        ([True, False] * 25, None, "categorical", 2),
        ([0.0, 1.0] * 25, None, "categorical", 2),
        ([0.0, 1.5] * 25, None, "gaussian", 1),
        ([0.0, 1.5] * 25, "classification", "categorical", 2),
        ([1, 2, 3, 4, None] * 10, None, "categorical", 4),
        (["1,5", "2,5", "1.000,5"] * 10, None, "gaussian", 1),
        (["low", "high"] * 25, None, "categorical", 2),
    ],
)
def test_the_kind_of_task_follows_from_the_target(tmp_path, values, task, likelihood, num_outputs):
    data = pd.DataFrame({"x": np.arange(len(values)) / 7, "y": values})
    data.to_csv(tmp_path / "a.csv", index=False)
    for given in (data, tmp_path / "a.csv"):
        made = table(given, task=task)
        assert (made.likelihood.kind, made.num_outputs) == (likelihood, num_outputs)


def test_text_numbers_are_targets():
    texts = ["1,5", "2,5", "1.000,5", "0,512", "1,234", "?"]
    task = table(pd.DataFrame({"x": np.arange(30) / 7, "y": texts * 5}), scale="linear")
    found = {round(v, 3) for s in task.splits for v in numbers_of(s.train, s.preprocessing).tolist()}
    assert sorted(found) == pytest.approx([0.512, 1.234, 1.5, 2.5, 1000.5], abs=1e-2)
    assert task.remarks == ["5 rows without 'y' left out"]


@pytest.mark.parametrize("kind", ["Int64", "category", "string", "int64[pyarrow]"])
def test_targets_of_pandas_own_types(tmp_path, kind):
    data = pd.DataFrame({"x": np.arange(12) / 7, "y": pd.Series([2, 10, None] * 4, dtype="Int64")})
    data["y"] = data["y"].astype("string").astype(kind) if kind == "string" else data["y"].astype(kind)
    task = table(data, test_share=0.25)
    assert task.likelihood.kind == "categorical"
    assert set(task.splits[0].preprocessing.classes) == {"2", "10"}
    assert task.remarks == ["4 rows without 'y' left out"]
    assert (task.splits[0].train.num_examples, task.splits[0].test.num_examples) == (6, 2)


def test_categories_of_pandas_are_classes_however_many_they_are():
    data = pd.DataFrame({"x": np.arange(60) / 7, "y": pd.Series([*range(30)] * 2, dtype="category")})
    assert table(data).num_outputs == 30
    assert table(data, task="regression").num_outputs == 1


def test_large_whole_numbers_are_no_others():
    values = np.array([2**64 - 1, 2**63, 5] * 5, dtype=np.uint64)
    split = table(
        pd.DataFrame({"x": np.arange(15) / 7, "y": values}), task="regression", scale="linear"
    ).splits[0]
    assert split.preprocessing.target_shift > 2**62


def test_integer_classes_are_sorted_as_numbers(tmp_path):
    pd.DataFrame({"x": range(50), "y": [10, 9, 2, 10, 9] * 10}).to_csv(tmp_path / "a.csv", index=False)
    ready = table(tmp_path / "a.csv").splits[0].preprocessing
    assert ready.classes == ("2", "9", "10")
    write_csv(tmp_path, "x,y\n1,9.0\n2,10.0\n")
    assert read_table(tmp_path / "a.csv", ready, need_target=True)[1].tolist() == [1, 2]


SMALL = "a,b\n1,2.5\n2,3.5\n3,4.5\n4,5.5\n"


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("a,b\n1,2.5\ninf,3\n3,4\n", {}, "'a' holds an infinite value in row 2"),
        ("a,b\n1,2.5\n1e39,3\n3,4\n", {}, r"'a' holds a value beyond 3\.4e\+38 in row 2"),
        ("a,b\n1,2.5\n2,inf\n3,4\n", {}, "target 'b' .* infinite"),
        ("a,b\n1,2.5\n2,1e39\n3,4\n", {}, "target 'b' .* beyond"),
        ("a,b\n1,2\n2,2\n", {}, "target 'b' .* is constant"),
        ("a,b\n1,\n2,\n", {}, "No row of .* has a 'b'"),
        ("a,b\n1,u\n2,v\n", {}, "text with 2 different values in 2 rows"),
        ("a,b\n1,u\n2,v\n2,v\n", {"task": "regression"}, "a regression needs numbers"),
        ("a,b\n1,u\n2,v\n2,v\n", {"scale": "log"}, "the target has classes"),
        ("a,b\n1,1\n2,2\n3,3\n4,4\n5,5\n", {}, "Every class has one row"),
        ("a,b\n1,2\n1,3\n1,4\n", {}, r"no column to predict 'b' from: 'a' is left out \(constant\)"),
        ("a,price\n1,2\n2,3\n", {"target": "prize"}, "Unknown target column .*'prize'. Did you mean 'price'"),
        (SMALL, {"drop": ["c"]}, "Unknown column to drop"),
        (SMALL, {"drop": ["b"]}, "no column to predict 'a' from"),
        (SMALL, {"drop": ["b"], "target": "b"}, "Unknown target column"),
        (SMALL, {"group": "c"}, "Unknown group"),
        (SMALL, {"group": "b"}, "group='b' is the target"),
        (SMALL, {"order": "c"}, "Unknown order"),
        (SMALL, {"order": "b"}, "order='b' is the target"),
        (SMALL, {"order": "a", "group": "a"}, "cannot be whole groups"),
        (SMALL, {"order": "a", "splits": 2}, "has one split"),
        (SMALL, {"categories": ["c"]}, "Unknown category"),
        (SMALL, {"task": "ranking"}, "task='ranking': allowed are"),
        (SMALL, {"scale": "root"}, "scale='root': allowed are"),
        (SMALL, {"splits": 0}, "splits must be a whole number of at least 1"),
        (SMALL, {"test_share": 1.5}, "test_share must lie between 0 and 1, got 1.5"),
        (SMALL, {"test_share": 0.01}, "of the 4 examples .* gives 0 test examples"),
        (SMALL, {"test_share": 0.5, "num_validation": 2}, "num_validation=2 leaves nothing of 2"),
        ("a,b\n1,2.5\n", {}, "'a' is left out"),
    ],
)
def test_tables_that_cannot_be_used_are_explained(tmp_path, text, options, reason):
    with pytest.raises(InputError, match=reason):
        table(write_csv(tmp_path, text), **options)


@pytest.mark.parametrize("given", [None, 3, [1], pd.Series([1])])
def test_what_is_no_table_is_refused(given):
    with pytest.raises(InputError, match=f"path or a data frame .*, got {type(given).__name__}"):
        table(given)


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(InputError, match="There is no file"):
        table(tmp_path / "no.csv")
    with pytest.raises(InputError, match=r"allowed endings are .csv, .tsv, .parquet, .feather, .xlsx, .npz"):
        table(tmp_path / "no.doc")
    for ending, kind in (
        ("parquet", "Parquet"),
        ("feather", "Feather"),
        ("xlsx", "Excel"),
        ("npz", "arrays"),
    ):
        (tmp_path / f"a.{ending}").write_bytes(b"rubbish")
        with pytest.raises(InputError, match=f"cannot be read as {kind}"):
            table(tmp_path / f"a.{ending}")


@pytest.mark.parametrize(
    ("package", "ending"),
    [("pandas", "csv"), ("pyarrow", "parquet"), ("pyarrow", "feather"), ("openpyxl", "xlsx")],
)
def test_a_missing_package_is_named(tmp_path, package, ending, monkeypatch):
    (tmp_path / f"a.{ending}").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"{package}: pip install 'polymode\[data\]'"):
        table(tmp_path / f"a.{ending}")


# What columns become.


def messy():
    number = np.arange(60)
    return pd.DataFrame(
        {
            "id": number + 1,
            "size": [f"{n % 17},{n % 9}5" for n in number],
            "colour": [("red", "blue", "?")[n % 3] for n in number],
            "built": [f"{1 + n % 28:02}.{1 + n % 12:02}.{1990 + n % 20}" for n in number],
            "year": 1950 + number,
            "note": [f"note {n}" for n in number],
            "gap": [np.nan if n % 4 == 0 else n / 3 for n in number],
            "y": np.sin(number),
        }
    )


def test_messy_tables_are_encoded_alike_in_every_split_and_later():
    task = table(messy(), splits=3)
    kinds = {column.name: column.kind for column in task.splits[0].preprocessing.encoding}
    assert kinds == {
        "id": "left out",
        "size": "number",
        "colour": "category",
        "built": "date",
        "year": "number",
        "note": "left out",
        "gap": "number",
    }
    assert len({split.preprocessing.features for split in task.splits}) == 1
    for split in task.splits:
        ready = Preprocessing.from_config(split.preprocessing.config())
        raw = ready.raw(split.test.inputs)
        found = {name: raw[:, place] for place, name in enumerate(ready.features)}
        rows = (found["year"] - 1950).round().int().numpy()
        data = messy().iloc[rows]
        sizes = data["size"].str.replace(",", ".").astype(float)
        np.testing.assert_allclose(found["size"], sizes, atol=1e-3)
        assert found["colour is red"].round().tolist() == (data["colour"] == "red").astype(int).tolist()
        assert found["colour is missing"].round().tolist() == (data["colour"] == "?").astype(int).tolist()
        assert found["gap is missing"].round().tolist() == data["gap"].isna().astype(int).tolist()
        dates = pd.to_datetime(data["built"], format="%d.%m.%Y")
        origin = next(column.origin for column in ready.encoding if column.name == "built")
        np.testing.assert_allclose(found["days of built"], (dates - pd.Timestamp(origin)).dt.days, rtol=1e-3)


def test_a_decimal_comma_that_was_said_holds_for_new_tables(tmp_path):
    path = write_csv(tmp_path, "a;y\n" + "".join(f"{1 + i % 9},{i:03};{i},5\n" for i in range(40)))
    ready = table(path, decimal=",").splits[0].preprocessing
    expected = [1 + i % 9 + i / 1000 for i in range(40)]
    assert ready.raw(read_table(path, ready)[0])[:, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_columns_may_be_left_out_or_taken_for_names():
    task = table(messy(), drop="built", categories=["year"])
    kinds = {column.name: column for column in task.splits[0].preprocessing.encoding}
    assert "built" not in kinds
    assert isinstance(kinds["year"], LeftOut)
    assert task.remarks == [f"'year' is {kinds['year'].why}"]


def test_columns_that_are_constant_in_training_do_not_matter_in_new_rows():
    rare = pd.DataFrame({"size": np.arange(40.0), "rare": np.zeros(40), "price": 3.5 * np.arange(40.0)})
    ready = table(rare).splits[0].preprocessing
    assert ready.features == ("size",)
    inputs, _ = read_table(pd.DataFrame({"size": [5.0, 5.0], "rare": [0, 1]}), ready)
    torch.testing.assert_close(inputs[0], inputs[1], rtol=0, atol=0)
    # Not constant in the table, but in the training rows of a split.
    rare.loc[39, "rare"] = 1.0
    ready = table(rare, order="size").splits[0].preprocessing
    assert ready.constant == ("rare",)
    inputs, _ = read_table(pd.DataFrame({"size": [5.0, 5.0], "rare": [0, 1]}), ready)
    torch.testing.assert_close(inputs[0], inputs[1], rtol=0, atol=0)


@pytest.mark.parametrize("first", [0, 1, 1000])
@pytest.mark.parametrize("name", ["", "Unnamed: 0", "id", "X"])
def test_row_numbers_are_left_out(tmp_path, first, name):
    data = frame().drop(columns="kind")
    data.index = data.index + first
    data.to_csv(tmp_path / "a.csv", index_label=name or None)
    ready = table(tmp_path / "a.csv").splits[0].preprocessing
    assert ready.columns == ("age", "member")
    assert [column.about for column in ready.encoding if not column.features] == ["numbers the rows"]
    inputs, _ = read_table(data, ready)
    again, _ = read_table(tmp_path / "a.csv", ready)
    assert torch.equal(inputs, again)


@pytest.mark.parametrize("name", ["a b", "ü", "a,b", "a\nb", 'a"b', "data.drop=['"])
def test_names_of_any_letters(tmp_path, name):
    data = frame().rename(columns={"age": name})
    data.to_csv(tmp_path / "a.csv", index=False)
    ready = table(tmp_path / "a.csv").splits[0].preprocessing
    assert ready.columns[0] == name
    assert torch.equal(read_table(tmp_path / "a.csv", ready)[0], read_table(data, ready)[0])


def test_frames_of_any_index_and_of_numbered_columns():
    data = frame()
    expected = table(data).splits[0]
    data.index = [7] * ROWS
    assert torch.equal(table(data).splits[0].train.inputs, expected.train.inputs)
    data.columns = range(4)
    numbered = table(data, target=3).splits[0]
    assert torch.equal(numbered.train.inputs, expected.train.inputs)
    assert numbered.preprocessing.target == "3"


# Rows.


def test_groups_stay_together():
    data = frame().assign(town=np.arange(ROWS) // 4)
    for split in table(data, target="price", group="town").splits:
        ready = split.preprocessing
        towns = [
            (ready.raw(part.inputs)[:, 0].round(decimals=1) // 4).int() for part in (split.train, split.test)
        ]
        assert not set(towns[0].tolist()) & set(towns[1].tolist())
        assert "town" not in ready.columns
        assert split.groups.tolist() == towns[0].tolist()
        assert split.test.num_examples == 4


@pytest.mark.parametrize("kind", ["number", "text", "date"])
def test_the_last_rows_in_time_are_tested_on(kind):
    when = np.random.RandomState(0).permutation(ROWS)
    dates = pd.Series(pd.Timestamp("2020-01-25") + pd.to_timedelta(when, unit="D"))
    column = {"number": when, "text": dates.dt.strftime("%d.%m.%Y"), "date": dates}[kind]
    data = pd.DataFrame({"t": column, "x": when / 3, "y": 1.5 * when})
    data.loc[ROWS] = [None, 1.0, 1.0]
    task = table(data, order="t", num_validation=3)
    assert task.remarks == [
        "1 row without 't' left out",
        "rows in the order of 't', the last ones to test on",
    ]
    split = task.splits[0]
    rows = [
        (numbers_of(part, split.preprocessing) / 1.5).round().int().tolist()
        for part in (split.train, split.validation, split.test)
    ]
    assert rows == [list(range(13)), [13, 14, 15], [16, 17, 18, 19]]
    assert (len(task.splits), split.ordered) == (1, True)


def test_only_dates_and_numbers_are_an_order():
    with pytest.raises(InputError, match="must be a column of dates or numbers, it is of kind 'category'"):
        table(frame(), order="kind")


def test_small_tables_are_divided_three_times_where_it_is_left_open():
    rows = np.random.RandomState(0).randn(2000, 2)
    assert len(table(pd.DataFrame(rows[:1999], columns=["x", "y"]), splits=None).splits) == 3
    assert len(table(pd.DataFrame(rows, columns=["x", "y"]), splits=None).splits) == 1
    assert len(table(pd.DataFrame(rows[:1999], columns=["x", "y"])).splits) == 1


def test_numbers_with_stray_text_are_no_classes():
    rows = pd.DataFrame({"x": range(100), "y": [*(f"{i * 1.5}" for i in range(90)), *["tbd"] * 10]})
    with pytest.raises(
        InputError, match=r"10 of 100 values of the target 'y' are no numbers.*'tbd' in row 91"
    ):
        table(rows)
    assert len(table(rows, task="classification").splits[0].preprocessing.classes) == 91


# Meaning of the target.


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5, 1.0, 2.0])
def test_a_log_scale_is_taken_where_it_is_likelier(spread):
    values = np.exp(3 + spread * np.random.RandomState(0).randn(400))
    linear = stats.norm.logpdf(values, values.mean(), values.std()).mean()
    log = stats.lognorm.logpdf(values, np.log(values).std(), scale=np.exp(np.log(values).mean())).mean()
    targets = torch.from_numpy(values)
    assert is_better_on_log_scale(targets, targets) == (log - linear > 0.1)
    task = table(pd.DataFrame({"x": np.arange(400) / 7, "y": values}), splits=1)
    assert (task.likelihood.log_scale is not None) == (log - linear > 0.1)
    assert len(task.likelihoods) == (2 if task.likelihood.log_scale else 3)


def test_a_log_scale_is_never_taken_of_numbers_that_are_not_positive():
    values = np.exp(2 * np.random.RandomState(0).randn(100))
    data = pd.DataFrame({"x": np.arange(100) / 7, "y": values - values.min()})
    assert table(data).likelihood.log_scale is None
    with pytest.raises(InputError, match="scale='log' needs positive targets"):
        table(data, scale="log")
    assert table(data.assign(y=values), scale="linear").likelihood.log_scale is None


def test_a_log_scale_that_is_asked_for_is_given_to_a_named_likelihood():
    values = np.exp(np.random.RandomState(0).randn(100))
    task = table(pd.DataFrame({"x": np.arange(100) / 7, "y": values}), likelihood="gaussian", scale="log")
    assert task.likelihood.log_scale is not None
    assert (
        table(pd.DataFrame({"x": np.arange(100) / 7, "y": values}), likelihood="gaussian").likelihood
        == "gaussian"
    )


# Arrays.


@pytest.mark.parametrize("names", [("x", "y"), ("inputs", "targets")])
def test_arrays_with_test_data_of_their_own(tmp_path, names):
    x = np.arange(12.0).reshape(6, 2)
    first, second = names
    arrays = {first: x, second: [0, 1, 0, 1, 2, 2], f"{first}_test": x[:2] + 1, f"{second}_test": [1, 0]}
    np.savez(tmp_path / "a.npz", **arrays)
    task = table(tmp_path / "a.npz")
    split, ready = task.splits[0], task.splits[0].preprocessing
    assert (split.train.num_examples, split.test.targets.tolist(), task.num_outputs) == (6, [1, 0], 3)
    assert ready.input_shift == (5, 6)
    torch.testing.assert_close(raw_inputs(split.test, ready), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    np.savez(tmp_path / "new.npz", **{first: x[:2] + 1})
    inputs, targets = read_table(tmp_path / "new.npz", ready)
    assert torch.equal(inputs, split.test.inputs)
    assert targets is None
    np.savez(tmp_path / "new.npz", **{first: x[:, :1]})
    with pytest.raises(InputError, match=r"\[6, 1\] given, the network was trained on 2 columns"):
        read_table(tmp_path / "new.npz", ready)


def test_arrays_of_images_are_standardised_by_channel(tmp_path):
    x = np.random.RandomState(0).rand(10, 3, 4, 4)
    np.savez(tmp_path / "a.npz", x=x, y=["a", "b"] * 5)
    task = table(tmp_path / "a.npz")
    assert task.model == "smallcnn"
    assert len(task.splits[0].preprocessing.input_shift) == 3
    assert task.splits[0].preprocessing.classes == ("a", "b")


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": np.zeros((3, 1))}, "must hold arrays x and y, or inputs and targets; it holds x"),
        ({"x": np.zeros((3, 1)), "y": np.arange(2)}, "x has 3 rows and y has 2"),
        ({"x": np.array([[1.0], [np.nan]]), "y": [1, 2]}, "x of .* has 1 rows with NaN .* first in row 2"),
        ({"x": np.zeros((2, 1)), "y": [1.0, np.nan]}, "y of .* has 1 rows with NaN"),
        ({"x": np.zeros((2, 1)), "y": np.zeros((2, 2))}, r"one number a row \[N\], got the shape \[2, 2\]"),
        ({"x": np.array(["a", "b"]), "y": [1, 2]}, "must be numbers"),
        ({"x": np.array([None, 1]), "y": [1, 2]}, "cannot be read as arrays"),
        (
            {"x": np.zeros((2, 1)), "y": [1, 2], "x_test": np.zeros((2, 1))},
            "but not both of x_test and y_test",
        ),
    ],
)
def test_arrays_that_cannot_be_used_are_explained(tmp_path, arrays, reason):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=reason):
        table(tmp_path / "a.npz")
    with pytest.raises(InputError, match=r"name columns; the arrays of .* have none"):
        table(tmp_path / "a.npz", target="y")


def test_pixels_that_are_constant_in_training_do_not_matter_in_test_rows(tmp_path):
    random = np.random.default_rng(0)
    x, y = random.integers(0, 17, (60, 64)).astype(np.uint8), np.arange(60) % 3
    x[:, [0, 32]] = 0
    x_test = x[:10].copy()
    x_test[0, 32] = 16
    np.savez(tmp_path / "digits.npz", x=x, y=y, x_test=x_test, y_test=y[:10])
    split = table(tmp_path / "digits.npz").splits[0]
    assert split.preprocessing.constant == ("0", "32")
    assert not split.test.inputs[:, [0, 32]].any()
    assert split.test.inputs.abs().max() < 10


def test_a_target_that_is_constant_in_the_training_rows_is_an_error(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(9.0), y=np.full(9, 0.1), x_test=[1.0, 2.0], y_test=[1.0, 2.0])
    with pytest.raises(InputError, match=r"target 'y' is constant \(0.1\) in the 9 training rows"):
        table(tmp_path / "a.npz")


def test_a_network_of_nameless_data_takes_columns_in_their_order(tmp_path):
    path = write_csv(tmp_path, "id,b,a,y\n007,1,2,5\n008,3,4,6\n")
    nameless = Preprocessing()
    with pytest.warns(
        UserWarning, match=r"without names of columns: those of .*a\.csv are taken .* \(b, a, y\)"
    ):
        [(inputs, about)] = read_rows(path, nameless, ["id"])
    assert inputs.tolist() == [[1, 2, 5], [3, 4, 6]]
    assert about["id"].tolist() == ["007", "008"]
    with pytest.warns(UserWarning, match=r"\(id, b, a\)"):
        inputs, targets = read_table(path, nameless, need_target=True)
    assert inputs.tolist() == [[7, 1, 2], [8, 3, 4]]
    assert targets is not None
    assert targets.tolist() == [5, 6]


def test_cells_of_another_kind_in_a_training_table_are_told():
    dates = [*pd.date_range("2020-01-01", periods=99).astype(str), "someday"]
    rows = pd.DataFrame({"day": dates, "size": [*map(str, range(99)), "large"], "y": np.arange(100) + 0.5})
    assert table(rows).remarks == [
        "1 of 100 cells of 'day' hold no date (the first 'someday' in row 100) and are taken as gaps",
        "1 of 100 cells of 'size' hold no number (the first 'large' in row 100) and are taken as gaps",
    ]


def test_arrays_without_targets_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(0))
    with pytest.raises(InputError, match="x has 3 rows and y has 0; they must be equal and not 0"):
        table(tmp_path / "a.npz")
