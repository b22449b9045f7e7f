"""A path is the networks that shorter trainings of the same seed end with."""

from dataclasses import replace

import pytest
import torch

import polymode as pm
from cases import BY_NAME
from polymode.errors import InputError
from polymode.methods import DeepEnsemble, Single, Trajectory
from polymode.networks.surgery import build
from polymode.posteriors.particles import StoredMembers
from polymode.seeds import derive_generator, draw_seed
from tolerances import assert_equal_up_to_rounding

SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9)
SINGLE = Single(prior_std=1.0, optimizer=SGD)  # a constant rate: the first epochs do not depend on the others
FLAT = Single(optimizer=SGD)
CASE = BY_NAME["mlp"]


def fitted(method, epochs=4, case=CASE, data=None, **options):
    options = {"progress": False, "backend": "loop"} | options
    data = case.data() if data is None else data
    return pm.fit(method, case.double_factory, data, likelihood=case.likelihood, epochs=epochs, **options)


def rows(posterior):
    return [block.member(i) for block in posterior.draw() for i in range(block.num_members)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), name


def ends(method, lengths, **options):
    """What trainings of these lengths end with."""
    return [row for epochs in lengths for row in rows(fitted(method, epochs, **options))]


@pytest.mark.parametrize("network", ["mlp", "batch_norm_and_dropout"])
@pytest.mark.parametrize("optimizer", [SGD, pm.Optimizer("Adam", lr=0.01)], ids=["SGD", "Adam"])
def test_checkpoints_are_the_ends_of_shorter_trainings(network, optimizer):
    single, case = Single(prior_std=1.0, optimizer=optimizer), BY_NAME[network]
    posterior = fitted(Trajectory(single), case=case)
    assert_same_bits(rows(posterior), ends(single, [1, 2, 3, 4], case=case))
    assert posterior.labels.tolist() == [[0, 0, number] for number in range(4)]
    assert posterior.record["member_epochs"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"every": 2}, [2, 4, 6]),
        ({"every": 4}, [2, 6]),  # counted from the end, which is always there
        ({"every": 9}, [6]),
        ({"start": 3}, [4, 5, 6]),
        ({"start": 0.5, "every": 2}, [4, 6]),
        ({"start": 0.99}, [6]),
    ],
)
def test_which_epochs_are_kept(options, kept):
    assert_same_bits(rows(fitted(Trajectory(SINGLE, **options), 6)), ends(SINGLE, kept))


def start_of_chain(chain=0):
    module = build(CASE.double_factory, draw_seed(derive_generator(0, "chain", chain)))
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def test_the_start_is_the_first_checkpoint_where_it_is_wanted():
    posterior = fitted(Trajectory(SINGLE, every=2, initial=True))
    assert_same_bits(rows(posterior), [start_of_chain(), *ends(SINGLE, [2, 4])])
    assert posterior.labels[:, 2].tolist() == [0, 1, 2]


