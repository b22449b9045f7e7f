"""Mistakes: one line that says what to do, an exit code, nothing left behind.

Run inside this process, as starting one for each would take minutes; test_commands.py shows that the real
command line behaves like it.
"""

import signal
import sys
import warnings

import pytest

from polymode.application.cli import main


@pytest.fixture
def polymode(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder of its own and gives the one line of its error."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("POLYMODE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    terminate = signal.getsignal(signal.SIGTERM)

    def run(*arguments, code):
        assert main(arguments) == code
        captured = capsys.readouterr()
        lines = captured.err.strip().splitlines()
        assert len(lines) == 1, captured.err
        assert captured.out == ""
        return lines[0]

    yield run
    signal.signal(signal.SIGTERM, terminate)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["reference", "--passes", "1"], 2, "--passes must be at least 2, got 1"),
        (["reference", "--out", "r.json"], 2, "must end in .npz"),
        (["reference", "--seeds", "2"], 2, "a reference is one sample"),
        (["reference", "--data", "gap_regression", "--likelihood", "bernoulli"], 2, "classes or numbers"),
        (["reference", "--show", "none.npz"], 1, "There is no reference none.npz"),
        (["compare", "--reference", "none.npz"], 1, "There is no reference none.npz"),
        (["compare", "--processes", "0"], 2, "--processes must be at least 1"),
        (["compare", "--bins", "0"], 2, "--bins must be at least 1, got 0"),
        (["evaluate", "nowhere", "--bin-min-count", "-1"], 2, "--bin-min-count must be at least 0, got -1"),
        (["compare", "--set", "anchored.prior_std=0"], 1, "prior_std must be a positive number, got 0"),
        (["compare", "--set", "sequential_anchored.walk.step=-1"], 1, "must be a positive number, got -1"),
        (["compaer"], 2, "Unknown command 'compaer'. Did you mean 'compare'"),
        (["compare", "--methods", "deep_ensembel"], 2, "Did you mean 'deep_ensemble'"),
        (["compare", "--data", "digitz"], 2, "Did you mean 'digits'"),
        (["compare", "--model", "smalcnn"], 2, "Did you mean 'smallcnn'"),
        (["compare", "--set", "data.num_trian=3"], 2, "Did you mean 'num_train'"),
        (["compare", "--likelihood", "gausian"], 2, "Did you mean 'gaussian'"),
        (["compare", "--data", "two_moons", "--model", "smallcnn"], 1, "takes images"),
        (["compare", "--data", "cifar10"], 1, "polymode data fetch cifar10"),
        (["train", "--method", "nothing"], 2, "Unknown method 'nothing'"),
        (["evaluate", "nowhere"], 1, "nowhere is not a folder"),
        (["evaluate"], 2, "Name the folder of a run"),
        (["predict", "nowhere"], 2, "Name the folder of a run and the examples"),
        (["methods", "deepensemble"], 2, "Did you mean 'deep_ensemble'"),
        (["data", "fetch"], 2, "Name the data sets"),
        (["data", "fetch", "cifar"], 2, "Did you mean 'cifar10'"),
        (["data", "steal"], 2, "Unknown action"),
    ],
)
def test_mistakes_get_one_line_and_an_exit_code(tmp_path, polymode, arguments, code, message):
    assert message in polymode(*arguments, code=code)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format_version": 99, "what": "run"}', "has format 99, this polymode reads up to"),
        ("{", "is damaged"),
        ("{}", "is not a run of polymode"),
        ('{"format_version": 1, "what": "run", "status": "running"}', "has not ended"),
        ('{"format_version": 1, "what": "run", "status": "finished"}', "made by fit() in Python"),
    ],
)
def test_foreign_newer_and_damaged_runs_are_told_apart(tmp_path, polymode, content, message):
    run = tmp_path / "here/run"
    run.mkdir()
    (run / "manifest.json").write_text(content)
    assert message in polymode("evaluate", "run", code=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b,y\n1,2,\n4,5,\n7,8,\n", "No row of t.csv has a 'y'"),  # gaps are for inputs
        ("a,b,y\n1,2,3.5\n4,5,red\n7,8,9.5\n", "The target 'y' of t.csv is text with 3 different values"),
        ("a,a,y\n1,2,3\n4,5,6\n7,8,9\n", "more than one column named 'a'"),
        ("a,b,y\n1,2,3\n4,5,6,7\n7,8,9\n", "Expected 3 fields in line 3, saw 4"),
        ("y\n1\n2\n3\n", "no column to predict 'y' from"),
        ("a,b,y\n1,2,3\n4,5,3\n7,8,3\n", "target"),
        ("", "No columns"),
    ],
)
def test_bad_tables_are_refused_before_training(tmp_path, polymode, content, message):
    (tmp_path / "here/t.csv").write_text(content)
    assert message in polymode("compare", "--data", "t.csv", code=1)
    assert not (tmp_path / "here/runs").exists()


def test_a_broken_image_is_refused_before_training(tmp_path, polymode):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "here/pets" / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / f"here/pets/{name}/{index}.png")
    (tmp_path / "here/pets/dog/1.png").write_bytes(b"not an image")
    line = polymode("compare", "--data", "pets", code=1)
    assert "dog/1.png" in line


def test_errors_of_the_users_own_code_name_their_kind(tmp_path, polymode, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "here/broken_shop.py").write_text("def load():\n    return 1 / 0\n")
    line = polymode("compare", "--data", "broken_shop:load", code=1)
    assert line == "polymode compare: ZeroDivisionError: division by zero --debug shows where."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["compare", "--budget", "20", "--set", "sequential_anchored.first_epochs=50"],
            "A budget of 20 member-epochs is shorter than the first training of a chain, first_epochs=50",
        ),
        (["train", "--method", "hmc", "--model", "mlp", "--set", "model.batch_norm=true"], "BatchNorm"),
        (["train", "--model", "resnet8", "--set", "model.dropout=2"], "dropout must be a rate of at least 0"),
    ],
)
def test_what_a_method_refuses_is_told_before_any_training(capsys, polymode, tmp_path, arguments, message):
    assert main(arguments) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert len(lines) == 2  # what was understood of the data, and the error
    assert not list(tmp_path.glob("here/runs/*/*/posterior-0"))


def test_a_device_that_is_not_there(polymode):
    assert "device='cuda:7' cannot be used" in polymode("compare", "--quiet", "--device", "cuda:7", code=1)
