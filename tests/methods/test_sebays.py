"""Algorithm 1 of Jantre et al. (2022) against itself written by hand; phases, perturbations, budgets."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.methods import MeanField, SeBayS, SequentialBNN, SpikeSlab
from polymode.networks.surgery import build
from polymode.seeds import derive_generator, draw_seed
from polymode.training.contract import divide_epochs, next_noise, phase_schedule
from polymode.weights.gaussian import INCLUSION, MASK, RHO, gaussian_weights

SGD = pm.Optimizer("SGD", lr=0.1, momentum=0.9, clip_norm=0.5)


def network():
    return pm.models.MLP(4, 3, (6,), activation=nn.Tanh, batch_norm=True).double()


def data(n=30, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, torch.randint(3, (n,), generator=generator), batch_size=8)


def fitted(method, epochs, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop"} | options
    return pm.fit(method, network, data(), epochs=epochs, **options)


def sparse(**options):
    return SpikeSlab(
        **{"prior_std": 0.5, "rho": -2.0, "inclusion": 0.8, "prior_inclusion": 0.1, "optimizer": SGD}
        | options
    )


def dense(**options):
    return MeanField(**{"prior_std": 0.5, "rho": -2.0, "optimizer": SGD} | options)


METHODS = {
    "sequential_bnn": SequentialBNN(dense(), 3, phase_epochs=2, reset_rho=-3.0),
    "freeze": SeBayS(sparse(), 3, phase_epochs=2, reset_rho=-3.0),
    "no freeze": SeBayS(sparse(), 3, phase_epochs=2, reset_rho=-3.0, freeze=False),
    "linear-fge": SeBayS(sparse(), 2, phase_epochs=2, rates="linear-fge", freeze=False),
    "cosine": SequentialBNN(dense(), 2, phase_epochs=3, rates="cosine", perturbation=1.0),
}


def by_hand(method, epochs):
    """One chain with plain torch: means in an nn.Module, everything else in vectors, one optimiser each."""
    source, generator = data(), derive_generator(0, "chain", 0)
    n = source.num_examples
    module = build(network, draw_seed(generator))
    weights = gaussian_weights(
        module, frozenset(dict(module.named_parameters())), units=getattr(method.of, "where", None)
    )
    means = {name: p.detach().clone() for name, p in module.named_parameters()}
    rho = torch.full((sum(weights.sizes),), method.of.rho, dtype=torch.float64)
    extra = {RHO: rho}
    if weights.units:
        logit = math.log(method.of.inclusion / (1 - method.of.inclusion))
        extra[INCLUSION] = torch.full((sum(weights.counts),), logit, dtype=torch.float64)
    noise = torch.tensor([draw_seed(generator)])
    leaves = {n: t.requires_grad_() for n, t in (means | extra).items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.9)
    first, each = divide_epochs(epochs, method.num_members, method.phase_epochs)
    frozen, mask, members, done = False, None, [], 0
    stds = dict.fromkeys(weights.shapes, 0.5)
    for phase in range(1 + method.num_members):
        length = each if phase else first
        if phase == 1 and method.is_frozen:
            frozen = True
            numbers = weights.noise(noise, rho)
            mask = weights.included({INCLUSION: leaves[INCLUSION]}, numbers)[0].detach()
            leaves[INCLUSION].requires_grad_(False)
        if phase > 1:
            with torch.no_grad():
                signs = torch.randint(2, (1, len(rho)), generator=generator)[0] * 2 - 1
                moves = weights.by_name(method.perturbation * signs * F.softplus(leaves[RHO]))
                for name, move in moves.items():
                    leaves[name].add_(move)
                drawn = torch.randn((1, len(rho)), generator=generator, dtype=torch.float64)[0]
                leaves[RHO].copy_(method.reset_rho + method.reset_spread * drawn)
        schedule = (
            pm.schedules.Constant()
            if not phase
            else phase_schedule(method.rates, 0.1, 0.01, first=phase == 1)
        )
        for epoch in range(length):
            order = torch.randperm(n, generator=derive_generator(0, "order", 0, done, n))
            done += 1
            for step, rows in enumerate(order.split(8)):
                factor = schedule(pm.schedules.Progress(epoch * 4 + step, length * 4, length))
                optimizer.param_groups[0]["lr"] = 0.1 * factor
                noise = next_noise(noise)
                numbers = {k: t[0] for k, t in weights.noise(noise, rho).items()}
                now = leaves if mask is None else leaves | {MASK: mask}
                made = weights.realise(now, numbers, frozen=frozen)
                outputs = torch.func.functional_call(module, made, (source.inputs[rows],))
                kl = weights.kl(leaves, stds, getattr(method.of, "prior_inclusion", 0.5))
                optimizer.zero_grad()
                (F.cross_entropy(outputs, source.targets[rows]) + kl / n).backward()
                trained = [t for t in leaves.values() if t.grad is not None]
                norm = torch.sqrt(sum(t.grad.square().sum() for t in trained))
                for t in trained:
                    t.grad.mul_(min(1.0, 0.5 / (norm.item() + 1e-6)))
                optimizer.step()
        if phase:
            kept = {name: t.detach().clone() for name, t in leaves.items()}
            statistics = {name: b.clone() for name, b in module.named_buffers() if b.is_floating_point()}
            members.append(kept | statistics | ({} if mask is None else {MASK: mask}))
    return members


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("name", METHODS)
def test_a_chain_is_the_algorithm_by_hand(name, backend):
    method = METHODS[name]
    epochs = 10
    posterior = fitted(method, epochs, backend=backend)
    expected = by_hand(method, epochs)
    assert posterior.num_components == method.num_members == len(expected)
    for block, member in zip(posterior.blocks, expected, strict=True):
        for key, tensor in member.items():
            torch.testing.assert_close(block.stacked[key][0], tensor, rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("freeze", [True, False])
def test_a_chain_in_an_ensemble_is_what_it_is_alone(freeze, at_once):
    method = SeBayS(sparse(), 3, at_once, phase_epochs=2, freeze=freeze)
    alone = fitted(method, 8)
    both = fitted(pm.methods.DeepEnsemble(2, of=method), 8, backend="vmap")
    own = [b for b in both.blocks if int(b.labels[0, 1]) == 0]
    assert len(own) == len(alone.blocks)
    for first, second in zip(alone.blocks, own, strict=True):
        for key, tensor in first.stacked.items():
            torch.testing.assert_close(tensor, second.stacked[key], rtol=1e-8, atol=1e-10, msg=key)


def test_frozen_members_share_their_units_and_others_do_not():
    frozen = fitted(SeBayS(sparse(inclusion=0.6), 3, phase_epochs=3), 15)
    masks = torch.cat([block.stacked[MASK] for block in frozen.blocks])
    assert len(masks.unique(dim=0)) == 1
    assert 0 < masks.mean() < 1
    logits = torch.cat([block.stacked[INCLUSION] for block in frozen.blocks])
    assert len(logits.unique(dim=0)) == 1  # they are not learned any more
    for block in frozen.draw(9):
        there = (block.stacked["1.weight"] != 0).any(-1)
        assert torch.equal(there.double(), masks[:1].expand_as(there))
    free = fitted(SeBayS(sparse(inclusion=0.6), 3, phase_epochs=3, freeze=False), 15)
    assert len(torch.cat([block.stacked[INCLUSION] for block in free.blocks]).unique(dim=0)) == 3
    drawn = torch.cat([(b.stacked["1.weight"] != 0).any(-1) for b in free.draw(30)])
    assert len(drawn.unique(dim=0)) > 1


def test_perturbations_are_fair_signs_times_spread():
    """Right after a perturbation: every mean has moved by ρσ, half of them up, and ρ is near −6."""
    found = {}

    class Spy(SequentialBNN):
        name = "spy"

        def _perturb(self, problem, state, first):
            before = {k: t.clone() for k, t in state.members.stacked.items()}
            super()._perturb(problem, state, first)
            found.update(before=before, after={k: t.clone() for k, t in state.members.stacked.items()})

    fitted(Spy(dense(), 2, phase_epochs=1, perturbation=3.0), 3)
    weights = gaussian_weights(network(), frozenset(n for n, _ in network().named_parameters()))
    before, after = found["before"], found["after"]
    sigma = weights.by_name(F.softplus(before[RHO]))
    signs = torch.cat([((after[n] - before[n]) / (3 * sigma[n])).flatten() for n in weights.shapes])
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))  # BatchNorm and the last layer, too
    assert abs(signs.mean()) < 4 / math.sqrt(len(signs))
    error = 4 * 0.05 / math.sqrt(len(signs))
    assert after[RHO].mean().item() == pytest.approx(-6.0, abs=error)
    assert after[RHO].std().item() == pytest.approx(0.05, rel=4 / math.sqrt(2 * len(signs)))
    for name in before.keys() - {RHO, *weights.shapes}:
        assert torch.equal(before[name], after[name])  # statistics and seeds are left alone


def test_members_trained_side_by_side_begin_at_perturbations_of_one_exploration():
    method = SeBayS(
        sparse(), 3, at_once=3, phase_epochs=1, perturbation=2.0, rates="linear-1", high=1e-9, low=1e-9
    )
    [block] = fitted(method, 4).blocks
    first = block.stacked["1.weight"][0]
    for other in block.stacked["1.weight"][1:]:
        assert (other - first).abs().min() > 0
    assert len(block.stacked[MASK].unique(dim=0)) == 1
    assert (block.stacked[RHO][1:] + 6).abs().max() < 0.5  # drawn anew
    assert (block.stacked[RHO][0] + 6).abs().min() > 0.5  # gone on from the exploration


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_run_costs_its_declared_epochs(at_once):
    method = SeBayS(sparse(), 4, at_once, phase_epochs=2)
    sized, epochs = method.for_budget(20)
    posterior = fitted(sized, epochs)
    assert posterior.record["member_epochs"] == pytest.approx(20)  # 12 + 4 · 2
    phases = [row["phase"] for row in posterior.record["history"]]
    assert phases.count("explore") == 12
    assert len(phases) == 12 + 8 // at_once
    assert posterior.num_components == 4


def test_the_published_lengths():
    assert SequentialBNN().for_budget(450) == (SequentialBNN(phase_epochs=100), 450)
    assert divide_epochs(450, 3, None) == (150, 100)


def test_the_published_rates():
    def at(rates, fraction, first=False):
        progress = pm.schedules.Progress(round(fraction * 100), 100, 100)
        return 0.1 * phase_schedule(rates, 0.1, 0.01, first=first)(progress)

    assert [at("stepwise", t) for t in (0, 0.49, 0.5, 0.99)] == pytest.approx([0.01, 0.01, 0.001, 0.001])
    assert [at("cosine", t) for t in (0, 0.5, 1)] == pytest.approx([0.01, 0.0055, 0.001])
    assert [at("linear-1", t) for t in (0, 0.5, 1)] == pytest.approx([0.01, 0.0055, 0.001])
    assert [at("linear-fge", t) for t in (0, 0.5, 1)] == pytest.approx([0.001, 0.01, 0.001])
    assert [at("linear-fge", t, first=True) for t in (0, 0.5, 1)] == pytest.approx([0.1, 0.01, 0.001])


def test_the_best_epoch_lies_in_the_second_half_of_a_phase():
    method = SeBayS(sparse(keep="best"), 2, phase_epochs=4)
    with pytest.raises(InputError, match="validation"):
        fitted(method, 10)
    seen, errors = [], []

    class Spy(SeBayS):
        name = "spy"

        def phases(self, problem, epochs):
            def look(state):
                seen.append({k: t.clone() for k, t in state.members.stacked.items()})

            return [replace(phase, end_epoch=look) for phase in super().phases(problem, epochs)]

    spy = Spy(sparse(keep="best"), 2, phase_epochs=4, at_once=1)
    observer = lambda epoch: errors.append(epoch.validation["error"].item())  # noqa: E731
    posterior = fitted(spy, 10, validation=data(seed=2), observer=observer)
    for member, first in ((0, 2), (1, 6)):  # two epochs of exploration, then phases of four
        window = errors[first + 2 : first + 4]
        best = first + 2 + window.index(min(window))
        for key, tensor in posterior.blocks[member].stacked.items():
            assert torch.equal(tensor, seen[best][key]), key


def test_annealing_of_the_exploration_ends_in_a_factor_that_holds():
    method = SequentialBNN(dense(annealing=pm.schedules.Pieces(((0, 0.0), (1, 0.25)))), 2, phase_epochs=1)
    factors = []

    class Spy(SequentialBNN):
        name = "spy"

        def _exploit(self, state, batches, objective):
            factors.append(state.penalty_factors.item())
            return super()._exploit(state, batches, objective)

    fitted(Spy(method.of, 2, phase_epochs=1), 3)
    assert factors == pytest.approx([0.25] * 8)


def test_fewer_draws_than_members_are_of_different_ones():
    posterior = fitted(METHODS["no freeze"], 10)
    assert [b.num_members for b in posterior.draw(2)] == [1, 1]
    assert posterior.predict(data().inputs, 2).num_members == 2


@pytest.mark.parametrize("freeze", [True, False])
def test_a_cut_run_goes_on_to_the_same_bits(freeze, tmp_path):
    method = SeBayS(sparse(), 3, phase_epochs=2, freeze=freeze)
    whole = fitted(method, 9)
    seen = []

    def stop(epoch):
        seen.append(epoch)
        if len(seen) in (2, 5, 8):
            raise KeyboardInterrupt

    for _ in range(4):
        try:
            cut = fitted(method, 9, run_dir=tmp_path / "run", resume=True, observer=stop)
        except KeyboardInterrupt:
            continue
    for first, second in zip(whole.blocks, cut.in_memory().blocks, strict=True):
        for key, tensor in first.stacked.items():
            assert torch.equal(tensor, second.stacked[key]), key


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SeBayS(num_members=0), "num_members"),
        (lambda: SeBayS(num_members=3, at_once=2), "at_once"),
        (lambda: SeBayS(dense()), "SpikeSlab"),
        (lambda: SequentialBNN(sparse()), "MeanField"),
        (lambda: SeBayS(rates="steps"), "rates"),
        (lambda: SeBayS(low=0.2), "low"),
        (lambda: SeBayS(perturbation=-1), "perturbation"),
        (lambda: SeBayS(phase_epochs=0), "phase_epochs"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_phases_that_do_not_fit_the_epochs():
    with pytest.raises(InputError, match="9 epochs are too few for an exploration"):
        fitted(SeBayS(sparse(), 3, phase_epochs=3), 9)
