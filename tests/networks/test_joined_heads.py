"""Joined heads against the same network written by hand; what they cannot be joined in is refused."""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polymode as pm
from polymode.errors import InputError
from polymode.networks.adaptations import JoinedHeads, adapt, make_adaptation
from polymode.networks.members import call_module, copied_module
from polymode.networks.surgery import prepare, tensors_of
from polymode.seeds import global_seed
from tolerances import PASS, assert_equal_up_to_rounding

HEADS = 3


def joined(module: nn.Module, first: str, last: str, heads: int = HEADS) -> nn.Module:
    return adapt(prepare(module.double()), [JoinedHeads(heads, first, last)], seed=1)


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# A first layer, the shape of an example, and the axis of a batch that examples are joined along.
FIRST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "Linear": (lambda: nn.Linear(4, 5), (4,), 1),
    "Linear of a sequence": (lambda: nn.Linear(4, 5, bias=False), (6, 4), 2),
    "Conv1d": (lambda: nn.Conv1d(4, 5, 3, padding=2, dilation=2), (4, 6), 1),
    "Conv2d": (lambda: nn.Conv2d(4, 5, 3, stride=2, bias=False), (4, 6, 5), 1),
    "Conv3d": (lambda: nn.Conv3d(4, 5, 2, padding=1, padding_mode="circular"), (4, 3, 4, 3), 1),
}


@pytest.mark.parametrize("name", FIRST)
def test_passes_against_a_wider_network_by_hand(name):
    make, shape, axis = FIRST[name]
    behind = nn.Flatten() if shape[0] == 4 else nn.Identity()
    inside = nn.Sequential(make(), behind).double()(features(1, *shape)).shape[-1]
    plain = nn.Sequential(make(), nn.Tanh(), behind, nn.Linear(inside, 2))
    module = joined(plain, "0", "3")
    first, last = copy.deepcopy(module[0]), module[3].weight
    first._forward_pre_hooks.clear()
    assert first.weight.shape[1] == HEADS * 4
    assert last.shape == (HEADS * 2, inside)

    def by_hand(slots: list[Tensor]) -> list[Tensor]:
        hidden = behind(torch.tanh(first(torch.cat(slots, axis))))
        return list(F.linear(hidden, last, module[3].bias).split(2, -1))

    x = features(7, *shape)
    filled = torch.cat([x, x[:2]])  # nine examples for three heads
    outputs = by_hand([filled[:3], filled[3:6], filled[6:]])
    assert_equal_up_to_rounding(module.train()(x), torch.cat(outputs)[:7], PASS)
    assert_equal_up_to_rounding(module(x[:1]), by_hand([x[:1]] * 3)[0], PASS)

    outputs = by_hand([x] * HEADS)
    assert_equal_up_to_rounding(module.eval()(x), torch.stack(outputs).mean(0), PASS)
    for head, expected in enumerate(outputs):
        weights = tensors_of(module) | {"3.shares": torch.eye(HEADS, dtype=torch.float64)[head]}
        assert_equal_up_to_rounding(call_module(module, weights, x), expected, PASS)


def test_layers_are_drawn_as_they_draw_themselves():
    module = joined(nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(32, 5)), "0", "2")
    with global_seed(0):
        first, last = nn.Conv2d(6, 8, 3, dtype=torch.float64), nn.Linear(32, 15, dtype=torch.float64)
    with global_seed(1):  # that of ``joined``
        first.reset_parameters()
        last.reset_parameters()
    for found, drawn in ((module[0], first), (module[2], last)):
        for name, tensor in drawn.named_parameters():
            assert torch.equal(found.get_parameter(name), tensor)
            assert found.get_parameter(name).requires_grad
    assert repr(module[0]) == "Conv2d(6, 8, kernel_size=(3, 3), stride=(1, 1))"
    assert repr(module[2]) == "Linear(in_features=32, out_features=15, bias=True)"
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_copies_deal_their_own_batches():
    """A batch that passes through a copy in the meantime is no matter of another one."""
    module = joined(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), "0", "1").train()
    other, x = copied_module(module), features(9, 4)
    expected, sizes = module(x[:8]), []

    def meanwhile(*_: object) -> None:
        sizes.append(len(other(x[:4])))

    module[0].register_forward_hook(meanwhile)
    assert torch.equal(module(x[:8]), expected)
    assert sizes == [4]


def test_it_comes_back_from_its_config():
    adaptation = JoinedHeads(3, "0", "2")
    assert make_adaptation(json.loads(json.dumps(adaptation.config()))) == adaptation
    assert adaptation.own == {"2.shares"}
    with pytest.raises(InputError, match="heads must be a whole number of at least 1, got 0"):
        JoinedHeads(0, "0", "2")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.middle.weight = self.first.weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.hidden, self.head = nn.LSTM(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)


class Several(nn.Sequential):
    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(a + scale * b)


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    return module


REFUSED = {
    "one layer": (lambda: nn.Sequential(nn.Linear(4, 2)), "'0' is also its last one"),
    "embedding": (lambda: nn.Sequential(nn.Embedding(4, 5), nn.Linear(5, 2)), "'0' is Embedding"),
    "groups": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Linear(4, 2)), "'0' is Conv1d.*groups"),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Conv1d(4, 2, 1)), "'1' is Conv1d"),
    "frozen": (frozen, "'0' is frozen"),
    "tied": (Tied, "'first' shares weights with another layer"),
    "recurrent": (Recurrent, r"'lstm' \(LSTM\) comes before 'hidden'"),
    "ends otherwise": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.PReLU(4)),
        r"'2' \(PReLU\) comes behind '1'",
    ),
    "several inputs": (lambda: Several(nn.Linear(4, 4), nn.Linear(4, 2)), r"several inputs \(a, b\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_networks_that_heads_cannot_be_joined_in_are_refused(name):
    make, reason = REFUSED[name]
    with pytest.raises(
        InputError, match=f"Heads cannot be joined in this {type(make()).__name__}: .*{reason}"
    ):
        pm.methods.MIMO().num_parameters(make())


def test_normalisation_of_the_inputs_is_no_obstacle():
    module = joined(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), "1", "3")
    x = features(6, 4)
    module.train()(x)
    # Of all examples, whatever slot they stand in.
    torch.testing.assert_close(module[0].running_mean, 0.1 * x.mean(0))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.transpose(0, 1)).mean(0))


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + x).mean(1)


@pytest.mark.parametrize(
    ("network", "reason"), [(TimeFirst, "sees 8 rows, not the 2"), (Skipping, "size of tensor")]
)
def test_a_pass_finds_the_networks_that_lose_the_examples(network, reason):
    data = pm.ArrayData(features(16, 6, 4), torch.arange(16) % 3, batch_size=8)
    with pytest.raises(
        InputError, match=rf"changed by \[JoinedHeads\(heads=3.*cannot run on a batch.*{reason}"
    ):
        pm.fit(pm.methods.MIMO(), network, data, likelihood="categorical", epochs=1, progress=False)
