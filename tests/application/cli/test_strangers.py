"""Run folders that somebody else has made: they name no code that is run, and lead nowhere else."""

import json
import os
import re
import resource
import shutil
import stat

import numpy as np
import pytest
import torch
from command_line import polymode, the_line

import polymode as pm
from documents import edit, edit_tensors
from polymode.errors import CheckpointError
from polymode.storage import read_document, write_document

# What a stranger leaves in the current folder: it shows that it was imported, and what was called.
PAYLOAD = """
import pathlib
import torch
pathlib.Path("imported").touch()
class Optimizer(torch.optim.SGD):
    pass
def load(**options):
    raise SystemExit("called")
build = load
"""
NETWORK = """
from torch import nn
def build(width=4):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a table, a run on it, and a run with a network of one's own."""
    folder = tmp_path_factory.mktemp("made")
    x = np.random.default_rng(0).normal(size=(60, 2))
    rows = "\n".join(f"{a:.4f},{b:.4f},{'yes' if a > 0 else '=cmd|calc'}" for a, b in x)
    (folder / "table.csv").write_text(f"a,b,answer\n{rows}\n")
    (folder / "new.csv").write_text("a,b\n0.1,0.2\n-1,0.3\n")
    (folder / "nets.py").write_text(NETWORK)
    train = (
        "train",
        "--data",
        "table.csv",
        "--method",
        "single",
        "--epochs",
        "2",
        "--quiet",
        "--backend",
        "loop",
    )
    polymode(*train, "--run", "plain", cwd=folder)
    polymode(*train, "--run", "own", "--model", "nets:build", "--set", "model.width=3", cwd=folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of it, with the stranger's module in it."""
    there = tmp_path / "there"
    shutil.copytree(made, there)
    (there / "payload.py").write_text(PAYLOAD)
    return there


def refused(folder, *command):
    """The one line with which a command refuses to import; nothing was."""
    line = the_line(polymode(*command, cwd=folder, code=2))
    assert not (folder / "imported").exists()
    assert not (folder / "pwned").exists()
    return line


# --- code ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("predict", "plain", "new.csv"), ("evaluate", "plain")])
@pytest.mark.parametrize(
    ("name", "options"), [("os:system", {"command": "touch pwned"}), ("payload:build", {})]
)
def test_a_network_that_a_folder_names_is_not_imported(folder, command, name, options):
    edit(folder / "plain/task.json", network__name=name, network__options=options)
    line = refused(folder, *command)
    assert f"The run folder plain wants '{name}' imported" in line
    typed = f"polymode {' '.join(command)}"
    assert f"{typed} --model {name} or, for all that it names, {typed} --trust" in line


@pytest.mark.parametrize(
    ("changes", "option"),
    [({"options__data": "payload:load"}, "--data"), ({"options__ood": "payload:load"}, "--ood")],
)
def test_data_that_a_folder_names_are_not_imported(folder, changes, option):
    edit(folder / "plain/manifest.json", **changes)
    line = refused(folder, "evaluate", "plain")
    assert "The run folder plain wants 'payload:load' imported" in line
    assert f"polymode evaluate plain {option} payload:load" in line


def test_the_run_of_a_baseline_is_not_trusted_either(folder):
    shutil.copytree(folder / "plain", folder / "other")
    edit(folder / "other/task.json", network__name="payload:build")
    line = refused(folder, "evaluate", "plain", "--corruptions", "fog", "--baseline", "other")
    assert "The run folder other wants 'payload:build' imported" in line


def test_naming_data_does_not_allow_them_as_a_network(folder):
    edit(folder / "plain/task.json", network__name="payload:load")
    line = the_line(polymode("predict", "plain", "payload:load", cwd=folder, code=2))
    assert "The run folder plain wants 'payload:load' imported" in line
    assert not (folder / "imported").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"options__data": "payload:load"},
        {"options__model": "payload:build"},
        {"options__ood": "payload:load"},
        {"options__method__optimizer__kind": "payload:Optimizer"},
    ],
)
def test_a_manifest_as_a_config_imports_nothing(folder, changes):
    edit(folder / "plain/manifest.json", **changes)
    line = refused(folder, "train", "--config", "plain/manifest.json", "--run", "again")
    assert "plain/manifest.json wants 'payload:" in line
    assert line.endswith("polymode train --config plain/manifest.json --run again --trust")


def test_a_manifest_cannot_say_that_it_is_trusted(folder):
    edit(folder / "plain/manifest.json", options__trust=True, options__data="payload:load")
    refused(folder, "train", "--config", "plain/manifest.json", "--run", "again")


