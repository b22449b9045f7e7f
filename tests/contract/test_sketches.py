"""The methods of several papers fit the contracts: see sketches.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F

import polymode as pm
from cases import BY_NAME
from contract.sketches import SGD, SKETCHES, Annealed, LateHead, Masked, MeanField, Mimo, Tunnel, orders
from polymode.methods import DeepEnsemble
from polymode.networks.members import stack, unstack
from polymode.posteriors import Particles
from polymode.schedules import Constant
from polymode.seeds import derive_generator
from polymode.training import epochs_of
from polymode.training.contract import Optimizer, Over

sketches = pytest.mark.parametrize("method", SKETCHES, ids=lambda m: m.name)


def run(method, *, case=BY_NAME["mlp"], data=None, **options):
    options = {"backend": "loop", "progress": False, "epochs": 4} | options
    data = case.data() if data is None else data
    return pm.fit(method, case.double_factory, data, likelihood=case.likelihood, **options)


def weights(posterior):
    """All weights of each member, those that it shares too."""
    members = [member for block in posterior.draw() for member in unstack(block)]
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}


@sketches
def test_backends_agree(method):
    loop, vmap = run(method), run(method, backend="vmap")
    for name, tensor in weights(loop).items():
        torch.testing.assert_close(tensor, weights(vmap)[name])
    x = BY_NAME["mlp"].data().inputs
    torch.testing.assert_close(loop.predict(x).mean, vmap.predict(x).mean)


@sketches
def test_an_ensemble_of_it_equals_the_chains_alone(method):
    """Composition is more chains side by side: nothing is shared across them."""
    pair = run(DeepEnsemble(2, of=method), backend="vmap")
    alone = run(method)
    first = weights(alone)
    for name, tensor in weights(pair).items():
        torch.testing.assert_close(tensor[: len(first[name])], first[name])
    assert pair.num_members == 2 * alone.num_members


@sketches
def test_unequal_data_sets_side_by_side(method):
    sets = [BY_NAME["mlp"].data(13, seed=1), BY_NAME["mlp"].data(24, seed=2)]
    for data, posterior in zip(sets, run(method, data=sets, backend="vmap"), strict=True):
        alone = run(method, data=data)
        for name, tensor in weights(posterior).items():
            torch.testing.assert_close(tensor, weights(alone)[name])


class Stop(Exception):
    pass


@sketches
@pytest.mark.parametrize("stop_at", [2, 3])
def test_resume_is_exact_across_phases(method, stop_at, tmp_path):
    expected = run(method)
    count = 0

    def observer(epoch):
        nonlocal count
        count += 1
        if count == stop_at:
            raise Stop

    try:
        run(method, run_dir=tmp_path / "run", observer=observer, checkpoint_seconds=0.0)
    except Stop:
        resumed = run(method, run_dir=tmp_path / "run", resume=True, checkpoint_seconds=0.0)
        for name, tensor in weights(expected).items():
            assert torch.equal(tensor, weights(resumed)[name]), name
    else:
        raise AssertionError(f"{method.name} ended before epoch {stop_at}")


@sketches
def test_the_same_seed_replays_and_chains_differ(method):
    pair, again = (run(DeepEnsemble(2, of=method)) for _ in range(2))
    first, second = weights(pair), weights(again)
    count = pair.num_members // 2
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        if tensor.is_floating_point():  # drawn by the factory or an adaptation, then trained
            assert not torch.equal(tensor[:count], tensor[count:]), name


@sketches
def test_a_saved_posterior_predicts_the_same(method, tmp_path):
    posterior = run(DeepEnsemble(2, of=method))
    posterior.save(tmp_path / "saved")
    loaded = pm.load_posterior(tmp_path / "saved", BY_NAME["mlp"].double_factory)
    for name, tensor in weights(posterior).items():
        assert torch.equal(tensor, weights(loaded)[name]), name
    x = BY_NAME["mlp"].data(seed=5).inputs
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    assert loaded.network.adaptations == posterior.network.adaptations


@pytest.mark.parametrize("stop_at", [None, 3, 6])
def test_weights_that_validation_keeps_come_with_their_masks(stop_at, tmp_path):
    """The posterior scores on held-out data what the best epoch of each member did, also after a resume."""
    held_out = BY_NAME["mlp"].data(seed=9)
    method = DeepEnsemble(3, of=Masked(keep="best"))
    options = {"validation": held_out, "epochs": 8, "run_dir": tmp_path / "run", "checkpoint_seconds": 0.0}
    scores = []

    def observer(epoch):
        scores.append(epoch.validation["nll"])
        if len(scores) == stop_at:
            raise Stop

    try:
        posterior = run(method, observer=observer, **options)
    except Stop:
        posterior = run(method, observer=observer, resume=True, **options)
    lowest, epochs = torch.stack(scores).min(0)
    assert len(epochs.unique()) > 1  # members are best at different times, and before the end
    assert (epochs < 7).any()
    for member, block in enumerate(unstack(next(posterior.draw()))):
        alone = Particles(posterior.network, blocks=[stack([block])])
        nll = pm.evaluate(alone, held_out)["nll"]
        assert nll == pytest.approx(float(lowest[member]), rel=1e-5), member
        assert any(torch.count_nonzero(tensor) < tensor.numel() for tensor in block.values())


def test_what_a_method_measures_is_told_logged_and_kept(tmp_path):
    """The sparsity of the masks that a chain ends with is that of the last epoch, also after a resume."""
    told, masks, folder = [], [], tmp_path / "run"

    class Noted(Masked):
        def posterior(self, problem, state):
            masks.append(torch.cat([mask.flatten(1) for mask in state.own["mask"].values()], 1))
            return super().posterior(problem, state)

    method = DeepEnsemble(2, of=Noted())

    def observer(epoch):
        told.append(epoch.measures["sparsity"])
        if len(told) == 2:
            raise Stop

    with pytest.raises(Stop):
        run(method, run_dir=folder, observer=observer, checkpoint_seconds=0.0)
    posterior = run(method, run_dir=folder, observer=observer, resume=True)
    zeros = torch.cat(masks[-2:]) == 0
    assert (zeros.sum(1) / zeros.shape[1]).tolist() == pytest.approx(told[-1].tolist())
    logged = epochs_of(folder)
    assert [epoch["measures"]["sparsity"] for epoch in logged] == [
        pytest.approx(each.tolist(), rel=1e-5) for each in told
    ]
    history = posterior.record["history"]
    assert [row["measure_sparsity"] for row in history] == pytest.approx([float(t.mean()) for t in told])


def test_a_measure_must_be_a_number_for_each_member():
    class Odd(Masked):
        def phases(self, problem, epochs):
            [phase] = super().phases(problem, epochs)
            return [replace(phase, measure=lambda state: {"odd": torch.zeros(3)})]

    with pytest.raises(pm.errors.InputError, match=r"measure 'odd' of phase 'fit' is \[3\].*of 1 members"):
        run(Odd())


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("factor", [0.0, 0.3])
def test_a_schedule_of_the_penalty_multiplies_it(factor, backend):
    """A constant factor does what a penalty that is so much smaller does, on data sets of unequal length."""

    class Scaled(MeanField):
        def phases(self, problem, epochs):
            [phase] = super().phases(problem, epochs)
            kl = phase.objective.penalty
            objective = replace(phase.objective, penalty=lambda weights, own: factor * kl(weights, own))
            return [replace(phase, objective=objective)]

    sets = [BY_NAME["mlp"].data(13, seed=1), BY_NAME["mlp"].data(24, seed=2)]
    annealed = run(Annealed(Constant(factor)), data=sets, backend=backend)
    for found, expected in zip(annealed, run(Scaled(), data=sets, backend=backend), strict=True):
        for name, tensor in weights(expected).items():
            torch.testing.assert_close(weights(found)[name], tensor)
    plain = weights(run(MeanField(), data=sets, backend=backend)[0])
    assert any(not torch.allclose(tensor, plain[name]) for name, tensor in weights(annealed[0]).items())


def test_a_penalty_that_grows_follows_its_schedule():
    """One step an epoch: the factors are those of the epochs' beginnings."""
    seen = []

    def schedule(progress):
        seen.append(progress.step)
        return 1.0 if progress.step else 0.0

    data = BY_NAME["mlp"].data(8, 8)
    run(Annealed(schedule), data=data, epochs=3)
    assert seen[-3:] == [0, 1, 2]
    with pytest.raises(pm.errors.InputError, match=r"gave nan at step 0.*multiplies the penalty"):
        run(Annealed(lambda progress: float("nan")), data=data)


