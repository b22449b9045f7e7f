"""Tables of any content: read or refused, encoded row by row, divided without loss."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hostile_values import examples
from hypothesis import given
from hypothesis import strategies as st

from polymode.application.datasets.arrays import npz_parts
from polymode.application.datasets.frames import read_frame
from polymode.application.datasets.new_rows import read_table
from polymode.application.datasets.tables import table
from polymode.data.division import divided, group_numbers
from polymode.data.encoding import column_from, encoded, laid_out
from polymode.data.task import Preprocessing, standardised
from polymode.errors import InputError

NUMBERS = st.one_of(
    st.integers(-5, 5).map(str),
    st.floats().map(repr),
    st.sampled_from(
        ["1e400", "-1e-400", "1,234.5", "1.234,5", "0x10", "1_000", "٣", "½", "+.5", "1e", "--1", "$3"]
    ),
)
DATES = st.one_of(
    st.dates().map(str),
    st.datetimes().map(str),
    st.sampled_from(
        ["31.12.1999", "2000-02-30", "12/31/99", "1 Jan 2020", "24:00", "9999-12-31", "0001-01-01"]
    ),
)
GAPS = st.sampled_from(["", "NA", "nan", "?", "-", "null", " ", "None", "#N/A"])
WORDS = st.one_of(
    st.sampled_from(
        ["yes", "no", "a b", "=cmd|calc", "'", '"', "true", "False", "é", "\u202e", "🙂", "\x00", "x" * 300]
    ),
    st.text(max_size=5),
)
CELLS = st.one_of(NUMBERS, DATES, GAPS, WORDS)
KINDS = (
    NUMBERS,
    DATES,
    WORDS,
    CELLS,
    st.one_of(NUMBERS, GAPS),
    st.one_of(DATES, GAPS),
    st.sampled_from(["a", "b"]),
)


@st.composite
def columns(draw, num_rows):
    """A column of cells, most of one kind."""
    return draw(st.lists(draw(st.sampled_from(KINDS)), min_size=num_rows, max_size=num_rows))


@st.composite
def tables(draw):
    """Columns of cells by name."""
    num_rows = draw(st.integers(1, 14))
    names = draw(st.lists(st.one_of(st.sampled_from("abcdef"), WORDS), min_size=1, max_size=4, unique=True))
    return {name: draw(columns(num_rows)) for name in names}


def written(content, path, separator=","):
    pd.DataFrame(content).to_csv(path, index=False, sep=separator, lineterminator="\n", errors="replace")


def outcome_of(make):
    """What is made, or None where the input is refused; warnings on purpose are the reader's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make()
        except InputError:
            return None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@examples(100)
@given(content=tables(), separator=st.sampled_from([",", ";", "\t"]), splits=st.sampled_from([1, None]))
def test_any_table_is_read_or_refused(place, content, separator, splits):
    path = place / "any.csv"
    written(content, path, separator)
    task = outcome_of(lambda: table(path, splits=splits))
    if task is None:
        return
    split = task.splits[0]
    assert bool(split.train.inputs.isfinite().all())
    assert bool(split.test.inputs.isfinite().all())
    ready = split.preprocessing
    assert Preprocessing.from_config(json.loads(json.dumps(ready.config()))) == ready
    read = outcome_of(lambda: read_table(path, ready))
    if read is not None:
        assert bool(read[0].isfinite().all())
        assert read[0].shape[1] == split.train.inputs.shape[1]


@examples(100)
@given(
    content=st.binary(max_size=200),
    suffix=st.sampled_from([".csv", ".tsv", ".parquet", ".feather", ".xlsx", ".npz"]),
)
def test_any_bytes_are_a_table_or_refused(place, content, suffix):
    path = place / f"bytes{suffix}"
    path.write_bytes(content)
    outcome_of(lambda: table(path))


@examples(40)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=120),
    encoding=st.sampled_from(["utf-8", "utf-16", "latin-1"]),
)
def test_any_text_is_a_table_or_refused(place, text, encoding):
    path = place / "text.csv"
    path.write_bytes(text.encode(encoding, errors="replace"))
    outcome_of(lambda: read_frame(path))


@pytest.fixture(scope="module")
def stored(place):
    """Small files of every other kind."""
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": list("xyxyx"), "y": [1, 2, 3, 4, 5]})
    frame.to_parquet(place / "whole.parquet")
    frame.to_feather(place / "whole.feather")
    frame.to_excel(place / "whole.xlsx", index=False)
    np.savez(place / "whole.npz", x=np.arange(10.0).reshape(5, 2), y=np.arange(5.0))
    np.savez_compressed(place / "packed.npz", x=np.arange(10.0).reshape(5, 2), y=np.arange(5.0))
    return [place / f"whole.{kind}" for kind in ("parquet", "feather", "xlsx", "npz")] + [
        place / "packed.npz"
    ]


