"""New rows in parts: what a row becomes depends on no other one, however a file is cut and stored."""

import warnings

import numpy as np
import pytest
import torch

from polymode.application.datasets.arrays import npz_rows
from polymode.application.datasets.new_rows import ROW, UNLIKE, read_rows, read_table
from polymode.application.datasets.tables import table
from polymode.data.task import Preprocessing
from polymode.errors import InputError

pd = pytest.importorskip("pandas")
NUMBER = 60


def training():
    """A table with every kind of column."""
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "size": random.normal(size=NUMBER).round(4),
            "price": [f"{number:.2f}".replace(".", ",") for number in random.uniform(1, 9, NUMBER)],
            "gaps": np.where(np.arange(NUMBER) % 7 == 0, np.nan, random.normal(size=NUMBER)),
            "code": ["1", "2", "x"] * (NUMBER // 3),
            "grade": random.integers(0, 3, NUMBER),
            "member": [True, False] * (NUMBER // 2),
            "day": pd.date_range("2020-01-01", periods=NUMBER, freq="3D").strftime("%d/%m/%Y"),
            "y": random.normal(size=NUMBER),
        }
    )


def prepared():
    return table(training(), target="y", categories=["grade"]).splits[0].preprocessing


# Cells that readers take for something else where they are alone: each stands beside plain ones.
CELLS = {
    "size": ["1", "1.5", " 2 ", "-3e-1", "1,234", "", "NA", "?", "big", "0.1234567890123456", "True", ".5"],
    "price": ["1,5", "1.234", "2", "3,25", "", "1.234,5", "-", "free", "7", "1,234", "€ 4", "5.5"],
    "gaps": ["", "1", "nan", "2.0", "", "0", "-1", "none", "3", "1e2", "4", ""],
    "code": ["1", "2.0", "x", "01", "", "7", "1", "1", "x ", "?", "2", "new"],
    "grade": ["0", "1.0", "2", "00", "x", "", "9", "1", "1", "2.00", "0", "1"],
    "member": ["True", "false", "1.0", "0", "yes", "", "no", "perhaps", "1", "TRUE", "0.0", "1"],
    "day": [
        "05/02/2020", "13/02/2020", "", "2020-03-01", "1 March 2020", "soon", "02/01/2020", "?",
        "2020-05-06 12:30:00", "31/01/2020", "06/07/2020", "7.8.2020",
    ],
}  # fmt: skip


PLAIN = {"size": "1.5", "price": "2,5", "gaps": "1", "code": "1", "grade": "1", "member": "1"}
PLAIN |= {"day": "05/02/2020"}


def messy(number, seed=0):
    """Rows of such cells in any order; some rows are empty, and all kinds of cells come late, too."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({name: random.choice(cells, number) for name, cells in CELLS.items()})
    for name, value in PLAIN.items():
        frame.loc[: number // 2, name] = value  # the first half alone would have other types
    frame["id"] = [f"{index:03d}" for index in range(number)]
    frame.iloc[number // 3] = ""
    return frame


def gathered(parts):
    parts = list(parts)
    about = {name: np.concatenate([about[name] for _, about in parts]) for name in parts[0][1]}
    return torch.cat([inputs for inputs, _ in parts]), about


def quietly(*arguments, **options):
    """Rows, and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = gathered(read_rows(*arguments, **options))
    return rows, [str(each.message) for each in said if "hold no" in str(each.message)]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".feather"])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_the_same_however_a_table_is_cut(tmp_path, suffix, seed):
    frame, ready, path = messy(200, seed), prepared(), tmp_path / f"new{suffix}"
    if suffix in (".csv", ".tsv"):
        frame.to_csv(path, sep="," if suffix == ".csv" else "\t", index=False)
    else:
        getattr(frame.replace("", None), f"to_{suffix[1:]}")(path)
    (inputs, about), said = quietly(path, ready, ["id", "size"], rows=10_000)
    with pytest.warns(UserWarning, match="hold no"):
        assert torch.equal(read_table(path, ready)[0], inputs)
    assert len(said) >= 3  # one for each column with cells that cannot be read
    assert about[ROW].tolist() == [row for row in range(1, 201) if row != 67]
    assert (about[UNLIKE] != "").any()
    for rows in (1, 7, 64, 101, 199):
        (other, told), also_said = quietly(path, ready, ["id", "size"], rows=rows)
        assert torch.equal(other, inputs)
        assert told.keys() == about.keys()
        for name, values in about.items():
            assert told[name].tolist() == values.tolist(), name
        assert also_said == said  # once, with counts of the whole file


