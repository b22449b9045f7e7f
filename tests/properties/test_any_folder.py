"""Folders of runs in any state of damage: the same numbers or a clear error, whatever is in them."""

import json
import resource
import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import polymode
from hostile_values import VALUES, changed, examples, forged
from hypothesis import given
from hypothesis import strategies as st

import polymode as pm
from polymode.errors import PolymodeError

MEMORY = 2**20  # kilobytes that a folder may make the process grow by
PAYLOAD = "import pathlib\npathlib.Path('imported').touch()\ndef load(**options):\n    raise SystemExit(3)\n"
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
DATA = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=8)
MODEL = partial(pm.models.MLP, 3, 2, (4,))
COMMANDS = {"predict": ("predict", "run", "new.csv"), "evaluate": ("evaluate", "run", "--json")}


class Stop(Exception):
    pass


def fit(folder, stop=None):
    def observer(epoch):
        if epoch.epochs_done == stop:
            raise Stop

    return pm.fit(
        pm.methods.DeepEnsemble(2, of=pm.methods.Single(optimizer=pm.Optimizer("SGD", lr=0.05))),
        MODEL,
        DATA,
        likelihood="categorical",
        epochs=3,
        run_dir=folder,
        resume=True,
        backend="loop",
        progress=False,
        checkpoint_seconds=0.0,
        observer=observer,
    )


def bits(posterior):
    return [
        (name, tensor.tolist())
        for block in posterior.draw()
        for name, tensor in sorted((block.stacked | block.shared).items())
    ]


class Made(dict):
    """What the fixture gives, told in one word where an example fails."""

    def __repr__(self):
        return "made"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of the command line, one of Python's and an interrupted one, and what they give."""
    root = tmp_path_factory.mktemp("made")
    expected = bits(fit(root / "whole"))
    with pytest.raises(Stop):
        fit(root / "cut", stop=2)
    there = root / "finished"
    there.mkdir()
    x = np.random.default_rng(0).normal(size=(30, 2))
    rows = "\n".join(f"{a:.3f},{b:.3f},{'yes' if a > b else 'no'}" for a, b in x)
    (there / "table.csv").write_text(f"a,b,answer\n{rows}\n")
    (there / "new.csv").write_text("a,b\n0.1,0.2\n-1,0.3\n")
    (there / "payload.py").write_text(PAYLOAD)
    polymode(
        *("train", "--data", "table.csv", "--method", "deep_ensemble", "--epochs", "1", "--quiet"),
        *(
            "--backend",
            "loop",
            "--set",
            "model.hidden=[3]",
            "--set",
            "deep_ensemble.num_members=2",
            "--run",
            "run",
        ),
        cwd=there,
        expected_warnings=True,
    )
    said = {
        key: polymode(*words, cwd=there, expected_warnings=True).stdout for key, words in COMMANDS.items()
    }
    for key, words in COMMANDS.items():  # a second time, the same
        assert polymode(*words, cwd=there, expected_warnings=True).stdout == said[key]
    return Made(root=root, bits=expected, said=said)


def files_of(folder):
    return sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "new.csv", "table.csv", "payload.py")
    )


def documents_of(folder):
    return [path for path in files_of(folder) if path.suffix == ".json"]


@st.composite
def damage(draw, folder):
    """A file of a folder, and what is done to it."""
    file = draw(st.sampled_from(files_of(folder)))
    content = bytearray((folder / file).read_bytes())
    place = draw(st.integers(0, max(0, len(content) - 1)))
    kind = draw(st.sampled_from(["flip", "cut", "take", "double", "write", "remove", "empty"]))
    if kind == "flip" and content:
        content[place] ^= 1 << draw(st.integers(0, 7))
    elif kind == "cut":
        del content[place:]
    elif kind == "take":
        del content[place : place + draw(st.integers(1, 30))]
    elif kind == "double":
        end = place + draw(st.integers(1, 30))
        content[place:place] = content[place:end]
    elif kind == "write":
        some = draw(st.binary(min_size=1, max_size=12))
        content[place : place + len(some)] = some
    elif kind == "empty":
        content.clear()
    return file, None if kind == "remove" else bytes(content)