def test_one_s_own_network_is_named_again_or_the_folder_trusted(folder):
    line = refused(folder, "predict", "own", "new.csv")
    assert "polymode predict own new.csv --model nets:build" in line
    named = polymode("predict", "own", "new.csv", "--model", "nets:build", cwd=folder).stdout
    assert named == polymode("predict", "own", "new.csv", "--trust", cwd=folder).stdout
    assert "nll" in polymode("evaluate", "own", "--model", "nets:build", "--json", cwd=folder).stdout
    line = the_line(polymode("predict", "plain", "new.csv", "--model", "nets:build", cwd=folder, code=2))
    assert "plain was trained with mlp" in line


def test_a_config_of_one_s_own_may_name_code(folder):
    (folder / "mine.yaml").write_text(
        "data: table.csv\nmodel: nets:build\nmethod: single\nepochs: 1\nquiet: true\nrun: third\n"
    )
    polymode("train", "--config", "mine.yaml", cwd=folder)
    again = ("train", "--config", "third/manifest.json", "--run", "fourth", "--quiet")
    assert "--model nets:build" in refused(folder, *again)
    polymode(*again, "--model", "nets:build", cwd=folder)


# --- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../elsewhere/posterior-0", "{folder}/elsewhere/posterior-0", "..", "", "link", 3]
)
def test_posteriors_outside_the_folder_are_not_read(folder, name):
    shutil.copytree(folder / "plain", folder / "elsewhere")
    if name == "link":
        (folder / "plain/link").symlink_to(folder / "elsewhere/posterior-0")
    name = name.format(folder=folder) if isinstance(name, str) else name
    edit(folder / "plain/manifest.json", posteriors=[name])
    line = the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))
    assert ("is a symbolic link" if name == "link" else "does not lie in that folder") in line


@pytest.mark.parametrize("kind", ["name", "link"])
def test_files_outside_the_folder_of_a_posterior_are_not_read(folder, kind):
    posterior = folder / "plain/posterior-0"
    (posterior / "members-00000.safetensors").rename(folder / "members.safetensors")
    if kind == "link":
        (posterior / "members-00000.safetensors").symlink_to(folder / "members.safetensors")
    else:
        files = json.loads((posterior / "posterior.json").read_text())["files"]
        files["../../members.safetensors"] = files.pop("members-00000.safetensors")
        edit(posterior / "posterior.json", files=files)
    line = the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))
    assert ("is a symbolic link" if kind == "link" else "does not lie in that folder") in line


def test_labels_of_a_comparison_do_not_lead_out_of_its_folder(folder):
    options = {"methods": "..=single"}
    write_document(folder / "stranger/comparison.json", "comparison", {"options": options})
    compare = ("compare", "--data", "table.csv", "--budget", "1", "--methods", "single", "--run", "stranger")
    assert "The label '..'" in the_line(polymode(*compare, "--quiet", cwd=folder, code=2))


# --- weights and preparations ----------------------------------------------------------------------


def without_a_weight(tensors):
    del tensors["stacked/1.weight"]
    return tensors


def with_another(tensors):
    return tensors | {"stacked/9.weight": torch.zeros(1, 2)}


def with_nan(tensors):
    tensors["stacked/1.weight"][0, 0, 0] = torch.nan
    return tensors


def in_double(tensors):
    return tensors | {"stacked/1.weight": tensors["stacked/1.weight"].double()}


def reshaped(tensors):
    return tensors | {"stacked/1.weight": tensors["stacked/1.weight"][:, :1].clone()}


def weighted_without_end(tensors):
    return tensors | {"log_weights": torch.full((1,), torch.inf)}


def labelled_otherwise(tensors):
    return tensors | {"labels": torch.zeros(1, 2, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_weight, "lacks 'stacked/1.weight', which the network needs"),
        (with_another, "holds 'stacked/9.weight', which the network does not have"),
        (with_nan, "'stacked/1.weight' holds NaN or infinite numbers"),
        (in_double, "'stacked/1.weight' is ['float64', 1, 64, 2], the network needs ['float32', 1, 64, 2]"),
        (reshaped, "'stacked/1.weight' is ['float32', 1, 1, 2], the network needs"),
        (weighted_without_end, "'log_weights' holds NaN or infinite numbers"),
        (labelled_otherwise, "'labels' is ['int64', 1, 2], the network needs ['int64', 1, 3]"),
    ],
)
def test_weights_that_are_not_the_network_s_are_refused(folder, change, message):
    edit_tensors(folder / "plain/posterior-0", "members-00000.safetensors", change)
    assert message in the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_scale": [2.0]}, "input_shift of length 2 and input_scale of length 1"),
        ({"input_scale": [2.0], "input_shift": [0.0]}, "columns of length 2 do not agree"),
        (
            {"input_scale": [2.0], "input_shift": [0.0], "columns": ["a"], "encoding": []},
            "input_shift is for 1 columns or channels, but examples of the network are [2]",
        ),
        ({"input_scale": [1.0, -1.0]}, "must not be negative"),
        ({"input_shift": [float("nan"), 0.0]}, "input_shift must be a list of finite numbers"),
        ({"target_scale": 0.0}, "target_scale must be positive"),
        ({"target_scale": "1"}, "target_scale must be finite numbers, got '1'"),
        ({"classes": [1, 2]}, "classes must be a list of text"),
        (
            {"classes": ["only one"]},
            "is damaged: 1 names of classes are given, and the network tells 2 apart",
        ),
        ({"stranger": 1}, "Unknown entry of a preparation of examples 'stranger'"),
    ],
)
def test_preparations_that_were_changed_are_refused(folder, changes, message):
    edit(folder / "plain/task.json", **{f"posteriors__0__{key}": value for key, value in changes.items()})
    assert message in the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))


