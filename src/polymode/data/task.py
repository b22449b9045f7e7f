"""A task: data to train on, data to be judged on, and what the targets mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from polymode.data.encoding import LARGEST, Column, column_from
from polymode.data.sources import ArrayData, Data, as_data, as_tree
from polymode.errors import InputError, require, require_whole, shortened, unknown_name
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.trees import Tree, map_tree


@dataclass(frozen=True)
class Preprocessing:
    """How raw numbers became inputs and targets: all that new examples need, as plain values.

    Inputs are (raw − input_shift) / input_scale along the first axis of an example (features of a table,
    channels of an image); targets of a regression likewise. A scale of 0 marks what was constant in training:
    the network has learned nothing about it, so its input is always 0, whatever a new example holds, and
    ``raw`` gives back the shift. columns, target: names in a table. classes:
    names of the labels, in order. source: the kind of reader ("table", "images", "text", or "" for arrays).
    symbols, length: text is cut into sequences of so many "bytes" or "characters", the classes. encoding:
    what the columns of a table become, as raw numbers. bound: inputs beyond it are pressed together,
    x / √(1 + (x/bound)²), so that no unusual number sends a network anywhere; 0 leaves them as they are.
    """

    source: str = ""
    input_shift: tuple[float, ...] = ()
    input_scale: tuple[float, ...] = ()
    target_shift: float = 0.0
    target_scale: float = 1.0
    columns: tuple[str, ...] = ()
    target: str = ""
    classes: tuple[str, ...] = ()
    image_shape: tuple[int, ...] = ()
    symbols: str = ""
    length: int = 0
    encoding: tuple[Column, ...] = ()
    bound: float = 0.0

    def config(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
        return plain | {"encoding": [column.config() for column in self.encoding]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Preprocessing":
        """What ``config`` gave, checked: a file may have been changed."""
        require(
            isinstance(config, Mapping), f"a preparation of examples is {config!r}, not names and values."
        )
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
        known = {each.name: each.default for each in fields(cls)}
        values = {name: known[name] for name in LATER_ENTRIES} | values
        for name in values:
            if name not in known:
                raise unknown_name("entry of a preparation of examples", name, known)
        require(isinstance(values["encoding"], tuple), "encoding must be a list of columns.")
        values["encoding"] = tuple(column_from(each) for each in values["encoding"])
        for name, default in known.items():
            require(name in values, f"{name} is missing.")
            if name != "encoding":
                _check_entry(name, values[name], default)
        made = cls(**values)
        made._check()
        return made

    def _check(self) -> None:
        counts = {"input_shift": len(self.input_shift), "input_scale": len(self.input_scale)}
        if self.features and self.input_shift:
            counts["columns"] = len(self.features)
        require(
            len(set(counts.values())) == 1,
            f"{' and '.join(f'{name} of length {count}' for name, count in counts.items())} do not agree.",
        )
        # A scale of 0 is that of a column without any spread.
        require(
            all(s >= 0 for s in self.input_scale), f"input_scale {self.input_scale} must not be negative."
        )
        require(self.target_scale > 0, f"target_scale must be positive, got {self.target_scale}.")
        require(self.bound >= 0, f"bound must not be negative, got {self.bound}.")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs: of the columns, or of what they become."""
        if not self.encoding:
            return self.columns
        return tuple(name for column in self.encoding for name in column.features)

    def inputs(self, raw: Tensor) -> Tensor:
        """Inputs [N, ...] from raw ones."""
        if not self.input_shift:
            return raw
        if raw.ndim < 2 or raw.shape[1] != len(self.input_shift):
            raise InputError(
                f"Inputs {list(raw.shape)} given, the network was trained on {len(self.input_shift)} "
                f"{'columns' if self.source == 'table' else 'channels'} (the second axis)."
            )
        shape = (1, -1, *[1] * (raw.ndim - 2))
        raw = raw if raw.is_floating_point() else raw.float()
        shift, scale = (
            torch.tensor(v, dtype=raw.dtype).reshape(shape) for v in (self.input_shift, self.input_scale)
        )
        inputs = (raw - shift) / scale.masked_fill(scale == 0, torch.inf)
        if self.bound:
            inputs = inputs / (1 + (inputs / self.bound).square()).sqrt()
        return inputs.float()

    def raw(self, inputs: Tensor) -> Tensor:
        """Raw inputs [N, ...] from inputs: what ``inputs`` does, undone."""
        if not self.input_shift:
            return inputs
        shape = (1, -1, *[1] * (inputs.ndim - 2))
        shift, scale = (torch.tensor(v).reshape(shape) for v in (self.input_shift, self.input_scale))
        if self.bound:
            inputs = inputs / (1 - (inputs / self.bound).square()).clamp(min=1e-12).sqrt()
        return inputs * scale + shift

    @property
    def constant(self) -> tuple[str, ...]:
        """Names, or places counted from 0, of the columns or channels that were constant in training."""
        names = self.features or tuple(map(str, range(len(self.input_scale))))
        return tuple(name for name, scale in zip(names, self.input_scale, strict=True) if scale == 0)

    def targets(self, raw: Tensor) -> Tensor:
        """Targets of a regression from raw ones."""
        return (raw - self.target_shift) / self.target_scale


