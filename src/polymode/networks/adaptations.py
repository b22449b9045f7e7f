"""Changes to a prepared network that a method asks for, and that loading a posterior repeats."""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, get_args

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require, require_whole, shortened, unknown_name
from polymode.networks.layers import Masks, SeededDropout
from polymode.networks.surgery import NORMALISATIONS, tensors_of
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

    @property
    def own(self) -> frozenset[str]:
        """Names of the buffers that it adds for every member to have its own, though no pass changes them."""
        return frozenset()

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
    require(
        isinstance(config, Mapping),
        f"An adaptation is a kind with its fields, got {shortened(repr(config))}.",
    )
    options = dict(config)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in ADAPTATIONS:
        raise InputError(
            f"The adaptation {shortened(repr(kind))} is not known: import the module that defines it first. "
            f"Known: {', '.join(sorted(ADAPTATIONS))}."
        )
    allowed = [each.name for each in fields(ADAPTATIONS[kind])]
    for name in options:
        if name not in allowed:
            raise unknown_name(f"field of the adaptation {kind!r}", name, allowed)
    try:
        return ADAPTATIONS[kind](**options)
    except InputError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise InputError(
            f"The adaptation {kind!r} cannot be made of {shortened(repr(options))}: {error}."
        ) from error


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


JOINABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers with an axis of channels, or of features


@register_adaptation
@dataclass(frozen=True)
class JoinedHeads(Adaptation):
    """Several networks in one, whose passes take an example for each head and give an output of each.

    The layer ``first`` gets ``heads`` times its inputs and ``last`` as many times its outputs, drawn anew.
    In training mode a batch is dealt: of [heads·N, ...] examples the first N are those of the first head, and
    so on, in N passes; outputs come in the same order. What is missing to a multiple of ``heads`` is filled
    up with examples of the batch, and what they give is dropped. In evaluation mode every head sees the same
    example, and outputs are Σ_h s_h outputs_h with the buffer ``shares`` of the last layer: equal shares for
    all heads together, and a one among zeros for a member that is one of them.
    """

    kind: ClassVar[str] = "joined_heads"
    heads: int
    first: str
    last: str

    def __post_init__(self) -> None:
        require_whole("heads", self.heads)

    @property
    def own(self) -> frozenset[str]:
        return frozenset({self.shares})

    @property
    def shares(self) -> str:
        """The name of the heads' shares among the tensors of the network."""
        return f"{self.last}.shares"

    def apply(self, module: nn.Module) -> nn.Module:
        obstacle = self._obstacle(module)
        require(obstacle is None, f"Heads cannot be joined in this {type(module).__name__}: {obstacle}")
        first, last = module.get_submodule(self.first), module.get_submodule(self.last)
        _widen(first, inputs=self.heads)
        _widen(last, outputs=self.heads)
        assert isinstance(last, nn.Linear)
        last.register_buffer("shares", last.weight.new_full((self.heads,), 1 / self.heads))
        dealing = _Dealing(self.heads)
        first.register_forward_pre_hook(dealing.join)
        last.register_forward_hook(dealing.part)
        return module

    def _obstacle(self, module: nn.Module) -> str | None:
        """Why heads cannot be joined, as far as the layers tell; a pass in training mode tells the rest."""
        layers = dict(module.named_modules())
        first, last = layers.get(self.first), layers.get(self.last)
        inputs = _required_inputs(module)
        if len(inputs) > 1:
            return f"it takes several inputs ({', '.join(inputs)}), and examples are joined in one of them."
        if first is None or last is None:
            return f"it has no layer {self.first if first is None else self.last!r}."
        if (outside := _outside(layers, self.first, self.last)) is not None:
            return f"{outside}, where examples would not be joined. It must begin and end with these layers."
        if first is last:
            return f"its first layer {self.first!r} is also its last one, and there must be two."
        if type(first) not in JOINABLE or getattr(first, "groups", 1) != 1:
            return (
                f"its first layer {self.first!r} is {first}; examples are joined along the channels of a "
                "Linear, Conv1d, Conv2d or Conv3d layer without groups."
            )
        if type(last) is not nn.Linear:
            return f"its last layer {self.last!r} is {last}; outputs of heads are those of a Linear layer."
        uses = [id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False)]
        for name in (self.first, self.last):
            for tensor in layers[name].parameters():
                if not tensor.requires_grad:
                    return f"{name!r} is frozen, and joined heads need a wider layer, drawn anew."
                if uses.count(id(tensor)) > 1:
                    return f"{name!r} shares weights with another layer, and joined heads need a wider one."
        return None


def _required_inputs(module: nn.Module) -> list[str]:
    """Names of the inputs that a network cannot do without."""
    if (inner := getattr(module, "wraps", None)) is not None:  # a likelihood's own part beside the network
        module = module.get_submodule(inner)
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _outside(layers: Mapping[str, nn.Module], first: str, last: str) -> str | None:
    """A layer with weights, other than of normalisation, that stands before the first or behind the last."""
    names = list(layers)
    start, end = names.index(first), names.index(last)
    for name in (*names[:start], *names[end + 1 :]):
        layer, holds_first = layers[name], first.startswith(f"{name}." if name else "")
        weights = list(layer.parameters(recurse=False))
        if weights and not holds_first and not isinstance(layer, NORMALISATIONS):
            where = f"before {first!r}" if names.index(name) < start else f"behind {last!r}"
            return f"{name!r} ({type(layer).__name__}) comes {where}"
    return None


def _widen(layer: nn.Module, inputs: int = 1, outputs: int = 1) -> None:
    """Multiply the inputs and outputs of a layer, and draw its weights as it draws them itself."""
    assert isinstance(layer, JOINABLE)
    size = "features" if isinstance(layer, nn.Linear) else "channels"
    for name, factor in ((f"in_{size}", inputs), (f"out_{size}", outputs)):
        setattr(layer, name, factor * getattr(layer, name))
    rows, columns, *kernel = layer.weight.shape
    layer.weight = nn.Parameter(layer.weight.new_empty(outputs * rows, inputs * columns, *kernel))
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.new_empty(outputs * rows))
    layer.reset_parameters()
    if isinstance(layer, nn.Conv2d):
        layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as others are prepared


class _Dealing:
    """Hooks of the first and the last layer: an example of each head in, the outputs of each head out."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.num_examples = 0  # of the batch that is on its way from the first layer to the last

    @property
    def num_passes(self) -> int:
        return -(-self.num_examples // self.heads)

    def join(self, layer: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        [inputs] = arguments
        slots = [inputs] * self.heads
        if layer.training:
            self.num_examples = len(inputs)
            places = torch.arange(self.heads * self.num_passes, device=inputs.device) % self.num_examples
            slots = inputs[places].chunk(self.heads)
        return (torch.cat(slots, -1 if isinstance(layer, nn.Linear) else 1),)

    def part(self, layer: nn.Module, arguments: tuple[Tensor], outputs: Tensor) -> Tensor:
        each = outputs.unflatten(-1, (self.heads, -1))  # [N, ..., heads, outputs]
        if not layer.training:
            return (each * layer.shares[:, None]).sum(-2)  # type: ignore[index]  # a buffer
        if len(outputs) != self.num_passes:
            raise InputError(
                f"The last layer of joined heads sees {len(outputs)} rows, not the {self.num_passes} in "
                f"which the first one joins {self.num_examples} examples: these must be rows of the first "
                "axis in both layers, and both layers must be in training mode."
            )
        return torch.cat(each.unbind(-2))[: self.num_examples]