@examples(120)
@given(chance=st.data())
def test_a_damaged_file_is_read_or_refused(stored, chance):
    path = chance.draw(st.sampled_from(stored))
    content = bytearray(path.read_bytes())
    for _ in range(chance.draw(st.integers(1, 3))):
        spot = chance.draw(st.integers(0, len(content) - 1))
        if chance.draw(st.booleans()):
            content[spot] = chance.draw(st.integers(0, 255))
        else:
            del content[spot : spot + chance.draw(st.integers(1, 40))]
        if not content:
            break
    damaged = path.with_name(f"damaged{path.suffix}")
    damaged.write_bytes(bytes(content))
    outcome_of(lambda: table(damaged))


@examples(40)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    kind=st.sampled_from(["f8", "f2", "i4", "u1", "?", "U3", "M8[D]", "c8", "S2"]),
    rows=st.integers(0, 4),
)
def test_arrays_of_any_shape_and_type_are_read_or_refused(place, shape, kind, rows):
    path = place / "arrays.npz"
    np.savez(path, x=np.zeros(shape, kind), y=np.zeros(rows))
    found = outcome_of(lambda: npz_parts(path, None, []))
    if found is not None:
        assert len(found[0]) == len(found[1]) == rows > 0


@examples(80)
@given(chance=st.data())
def test_a_row_is_encoded_without_regard_to_others(chance):
    num_rows = chance.draw(st.integers(2, 12))
    cells = [cell or None for cell in chance.draw(columns(num_rows))]
    values = pd.Series(cells, dtype=object)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        column = outcome_of(lambda: laid_out(values, "name").fitted(values))
        if column is None:
            return
        assert column_from(json.loads(json.dumps(column.config()))) == column
        together = outcome_of(lambda: encoded([column], pd.DataFrame({"name": values})))
        for row in range(num_rows if together is not None else 0):
            alone = encoded([column], pd.DataFrame({"name": values.iloc[[row]]}))
            np.testing.assert_array_equal(alone[0], together[row])


@examples(60)
@given(
    shift=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=3),
    scale=st.floats(1e-2, 1e2),
    bound=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_what_is_standardised_comes_back(shift, scale, bound, seed):
    ready = Preprocessing(
        input_shift=tuple(shift),
        input_scale=tuple([scale] * len(shift)),
        target_shift=shift[0],
        target_scale=scale,
        bound=bound,
    )
    z = torch.randn(6, len(shift), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    raw = z * scale + torch.tensor(shift, dtype=torch.float64)
    found = ready.raw(ready.inputs(raw)).double()
    torch.testing.assert_close(found, raw, rtol=1e-4, atol=1e-3 * scale + 1e-3)
    targets = raw[:, 0]
    back = ready.targets(targets) * ready.target_scale + ready.target_shift
    torch.testing.assert_close(back, targets, rtol=1e-9, atol=1e-6)


@examples(40)
@given(seed=st.integers(0, 2**31), rows=st.integers(2, 20), width=st.integers(1, 4))
def test_training_rows_are_standardised(seed, rows, width):
    raw = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).double() * 7 + 3
    [ready], shift, scale = standardised(raw)
    torch.testing.assert_close(ready.double().mean(0), torch.zeros(width).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        ready.double() * torch.tensor(scale) + torch.tensor(shift), raw, atol=1e-3, rtol=1e-4
    )


@examples(150)
@given(
    rows=st.integers(2, 40),
    share=st.floats(0, 1),
    how=st.sampled_from(["at random", "class", "group", "time"]),
    seed=st.integers(0, 2**31),
    chance=st.data(),
)
def test_divisions_are_partitions(rows, share, how, seed, chance):
    number = round(share * rows)
    some = torch.tensor(chance.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)))
    options = {"class": {"labels": some}, "group": {"groups": some}, "time": {"ordered": True}}.get(how, {})
    found = outcome_of(lambda: divided(rows, number, torch.Generator().manual_seed(seed), **options))
    if found is None:
        few = len(set(some.tolist())) in (1, rows)
        assert number in (0, rows) or (how in ("class", "group") and few)
        return
    first, last = found
    assert sorted(first.tolist() + last.tolist()) == list(range(rows))
    assert len(first) > 0
    assert len(last) > 0
    if how == "group":
        assert not set(some[first].tolist()) & set(some[last].tolist())
    elif how == "class":
        assert set(some.tolist()) == set(some[first].tolist())  # each is learned from
        assert len(last) <= number
    else:
        assert len(last) == number
    if how == "time":
        assert first.tolist() + last.tolist() == list(range(rows))
    again = divided(rows, number, torch.Generator().manual_seed(seed), **options)
    assert torch.equal(again[0], first)


@given(names=st.lists(st.text(max_size=3), min_size=1, max_size=20))
def test_groups_are_numbered_by_name(names):
    numbers = group_numbers(names).tolist()
    assert all(
        (a == b) == (x == y)
        for a, x in zip(names, numbers, strict=True)
        for b, y in zip(names, numbers, strict=True)
    )
    assert sorted(set(numbers)) == list(range(len(set(names))))