# --- a method that begins at the members of a posterior ------------------------------------------


def ends():
    return run(DeepEnsemble(4, of=pm.methods.Single(optimizer=SGD)))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_a_tunnel_leads_from_one_member_to_the_next(backend):
    """Two chains take two members each; what they descend by is at right angles to their lines."""
    solutions = ends()
    both = unstack(next(solutions.draw()))
    found = run(DeepEnsemble(2, of=Tunnel()), initial=solutions, backend=backend)
    still = Optimizer("SGD", lr=1e-30)
    lines = unstack(next(run(DeepEnsemble(2, of=Tunnel(optimizer=still)), initial=solutions).draw()))
    for index, member in enumerate(unstack(next(found.draw()))):
        chain, place = divmod(index, 3)
        first, last = both[2 * chain], both[2 * chain + 1]
        moved = along = length = 0.0
        for name, start in lines[index].items():
            torch.testing.assert_close(start, torch.lerp(first[name], last[name], (place + 1) / 4))
            line, step = last[name] - first[name], member[name] - start
            moved += float(step.square().sum())
            along += float((line * step).sum())
            length += float(line.square().sum())
        assert moved > 1e-6
        assert abs(along) < 1e-10 * (moved * length) ** 0.5


def test_a_tunnel_goes_on_after_a_cut_and_needs_its_ends(tmp_path):
    solutions, method = ends(), DeepEnsemble(2, of=Tunnel())
    expected = run(method, initial=solutions)

    def observer(epoch):
        if epoch.epochs_done == 2:
            raise Stop

    options = {"run_dir": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(Stop):
        run(method, initial=solutions, observer=observer, **options)
    other = run(DeepEnsemble(4, of=pm.methods.Single(optimizer=SGD)), seed=1)
    with pytest.raises(pm.errors.CheckpointError, match="it began at other networks"):
        run(method, initial=other, resume=True, **options)
    resumed = run(method, initial=solutions, resume=True, **options)
    for name, tensor in weights(expected).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    with pytest.raises(pm.errors.InputError, match="leads from one network to another"):
        run(Tunnel())
    with pytest.raises(pm.errors.InputError, match=r"initial has 4 members.*takes 6 \(2 for each chain\)"):
        run(DeepEnsemble(3, of=Tunnel()), initial=solutions)


def test_optimisers_that_cannot_be_carried_are_refused():
    late = LateHead()

    class Otherwise(LateHead):
        def phases(self, problem, epochs):
            first, second = super().phases(problem, epochs)
            return [first, replace(second, optimizers=second.optimizers | {"base": self.other})]

    for other, message in ((Over(Optimizer("Adam")), "describes it otherwise"),):
        Otherwise.other = other
        with pytest.raises(pm.errors.InputError, match=message):
            run(Otherwise())

    class Both(LateHead):
        def phases(self, problem, epochs):
            return [
                replace(p, optimizers={"all": Over(SGD)}, carry=frozenset())
                for p in late.phases(problem, epochs)
            ]

    with pytest.raises(pm.errors.InputError, match="stacked and shared weights at once"):
        run(Both())


def test_late_rounds_against_a_naive_loop():
    """Algorithm 1 of von Oswald et al. (2021) by hand: members step at once, the base once a round."""
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = BY_NAME["mlp"].data(24, batch_size=5)  # five minibatches: one round of three, one of two
    posterior = pm.fit(
        LateHead(3), module, data, likelihood="categorical", epochs=2, progress=False, backend="loop"
    )

    body = nn.Linear(4, 5).double()
    head = nn.Linear(5, 3).double()
    body.load_state_dict(module[0].state_dict())
    head.load_state_dict(module[2].state_dict())

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def loss(h, rows):
        return F.cross_entropy(h(torch.tanh(body(data.inputs[rows]))), data.targets[rows])

    def order(epoch):
        generator = derive_generator(0, "order", 0, epoch, 24)
        return torch.randperm(24, generator=generator).split(5)

    base, late = sgd(body.parameters()), sgd(head.parameters())
    for rows in order(0):
        base.zero_grad(), late.zero_grad()
        loss(head, rows).backward()
        base.step(), late.step()
    heads = [nn.Linear(5, 3).double() for _ in range(3)]
    for h in heads:
        h.load_state_dict(head.state_dict())
    optimizers = [sgd(h.parameters()) for h in heads]
    minibatches = order(1)
    for start in (0, 3):
        base.zero_grad()
        for member, rows in enumerate(minibatches[start : start + 3]):
            optimizers[member].zero_grad()
            loss(heads[member], rows).backward()
            optimizers[member].step()
        if start == 0:
            base.step()
    got = weights(posterior)
    torch.testing.assert_close(got["0.weight"][0], body.weight)
    torch.testing.assert_close(got["2.weight"][0], torch.stack([h.weight for h in heads]).mean(0))


def test_heads_against_a_naive_loop():
    """A wider network by hand: the sum of the heads' losses, each on its own order of the minibatch."""
    start, seeds = {}, []

    class Watched(Mimo):
        def init(self, problem, generator):
            state = super().init(problem, generator)
            start.update({n: t[0].clone() for n, t in state.members.shared.items() if n in problem.trainable})
            return state

        def phases(self, problem, epochs):
            [phase] = super().phases(problem, epochs)

            def step(state, batches, objective):
                losses = phase.step(state, batches, objective)
                seeds.append(state.members.shared["0.shuffle"][0].clone())
                return losses

            return [replace(phase, step=step)]

    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = BY_NAME["mlp"].data(24, batch_size=5)
    posterior = pm.fit(
        Watched(2), module, data, likelihood="categorical", epochs=2, progress=False, backend="loop"
    )
    minibatches = []
    for epoch in range(2):
        generator = derive_generator(0, "order", 0, epoch, 24)
        minibatches += torch.randperm(24, generator=generator).split(5)
    seeds = seeds[-len(minibatches) :]  # before the training a step is tried

    wide = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    wide.load_state_dict(start)
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.05, momentum=0.9)
    for rows, seed in zip(minibatches, seeds, strict=True):
        first, second = (rows[order] for order in orders(seed, 2, len(rows)))
        assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(rows.tolist())
        outputs = wide(torch.cat([data.inputs[first], data.inputs[second]], 1))
        loss = F.cross_entropy(outputs[:, :3], data.targets[first])
        loss = loss + F.cross_entropy(outputs[:, 3:], data.targets[second])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, tensor in wide.state_dict().items():
        torch.testing.assert_close(weights(posterior)[name], torch.stack([tensor, tensor]))

    outputs = wide(torch.cat([data.inputs, data.inputs], 1))
    expected = (outputs[:, :3].softmax(1) + outputs[:, 3:].softmax(1)) / 2
    torch.testing.assert_close(posterior.predict(data.inputs).mean, expected.detach())


