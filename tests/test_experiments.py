"""Configs of the experiments: the command line takes each, and budgets are divided as in the papers."""

import contextlib
import runpy
import sys
from pathlib import Path

import pytest

from forks import fork
from polymode.cli.compare import ABOUT, CompareOptions
from polymode.cli.jobs import make_methods, wanted_methods
from polymode.cli.options import parse
from polymode.cli.reference import ReferenceOptions
from polymode.data.catalogue import DATA
from polymode.models import MODELS

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
FOLDER = EXPERIMENTS / "sequential_anchored"
NAMES = ("cifar10", "cifar10-shifted", "imdb", "dermamnist", "energy-gap")
SEQUENTIAL = [FOLDER / f"{name}-{budget}.yaml" for name in NAMES for budget in (200, 500, 1000, 10_000)]


def read(path):
    options = parse(CompareOptions, "compare", ABOUT, ["--config", str(path)])
    return options, make_methods(wanted_methods(options.methods, ()), options.set, {})


@pytest.mark.parametrize("path", SEQUENTIAL, ids=lambda p: p.stem)
def test_tables_1_and_2_of_sequential_anchored_ensembles(path):
    options, methods = read(path)
    assert options.data in DATA
    assert options.model in MODELS
    assert path.stem.endswith(f"-{options.budget:g}")
    anchored, epochs = methods["anchored"].for_budget(options.budget)
    assert (anchored.num_members, epochs) == (options.budget / 100, 100)
    chain, epochs = methods["sequential_anchored"].for_budget(options.budget)
    first, num_short = chain.lengths(epochs)
    assert first == 100
    short = 5 if "energy" in path.stem else 2
    expected = {200: (1, 100), 500: (2, 150), 1000: (3, 232 if short == 2 else 230), 10_000: (10, 900)}
    assert (chain.chains, num_short * chain.short_epochs) == expected[int(options.budget)]
    assert chain.short_epochs == short
    assert anchored.prior_std == chain.prior_std
    assert anchored.optimizer == chain.optimizer


@pytest.mark.parametrize("path", sorted(set(FOLDER.glob("*.yaml")) - set(SEQUENTIAL)), ids=lambda p: p.stem)
def test_other_configs_can_be_followed(path):
    if path.stem.endswith("-hmc"):
        options = parse(ReferenceOptions, "reference", ABOUT, ["--config", str(path)])
        assert make_methods({"hmc": "hmc"}, options.set, {})["hmc"].lengths(options.passes)[1] >= 50
        return
    options, methods = read(path)
    for method in methods.values():
        sized, epochs = method.for_budget(options.budget)
        assert sized.num_chains * epochs == pytest.approx(options.budget, rel=0.05)


# --- ensemble model patching (Chang et al. 2019) ---------------------------------------------------------

PATCHING = sorted((EXPERIMENTS / "model_patching").glob("*.yaml"))


@pytest.mark.parametrize("path", PATCHING, ids=lambda p: p.stem)
def test_tables_of_model_patching(path):
    options, methods = read(path)
    assert options.model in MODELS
    assert options.draws == 200
    assert options.set["data"]["batch_size"] == 256
    penalty = 0.001 / 256
    for label, method in methods.items():
        if label in ("vanilla", "dropout"):
            assert method.optimizer.options["weight_decay"] == pytest.approx(2 * penalty)
        else:
            assert method.l2 == pytest.approx(penalty)
            assert method.num_components == 5
            assert ("output" in method.where) == (not label.endswith("norm"))
    assert methods["dropout"].where == ("norm",)
    assert methods["dropout"].rate == 0.005
    assert options.budget == {"imagenet": 100, "cifar100-pyramidnet": 400}[path.stem]


def write_help(script, note):
    sys.argv = [str(script), "--help"]
    with note.open("w") as stream, contextlib.redirect_stdout(stream):
        runpy.run_path(str(script), run_name="__main__")


def help_of(script, note):
    """What a script says about itself, in a process of its own."""
    process = fork(write_help, script, note)
    process.join(timeout=300)
    assert process.exitcode == 0
    return note.read_text()


@pytest.mark.parametrize("script", ["uci", "calibration", "prior_functions"])
def test_scripts_say_what_they_do(script, tmp_path):
    shown = help_of(EXPERIMENTS / "model_patching" / f"{script}.py", tmp_path / "help.txt")
    assert "Chang et al. (2019)" in shown or "model patching" in shown


# --- late-phase weights (von Oswald et al. 2021) ---------------------------------------------------------

LATE = EXPERIMENTS / "late_phase"
EPOCHS = {"imagenet": 20, "enwik8": 50, "pretrained": 20, "wrn28-14": 300, "pyramidnet": 300}


@pytest.mark.parametrize("path", sorted(LATE.glob("*.yaml")), ids=lambda p: p.stem)
def test_tables_of_late_phase_weights(path):
    options, methods = read(path)
    assert options.model in MODELS or options.model.startswith("experiments.late_phase.")
    assert options.data in DATA or options.data.startswith("experiments.")
    epochs = next((n for key, n in EPOCHS.items() if key in path.stem), 200)
    for label, method in methods.items():
        sized, found = method.for_budget(options.budget)
        assert found == (250 if label == "batch_ensemble" else epochs)
        inner = sized
        while hasattr(inner, "of"):
            inner = inner.of
        if inner.name == "late_phase" and label.split("-")[0] not in ("members", "rank_one"):
            assert inner.num_members == 10
        if inner.name == "late_phase" and inner.start and "swa" not in label:
            assert inner.start < epochs
        if label.endswith("swa") and epochs == 200:
            assert (sized.of if sized.name == "deep_ensemble" else sized).start == 160


def test_hypernetwork_config_has_the_banks_of_table_7():
    _, methods = read(LATE / "hypernetwork.yaml")
    banks = methods["hypernetwork"].banks
    assert [(len(bank.layers), bank.inputs, bank.templates) for bank in banks] == [
        *((1, 3, 10), (1, 16, 7), (7, 80, 14), (8, 160, 14), (8, 320, 14)),
        *((1, 16, 7), (1, 160, 7), (1, 320, 7)),
    ]


@pytest.mark.parametrize("script", ["images", "text", "quadratic", "sensitivity"])
def test_scripts_of_late_phase_weights_say_what_they_do(script, tmp_path):
    shown = help_of(LATE / f"{script}.py", tmp_path / "help.txt")
    assert "late-phase" in shown.lower() or "quadratic" in shown
