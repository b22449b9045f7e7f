"""Familiarity: ordinary rows are seldom flagged, foreign ones always, however data are cut or stored."""

import math

import pytest
import torch

from polymode.data import familiarity
from polymode.data.familiarity import Familiarity
from polymode.errors import CheckpointError, InputError
from polymode.storage import read_tensors, write_tensors
from tolerances import PASS, assert_equal_up_to_rounding


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive(inputs, rows, neighbours, alone=False):
    """Distances, one pair of rows at a time."""
    found = []
    for place, row in enumerate(inputs.double()):
        others = [other for i, other in enumerate(rows.double()) if not (alone and i == place)]
        apart = sorted(math.dist(row.tolist(), other.tolist()) for other in others)
        found.append(sum(apart[:neighbours]) / neighbours / math.sqrt(len(row)))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("num_rows", [300, 1500, 5000])
def test_one_in_a_hundred_of_fresh_rows_is_flagged(num_rows):
    fresh = 20_000
    # The rate is itself drawn: the part beyond an order statistic of n rows is Beta(n + 1 - rank, rank). What
    # the rows have in common (one set of rows is kept) adds little to it.
    judged = min(num_rows, 1000) if num_rows < 2000 else num_rows - 1000
    spread = math.sqrt(0.01 * 0.99 * (1 / fresh + 1 / judged))
    flagged = Familiarity.of(normal(num_rows, 4)).strangeness(normal(fresh, 4, seed=1)) > 1
    assert abs(flagged.double().mean().item() - 0.01) < 4 * spread


def test_in_small_tables_fresh_rows_are_flagged_as_seldom_on_average():
    # The largest of 20 distances: a 21st is beyond it once in 21, but for the one row fewer that each of the
    # 20 had to be near to (2,000 tables: 0.045). Tables are independent, rows of one table are not: the error
    # comes from the spread between tables.
    rates = torch.stack([
        (Familiarity.of(normal(20, 3, seed=s)).strangeness(normal(200, 3, seed=1000 + s)) > 1).double().mean()
        for s in range(200)
    ])  # fmt: skip
    assert abs(rates.mean().item() - 1 / 21) < 4 * rates.std().item() / math.sqrt(200) + 0.01


@pytest.mark.parametrize("width", [1, 4, 20])
def test_shifted_rows_are_flagged(width):
    found = Familiarity.of(normal(3000, width)).strangeness(normal(1000, width, seed=1) + 10)
    assert (found > 1).double().mean() > 0.999


def test_one_strange_column_is_enough_where_it_is_far_off():
    fresh = normal(1000, 10, seed=1)
    fresh[:, 3] += 10
    assert (Familiarity.of(normal(3000, 10)).strangeness(fresh) > 1).double().mean() > 0.99


def test_strangeness_is_that_of_a_plain_loop():
    known = Familiarity.of(normal(40, 3))
    assert known.rows.shape == (40, 3)
    assert known.neighbours == 5
    fresh = 3 * normal(30, 3, seed=1)
    expected = naive(fresh, known.rows, 5) / known.threshold
    assert_equal_up_to_rounding(known.strangeness(fresh), expected, PASS)


def test_thresholds_of_small_tables_leave_each_row_out():
    known = Familiarity.of(normal(250, 3))
    expected = naive(known.rows, known.rows, 5, alone=True).sort().values[248].item()  # ⌈0.99 · 251⌉ = 249
    assert known.threshold == pytest.approx(expected, rel=2e-6)


def test_thresholds_of_large_tables_come_from_rows_that_are_not_kept(monkeypatch):
    monkeypatch.setattr(familiarity, "MOST_ROWS", 30)
    inputs = normal(230, 3)
    known = Familiarity.of(inputs)
    kept = {tuple(row) for row in known.rows.tolist()}
    assert len(kept) == 30
    outside = torch.tensor([row for row in inputs.tolist() if tuple(row) not in kept])
    assert len(outside) == 200
    expected = naive(outside, known.rows, 5).sort().values[198].item()  # ⌈0.99 · 201⌉ = 199
    assert known.threshold == pytest.approx(expected, rel=2e-6)
    assert (known.strangeness(outside) > 1).sum() == 1


