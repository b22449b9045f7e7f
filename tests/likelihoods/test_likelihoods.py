"""Likelihoods against PyTorch's own distributions and losses."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    FixedGaussian,
    HeteroscedasticGaussian,
    LearnedGaussian,
    make_likelihood,
)


def test_categorical_is_cross_entropy():
    logits, labels = torch.randn(6, 4), torch.randint(4, (6,))
    loss = Categorical().mean_loss(logits, labels, None)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))


def test_tokens_are_observations_and_some_are_ignored():
    logits, tokens = torch.randn(3, 5, 4), torch.randint(4, (3, 5))
    tokens[0, 2:] = -7
    likelihood = Categorical(ignore_index=-7)
    assert int(likelihood.num_observations(tokens)) == 12
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-7)
    torch.testing.assert_close(likelihood.mean_loss(logits, tokens, None), expected)
    precise = F.cross_entropy(logits.flatten(0, 1).double(), tokens.flatten(), ignore_index=-7)
    torch.testing.assert_close(
        likelihood.mean_loss(logits.double(), tokens, None), precise, rtol=1e-15, atol=0
    )
    assert likelihood.log_prob(logits, tokens)[0, 2:].tolist() == [0, 0, 0]
    likelihood.check_targets(tokens, logits)
    with pytest.raises(InputError, match="ignore_index"):
        Categorical().check_targets(tokens, logits)


def test_bernoulli_adds_labels_up():
    logits, targets = torch.randn(6, 4), torch.randint(2, (6, 4)).float()
    expected = torch.distributions.Bernoulli(logits=logits).log_prob(targets).sum(1)
    torch.testing.assert_close(Bernoulli().log_prob(logits, targets), expected)
    one = Bernoulli().log_prob(logits[:, :1], targets[:, 0])
    torch.testing.assert_close(
        one, torch.distributions.Bernoulli(logits=logits[:, 0]).log_prob(targets[:, 0])
    )


def test_gaussians_are_normal_densities():
    outputs, targets = torch.randn(6, 4), torch.randn(6, 2)
    mean, raw = outputs[:, :2], outputs[:, 2:]
    normal = torch.distributions.Normal
    torch.testing.assert_close(
        HeteroscedasticGaussian().log_prob(outputs, targets),
        normal(mean, F.softplus(raw) + 1e-6).log_prob(targets).sum(1),
    )
    torch.testing.assert_close(
        FixedGaussian(std=0.3).log_prob(mean, targets), normal(mean, 0.3).log_prob(targets).sum(1)
    )
    learned = LearnedGaussian(initial_std=0.8)
    module = learned.prepare(nn.Linear(3, 2))
    x = torch.randn(6, 3)
    torch.testing.assert_close(
        learned.log_prob(module(x), targets),
        normal(module.network(x), 0.8).log_prob(targets).sum(1),
    )


def test_learned_noise_finds_the_residual_deviation():
    """Maximum likelihood of a linear model: σ̂² is the mean squared residual."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.3 * torch.randn(
        400, generator=generator, dtype=torch.float64
    )
    method = pm.methods.Single(optimizer=pm.Optimizer("LBFGS", lr=1.0, tolerance_change=0.0))
    data = pm.ArrayData(x, y, batch_size=400)
    posterior = pm.fit(
        method, nn.Linear(2, 1).double(), data, likelihood="gaussian", epochs=5, progress=False
    )
    design = torch.cat([x, torch.ones(400, 1, dtype=torch.float64)], 1)
    residual = y - design @ torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    predictive = posterior.predict(x)
    assert predictive.std.mean().item() == pytest.approx(residual.square().mean().sqrt().item(), rel=1e-4)
    assert predictive.member_variance.max() == 0


def test_trailing_one_is_dropped_but_nothing_broadcasts():
    FixedGaussian().check_outputs(torch.zeros(5, 1), torch.zeros(5))
    with pytest.raises(InputError, match=r"gives \[5, 2\] for targets \[5\]"):
        FixedGaussian().check_outputs(torch.zeros(5, 2), torch.zeros(5))
    with pytest.raises(InputError, match="even number of outputs"):
        HeteroscedasticGaussian().check_outputs(torch.zeros(5, 3), torch.zeros(5))


