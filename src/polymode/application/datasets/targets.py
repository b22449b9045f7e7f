"""Targets of a table: classes or numbers, on which scale, and with which noise."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.data.encoding import LARGEST, as_numbers, as_texts, number_of, pandas
from polymode.errors import InputError, require, unknown_name
from polymode.likelihoods import (
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    LearnedGaussian,
    Likelihood,
    StudentT,
    make_likelihood,
)

TASK_KINDS = ("classification", "regression")
SCALES = ("auto", "linear", "log")
# Integers with more values than this are quantities, not labels, unless the user says otherwise.
MOST_INTEGER_CLASSES = 20
# Nats a row by which a logarithmic scale must describe the targets better to be taken.
LOG_GAIN = 0.1


def kind_of_task(task: str | None, likelihood: str | Likelihood | None) -> str | None:
    """The kind of task that was asked for, by its name or by a likelihood; None where neither was."""
    if likelihood is None:
        return task
    made = make_likelihood(likelihood)
    meant = {"labels": "classification", "numbers": "regression"}[made.reads]
    require(
        task is None or task == meant,
        f"task={task!r}, but the likelihood {made.kind!r} is of a {meant}: leave one of them out.",
    )
    return meant


def plain_values(column: Any, task: str | None) -> np.ndarray:
    """Values of a target column without gaps; numbers written as text are numbers."""
    types = pandas().api.types
    is_category = isinstance(column.dtype, pandas().CategoricalDtype)
    if types.is_bool_dtype(column.dtype):
        return column.to_numpy(dtype=np.bool_)
    if types.is_timedelta64_dtype(column.dtype):
        return as_numbers(column, str(column.name))
    if types.is_integer_dtype(column.dtype):
        values = column.to_numpy()
        return column.to_numpy(dtype=np.float64 if values.max() >= 2**63 else np.int64)
    if types.is_float_dtype(column.dtype):
        values = column.to_numpy(dtype=np.float64)
        # Whole numbers beside gaps are read as floating point.
        whole = (
            np.isfinite(values).all() and (values == np.round(values)).all() and np.abs(values).max() < 2**53
        )
        return values.astype(np.int64) if whole else values
    texts, _ = as_texts(column)
    if task == "regression" or (task is None and not is_category):  # categories of pandas are classes
        numbers = [number_of(text) for text in dict.fromkeys(texts.tolist())]
        if all(number is not None for number in numbers):
            return plain_values(pandas().Series(as_numbers(column, str(column.name))), task)
        if task is None:
            _check_no_stray_text(column, texts)
    return texts


def _check_no_stray_text(column: Any, texts: np.ndarray) -> None:
    """Raise for a column of numbers, too many for classes, of which some cells are text."""
    is_text = np.array([number_of(text) is None for text in texts.tolist()], dtype=bool)
    different = len(set(texts[~is_text].tolist()))
    if different > MOST_INTEGER_CLASSES and is_text.mean() < 0.5:
        place = int(is_text.argmax())
        raise InputError(
            f"{int(is_text.sum())} of {len(texts)} values of the target {str(column.name)!r} are no numbers, "
            f"the first is {str(texts[place])!r} in row {int(column.index[place]) + 1}. Correct or empty "
            "those cells, or say data.task=classification."
        )


def is_classification(raw: np.ndarray, task: str | None, what: str) -> bool:
    """Whether targets are classes: as was said, or text, truth values and integers of few values."""
    require(
        raw.dtype.kind in "biufUO",
        f"{what} has the type {raw.dtype}; allowed are numbers, truth values and text. Convert it.",
    )
    distinct = len(set(raw.tolist()))
    require(distinct > 1, f"{what} is constant ({raw.tolist()[0]!r}); there is nothing to learn.")
    if task is not None:
        return task == "classification"
    if raw.dtype.kind == "f":
        return False
    return raw.dtype.kind not in "iu" or distinct <= MOST_INTEGER_CLASSES


def classes_of(raw: np.ndarray, what: str) -> tuple[str, ...]:
    """The names of the classes, in order."""
    values = set(raw.tolist())
    numeric = raw.dtype.kind in "biuf"
    require(
        numeric or len(values) < len(raw),
        f"{what} is text with {len(values)} different values in {len(raw)} rows, which is a name rather than "
        "a class. Choose another target.",
    )
    return tuple(_class_name(value) for value in (sorted(values) if numeric else sorted(values, key=str)))


def _class_name(value: Any) -> str:
    """The name of a class: the same for 1 and 1.0, as a column of integers may be read as either."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def check_numbers(targets: Tensor, likelihood: Likelihood, what: str) -> None:
    """Raise for numbers that a likelihood cannot have, before rows are drawn for splits."""
    try:
        likelihood.check_targets(targets, None)
    except InputError as error:
        raise InputError(f"{what}: {error} Positions are rows, counted from 0.") from error


