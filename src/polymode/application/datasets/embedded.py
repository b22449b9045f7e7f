"""Small data sets that need no download: made from a formula, or bundled with scikit-learn.

All of them are the same on every machine and in every run.
"""

import math
from typing import Any

import torch
from torch import Tensor

from polymode.application.datasets.tables import share_of, shuffled_parts, table_split
from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, num_outputs_for
from polymode.errors import InputError, require, require_whole
from polymode.likelihoods import Likelihood

KNOWN_DIGITS = 8
TEST_SHARE = 0.2
NUM_TEST_POINTS = 1000
MOONS_CENTRE = (0.5, 0.25)
FAR_FROM_MOONS = (4.0, 6.0)
GAP_REGIONS = ((-4.0, -1.0), (1.5, 4.0))
GAP_NOISE = 0.1


def digits(num_train: int = 250, num_validation: int = 100, batch_size: int = 50) -> Task:
    """Handwritten digits 0 to 7, 8×8 pixels in [0, 1]; the digits 8 and 9 are the foreign data.

    Few are trained on, so that methods differ by more than their errors, and many are left to test on.
    """
    bundle = _sklearn_datasets().load_digits()
    images = torch.as_tensor(bundle.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(bundle.target, dtype=torch.int64)
    known = (labels < KNOWN_DIGITS).nonzero()[:, 0]
    num_test = len(known) - require_whole("num_train", num_train) - num_validation
    require(
        num_test >= 1,
        f"num_train={num_train} and num_validation={num_validation} leave nothing of {len(known)} digits to "
        "test on.",
    )
    train, validation, test = (
        known[part] for part in shuffled_parts(len(known), num_test, num_validation, seed=0)
    )
    foreign = (labels >= KNOWN_DIGITS).nonzero()[:, 0]

    def data(rows: Tensor) -> ArrayData:
        return ArrayData(images[rows], labels[rows], batch_size=batch_size)

    ready = Preprocessing(
        source="images",
        input_shift=(0.0,),
        input_scale=(1.0,),
        classes=tuple(str(digit) for digit in range(KNOWN_DIGITS)),
        image_shape=(1, 8, 8),
    )
    return Task(
        "digits",
        [Split(data(train), data(test), data(validation) if num_validation else None, ready)],
        likelihood="categorical",
        num_outputs=KNOWN_DIGITS,
        ood=data(foreign),
        model="smallcnn",
        budget=200.0,
        # Three times the usual rate: an ensemble's members have forty epochs each to converge in.
        training={"optimizer": {"lr": 3e-3}},
        model_options={"dropout": 0.0},
    )


def two_moons(num_train: int = 300, noise: float = 0.2, batch_size: int = 50) -> Task:
    """Two interleaved half circles with Gaussian noise; foreign points lie in a ring far around them."""
    require(isinstance(noise, int | float) and noise >= 0, f"noise must be a number from 0, got {noise!r}.")
    generator = torch.Generator().manual_seed(0)
    train = _moons(require_whole("num_train", num_train), noise, generator)
    test = _moons(NUM_TEST_POINTS, noise, generator)
    split = table_split(
        train, test, batch_size=batch_size, columns=("x", "y"), target="moon", classes=("upper", "lower")
    )
    nearest, farthest = FAR_FROM_MOONS
    angle = 2 * math.pi * torch.rand(NUM_TEST_POINTS, generator=generator, dtype=torch.float64)
    radius = nearest + (farthest - nearest) * torch.rand(
        NUM_TEST_POINTS, generator=generator, dtype=torch.float64
    )
    ring = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + torch.tensor(MOONS_CENTRE)
    foreign = ArrayData(
        split.preprocessing.inputs(ring), torch.zeros(len(ring), dtype=torch.int64), batch_size=batch_size
    )
    return Task("two_moons", [split], "categorical", 2, ood=foreign, model_options={"hidden": [50]})


def _moons(number: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.arange(number) % 2
    angle = math.pi * torch.rand(number, generator=generator, dtype=torch.float64)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    points = torch.where(labels[:, None] == 0, upper, lower)
    return points + noise * torch.randn(number, 2, generator=generator, dtype=torch.float64), labels


def gap_regression(num_train: int = 100, batch_size: int = 50) -> Task:
    """A curve, sin(1.5 x) + x / 4, with noise: trained on [-4, -1] and [1.5, 4], tested on [-5, 5]."""
    generator = torch.Generator().manual_seed(0)
    place = torch.rand(require_whole("num_train", num_train), generator=generator, dtype=torch.float64)
    (left, left_end), (right, right_end) = GAP_REGIONS
    place = left + place * (left_end - left + right_end - right)
    train = torch.where(place < left_end, place, place + right - left_end)
    test = torch.linspace(-5, 5, NUM_TEST_POINTS, dtype=torch.float64)
    points = [(x[:, None], _curve(x, generator)) for x in (train, test)]
    split = table_split(*points, batch_size=batch_size, columns=("x",), target="y")
    return Task("gap_regression", [split], "gaussian", num_outputs=1, model_options={"hidden": [50]})


def _curve(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(len(x), generator=generator, dtype=torch.float64)
    return torch.sin(1.5 * x) + x / 4 + GAP_NOISE * noise


def breast_cancer(batch_size: int = 50) -> Task:
    """Breast tumours (Wisconsin), malignant or benign, from 30 measurements of 569 patients."""
    return _bundled("breast_cancer", _sklearn_datasets().load_breast_cancer(), batch_size, "categorical")


def diabetes(batch_size: int = 50, likelihood: str | Likelihood = "gaussian") -> Task:
    """Progression of diabetes one year later from 10 measurements of 442 patients.

    likelihood: what the progression, a whole number, means; it is standardised as far as that allows.
    """
    return _bundled("diabetes", _sklearn_datasets().load_diabetes(), batch_size, likelihood)


def _bundled(name: str, bundle: Any, batch_size: int, likelihood: str | Likelihood) -> Task:
    inputs = torch.as_tensor(bundle.data, dtype=torch.float64)
    classes = tuple(map(str, getattr(bundle, "target_names", ())))
    targets = torch.as_tensor(bundle.target, dtype=torch.int64 if classes else torch.float64)
    train, _, test = shuffled_parts(len(inputs), share_of(len(inputs), TEST_SHARE, name), 0, seed=0)
    split = table_split(
        (inputs[train], targets[train]),
        (inputs[test], targets[test]),
        batch_size=batch_size,
        columns=tuple(map(str, bundle.feature_names)),
        target="diagnosis" if classes else "progression",
        classes=classes,
        likelihood=likelihood,
    )
    return Task(
        name,
        [split],
        likelihood=likelihood,
        num_outputs=len(classes) or num_outputs_for(likelihood, split.train),
        model_options={"hidden": [50]},
    )


def _sklearn_datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError:
        raise InputError("This data set comes with scikit-learn: pip install 'polymode[data]'.") from None
    return datasets
