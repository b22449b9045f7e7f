import sys

import numpy as np
import pandas as pd
import pytest
import torch

from polymode.application.datasets.tables import read_rows, read_table, table
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
            "price": 2.0 * number,
        }
    )


@pytest.fixture(params=["csv", "tsv", "parquet"])
def path(request, tmp_path):
    path = tmp_path / f"houses.{request.param}"
    data = frame()
    if request.param == "parquet":
        data.to_parquet(path)
    else:
        data.to_csv(path, index=False, sep="," if request.param == "csv" else "\t")
    return path


def write_csv(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text)
    return path


def raw_inputs(data, ready):
    return data.inputs * torch.tensor(ready.input_scale) + torch.tensor(ready.input_shift)


def test_the_last_column_is_regressed_where_it_holds_fractions(path):
    task = table(path, drop=["kind"], batch_size=3)
    split, ready = task.splits[0], task.splits[0].preprocessing
    assert (task.name, task.likelihood, task.num_outputs) == ("houses", "gaussian", 1)
    assert (ready.columns, ready.target, ready.source) == (("age", "member"), "price", "table")
    assert (split.train.num_examples, split.test.num_examples, split.train.batch_size) == (16, 4, 3)
    seen = []
    for data in (split.train, split.test):
        raw = raw_inputs(data, ready)
        prices = data.targets * ready.target_scale + ready.target_shift
        torch.testing.assert_close(prices, 2 * (raw[:, 0] - 0.5), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(raw[:, 1], 1 - (raw[:, 0] - 0.5).round() % 2, atol=1e-4, rtol=1e-4)
        seen += prices.round().int().tolist()
    assert sorted(seen) == list(range(0, 40, 2))
    torch.testing.assert_close(split.train.inputs.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert split.train.targets.mean().item() == pytest.approx(0, abs=1e-6)


def test_text_is_classified_with_sorted_classes(path):
    task = table(path, target="kind", num_validation=2, splits=3)
    assert (task.likelihood, task.num_outputs, len(task.splits)) == ("categorical", 3, 3)
    split = task.splits[0]
    assert split.preprocessing.classes == ("ant", "cat", "dog")
    assert (split.train.num_examples, split.validation.num_examples, split.test.num_examples) == (14, 2, 4)
    number = (raw_inputs(split.test, split.preprocessing)[:, 0] - 0.5).round().int()
    assert split.test.targets.tolist() == [(1, 2, 0)[row % 3] for row in number.tolist()]
    assert split.test.targets.dtype == torch.int64
    assert not torch.equal(task.splits[1].test.targets, split.test.targets) or not torch.equal(
        task.splits[1].test.inputs, split.test.inputs
    )


def test_new_tables_are_read_by_column_name(path, tmp_path):
    ready = table(path, drop=["kind"]).splits[0].preprocessing
    new = pd.DataFrame({"price": [4.0], "extra": ["text"], "member": [True], "age": [2.5]})
    new.to_csv(tmp_path / "new.csv", index=False)
    inputs, targets = read_table(tmp_path / "new.csv", ready, need_target=True)
    expected = [
        (2.5 - ready.input_shift[0]) / ready.input_scale[0],
        (1 - ready.input_shift[1]) / ready.input_scale[1],
    ]
    assert inputs.tolist() == [pytest.approx(expected, rel=1e-5)]
    assert targets.tolist() == [pytest.approx((4 - ready.target_shift) / ready.target_scale, rel=1e-5)]
    new.drop(columns="price").to_csv(tmp_path / "new.csv", index=False)
    assert read_table(tmp_path / "new.csv", ready)[1] is None
    with pytest.raises(InputError, match=r"Unknown target column of .* 'price'"):
        read_table(tmp_path / "new.csv", ready, need_target=True)
    new.drop(columns=["age", "member"]).to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(InputError, match=r"lacks 2 of the columns .*: age, member"):
        read_table(tmp_path / "new.csv", ready)


def test_a_class_that_was_not_trained_on_is_an_error(path, tmp_path):
    ready = table(path, target="kind", drop=["price"]).splits[0].preprocessing
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
        ([0.0, 1.0] * 25, None, "gaussian", 1),
        ([0.0, 1.0] * 25, "classification", "categorical", 2),
    ],
)
def test_the_kind_of_task_follows_from_the_target(tmp_path, values, task, likelihood, num_outputs):
    pd.DataFrame({"x": range(50), "y": values}).to_csv(tmp_path / "a.csv", index=False)
    made = table(tmp_path / "a.csv", task=task)
    assert (made.likelihood, made.num_outputs) == (likelihood, num_outputs)