def test_a_thousand_different_rows_are_kept_of_many():
    known = Familiarity.of(normal(30_000, 2))
    assert known.rows.shape == (1000, 2)
    assert len(known.rows.unique(dim=0)) == 1000


@pytest.mark.parametrize("block", [1, 1000, 7000])
def test_blocks_change_nothing(monkeypatch, block):
    inputs, fresh = normal(1200, 6), normal(100, 6, seed=1)
    whole = Familiarity.of(inputs)
    expected = whole.strangeness(fresh)
    monkeypatch.setattr(familiarity, "BLOCK", block)
    parts = Familiarity.of(inputs)
    assert parts.threshold == pytest.approx(whole.threshold, rel=1e-12)
    assert_equal_up_to_rounding(parts.strangeness(fresh), expected, PASS)


@pytest.mark.parametrize(("num_rows", "neighbours"), [(1, 1), (2, 1), (3, 2), (6, 5), (7, 5)])
def test_tiny_tables(num_rows, neighbours):
    inputs = normal(num_rows, 2)
    known = Familiarity.of(inputs)
    assert (len(known.rows), known.neighbours) == (num_rows, neighbours)
    found = known.strangeness(inputs)
    assert (found <= 1).all()
    assert (known.strangeness(inputs + 1000) > 1).all()
    if num_rows > 1:
        expected = naive(known.rows, known.rows, neighbours, alone=True).max().item()
        assert known.threshold == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("num_rows", [1, 2, 50, 4000])
def test_constant_data_know_equal_rows_only(num_rows, value):
    known = Familiarity.of(torch.full((num_rows, 3), value))
    assert known.threshold == 0
    fresh = torch.full((2, 3), value)
    fresh[1, 2] = torch.nextafter(fresh[1, 2], torch.tensor(math.inf))
    assert known.strangeness(fresh).tolist() == [0, math.inf]
    assert known.strangeness(fresh[:1].double()).tolist() == [0]


def test_columns_of_categories():
    """Three categories of 150 values each: a row with values never seen is farther off than any other."""
    generator = torch.Generator().manual_seed(0)

    def draw(count, first=0, end=140):
        values = torch.randint(first, end, (count, 3), generator=generator)
        return torch.nn.functional.one_hot(values, 150).flatten(1).float()

    known = Familiarity.of(draw(4000))
    fresh = draw(2000)
    # Most rows lie at one of few distances. None that lies at the threshold counts as beyond it.
    assert (known.strangeness(fresh) > 1).double().mean() < 0.01 + 4 * math.sqrt(0.01 / 2000)
    assert (known.strangeness(draw(500, 140, 150)) > 1).all()
    expected = naive(fresh[:3], known.rows, 5) / known.threshold
    assert_equal_up_to_rounding(known.strangeness(fresh[:3]), expected, PASS)


def test_rows_at_the_threshold_are_not_flagged_however_they_are_cut():
    """All rows but equal ones are equally far apart, so that every distance is the threshold."""
    rows = torch.eye(400)
    known = Familiarity.of(rows)
    fresh = torch.zeros(1, 400)
    fresh[0, :2] = 0.5
    for cut in (1, 7, 400):
        assert all((known.strangeness(part) <= 1).all() for part in rows.split(cut))
    assert known.strangeness(fresh).item() < 1


def test_numbers_whose_squares_no_float32_holds():
    known = Familiarity.of(1e25 * normal(100, 3))
    assert 0 < known.threshold < math.inf
    assert known.strangeness(torch.full((1, 3), 1e30)).isfinite().all()
    assert known.strangeness(known.rows).max() <= 1


def test_single_and_double_precision_agree():
    inputs, fresh = normal(2500, 4), normal(100, 4, seed=1)
    single, double = Familiarity.of(inputs), Familiarity.of(inputs.double())
    assert double.rows.dtype == torch.float32
    assert torch.equal(single.rows, double.rows)
    assert single.threshold == double.threshold
    assert torch.equal(single.strangeness(fresh), single.strangeness(fresh.double()))
    # Numbers that float32 does not have are rounded first: a kept row is at no distance from itself.
    fine = normal(1, 4).double() / 3
    assert Familiarity.of(fine).strangeness(fine).item() == 0


