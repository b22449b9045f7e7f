"""dst_ensemble and edst_ensemble against themselves written by hand with plain PyTorch."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import DeepEnsemble, DSTEnsemble, EDSTEnsemble, parameter_counts
from polymode.networks.members import stack, unstack
from polymode.networks.surgery import build
from polymode.posteriors import Particles
from polymode.schedules import Constant, Progress
from polymode.seeds import derive_generator, draw_seed
from polymode.training.contract import KeepBest, phase_schedule
from polymode.weights.sparse import erk_densities
from tolerances import assert_equal_up_to_rounding

SGD = pm.Optimizer("SGD", lr=0.1, momentum=0.9, weight_decay=5e-4)
SPARSE = {"density": 0.5, "update_every": 3, "prune_rate": 0.2, "optimizer": SGD}
DST = DSTEnsemble(2, **SPARSE)
EDST = EDSTEnsemble(3, **SPARSE, phase_epochs=2, exploration_rate=0.8)
BOTH = pytest.mark.parametrize("method", [DST, EDST], ids=lambda method: method.name)
EPOCHS = 9  # for the second one three of exploration, and two for each of three members
MASKED = ("0.weight", "4.weight", "6.weight")


def network():
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def data(n=30, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return pm.ArrayData(
        torch.randn(n, 2, 4, 4, generator=generator, dtype=torch.float64),
        torch.randint(3, (n,), generator=generator),
        batch_size=8,
    )


def fitted(method, source=None, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop", "epochs": EPOCHS} | options
    return pm.fit(method, network, data() if source is None else source, **options)


def weights(posterior):
    """Of all members, [M, ...]."""
    blocks = list(posterior.draw())
    return {name: torch.cat([block.stacked[name] for block in blocks]) for name in blocks[0].stacked}


# --- the algorithm ------------------------------------------------------------------------------


def exchange(parameter, mask, rate):
    """Remove the smallest active weights and activate those of the largest gradient, as lists of numbers."""
    weight, active = parameter.data.flatten().tolist(), mask.flatten().tolist()
    gradient, places = parameter.grad.flatten().tolist(), range(len(active))
    number = math.ceil(rate * sum(active))
    for place in sorted((i for i in places if active[i]), key=lambda i: abs(weight[i]))[:number]:
        active[place], weight[place] = 0.0, 0.0
    for place in sorted((i for i in places if not active[i]), key=lambda i: -abs(gradient[i]))[:number]:
        active[place] = 1.0
    parameter.data.copy_(torch.tensor(weight, dtype=torch.float64).view_as(parameter))
    mask.copy_(torch.tensor(active, dtype=torch.float64).view_as(mask))


def by_hand(chain, lengths, schedules):
    """One chain with nn.Module and torch.optim: what the network holds at the end of every phase."""
    source = data()
    n, generator = source.num_examples, derive_generator(0, "chain", chain)
    module = build(network, draw_seed(generator))
    parameters = dict(module.named_parameters())
    shapes = {name: tuple(parameters[name].shape) for name in MASKED}
    masks = {}
    for name, density in erk_densities(shapes, 0.5).items():
        masks[name] = (torch.rand(shapes[name], generator=generator, dtype=torch.float64) < density).double()
        parameters[name].data.mul_(masks[name])
    assert [0 in mask for mask in masks.values()] == [True, True, False]  # the last layer is dense, and stays
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    ends, steps, epochs_done = [], 0, 0
    for phase, (epochs, schedule) in enumerate(zip(lengths, schedules, strict=True)):
        orders = [
            torch.randperm(n, generator=derive_generator(0, "order", chain, epochs_done + epoch, n))
            for epoch in range(epochs)
        ]
        for step, rows in enumerate(rows for order in orders for rows in order.split(8)):
            optimizer.param_groups[0]["lr"] = 0.1 * schedule(Progress(step, 4 * epochs, epochs))
            optimizer.zero_grad()
            F.cross_entropy(module(source.inputs[rows]), source.targets[rows]).backward()
            optimizer.step()
            steps += 1
            rate = 0.8 if phase >= 2 and step == 0 else 0.2 if steps % 3 == 0 else 0.0
            for name, mask in masks.items():
                parameters[name].data.mul_(mask)
                if rate and 0 in mask:
                    exchange(parameters[name], mask, rate)
        epochs_done += epochs
        ends.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    return ends


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_members_of_dst_are_those_of_a_plain_loop(backend):
    found = weights(fitted(DST, backend=backend))
    for chain in range(2):
        [expected] = by_hand(chain, [EPOCHS], [DSTEnsemble().schedule])
        assert_equal_up_to_rounding({name: tensor[chain] for name, tensor in found.items()}, expected)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("rates", ["stepwise", "linear-fge"])
def test_members_of_edst_are_those_of_a_plain_loop(rates, backend):
    found = weights(fitted(DeepEnsemble(2, of=replace(EDST, rates=rates)), backend=backend))
    first, later = (phase_schedule(rates, 0.1, 0.01, first=first) for first in (True, False))
    for chain in range(2):
        _, *members = by_hand(chain, [3, 2, 2, 2], [Constant(), first, later, later])
        for number, expected in enumerate(members, start=3 * chain):
            assert_equal_up_to_rounding({name: t[number] for name, t in found.items()}, expected)


def test_rates_drop_when_the_paper_says():
    schedule = DSTEnsemble().schedule
    rates = [schedule(Progress(epoch * 351, 250 * 351, 250)) for epoch in (0, 149, 150, 199, 200, 249)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    *_, last = EDSTEnsemble().phases(_problem(), 450)
    rates = [0.1 * last.schedule(Progress(epoch, 100, 100)) for epoch in (0, 49, 50, 99)]
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])


@BOTH
def test_a_chain_in_an_ensemble_is_the_chain_alone(method):
    alone = method if method is EDST else replace(method, num_members=1)
    one, many = weights(fitted(alone)), weights(fitted(DeepEnsemble(2, of=method), backend="vmap"))
    for name, tensor in one.items():
        assert_equal_up_to_rounding(many[name][: len(tensor)], tensor, name=name)


@BOTH
def test_chains_on_data_sets_of_unequal_length_have_clocks_of_their_own(method):
    sets = [data(13, seed=2), data(30), data(21, seed=3)]
    for source, found in zip(sets, fitted(method, sets, backend="vmap"), strict=True):
        assert_equal_up_to_rounding(weights(found), weights(fitted(method, source)))


# --- masks --------------------------------------------------------------------------------------


def noted(kind, masks):
    """The method, which notes masks after every epoch and checks that they hold."""

    def note(state):
        for name, mask in state.own["mask"].items():
            assert set(mask.unique().tolist()) <= {0.0, 1.0}
            assert not torch.any(state.members.stacked[name][mask == 0])
        masks.append({name: mask.clone() for name, mask in state.own["mask"].items()})

    class Noted(kind):
        def phases(self, problem, epochs):
            return [replace(phase, end_epoch=note) for phase in super().phases(problem, epochs)]

    return Noted


@BOTH
@pytest.mark.parametrize("optimizer", [SGD, pm.Optimizer("AdamW", lr=0.01, weight_decay=0.1)])
def test_the_number_of_active_weights_never_changes_but_which_ones_do(method, optimizer):
    masks, told = [], []
    options = {each.name: getattr(method, each.name) for each in fields(method)}
    method = noted(type(method), masks)(**options | {"optimizer": optimizer})
    posterior = fitted(method, observer=told.append)
    first, *others = masks
    assert list(first) == list(MASKED)
    for each in others:
        for name, mask in each.items():
            assert torch.equal(mask.flatten(1).sum(1), first[name].flatten(1).sum(1))
    for before, after in pairwise(masks):
        assert not torch.equal(before["4.weight"], after["4.weight"])
    active = sum(mask.flatten(1).sum(1) for mask in first.values())
    total = sum(mask[0].numel() for mask in first.values())
    for epoch in told:
        torch.testing.assert_close(epoch.measures["weights_remaining"], active / total)
    for name, tensor in weights(posterior).items():
        if name in MASKED:  # exact zeros; what was activated at the last step is 0, too
            most = first[name].flatten(1).sum(1)
            assert (tensor.flatten(1).count_nonzero(1) <= most).all()
            assert (tensor.flatten(1).count_nonzero(1) >= 0.5 * most).all()


def test_masks_stay_as_drawn_where_training_is_shorter_than_an_exchange_takes():
    masks = []
    fitted(noted(DSTEnsemble, masks)(2, **SPARSE | {"update_every": 4 * EPOCHS + 1}))
    assert all(torch.equal(mask, masks[0][name]) for each in masks for name, mask in each.items())


def test_between_two_members_of_edst_most_weights_are_exchanged():
    masks = []
    method = noted(EDSTEnsemble, masks)
    fitted(method(3, **SPARSE | {"update_every": 1000}, phase_epochs=2))
    same = [torch.equal(before["4.weight"], after["4.weight"]) for before, after in pairwise(masks)]
    assert same == [True] * 4 + [False, True, False, True]  # at the first step of the last two phases


@BOTH
@pytest.mark.parametrize("stop_at", [1, 4, 5, 7])
def test_resume_is_exact(method, stop_at, tmp_path):
    class Stop(Exception):
        pass

    def observer(epoch):
        if epoch.epochs_done == stop_at:
            raise Stop

    with pytest.raises(Stop):
        fitted(method, observer=observer, run_dir=tmp_path, checkpoint_seconds=0.0)
    resumed = fitted(method, run_dir=tmp_path, resume=True)
    for name, tensor in weights(fitted(method)).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_the_best_epoch_of_each_phase_comes_with_its_masks():
    method = replace(EDST, num_members=2, phase_epochs=5, keep=KeepBest("nll", 2))
    held_out, told = data(seed=9), []
    posterior = fitted(method, epochs=12, validation=held_out, observer=told.append)
    for number, member in enumerate(unstack(next(posterior.draw()))):
        epochs = [epoch for epoch in told if epoch.phase == "refine"][5 * number :][1:5]
        lowest = min(float(epoch.validation["nll"]) for epoch in epochs)
        alone = Particles(posterior.network, blocks=[stack([member])])
        assert pm.evaluate(alone, held_out)["nll"] == pytest.approx(lowest, rel=1e-6)
        assert member["4.weight"].count_nonzero() < 0.6 * member["4.weight"].numel()


# --- epochs, numbers kept, what is refused ------------------------------------------------------


def _problem():
    from polymode.posteriors.network import Network
    from polymode.training.contract import Execution, Problem

    module = network()
    names = frozenset(name for name, _ in module.named_parameters())
    likelihood, execution = pm.likelihoods.Categorical(), Execution(torch.device("cpu"))
    count = torch.tensor([30])
    return Problem(Network(module, likelihood), names, frozenset(), lambda *_: {}, execution, count)


def test_epochs_and_budgets():
    lengths = [phase.epochs for phase in EDSTEnsemble().phases(_problem(), 450)]
    assert lengths == [150, 100, 100, 100]
    assert [(p.name, p.epochs) for p in EDST.phases(_problem(), 9)] == [("explore", 3), *[("refine", 2)] * 3]
    for method, epochs in ((EDSTEnsemble(), 450), (DSTEnsemble(), 150)):
        assert method.for_budget(450) == (method, epochs)
        assert method.declared_budget(_problem(), epochs) == 450
    assert fitted(EDST).record["member_epochs"] == pytest.approx(EPOCHS)
    assert fitted(DST).record["member_epochs"] == pytest.approx(2 * EPOCHS)
    with pytest.raises(InputError, match=r"6 epochs are too few for an exploration .* 3 phases of 2 epochs"):
        fitted(EDST, epochs=6)


def test_best_is_that_of_the_second_half_of_a_phase():
    for each, first in ((100, 51), (5, 3), (1, 1)):
        method = EDSTEnsemble(2, phase_epochs=each, keep="best")
        explore, *phases = method.phases(_problem(), 3 * each)
        assert explore.keep is None
        assert [phase.keep for phase in phases] == [KeepBest("error", first)] * 2
    assert all(phase.keep is None for phase in EDSTEnsemble().phases(_problem(), 450))


def test_numbers_kept():
    masked, others = 4 * 2 * 9 + 16 * 8 + 8 * 3, 4 + 8 + 8 + 3  # biases and what BatchNorm has
    methods = {
        "dst": DSTEnsemble(3, density=0.25),
        "edst": EDSTEnsemble(5, density=0.25),
        "some": DSTEnsemble(1, density=0.5, where="Linear"),
        "all": DSTEnsemble(1, density=1.0),
    }
    found = {name: count.parameters for name, count in parameter_counts(network(), methods).items()}
    assert found == {
        "dst": 3 * (masked // 4 + others),
        "edst": 5 * (masked // 4 + others),
        "some": 4 * 2 * 9 + (16 * 8 + 8 * 3) // 2 + others,
        "all": masked + others,
    }


@pytest.mark.parametrize("kind", [DSTEnsemble, EDSTEnsemble])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members must be a whole number of at least 1, got 0"),
        ({"density": 0.0}, r"density must be above 0 and at most 1, got 0\.0"),
        ({"density": 1.1}, r"density must be above 0 and at most 1, got 1\.1"),
        ({"update_every": 0}, "update_every must be a whole number of at least 1, got 0"),
        ({"prune_rate": 1.0}, r"prune_rate must be above 0 and below 1, got 1\.0"),
        ({"where": ""}, "where=''"),
        ({"optimizer": pm.Optimizer("LBFGS", lr=1.0)}, "LBFGS evaluates the loss by itself"),
        ({"optimizer": "SGD"}, "optimizer must be a description"),
        ({"keep": "first"}, "keep='first'"),
    ],
)
def test_options_of_both_that_are_refused(kind, options, message):
    with pytest.raises(InputError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exploration_rate": 0.0}, r"exploration_rate must be above 0 and below 1, got 0\.0"),
        ({"phase_epochs": 0}, "phase_epochs must be a whole number of at least 1, got 0"),
        ({"rates": "steps"}, "Unknown rates 'steps'. Did you mean 'stepwise'"),
        ({"high": 0.01, "low": 0.1}, "0 < low <= high"),
    ],
)
def test_options_of_edst_that_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        EDSTEnsemble(**options)
    with pytest.raises(InputError, match="schedule must be an instance"):
        DSTEnsemble(schedule="cosine")


@BOTH
def test_a_network_without_layers_to_mask_is_refused(method):
    with pytest.raises(InputError, match="selects no weights of this Sequential that could be sparse"):
        fitted(replace(method, where="norm"))
