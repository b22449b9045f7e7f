"""Predictions tell rows that are unlike the training data: strangeness, and columns with unseen values."""

import csv
import json
import shutil

import numpy as np
import pytest
from command_line import polymode, the_line
from safetensors.torch import load_file

from documents import edit
from polymode.application.cli.runs import StoredRun
from polymode.storage import write_tensors

NUMBER = 300


def rows(random, number):
    """Two numbers that go together and a colour."""
    a = random.normal(size=number)
    b = a + 0.1 * random.normal(size=number)
    return [
        (f"{x:.5f}", f"{y:.5f}", ("red", "blue")[i % 2]) for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]


def write(path, names, content):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *content])


STRANGE = [
    ("9", "9", "red"),  # outside of both ranges
    ("1.5", "-1.5", "blue"),  # each number is usual, but not both together
    ("0", "0", "green"),  # a colour that nobody has seen
    ("", "0", "red"),  # a gap where there was none
    ("0.1", "0.1", "blue"),  # as usual as can be
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unlike")
    random = np.random.default_rng(0)
    known = [(*row, f"{float(row[0]):.3f}") for row in rows(random, NUMBER)]
    write(folder / "train.csv", ("a", "b", "colour", "y"), known)
    write(folder / "usual.csv", ("a", "b", "colour"), rows(random, 400))
    write(folder / "strange.csv", ("a", "b", "colour"), STRANGE)
    train = (
        "train",
        "--data",
        "train.csv",
        "--likelihood",
        "gaussian",
        "--method",
        "single",
        "--epochs",
        "1",
    )
    polymode(*train, "--seeds", "2", "--run", "out", "--quiet", cwd=folder)
    return folder


def predicted(folder, data, *options):
    found = json.loads(polymode("predict", "out", data, "--json", *options, cwd=folder).stdout)
    return np.array(found["strangeness"]), found["unlike"], found


def test_strange_rows_are_flagged_with_the_columns_that_nobody_has_seen(made):
    strangeness, unlike, found = predicted(made, "strange.csv")
    assert list(found)[-2:] == ["strangeness", "unlike"]
    assert unlike == ["a; b", "", "colour", "a", ""]
    assert strangeness[0] > 1
    assert strangeness[1] > 1
    assert strangeness[4] < 1


def test_one_of_a_hundred_usual_rows_is_flagged(made):
    """The threshold is the second largest of 204 distances: a share of 2/205 exceeds it, known to √2/205."""
    strangeness, unlike, _ = predicted(made, "usual.csv")
    expected = 400 * 2 / 205
    assert (strangeness > 1).sum() <= expected + 4 * np.sqrt(expected + expected**2 / 2)
    assert sum(name != "" for name in unlike) <= 2  # beyond a tenth of the range: a matter of 3.5 deviations


def test_strangeness_is_the_distance_in_the_inputs_of_the_network(made, monkeypatch):
    """Written out: mean distance to the five nearest kept rows over the kept threshold."""
    monkeypatch.chdir(made)
    stored = StoredRun.open(str(made / "out"))
    [(inputs, _)] = stored.inputs(str(made / "strange.csv"), 0)
    tensors = load_file(made / "out/typical-0.safetensors")
    kept = tensors["rows"].double()
    assert len(kept) == stored.own_task.splits[0].train.num_examples  # few enough to be kept
    distances = np.linalg.norm(inputs.double().numpy()[:, None] - kept.numpy()[None], axis=-1)
    expected = np.sort(distances, 1)[:, :5].mean(1) / kept.shape[1] ** 0.5 / tensors["threshold"].item()
    np.testing.assert_allclose(predicted(made, "strange.csv")[0], expected, rtol=1e-5)


def test_files_have_the_columns_and_the_command_counts_the_rows(made):
    said = polymode("predict", "out", "strange.csv", "--out", "p.csv", cwd=made).stdout
    strangeness, unlike, _ = predicted(made, "strange.csv")
    count = sum(s > 1 or u != "" for s, u in zip(strangeness, unlike, strict=True))
    assert f"unlike the training data: {count} of 5 rows" in " ".join(said.split())
    with (made / "p.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["unlike"] for row in written] == unlike
    np.testing.assert_allclose([float(row["strangeness"]) for row in written], strangeness, rtol=1e-6)
    polymode("predict", "out", "strange.csv", "--out", "p.npz", "--quiet", cwd=made)
    with np.load(made / "p.npz") as arrays:
        assert arrays["unlike"].tolist() == unlike


def test_seeds_of_one_split_share_their_typical_rows(made):
    assert [path.name for path in (made / "out").glob("typical-*")] == ["typical-0.safetensors"]
    first, second = (predicted(made, "usual.csv", "--posterior", index)[0] for index in (0, 1))
    assert (first == second).all()


def test_data_without_named_columns_have_no_such_columns(tmp_path):
    train = ("train", "--data", "two_moons", "--method", "single", "--epochs", "1", "--run", "out", "--quiet")
    polymode(*train, cwd=tmp_path)
    found = json.loads(polymode("predict", "out", "two_moons", "--json", cwd=tmp_path).stdout)
    assert not {"strangeness", "unlike"} & found.keys()
    assert not list((tmp_path / "out").glob("typical-*"))


# --- damage ----------------------------------------------------------------------------------------------


@pytest.fixture
def copied(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("change", [flipped, lambda content: content[:100], lambda content: b"", None])
def test_damaged_typical_rows_are_refused(copied, change):
    path = copied / "out/typical-0.safetensors"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    line = the_line(polymode("predict", "out", "usual.csv", cwd=copied, code=1))
    assert "typical-0.safetensors" in line
    polymode("evaluate", "out", "--quiet", cwd=copied)  # which does not need them


@pytest.mark.parametrize("entry", [{"file": "../secret", "checksum": "0"}, {"file": 3}, "typical", 3])
def test_typical_rows_elsewhere_are_refused(copied, entry):
    edit(copied / "out/task.json", typical=[entry, entry])
    said = polymode("predict", "out", "usual.csv", cwd=copied, code=1)
    assert "--debug shows where" not in the_line(said)


def test_typical_rows_that_say_other_things_are_refused(copied):
    """Whoever writes the checksum anew, too, is told by what is in the file."""
    path = copied / "out/typical-0.safetensors"
    tensors = load_file(path) | {"neighbours": load_file(path)["neighbours"] * 0}
    digest = write_tensors(path, tensors)
    edit(copied / "out/task.json", typical=[{"file": path.name, "checksum": digest}] * 2)
    line = the_line(polymode("predict", "out", "usual.csv", cwd=copied, code=1))
    assert "its 'neighbours' is 0" in line


def test_runs_of_earlier_versions_predict_without_strangeness(copied):
    edit(copied / "out/task.json", typical=None)
    found = json.loads(polymode("predict", "out", "strange.csv", "--json", cwd=copied).stdout)
    assert "strangeness" not in found
    assert found["unlike"] == ["a; b", "", "colour", "a", ""]  # columns know by themselves
    said = polymode("predict", "out", "strange.csv", "--out", "p.csv", cwd=copied).stdout
    assert "unlike the training data" not in said