# Entries that files of earlier versions do not have.
LATER_ENTRIES = ("encoding", "bound")
# The types of an entry's values, by the names of those that have others than text.
_NUMBERS = {
    "input_shift": (int, float),
    "input_scale": (int, float),
    "target_shift": (int, float),
    "target_scale": (int, float),
    "bound": (int, float),
    "image_shape": (int,),
    "length": (int,),
}


def _check_entry(name: str, value: Any, default: Any) -> None:
    """Raise unless a value is of the type that an entry has, and finite."""
    many, kinds = isinstance(default, tuple), _NUMBERS.get(name, (str,))
    each = value if many and isinstance(value, tuple) else [value]
    right = many == isinstance(value, tuple) and all(
        isinstance(v, kinds) and not isinstance(v, bool) and (isinstance(v, str) or abs(v) <= LARGEST)
        for v in each
    )
    words = "text" if kinds == (str,) else "whole numbers" if kinds == (int,) else "finite numbers"
    if not right:
        shown = shortened(repr(list(value) if isinstance(value, tuple) else value))
        raise InputError(f"{name} must be {'a list of ' if many else ''}{words}, got {shown}.")


@dataclass(frozen=True)
class Split:
    """Data to train on, to validate on (optional) and to be judged on.

    groups: of the training rows, a number each: rows of one group stay together when some are held out.
    ordered: whether the training rows are in the order of time, so that the last ones are held out.
    """

    train: Data
    test: Data
    validation: Data | None = None
    preprocessing: Preprocessing = Preprocessing()
    groups: Tensor | None = None
    ordered: bool = False


