"""SWA is the mean of the epochs' weights; SWAG draws have the covariance they claim."""

import math

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME
from contract.sketches import SGD, Trajectory
from polymode.errors import InputError
from polymode.networks.members import Members
from polymode.seeds import derive_generator, global_seed
from polymode.training.contract import State
from tolerances import assert_equal_up_to_rounding


def network(*, norm: bool) -> nn.Module:
    with global_seed(3):
        layers = (nn.BatchNorm1d(6),) if norm else ()
        return nn.Sequential(nn.Linear(4, 6), *layers, nn.Tanh(), nn.Linear(6, 3)).double()


def data() -> pm.ArrayData:
    return BY_NAME["mlp"].data(24, batch_size=5)


def fitted(method, module, epochs=5, **options):
    options = {"likelihood": "categorical", "progress": False, "backend": "loop"} | options
    return pm.fit(method, module, data(), epochs=epochs, **options)


def rows(posterior):
    return [block.member(i) for block in posterior.draw() for i in range(block.num_members)]


SINGLE = pm.methods.Single(optimizer=SGD)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_swa_is_the_mean_over_the_last_epochs(norm):
    module = network(norm=norm)
    [averaged] = rows(fitted(pm.methods.SWA(SINGLE, start=2), module))
    walked = rows(fitted(Trajectory(), module))  # the weights at the end of each epoch of the same training
    for name in dict(module.named_parameters()):
        expected = torch.stack([weights[name] for weights in walked[2:]]).mean(0)
        torch.testing.assert_close(averaged[name], expected, rtol=1e-12, atol=1e-14)


def statistics_by_hand(weights, epoch):
    """Mean and unbiased variance of the inputs of BatchNorm over batches, each by its size."""
    examples = data()
    order = torch.randperm(24, generator=derive_generator(0, "order", 0, epoch, 24)).split(5)
    hidden = [examples.inputs[part] @ weights["0.weight"].T + weights["0.bias"] for part in order]
    sizes = torch.tensor([len(part) for part in order], dtype=torch.float64)[:, None] / 24
    means, variances = torch.stack([h.mean(0) for h in hidden]), torch.stack([h.var(0) for h in hidden])
    return (sizes * means).sum(0), (sizes * variances).sum(0)


def test_running_statistics_are_those_of_the_average():
    [averaged] = rows(fitted(pm.methods.SWA(SINGLE, start=2), network(norm=True)))
    mean, variance = statistics_by_hand(averaged, 5)
    torch.testing.assert_close(averaged["1.running_mean"], mean)
    torch.testing.assert_close(averaged["1.running_var"], variance)


def test_a_layer_that_is_never_called_has_no_statistics_to_estimate():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.spare = network(norm=True), nn.BatchNorm1d(3).double()

        def forward(self, x):
            return self.body(x)

    [averaged] = rows(fitted(pm.methods.SWA(SINGLE, start=2), Spare()))
    [expected] = rows(fitted(pm.methods.SWA(SINGLE, start=2), network(norm=True)))
    for name, tensor in expected.items():
        torch.testing.assert_close(averaged[f"body.{name}"], tensor)


def test_every_draw_of_swag_has_statistics_of_its_own():
    method = pm.methods.SWAG(SINGLE, start=1, num_draws=3, rank=4)
    posterior = fitted(method, network(norm=True))
    drawn = rows(posterior)
    assert len(drawn) == 3
    for number, weights in enumerate(drawn):
        mean, variance = statistics_by_hand(weights, 5 + number)
        torch.testing.assert_close(weights["1.running_mean"], mean)
        torch.testing.assert_close(weights["1.running_var"], variance)
    assert not torch.allclose(drawn[0]["1.running_mean"], drawn[1]["1.running_mean"])
    assert posterior.record["member_epochs"] == 5  # forward passes are not counted


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_averaging_a_late_phase_of_one_member_is_averaging_the_network(norm):
    late = pm.methods.LatePhase(1, 2, "all", head=False, carry_moments=True, optimizer=SGD)
    [got] = rows(fitted(pm.methods.SWA(late, start=3), network(norm=norm)))
    [expected] = rows(fitted(pm.methods.SWA(SINGLE, start=3), network(norm=norm)))
    assert_equal_up_to_rounding(got, expected)


def test_members_of_a_late_phase_are_averaged_each_by_itself():
    late = pm.methods.LatePhase(2, 1, noise=0.2, optimizer=SGD, keep_members=True)
    epochs = [rows(fitted(late, network(norm=True), epochs=n)) for n in (3, 4, 5)]
    members = rows(fitted(pm.methods.SWA(late, start=2), network(norm=True)))
    for k, weights in enumerate(members):
        for name in ("0.weight", "1.weight", "3.bias"):
            expected = torch.stack([of_epoch[k][name] for of_epoch in epochs]).mean(0)
            torch.testing.assert_close(weights[name], expected, rtol=1e-10, atol=1e-12)
        mean, _ = statistics_by_hand(weights, 5)
        torch.testing.assert_close(weights["1.running_mean"], mean)


# --- covariance -----------------------------------------------------------------------------------


