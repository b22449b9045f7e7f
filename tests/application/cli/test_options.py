"""Options from flags, config files and manifests."""

import dataclasses
import json
import shlex
from dataclasses import dataclass

import pytest
import torch

import polymode as pm
from polymode.application.cli.compare import CompareOptions
from polymode.application.cli.options import (
    ScreenOptions,
    UsageError,
    command_line,
    config_of,
    option,
    parse,
    read_value,
)
from polymode.application.cli.train import TrainOptions
from polymode.data import Split, Task
from polymode.errors import UnknownName


def compare(*arguments):
    return parse(CompareOptions, "compare", "about", arguments)


def test_flags_override_the_config_and_settings_are_merged(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        "data: two_moons\nseeds: 5\nbudget: 1e2\n"
        "set:\n  deep_ensemble: {num_members: 3}\n  data: {noise: 0.1}\n"
    )
    options = compare("--config", str(config), "--seeds", "2", "--set", "deep_ensemble.of.prior_std=2")
    assert (options.data, options.seeds, options.budget) == ("two_moons", 2, 100.0)
    assert options.set == {
        "deep_ensemble": {"num_members": 3, "of": {"prior_std": 2}},
        "data": {"noise": 0.1},
    }


def test_a_config_can_hold_every_option(tmp_path):
    options = compare("--data=a.csv", "--methods=single", "--run=here", "--quiet", "--set=model.hidden=[3,4]")
    content = {name: getattr(options, name) for name in options.__dataclass_fields__}
    path = tmp_path / "all.json"
    path.write_text(json.dumps(content))
    assert compare("--config", str(path)) == options


def test_names_may_be_a_list_in_a_config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("methods: [single, big=deep_ensemble]\n")
    assert compare("--config", str(path)).methods == "single,big=deep_ensemble"


def test_the_manifest_of_a_run_is_a_config(tmp_path):
    options = compare("--data", "two_moons", "--set", "all.optimizer.lr=1e-2")
    manifest = {"format_version": 1, "what": "comparison", "options": config_of(options), "versions": {}}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest))
    assert compare("--config", str(path)) == options


def test_the_command_line_makes_the_same_options_again():
    options = compare("--data=two_moons", "--seeds=2", "--set=all.optimizer.lr=0.5", "--tensorboard")
    words = command_line("compare", options).split()[2:]
    assert compare(*words) == options


@pytest.mark.parametrize("value", ["𐀀", "naïve 🙂", "3", "1e-3", "true", "\x85", "\ufffe", "a: b", [1, "2"]])
def test_words_of_any_characters_are_printed_and_read_again(value):
    options = dataclasses.replace(compare("--data=two_moons"), set={"data": {"name": value}})
    words = shlex.split(command_line("compare", options))[2:]
    assert compare(*words).set == {"data": {"name": value}}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("3", 3), ("[1, 2]", [1, 2]), ("true", True), ("Cosine", "Cosine"), ("null", None)],
)
def test_values_are_read_as_numbers_lists_and_words(text, value):
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seedz: 3", "Unknown option in .* 'seedz'. Did you mean 'seed"),
        ("seeds: three", "seeds must be a whole number, got 'three'"),
        ("seeds: 2.5", "seeds must be a whole number, got 2.5"),
        ("budget: soon", "budget must be a number, got 'soon'"),
        ("data: 3", "data must be of type str, got 3"),
        ("backend: fast", "Unknown backend 'fast'"),
        ("- a\n- b", "must hold names and values, got list"),
        ("a: [", "is not valid yaml"),
        ("format_version: 99", "has a format_version, which manifests"),
    ],
)
def test_bad_configs_are_refused_with_the_nearest_name(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises((UsageError, UnknownName), match=message):
        compare("--config", str(path))
    with pytest.raises(UsageError, match=r"cannot be read: No such file"):
        compare("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seedz", "3"], "Unknown option of polymode compare '--seedz'. Did you mean '--seed"),
        (["--seeds", "many"], "seeds must be a whole number, got 'many'"),
        (["--seeds", "-1"], "--seeds must be at least 0, got -1"),
        (["--validation", "1.5"], "--validation '1.5': give a share between 0 and 1, auto or none"),
        (["--validation", "some"], "--validation 'some': give a share between 0 and 1, auto or none"),
        (["--epochs", "5"], "--epochs is for --equal epochs"),
        (["--equal", "epochs", "--epochs", "5", "--budget", "9"], "in the place of --budget"),
        (["--equal", "time"], "Unknown equal 'time'"),
        (["--budget", "-3"], "--budget must be from 1 to 1,000,000,000 member-epochs, got -3"),
        (["--backend", "vmpa"], "Unknown backend 'vmpa'. Did you mean 'vmap'"),
        (["--set", "lr"], "write PATH=VALUE"),
        (["stray"], "'stray' is not expected here"),
        (["--data"], "expected one argument"),
    ],
)
def test_bad_flags_are_refused(arguments, message):
    with pytest.raises((UsageError, UnknownName), match=message):
        compare(*arguments)


def test_epochs_and_budget_exclude_each_other():
    with pytest.raises(UsageError, match="give one"):
        parse(TrainOptions, "train", "", ["--epochs", "3", "--budget", "3"])


def test_seeds_of_a_training_are_one_and_of_a_comparison_as_many_as_splits_leave_open():
    with pytest.raises(UsageError, match="--seeds must be at least 1, got 0"):
        parse(TrainOptions, "train", "", ["--seeds", "0"])
    data = pm.ArrayData(torch.zeros(4, 1), torch.zeros(4))
    one, several = (Task("t", [Split(data, data)] * count, "gaussian", 1) for count in (1, 3))
    assert compare("--seed", "7").all_seeds(one) == [7, 8, 9]
    assert compare().all_seeds(several) == [0]
    for task in (one, several):
        assert compare("--seeds", "2").all_seeds(task) == [0, 1]
        assert parse(TrainOptions, "train", "", []).all_seeds(task) == [0]


def test_positional_arguments():
    @dataclass(frozen=True)
    class Options(ScreenOptions):
        action: str = option("list", "what", place="argument")
        names: tuple[str, ...] = option((), "which", place="argument")

    assert parse(Options, "x", "", []).action == "list"
    options = parse(Options, "x", "", ["fetch", "a", "b", "--json"])
    assert (options.action, tuple(options.names), options.json) == ("fetch", ("a", "b"), True)