@pytest.mark.parametrize(("kind", "likelihood"), [("Int64", "categorical"), ("Float64", "gaussian")])
def test_numbers_of_pandas_own_types(tmp_path, kind, likelihood):
    data = pd.DataFrame({"x": range(10), "y": [2, 1] * 5}).astype(kind)
    data.to_parquet(tmp_path / "a.parquet")
    task = table(tmp_path / "a.parquet")
    assert task.likelihood == likelihood
    assert task.splits[0].preprocessing.classes == (("1", "2") if kind == "Int64" else ())
    data["y"] = pd.date_range("2020-01-01", periods=10)
    data.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="allowed are numbers, truth values and text"):
        table(tmp_path / "a.parquet")
    data["x"] = data["y"]
    data["y"] = range(10)
    data.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"'x' .* is not numeric: '2020-01-01 00:00:00' in row 1"):
        table(tmp_path / "a.parquet")


def test_integer_classes_are_sorted_as_numbers(tmp_path):
    pd.DataFrame({"x": range(50), "y": [10, 9, 2, 10, 9] * 10}).to_csv(tmp_path / "a.csv", index=False)
    ready = table(tmp_path / "a.csv").splits[0].preprocessing
    assert ready.classes == ("2", "9", "10")
    write_csv(tmp_path, "x,y\n1,9.0\n2,10.0\n")
    assert read_table(tmp_path / "a.csv", ready, need_target=True)[1].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (
            "a,b\n1,2\n\n3,\n,5\n",
            {},
            r"column 'a' .* 1 missing values, the first in line 5\..*data.drop=\['a'\]",
        ),
        ("a,b\n1,2\n3,\n", {}, r"column 'b' .* 1 missing values, the first in line 3"),
        ("a,b\n1,2\nred,3\n", {}, r"'a' .* not numeric: 'red' in line 3\. Encode .*data.drop=\['a'\]"),
        ("a,b\n1,2\ninf,3\n", {}, "'a' .* infinite value in line 3"),
        ("a,b\n1,2\n2,2\n", {}, "target 'b' .* is constant"),
        ("a,b\n1,u\n2,v\n", {}, "text with 2 different values in 2 rows"),
        ("a,b\n1,u\n2,v\n2,v\n", {"task": "regression"}, "a regression needs numbers"),
        ("a,price\n1,2\n2,3\n", {"target": "prize"}, "Unknown target column .*'prize'. Did you mean 'price'"),
        ("a,b\n1,2\n2,3\n", {"drop": ["c"]}, "Unknown column to drop"),
        ("a,b\n1,2\n2,3\n", {"drop": ["b"]}, "needs a target and at least one feature"),
        ("a,b\n1,2\n2,3\n", {"task": "ranking"}, "task='ranking': allowed are"),
        ("a,b\n1,2\n2,3\n", {"splits": 0}, "splits must be a whole number of at least 1"),
        ("a,b\n1,2\n2,3\n", {"test_share": 1.5}, "test_share must lie between 0 and 1, got 1.5"),
        ("a,b\n1,2\n2,3\n", {"test_share": 0.01}, "of the 2 examples .* gives 0 test examples"),
        ("a,b\n1,2\n2,3\n", {"test_share": 0.5, "num_validation": 1}, "leave nothing of 2 to train on"),
        ("1,2\n3,4\n", {}, "first line .* holds numbers"),
        ("a,b\n1,2\n3,4,5\n", {}, "cannot be read as a table"),
        ("", {}, "cannot be read as a table"),
        ("a,b\n", {}, "has no rows"),
    ],
)
def test_tables_that_cannot_be_used_are_explained(tmp_path, text, options, reason):
    with pytest.raises(InputError, match=reason):
        table(write_csv(tmp_path, text), **options)


def test_another_separator(tmp_path):
    path = write_csv(tmp_path, "a;b\n1;2.5\n2;3.5\n3;4.5\n")
    assert table(path, separator=";", test_share=0.4).splits[0].preprocessing.columns == ("a",)


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(InputError, match="There is no file"):
        table(tmp_path / "no.csv")
    with pytest.raises(InputError, match=r"allowed endings are .csv, .tsv, .parquet, .npz"):
        table(tmp_path / "no.xlsx")
    (tmp_path / "a.parquet").write_bytes(b"rubbish")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        table(tmp_path / "a.parquet")
    (tmp_path / "a.npz").write_bytes(b"rubbish")
    with pytest.raises(InputError, match="cannot be read as arrays"):
        table(tmp_path / "a.npz")


@pytest.mark.parametrize(("package", "ending"), [("pandas", "csv"), ("pyarrow", "parquet")])
def test_a_missing_package_is_named(tmp_path, package, ending, monkeypatch):
    (tmp_path / f"a.{ending}").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"{package}: pip install 'polymode\[data\]'"):
        table(tmp_path / f"a.{ending}")


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


