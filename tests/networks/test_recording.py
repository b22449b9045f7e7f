"""Recordings give what the function gives, or are not made."""

from dataclasses import replace

import torch
from torch import nn

import polymode as pm
from polymode.networks.recording import record
from polymode.training.contract import recordings as recordings_module
from tolerances import PASS, assert_equal_up_to_rounding


def test_a_recording_replays_gradients_at_other_values():
    def evaluate(weights, x):
        leaf = weights["w"].detach().requires_grad_()
        loss = torch.vmap(lambda w: (x @ w).tanh().square().sum())(leaf)
        return loss.detach(), {"w": torch.autograd.grad(loss.sum(), leaf)[0]}

    generator = torch.Generator().manual_seed(0)
    first, second = (
        ({"w": torch.randn(3, 4, generator=generator)}, torch.randn(5, 4, generator=generator))
        for _ in range(2)
    )
    recording = record(evaluate, first)
    assert recording is not None
    for arguments in (first, second):
        replay = recording.bind(*arguments)
        for _ in range(2):  # with the values that the tensors have by then
            losses, gradients = replay()
            expected, expected_gradients = evaluate(*arguments)
            assert_equal_up_to_rounding(losses, expected, PASS)
            assert_equal_up_to_rounding(gradients, expected_gradients, PASS)
            arguments[0]["w"].mul_(1.5)


def test_what_depends_on_values_is_not_recorded():
    def branching(x):
        return x * 2 if x.sum().item() > 0 else x

    assert record(branching, (torch.ones(3),)) is None

    calls = []

    def changing(x):
        calls.append(0)
        return x * len(calls)  # never twice the same: a recording would be wrong

    assert record(changing, (torch.ones(3),)) is None


def test_rounding_does_not_decide_whether_there_is_a_recording():
    calls = []

    def rounding(x):
        calls.append(0)
        return x * (1 + len(calls) * torch.finfo(torch.float64).eps)

    assert record(rounding, (torch.ones(3, dtype=torch.float64),)) is not None
    assert len(calls) == 2


def test_hmc_replays_and_ends_with_the_same_weights(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    data = pm.ArrayData(x, x[:, 0].sin(), batch_size=20)
    replays = []

    def fitted():
        return pm.fit(
            pm.methods.HMC(3, 0.7, num_samples=4, descent=0),
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
            data,
            likelihood=pm.likelihoods.FixedGaussian(std=0.3),
            epochs=60,
            progress=False,
            backend="vmap",
        )

    def counting(function, arguments):
        recording = record(function, arguments)
        assert recording is not None

        def program(*tensors):
            replays.append(0)
            return recording.program(*tensors)

        return replace(recording, program=program)

    monkeypatch.setattr(recordings_module, "record", counting)
    [recorded] = fitted().draw()
    assert len(replays) >= 60
    monkeypatch.setattr(recordings_module, "record", lambda function, arguments: None)
    [direct] = fitted().draw()
    assert_equal_up_to_rounding(recorded.stacked, direct.stacked)
