import pytest
from torch import nn

from polymode.errors import InputError
from polymode.networks.selection import select_layers


def network() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.BatchNorm2d(8, affine=False))
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
        nn.ModuleDict({"deep": nn.Sequential(block, nn.LSTM(4, 4))}),
        nn.Embedding(5, 4),
        nn.LayerNorm(4),
        nn.Conv1d(4, 4, 1),
        nn.Conv3d(1, 1, 1),
        nn.Linear(4, 2),
    )


NORMS = ["0.1", "1.deep.0.1", "3"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("norm", NORMS),
        ("input", ["0.0"]),
        (("output", "norm"), [*NORMS, "6"]),
        ("Conv2d", ["0.0", "1.deep.0.0"]),
        ("1.*", ["1.deep.0.0", "1.deep.0.1"]),
        (("Embedding", "Conv1d", "Conv3d"), ["2", "4", "5"]),
        ("all", ["0.0", "0.1", "1.deep.0.0", "1.deep.0.1", "2", "3", "4", "5", "6"]),
    ],
)
def test_layers_of_any_depth_by_kind_type_and_pattern(where, expected):
    assert select_layers(network(), where) == expected


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hed", r"Unknown layer, type or pattern in where 'hed'.*0\.0.*LayerNorm"),
        ("LSTM", "The layer '1.deep.1' is a LSTM and has no weights that could be exchanged one to one"),
        ("1.deep.0.2", "is a BatchNorm2d and has no weights"),
        ("0", r"say '0\.\*'"),
        ((), "name layers by kind"),
        (("norm", 3), "name layers by kind"),
    ],
)
def test_what_selects_nothing_is_named_with_the_candidates(where, words):
    with pytest.raises(InputError, match=words):
        select_layers(network(), where)


def test_a_kind_that_is_missing_is_passed_over_beside_another():
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert select_layers(plain, ("norm", "output")) == ["2"]
    with pytest.raises(InputError, match=r"selects no layer.*0 \(Linear\), 2 \(Linear\)"):
        select_layers(plain, "norm")
    assert select_layers(nn.Linear(2, 2), "all") == [""]