def by_hand(num_steps):
    """Weights after each step of plain PyTorch, in minibatches of 8."""
    source, module = CASE.data(), build(CASE.double_factory, draw_seed(derive_generator(0, "chain", 0)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    path, n = [], source.num_examples
    for epoch in range(num_steps // 3 + 1):
        order = torch.randperm(n, generator=derive_generator(0, "order", 0, epoch, n))
        for batch in order.split(8):
            optimizer.zero_grad()
            fit = torch.nn.functional.cross_entropy(module(source.inputs[batch]), source.targets[batch])
            (fit + sum(p.square().sum() / 2 for p in module.parameters()) / n).backward()
            optimizer.step()
            path.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return path[:num_steps]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_steps": 1}, range(1, 13)),
        ({"every_steps": 5}, [5, 10]),
        ({"every_steps": 2, "start": 2}, [8, 10, 12]),
        ({"every_steps": 4, "initial": True}, [0, 4, 8, 12]),
    ],
)
def test_steps_are_counted_from_the_beginning(options, steps):
    """Against plain PyTorch, step by step: three steps an epoch."""
    found, path = rows(fitted(Trajectory(SINGLE, **options))), [start_of_chain(), *by_hand(12)]
    assert len(found) == len(steps)
    for weights, step in zip(found, steps, strict=True):
        assert_equal_up_to_rounding(weights, path[step])


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_chains_of_an_ensemble_are_paths_of_their_own(backend):
    method = DeepEnsemble(3, of=Trajectory(SINGLE, initial=True))
    posterior = fitted(method, 3, backend=backend)
    chains = posterior.chains()
    assert list(chains) == [(0, 0), (0, 1), (0, 2)]
    networks = [fitted(DeepEnsemble(3, of=SINGLE), epochs) for epochs in (1, 2, 3)]
    for (_, chain), path in chains.items():
        assert isinstance(path, pm.Particles)
        assert path.labels.tolist() == [[0, chain, number] for number in range(4)]
        expected = [start_of_chain(chain), *(rows(each)[chain] for each in networks)]
        for found, weights in zip(rows(path), expected, strict=True):
            assert_equal_up_to_rounding(found, weights)


def test_data_sets_of_unequal_sizes_are_as_if_alone():
    sets = [CASE.data(13, seed=1), CASE.data(24, seed=2)]
    for index, (data, together) in enumerate(
        zip(sets, fitted(DeepEnsemble(2, of=Trajectory(SINGLE)), 3, data=sets), strict=True)
    ):
        alone = fitted(DeepEnsemble(2, of=Trajectory(SINGLE)), 3, data=data)
        for found, expected in zip(rows(together), rows(alone), strict=True):
            assert_equal_up_to_rounding(found, expected)
        assert list(together.chains()) == [(index, 0), (index, 1)]
        assert together.labels[:, 2].tolist() == [0, 1, 2, 0, 1, 2]


# --- other methods --------------------------------------------------------------------------------

LATE = pm.methods.LatePhase(2, start=2, weights="all", head=False, noise=0.1, force=True, optimizer=SGD)
ANCHORED = pm.methods.SequentialAnchored(
    prior_std=1.0,
    walk=pm.samplers.GuidedWalk(3.0),
    first_epochs=2,
    short_epochs=2,
    optimizer=SGD,
    schedule=pm.schedules.Constant(),
)


def test_the_path_of_a_late_phase():
    """Before it there is one network; in it each checkpoint is the average that the training would have."""
    posterior = fitted(Trajectory(LATE), 5, case=BY_NAME["batch_norm"])
    expected = ends(FLAT, [1, 2], case=BY_NAME["batch_norm"])
    expected += ends(LATE, [3, 4, 5], case=BY_NAME["batch_norm"])
    found = rows(posterior)
    assert len(found) == 5
    for weights, other in zip(found, expected, strict=True):
        for name in dict(BY_NAME["batch_norm"].factory().named_parameters()):
            assert_equal_up_to_rounding(weights[name], other[name])
    assert posterior.labels[:, 2].diff().gt(0).all()


def test_steps_before_a_late_phase_are_those_of_one_network():
    """Between two epochs only one of the members has been trained; their average would be no checkpoint."""
    late = replace(LATE, noise=0.0, weights=(), head=True)  # the body is shared, the head is late
    found = rows(fitted(Trajectory(late, every_steps=2)))[:3]  # of 3 steps an epoch, the first 6
    path = rows(fitted(Trajectory(FLAT, every_steps=2)))[:3]
    for weights, other in zip(found, path, strict=True):
        assert_equal_up_to_rounding(weights, other)


def test_the_path_of_a_sequence_of_members():
    """Its members are points of the path, and are not kept twice."""
    members = rows(fitted(ANCHORED, 6))
    assert len(members) == 3
    path = rows(fitted(Trajectory(ANCHORED), 6))
    assert len(path) == 6
    assert_same_bits(path[1::2], members)
    assert_same_bits(path[:1], rows(fitted(Trajectory(ANCHORED, every=5), 6))[:1])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_best_epochs_of_trainings_do_not_set_the_clock_back(every):
    best = replace(ANCHORED, keep="best", optimizer=pm.Optimizer("SGD", lr=0.8))
    options = {"validation": CASE.data(20, seed=5)}
    everything = rows(fitted(Trajectory(best), 6, **options))
    assert len(everything) == 6
    some = rows(fitted(Trajectory(best, every=every), 6, **options))
    assert_same_bits(some, everything[every - 1 :: every])
    late = rows(fitted(Trajectory(best, start=3), 6, **options))
    assert_same_bits(late, everything[3:])


def test_the_path_of_gaussian_weights():
    """Every checkpoint has its means and spreads, and draws from them."""
    method = pm.methods.MeanField(prior_std=1.0, rho=-3.0, optimizer=SGD)
    posterior = fitted(Trajectory(method), 3)
    shorter = [fitted(method, epochs) for epochs in (1, 2, 3)]
    assert posterior.kind == shorter[0].kind
    assert len(posterior.blocks) == 3
    for block, expected in zip(posterior.blocks, shorter, strict=True):
        assert_same_bits([block.stacked], [expected.blocks[0].stacked])


def test_the_path_of_joined_heads_has_all_heads_of_every_epoch():
    method = pm.methods.MIMO(2, repetitions=2, optimizer=SGD)
    posterior = fitted(Trajectory(method), 3)
    assert_same_bits(rows(posterior), ends(method, [1, 2, 3]))
    assert posterior.labels[:, 2].tolist() == list(range(6))


def test_the_path_under_a_gaussian_of_the_last_epochs_is_that_of_the_training():
    """Its draws are no points of the path; they take neither checkpoints nor numbers from it."""
    case = BY_NAME["batch_norm"]  # whose draws are phases of their own
    swag = pm.methods.SWAG(SINGLE, start=1, num_draws=2, rank=2)
    assert_same_bits(
        rows(fitted(Trajectory(swag), 3, case=case)), rows(fitted(Trajectory(SINGLE), 3, case=case))
    )


def test_the_path_of_a_tunnel_has_all_points_of_every_epoch():
    solutions, tunnel = fitted(DeepEnsemble(2, of=SINGLE)), pm.methods.Tunnel(2, optimizer=SGD)
    posterior = fitted(Trajectory(tunnel), 2, initial=solutions)
    assert_same_bits(rows(posterior), ends(tunnel, [1, 2], initial=solutions))
    assert posterior.labels[:, 2].tolist() == list(range(8))


def test_the_path_of_cycles():
    found = rows(fitted(Trajectory(pm.methods.Snapshot(2, optimizer=SGD)), 5))
    members = rows(fitted(pm.methods.Snapshot(2, optimizer=SGD), 5))
    assert_same_bits([found[2], found[4]], members)
    assert len(found) == 5


# --- files ----------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("options", [{}, {"every_steps": 2, "initial": True}], ids=["epochs", "steps"])
def test_checkpoints_are_in_files_and_a_run_that_was_cut_has_the_same(options, tmp_path):
    method = DeepEnsemble(2, of=Trajectory(ANCHORED, **options))
    expected = fitted(method, 6)

    def stop(epoch):
        if epoch.epochs_done == 3:
            raise Stop

    folder = {"run_dir": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(Stop):
        fitted(method, 6, observer=stop, **folder)
    resumed = fitted(method, 6, resume=True, **folder)
    assert all(isinstance(block, StoredMembers) for block in resumed.blocks)
    assert_same_bits(rows(resumed), rows(expected))
    assert torch.equal(resumed.labels, expected.labels)
    loaded = pm.load_posterior(tmp_path / "run", CASE.double_factory)
    for key, path in loaded.chains().items():
        assert not any(isinstance(block, pm.Members) for block in path.blocks)
        assert_same_bits(rows(path), rows(expected.chains()[key]))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": Single}, "of must be an instance of a method"),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"every_steps": 0}, "every_steps must be a whole number"),
        ({"every": 2, "every_steps": 3}, "two ways to say one thing"),
        ({"start": -1}, "start must be a number of epochs"),
        ({"start": 1.5}, "give whole epochs"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        Trajectory(**options)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(InputError, match="start=4 is not before the end of 4 epochs"):
        fitted(Trajectory(SINGLE, start=4))
    sets = [CASE.data(13), CASE.data(24)]
    with pytest.raises(InputError, match=r"steps of all data sets together, and these have \[13, 24\]"):
        fitted(Trajectory(SINGLE, every_steps=2), data=sets)
    best = replace(ANCHORED, keep="best")
    with pytest.raises(InputError, match="keep='best' of sequential_anchored takes its trainings back"):
        fitted(Trajectory(best, every_steps=2), 6, validation=CASE.data(20))
