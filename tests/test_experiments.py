"""Configs of the experiments: the command line takes each, and budgets are divided as in the papers."""

import contextlib
import csv
import re
import runpy
import sys

import numpy as np
import pytest
import torch
import yaml

from forks import fork
from polymode.application.cli.compare import ABOUT, CompareOptions
from polymode.application.cli.jobs import make_methods, wanted_methods
from polymode.application.cli.options import parse
from polymode.application.cli.reference import ReferenceOptions
from polymode.application.cli.train import TrainOptions
from polymode.application.datasets.catalogue import DATASETS
from polymode.methods import make_method
from polymode.metrics import Bins
from polymode.models import MODELS
from polymode.schedules import Progress
from scripts import EXPERIMENTS, load_script

FOLDER = EXPERIMENTS / "sequential_anchored"
NAMES = ("cifar10", "cifar10-shifted", "imdb", "dermamnist", "energy-gap")
SEQUENTIAL = [FOLDER / f"{name}-{budget}.yaml" for name in NAMES for budget in (200, 500, 1000, 10_000)]


def read(path):
    options = parse(CompareOptions, "compare", ABOUT, ["--config", str(path)])
    return options, make_methods(wanted_methods(options.methods, ()), options.set, {})


@pytest.mark.parametrize("path", SEQUENTIAL, ids=lambda p: p.stem)
def test_tables_1_and_2_of_sequential_anchored_ensembles(path):
    options, methods = read(path)
    assert options.data in DATASETS
    assert options.model in MODELS
    assert path.stem.endswith(f"-{options.budget:g}")
    anchored, epochs = methods["anchored"].for_budget(options.budget)
    assert (anchored.num_members, epochs) == (options.budget / 100, 100)
    chain, epochs = methods["sequential_anchored"].for_budget(options.budget)
    first, num_short = chain.lengths(epochs)
    assert first == 100
    short = 5 if "energy" in path.stem else 2
    expected = {200: (1, 100), 500: (2, 150), 1000: (3, 232 if short == 2 else 230), 10_000: (10, 900)}
    assert (chain.num_chains, num_short * chain.short_epochs) == expected[int(options.budget)]
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
        assert sized.total_chains * epochs == pytest.approx(options.budget, rel=0.05)


def kind_of(path):
    """The options of the command that a config is for."""
    names = yaml.safe_load(path.read_text()).keys()
    if "methods" in names:
        return CompareOptions
    return TrainOptions if "method" in names else ReferenceOptions


@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS.glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_published_protocols_hold_out_what_they_say_and_nothing_else(path):
    """Rows that a protocol validates on are options of its data; it says itself what epochs are kept."""
    options = parse(kind_of(path), "any", ABOUT, ["--config", str(path)])
    assert options.validation == "none"
    if isinstance(options, CompareOptions):
        assert options.baselines == "none"
        assert options.equal == "budget"
        assert options.seeds > 0  # as many as it says


# --- ensemble model patching (Chang et al. 2019) ---------------------------------------------------------

PATCHING = sorted((EXPERIMENTS / "model_patching").glob("*.yaml"))


@pytest.mark.parametrize("path", PATCHING, ids=lambda p: p.stem)
def test_tables_of_model_patching(path):
    options, methods = read(path)
    assert options.model in MODELS
    assert options.num_draws == 200
    assert options.calibration == Bins(20, min_count=5)
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
    sys.path.insert(0, str(script.parent))
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
    assert options.data in DATASETS or options.data.startswith("experiments.")
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


# --- replicates ----------------------------------------------------------------------------------------


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def check_means(table, scores, unit, digits):
    """Every mean and error of a table is that of the rows beside it with the same settings."""
    each = rows(table.with_name(f"{table.stem}-replicates.csv"))
    for row in rows(table):
        settings = [name for name in row if name in each[0]]
        own = [r for r in each if all(r[n] == row[n] for n in settings if n not in scores)]
        assert len({r[unit] for r in own}) == len(own) > 1
        for score in scores:
            values = np.array([float(r[score]) for r in own])
            error = values.std(ddof=1) / len(own) ** 0.5
            assert float(row[score]) == pytest.approx(values.mean(), abs=0.6 * 10**-digits)
            assert float(row[f"{score}_se"]) == pytest.approx(error, abs=0.6 * 10**-digits)


