"""Networks of every kind that members are made of, with data that fits them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polymode as pm
from polymode.likelihoods import Likelihood

# For tests whose chains are meant to be drawn anew from a module; that it is said has a test of its own.
redrawn = pytest.mark.filterwarnings("ignore:.*trains several chains of one module")


@dataclass(frozen=True)
class NetworkCase:
    """A factory, inputs and targets for a number of examples, and the likelihood."""

    name: str
    factory: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    targets: Callable[[int], Tensor]
    likelihood: Likelihood
    vectorises: bool = True

    def data(self, num_examples: int = 24, batch_size: int = 8, seed: int = 0) -> pm.ArrayData:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inputs, targets = self.inputs(num_examples), self.targets(num_examples)
        return pm.ArrayData(inputs, targets, batch_size=batch_size)

    def double_factory(self) -> nn.Module:
        return self.factory().double()


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def labels(num_classes: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(num_classes, (n, *shape))


class LastState(nn.Module):
    """An LSTM read at its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TiedTokens(nn.Module):
    """A language model whose embedding is also its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.output = nn.Linear(6, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.mix(self.embedding(tokens))))


class TransformerBlock(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(a) + self.second(b)))


class NamedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.body(x))
        return {"features": features, "logits": self.head(features)}


class FunctionalDropout(nn.Module):
    """Draws from the global random state by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(torch.relu(self.body(x)), 0.3, self.training))


class DataDependent(nn.Module):
    """Branches on a value, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return out * 2 if out.sum().item() > 0 else out


class RandomFeatures(nn.Module):
    """A frozen random layer and a constant buffer: the first is a member's own, the second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(4, 8)
        self.features.requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cos(self.features(x)) * self.scale)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


CATEGORICAL = pm.likelihoods.Categorical()

NETWORKS = [
    NetworkCase("mlp", lambda: pm.models.MLP(4, 3, (6,)), numbers(4), labels(3), CATEGORICAL),
    NetworkCase(
        "batch_norm",
        lambda: pm.models.MLP(4, 3, (6,), batch_norm=True),
        numbers(4),
        labels(3),
        CATEGORICAL,
    ),
    NetworkCase(
        "layer_norm",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)),
        numbers(4),
        labels(3),
        CATEGORICAL,
    ),
    NetworkCase(
        "dropout",
        lambda: pm.models.MLP(4, 3, (8,), dropout=0.3),
        numbers(4),
        labels(3),
        CATEGORICAL,
    ),
    NetworkCase(
        "batch_norm_and_dropout",
        lambda: pm.models.MLP(4, 3, (6,), batch_norm=True, dropout=0.2),
        numbers(4),
        labels(3),
        CATEGORICAL,
    ),
    NetworkCase("convolution", conv_net, numbers(2, 6, 6), labels(3), CATEGORICAL),
    NetworkCase("lstm", LastState, numbers(4, 3), labels(3), CATEGORICAL, vectorises=False),
    NetworkCase("transformer", TransformerBlock, numbers(5, 8), labels(3), CATEGORICAL),
    NetworkCase("tied_tokens", TiedTokens, labels(7, 5), labels(7, 5), CATEGORICAL),
    NetworkCase(
        "two_inputs",
        TwoInputs,
        lambda n: (numbers(3)(n), numbers(2)(n)),
        labels(3),
        CATEGORICAL,
    ),
    NetworkCase(
        "keyword_inputs",
        TwoInputs,
        lambda n: {"a": numbers(3)(n), "b": numbers(2)(n)},
        labels(3),
        CATEGORICAL,
    ),
    NetworkCase(
        "named_outputs",
        NamedOutputs,
        numbers(4),
        labels(3),
        pm.likelihoods.Categorical(output="logits"),
    ),
    NetworkCase("random_features", RandomFeatures, numbers(4), labels(3), CATEGORICAL),
    NetworkCase(
        "functional_dropout", FunctionalDropout, numbers(4), labels(3), CATEGORICAL, vectorises=False
    ),
    NetworkCase("data_dependent", DataDependent, numbers(4), labels(3), CATEGORICAL, vectorises=False),
    NetworkCase(
        "multi_label",
        lambda: pm.models.MLP(4, 3, (6,)),
        numbers(4),
        lambda n: torch.randint(2, (n, 3)).double(),
        pm.likelihoods.Bernoulli(),
    ),
    NetworkCase(
        "fixed_noise",
        lambda: pm.models.MLP(4, 1, (6,)),
        numbers(4),
        numbers(),
        pm.likelihoods.FixedGaussian(std=0.7),
    ),
    NetworkCase(
        "learned_noise",
        lambda: pm.models.MLP(4, 2, (6,)),
        numbers(4),
        numbers(2),
        pm.likelihoods.LearnedGaussian(),
    ),
    NetworkCase(
        "input_dependent_noise",
        lambda: pm.models.MLP(4, 2, (6,)),
        numbers(4),
        numbers(1),
        pm.likelihoods.HeteroscedasticGaussian(),
    ),
    NetworkCase(
        "counts",
        lambda: pm.models.MLP(4, 2, (6,)),
        numbers(4),
        lambda n: torch.randint(6, (n, 2)),
        pm.likelihoods.Poisson(),
    ),
    NetworkCase(
        "heavy_tails",
        lambda: pm.models.MLP(4, 1, (6,)),
        numbers(4),
        numbers(),
        pm.likelihoods.StudentT(degrees=5),
    ),
]
BY_NAME = {case.name: case for case in NETWORKS}
