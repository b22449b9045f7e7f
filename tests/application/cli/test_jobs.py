import inspect
import json
from dataclasses import fields

import pytest
import torch
from command_line import polymode, the_line

import polymode as pm
from polymode.application.cli.compare import CompareOptions, unasked_methods
from polymode.application.cli.jobs import load_job, make_methods, run_folder, wanted_methods
from polymode.application.cli.methods import as_typed
from polymode.application.cli.options import parse
from polymode.application.cli.train import TrainOptions
from polymode.application.comparison import judge
from polymode.application.recipes import why_not_unasked
from polymode.errors import InputError, UnknownName
from polymode.methods import COMPARED, METHODS, make_method
from polymode.options import options_of
from polymode.training.contract import describe


def test_methods_are_named_labelled_and_default():
    assert wanted_methods("", COMPARED) == {name: name for name in COMPARED}
    assert wanted_methods("single,big=deep_ensemble", ()) == {"single": "single", "big": "deep_ensemble"}
    with pytest.raises(InputError, match="Did you mean 'deep_ensemble'"):
        wanted_methods("deep_ensembel", ())
    with pytest.raises(InputError, match="occurs twice"):
        wanted_methods("single,single", ())
    with pytest.raises(InputError, match="letters, digits"):
        wanted_methods("a/b=single", ())


def test_all_leaves_reference_samplers_out(monkeypatch):
    class Reference(pm.methods.Single):
        name, reference = "reference_sampler", True

    monkeypatch.setitem(METHODS, "reference_sampler", Reference)
    assert "reference_sampler" not in wanted_methods("all", ())
    assert {"single", "deep_ensemble"} <= wanted_methods("all", ()).keys()
    assert "reference_sampler" in wanted_methods("reference_sampler", ())
    assert len(COMPARED) <= 8


def test_settings_reach_one_method_or_all_that_have_the_option():
    methods = make_methods(
        {"single": "single", "big": "deep_ensemble"},
        {"big": {"num_members": 7}, "all": {"optimizer": {"lr": 0.5}, "num_members": 9}, "data": {"x": 1}},
        {"optimizer": {"lr": 0.1, "weight_decay": 0.2}},
    )
    optimizer = pm.Optimizer("Adam", lr=0.5, weight_decay=0.2)  # suggestions, then what is set for all
    assert methods["single"].optimizer == methods["big"].of.optimizer == optimizer
    assert methods["big"].num_members == 7  # one comes after all
    described = describe(pm.methods.Single(optimizer=pm.Optimizer("SGD", lr=9.0)))
    complete = make_methods({"single": described}, {}, {"optimizer": {"lr": 0.1}})
    assert complete["single"].optimizer.lr == 9.0
    with pytest.raises(InputError, match=r"Unknown section of --set 'bigg'. Did you mean 'big'"):
        make_methods({"big": "single"}, {"bigg": {}}, {})
    with pytest.raises(
        InputError, match=r"Unknown option of all methods 'optimiser'. Did you mean 'optimizer'"
    ):
        make_methods({"single": "single"}, {"all": {"optimiser": {"lr": 1}}}, {})


@pytest.mark.parametrize("name", METHODS)
def test_what_describe_writes_is_read_back(name):
    method = METHODS[name]()
    assert make_method(describe(method)) == method
    assert make_method(name) == method


def test_nested_options_are_changed_and_others_stay():
    change = {
        "num_members": 3,
        "of": {
            "optimizer": {"kind": "SGD", "lr": 0.1, "momentum": 0.9},
            "schedule": {"type": "Drops", "epochs": [1, 2]},
            "keep": {"type": "KeepBest", "from_epoch": 2},
        },
    }
    method = make_method("deep_ensemble", change)
    expected = pm.methods.DeepEnsemble(
        3,
        of=pm.methods.Single(
            optimizer=pm.Optimizer("SGD", lr=0.1, momentum=0.9),
            schedule=pm.schedules.Drops((1, 2)),
            keep=pm.KeepBest(from_epoch=2),
        ),
    )
    assert method == expected
    assert make_method(method, {"of": {"schedule": "Cosine"}}).of.schedule == pm.schedules.Cosine()
    assert make_method(method, {"of": {"optimizer": {"lr": 0.2}}}).of.optimizer == pm.Optimizer(
        "SGD", lr=0.2, momentum=0.9
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_sdt": 1}, "Unknown option of single 'prior_sdt'. Did you mean 'prior_std'"),
        ({"prior_std": "wide"}, "prior_std must be a positive number, got 'wide'"),
        ({"optimizer": {"lr": "fast"}}, "must be a positive number, got 'fast'"),
        ({"optimizer": {"momentun": 1}}, "Unknown option of Adam 'momentun'"),
        ({"schedule": "Cosin"}, "Did you mean 'Cosine'"),
        ({"keep": {"from_epoch": 3}}, "keep is 'last' and has no option 'from_epoch'"),
        ({"schedule": {"type": "Linear", "start": 5, "end": 1, "final": 0}}, "0 <= start < end"),
        ({"schedule": {"type": "Drops"}}, "Drops cannot be made of {}"),
    ],
)
def test_bad_options_of_methods_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_method("single", options)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_every_method_has_a_meaning(name):
    method = METHODS[name]
    assert [each.name for each in options_of(method)] == [each.name for each in fields(method)]
    for each in options_of(method):
        assert len(each.meaning) > 5, each.name
        assert each.meaning.count("`") % 2 == 0, each.meaning
        assert not each.meaning.endswith("."), each.meaning  # a cell of a table, not a sentence of a text
    assert inspect.getdoc(method)
    assert method.cost