def test_uci_keeps_every_split(tmp_path, monkeypatch):
    folder = tmp_path / "uci" / "yacht"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    np.savetxt(folder / "data.txt", generator.normal(size=(40, 3)))
    (folder / "index_features.txt").write_text("0\n1\n")
    (folder / "index_target.txt").write_text("2\n")
    (folder / "n_splits.txt").write_text("3\n")
    script = load_script(EXPERIMENTS / "model_patching" / "uci.py")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    command = ["uci.py", "--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--sets", "yacht"]
    command += ["--methods", "ecmp", "--epochs", "1", "--num-draws", "3", "--backend", "vmap"]
    for options in ([], ["--weight-decay", "0"]):
        monkeypatch.setattr(sys, "argv", [*command, *options])
        script.main()
    for name in ("uci", "uci-variants"):
        assert len(rows(tmp_path / f"{name}.csv")) == 1
        assert len(rows(tmp_path / f"{name}-replicates.csv")) == 3
        check_means(tmp_path / f"{name}.csv", script.SCORES, "split", 4)
    assert rows(tmp_path / "uci-variants.csv")[0]["variant"] == "--weight-decay 0"
    for name in ("uci", "uci-variants"):  # what is stored can be added to
        stored = EXPERIMENTS / "model_patching" / "results" / f"{name}.csv"
        assert list(rows(stored)[0]) == list(rows(tmp_path / f"{name}.csv")[0])