def collected(weights: torch.Tensor, rank: int) -> tuple[pm.methods.SWAG, State]:
    """A state after epochs with weights [epochs, 5]: three numbers in one layer, two in another."""
    method = pm.methods.SWAG(rank=rank, start=0)
    first = Members({"a": weights[:1, :3].clone(), "b": weights[:1, 3:].clone()})
    state = State(first, generators=[torch.Generator().manual_seed(0)])
    each = {name: tensor[:, None] for name, tensor in first.stacked.items()}
    state.common["averaging"] = {
        "mean": {name: torch.zeros_like(tensor) for name, tensor in each.items()},
        "spread": {name: torch.zeros_like(tensor) for name, tensor in each.items()},
        "deviations": {name: t.new_zeros(1, rank, *t.shape[1:]) for name, t in each.items()},
    }
    for number, row in enumerate(weights, 1):
        state.members.stacked["a"].copy_(row[None, :3])
        state.members.stacked["b"].copy_(row[None, 3:])
        method._collect(state, number)
    return method, state


def draws(method, state, epochs, number):
    found = torch.empty(number, 5, dtype=torch.float64)
    for row in found:
        method.draw(state, epochs)
        row.copy_(torch.cat([state.members.stacked["a"][0], state.members.stacked["b"][0]]))
    return found


@pytest.mark.parametrize(("epochs", "rank"), [(6, 6), (9, 4), (3, 8)])
def test_draws_have_the_covariance_that_is_claimed(epochs, rank):
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    weights = torch.randn(epochs, 5, generator=generator, dtype=torch.float64) @ mixing + 2
    method, state = collected(weights, rank)

    running = torch.stack([weights[: n + 1].mean(0) for n in range(epochs)])
    deviations = (weights - running)[-rank:]
    diagonal = weights.var(0, correction=0)
    claimed = 0.5 * (diagonal.diag() + deviations.T @ deviations / (len(deviations) - 1))

    number = 4000
    found = draws(method, state, epochs, number)
    error = ((claimed.diag()[:, None] * claimed.diag() + claimed.square()) / number).sqrt()
    assert ((found.T.cov() - claimed).abs() < 5 * error).all()
    assert ((found.mean(0) - weights.mean(0)).abs() < 5 * (claimed.diag() / number).sqrt()).all()
    across = claimed[:3, 3:]
    assert (across.abs() > 10 * error[:3, 3:]).any()  # layers do vary together


def test_layers_that_move_together_are_drawn_together():
    """Against the empirical covariance of what was collected, where both layers are one line's numbers."""
    generator = torch.Generator().manual_seed(2)
    along = torch.randn(400, 1, generator=generator, dtype=torch.float64)
    direction = torch.tensor([[1.0, -2.0, 0.5, -1.0, 3.0]], dtype=torch.float64)
    weights = along @ direction
    method, state = collected(weights, rank=400)
    found, empirical = draws(method, state, 400, 4000).T.cov(), weights.T.cov()
    # Half from the diagonal and half from the deviations: the variances are the empirical ones, covariances
    # half of them. Deviations are from the running mean, which changes them by (log n)/n, 1.5 % here.
    tolerance = 5 * (empirical.diag()[:, None] * empirical.diag() / 4000).sqrt() + 0.02 * empirical.abs()
    halved = 0.5 * (empirical + empirical.diag().diag())
    assert ((found - halved).abs() < tolerance).all()


def test_a_diagonal_alone_has_no_covariance_across_weights():
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(8, 1, generator=generator, dtype=torch.float64).expand(8, 5).clone()
    _, state = collected(weights, rank=2)
    del state.common["averaging"]["deviations"]
    found = draws(pm.methods.SWAG(rank=0, scale=1.0), state, 8, 4000)
    correlation = found.T.corrcoef() - torch.eye(5)
    assert correlation.abs().max() < 5 / math.sqrt(4000)
    torch.testing.assert_close(found.var(0), weights.var(0, correction=0), rtol=0.12, atol=0)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pm.methods.SWA(pm.methods.HMC()), "swa averages weights over epochs, and what hmc leaves"),
        (lambda: pm.methods.SWA(pm.methods.Single), "of must be an instance of a method"),
        (lambda: pm.methods.SWA(start=-2), "start must be a number of epochs"),
        (lambda: pm.methods.SWAG(rank=1), "rank must be 0 or at least 2"),
        (lambda: pm.methods.SWAG(num_draws=0), "num_draws must be a whole number"),
        (lambda: pm.methods.SWAG(scale=0), "scale must be a positive number"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (pm.methods.SWA(SINGLE, start=5), "start=5 is not before the end of 5 epochs"),
        (pm.methods.SWAG(SINGLE, start=4), "swag needs 2 or more epochs to average, start=4 leaves 1"),
        (
            pm.methods.SWA(pm.methods.LatePhase(2, 3), start=2),
            "begins to average after 2 epochs, but the last phase of late_phase.*only after 3",
        ),
        (pm.methods.SWA(pm.methods.Single(keep="best"), start=2), "keep='best' of single chooses one epoch"),
    ],
)
def test_bad_input_is_found_before_training(method, message):
    with pytest.raises(InputError, match=message):
        fitted(method, network(norm=False), validation=data())