def test_the_body_runs_once_for_all_heads():
    """vmap maps over heads from the last layer on: until then nothing is theirs."""
    mapped = {}

    def note(layer, inputs, outputs):
        mapped[type(layer).__name__] = is_batchedtensor(inputs[0]), is_batchedtensor(outputs)

    def watched():
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Softplus()).double()
        for part in (module[1], module[3]):
            part.register_forward_hook(note)
        return module

    run(Mimo(), case=replace(BY_NAME["mlp"], factory=watched), backend="vmap", epochs=1)
    assert mapped == {"Tanh": (False, False), "Softplus": (True, True)}


def test_heads_are_shuffled_apart():
    first, second, third = orders(torch.tensor(7), 3, 50).tolist()
    assert first != second != third != first
    assert orders(torch.tensor(8), 3, 50).tolist()[0] != first


def test_a_wider_network_is_not_taken_for_another(tmp_path):
    run(Mimo()).save(tmp_path / "saved")
    one_layer = lambda: nn.Sequential(nn.Linear(4, 3)).double()  # noqa: E731
    with pytest.raises(pm.errors.CheckpointError, match=r"belongs to another network"):
        pm.load_posterior(tmp_path / "saved", one_layer)
    with pytest.raises(pm.errors.InputError, match="Heads are joined in Linear layers"):
        run(Mimo(), case=replace(BY_NAME["mlp"], factory=lambda: nn.Sequential(nn.Linear(4, 3))))
    assert run(Mimo(2)).network.adaptations != run(Mimo(3)).network.adaptations
    with pytest.raises(pm.errors.CheckpointError, match=r"belongs to another network"):
        pm.merge([run(Mimo(2)), run(Mimo(3))])
