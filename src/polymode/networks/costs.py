"""What a network costs to hold and to run, and how much of it is left when parts are taken away."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from polymode.errors import InputError, require, unknown_name
from polymode.seeds import global_seed
from polymode.trees import Tree, map_tree

Found = TypeVar("Found")

_CONVOLUTION = nn.modules.conv._ConvNd
_SHORTCUTS = ("downsample", "shortcut")  # parts of the names of projections
_PRODUCTS = [getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")]


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs one example.

    weights: numbers in its weight. outputs: its output units (channels). uses: how often each weight is
    multiplied, once for each position of the output; 0 where the layer has no part in the pass.
    """

    weights: int
    outputs: int
    uses: int

    @property
    def multiplications(self) -> int:
        return self.weights * self.uses


def multiplications(module: nn.Module, inputs: Tree) -> int:
    """Multiply-accumulates of one pass in evaluation mode for one example, the first of inputs [B, ...].

    Those of matrix products, convolutions and attention, wherever the network has them; what is done to each
    number by itself (normalisation, activations) is not counted, nor are biases.
    """
    return _in_one_pass(module, inputs, _multiplied)


def layer_costs(module: nn.Module, inputs: Tree) -> dict[str, LayerCost]:
    """What every Linear layer and convolution costs one example, the first of inputs [B, ...], by name.

    One whose weight is computed in the pass, such as by a parametrisation, has no uses.
    """
    return _in_one_pass(module, inputs, _watched)


def _in_one_pass(module: nn.Module, inputs: Tree, find: Callable[[nn.Module, Tree], Found]) -> Found:
    """What ``find`` finds in one pass of a copy of the module.

    Shapes are enough, so the pass is made without numbers (on the meta device) where the module can do so: it
    costs nothing, and there no kernel does the work of several operations unseen.
    """
    example = map_tree(lambda t: t[:1], inputs)
    with global_seed(0), torch.no_grad():
        try:
            return find(_without_numbers(module).eval(), map_tree(lambda t: t.to("meta"), example))
        except Exception:  # the module is the user's, and may want to look at numbers
            pass
        try:
            return find(copy.deepcopy(module).eval(), example)
        except Exception as error:
            shapes = map_tree(lambda t: f"{list(t.shape)} {t.dtype}", example)
            raise InputError(
                f"This {type(module).__name__} cannot run on inputs {shapes}: {error}"
            ) from error


def _without_numbers(module: nn.Module) -> nn.Module:
    """A copy on the meta device; what is tied stays so."""
    weights = {id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, weights | {id(buffer): buffer.to("meta") for buffer in module.buffers()})


def _multiplied(module: nn.Module, example: Tree) -> int:
    # A matrix times a vector, [n, k] and [k], is missing from torch's own list.
    vector = {torch.ops.aten.mv: lambda matrix, _, **__: 2 * matrix.numel()}
    with FlopCounterMode(display=False, custom_mapping=vector) as counter:
        _call(module, example)
    return counter.get_total_flops() // 2


def _watched(module: nn.Module, example: Tree) -> dict[str, LayerCost]:
    layers = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear | _CONVOLUTION)
    ]
    with _Products() as products:
        _call(module, example)
    found: dict[tuple[int, ...], tuple[str, LayerCost]] = {}  # by the weight: a tied one counts once
    for name, layer in layers:
        outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        own = "weight" in layer._parameters  # of one that is computed nobody can tell where it was
        uses = products.sizes.get(_place(layer.weight), 0) // max(1, layer.weight.numel()) if own else 0
        found.setdefault(_place(layer.weight), (name, LayerCost(layer.weight.numel(), outputs, uses)))
    return dict(found.values())


class _Products(TorchDispatchMode):
    """Adds up the multiplications of the matrix products and convolutions that each tensor takes part in.

    A layer need not be called for that: attention takes the weight of its last layer as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        operation = getattr(function, "overloadpacket", None)
        if operation in _PRODUCTS:
            size = flop_registry[operation](*args, **(kwargs or {}), out_val=result) // 2
            for place in {_place(each) for each in args if isinstance(each, Tensor)}:
                self.sizes[place] = self.sizes.get(place, 0) + size
        return result


def _place(tensor: Tensor) -> tuple[int, ...]:
    """Where the numbers of a tensor are; the same for a transposed one."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _call(module: nn.Module, inputs: Tree) -> None:
    if isinstance(inputs, dict):
        module(**inputs)
    else:
        module(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))


