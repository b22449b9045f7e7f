import json
import math

import numpy as np
import pandas as pd
import pytest

from polymode.data.encoding import (
    CategoryColumn,
    DateColumn,
    LeftOut,
    NumberColumn,
    TruthColumn,
    as_dates,
    as_numbers,
    as_texts,
    column_from,
    decimal_of,
    laid_out,
    number_of,
    unreadable_cells,
)
from polymode.data.task import Preprocessing
from polymode.errors import InputError


def made(values, name="c", **options):
    """What a column becomes and its numbers, learned from all rows."""
    values = values if isinstance(values, pd.Series) else pd.Series(values)
    column = laid_out(values, name, **options).fitted(values)
    return column, column.encode(values)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3", 3),
        ("-2.5e3", -2500),
        (".5", 0.5),
        ("1,234", 1234),
        ("1,234,567.5", 1234567.5),
        ("0,512", 0.512),
        ("12,5", 12.5),
        ("1.234,5", 1234.5),
        ("1 234,5", 1234.5),
        ("1\u00a0234\u202f567", 1234567),
        ("1'234.5", None),
        ("1'234", 1234),
        ("$5", 5),
        ("€ 1.200,50", 1200.5),
        ("7 €", 7),
        ("12.5 %", 12.5),
        ("red", None),
        ("", None),
        ("1-2", None),
        ("1,23,4", None),
    ],
)
def test_numbers_as_people_write_them(text, number):
    assert number_of(text) == number


@pytest.mark.parametrize(
    ("texts", "decimal", "numbers"),
    [
        (["1,234", "12,5", "2.345"], ",", [1.234, 12.5, 2345]),
        (["1,234", "0,512"], ",", [1.234, 0.512]),
        (["1,234", "2,345"], ".", [1234, 2345]),
        (["1,234", "2.345"], ".", [1234, 2.345]),
    ],
)
def test_one_number_tells_what_a_comma_means_in_the_others(texts, decimal, numbers):
    assert decimal_of(texts) == decimal
    assert as_numbers(pd.Series(texts), "c").tolist() == numbers


def test_a_column_remembers_its_decimal_comma():
    column, _ = made(["0,512", "1,234", "12,5", "3,141"])
    assert column.decimal == ","
    assert column.encode(pd.Series(["1,234"])).tolist() == [[1.234]]
    assert column.encode(pd.Series([1.234])).tolist() == [[1.234]]


@pytest.mark.parametrize("cell", ["1" * 100_000 + "x", "1" + " " * 100_000 + "x"])
def test_long_cells_are_read_in_no_time(cell):
    assert number_of(cell) is None


def test_gaps_of_numbers_become_the_median_of_training_rows_and_a_mark():
    column, numbers = made(["1", "?", "10", "n/a", "4", " - "])
    assert column == NumberColumn("c", has_gaps=True, fill=4.0, low=1.0, high=10.0)
    assert numbers.tolist() == [[1, 0], [4, 1], [10, 0], [4, 1], [4, 0], [4, 1]]
    assert column.features == ["c", "c is missing"]
    assert column.is_scaled == [True, False]


