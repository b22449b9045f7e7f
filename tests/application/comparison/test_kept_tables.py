"""Tables of experiments: means that can be checked, because their replicates are beside them."""

import csv
import math

import pytest

from polymode.application.comparison import Summary, add_result, replicates_path
from polymode.errors import InputError


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_mean_has_its_replicates_beside_it(tmp_path):
    table = tmp_path / "results" / "table.csv"
    found = {0: {"nll": 1 / 3, "rmse": 1.0}, 1: {"nll": 2 / 3, "rmse": 4.0}, 2: {"nll": 0.1, "rmse": 2.5}}
    shown = add_result(table, {"method": "a, b", "seeds": 3}, "seed", found)
    [row] = read(table)
    assert row == {name: str(value) for name, value in shown.items()}
    each = read(replicates_path(table))
    assert [(r["method"], r["seed"]) for r in each] == [("a, b", "0"), ("a, b", "1"), ("a, b", "2")]
    for score in ("nll", "rmse"):
        values = [float(r[score]) for r in each]
        assert values == [scores[score] for scores in found.values()]  # all of their digits
        summary = Summary.of(values)
        assert (row[score], row[f"{score}_se"]) == (f"{summary.mean:.4f}", f"{summary.standard_error:.4f}")


def test_a_result_made_again_takes_the_place_of_the_first(tmp_path):
    table = tmp_path / "t.csv"
    for method, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        add_result(table, {"method": method}, "split", {i: {"nll": value + i} for i in range(2)}, digits=1)
    assert [(row["method"], row["nll"]) for row in read(table)] == [("b", "2.5"), ("a", "3.5")]
    each = [(row["method"], row["split"], row["nll"]) for row in read(replicates_path(table))]
    assert each == [("b", "0", "2.0"), ("b", "1", "3.0"), ("a", "0", "3.0"), ("a", "1", "4.0")]


def test_one_replicate_has_no_error_and_none_is_refused(tmp_path):
    row = add_result(tmp_path / "t.csv", {"method": "a"}, "seed", {"all": {"nll": 1.0}})
    assert math.isnan(float(row["nll_se"]))
    with pytest.raises(InputError, match="no replicates"):
        add_result(tmp_path / "t.csv", {"method": "a"}, "seed", {})


def test_a_table_of_other_columns_is_left_as_it_is(tmp_path):
    table = tmp_path / "t.csv"
    add_result(table, {"method": "a"}, "seed", {0: {"nll": 1.0}})
    before = table.read_text(), replicates_path(table).read_text()
    with pytest.raises(InputError, match=r"has the columns method, seed, nll; .* Choose another file"):
        add_result(table, {"set": "yacht"}, "seed", {0: {"nll": 1.0}})
    assert (table.read_text(), replicates_path(table).read_text()) == before
