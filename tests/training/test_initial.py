"""Training that begins at the members of a posterior."""

import copy

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME
from polymode.errors import InputError
from polymode.methods import DeepEnsemble, Single

SGD = pm.Optimizer("SGD", lr=0.05)
STILL = pm.Optimizer("SGD", lr=1e-30)
CASE = BY_NAME["mlp"]


def fit(method, model=CASE.double_factory, data=None, **options):
    options = {"likelihood": CASE.likelihood, "epochs": 3, "progress": False} | options
    return pm.fit(method, model, CASE.data() if data is None else data, **options)


def members(posterior):
    return [member for block in posterior.draw() for member in pm.unstack(block)]


def assert_same(first, second):
    for one, other in zip(members(first), members(second), strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name])


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_chains_begin_at_the_members_in_their_order(backend):
    ensemble = fit(DeepEnsemble(3, of=Single(optimizer=SGD)))
    assert_same(fit(DeepEnsemble(3, of=Single(optimizer=STILL)), initial=ensemble, backend=backend), ensemble)
    more = fit(DeepEnsemble(3, of=Single(optimizer=SGD)), initial=ensemble, backend=backend)
    losses = [row["loss"] for row in more.record["history"]]
    assert losses[-1] < ensemble.record["history"][-1]["loss"]


def test_it_is_the_training_of_a_module_with_those_weights():
    """With buffers, moments and orders: fitting the collapsed network itself is the oracle."""
    case = BY_NAME["batch_norm"]
    adam = Single(optimizer=pm.Optimizer("Adam", lr=1e-2))
    options = {"data": case.data(), "likelihood": case.likelihood}
    first = fit(adam, case.double_factory, **options)
    by_hand = fit(adam, first.collapse(), **options)
    assert_same(fit(adam, case.double_factory, initial=first, **options), by_hand)


def test_more_members_than_are_needed_are_spread_evenly_and_draws_will_do():
    ensemble = fit(DeepEnsemble(4, of=Single(optimizer=SGD)))
    pair = members(fit(DeepEnsemble(2, of=Single(optimizer=STILL)), initial=ensemble))
    for found, expected in zip(pair, [members(ensemble)[0], members(ensemble)[2]], strict=True):
        torch.testing.assert_close(found, expected)
    drawn = fit(pm.methods.EMP(where="Linear", optimizer=SGD))
    assert drawn.num_members is None
    first, again = (members(fit(Single(optimizer=STILL), initial=drawn)) for _ in range(2))
    torch.testing.assert_close(first, again)


def test_each_data_set_has_its_own():
    sets = [CASE.data(13, seed=1), CASE.data(24, seed=2)]
    first = fit(Single(optimizer=SGD), data=sets)
    on = fit(Single(optimizer=SGD), data=sets, initial=first)
    for data, before, after in zip(sets, first, on, strict=True):
        assert_same(fit(Single(optimizer=SGD), data=data, initial=before), after)
    with pytest.raises(InputError, match="1 posteriors in initial for 2 data sets"):
        fit(Single(), data=sets, initial=first[:1])


def test_what_a_method_adds_to_the_network_is_its_own():
    """Dropout has seeds that a posterior of plain networks does not have."""
    plain = fit(Single(optimizer=SGD))
    dropped = fit(pm.methods.MCDropout(optimizer=STILL), initial=plain)
    [found], [expected] = pm.unstack(next(dropped.draw(1))), members(plain)
    assert found.keys() > expected.keys()
    torch.testing.assert_close({name: found[name] for name in expected}, expected)


def test_a_module_is_not_drawn_anew_and_nothing_is_remarked(recwarn):
    module = CASE.double_factory()
    ensemble = fit(DeepEnsemble(2, of=Single(optimizer=SGD)))
    custom = copy.deepcopy(module)
    nn.init.constant_(next(custom.parameters()), 3.0)  # nobody could draw this anew
    fit(DeepEnsemble(2, of=Single(optimizer=STILL)), custom, initial=ensemble)
    assert not recwarn.list


def test_other_networks_and_numbers_are_refused():
    ensemble = fit(DeepEnsemble(2, of=Single(optimizer=SGD)))
    with pytest.raises(InputError, match="initial has 2 members, and deep_ensemble takes 3, one for each"):
        fit(DeepEnsemble(3), initial=ensemble)
    with pytest.raises(InputError, match=r"initial is of another network: .* is absent in it"):
        fit(Single(), lambda: nn.Sequential(CASE.double_factory()), initial=ensemble)
    with pytest.raises(InputError, match="initial= and extend= are two ways"):
        fit(Single(), initial=ensemble, extend=ensemble)
    with pytest.raises(InputError, match="initial must be a posterior, got 'run'"):
        fit(Single(), initial="run")


def test_weights_that_the_model_has_frozen_are_refused_unless_they_are_the_same():
    posterior = fit(Single(optimizer=SGD))
    frozen, same = CASE.double_factory(), posterior.collapse()
    for module in (frozen, same):
        next(iter(module.parameters())).requires_grad_(False)
    with pytest.raises(InputError, match="which is fixed in the model, differs in it"):
        fit(Single(), frozen, initial=posterior)
    still = fit(Single(optimizer=STILL), same, initial=posterior)
    x = CASE.data().inputs
    torch.testing.assert_close(still.predict(x).mean, posterior.predict(x).mean)


def test_another_meaning_or_another_beginning_is_refused():
    x, y = torch.randn(20, 3), torch.randint(4, (20,)).float()
    data, model = pm.ArrayData(x, y[:, None]), lambda: nn.Linear(3, 1)
    first = fit(Single(), model, data, likelihood="fixed_gaussian")
    with pytest.raises(InputError, match="has the likelihood 'fixed_gaussian', and here it is 'poisson'"):
        fit(Single(), model, data, likelihood="poisson", initial=first)
    options = {"likelihood": "fixed_gaussian", "initial": first}
    with pytest.raises(InputError, match="begin_at='anchor' and initial= are two places"):
        fit(pm.methods.Anchored(1, begin_at="anchor"), model, data, **options)


def test_constants_that_differ_are_refused():
    def network(scale):
        module = CASE.double_factory()
        first = next(iter(module.parameters()))
        first.requires_grad_(False)
        with torch.no_grad():
            first.fill_(scale)
        return module

    posterior = fit(Single(optimizer=SGD), network(0.5))
    with pytest.raises(InputError, match="which is fixed in the model, differs in it"):
        fit(Single(), network(0.25), initial=posterior)
    fit(Single(), network(0.5), initial=posterior)


def test_another_precision_is_converted_and_slips_of_the_pen_are_told():
    first = fit(Single(optimizer=SGD), lambda: CASE.double_factory().float())
    double = fit(Single(optimizer=STILL), initial=first)
    for found, expected in zip(members(double), members(first), strict=True):
        torch.testing.assert_close({n: t.float() for n, t in found.items()}, expected)
    with pytest.raises(InputError, match=r"Unknown option of fit 'inital'\. Did you mean 'initial'"):
        fit(Single(), inital=first)


def test_a_number_that_the_posterior_lacks_is_missed():
    """One without axes, too: nothing but its name tells it."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.scale = nn.Linear(3, 1), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.scale * self.line(x)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x):
            return self.line(x)

    options = {"data": pm.ArrayData(torch.randn(20, 3), torch.randn(20, 1)), "likelihood": "fixed_gaussian"}
    first = fit(Single(), Plain, **options)
    with pytest.raises(InputError, match="'scale' is absent in it"):
        fit(Single(), Scaled, initial=first, **options)