def test_each_cell_is_read_as_if_it_were_alone(tmp_path):
    """The oracle: a file for each row, between two plain ones."""
    frame, ready, path = messy(60), prepared(), tmp_path / "new.csv"
    frame.loc[len(frame) // 3] = frame.loc[0]
    frame.to_csv(path, index=False)
    (inputs, about), _ = quietly(path, ready, rows=8)
    for row in range(len(frame)):
        frame.iloc[[0, row, 0]].to_csv(tmp_path / "one.csv", index=False)
        (three, told), _ = quietly(tmp_path / "one.csv", ready)
        assert torch.equal(three[1], inputs[row])
        assert told[UNLIKE][1] == about[UNLIKE][row]


def test_numbers_as_text_and_alone_are_the_same_numbers(tmp_path):
    numbers = np.random.default_rng(0).normal(size=50) * 10.0 ** np.arange(-25, 25)
    written = [repr(number) for number in numbers.tolist()]
    ready = prepared()
    pd.DataFrame(PLAIN | {"size": [*written, "none at all"]}).to_csv(tmp_path / "new.csv", index=False)
    (alone, _), _ = quietly(tmp_path / "new.csv", ready, rows=50)
    (beside, _), _ = quietly(tmp_path / "new.csv", ready, rows=51)
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("rows", [2, 100])
def test_infinite_cells_are_refused_with_their_row_wherever_they_stand(tmp_path, rows):
    frame = messy(10)
    frame["size"] = ["1"] * 5 + ["inf", "2", "word", "1", "1"]
    frame.to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(InputError, match="'size' holds an infinite value in row 6"):
        list(read_rows(tmp_path / "new.csv", prepared(), rows=rows))


def test_most_cells_unreadable_is_an_error_of_the_whole_file(tmp_path):
    frame = messy(40)
    frame["size"] = ["1"] * 19 + ["word"] * 21
    frame.to_csv(tmp_path / "new.csv", index=False)
    for rows in (5, 100):
        with pytest.raises(InputError, match=r"21 of 40 cells of 'size' .*, the first 'word' in row 20"):
            list(read_rows(tmp_path / "new.csv", prepared(), rows=rows))


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_networks_without_names_read_one_decimal_sign_in_all_parts(tmp_path, rows):
    """1,234 is less than two if some other row has a decimal comma, also one that comes later."""
    nameless = Preprocessing(source="table", input_shift=(0.0, 0.0), input_scale=(1.0, 1.0))
    path = tmp_path / "new.csv"
    path.write_text("a;b;\n1,234;1\n1.234;2\n2;3\n\n0,5;4\n")
    with pytest.warns(UserWarning, match="without names of columns"):
        inputs, about = gathered(read_rows(path, nameless, rows=rows))
    assert inputs[:, 0].tolist() == pytest.approx([1.234, 1234, 2, 0.5])
    assert about[ROW].tolist() == [1, 2, 3, 5]
    path.write_text('a,b\n"1,234",1\n1,2\n')
    with pytest.warns(UserWarning, match="without names"):
        assert gathered(read_rows(path, nameless, rows=rows))[0][0].tolist() == [1234, 1]
    path.write_text("a,b\n1,1\n2,2\n3,\n")
    with (
        pytest.warns(UserWarning, match="without names"),
        pytest.raises(InputError, match=r"'b' .* first in row 3 \('nan'\)"),
    ):
        list(read_rows(path, nameless, rows=rows))


def test_kept_columns_of_typed_files_have_one_type_in_all_parts(tmp_path):
    frame, ready = pd.DataFrame(PLAIN | {"id": ["0"] * 40}), prepared()
    arrow = pytest.importorskip("pyarrow")
    numbers = [index if index % 9 else None for index in range(40)]
    columns = arrow.Table.from_pandas(frame.drop(columns="id").assign(size=1.0), preserve_index=False)
    columns = columns.append_column("id", arrow.array(numbers, arrow.int64()))
    columns = columns.append_column("is", arrow.array([n is None or n > 20 for n in numbers]))
    parquet, feather = (pytest.importorskip(f"pyarrow.{name}") for name in ("parquet", "feather"))
    parquet.write_table(columns, tmp_path / "new.parquet", row_group_size=6)
    feather.write_feather(columns, tmp_path / "new.feather", chunksize=6)
    for suffix in ("parquet", "feather"):
        for rows in (1, 4, 13, 100):
            parts = [
                about for _, about in read_rows(tmp_path / f"new.{suffix}", ready, ["id", "is"], rows=rows)
            ]
            assert {about["id"].dtype.kind for about in parts} == {"U"}  # as numbers they would lose digits
            told = {name: np.concatenate([about[name] for about in parts]) for name in ("id", "is")}
            assert told["id"].tolist() == ["" if n is None else str(n) for n in numbers]
            assert told["is"].tolist() == [n is None or n > 20 for n in numbers]


# --- arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(23,), (23, 4), (23, 2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64", ">f8", "int16", "bool"])
def test_arrays_come_in_rows_however_they_are_stored(tmp_path, save, order, shape, dtype):
    array = np.asarray(np.random.default_rng(0).integers(-9, 9, shape), dtype=dtype, order=order)
    save(tmp_path / "a.npz", x=array, y=np.arange(23))
    for rows in (1, 5, 23, 100, None):
        parts = list(npz_rows(tmp_path / "a.npz", "x", rows, most_rows=9, most_numbers=50))
        assert max(map(len, parts)) <= (rows or 9)
        np.testing.assert_array_equal(np.concatenate(parts), array)


@pytest.mark.parametrize("rows", [2, 100])
def test_numbers_of_arrays_that_are_not_finite_are_refused_with_their_row(tmp_path, rows):
    array = np.zeros((9, 2))
    array[6, 1] = np.nan
    np.savez(tmp_path / "a.npz", x=array)
    with pytest.raises(InputError, match="NaN or infinite values, the first in row 7"):
        list(read_rows(tmp_path / "a.npz", Preprocessing(), rows=rows))


def test_an_archive_that_is_cut_off_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(5000, 3)))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[2000:2100] = bytes(100)
    (tmp_path / "a.npz").write_bytes(bytes(content))
    with pytest.raises(InputError, match="cannot be read as arrays"):
        list(read_rows(tmp_path / "a.npz", Preprocessing(), rows=100))