def test_the_separator_is_seen_in_the_first_line(tmp_path):
    rows = [(n, n / 2) for n in range(10)]
    for name, separator in (("a.csv", ";"), ("b.csv", "\t"), ("c.csv", ","), ("d.tsv", ","), ("e.tsv", "\t")):
        path = tmp_path / name
        path.write_text(separator.join("xy") + "\n" + "".join(f"{a}{separator}{b}\n" for a, b in rows))
        task = table(path)
        ready = task.splits[0].preprocessing
        assert ready.columns == ("x",)
        _, targets = read_table(path, ready, need_target=True)
        raw = targets * ready.target_scale + ready.target_shift
        assert raw.tolist() == pytest.approx([b for _, b in rows], abs=1e-5)


def test_a_header_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,2,3\n4,5,6\n7,8,9\n")
    with pytest.raises(InputError, match=r"cannot be read as a table .*Length of header"):
        table(path)


def test_columns_that_are_constant_in_training_do_not_matter_in_new_rows(tmp_path):
    rare = pd.DataFrame({"size": np.arange(40.0), "rare": np.zeros(40), "price": 3 * np.arange(40.0)})
    rare.to_csv(tmp_path / "train.csv", index=False)
    ready = table(tmp_path / "train.csv").splits[0].preprocessing
    assert ready.constant == ("rare",)
    new = pd.DataFrame({"size": [5.0, 5.0], "rare": [0, 1]})
    new.to_csv(tmp_path / "new.csv", index=False)
    inputs, _ = read_table(tmp_path / "new.csv", ready)
    torch.testing.assert_close(inputs[0], inputs[1], rtol=0, atol=0)


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


@pytest.mark.parametrize("first", [0, 1, 1000])
@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_row_numbers_without_a_name_are_left_out(tmp_path, first, name):
    data = frame().drop(columns="kind")
    data.index = data.index + first
    data.to_csv(tmp_path / "a.csv", index_label=name or None)
    assert (tmp_path / "a.csv").read_text().startswith(f"{name},age")
    with pytest.warns(
        UserWarning, match=r"Column 1 of .*a\.csv has no name and numbers the rows: it is left"
    ):
        task = table(tmp_path / "a.csv")
    assert task.splits[0].preprocessing.columns == ("age", "member")
    data.reset_index(drop=True).to_csv(tmp_path / "new.csv", index=False)
    inputs, _ = read_table(tmp_path / "new.csv", task.splits[0].preprocessing)
    again, _ = read_table(tmp_path / "a.csv", task.splits[0].preprocessing)
    torch.testing.assert_close(inputs, again)


def test_other_columns_without_a_name_are_refused(tmp_path):
    path = write_csv(tmp_path, "a,,y\n1,2.5,0.1\n2,3.5,0.2\n4,9,0.3\n5,1,0.4\n6,1,0.5\n")
    with pytest.raises(InputError, match=r"Column 2 of .* has no name\. .*data\.drop=\['Unnamed: 1'\]"):
        table(path)
    assert table(path, drop=["Unnamed: 1"]).splits[0].preprocessing.columns == ("a",)
    path = write_csv(tmp_path, "a,b,y,\n" + "".join(f"{i},{i * i},{i / 3},\n" for i in range(9)))
    with pytest.raises(
        InputError, match=r"Column 4 of .* has no name"
    ):  # a separator at the end of each line
        table(path)


def test_names_that_occur_twice_are_refused(tmp_path):
    path = write_csv(tmp_path, 'a,b,"a",y,b,c\n' + "".join(f"{i},2,{i},4,5,{i / 3}\n" for i in range(9)))
    with pytest.raises(InputError, match="more than one column named 'a', 'b'"):
        table(path)
    path = write_csv(tmp_path, "a,a.1,y\n" + "".join(f"{i},{i * i},{i / 3}\n" for i in range(9)))
    assert table(path).splits[0].preprocessing.columns == ("a", "a.1")


def test_a_network_of_nameless_data_takes_columns_in_their_order(tmp_path):
    path = write_csv(tmp_path, "id,b,a,y\n007,1,2,5\n008,3,4,6\n")
    nameless = Preprocessing()
    with pytest.warns(
        UserWarning, match=r"without names of columns: those of .*a\.csv are taken .* \(b, a, y\)"
    ):
        inputs, about = read_rows(path, nameless, ["id"])
    assert inputs.tolist() == [[1, 2, 5], [3, 4, 6]]
    assert about["id"].tolist() == ["007", "008"]
    with pytest.warns(UserWarning, match=r"\(id, b, a\)"):
        inputs, targets = read_table(path, nameless, need_target=True)
    assert inputs.tolist() == [[7, 1, 2], [8, 3, 4]]
    assert targets is not None
    assert targets.tolist() == [5, 6]