@pytest.mark.parametrize(
    ("likelihood", "targets", "message"),
    [
        (FixedGaussian(), torch.tensor([1, 2]), "floating point"),
        (FixedGaussian(), torch.tensor([1.0, float("nan")]), "1 targets are NaN"),
        (Bernoulli(), torch.tensor([0.0, 2.0]), "between 0 and 1, got 2.0"),
        (Categorical(), torch.tensor([True, False]), "must be integers"),
    ],
)
def test_bad_targets(likelihood, targets, message):
    with pytest.raises(InputError, match=message):
        likelihood.check_targets(targets, torch.zeros(2, 2))


def test_categorical_needs_two_classes():
    with pytest.raises(InputError, match="use 'bernoulli'"):
        Categorical().check_outputs(torch.zeros(5, 1), torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_configuration_round_trip(kind):
    likelihood = make_likelihood(kind)
    assert make_likelihood(likelihood.config()) == likelihood


@pytest.mark.parametrize("make", [lambda: FixedGaussian(std=0.0), lambda: LearnedGaussian(initial_std=0.0)])
def test_noise_levels_are_positive(make):
    with pytest.raises(InputError):
        make()


@pytest.mark.parametrize(
    ("mean", "spread", "is_hard"),
    [
        (0, 1, False),
        (5, 5, False),
        (3e5, 1e5, True),
        (3e5, 1, True),
        (-50, 1, True),
        (0, 100, True),
        (0, 1e-3, True),
        (1, 0, False),
        (30, 0, True),
    ],
)
@pytest.mark.parametrize("shape", [(200,), (200, 1), (200, 3)])
def test_targets_that_networks_hardly_learn_are_remarked_on(mean, spread, is_hard, shape):
    targets = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = (targets - targets.mean(0)) / targets.std(0, correction=0)
    last = targets if targets.ndim == 1 else targets[:, -1]  # one dimension of several is enough
    last.mul_(spread).add_(mean)
    for likelihood in (LearnedGaussian(), FixedGaussian(std=0.01), HeteroscedasticGaussian()):
        assert (likelihood.remark_on(targets) is not None) == is_hard
    # Where the known noise is larger, a small spread does not matter; what is far does.
    assert (FixedGaussian(std=1.0).remark_on(targets) is not None) == (is_hard and spread != 1e-3)
    if is_hard and mean:
        remark = LearnedGaussian().remark_on(targets)
        assert f"have a mean of {mean:.4g} and a standard deviation of {spread:.4g}; networks" in remark
    assert Categorical().remark_on(torch.full((9,), 400)) is None


def test_no_other_file_asks_what_kind_a_likelihood_is():
    """A new likelihood is one file: elsewhere none is told by its class or its name."""
    folder = Path(pm.__file__).parent
    # Whether something is a predictive at all may be asked.
    classes = {
        node.name
        for path in (folder / "likelihoods").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    } - {"Predictive"}
    found = []
    for path in sorted(folder.rglob("*.py")):
        if folder / "likelihoods" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)} & classes
            elif isinstance(node, ast.Compare):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                asked = {part for part in parts if isinstance(part, str)} & LIKELIHOODS.keys()
            else:
                continue
            found += [f"{path.name}:{node.lineno} {name}" for name in asked]
    assert found == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": ["categorical"]}, "Unknown likelihood"),
        ({"kind": "fixed_gaussian", "std": None}, "std of fixed_gaussian is None, it must be of type float"),
        ({"kind": "fixed_gaussian", "std": float("inf")}, "std of fixed_gaussian is inf"),
        (
            {"kind": "gaussian", "initial_std": "1"},
            "initial_std of gaussian is '1', it must be of type float",
        ),
        ({"kind": "gaussian", "conformal": 3}, "conformal of gaussian is 3, it must be of type tuple"),
        ({"kind": "gaussian", "conformal": [0.1, "b"]}, "conformal of gaussian is"),
        ({"kind": "categorical", "ignore_index": False}, "ignore_index .* False, it must be of type int"),
        ({"kind": "categorical", "ignore_index": 2**70}, "ignore_index of categorical is 118"),
        ({"kind": "categorical", "output": 3}, "output of categorical is 3, it must be of type str"),
    ],
)
def test_options_of_other_types_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        make_likelihood(config)