def test_gaps_that_are_new_are_filled_and_strange():
    column, _ = made([1.0, 2.0, 6.0])
    new = pd.Series([np.nan, 6.4, 6.6, 0.4, 1.0])
    assert column.encode(new).tolist() == [[2.0], [6.4], [6.6], [0.4], [1.0]]
    assert column.strange(new).tolist() == [True, False, True, True, False]  # a tenth of the range is 0.5


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e39])
def test_numbers_that_no_network_can_see_are_refused_with_their_row(value):
    with pytest.raises(InputError, match=r"'c' holds .* in row 2\. Replace it, or remove the row"):
        laid_out(pd.Series([1.0, value, 2.0]), "c")


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        (pd.Series([1, None, 7], dtype="Int64"), [1, np.nan, 7]),
        (pd.Series([1.5, None, 7], dtype="Float64"), [1.5, np.nan, 7]),
        (pd.Series([1, None, 7], dtype="int64[pyarrow]"), [1, np.nan, 7]),
        (pd.Series([2**64 - 1, 5, 0], dtype="uint64"), [2.0**64, 5, 0]),
        (pd.Series([10**30, None, "2,5"], dtype=object), [1e30, np.nan, 2.5]),
        (pd.Series([True, None, False], dtype="boolean"), [1, np.nan, 0]),
        (pd.Series([True, None, False], dtype="bool[pyarrow]"), [1, np.nan, 0]),
        (pd.Series(pd.to_timedelta(["12h", None, "2D"])), [0.5, np.nan, 2]),
        (pd.Series(pd.arrays.SparseArray([0.0, 0.0, 3.0])), [0, 0, 3]),
    ],
)
def test_numbers_of_many_types(values, numbers):
    np.testing.assert_array_equal(as_numbers(values, "c"), numbers)


def test_categories_have_a_place_for_each_frequent_value_one_for_others_and_one_for_gaps():
    values = ["red"] * 6 + ["blue"] * 5 + ["rare"] + ["?"]
    column, numbers = made(values)
    # At least twice in a table of so few rows, five times in large ones.
    assert column == CategoryColumn("c", values=("blue", "red"), known=("blue", "red"), has_gaps=True)
    assert column.features == ["c is blue", "c is red", "c is other", "c is missing"]
    expected = {"blue": 0, "red": 1, "rare": 2, "?": 3}
    assert numbers.tolist() == np.eye(4)[[expected[value] for value in values]].tolist()
    new = pd.Series(["green", None, " red "])
    assert column.encode(new).tolist() == np.eye(4)[[2, 3, 1]].tolist()
    assert column.strange(new).tolist() == [True, False, False]


def test_values_that_training_rows_lack_share_the_place_of_new_ones():
    values = pd.Series(["a", "b", "c"] * 10)
    column = laid_out(values, "k").fitted(values[values != "b"])
    assert column.known == ("a", "c")
    assert column.encode(pd.Series(["a", "b", "c", "d"])).argmax(1).tolist() == [0, 3, 2, 3]
    assert column.strange(pd.Series(["a", "b", None])).tolist() == [False, True, True]


def test_at_most_fifty_values_have_a_place_the_most_frequent_ones():
    values = [f"v{i:03}" for i in range(200) for _ in range(5 + (i >= 150))]
    column, numbers = made(values)
    assert column.values == tuple(f"v{i}" for i in range(150, 200))
    assert numbers[:, -1].sum() == 150 * 5
    assert (numbers.sum(1) == 1).all()


def test_a_value_called_other_is_not_what_all_others_are():
    column, numbers = made(["other", "a"] * 10 + ["rare"])
    assert column.features == ["c is a", "c is other", "c is none of these"]
    assert numbers.sum(0).tolist() == [10, 10, 1]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (pd.Series(["a", "b", None] * 9, dtype="category"), ("a", "b")),
        (pd.Series(["a", "b", None] * 9, dtype="string"), ("a", "b")),
        (pd.Series([2.0, 1.0, None] * 9, dtype="category"), ("1", "2")),
        (pd.Series([True, False, None] * 9, dtype="category"), ("False", "True")),
        (pd.Series([True, False, None] * 9, dtype=object), ("False", "True")),
        (pd.Series([1, True, "a", None] * 9, dtype=object), ("1", "True", "a")),
        (pd.Series([3, 3.0, "a", None] * 9, dtype=object), ("3", "a")),
        (pd.Series([[1], {"k": 2}, None] * 9, dtype=object), ("[1]", "{'k': 2}")),
    ],
)
def test_categories_of_many_types(values, found):
    column, numbers = made(values)
    assert (column.kind, column.values, column.has_gaps) == ("category", found, True)
    place = {text: i for i, text in enumerate(found)}
    texts, gaps = as_texts(values)
    expected = [len(found) + 1 if gap else place[text] for text, gap in zip(texts, gaps, strict=True)]
    assert numbers.argmax(1).tolist() == expected