def targets_of(raw: np.ndarray, classes: Sequence[str], what: str) -> Tensor:
    """Numbers of the classes, or the numbers themselves, checked."""
    if not classes:
        if raw.dtype.kind not in "biuf":
            row = next((i for i, value in enumerate(raw) if number_of(str(value)) is None), 0)
            raise InputError(
                f"{what} is not numeric ({str(raw[row])!r} in row {row + 1}); a regression needs numbers. "
                "Set task='classification', or choose another target."
            )
        values = torch.from_numpy(raw.astype(np.float64))
        require(bool(values.isfinite().all()), f"{what} holds infinite values. Remove those rows.")
        require(
            bool((values.abs() <= LARGEST).all()),
            f"{what} holds values beyond {LARGEST:.2g}. Use another unit.",
        )
        return values
    number = {name: index for index, name in enumerate(classes)}
    names = [_class_name(value) for value in raw.tolist()]
    for name in names:
        if name not in number:
            raise unknown_name(f"class in {what[0].lower() + what[1:]}:", name, classes)
    return torch.tensor([number[name] for name in names])


def meaning_of_targets(
    likelihood: str | Likelihood | None, classes: Sequence[str], targets: Tensor, train: Tensor, scale: str
) -> tuple[Likelihood, tuple[Likelihood, ...]]:
    """What the targets mean, and what else they might: noise of one level, of the input, with heavy tails."""
    if likelihood is not None or classes:
        made = make_likelihood(likelihood or "categorical")
        if scale == "log":
            require(not classes, "scale='log' is one of numbers; the target has classes. Leave it out.")
            made = made.on_log_scale(_log_scale(targets, train))
        return made, ()
    return likelihoods_for((), targets, train, scale)


def likelihoods_for(
    classes: Sequence[str], targets: Tensor, train: Tensor, scale: str = "auto"
) -> tuple[Likelihood, tuple[Likelihood, ...]]:
    """What targets mean unless told otherwise, and what else they might: validation decides among these.

    targets: of all rows; train: of those to train on, which decide about the scale.
    """
    if classes:
        return make_likelihood("categorical"), ()
    log_scale = None
    if scale == "log" or (scale == "auto" and is_better_on_log_scale(targets, train)):
        log_scale = _log_scale(targets, train)
    steady = LearnedGaussian(log_scale=log_scale, noise_rate=NOISE_RATE)
    if log_scale is not None:  # there heavy tails have no mean
        return steady, (steady, HeteroscedasticGaussian(log_scale=log_scale, min_std=LEAST_NOISE))
    # Noise that may become small somewhere needs heavy tails: one unusual row would cost thousands of nats.
    return steady, (
        steady,
        StudentT(noise_rate=NOISE_RATE),
        HeteroscedasticStudentT(min_std=LEAST_NOISE),
    )


NOISE_RATE, LEAST_NOISE = 3.0, 1e-3


def is_better_on_log_scale(targets: Tensor, train: Tensor) -> bool:
    """Whether a Gaussian of the logarithms describes positive targets better than one of the numbers.

    The gain a row is log sd(y) − log sd(log y) − mean log y, the ratio of their highest likelihoods.
    """
    if not bool((targets > 0).all()) or len(train) < 3:
        return False
    logs = train.log()
    gain = train.std(correction=0).log() - logs.std(correction=0).log() - logs.mean()
    return bool(gain > LOG_GAIN)


def _log_scale(targets: Tensor, train: Tensor) -> float:
    require(bool((targets > 0).all()), "scale='log' needs positive targets: use scale='linear'.")
    spread = float(train.log().std(correction=0))
    return float(f"{spread:.3g}") if spread > 0 else 1.0
