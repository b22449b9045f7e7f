"""What is timed: jobs with their sizes, the data that all contenders see, and what a contender gives back.

Only NumPy is imported: the environments of some contenders have no PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 20, 50, 10  # of the MLPs
DROPOUT = 0.1
NOISE_STD, PRIOR_STD = 1.0, 1.0  # of targets and weights, where a posterior is asked for
FRICTION, RATE = 0.9, 1e-3  # of stochastic-gradient samplers
CNN_RATE, CNN_MOMENTUM = 0.01, 0.9

HMC_PRIOR_STD = 0.4472  # momenta are in units of it
HMC_STEP = 0.005  # in units of HMC_PRIOR_STD

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """How much of a job there is; each kind of job reads its own."""

    members: int = 1  # or chains
    rows: int = 10_000
    batch_size: int = 100
    epochs: int = 5
    draws: int = 100
    points: int = 1000
    calls: int = 50  # predictions that are timed together
    kernel: str = "sghmc"
    transitions: int = 20
    leaps: int = 50

    @property
    def steps(self) -> int:
        return self.epochs * -(-self.rows // self.batch_size)


@dataclass(frozen=True)
class Job:
    """kind: the function of a contender's module that does it. work: how much of what, to show rates."""

    title: str
    kind: str
    sizes: Sizes
    quick: Sizes
    work: Callable[[Sizes], tuple[int, str]] | None = None


@dataclass(frozen=True)
class Timed:
    """What a contender offers: a call to time, which may report facts, and what goes before it.

    warm_up: None means one call of ``run``. compilation: seconds that compiling took, where it stands apart.
    """

    run: Callable[[], dict[str, Any] | None]
    warm_up: Callable[[], object] | None = None
    compilation: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def _steps(sizes: Sizes) -> tuple[int, str]:
    return sizes.members * sizes.steps, "steps"


def _predictions(sizes: Sizes) -> tuple[int, str]:
    return sizes.calls, "predictions"


def _gradients(sizes: Sizes) -> tuple[int, str]:
    return sizes.members * (1 + sizes.transitions * sizes.leaps), "gradients"


QUICK = Sizes(rows=200, epochs=1)
JOBS = {
    "mlp10": Job(
        "K=10 MLPs (20-50-1, batch 100, 10,000 rows), 5 epochs",
        "ensemble",
        Sizes(members=10),
        replace(QUICK, members=3),
        _steps,
    ),
    "mlp10_long": Job(
        "K=10 such MLPs, 100 epochs",
        "ensemble",
        Sizes(members=10, epochs=100),
        replace(QUICK, members=3, epochs=2),
        _steps,
    ),
    "mlp50": Job(
        "K=50 such MLPs, 2 epochs", "ensemble", Sizes(50, epochs=2), replace(QUICK, members=5), _steps
    ),
    "cnn5": Job(
        "K=5 SmallCNNs, 4,096 images, batch 128, 1 epoch",
        "cnn_ensemble",
        Sizes(members=5, rows=4096, batch_size=128, epochs=1),
        Sizes(members=2, rows=64, batch_size=32, epochs=1),
        _steps,
    ),
    "batch_ensemble": Job(
        "BatchEnsemble of 4 such MLPs, 5 epochs",
        "batch_ensemble",
        Sizes(members=4),
        replace(QUICK, members=4),
    ),
    "dropout_training": Job(
        "MC dropout (rate 0.1), training of one MLP, 5 epochs", "dropout_training", Sizes(), QUICK
    ),
    "dropout_prediction": Job(
        "MC dropout, 100 passes over 1,000 points",
        "dropout_prediction",
        Sizes(rows=1000, epochs=1, calls=20),
        replace(QUICK, draws=10, points=20, calls=2),
        _predictions,
    ),
    "swag": Job(
        "SWAG of one MLP: 10 epochs, 5 of them collected, 30 draws",
        "swag",
        Sizes(epochs=10, draws=30),
        replace(QUICK, epochs=4, draws=3),
    ),
    "mean_field": Job(
        "mean-field Gaussian of one MLP (Bayes by backprop), 5 epochs",
        "mean_field",
        Sizes(),
        QUICK,
        _steps,
    ),
}
JOBS |= {
    f"predict{points}": Job(
        f"prediction with S=100 MLPs (20-50-10), {points:,} point{'s' if points > 1 else ''}",
        "prediction",
        Sizes(members=100, rows=1000, epochs=1, points=points),
        replace(QUICK, members=5, points=min(points, 20), calls=2),
        _predictions,
    )
    for points in (1, 10, 100, 1000)
}
JOBS |= {
    f"hmc{chains}": Job(
        f"HMC of an MLP (8-50-2), 512 rows, {chains} chains × 20 trajectories of 50 leaps",
        "hmc",
        Sizes(members=chains),
        Sizes(members=min(chains, 4), transitions=2, leaps=5),
        _gradients,
    )
    for chains in (3, 16)
}
JOBS |= {
    name: Job(
        f"{kernel.upper()} of such MLPs, {chains} chain{'s' if chains > 1 else ''}, 5 epochs",
        "sgmcmc",
        Sizes(members=chains, kernel=kernel),
        replace(QUICK, members=min(chains, 3), kernel=kernel, epochs=2),
        _steps,
    )
    for name, kernel, chains in (("sgld", "sgld", 1), ("sghmc", "sghmc", 1), ("sghmc10", "sghmc", 10))
}


# --- data ----------------------------------------------------------------------------------------------


def regression(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((num_rows, NUM_INPUTS), dtype=np.float32)
    return x, random.standard_normal((num_rows, 1), dtype=np.float32)


def classification(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((num_rows, NUM_INPUTS), dtype=np.float32)
    return x, random.integers(NUM_CLASSES, size=num_rows)


def images(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((num_rows, 3, 32, 32), dtype=np.float32)
    return x, random.integers(NUM_CLASSES, size=num_rows)


def hmc_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((512, 8), dtype=np.float32)
    return x, random.standard_normal((512, 1), dtype=np.float32)


def hmc_weights(seed: int) -> Weights:
    """As ``nn.Linear`` draws them, under the names they have in the MLP of ``networks``."""
    random, found = np.random.default_rng(seed), {}
    for layer, fan_in, width in ((0, 8, 50), (2, 50, 2)):
        for name, shape in (("weight", (width, fan_in)), ("bias", (width,))):
            drawn = random.uniform(-1, 1, shape) / np.sqrt(fan_in)
            found[f"{layer}.{name}"] = drawn.astype(np.float32)
    return found