def test_numbers_may_be_names():
    column, numbers = made([10115, 10117, 10115.0, 10117, 10115] * 4, as_category=True)
    assert column.values == ("10115", "10117")
    assert numbers.sum(0).tolist() == [12, 8, 0]
    assert column.encode(pd.Series(["10117"])).tolist() == [[0, 1, 0]]


def test_truth_values_are_0_and_1_and_one_half_where_they_are_missing():
    column, numbers = made(pd.Series([True, False, None], dtype="boolean"))
    assert column == TruthColumn("c")
    assert numbers.tolist() == [[1], [0], [0.5]]
    new = pd.Series(["yes", "FALSE", "1", None], dtype=object)
    assert column.encode(new).tolist() == [[1], [0], [1], [0.5]]
    assert column.strange(new).tolist() == [False, False, False, True]
    odd = pd.Series(["yes", "maybe", None], dtype=object)
    assert column.encode(odd).tolist() == [[1], [0.5], [0.5]]
    assert column.unreadable(odd).tolist() == [False, True, False]
    assert column.strange(odd).tolist() == [False, True, True]
    assert unreadable_cells([column], odd.to_frame("c")) == [
        "1 of 3 cells of 'c' hold no truth value (the first 'maybe' in row 2) and are taken as gaps"
    ]
    with pytest.raises(
        InputError, match=r"2 of 2 cells of 'c' hold no truth value, the first 'perhaps' in row 1"
    ):
        unreadable_cells([column], pd.DataFrame({"c": ["perhaps", "maybe"]}))


@pytest.mark.parametrize(
    ("values", "odd"),
    [([1.5, 2.5, 3.5] * 20, "50.0 m2"), (["2020-01-01", "2021-05-06", "2022-03-04"] * 20, "someday")],
    ids=["numbers", "dates"],
)
def test_cells_of_another_kind_are_told(values, odd):
    column, _ = made(pd.Series(values))
    new = pd.Series([*map(str, values[:3]), odd, None], dtype=object)
    assert column.unreadable(new).tolist() == [False, False, False, True, False]
    assert column.strange(new).tolist() == [False, False, False, True, True]
    assert column.encode(new)[3].tolist() == column.encode(new)[4].tolist()  # both are gaps


@pytest.mark.parametrize(
    ("texts", "day_first", "expected"),
    [
        (["2020-01-31", "2020-02-01"], False, ["2020-01-31", "2020-02-01"]),
        (["31/01/2020", "01/02/2020"], True, ["2020-01-31", "2020-02-01"]),
        (["01/31/2020", "02/01/2020"], False, ["2020-01-31", "2020-02-01"]),
        (["31.01.2020", "1.2.2020"], True, ["2020-01-31", "2020-02-01"]),
        (["5 May 2022", "June 7, 2021"], False, ["2022-05-05", "2021-06-07"]),
        (["2020-01-02T10:00:00Z", "2020-01-02 10:00"], False, ["2020-01-02 10:00"] * 2),
        (["2020-01-02T00:30:00+02:00", "2020-01-02T00:30"], False, ["2020-01-01 22:30", "2020-01-02 00:30"]),
        (["1500-01-02", "9999-12-31"], False, ["1500-01-02", "9999-12-31"]),
        (["12:30", "8:10:30"], False, ["1970-01-01 12:30", "1970-01-01 08:10:30"]),
        (["2020-01-02", "?", "2020-13-45"], False, ["2020-01-02", "NaT", "NaT"]),
        (["25/04/2022", "03/04/2022"], False, ["NaT", "2022-03-04"]),  # one order in all rows
        (["03/04/2022", "04/25/2022"], True, ["2022-04-03", "NaT"]),
        (["2020-01-02", "now", " Today"], False, ["2020-01-02", "NaT", "NaT"]),  # another day tomorrow
    ],
)
def test_dates_as_people_write_them(texts, day_first, expected):
    found = as_dates(pd.Series(texts), day_first).to_numpy(dtype="datetime64[s]")
    np.testing.assert_array_equal(found, np.array(expected, dtype="datetime64[s]"))
    column = laid_out(pd.Series(texts[:2] * 5), "c")
    if "NaT" not in expected and len(set(expected)) > 1:
        assert (column.kind, column.day_first) == ("date", day_first)


