"""Trainings that end when no member improves any more, and rates of a likelihood's own."""

import math

import pytest
import torch

import polymode as pm
from polymode.errors import InputError
from polymode.likelihoods import LearnedGaussian
from polymode.methods import Anchored, DeepEnsemble, LatePhase, SequentialAnchored, Single
from polymode.samplers import GuidedWalk
from polymode.training.contract import KeepBest, MemberOptimizer, Optimizer


def data_of(number, seed, noise=0.5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 3, generator=generator)
    return pm.ArrayData(x, x[:, 0] + noise * torch.randn(number, generator=generator), batch_size=16)


TRAIN, HELD_OUT = data_of(48, 0), data_of(40, 1)


def fitted(method, epochs=60, train=TRAIN, **options):
    return pm.fit(
        method,
        lambda: pm.models.MLP(3, 1, (30,)),
        train,
        likelihood="gaussian",
        epochs=epochs,
        validation=options.pop("validation", HELD_OUT),
        progress=False,
        backend="vmap",
        threads=1,
        **options,
    )


def curves_of(method, epochs=60, **options):
    """Validation NLLs of every member after every epoch, [epochs, M], and the posterior."""
    seen = []
    posterior = fitted(method, epochs, observer=seen.append, **options)
    return torch.stack([epoch.validation["nll"] for epoch in seen]), posterior, seen


FAST = {"optimizer": Optimizer("Adam", lr=0.02)}


def test_a_run_ends_when_no_member_has_improved_for_so_long():
    curves, posterior, seen = curves_of(DeepEnsemble(3, Single(keep=KeepBest(patience=5), **FAST)))
    # By hand: the run goes on until every member has gone five epochs without a better score.
    since, best = torch.zeros(3), torch.full((3,), math.inf)
    stops = None
    for number, row in enumerate(curves, 1):
        going = since < 5
        better = going & (row < best)
        best = torch.where(better, row, best)
        since = torch.where(better, 0.0, torch.where(going, since + 1, since))
        if bool((since >= 5).all()):
            stops = number
            break
    assert stops == len(curves) < 60
    assert [epoch.stopped for epoch in seen] == [False] * (len(curves) - 1) + [True]
    assert posterior.record["member_epochs"] == pytest.approx(3 * len(curves))
    kept = torch.stack(
        [
            -posterior_of(posterior, member).log_prob(HELD_OUT.inputs, HELD_OUT.targets).mean()
            for member in range(3)
        ]
    )
    assert torch.allclose(kept.float(), best, atol=1e-4)


def posterior_of(posterior, member):
    from dataclasses import replace

    [block] = posterior.draw()
    return replace(posterior, blocks=[block.between(member, member + 1)])


def test_a_member_becomes_the_same_whoever_trains_beside_it():
    """Up to rounding: another one that goes on for longer must not give it a later epoch."""
    rule = Single(keep=KeepBest(patience=4), **FAST)
    alone, many = fitted(DeepEnsemble(1, rule)), fitted(DeepEnsemble(6, rule))
    assert many.record["member_epochs"] / 6 > alone.record["member_epochs"]  # the others did go on
    [one], [six] = alone.draw(), many.draw()
    for name, tensor in one.stacked.items():
        assert torch.allclose(tensor[0], six.stacked[name][0], atol=1e-4)


def test_patience_may_be_a_fraction_and_does_nothing_in_a_phase_that_is_shorter():
    curves, _, _ = curves_of(Single(keep=KeepBest(patience=0.1), **FAST), epochs=50)
    exact, _, _ = curves_of(Single(keep=KeepBest(patience=5), **FAST), epochs=50)
    assert torch.equal(curves, exact)
    whole, _, _ = curves_of(Single(keep=KeepBest(patience=50), **FAST), epochs=20)
    assert len(whole) == 20