@pytest.mark.parametrize("name", METHODS)
def test_a_default_is_shown_as_one_would_type_it(name):
    known = {**vars(pm.methods), **vars(pm.schedules), **vars(pm.samplers)}
    known |= {"Optimizer": pm.Optimizer}
    for each in options_of(METHODS[name]):
        assert eval(as_typed(each.default), known) == each.default


def test_the_folder_follows_from_the_options():
    one = run_folder("", "compare", ["shop/tables.csv", "mlp"], {"seed": 0})
    assert one.parent.name == "runs"
    assert one.name.startswith("compare-tables-mlp-")
    assert one == run_folder("", "compare", ["shop/tables.csv", "mlp"], {"seed": 0})
    assert one != run_folder("", "compare", ["shop/tables.csv", "mlp"], {"seed": 1})
    assert run_folder("mine", "compare", [], {}).name == "mine"


def test_commands_compute_with_the_threads_that_a_run_began_with(tmp_path, monkeypatch):
    train = ("train", "--data", "two_moons", "--set", "data.num_train=40", "--epochs", "1", "--threads", "3")
    polymode(*train, "--run", "out", cwd=tmp_path)
    manifest = tmp_path / "out/manifest.json"
    assert json.loads(manifest.read_text())["record"]["threads"] == 3
    assert parse(TrainOptions, "train", "", ["--config", str(manifest)]).threads == min(
        3, torch.get_num_threads()
    )
    assert parse(TrainOptions, "train", "", ["--config", str(manifest), "--threads", "1"]).threads == 1
    seen = []

    def judged(*arguments, **options):
        seen.append(torch.get_num_threads())
        return judge(*arguments, **options)

    monkeypatch.setattr("polymode.application.cli.evaluate.judge", judged)
    polymode("evaluate", "out", cwd=tmp_path)
    polymode("evaluate", "out", "--threads", "2", cwd=tmp_path)
    assert seen == [1, 2]  # no more than there are, which is one here, unless they are asked for
    assert "--threads must be between 1 and 1024, got 0" in the_line(
        polymode(*train[:-1], "0", cwd=tmp_path, code=2)
    )


def test_a_suggested_rate_is_for_adam():
    wanted = {"single": "single", "sebays": "sebays", "deep_ensemble": "deep_ensemble"}
    methods = make_methods(wanted, {}, {"optimizer": {"lr": 0.003}})
    assert methods["single"].optimizer.lr == 0.003
    assert methods["deep_ensemble"].of.optimizer.lr == 0.003
    assert methods["sebays"].of.optimizer.lr == 0.1  # of SGD


def test_a_best_epoch_that_is_suggested_can_be_declined():
    """The word that an option may be stands for all of it, whatever suits the data."""
    suggested = {"keep": {"type": "KeepBest", "patience": 0.25}}
    wanted = {"single": "single", "deep_ensemble": "deep_ensemble", "hmc": "hmc"}
    plain = make_methods(wanted, {}, suggested)
    assert plain["single"].keep.patience == plain["deep_ensemble"].of.keep.patience == 0.25
    for word in ("last", "best"):
        changed = make_methods(wanted, {"all": {"keep": word}}, suggested)
        assert changed["single"].keep == changed["deep_ensemble"].of.keep == word
    named = make_methods(wanted, {"single": {"keep": {"type": "KeepBest", "criterion": "error"}}}, suggested)
    assert (named["single"].keep.criterion, named["single"].keep.patience) == ("error", 0.25)
    with pytest.raises(UnknownName, match=r"Unknown type of single.keep 'lst'"):
        make_methods(wanted, {"single": {"keep": "lst"}}, suggested)