def test_sensitivity_keeps_every_seed(tmp_path, monkeypatch):
    script = load_script(LATE / "sensitivity.py")
    monkeypatch.setattr(script, "SEEDS", 2)
    found = iter(torch.rand(20, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    monkeypatch.setattr(script, "scores", lambda method: next(found))  # in place of two minutes of training
    table = tmp_path / "sensitivity.csv"
    monkeypatch.setattr(sys, "argv", ["sensitivity.py", "--results", str(table)])
    script.main()
    assert len(rows(table)) == 18
    check_means(table, script.SCORES, "seed", 4)
    assert list(rows(table)[0]) == list(rows(LATE / "results" / "sensitivity.csv")[0])


def test_the_quadratic_problem_keeps_every_seed(tmp_path, monkeypatch):
    script = load_script(LATE / "quadratic.py")
    monkeypatch.setattr(script, "jobs", lambda problem: [("independent", 0.05, 20), ("late phase", 0.05, 20)])
    monkeypatch.setattr(sys, "argv", ["quadratic.py", "--seeds", "3", "--out", str(tmp_path)])
    threads = torch.get_num_threads()
    for _ in range(2):  # the second time all is there
        script.main()
    torch.set_num_threads(threads)
    table = rows(tmp_path / "quadratic.csv")
    each = rows(tmp_path / "quadratic-replicates.csv")
    assert (len(table), len(each)) == (14, 42)
    for row in table:
        settings = ("kind", "rate", "num_steps", "num_members")
        own = [float(r["loss"]) for r in each if all(r[n] == row[n] for n in settings)]
        assert float(row["loss"]) == pytest.approx(np.mean(own), rel=1e-5)
        assert float(row["loss_se"]) == pytest.approx(np.std(own, ddof=1) / 3**0.5, rel=0.06)


def test_prior_functions_keep_the_steps_of_each(tmp_path, monkeypatch):
    script = load_script(EXPERIMENTS / "model_patching" / "prior_functions.py")
    monkeypatch.setattr(sys, "argv", ["prior_functions.py", "--out", str(tmp_path)])
    script.main()
    assert len(rows(tmp_path / "prior-functions-replicates.csv")) == 9
    check_means(tmp_path / "prior-functions.csv", ["steps"], "function", 1)


@pytest.mark.parametrize("script", ["late_phase/images", "late_phase/text", "model_patching/calibration"])
def test_other_scripts_add_their_results_by_seed(script):
    """Their data are not at hand here: what they call is tested in test_tables."""
    assert re.search(r"add_result\([^)]*, \"seed\", ", (EXPERIMENTS / f"{script}.py").read_text())


# --- sequential Bayesian subnetworks (Jantre et al. 2022) ------------------------------------------------

SEBAYS = EXPERIMENTS / "sebays"
TABLES = {  # epochs of each kind of config
    **{"single": 250, "sparse": 250, "mimo": 250, "parallel": 250},
    **{"sequential": 450, "sequential-sparse": 450, "perturbation": 450, "rates": 450},
    **{"members-5": 650, "members-10": 1150},
}


@pytest.mark.parametrize("path", sorted(SEBAYS.glob("*.yaml")), ids=lambda p: p.stem)
def test_tables_of_sequential_bayesian_subnetworks(path):
    options, methods = read(path)
    assert options.data in DATASETS
    assert options.model in MODELS
    assert options.set["data"] == {"batch_size": 128, "augment": True, "num_validation": 5000}
    expected = [epochs for key, epochs in TABLES.items() if key in path.stem][-1]
    for method in methods.values():
        sized, epochs = method.for_budget(options.budget)
        assert epochs == expected
        inner = sized.of if hasattr(sized, "of") else sized
        assert inner.optimizer.lr == 0.1
        if inner.name in ("mean_field", "spike_slab"):
            assert (inner.prior_std, inner.rho, inner.optimizer.clip_norm) == (0.2, -6.0, 1.0)
        if inner.name == "spike_slab":
            assert (inner.prior_inclusion, inner.inclusion, inner.temperature) == (1e-4, 0.99, 0.5)
            assert options.set["model"] == {"activation": "silu"}
        if sized.name in ("sequential_bnn", "sebays"):
            assert options.num_draws == sized.num_members  # one draw of each
            assert (sized.phase_epochs, sized.reset_rho, sized.reset_spread) == (100, -6.0, 0.05)


def test_ablations_of_sequential_bayesian_subnetworks():
    for kind in ("dense", "sparse"):
        _, by_perturbation = read(SEBAYS / f"perturbation-{kind}.yaml")
        assert {method.perturbation for method in by_perturbation.values()} == {2.0, 3.0, 5.0}
        _, by_rates = read(SEBAYS / f"rates-{kind}.yaml")
        assert {method.rates for method in by_rates.values()} == {
            "stepwise",
            "cosine",
            "linear-fge",
            "linear-1",
        }
    _, both = read(SEBAYS / "cifar10-resnet32-sequential-sparse.yaml")
    assert [method.freeze for method in both.values()] == [True, False]


@pytest.mark.parametrize("script", ["images", "sensitivity"])
def test_scripts_of_sequential_bayesian_subnetworks_say_what_they_do(script, tmp_path):
    shown = help_of(SEBAYS / f"{script}.py", tmp_path / "help.txt")
    assert "sequential bayesian" in shown.lower()


# --- loss landscapes (Fort et al. 2019) -------------------------------------------------------------------

LANDSCAPES = sorted((EXPERIMENTS / "loss_landscape").glob("*.yaml"))


def read_training(path):
    options = parse(TrainOptions, "train", ABOUT, ["--config", str(path)])
    name = make_method(options.method).name
    return options, make_methods({name: options.method}, options.set, {})[name]


@pytest.mark.parametrize("path", LANDSCAPES, ids=lambda p: p.stem)
def test_configs_of_loss_landscapes_can_be_followed(path):
    options, method = read_training(path)
    assert options.data in DATASETS or ":" in options.data
    assert options.model in MODELS or ":" in options.model
    sized, epochs = method.for_budget(options.epochs * method.total_chains)
    assert epochs == options.epochs
    assert sized.total_chains == method.total_chains


@pytest.mark.parametrize("name", ["smallcnn", "mediumcnn"])
def test_plain_networks_are_trained_as_published(name):
    options, method = read_training(EXPERIMENTS / "loss_landscape" / f"{name}.yaml")
    assert options.epochs == 40
    assert options.set["data"] == {"normalise": "raw", "num_validation": 500, "batch_size": 128}
    assert options.set["model"] == {"dropout": 0.1, "initialisation": "xavier"}
    assert (method.of.optimizer.kind, method.of.optimizer.lr) == ("Adam", 1.6e-3)
    rates = [method.of.schedule(Progress(epoch, 40, 40)) for epoch in range(40)]
    assert rates == [0.5 ** (epoch // 10) for epoch in range(40)]


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("resnet20", {0: 1e-3, 79: 1e-3, 80: 1e-4, 120: 1e-5, 160: 1e-6, 180: 5e-7, 199: 5e-7}),
        ("resnet20-cifar100", {0: 1e-3, 99: 1e-3, 100: 1e-4, 130: 5e-5, 160: 1e-5, 190: 5e-7}),
        ("imagenet", {0: 0.15, 79: 0.15, 80: 0.015, 120: 0.0015}),
    ],
)
def test_rates_of_residual_networks_are_those_published(name, rates):
    options, method = read_training(EXPERIMENTS / "loss_landscape" / f"{name}.yaml")
    for epoch, rate in rates.items():
        factor = method.of.schedule(Progress(epoch, options.epochs, options.epochs))
        assert factor * method.of.optimizer.lr == pytest.approx(rate)


def test_cycles_are_those_published():
    _, method = read_training(EXPERIMENTS / "loss_landscape" / "cycles.yaml")
    chain = method.of
    assert (chain.num_cycles, chain.lr, chain.friction, chain.temperature) == (3, 0.5, 0.9, 1 / 50_000)
    assert 1 / (chain.prior_std**2 * 50_000) == pytest.approx(5e-4)  # the decay that the prior stands for