@pytest.mark.parametrize(
    "method",
    [
        Single(keep=KeepBest(patience=4), **FAST),
        LatePhase(3, start=0.5, keep=KeepBest(patience=4), **FAST),
        SequentialAnchored(
            2, walk=GuidedWalk(3.0), first_epochs=40, short_epochs=3, keep=KeepBest(patience=4), **FAST
        ),
    ],
    ids=lambda method: method.name,
)
def test_a_run_that_was_cut_ends_with_the_same_bits(method, tmp_path):
    class Cut(Exception):
        pass

    seen = []

    def cut(epoch):
        seen.append(epoch)
        if len(seen) == 9:
            raise Cut

    whole = fitted(method, run_dir=tmp_path / "whole")
    with pytest.raises(Cut):
        fitted(method, run_dir=tmp_path / "cut", observer=cut)
    again = fitted(method, run_dir=tmp_path / "cut", resume=True)
    assert again.record["member_epochs"] == whole.record["member_epochs"]
    for one, other in zip(whole.draw(), again.draw(), strict=True):
        for name in one.stacked:
            assert torch.equal(one.stacked[name], other.stacked[name])


def test_a_late_phase_begins_at_the_best_epoch_before_it():
    """With σ₀ = 0 and no step of its own, the late phase keeps the network of the best early epoch."""
    still = Optimizer("SGD", lr=1e-12)
    method = LatePhase(2, start=30, keep="best", late_optimizer=still, base_scale=0.0, **FAST)
    curves, posterior, _ = curves_of(method, epochs=31)
    early = curves[:30].mean(1)
    found = -posterior.log_prob(HELD_OUT.inputs, HELD_OUT.targets).mean()
    assert float(found) == pytest.approx(early.min().item(), abs=1e-4)
    assert early.argmin() < 29  # it is not the last one


def test_shared_weights_are_kept_together():
    curves, posterior, _ = curves_of(pm.methods.BatchEnsemble(3, keep=KeepBest(patience=6), **FAST))
    means = curves.mean(1)
    found = torch.stack(
        [
            -torch.vmap(posterior.network.likelihood.log_prob, in_dims=(0, None))(
                next(posterior.outputs(HELD_OUT.inputs))[1], HELD_OUT.targets
            ).mean(1)
        ]
    )
    assert found.mean().item() == pytest.approx(means.min().item(), abs=1e-4)


def test_anchored_members_stop_by_themselves():
    curves, posterior, _ = curves_of(Anchored(3, keep=KeepBest(patience=3), **FAST), epochs=80)
    assert posterior.num_members == 3
    assert len(curves) < 80


@pytest.mark.parametrize("patience", [0, -1, 1.5, "long"])
def test_patience_is_a_number_of_epochs_or_a_fraction(patience):
    with pytest.raises(InputError, match="patience"):
        KeepBest(patience=patience)


# --- rates --------------------------------------------------------------------------------------------


def test_a_noise_level_learns_at_its_own_rate_and_does_not_decay():
    """Against torch's own optimiser with two groups, step by step."""
    tensors = {"weight": torch.randn(2, 4), "noise": torch.randn(2)}
    ours = {name: tensor.clone() for name, tensor in tensors.items()}
    spec = Optimizer("AdamW", lr=0.1, weight_decay=0.3)
    optimizer = MemberOptimizer(spec, ours, frozenset(), [slice(0, 2)], rates={"noise": 5.0})
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    by_hand = torch.optim.AdamW(
        [{"params": [theirs["weight"]]}, {"params": [theirs["noise"]], "lr": 0.5, "weight_decay": 0.0}],
        lr=0.1,
        weight_decay=0.3,
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        factor = 1 - step / 10
        optimizer.set_rates([factor])
        for group, rate in zip(by_hand.param_groups, (0.1, 0.5), strict=True):
            group["lr"] = rate * factor
        optimizer.step(gradients)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        by_hand.step()
    for name, parameter in theirs.items():
        assert torch.allclose(ours[name], parameter.detach(), atol=1e-6)
    assert optimizer.rates.tolist() == pytest.approx([0.06, 0.06])


def test_a_fast_noise_level_reaches_the_residuals_first():
    def noise(rate):
        posterior = pm.fit(
            Single(optimizer=Optimizer("Adam", lr=1e-3)),
            lambda: pm.models.MLP(3, 1, (10,)),
            data_of(400, 2, noise=0.05),
            likelihood=LearnedGaussian(noise_rate=rate),
            epochs=20,
            progress=False,
        )
        return posterior.predict(torch.zeros(1, 3)).noise_variance.sqrt().item()

    assert noise(10.0) < 0.9 * noise(1.0)