def test_one_day_beyond_twelve_tells_the_order_wherever_it_stands():
    texts = [f"{day:02}/{1 + hour % 12:02}/2020 {hour:02}:{minute:02}" for day in range(1, 14)
             for hour in range(24) for minute in range(0, 60, 20)]  # fmt: skip
    column, numbers = made(texts)
    assert column.day_first
    expected = pd.to_datetime(texts, format="%d/%m/%Y %H:%M")
    np.testing.assert_allclose(numbers[:, 0], (expected - expected.min()) / pd.Timedelta(days=1), atol=1e-9)


def test_dates_become_days_and_waves():
    dates = pd.Series(pd.date_range("2021-03-01 06:30", periods=100, freq="31h"))
    for values in (
        dates,
        dates.astype(str),
        dates.dt.tz_localize("UTC"),
        dates.astype("timestamp[us][pyarrow]"),
    ):
        column, numbers = made(values)
        assert (column.origin, column.parts) == ("2021-03-01", ("month", "weekday", "hour"))
        days = (dates - pd.Timestamp("2021-03-01")) / pd.Timedelta(days=1)
        np.testing.assert_allclose(numbers[:, 0], days)
        hours = 2 * np.pi * (dates.dt.hour + dates.dt.minute / 60) / 24
        months = 2 * np.pi * dates.dt.month / 12
        np.testing.assert_allclose(numbers[:, 1:3].T, [np.sin(months), np.cos(months)], atol=1e-12)
        np.testing.assert_allclose(numbers[:, 5:].T, [np.sin(hours), np.cos(hours)], atol=1e-12)


def test_a_time_zone_means_the_same_in_a_frame_and_in_text():
    dates = pd.Series(pd.date_range("2021-03-01", periods=50, freq="11h", tz="Europe/Berlin"))
    column, numbers = made(dates)
    np.testing.assert_array_equal(column.encode(dates.astype(str)), numbers)


def test_gaps_of_dates_become_the_middle_day_without_waves():
    column, numbers = made(["2020-01-01", None, "2020-06-01", "2020-03-01"] * 3)
    assert column.has_gaps
    assert numbers[1].tolist() == [60.0, *[0.0] * (numbers.shape[1] - 2), 1.0]
    assert column.strange(pd.Series(["2020-04-04", None, "2031-01-01"])).tolist() == [False, False, True]
    later, _ = made(["2020-01-01", "2020-06-01", "2020-03-01"] * 3)
    assert later.encode(pd.Series([None, "soon"], dtype=object))[:, 0].tolist() == [60.0, 60.0]


def test_days_of_any_year_are_counted():
    column, numbers = made(["0001-01-01", "9999-12-31", "2020-05-05"] * 3)
    expected = np.array(["0001-01-01", "9999-12-31", "2020-05-05"] * 3, dtype="datetime64[D]")
    assert numbers[:, 0].tolist() == (expected - expected[0]).astype(int).tolist()
    assert column.about.startswith("days, 0001-01-01 to 9999-12-31")


