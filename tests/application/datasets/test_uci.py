from pathlib import Path

import numpy as np
import pytest
import torch

from polymode.application.datasets.uci import FILES, FOLDERS, downloads, gap_splits, standard_splits, uci
from polymode.errors import InputError

SHARED = Path(__file__).parents[4] / "shared" / "data"
needs_files = pytest.mark.skipif(
    not (SHARED / "uci").is_dir(), reason="shared/data/uci is not beside the checkout"
)


@pytest.fixture
def small(tmp_path):
    """Twenty rows in the official format: columns are a constant, the row, its square, and the target."""
    folder = tmp_path / "uci" / "yacht"
    folder.mkdir(parents=True)
    rows = np.arange(20.0)
    np.savetxt(folder / "data.txt", np.stack([np.full(20, 3.0), rows, rows**2, 10 * rows + 1], 1))
    np.savetxt(folder / "index_features.txt", [0, 1, 2], fmt="%d")
    (folder / "index_target.txt").write_text("3\n")
    (folder / "n_splits.txt").write_text("4\n")
    return tmp_path


def test_splits_are_standardised_with_their_own_training_rows(small):
    task = uci(small, "yacht")
    assert (task.name, task.likelihood, len(task.splits)) == ("uci-yacht", "gaussian", 4)
    assert (task.suggested_budget, task.model_options) == (4000, {"hidden": [50]})
    for split, (train, test) in zip(task.splits, standard_splits(20, 4), strict=True):
        ready = split.preprocessing
        assert (len(train), len(test)) == (18, 2)
        assert ready.input_shift == pytest.approx((3, train.mean(), (train**2).mean()))
        assert ready.input_scale == pytest.approx((0, train.std() + 1e-6, (train**2).std() + 1e-6))
        assert ready.target_shift == pytest.approx(10 * train.mean() + 1)
        assert ready.target_scale == pytest.approx(10 * train.std() + 1e-6)
        expected = torch.tensor((test - train.mean()) / (train.std() + 1e-6)).float()
        torch.testing.assert_close(split.test.inputs[:, 1], expected)
        torch.testing.assert_close(split.test.targets, expected)
        assert split.test.inputs[:, 0].tolist() == [0, 0]
        assert (ready.source, ready.columns, ready.target) == ("table", ("x0", "x1", "x2"), "y")


def test_gap_splits_test_the_middle_third(small):
    task = uci(small, "yacht", gap=True)
    assert len(task.splits) == 3
    rows = task.splits[1].test.targets * task.splits[1].preprocessing.target_scale
    rows = (rows + task.splits[1].preprocessing.target_shift - 1) / 10
    assert rows.round().tolist() == list(range(6, 13))
    falling = np.array([[5.0, 4, 3, 2, 1, 0]]).T
    [(train, test)] = gap_splits(falling)
    assert (train.tolist(), test.tolist()) == ([5, 4, 1, 0], [3, 2])


def test_only_the_first_splits(small):
    assert len(uci(small, "yacht", splits=2).splits) == 2
    with pytest.raises(InputError, match="splits=5 of uci-yacht: it has 4 splits"):
        uci(small, "yacht", splits=5)


@pytest.mark.parametrize("gap", [False, True])
def test_one_split(small, gap):
    every = uci(small, "yacht", gap=gap).splits
    [chosen] = uci(small, "yacht", gap=gap, split=2).splits
    assert torch.equal(chosen.test.inputs, every[2].test.inputs)
    assert torch.equal(chosen.train.targets, every[2].train.targets)
    count = len(every)
    for split, splits in ((count, None), (-1, None), ("0", None), (0, 1)):
        with pytest.raises(InputError, match=f"give one of 0 to {count - 1}, and no splits={splits}"):
            uci(small, "yacht", gap=gap, split=split, splits=splits)


def test_what_cannot_be_read_is_named(small):
    with pytest.raises(InputError, match=r"Unknown UCI set 'yatch'. Did you mean 'yacht'"):
        uci(small, "yatch")
    with pytest.raises(
        InputError, match=r"needs data.txt.*energy/data.txt.*polymode data fetch uci-energy.*https"
    ):
        uci(small, "energy")
    (small / "uci/yacht/index_target.txt").write_text("4\n")
    with pytest.raises(InputError, match=r"shape \[20, 4\], which does not hold the columns"):
        uci(small, "yacht")
    (small / "uci/yacht/data.txt").write_text("1 2 x\n")
    with pytest.raises(InputError, match="do not hold numbers only"):
        uci(small, "yacht")


@needs_files
@pytest.mark.parametrize("name", FOLDERS)
def test_standard_splits_are_those_of_the_index_files(name):
    folder = SHARED / "uci" / FOLDERS[name]
    num_splits = int((folder / "n_splits.txt").read_text())
    num_rows = len(np.loadtxt(folder / "data.txt"))
    for number, (train, test) in enumerate(standard_splits(num_rows, num_splits)):
        assert np.array_equal(train, np.loadtxt(folder / f"index_train_{number}.txt"))
        assert np.array_equal(test, np.loadtxt(folder / f"index_test_{number}.txt"))


@needs_files
@pytest.mark.parametrize("name", FOLDERS)
def test_checksums_are_those_of_the_files(name, monkeypatch):
    from polymode.application.datasets.downloads import fetch

    # A file with the right checksum is returned without a look at the network.
    monkeypatch.setenv("POLYMODE_MIRROR", "http://127.0.0.1:9")
    assert [fetch(download, SHARED).name for download in downloads(name)] == list(FILES)


@needs_files
def test_energy_gap_has_256_test_rows():
    [split] = uci(SHARED, "energy", gap=True, split=3).splits
    assert (split.train.num_examples, split.test.num_examples) == (512, 256)
    torch.testing.assert_close(split.train.inputs.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(split.train.inputs.std(0, correction=0), torch.ones(8), atol=1e-4, rtol=0)
    train, test = (part.inputs[:, 3] for part in (split.train, split.test))
    # The rows of a feature's middle third; ties at its borders fall on either side.
    assert bool(((train <= test.min()) | (train >= test.max())).all())