# --- samplers that join a comparison unasked -------------------------------------------------------

TINY = {"data": {"num_train": 60}, "model": {"hidden": [4]}}


def unasked(**options):
    """What joins a comparison of two moons, and what is said about it."""
    options = CompareOptions(**{"data": "two_moons", "set": TINY} | options)
    return unasked_methods(options, load_job(options))


def test_a_sampler_joins_a_comparison_that_can_afford_it():
    assert unasked()[0] == unasked(methods="all")[0] == {"microcanonical": "microcanonical"}
    for settings in (
        {"all": {"num_members": 2}},
        {"all": {"prior_std": 1.0}},
        {"single": {"prior_std": 1.0}},
    ):
        assert unasked(set=TINY | settings)[0] == {"microcanonical": "microcanonical"}


@pytest.mark.parametrize("options", [{"budget": 100.0}, {"methods": "single"}, {"equal": "epochs"}], ids=str)
def test_a_sampler_that_is_not_wanted_at_its_own_price_is_not_mentioned(options):
    assert unasked(**options) == ({}, [])


def test_a_sampler_that_takes_long_is_left_out_with_the_reason(monkeypatch):
    """Three seeds of 60 rows, 8 chains and 4,000 passes of 16 weights without biases: 3e8 multiplications."""
    monkeypatch.setattr("polymode.application.recipes.AFFORDABLE", 1e9)
    assert unasked()[0] == {"microcanonical": "microcanonical"}
    for options in ({"seeds": 30}, {"set": TINY | {"microcanonical": {"passes": 40_000}}}):
        found, [line] = unasked(**options)
        assert found == {}
        assert line.startswith("microcanonical: left out, ")
        assert "its thousands of passes would take" in line
        assert line.endswith("; --methods microcanonical adds it")


def reason(model, data, num_runs=1, **options):
    return why_not_unasked(pm.methods.Microcanonical(**options), model, data, num_runs)


def test_reasons_against_a_sampler():
    data = pm.ArrayData(torch.zeros(50, 6), torch.zeros(50, dtype=torch.long))
    linear = lambda: torch.nn.Linear(6, 2)  # noqa: E731
    assert reason(linear, data) == (None, True)
    for layer in (torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5)):
        why, can_be_named = reason(torch.nn.Sequential(linear(), layer), data)
        assert "the network has BatchNorm, or is random itself" in why
        assert not can_be_named
    images = pm.ArrayData(
        torch.zeros(4, 1, 6, 6), torch.zeros(4, dtype=torch.long), augment=[pm.data.RandomFlip()]
    )
    loader = pm.LoaderData(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.inputs, data.targets), 5)
    )
    for source in (images, loader):
        why, can_be_named = reason(torch.nn.Sequential(torch.nn.Flatten(), linear()), source)
        assert "not all in memory, or are augmented" in why
        assert not can_be_named


def test_what_a_sampler_would_take_is_counted_in_multiplications(monkeypatch):
    """Three times those of a pass, for every row, pass, chain and run: 3 · 12 · 50 · 4 · 100 = 720,000."""
    data = pm.ArrayData(torch.zeros(50, 6), torch.zeros(50, dtype=torch.long))
    model = torch.nn.Linear(6, 2)
    chains = {"num_chains": 4, "passes": 100}
    monkeypatch.setattr("polymode.application.recipes.AFFORDABLE", 720_000)
    assert reason(model, data, **chains)[0] is None
    why, can_be_named = reason(model, data, num_runs=3, **chains)
    assert "would take 3.0 times what is begun unasked" in why
    assert can_be_named
    assert "more than ten times" in reason(model, data, num_runs=30, **chains)[0]


class WithFunctionalDropout(torch.nn.Linear):
    def forward(self, inputs):
        return torch.nn.functional.dropout(super().forward(inputs), 0.2, self.training)


def test_a_network_that_draws_by_itself_is_seen_before_a_comparison():
    data = pm.ArrayData(torch.zeros(50, 6), torch.zeros(50, dtype=torch.long))
    why, can_be_named = reason(lambda: WithFunctionalDropout(6, 2), data)
    assert "is random itself" in why
    assert not can_be_named
