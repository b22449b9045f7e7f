"""Configurations of anyone's: round trips of what is well formed, clear errors for everything else."""

import json
import math
import warnings

import pytest
import yaml
from command_line import polymode
from hostile_values import NUMBERS, VALUES, WORDS, changed, examples, nested
from hypothesis import assume, given
from hypothesis import strategies as st

import polymode as pm
from polymode import schedules
from polymode.application.cli.options import read_value
from polymode.data.encoding import column_from
from polymode.data.task import Preprocessing
from polymode.errors import PolymodeError
from polymode.likelihoods import LIKELIHOODS, make_likelihood
from polymode.methods import METHODS, make_method
from polymode.networks.adaptations import make_adaptation
from polymode.training.contract import describe


def outcome_of(make):
    """What is made of a value, or None where it is refused; any other error is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make()
        except PolymodeError:
            return None


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_round_trip(name):
    made = make_method(name)
    described = json.loads(json.dumps(describe(made)))
    assert make_method(described) == made
    assert describe(make_method(described)) == describe(made)


@examples(200)
@given(chance=st.data(), name=st.sampled_from(sorted(METHODS)))
def test_an_edited_method_is_made_again_or_refused(chance, name):
    document = chance.draw(changed(json.loads(json.dumps(describe(make_method(name))))))
    made = outcome_of(lambda: make_method(document))
    if made is not None:
        described = describe(made)
        text = json.dumps(described)
        assume("NaN" not in text)  # which equals nothing
        assert (
            describe(make_method(json.loads(text))) == json.loads(text)
            or describe(make_method(described)) == described
        )


@examples(100)
@given(name=st.one_of(VALUES, st.sampled_from(sorted(METHODS))), options=VALUES)
def test_any_value_for_a_method_is_refused(name, options):
    outcome_of(lambda: make_method(name, options))


@examples(60)
@given(
    chance=st.data(),
    name=st.sampled_from(sorted(METHODS)),
    values=st.lists(VALUES, min_size=1, max_size=2),
)
def test_options_of_any_value_are_taken_or_refused(chance, name, values):
    known = sorted(describe(make_method(name)).keys() - {"name"})
    options = {chance.draw(st.sampled_from(known)): value for value in values}
    outcome_of(lambda: make_method(name, options))


@examples(60)
@given(value=VALUES)
def test_any_value_for_a_likelihood_an_adaptation_a_column_or_a_preparation(value):
    for make in (make_likelihood, make_adaptation, column_from, Preprocessing.from_config):
        outcome_of(lambda make=make: make(value))


@examples(60)
@given(chance=st.data(), kind=st.sampled_from(sorted(LIKELIHOODS)))
def test_an_edited_likelihood_is_made_again_or_refused(chance, kind):
    made = make_likelihood(kind)
    assert make_likelihood(made.config()) == made
    document = chance.draw(changed(json.loads(json.dumps(made.config()))))
    other = outcome_of(lambda: make_likelihood(document))
    if other is not None and "NaN" not in json.dumps(other.config()):
        assert make_likelihood(json.loads(json.dumps(other.config()))) == other


PRINTED = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(max_size=8),
)
KEYS = st.text("abc_", min_size=1)


@examples(100)
@given(value=nested(nested(PRINTED, KEYS), KEYS))
def test_values_of_set_are_read_as_they_were_printed(value):
    """``command_line`` prints options as JSON, which ``--set`` reads."""
    text = json.dumps(value)
    read = read_value(text)
    assert read == value
    assert type(read) is type(value)


@examples(100)
@given(text=st.one_of(st.text(max_size=30), st.text("[]{}&*!:,-'\"\n |>%@`#?0123456789.eE~", max_size=20)))
def test_any_text_is_a_value_of_set(text):
    read_value(text)


@examples(25)
@given(value=VALUES, suffix=st.sampled_from([".json", ".yaml"]))
def test_a_config_of_any_content_is_refused_in_one_line(tmp_path_factory, value, suffix):
    text = json.dumps(value) if suffix == ".json" else yaml.safe_dump(value)
    path = tmp_path_factory.mktemp("configs") / f"config{suffix}"
    path.write_text(text, errors="replace")
    command = ("train", "--data", "nothing.csv", "--config", path)
    said = polymode(*command, cwd=path.parent, code=None, expected_warnings=True)
    assert said.code in (1, 2)
    assert "--debug shows where" not in said.stderr, said.stderr
    assert "Traceback" not in said.stderr


FACTORS = st.floats(0, 10)
EPOCHS = st.floats(0, 50)
SCHEDULES = st.one_of(
    st.builds(schedules.Constant, FACTORS),
    st.builds(schedules.Cosine, FACTORS),
    st.builds(schedules.Drops, st.lists(EPOCHS, max_size=3).map(tuple), st.floats(0.01, 1)),
    st.tuples(EPOCHS, st.floats(0.1, 20), FACTORS).map(lambda t: schedules.Linear(t[0], t[0] + t[1], t[2])),
    st.builds(schedules.Warmup, EPOCHS),
    st.lists(st.tuples(st.floats(0, 1), FACTORS), min_size=1, max_size=4).map(
        lambda points: schedules.Pieces(tuple(sorted(points)))
    ),
    st.tuples(FACTORS, FACTORS, st.integers(1, 5)).map(
        lambda t: schedules.Triangle(min(t[:2]), max(t[:2]), t[2])
    ),
)


@examples(100)
@given(schedule=SCHEDULES, num_epochs=st.integers(1, 30), each=st.integers(1, 7), factor=FACTORS)
def test_schedules_give_finite_factors(schedule, num_epochs, each, factor):
    num_steps = num_epochs * each
    for step in {0, num_steps // 2, num_steps - 1}:
        progress = schedules.Progress(step, num_steps, num_epochs)
        for some in (schedule, schedules.Scaled(schedule, factor), schedules.Warmup(3.0, schedule)):
            value = some(progress)
            assert math.isfinite(value)
            assert 0 <= value <= 100 + 1e-9
    method = pm.methods.Single(schedule=schedule)
    assert make_method(json.loads(json.dumps(describe(method)))) == method


@examples(60)
@given(
    kind=st.sampled_from([k.__name__ for k in schedules.SCHEDULES]),
    values=st.lists(st.one_of(NUMBERS, WORDS, VALUES), max_size=3),
)
def test_schedules_of_any_numbers_give_finite_factors_or_are_refused(kind, values):
    import dataclasses

    names = [field.name for field in dataclasses.fields(getattr(schedules, kind))]
    document = {"type": kind} | dict(zip(names, values, strict=False))
    made = outcome_of(lambda: make_method("single", {"schedule": document}))
    if made is not None:
        for step in (0, 5, 9):
            assert math.isfinite(made.schedule(schedules.Progress(step, 10, 5)))