def test_a_preparation_without_an_entry_is_refused(folder):
    ready = json.loads((folder / "plain/task.json").read_text())["posteriors"][0]
    del ready["target_scale"]
    edit(folder / "plain/task.json", posteriors=[ready])
    line = the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))
    assert "plain/task.json is damaged: target_scale is missing." in line


def test_a_column_that_was_constant_may_have_a_scale_of_zero():
    config = pm.data.Preprocessing(input_shift=(1.0,), input_scale=(0.0,)).config()
    assert pm.data.Preprocessing.from_config(config).input_scale == (0.0,)


# --- documents -------------------------------------------------------------------------------------


def test_a_digit_changed_in_the_scores_is_noticed_and_they_are_judged_again(folder):
    train = ("train", "--config", "plain/manifest.json", "--run", "plain", "--json")
    before = json.loads(polymode(*train, cwd=folder).stdout)
    path = folder / "plain/scores.json"
    whole = path.read_bytes()
    place = whole.index(b'"nll": ') + len(b'"nll": 0.')
    path.write_bytes(whole[:place] + (b"1" if whole[place] != ord("1") else b"2") + whole[place + 1 :])
    said = polymode(*train, cwd=folder, expected_warnings=True)
    assert (
        "scores.json is damaged: its checksum differs from the one written. The posteriors are judged"
        in said.stderr
    )
    assert json.loads(said.stdout) == before
    assert path.read_bytes() == whole


def test_a_damaged_task_says_the_way_out_and_the_command_writes_it_again(folder):
    path = folder / "plain/task.json"
    whole = path.read_text()
    path.write_text(whole.replace('"input_scale"', '"input_scole"'))
    line = the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))
    assert "task.json is damaged: its checksum" in line
    assert "Repeat the command that trained the run" in line
    polymode("train", "--config", "plain/manifest.json", "--run", "plain", "--quiet", cwd=folder)
    assert path.read_text() == whole


def test_documents_of_the_first_format_are_read_as_they_are(folder):
    for path in (folder / "plain").rglob("*.json"):
        document = json.loads(path.read_text())
        del document["sha256"]
        path.write_text(json.dumps(document | {"format_version": 1}))
    polymode("predict", "plain", "new.csv", cwd=folder)
    path = folder / "plain/task.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 0'))
    with pytest.raises(CheckpointError, match="checksum"):
        read_document(path, "task")


# --- what is written, and what is said -------------------------------------------------------------


def test_a_link_stays_and_what_it_points_to_is_written(folder):
    (folder / "out.csv").symlink_to(folder / "target.csv")
    polymode("predict", "plain", "new.csv", "--out", "out.csv", cwd=folder)
    assert (folder / "out.csv").is_symlink()
    assert "confidence" in (folder / "target.csv").read_text()


def test_text_that_a_spreadsheet_would_run_is_quoted(folder):
    (folder / "zero.csv").write_text("a,b\n-3,0\n")
    said = polymode("predict", "plain", "zero.csv", cwd=folder).stdout
    header, row = said.splitlines()
    assert "p_=cmd|calc" in header
    assert row.split(",")[1] in ("'=cmd|calc", "yes")
    assert ",=" not in said
    assert "\n=" not in said