def test_the_seed_decides_alone():
    inputs, fresh = normal(3000, 3), normal(50, 3, seed=1)
    first = Familiarity.of(inputs, seed=4)
    torch.rand(3)
    state = torch.get_rng_state()
    again, other = Familiarity.of(inputs, seed=4), Familiarity.of(inputs, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.rows, again.rows)
    assert first.threshold == again.threshold
    assert torch.equal(first.strangeness(fresh), again.strangeness(fresh))
    assert not torch.equal(first.rows, other.rows)


def test_what_is_kept_is_a_copy_without_gradients():
    inputs = normal(10, 2).requires_grad_()
    known = Familiarity.of(inputs)
    before = known.rows.clone()
    with torch.no_grad():
        inputs.zero_()
    assert torch.equal(known.rows, before)
    assert not known.strangeness(inputs).requires_grad


def test_no_rows_have_no_strangeness():
    assert Familiarity.of(normal(10, 2)).strangeness(torch.empty(0, 2)).shape == (0,)


@pytest.mark.parametrize("shape", [(5,), (0, 3), (3, 0), (2, 3, 4)])
def test_tables_only(shape):
    with pytest.raises(InputError, match="not empty, got the shape"):
        Familiarity.of(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(2,), (5, 3), (1, 2, 2)])
def test_rows_as_wide_as_in_training_only(shape):
    with pytest.raises(InputError, match=r"\[rows, 2\] as in training"):
        Familiarity.of(normal(10, 2)).strangeness(torch.zeros(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_numbers_that_are_not_finite_are_named_by_their_row(monkeypatch, value):
    monkeypatch.setattr(familiarity, "BLOCK", 400)
    known = Familiarity.of(normal(100, 2))
    broken = normal(100, 2).double()
    broken[77, 1] = value
    for use in (known.strangeness, Familiarity.of):
        with pytest.raises(InputError, match="Row 77 of the inputs"):
            use(broken)


@pytest.mark.parametrize("num_rows", [1, 4, 2500])
def test_what_is_stored_comes_back(tmp_path, num_rows):
    known = Familiarity.of(normal(num_rows, 3))
    write_tensors(tmp_path / "familiarity.safetensors", known.tensors())
    found = Familiarity.from_tensors(read_tensors(tmp_path / "familiarity.safetensors"))
    assert torch.equal(found.rows, known.rows)
    assert (found.threshold, found.neighbours) == (known.threshold, known.neighbours)
    fresh = normal(20, 3, seed=1)
    assert torch.equal(found.strangeness(fresh), known.strangeness(fresh))


def integer(value):
    return torch.tensor(value, dtype=torch.int64)


def double(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", None, "it must hold"),
        ("threshold", None, "it must hold"),
        ("neighbours", None, "it must hold"),
        ("more", torch.zeros(1), "it must hold"),
        ("rows", torch.zeros(8, 3).double(), r"'rows' is float64 of the shape \[8, 3\]"),
        ("rows", torch.zeros(8), r"'rows' is float32 of the shape \[8\]"),
        ("rows", torch.zeros(0, 3), "'rows' are empty"),
        ("rows", torch.zeros(8, 0), "'rows' are empty"),
        ("rows", torch.full((8, 3), math.nan), "'rows' hold NaN"),
        ("rows", torch.full((8, 3), math.inf), "'rows' hold NaN or infinite"),
        ("threshold", torch.tensor(1.0), "'threshold' is float32"),
        ("threshold", double([1.0]), r"'threshold' is float64 of the shape \[1\]"),
        ("threshold", double(-1.0), "'threshold' is -1.0"),
        ("threshold", double(math.nan), "'threshold' is nan"),
        ("threshold", double(math.inf), "'threshold' is inf"),
        ("neighbours", double(5.0), "'neighbours' is float64"),
        ("neighbours", integer([5]), r"'neighbours' is int64 of the shape \[1\]"),
        ("neighbours", integer(0), "'neighbours' is 0"),
        ("neighbours", integer(9), "'neighbours' is 9, it must be from 1 to its 8 rows"),
    ],
)
def test_damaged_tensors_are_named(name, value, message):
    tensors = Familiarity.of(normal(8, 3)).tensors()
    damaged = {key: tensor for key, tensor in (tensors | {name: value}).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        Familiarity.from_tensors(damaged)
