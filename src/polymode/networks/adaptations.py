"""Changes to a prepared network that a method asks for, and that loading a posterior repeats."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, get_args

from torch import nn

from polymode.errors import InputError, require, shortened, unknown_name
from polymode.networks.layers import Masks, SeededDropout
from polymode.networks.surgery import tensors_of
from polymode.seeds import global_seed


@dataclass(frozen=True)
class Adaptation(ABC):
    """One change to a prepared copy of the user's network, said in plain values.

    Fields are JSON values, from which ``posterior.json`` makes the adaptation again.
    """

    kind: ClassVar[str]  # the name it is registered and stored under

    @abstractmethod
    def apply(self, module: nn.Module) -> nn.Module:
        """Change a module that is ours to change, and return it.

        Tensors may be added, and layers exchanged for others whose tensors have the same names and other
        shapes; the user's tensors are never renamed or removed. What is drawn at random comes from the global
        random state, which ``adapt`` seeds.
        """

    def config(self) -> dict[str, Any]:
        """The kind and fields, as JSON values."""
        return {"kind": self.kind} | asdict(self)


ADAPTATIONS: dict[str, type[Adaptation]] = {}
AnyAdaptation = TypeVar("AnyAdaptation", bound=Adaptation)


def register_adaptation(adaptation: type[AnyAdaptation]) -> type[AnyAdaptation]:
    """Make an adaptation known by its kind to ``fit`` and ``load_posterior``; there is one of each kind."""
    known = ADAPTATIONS.get(adaptation.kind)
    # A class that is defined anew under its own name (a cell run again, a module reloaded) takes its place.
    if known is not None and _home(known) != _home(adaptation):
        raise InputError(
            f"{_home(adaptation)} is an adaptation of kind {adaptation.kind!r}, as {_home(known)} is: "
            "give it another kind."
        )
    ADAPTATIONS[adaptation.kind] = adaptation
    return adaptation


def _home(adaptation: type[Adaptation]) -> str:
    return f"{adaptation.__module__}.{adaptation.__qualname__}"


def make_adaptation(config: Mapping[str, Any]) -> Adaptation:
    """Make a registered adaptation from its ``config``; nothing is ever imported for it."""
    options = dict(config)
    kind = options.pop("kind", None)
    if kind not in ADAPTATIONS:
        raise InputError(
            f"The adaptation {shortened(repr(kind))} is not known: import the module that defines it first. "
            f"Known: {', '.join(sorted(ADAPTATIONS))}."
        )
    allowed = [each.name for each in fields(ADAPTATIONS[kind])]
    for name in options:
        if name not in allowed:
            raise unknown_name(f"field of the adaptation {kind!r}", name, allowed)
    return ADAPTATIONS[kind](**options)


def adapt(module: nn.Module, adaptations: Sequence[Adaptation], seed: int) -> nn.Module:
    """Apply adaptations, in order, to a prepared module that is ours to change; what they draw is seeded."""
    for adaptation in adaptations:
        _check_storable(adaptation)
    with global_seed(seed):
        for adaptation in adaptations:
            module = _applied(adaptation, module)
    return module


def _applied(adaptation: Adaptation, module: nn.Module) -> nn.Module:
    names = tensors_of(module).keys()
    adapted = adaptation.apply(module)
    require(
        isinstance(adapted, nn.Module),
        f"The adaptation {adaptation.kind!r} returned {type(adapted).__name__}; it must return the module.",
    )
    lost = sorted(names - tensors_of(adapted).keys())
    if lost:
        raise InputError(
            f"The adaptation {adaptation.kind!r} renames or removes the tensor {lost[0]!r} of the network. "
            "It may add tensors and change their shapes, but those that are there keep their names: exchange "
            "layers where they stand, or use hooks, rather than wrap the network."
        )
    return adapted


def _check_storable(adaptation: Adaptation) -> None:
    """Raise, before any training, unless a saved posterior could make the adaptation again."""
    kind, name = adaptation.kind, type(adaptation).__name__
    require(
        ADAPTATIONS.get(kind) is type(adaptation),
        f"The adaptation {name} ({kind!r}) is not registered: put @register_adaptation on its class.",
    )
    try:
        stored = json.dumps(adaptation.config())
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The adaptation {adaptation!r} has a field that is not a JSON value: {error}."
        ) from error
    require(
        make_adaptation(json.loads(stored)) == adaptation,
        f"{adaptation!r} is another adaptation after it was stored and read. Its fields must be JSON values: "
        "numbers, strings, lists, dictionaries with strings as keys.",
    )


INPUT_DROPOUT = "input_dropout"  # the name of dropout that was added to a layer


@register_adaptation
@dataclass(frozen=True)
class Sampling(Adaptation):
    """Dropout that acts when a network predicts, too.

    masks: one for each example, as in usual training, or one for each draw, the variational reading.
    added: rates of dropout on the inputs of layers that the user's network does not have.
    """

    kind: ClassVar[str] = "sampling"
    masks: Masks = "example"
    added: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.masks not in get_args(Masks):
            raise unknown_name("masks", self.masks, get_args(Masks))
        for rate in self.added.values():
            require(0 < rate < 1, f"A rate of dropout must be above 0 and below 1, got {rate!r}.")

    def apply(self, module: nn.Module) -> nn.Module:
        present = sum(isinstance(part, SeededDropout) for part in module.modules())
        for number, (name, rate) in enumerate(self.added.items()):
            layer = dict(module.named_modules()).get(name)
            if layer is None or not list(layer.parameters(recurse=False)):
                raise InputError(f"There is no layer {name!r} with weights to drop the inputs of.")
            device = next(layer.parameters()).device
            layer.add_module(INPUT_DROPOUT, SeededDropout(rate, present + number).to(device))
            layer.register_forward_pre_hook(_drop_inputs, with_kwargs=True)
        for part in module.modules():
            if isinstance(part, SeededDropout):
                part.sampled, part.masks = True, self.masks
                # Transformer layers skip their children in evaluation mode, unless one of them has a hook.
                part.register_forward_pre_hook(_nothing)
        return module


def _drop_inputs(layer: nn.Module, arguments: tuple, named: dict) -> tuple[tuple, dict]:
    drop = layer.get_submodule(INPUT_DROPOUT)
    if arguments:
        return (drop(arguments[0]), *arguments[1:]), named
    (name, inputs), *others = named.items()
    return (), {name: drop(inputs), **dict(others)}


def _nothing(*_: object) -> None:
    """A hook that does nothing."""
