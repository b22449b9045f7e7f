"""Damage to any file of a run: the same bits, a clear error, or a fall-back that is said; nothing else."""

import random
import shutil
import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from command_line import polymode

import polymode as pm
from polymode.errors import PolymodeError

OPTIMIZER = pm.Optimizer("SGD", lr=0.05)
METHODS = {
    "single": partial(pm.methods.Single, optimizer=OPTIMIZER),
    "deep_ensemble": partial(pm.methods.DeepEnsemble, 2, of=pm.methods.Single(optimizer=OPTIMIZER)),
    "sequential_anchored": partial(
        pm.methods.SequentialAnchored,
        1,
        prior_std=1.0,
        walk=pm.samplers.GuidedWalk(step=3.0),
        first_epochs=1,
        short_epochs=1,
        optimizer=OPTIMIZER,
    ),
    "ecmp": partial(pm.methods.ECMP, num_components=2, optimizer=OPTIMIZER),
    "late_phase": partial(pm.methods.LatePhase, 2, optimizer=OPTIMIZER),
}
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
DATA = pm.ArrayData(X, (X.sum(1) > 0).long(), batch_size=8)


class Stop(Exception):
    pass


def fit(name, folder, stop=None):
    def observer(epoch):
        if epoch.epochs_done == stop:
            raise Stop

    return pm.fit(
        METHODS[name](),
        partial(pm.models.MLP, 3, 2, (4,)),
        DATA,
        likelihood="categorical",
        epochs=4,
        validation=DATA,
        run_dir=folder,
        resume=True,
        backend="loop",
        progress=False,
        checkpoint_seconds=0.0,
        observer=observer,
    )


def bits(posterior):
    return [
        {name: t.clone() for name, t in (block.stacked | block.shared).items()} for block in posterior.draw()
    ]


def same(one, other):
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())
        for a, b in zip(one, other, strict=True)
    )