@pytest.mark.parametrize(
    ("values", "name", "why"),
    [
        (range(9), "id", "numbers the rows"),
        (range(5, 14), "Unnamed: 0", "numbers the rows"),
        (range(9), "X", "numbers the rows"),
        (range(9), "", "numbers the rows"),
        ([7, 3, 99, 12, 5], "customer_id", "identifier: another number"),
        ([3.0] * 5, "c", "constant"),
        (["a"] * 5, "c", "constant"),
        ([True] * 5, "c", "constant"),
        (["2020-01-01"] * 5, "c", "constant"),
        ([None] * 5, "c", "empty"),
        (["?"] * 5, "c", "empty"),
        ([f"name {i}" for i in range(9)], "c", "identifier: nearly every value"),
        ([f"the dog number {i} went home" for i in range(9)], "c", "text"),
    ],
)
def test_columns_that_say_nothing_are_left_out(values, name, why):
    column, numbers = made(list(values), name)
    assert isinstance(column, LeftOut)
    assert column.about.startswith(why)
    assert numbers.shape == (len(list(values)), 0)
    assert column.features == []


@pytest.mark.parametrize(
    ("values", "name"),
    [(range(2000, 2020), "year"), (range(9), "x"), ([1, 1, 2, 3], "id"), ([1.5, 2.5], "id")],
)
def test_other_columns_stay_whatever_they_are_called(values, name):
    column, numbers = made(list(values), name)
    assert column.kind == "number"
    assert numbers[:, 0].tolist() == list(values)


COLUMNS = (
    NumberColumn("n", True, 1.5, -2.0, 9.0, ","),
    TruthColumn("t"),
    CategoryColumn("k", ("a", "b"), ("a",), True),
    DateColumn("d", True, ("month", "hour"), True, "1500-01-01", 2.0, 0.0, 5.0),
    LeftOut("i", "numbers the rows"),
)


def document():
    width = sum(len(column.features) for column in COLUMNS)
    ready = Preprocessing(
        source="table",
        input_shift=(0.0,) * width,
        input_scale=(1.0,) * width,
        columns=("n", "t", "k", "d"),
        encoding=COLUMNS,
        bound=3.0,
    )
    return ready, json.loads(json.dumps(ready.config()))


def test_every_kind_of_column_survives_a_document():
    ready, config = document()
    again = Preprocessing.from_config(config)
    assert again == ready
    frame = pd.DataFrame(
        {"n": ["1,234", "?"], "t": [True, False], "k": ["a", "b"], "d": ["13/02/1600", None]}
    )
    for before, after in zip(ready.encoding[:4], again.encoding[:4], strict=True):
        np.testing.assert_array_equal(before.encode(frame[before.name]), after.encode(frame[after.name]))
        assert before.about == after.about


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, {"kind": "nmuber"}),
        (0, {"kind": ["number"]}),
        (0, {"kind": None}),
        (0, {"fill": math.nan}),
        (0, {"fill": math.inf}),
        (0, {"fill": 10**400}),
        (0, {"fill": "1"}),
        (0, {"fill": True}),
        (0, {"has_gaps": 1}),
        (0, {"has_gaps": False}),  # the width is another one then
        (0, {"decimal": ";"}),
        (0, {"name": 3}),
        (0, {"more": 3}),
        (2, {"known": ["c"]}),
        (2, {"values": ["a", "a"]}),
        (2, {"values": ["a", 1]}),
        (2, {"values": "ab"}),
        (2, {"values": ["a", "b", "c"]}),
        (3, {"parts": ["year"]}),
        (3, {"parts": ["hour"]}),
        (3, {"origin": "soon"}),
        (3, {"origin": "NaT"}),
        (3, {"origin": "2020-02-31"}),
        (3, {"origin": "2020-02-01T00:00+01:00"}),
        (3, {"low": 1e30}),
        (4, {"why": None}),
    ],
)
def test_damaged_documents_are_refused(place, change):
    _, config = document()
    config["encoding"][place] |= change
    with pytest.raises(InputError):
        Preprocessing.from_config(config)


@pytest.mark.parametrize("damage", [None, 3, "number", [], {}, {"kind": "number"}])
def test_what_is_no_column_is_refused(damage):
    with pytest.raises(InputError, match="column"):
        column_from(damage)
    _, config = document()
    with pytest.raises(InputError):
        Preprocessing.from_config(config | {"encoding": damage or 1})