class Folder:
    """A copy of a folder, for one example; what it makes the process do is watched."""

    def __init__(self, source):
        self.source = source

    def __enter__(self):
        self.place = Path(tempfile.mkdtemp())
        self.path = self.place / "copy"
        shutil.copytree(self.source, self.path)
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return self.path

    def __exit__(self, *problem):
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before
        ran = list(self.place.rglob("imported"))
        shutil.rmtree(self.place)
        assert not ran, "code of the folder has run"
        assert grown < MEMORY, f"{grown} kB of memory"


def outcome_of(read):
    """What reading gives, or None where it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a predecessor that is taken, and what is said of it
        try:
            return read()
        except PolymodeError:
            return None


def outcome_of_command(folder, key):
    said = polymode(*COMMANDS[key], cwd=folder, code=None, expected_warnings=True)
    if said.code == 0:
        return said.stdout
    assert said.code in (1, 2)
    assert "Traceback" not in said.stderr
    assert "--debug shows where" not in said.stderr, said.stderr  # an error that nobody thought of
    assert said.stderr.rstrip("\n").splitlines()[-1].startswith(f"polymode {key}: "), said.stderr
    return None


def apply(folder, file, content):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)


@examples(60)
@given(chance=st.data())
def test_a_damaged_posterior_is_the_same_or_refused(made, chance):
    source = made["root"] / "whole"
    with Folder(source) as folder:
        apply(folder, *chance.draw(damage(source)))
        found = outcome_of(lambda: bits(pm.load_posterior(folder, MODEL)))
        assert found in (None, made["bits"])


@examples(40)
@given(chance=st.data())
def test_a_damaged_run_goes_on_as_before_or_is_refused(made, chance):
    source = made["root"] / chance.draw(st.sampled_from(["cut", "cut", "whole"]))
    with Folder(source) as folder:
        apply(folder, *chance.draw(damage(source)))
        found = outcome_of(lambda: bits(fit(folder)))
        assert found in (None, made["bits"])


@examples(35)
@given(chance=st.data(), key=st.sampled_from(sorted(COMMANDS)))
def test_a_command_on_a_damaged_run_says_the_same_or_one_line(made, chance, key):
    source = made["root"] / "finished"
    with Folder(source) as folder:
        apply(folder, *chance.draw(damage(source)))
        assert outcome_of_command(folder, key) in (None, made["said"][key])


@examples(25)
@given(chance=st.data(), key=st.sampled_from(sorted(COMMANDS)))
def test_an_edited_document_without_its_checksum_is_the_same_or_refused(made, chance, key):
    source = made["root"] / "finished"
    with Folder(source) as folder:
        path = folder / chance.draw(st.sampled_from(documents_of(source)))
        path.write_text(json.dumps(chance.draw(changed(json.loads(path.read_text())))))
        assert outcome_of_command(folder, key) in (None, made["said"][key])


@examples(60)
@given(chance=st.data(), key=st.sampled_from(sorted(COMMANDS)))
def test_a_forged_document_runs_nothing_and_ends_in_an_answer_or_one_line(made, chance, key):
    """With a checksum that fits it may give other numbers: whoever can write a folder can do that."""
    source = made["root"] / "finished"
    with Folder(source) as folder:
        path = folder / chance.draw(st.sampled_from(documents_of(source)))
        forged(path, chance.draw(changed(json.loads(path.read_text()))))
        outcome_of_command(folder, key)


@examples(60)
@given(chance=st.data())
def test_a_forged_posterior_or_run_is_read_or_refused(made, chance):
    source = made["root"] / chance.draw(st.sampled_from(["cut", "whole"]))
    with Folder(source) as folder:
        path = folder / chance.draw(st.sampled_from(documents_of(source)))
        forged(path, chance.draw(changed(json.loads(path.read_text()))))
        if source.name == "whole":
            outcome_of(lambda: bits(pm.load_posterior(folder, MODEL)))
        outcome_of(lambda: bits(fit(folder)))


@examples(20)
@given(value=VALUES, chance=st.data())
def test_a_document_that_is_something_else_is_refused(made, value, chance):
    source = made["root"] / "whole"
    with Folder(source) as folder:
        path = folder / chance.draw(st.sampled_from(documents_of(source)))
        path.write_text(json.dumps(value))
        assert outcome_of(lambda: bits(pm.load_posterior(folder, MODEL))) in (None, made["bits"])