COMMANDS = {
    "predict": ("predict", "run", "new.csv"),
    "evaluate": ("evaluate", "run", "--json"),
    "train": ("train", "--config", "../options.json", "--run", "run", "--json"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that were cut, and finished ones, with what each gives when nothing is damaged."""
    root = tmp_path_factory.mktemp("runs")
    x = np.random.default_rng(0).normal(size=(40, 3))
    rows = "\n".join(f"{a:.3f},{b:.3f},{c:.3f},{'yes' if a > b else 'no'}" for a, b, c in x)
    found = {}
    for name in METHODS:
        whole, cut = root / f"{name}-whole", root / f"{name}-cut"
        expected = bits(fit(name, whole))
        with pytest.raises(Stop):
            fit(name, cut, stop=3)
        finished = root / f"{name}-finished"
        finished.mkdir()
        (finished / "table.csv").write_text(f"a,b,c,answer\n{rows}\n")
        (finished / "new.csv").write_text("a,b,c\n0.1,0.2,0.3\n-1,0.3,2\n")
        polymode(
            *(
                "train",
                "--data",
                "table.csv",
                "--method",
                name,
                "--budget",
                "8",
                "--backend",
                "loop",
                "--quiet",
            ),
            *("--set", "model.hidden=[4]", "--run", "run"),
            cwd=finished,
            expected_warnings=True,  # short walks of anchors
        )
        shutil.copy(finished / "run/manifest.json", finished / "options.json")
        said = {
            key: polymode(*command, cwd=finished, expected_warnings=True).stdout
            for key, command in commands(finished).items()
        }
        found[name] = {"whole": whole, "cut": cut, "bits": expected, "finished": finished, "said": said}
    return found


def commands(folder):
    own = str(folder / "options.json")
    return {
        key: tuple(own if part == "../options.json" else part for part in c) for key, c in COMMANDS.items()
    }


def damage(path, chance):
    """Flip a bit, cut the file, take a piece out of it, or remove it."""
    kind = chance.choice(["flip", "flip", "cut", "piece", "remove"])
    content = bytearray(path.read_bytes())
    place = chance.randrange(max(1, len(content)))
    if kind == "remove" or not content:
        path.unlink()
        return "remove"
    if kind == "flip":
        content[place] ^= 1 << chance.randrange(8)
    else:
        del content[place : None if kind == "cut" else place + 1 + chance.randrange(20)]
    path.write_bytes(bytes(content))
    return kind


def outcome_of_fit(run, folder, name):
    """What becomes of a run that goes on, or is read back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = bits(fit(name, folder))
        except PolymodeError:
            return "refused"
    assert same(found, run["bits"]), "other bits"
    return "fell back" if caught else "same bits"


def outcome_of_command(run, folder, key):
    """What becomes of a command about a finished run."""
    said = polymode(*commands(folder)[key], cwd=folder, code=None, expected_warnings=True)
    if said.code:
        assert "--debug shows where" not in said.stderr, said.stderr  # an error that nobody thought of
        return "refused"
    assert said.stdout == run["said"][key], "another answer"
    return "fell back" if "damaged" in said.stderr else "same bits"


def damaged_once(runs, folder, chance):
    name, state = chance.choice(list(METHODS)), chance.choice(["whole", "cut", "cut", "finished", "finished"])
    run = runs[name]
    shutil.copytree(run[state], folder)
    inside = folder / "run" if state == "finished" else folder
    files = sorted(p for p in inside.rglob("*") if p.is_file() and p.name != ".lock")
    # A file of every kind as often as any other: there are many members, and one manifest.
    kinds = sorted({(p.parent.name, p.name.split("-")[0]) for p in files})
    kind = chance.choice(kinds)
    path = chance.choice([p for p in files if (p.parent.name, p.name.split("-")[0]) == kind])
    key = chance.choice(list(COMMANDS))
    done = damage(path, chance)
    try:
        outcome = (
            outcome_of_command(run, folder, key) if state == "finished" else outcome_of_fit(run, folder, name)
        )
    except Exception as error:
        raise AssertionError(f"{name}, {state}, {path.relative_to(folder)}: {done}, {key}") from error
    shutil.rmtree(folder)
    return outcome


def damaged_often(runs, folder, number, seed):
    chance = random.Random(seed)
    outcomes = Counter(damaged_once(runs, folder / str(index), chance) for index in range(number))
    print(dict(outcomes))
    assert set(outcomes) == {"same bits", "refused", "fell back"}


def test_damage_is_noticed_or_does_no_harm(runs, tmp_path):
    damaged_often(runs, tmp_path, 60, seed=0)


@pytest.mark.slow
def test_much_damage_is_noticed_or_does_no_harm(runs, tmp_path):
    damaged_often(runs, tmp_path, 300, seed=1)


# --- one at a time ---------------------------------------------------------------------------------


def members_of(folder):
    return sorted((folder / "members").glob("*.safetensors"))


def test_a_finished_member_that_is_damaged_is_made_again(runs, tmp_path):
    """Where the checkpoint before does not need the file, training goes on from there and writes it anew."""
    earlier, folder = tmp_path / "earlier", tmp_path / "run"
    with pytest.raises(Stop):
        fit("sequential_anchored", earlier, stop=2)  # one member is finished, and two are at the next stop
    shutil.copytree(runs["sequential_anchored"]["cut"], folder)
    for path in (earlier / "checkpoint").glob("state-*"):
        shutil.copy(path, folder / "checkpoint")
    shutil.copy(earlier / "checkpoint/checkpoint.json", folder / "checkpoint/previous.json")
    damaged = members_of(folder)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.warns(UserWarning, match=r"members-00001.*damaged.*Resuming from its predecessor"):
        found = fit("sequential_anchored", folder)
    assert same(bits(found), runs["sequential_anchored"]["bits"])


def test_a_missing_member_that_all_checkpoints_need_says_what_is_lost(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["sequential_anchored"]["cut"], folder)
    members_of(folder)[0].unlink()
    with pytest.raises(
        pm.errors.CheckpointError, match=r"No checkpoint .*members-00000.* is missing.* begin again"
    ):
        fit("sequential_anchored", folder)


def test_the_members_of_training_are_not_kept_twice(runs):
    assert not (runs["sequential_anchored"]["whole"] / "members").exists()
    assert (runs["sequential_anchored"]["whole"] / "posterior-0").exists()


def test_a_file_that_changes_after_loading_changes_no_prediction(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["deep_ensemble"]["whole"], folder)
    posterior = pm.load_posterior(folder, partial(pm.models.MLP, 3, 2, (4,)))
    before = posterior.predict(X).mean
    path = folder / "posterior-0/members-00000.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole)  # written anew, to the same bits
    assert torch.equal(posterior.predict(X).mean, before)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(pm.errors.CheckpointError, match="damaged: its checksum differs"):
        posterior.predict(X)
    path.unlink()
    with pytest.raises(pm.errors.CheckpointError, match="is missing"):
        posterior.predict(X)
