"""Channels followed through a network: which of them vary, which hold constants, and which have to be there.

A traced graph is only read. Each tensor in it that comes from a linear layer or a convolution is a ``Value``.
What a channel of zero weights emits is a constant, and constants are followed through whatever maps constant
channels to constant channels. What is not known here needs all channels.
"""

import dis
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from polymode.networks.compact_layers import COMPACT_LAYERS, CONVOLUTIONS, NORMS
from polymode.networks.layers import SeededDropout
from polymode.networks.members import copied_module

# --- tracing ----------------------------------------------------------------------------

# torch.fx exchanges nn.Module.__call__ for everybody while it traces.
_TRACING = threading.Lock()


class CannotTrace(Exception):
    """A part of a network whose Python code cannot be followed without its inputs."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name, self.reason = name, reason


class _Tracer(fx.Tracer):
    """Follows the code of all modules but those of torch, those of ours, and those that are opaque."""

    def __init__(self, opaque: frozenset[str]) -> None:
        super().__init__()
        self.opaque = opaque
        self.thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or is_layer(m)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if threading.get_ident() != self.thread:  # somebody else predicts meanwhile
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        refuse_reading(m, name)
        try:
            return super().call_module(m, forward, args, kwargs)
        except CannotTrace:
            raise
        except Exception as error:  # whatever the user's code does with what is no tensor
            raise CannotTrace(name, _first_line(error)) from error


def is_layer(module: nn.Module) -> bool:
    """Whether a module is taken as a whole: one of torch's own (but no sequence), or one of ours."""
    of_torch = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    return of_torch or isinstance(module, (SeededDropout, *COMPACT_LAYERS))


def trace(module: nn.Module) -> tuple[fx.Graph, dict[str, str]]:
    """The graph of a module, and the parts that are opaque in it with the reasons.

    Raises ``CannotTrace`` where the module's own code cannot be followed.
    """
    if is_layer(module):
        return _graph_of_layer(), {}
    refuse_reading(module, "")
    opaque: dict[str, str] = {}
    while True:
        try:
            return _traced(module, frozenset(opaque)), opaque
        except CannotTrace as error:
            if not error.name:
                raise
            opaque[error.name] = error.reason


# By which the code of a module goes through what is in it.
_READERS = frozenset(
    [
        *("parameters", "buffers", "modules", "children", "state_dict", "get_parameter", "get_buffer"),
        *("named_parameters", "named_buffers", "named_modules", "named_children", "get_submodule"),
        *("_parameters", "_buffers", "_modules"),
    ]
)


def refuse_reading(module: nn.Module, name: str) -> None:
    """Raise where the code of a module goes through its tensors or modules, which a graph does not show."""
    if _READERS & set(names_in(type(module).forward)):
        raise CannotTrace(name, "its code goes through its own tensors or modules")


def names_in(function: Callable) -> tuple[str, ...]:
    """The names that the code of a function mentions."""
    return function.__code__.co_names if hasattr(function, "__code__") else ()


def _augments(function: Callable) -> bool:
    """Whether the code of a function has assignments such as ``y += x``, which write over y.

    A graph has ``y + x`` in their place.
    """
    if not hasattr(function, "__code__"):
        return False
    return any(
        step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and "=" in step.argrepr)
        for step in dis.get_instructions(function)
    )