def test_files_have_the_rights_of_a_file_of_the_user(folder):
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder / "plain").rglob("*.safetensors"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_values_of_any_length_make_short_messages(folder):
    (folder / "long.csv").write_text("a,b,answer\n1,1," + "x" * 3_000_000 + "\n")
    said = polymode("evaluate", "plain", "--data", "long.csv", "--quiet", cwd=folder, code=None)
    assert said.code in (1, 2)
    assert len(the_line(said)) < 3000
    assert "characters left out" in the_line(said)
    # A text in the place of a number is a value that no training row has; a column of such is another one.
    (folder / "long.csv").write_text("a,b\n1,1\n2,2\n" + "x" * 3_000_000 + ",1\n")
    said = polymode("predict", "plain", "long.csv", cwd=folder, expected_warnings=True)
    assert "1 of 3 cells of 'a' hold no number" in " ".join(said.stderr.split())
    assert len(said.stderr) < 3000
    *_, row = said.stdout.splitlines()
    assert row.endswith(",a")
    assert len(row) < 3000
    (folder / "long.csv").write_text("a,b\n" + "x" * 3_000_000 + ",1\n")
    line = the_line(polymode("predict", "plain", "long.csv", cwd=folder, code=1))
    assert "1 of 1 cells of 'a' hold no number" in line
    assert len(line) < 3000


def test_arrays_without_rows_are_refused(folder):
    x = np.random.default_rng(0).normal(size=(20, 2))
    np.savez(folder / "some.npz", x=x, y=(x[:, 0] > 0).astype(int))
    np.savez(folder / "none.npz", x=np.zeros((0, 2)))
    train = ("train", "--data", "some.npz", "--method", "single", "--epochs", "1", "--quiet")
    polymode(*train, "--run", "arrays", cwd=folder)
    line = the_line(polymode("predict", "arrays", "none.npz", cwd=folder, code=1))
    assert "none.npz is empty, its shape is [0, 2]" in line


@pytest.mark.parametrize(("name", "opening"), [("deep.json", "["), ("deep.yaml", "[")])
def test_configs_nested_without_end_are_refused(folder, name, opening):
    (folder / name).write_text(opening * 100_000)
    line = the_line(polymode("train", "--config", name, cwd=folder, code=2))
    assert f"The config {name} is not valid" in line


def test_documents_nested_without_end_are_refused(folder):
    (folder / "plain/task.json").write_text("[" * 100_000)
    line = the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))
    assert "task.json is damaged" in line


@pytest.mark.parametrize("command", ["train", "compare", "reference"])
def test_a_manifest_is_not_trusted_for_lack_of_a_version(folder, command):
    options = {"data": "os:system", "set": {"data": {"command": "touch pwned"}}}
    (folder / "plain/manifest.json").write_text(json.dumps(options))
    said = polymode(command, "--config", "plain/manifest.json", cwd=folder, code=1)
    assert "plain/manifest.json is not a run of polymode" in the_line(said)
    assert not (folder / "pwned").exists()


def test_a_manifest_that_was_changed_is_not_followed(folder):
    path = folder / "plain/manifest.json"
    path.write_text(path.read_text().replace('"backend": "loop"', '"backend": "vmap"'))
    said = polymode("train", "--config", "plain/manifest.json", "--run", "again", cwd=folder, code=1)
    assert "manifest.json is damaged" in the_line(said)


@pytest.mark.parametrize("name", ["checkpoint", "posterior-0", "events.jsonl", "task.json"])
def test_links_in_a_run_folder_are_not_followed(folder, name):
    outside = folder / "outside"
    outside.mkdir()
    (outside / "state-000000001.safetensors").write_text("mine")
    there = folder / "plain" / name
    shutil.rmtree(there) if there.is_dir() else there.unlink(missing_ok=True)
    there.symlink_to(outside)
    for command in (
        ("predict", "plain", "new.csv"),
        ("train", "--config", "plain/manifest.json", "--run", "plain"),
    ):
        assert "is a symbolic link" in polymode(*command, cwd=folder, code=1).stderr
    assert [path.name for path in outside.iterdir()] == ["state-000000001.safetensors"]


def test_one_refusal_names_all_that_has_to_be_given_again(folder):
    edit(folder / "own/manifest.json", options__data="payload:load", options__ood="payload:foreign")
    line = refused(folder, "evaluate", "own")
    assert "evaluate own --model nets:build --data payload:load --ood payload:foreign or" in line
    line = refused(folder, "train", "--config", "own/manifest.json", "--run", "again")
    assert "--data payload:load --model nets:build --ood payload:foreign or" in line


# --- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [[10**5, 10**5], [10**9], [10**12], [2**62, 2**62], [10**30]])
def test_a_network_that_is_larger_than_its_weights_takes_no_memory(folder, hidden):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    edit(folder / "plain/task.json", network__options={"hidden": hidden})
    line = the_line(polymode("predict", "plain", "new.csv", cwd=folder, code=1))
    assert "task.json" in line
    assert re.search("of weights, and|not as polymode writes it|cannot be built", line)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # kilobytes