@dataclass(frozen=True, repr=False)
class Task:
    """One or several splits of a data set with the meaning of its targets.

    likelihood: a name or an object of ``polymode.likelihoods``. num_outputs: outputs the network needs.
    ood: examples outside the distribution (targets are ignored). model, model_options: the network that suits
    the data. training: options of methods that suit it, such as {"optimizer": {"lr": 0.003}}; a rate alone is
    for methods that are trained with Adam.
    budget: member-epochs for a first comparison (default: enough for about 10,000 steps). likelihoods: others
    that may suit the targets as well; validation decides. remarks: what a reader of the data should know.
    """

    name: str
    splits: Sequence[Split]
    likelihood: Any
    num_outputs: int
    ood: Data | None = None
    model: str = "mlp"
    budget: float | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    likelihoods: Sequence[Likelihood] = ()
    remarks: Sequence[str] = ()

    def __post_init__(self) -> None:
        require(len(self.splits) > 0, f"The task {self.name!r} has no splits.")

    def __repr__(self) -> str:
        split, likelihood = self.splits[0], make_likelihood(self.likelihood)
        held_out = 0 if split.validation is None else split.validation.num_examples
        return (
            f"Task({self.name!r}, {likelihood.kind}, {len(self.splits)} split{'s'[: len(self.splits) != 1]}: "
            f"{split.train.num_examples} to train on, {held_out} to validate on, "
            f"{split.test.num_examples} to test on)"
        )

    @property
    def example_shape(self) -> Tree:
        """Shape of one example's inputs."""
        examples = next(iter(self.splits[0].train.in_order(1)))
        return map_tree(lambda t: t.shape[1:], examples.inputs)

    @property
    def suggested_budget(self) -> float:
        """Member-epochs for a first comparison: the budget, or what makes about 10,000 steps."""
        if self.budget is not None:
            return self.budget
        train = self.splits[0].train
        steps = -(-train.num_examples // train.batch_size)
        return float(min(4000, max(20, round(10_000 / steps, -1))))


ENTRIES = ("train", "test", "validation", "ood", "likelihood", "classes", "model", "budget", "training")


def as_task(value: Any, name: str) -> Task:
    """Read what a user's own function returns: a ``Task``, (train, test), or a dictionary.

    Each part is ``ArrayData``, a ``DataLoader``, or a pair of arrays (inputs, targets).
    """
    if isinstance(value, Task):
        return value
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        value = dict(zip(("train", "test", "ood"), value, strict=False))
    if not isinstance(value, Mapping):
        raise InputError(
            f"{name} must return a Task, a pair (train, test) or a dictionary with {', '.join(ENTRIES)}; it "
            f"returned {type(value).__name__}."
        )
    for key in value:
        if key not in ENTRIES:
            raise unknown_name(f"entry of the data from {name}", key, ENTRIES)
    for key in ("train", "test"):
        require(key in value, f"The data from {name} has no {key!r}; it has {', '.join(value)}.")
    parts = {
        key: _part(value[key], f"{key!r} of {name}")
        for key in ("train", "test", "validation")
        if value.get(key) is not None
    }
    targets = next(iter(parts["train"].in_order(1))).targets
    likelihood = value.get("likelihood") or _likelihood_for(targets)
    classes = tuple(map(str, value.get("classes", ())))
    split = Split(
        parts["train"], parts["test"], parts.get("validation"), preprocessing=Preprocessing(classes=classes)
    )
    others = {key: value[key] for key in ("model", "budget", "training") if value.get(key) is not None}
    ood = value.get("ood")
    return Task(
        name,
        [split],
        likelihood,
        num_outputs=len(classes) or num_outputs_for(likelihood, parts["train"]),
        ood=None if ood is None else _foreign(ood, f"'ood' of {name}"),
        **others,
    )


def _part(value: Any, what: str) -> Data:
    if isinstance(value, Data | DataLoader):
        return as_data(value)
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        weights = value[2] if len(value) == 3 else None
        return ArrayData(value[0], value[1], weights=weights)
    raise InputError(
        f"{what} must be ArrayData, a DataLoader or a pair (inputs, targets), got {type(value).__name__}."
    )


def _foreign(value: Any, what: str) -> Data:
    """Examples without targets are allowed here."""
    if isinstance(value, Tensor | np.ndarray):
        inputs = as_tree(value)
        return ArrayData(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    return _part(value, what)


def _likelihood_for(targets: Tensor) -> str:
    return "gaussian" if targets.is_floating_point() else "categorical"


def num_outputs_for(likelihood: Any, data: Data) -> int:
    """Outputs that a network needs for a likelihood (a name or an object) and the targets of some data."""
    return make_likelihood(likelihood).num_outputs(part.targets for part in data.in_order())


# Numbers whose standard deviation is at most this share of the largest of them are constant but for rounding:
# float64 tells fewer than 64 of them apart.
ROUNDING = 64 * torch.finfo(torch.float64).eps


def mean_and_scale(values: Tensor, axes: Sequence[int], added: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over some axes, in float64; the deviation of a constant is exactly 0.

    added: what a protocol adds to the deviations of what is not constant.
    """
    values = values.double()
    std = values.std(list(axes), correction=0)
    is_constant = std <= ROUNDING * values.abs().amax(list(axes))
    return values.mean(list(axes)), (std + added).masked_fill(is_constant, 0.0)


def standardised(
    train: Tensor, *others: Tensor, per_channel: bool = False, added: float = 0.0
) -> tuple[list[Tensor], tuple[float, ...], tuple[float, ...]]:
    """Arrays with the training mean subtracted, divided by the training standard deviation.

    Statistics are those of each feature (second axis); ``per_channel`` pools pixels with it. What is constant
    in training becomes 0 everywhere. Returns the arrays, the shift and the scale.
    """
    axes = [axis for axis in range(train.ndim) if axis != 1] if per_channel else [0]
    mean, std = mean_and_scale(train, axes, added)
    shift, scale = tuple(mean.tolist()), tuple(std.tolist())
    ready = Preprocessing(input_shift=shift, input_scale=scale)
    return [ready.inputs(part) for part in (train, *others)], shift, scale


def training_parts(available: int, num_train: int | None, num_validation: int) -> tuple[slice, slice]:
    """The rows of a training set to train on (the first) and to validate on (the last)."""
    if num_train is not None:
        require_whole("num_train", num_train)
    require_whole("num_validation", num_validation, 0)
    wanted = (num_train or 1) + num_validation
    require(
        wanted <= available,
        f"num_train={num_train} and num_validation={num_validation} are more than the {available} training "
        "examples.",
    )
    last = available - num_validation
    return slice(0, last if num_train is None else num_train), slice(last, available)