def _traced(module: nn.Module, opaque: frozenset[str]) -> fx.Graph:
    """The graph in evaluation mode, if it is the only one.

    Training, and arguments that may be left out, must not lead elsewhere: everything runs on the same layers.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    ways = [
        (training, given) for given in ([defaults] if defaults else []) + [{}] for training in (True, False)
    ]
    *others, graph = (_traced_once(module, opaque, *way) for way in ways)
    if any(list(_calls(other)) != list(_calls(graph)) for other in others):
        raise CannotTrace("", "what it computes depends on its mode or on optional arguments")
    return graph


def _traced_once(module: nn.Module, opaque: frozenset[str], training: bool, given: dict) -> fx.Graph:
    trial = copied_module(module).train(training)  # code may keep what it computes in attributes
    try:
        with _TRACING:
            return _Tracer(opaque).trace(trial, concrete_args=given or None)
    except CannotTrace:
        raise
    except Exception as error:
        raise CannotTrace("", _first_line(error)) from error


def _calls(graph: fx.Graph) -> Iterator[tuple]:
    """What a graph computes and from what, without the checks of arguments that are given."""
    checks = {node for node in graph.nodes if "_assert" in getattr(node.target, "__name__", "")}
    for node in graph.nodes:
        if node.op != "placeholder" and node not in checks and not (node.users and set(node.users) <= checks):
            yield (node.op, node.target, *map(str, node.all_input_nodes))


def _graph_of_layer() -> fx.Graph:
    graph = fx.Graph()
    layer = graph.create_node("call_module", "", (graph.placeholder("inputs"),), name="layer")
    graph.output(layer)
    return graph


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# --- values -----------------------------------------------------------------------------


@dataclass(eq=False)
class Value:
    """A tensor inside a network, by its C channels.

    varies: [C], which depend on the inputs; the others hold their entry of ``constants`` [C] everywhere.
    behind: axes behind that of the channels. ndim: all axes, where it is known. flat: each channel is a run
    of features, as many as there were places. present: [C], the channels that the smaller network has there.
    reason: why all of them are.
    """

    varies: Tensor
    constants: Tensor
    behind: int
    ndim: int | None = None
    flat: bool = False
    present: Tensor = field(init=False)
    reason: str = ""

    def __post_init__(self) -> None:
        self.present = self.varies.clone()

    @property
    def num_channels(self) -> int:
        return len(self.varies)

    def fill(self, reason: str) -> None:
        """Ask for all channels."""
        self.present = torch.ones_like(self.present)
        self.reason = self.reason or reason


@dataclass(frozen=True)
class Link:
    """Channels that are present together: those of ``source``, and from ``start`` on runs in ``target``.

    repeat: the length of a run. both: they go together; otherwise what is present at the source is so at the
    target, which may have more.
    """

    source: Value
    target: Value
    start: int = 0
    repeat: int = 1
    both: bool = True

    def settle(self) -> bool:
        """Bring both sides together; whether something has changed."""
        source, target = self.source, self.target
        stop = self.start + source.num_channels * self.repeat
        runs = target.present[self.start : stop].reshape(-1, self.repeat)
        union = source.present | runs.any(1) if self.both else source.present
        wanted = union[:, None] | (runs if not self.both else False)
        changed = bool((wanted.expand_as(runs) != runs).any())
        if self.both:
            changed |= bool((union != source.present).any())
            source.reason, source.present = source.reason or target.reason, union
            target.reason = target.reason or source.reason
        target.present = target.present.clone()
        target.present[self.start : stop] = wanted.expand_as(runs).reshape(-1)
        return changed


@dataclass(frozen=True)
class Step:
    """A layer that can be made smaller, with what it reads (None: something that is whole) and gives."""

    name: str
    layer: Any
    before: Value | None
    after: Value


# --- what constants pass through --------------------------------------------------------

_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Softsign, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold),
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NAMES = (
    *("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "selu_", "celu", "celu_"),
    *("gelu", "silu", "mish", "softplus", "softsign", "tanh", "tanh_", "sigmoid", "sigmoid_", "logsigmoid"),
    *("hardtanh", "hardtanh_", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink"),
    *("threshold", "threshold_", "abs", "exp", "log", "log1p", "sqrt", "square", "neg", "sin", "cos", "erf"),
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "pow", "maximum", "minimum"),
    *("clamp", "clamp_", "clamp_min", "clamp_max"),
)
_OPERATORS = ("add", "sub", "mul", "truediv", "neg", "pow", "iadd", "isub", "imul", "itruediv")
_FUNCTIONS: frozenset[Any] = frozenset(
    getattr(home, name)
    for home, names in ((F, _NAMES), (torch, _NAMES), (operator, _OPERATORS))
    for name in names
    if hasattr(home, name)
)
_METHODS = frozenset(name for name in _NAMES if hasattr(Tensor, name))
_SAME = ("contiguous", "detach", "clone")  # methods that change nothing
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_AUGMENTED = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
_DROPOUT_FUNCTIONS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)
_POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
)
_POOL_FUNCTIONS = (
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool1d, F.adaptive_max_pool2d),
    *(F.adaptive_max_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, torch.adaptive_avg_pool1d),
)
_MEAN_POOL_FUNCTIONS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_MEAN_POOL_ARGUMENTS = (
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
_WHOLE = slice(None, None, None)


class Flow:
    """The values of one graph.

    graph: that of the part ``prefix`` of a network. layers: its modules, by their names in the graph. masks:
    the outputs that layers keep. fixed: layers that stay as they are, with the reasons.
    """

    def __init__(
        self,
        graph: fx.Graph,
        prefix: str,
        layers: Mapping[str, nn.Module],
        masks: Mapping[nn.Module, Tensor],
        fixed: Mapping[nn.Module, str],
    ) -> None:
        self.prefix, self.layers, self.masks, self.fixed = prefix, layers, masks, fixed
        self.values: dict[fx.Node, Value] = {}
        self.shapes: dict[fx.Node, fx.Node] = {}  # nodes that are the sizes of another one
        self.batches: dict[fx.Node, fx.Node] = {}  # nodes that are the length of a first axis: whose
        self.first_axis: dict[fx.Node, fx.Node] = {}  # where the first axis of a node comes from
        self.aliases: set[fx.Node] = set()  # nodes that may be the memory of their first input
        self.links: list[Link] = []
        self.steps: list[Step] = []
        self.augments = any(_augments(type(m).forward) for m in layers.values() if not is_layer(m))
        for node in graph.nodes:
            self._follow(node)
        unsettled = 1
        while unsettled:
            unsettled = sum(link.settle() for link in self.links)

    def _follow(self, node: fx.Node) -> None:
        self.first_axis[node] = node
        if self._is_size(node):
            return
        value = self._handled(node)
        if value is None:
            for each in self._read_by(node):
                each.fill(self._reason(node))
            return
        self.values[node] = value
        self.first_axis[node] = self.first_axis[node.all_input_nodes[0]]

    def _read_by(self, node: fx.Node) -> Iterator[Value]:
        for each in node.all_input_nodes:
            if (value := self.values.get(self.shapes.get(each, each))) is not None:
                yield value

    def _reason(self, node: fx.Node) -> str:
        if node.op == "output":
            return "what leaves the network has all its channels"
        if node.op == "call_module":
            layer = self.layers[str(node.target)]
            return self.fixed.get(layer, f"{type(layer).__name__} {self._name(node)!r} needs all channels")
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
        return f"{called}() needs all channels"

    def _name(self, node: fx.Node) -> str:
        return f"{self.prefix}.{node.target}".strip(".")

    def _handled(self, node: fx.Node) -> Value | None:
        """What a node gives, or None where all channels are needed."""
        try:
            return self._understood(node)
        except TypeError:  # arguments that are not known here
            return None

    def _understood(self, node: fx.Node) -> Value | None:
        if node.op == "call_module":
            return self._of_layer(node, self.layers[str(node.target)])
        if node.op == "call_function":
            return self._of_function(node, node.target)
        if node.op == "call_method":
            return self._of_method(node, str(node.target))
        return None

    # --- layers -----------------------------------------------------------------------------------

    def _of_layer(self, node: fx.Node, layer: Any) -> Value | None:
        kind = type(layer)
        if layer in self.fixed or len(node.args) != 1 or node.kwargs:
            return None
        if kind is nn.Linear or (kind in CONVOLUTIONS and layer.groups == 1):
            return self._weighted(node, layer)
        value = self._input(node)
        if value is None:
            return None
        if kind in NORMS:
            return self._normalised(node, layer, value)
        if kind in _ACTIVATIONS:
            return self._pointwise(node, layer, in_place=getattr(layer, "inplace", False))
        if kind in (*_DROPOUTS, nn.Identity) or (kind is SeededDropout and not (layer.sampled and layer.p)):
            return self._same(node, in_place=getattr(layer, "inplace", False))
        if kind in _POOLS:
            return self._pooled(node, vars(layer))
        if kind is nn.Flatten:
            return self._flattened(node, layer.start_dim, layer.end_dim)
        return None

    def _input(self, node: fx.Node) -> Value | None:
        first = node.args[0] if node.args else None
        return self.values.get(first) if isinstance(first, fx.Node) else None

    def _weighted(self, node: fx.Node, layer: Any) -> Value:
        """A linear layer or a convolution: outputs without weights hold their bias."""
        weight = layer.weight
        behind = CONVOLUTIONS.get(type(layer), 0)
        before = self._input(node)
        if before is not None:
            read = self._features(before, weight.shape[1])
            if read is None or read.behind != behind:
                before.fill(self._reason(node))
                read = None
            before = read
        varies = self.masks.get(layer, torch.ones(len(weight), dtype=torch.bool)).clone()
        if not varies.any():
            varies[0] = True  # of zero weights: no tensor is ever empty
        constants = _known(torch.zeros(len(weight)) if layer.bias is None else layer.bias)
        ndim = behind + 2 if behind else (None if before is None else before.ndim)
        after = Value(varies, constants, behind, ndim)
        self.steps.append(Step(self._name(node), layer, before, after))
        return after

    def _features(self, value: Value, width: int) -> Value | None:
        """A value whose channels are the features of a layer that reads so many."""
        if not value.flat:
            return value if value.num_channels == width else None
        places = width // value.num_channels
        if places * value.num_channels != width:
            return None
        varies, constants = (t.repeat_interleave(places) for t in (value.varies, value.constants))
        features = Value(varies, constants, 0, 2)
        self.links.append(Link(value, features, repeat=places))
        return features

    def _normalised(self, node: fx.Node, layer: Any, value: Value) -> Value | None:
        """BatchNorm: β + γ (c − mean)/√(variance + ε)."""
        before = self._features(value, layer.num_features)
        if before is None or before.behind not in NORMS[type(layer)] or layer.running_mean is None:
            return None
        mean, variance, scale, shift = (
            None if tensor is None else _known(tensor)
            for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        )
        constants = F.batch_norm(before.constants[None], mean, variance, scale, shift, False, 0.0, layer.eps)
        after = Value(before.varies, constants[0], before.behind, before.ndim if before.behind else 2)
        self.links.append(Link(before, after, both=False))
        self.steps.append(Step(self._name(node), layer, before, after))
        return after

    # --- functions and methods --------------------------------------------------------------------

    def _of_function(self, node: fx.Node, function: Any) -> Value | None:
        if function in (torch.cat, torch.concat):
            return self._joined(node, *node.args, **_with_dim(node.kwargs))
        if function in _FUNCTIONS:
            in_place = _may_be_in_place(node, function) or (self.augments and function in _AUGMENTED)
            return self._pointwise(node, function, in_place=in_place)
        if self._input(node) is None:
            return None
        if function in _DROPOUT_FUNCTIONS:
            given = inspect.signature(function).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            drops, in_place = (given.arguments[name] for name in ("training", "inplace"))
            return None if drops is not False else self._same(node, in_place=in_place)
        if function in (*_POOL_FUNCTIONS, *_MEAN_POOL_FUNCTIONS):
            given = dict(zip(_MEAN_POOL_ARGUMENTS, node.args[1:], strict=False))
            return self._pooled(node, (given if function in _MEAN_POOL_FUNCTIONS else {}) | node.kwargs)
        if function is operator.getitem:
            return self._taken(node, node.args[1])
        if function is F.pad:
            return self._padded(node, *node.args[1:], **node.kwargs)
        if function in (torch.flatten, torch.mean):
            return self._of_method(node, function.__name__)
        if function is torch.reshape:
            return self._reshaped(node, node.args[1:])
        return None

    def _of_method(self, node: fx.Node, method: str) -> Value | None:
        if method in _METHODS:
            return self._pointwise(node, getattr(Tensor, method), in_place=_may_be_in_place(node, method))
        if self._input(node) is None:
            return None
        if method in _SAME and len(node.args) == 1 and not node.kwargs:
            return self._same(node)
        if method == "flatten":
            return self._flattened(node, *node.args[1:], **node.kwargs)
        if method in ("view", "reshape") and not node.kwargs:
            return self._reshaped(node, node.args[1:])
        if method == "mean":
            return self._averaged(node, *node.args[1:], **_with_dim(node.kwargs))
        return None

    def _pointwise(self, node: fx.Node, function: Callable, *, in_place: bool = False) -> Value | None:
        """The same function of every channel, of one value or of several that have the same channels."""
        found = [self.values.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        values = [each for each in found if isinstance(each, Value)]
        settings = [each for each in (*found, *node.kwargs.values()) if not isinstance(each, Value)]
        alike = {(each.num_channels, each.behind, each.flat) for each in values}
        if len(alike) != 1 or not all(isinstance(each, bool | int | float | str) for each in settings):
            return None
        if in_place and isinstance(node.args[0], fx.Node) and not self._is_alone(node.args[0]):
            return None
        arguments = [each.constants.clone() if isinstance(each, Value) else each for each in found]
        result = self._linked(values, function(*arguments, **node.kwargs))
        result.varies = torch.stack([each.varies for each in values]).any(0)
        result.present = result.varies.clone()
        return result

    def _linked(self, values: list[Value], constants: Tensor, **changes: Any) -> Value:
        """A value with the channels of others."""
        result = replace(values[0], constants=constants, reason="", **changes)
        self.links += [Link(each, result) for each in values]
        return result

    def _same(self, node: fx.Node, *, in_place: bool = False, **changes: Any) -> Value | None:
        """What leaves constant channels as they are."""
        value = self._input(node)
        if value is None or (in_place and not self._is_alone(node.args[0])):
            return None
        self.aliases.add(node)
        return self._linked([value], value.constants, **changes)

    def _is_alone(self, node: Any) -> bool:
        """Whether nobody else reads the memory of a value that is written over."""
        while len(node.users) == 1:
            if node not in self.aliases:
                return True
            node = node.args[0]
        return False

    def _pooled(self, node: fx.Node, settings: Mapping[str, Any]) -> Value | None:
        """Maxima and means over windows, which are constant where the inputs are.

        Not where zeros count, or another divisor.
        """
        value = self._input(node)
        zeros = settings.get("padding", 0) not in (0, (0,), (0, 0), (0, 0, 0), [0], [0, 0], [0, 0, 0])
        is_mean = node.target in _MEAN_POOL_FUNCTIONS or "count_include_pad" in settings
        if value is None or not value.behind or settings.get("return_indices", False):
            return None
        if is_mean and zeros and settings.get("count_include_pad", True) is not False:
            return None
        return None if settings.get("divisor_override") is not None else self._same(node)

    def _flattened(self, node: fx.Node, start_dim: Any = 0, end_dim: Any = -1) -> Value | None:
        value = self._input(node)
        if value is None or not value.behind or (start_dim, end_dim) != (1, -1):
            return None
        return self._same(node, behind=0, ndim=2, flat=True)

    def _reshaped(self, node: fx.Node, sizes: tuple) -> Value | None:
        """``view(x.size(0), -1)`` is ``flatten(1)``, if that is the size of this value's first axis."""
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = tuple(sizes[0])
        first = node.args[0]
        assert isinstance(first, fx.Node)
        if len(sizes) != 2 or sizes[1] != -1 or not isinstance(sizes[0], fx.Node):
            return None
        if self.batches.get(sizes[0]) is not self.first_axis[first]:
            return None
        return self._flattened(node, 1)

    def _averaged(self, node: fx.Node, dim: Any = None, keepdim: Any = False) -> Value | None:
        """The mean over axes of space."""
        value = self._input(node)
        axes = [dim] if isinstance(dim, int) else dim
        if value is None or not value.behind or not isinstance(axes, tuple | list) or not axes:
            return None
        if not all(isinstance(axis, int) and _is_space(value, axis) for axis in axes):
            return None
        if keepdim is not False:
            return self._same(node) if keepdim is True else None
        left = value.behind - len({axis % (value.behind + 2) for axis in axes})
        return self._same(node, behind=left, ndim=left + 2)

    def _taken(self, node: fx.Node, index: Any) -> Value | None:
        """``x[:, :, ::2, ::2]``: some places of all channels."""
        value = self._input(node)
        if value is None or not value.behind or not isinstance(index, tuple) or len(index) > value.behind + 2:
            return None
        everything = index[:2] == (_WHOLE, _WHOLE) and all(isinstance(each, slice) for each in index)
        return self._same(node) if everything else None

    def _joined(self, node: fx.Node, tensors: Any = (), dim: Any = 0) -> Value | None:
        """Values side by side along the axis of their channels."""
        parts = [self.values.get(each) for each in tensors] if isinstance(tensors, tuple | list) else []
        values = [part for part in parts if part is not None and not part.flat]
        if not values or len(values) != len(parts) or len({value.behind for value in values}) != 1:
            return None
        first = values[0]
        if dim != -1 - first.behind and not (dim == 1 and all(v.ndim == first.behind + 2 for v in values)):
            return None
        varies, constants = (torch.cat([getattr(v, n) for v in values]) for n in ("varies", "constants"))
        result = Value(varies, constants, first.behind, first.ndim)
        start = 0
        for value in values:
            self.links.append(Link(value, result, start))
            start += value.num_channels
        return result

    def _padded(
        self, node: fx.Node, pad: Any = (), mode: Any = "constant", value: Any = None
    ) -> Value | None:
        """New channels of one number before and behind those of a value; they are always there."""
        before = self._input(node)
        if before is None or before.flat or mode != "constant" or not isinstance(value, int | float | None):
            return None
        length = 2 * (before.behind + 1)
        if not isinstance(pad, tuple | list) or len(pad) != length or any(map(_is_no_count, pad)):
            return None
        if any(pad[:-2]):
            return None
        varies, constants = (
            torch.cat([t.new_full((pad[-2],), filling), t, t.new_full((pad[-1],), filling)])
            for t, filling in ((before.varies, False), (before.constants, value or 0))
        )
        result = Value(varies, constants, before.behind, before.ndim)
        result.present[: pad[-2]] = result.present[pad[-2] + before.num_channels :] = True
        self.links.append(Link(before, result, pad[-2]))
        return result

    # --- sizes ------------------------------------------------------------------------------------

    def _is_size(self, node: fx.Node) -> bool:
        """Whether a node asks for nothing but sizes that are as they were, or for a type or a device."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return False
        if source in self.shapes:
            if node.target is not operator.getitem:
                return False
            return not node.users or self._keeps_size(node, self.shapes[source], node.args[1])
        if node.op == "call_method" and node.target == "size" and len(node.args) == 2:
            return self._keeps_size(node, source, node.args[1])
        if (node.op == "call_method" and node.target == "size" and not node.kwargs) or (
            node.target is getattr and node.args[1] == "shape"
        ):
            self.shapes[node] = source
            return True
        return node.target is getattr and node.args[1] in ("dtype", "device", "ndim", "is_cuda")

    def _keeps_size(self, node: fx.Node, source: fx.Node, index: Any) -> bool:
        if index == 0:
            self.batches[node] = self.first_axis[source]
        value = self.values.get(source)
        if value is None or index == 0:
            return True
        if isinstance(index, slice):
            return index.stop is None and index.step is None and _is_space(value, index.start)
        return _is_space(value, index)


def _with_dim(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords in which an axis goes by its first name."""
    return {"dim" if name == "axis" else name: value for name, value in keywords.items()}


def _is_space(value: Value, axis: Any) -> bool:
    """Whether an axis stands behind that of the channels."""
    return isinstance(axis, int) and bool(value.behind) and (axis >= 2 or -value.behind <= axis < 0)


def _is_no_count(number: Any) -> bool:
    return not isinstance(number, int) or number < 0


def _may_be_in_place(node: fx.Node, called: Any) -> bool:
    name = called if isinstance(called, str) else getattr(called, "__name__", "")
    flagged = any(each is True for each in (*node.args, *node.kwargs.values()))
    return flagged or called in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _known(tensor: Tensor) -> Tensor:
    """The values of a tensor, in double precision and where every arithmetic is at hand."""
    return tensor.detach().cpu().double()