@dataclass(frozen=True)
class Accounting:
    """What Jantre et al. ("Sequential Bayesian Neural Subnetwork Ensembles", 2022) count of a network.

    Parameters: the weights of convolutions, and the classifier with its bias. Multiplications: of a
    convolution active output channels × all input channels × k² × positions of its output; of the classifier
    as many as it has parameters. So a channel that is taken away saves nothing in the layers that read it.
    Biases of other layers, normalisation and the 1×1 convolutions of shortcuts are left out; the latter have
    "downsample" or "shortcut" in their name. Linear layers before the classifier count as convolutions do.

    layers: what may be taken away in part. classifier: the last layer, as the module lists them, its bias
    among the weights; it stays whole. ignored: names of the classifier and of shortcuts.
    """

    layers: Mapping[str, LayerCost]
    classifier: LayerCost
    ignored: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module, inputs: Tree) -> "Accounting":
        """The accounting of a module for inputs [B, ...]."""
        costs = layer_costs(module, inputs)
        shortcuts = {name for name in costs if _is_shortcut(name, module.get_submodule(name))}
        layers = {name: cost for name, cost in costs.items() if name not in shortcuts}
        require(
            any(cost.uses for cost in layers.values()),
            f"No Linear layer or convolution of this {type(module).__name__} is used: there is nothing to "
            "count.",
        )
        last, classifier = layers.popitem()
        whole = sum(parameter.numel() for parameter in module.get_submodule(last).parameters())
        return cls(layers, replace(classifier, weights=whole), frozenset(shortcuts | {last}))

    @property
    def parameters(self) -> int:
        """Of the dense network."""
        return sum(cost.weights for cost in (*self.layers.values(), self.classifier))

    @property
    def multiplications(self) -> int:
        """Of the dense network."""
        return sum(cost.multiplications for cost in (*self.layers.values(), self.classifier))

    def shares(
        self, active: Mapping[str, Tensor], nonzero: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The shares of "parameters" and "multiplications" that remain, in (0, 1], [...] each.

        active: masks over output units, [..., outputs], not 0 where a unit is active. nonzero: where weights
        are masked one by one instead, how many of a layer remain, [...]. Both by the name of a layer or of
        its weight; layers that are not named are whole, and the leading axes, such as that of members, are
        those of the shares. Masks of shortcuts and of the classifier change nothing.
        """
        lost: dict[str, Tensor] = {}  # weights of each layer
        # What changes nothing has leading axes, too.
        axes = sum([0 * mask[..., 0] for mask in active.values()] + [0 * n for n in (nonzero or {}).values()])
        for name, cost, mask in self._counted(active):
            _check_units(name, mask, cost)
            lost[name] = (mask == 0).sum(-1) * (cost.weights // cost.outputs)
        for name, cost, count in self._counted(nonzero or {}):
            lost[name] = cost.weights - count
        parameters = self.parameters - sum(lost.values(), axes)
        multiplied = self.multiplications - sum((self.layers[n].uses * c for n, c in lost.items()), axes)
        return {
            "parameters": torch.as_tensor(parameters / self.parameters),
            "multiplications": torch.as_tensor(multiplied / self.multiplications),
        }

    def _counted(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, LayerCost, Tensor]]:
        """What is said of layers that may be taken away in part."""
        known = self.layers.keys() | self.ignored
        for name, tensor in tensors.items():
            layer = name if name in known else name.rpartition(".")[0]  # of a weight
            if layer not in known:
                raise unknown_name("Linear layer or convolution", name, known)
            if layer in self.layers:
                yield layer, self.layers[layer], tensor


def _is_shortcut(name: str, layer: nn.Module) -> bool:
    is_pointwise = isinstance(layer, _CONVOLUTION) and set(layer.kernel_size) == {1}
    return is_pointwise and any(word in name.lower() for word in _SHORTCUTS)


def _check_units(name: str, mask: Tensor, cost: LayerCost) -> None:
    if mask.ndim == 0 or mask.shape[-1] != cost.outputs:
        raise InputError(
            f"The mask of {name!r} is {list(mask.shape)}: it must end with the {cost.outputs} output units "
            "of the layer."
        )
