"""Networks that really get smaller: outputs whose weights are zero are taken out; nothing else changes."""

import copy
import dis
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from polymode.errors import InputError, unknown_name
from polymode.networks.channels import CannotTrace, Flow, Step, is_layer, trace
from polymode.networks.compact_layers import (
    NORMS,
    add_bias,
    add_constant_kernel,
    keep_features,
    keep_weights,
    pads_zeros,
    widen,
)
from polymode.networks.costs import layer_costs, multiplications
from polymode.trees import Tree

PRUNABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
SIZES = ("in_features", "out_features", "in_channels", "out_channels", "num_features")  # that layers tell


@dataclass(frozen=True)
class Compacted:
    """A network that got smaller, and what of it did.

    module: an ordinary module with the code of the original one. masks: what it was made by. removed, inputs:
    how many outputs and inputs of a weight are left, of how many. left: what is as wide as it was, and why.
    """

    module: nn.Module
    masks: Mapping[str, Tensor]
    removed: Mapping[str, tuple[int, int]]
    inputs: Mapping[str, tuple[int, int]]
    left: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        names = list(dict.fromkeys([*self.removed, *self.inputs]))
        if not names and not self.left:
            return "nothing to take out: every output has weights"
        rows: list[tuple[str, ...]] = [("weight", "outputs", "inputs")]
        for name in names:
            rows.append((name, *(_counted(each.get(name)) for each in (self.removed, self.inputs))))
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{row[0]:<{first}}  {row[1]:<{second}}  {row[2]}" for row in rows]
        if self.left:
            lines += [
                "",
                "left as wide as it was",
                *(f"{n or 'the network'}: {r}" for n, r in self.left.items()),
            ]
        return "\n".join(lines)


def _counted(count: tuple[int, int] | None) -> str:
    return "all" if count is None else f"{count[0]} of {count[1]}"


def masks_of(module: nn.Module) -> dict[str, Tensor]:
    """Masks of the outputs that are not without weights, for layers with at least one that is.

    A mask [outputs] stands under the name of its weight [outputs, ...]; an output whose weights are all
    exactly zero is not kept, whichever way they got there.
    """
    masks = {}
    for name, layer in module.named_modules():
        if isinstance(layer, PRUNABLE) and isinstance(layer._parameters.get("weight"), Tensor):
            kept = (layer.weight.detach() != 0).flatten(1).any(1).cpu()
            if not kept.all():
                masks[f"{name}.weight".lstrip(".")] = kept
    return masks


def compact(module: nn.Module, masks: Mapping[str, Tensor]) -> Compacted:
    """Make a network smaller by the outputs that masks do not keep; it computes what the masked network does.

    The masked network is the module with those rows of its weights set to zero, biases left alone, in
    evaluation mode. masks: booleans [outputs] by the names of weights of linear layers and convolutions. The
    module itself is not touched.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"compact takes a module, got {module!r}: build the network first.")
    return compact_with(module, masks, None)


def compact_with(module: nn.Module, masks: Mapping[str, Tensor], names: Iterable[str] | None) -> Compacted:
    """Compact a module whose tensors are known by name, as those of a file are.

    Constants that are all zero are left out; names: of the tensors that the result has, whatever the weights
    of the module at hand.
    """
    masks = {name: _checked(module, name, mask) for name, mask in masks.items()}
    try:
        small = copy.deepcopy(module)
    except (TypeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"This {type(module).__name__} cannot be copied ({error}). What torch.nn.utils.prune has changed "
            "is made permanent with prune.remove."
        ) from error
    by_layer: dict[nn.Module, Tensor] = {}
    with torch.no_grad():
        for name, mask in masks.items():
            layer = small.get_submodule(name.rpartition(".")[0])
            layer.weight[~mask.to(layer.weight.device)] = 0  # type: ignore[index,union-attr]
            by_layer[layer] = mask
    return _Compaction(small, masks, by_layer, None if names is None else frozenset(names)).result()


def _checked(module: nn.Module, name: str, mask: Tensor) -> Tensor:
    owner, _, last = str(name).rpartition(".")
    layer = dict(module.named_modules()).get(owner)
    if last != "weight" or not isinstance(layer, PRUNABLE) or layer._parameters.get("weight") is None:
        known = [
            f"{n}.weight".lstrip(".") for n, part in module.named_modules() if isinstance(part, PRUNABLE)
        ]
        raise unknown_name("weight of a linear layer or convolution in masks", name, known)
    outputs = layer.weight.shape[0]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (outputs,):
        seen = f"{list(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"The mask of {name!r} must be booleans [{outputs}], true for what is kept; got {seen}."
        )
    return mask.detach().cpu()


@dataclass(frozen=True)
class _Part:
    """A part of the network that was traced by itself."""

    name: str
    module: nn.Module
    graph: fx.Graph


class _Compaction:
    """Makes a masked copy of a network smaller, in place."""

    def __init__(
        self,
        module: nn.Module,
        masks: Mapping[str, Tensor],
        by_layer: Mapping[nn.Module, Tensor],
        names: frozenset[str] | None,
    ) -> None:
        self.module, self.masks, self.by_layer, self.names = module, masks, by_layer, names
        self.removed: dict[str, tuple[int, int]] = {}
        self.inputs: dict[str, tuple[int, int]] = {}
        self.left: dict[str, str] = {}

    def result(self) -> Compacted:
        inner = getattr(self.module, "wraps", "")  # a likelihood's own part beside the network
        parts = list(self._parts(inner, self.module.get_submodule(inner)))
        fixed = _fixed(self.module, parts)
        for part in parts:
            layers = dict(part.module.named_modules(remove_duplicate=False))
            sizes = [
                (layer, n, getattr(layer, n)) for layer in layers.values() for n in SIZES if hasattr(layer, n)
            ]
            for step in Flow(part.graph, part.name, layers, self.by_layer, fixed).steps:
                self._shrink(step)
            if not _computes_the_same(
                part
            ):  # its code reads sizes: they have to be those that it was traced with
                for layer, name, size in sizes:
                    setattr(layer, name, size)
        self._explain(fixed)
        return Compacted(self.module, self.masks, self.removed, self.inputs, self.left)

    def _parts(self, name: str, module: nn.Module) -> Iterator[_Part]:
        """A module, if its code can be followed, and what cannot be followed in it, piece by piece."""
        opaque: dict[str, str] = {}
        if not is_layer(module) or type(module) in PRUNABLE:
            try:
                graph, opaque = trace(module)
                yield _Part(name, module, graph)
            except CannotTrace as error:
                opaque = {"": error.reason}
        elif isinstance(module, nn.ModuleList | nn.ModuleDict):
            opaque = {"": ""}
        for inside, reason in opaque.items():
            yield from self._pieces(f"{name}.{inside}".strip("."), module.get_submodule(inside), reason)

    def _pieces(self, name: str, module: nn.Module, reason: str) -> Iterator[_Part]:
        """What stands in a module whose own code cannot be followed."""
        if reason and any(mask.startswith(f"{name}.".lstrip(".")) for mask in self.masks):
            self.left[name] = f"{type(module).__name__} cannot be traced: {reason}"
        for child_name, child in module.named_children():
            if _calls_whole(module, child_name):  # whatever else its code does might see what is inside
                yield from self._parts(f"{name}.{child_name}".lstrip("."), child)

    def _shrink(self, step: Step) -> None:
        is_norm = isinstance(step.layer, tuple(NORMS))
        (self._shrink_norm if is_norm else self._shrink_weights)(step)
        if bool(step.after.present.all()) and step.after.reason and not step.after.varies.all():
            name = step.name if is_norm else self._weight(step)
            self.left[name] = f"constants are filled in: {step.after.reason}"

    def _weight(self, step: Step) -> str:
        return f"{step.name}.weight".lstrip(".")

    def _shrink_norm(self, step: Step) -> None:
        assert step.before is not None
        kept = step.before.present
        if not kept.all():
            keep_features(step.layer, kept)
        self._widen(step, kept)

    def _shrink_weights(self, step: Step) -> None:
        layer, before, rows = step.layer, step.before, step.after.varies
        weight = layer.weight.detach().cpu().double()[rows]
        columns = torch.ones(weight.shape[1], dtype=torch.bool) if before is None else before.present
        if not (rows.all() and columns.all()):
            keep_weights(layer, rows, columns)
        for counts, kept in ((self.removed, rows), (self.inputs, columns)):
            if not kept.all():
                counts[self._weight(step)] = (int(kept.sum()), len(kept))
        if before is not None and not columns.all():
            constants = before.constants[~columns]
            self._keep_constants(step, torch.einsum("oi...,i->o...", weight[:, ~columns], constants))
        self._widen(step, rows)

    def _keep_constants(self, step: Step, kernel: Tensor) -> None:
        """Keep what inputs that are not there any more contribute: Σ_j c_j W_j, [outputs, ...]."""
        if pads_zeros(step.layer):
            if self._has(step, "constant_kernel", kernel):
                add_constant_kernel(step.layer, kernel)
            return
        shares = kernel.reshape(len(kernel), -1).sum(1)
        if step.layer.bias is not None or self._has(step, "bias", shares):
            add_bias(step.layer, shares)

    def _widen(self, step: Step, computed: Tensor) -> None:
        present = step.after.present
        if bool((present == computed).all()):
            return
        rest = present & ~computed
        places = torch.cat([computed.nonzero()[:, 0], rest.nonzero()[:, 0]])
        constants = step.after.constants[rest]
        given = constants if self._has(step, "constants", constants) else None
        widen(step.layer, step.after.behind, places.argsort(), given)

    def _has(self, step: Step, name: str, values: Tensor) -> bool:
        """Whether constants are kept as a tensor of a layer: not where all of them are zero."""
        if self.names is None:
            return bool((values != 0).any())
        return f"{step.name}.{name}".lstrip(".") in self.names

    def _explain(self, fixed: Mapping[nn.Module, str]) -> None:
        """Say of every mask that has taken nothing out why it has not."""
        for name, mask in self.masks.items():
            layer = self.module.get_submodule(name.rpartition(".")[0])
            if name in self.removed or mask.all():
                continue
            grouped = getattr(layer, "groups", 1) != 1
            reason = "it is a grouped convolution" if grouped else "the code that calls it is not known"
            self.left[name] = fixed.get(layer, reason)


def _computes_the_same(part: _Part) -> bool:
    """Whether the code of a part calls the same with the same numbers as before its layers were changed."""
    try:
        graph, _ = trace(part.module)
    except CannotTrace:
        return False
    return str(graph) == str(part.graph)


def _calls_whole(module: nn.Module, child: str) -> bool:
    """Whether the code of a module does nothing with one of its children but call it, as far as can be seen.

    Methods of its own, functions inside it and sizes of layers could look into a child.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    code = getattr(type(module).forward, "__code__", None)
    if code is None or any(hasattr(each, "co_code") for each in code.co_consts):
        return False
    children, names = {name for name, _ in module.named_children()}, set(code.co_names)
    if names & {"weight", "bias", *SIZES} or any(hasattr(type(module), name) for name in names - children):
        return False
    uses = [step for step in dis.get_instructions(code) if step.argval == child]
    called = [step.opname == "LOAD_METHOD" or "NULL" in step.argrepr for step in uses]
    return bool(called) and all(called)


def _fixed(module: nn.Module, parts: Iterable[_Part]) -> dict[nn.Module, str]:
    """Layers that stay as they are, since somebody else than their one caller depends on them."""
    calls: Counter[nn.Module] = Counter()
    read: set[int] = set()
    for part in parts:
        layers = dict(part.module.named_modules(remove_duplicate=False))
        for node in part.graph.nodes:
            if node.op == "call_module":
                calls[layers[str(node.target)]] += 1
            elif node.op == "get_attr":
                read |= _tensor_at(part.module, str(node.target))
    owners = Counter(id(tensor) for layer in module.modules() for tensor in layer._parameters.values())
    fixed = {}
    for layer in module.modules():
        tensors = (*layer._parameters.values(), *layer._buffers.values())
        own = {id(tensor) for tensor in tensors if tensor is not None}
        if layer._forward_hooks or layer._forward_pre_hooks:
            fixed[layer] = f"this {type(layer).__name__} has hooks"
        elif "forward" in vars(layer):
            fixed[layer] = f"this {type(layer).__name__} has a forward of its own"
        elif not own:
            continue
        elif calls[layer] > 1:
            fixed[layer] = f"this {type(layer).__name__} is used {calls[layer]} times"
        elif any(owners[each] > 1 for each in own):
            fixed[layer] = f"this {type(layer).__name__} shares a tensor with another layer"
        elif own & read:
            fixed[layer] = f"the network reads the tensors of this {type(layer).__name__} itself"
    return fixed


def _tensor_at(module: nn.Module, name: str) -> set[int]:
    owner, _, last = name.rpartition(".")
    return {id(getattr(module.get_submodule(owner), last, None))}


class Sizes:
    """How much of each layer a compaction would leave, for any masks; the network is traced once.

    Multiplications of a layer follow from the outputs and inputs that it is left with: those really made.
    """

    def __init__(self, module: nn.Module, inputs: Tree) -> None:
        self.module = module
        self._compaction = _Compaction(module, {}, {}, None)
        inner = getattr(module, "wraps", "")
        self._parts = list(self._compaction._parts(inner, module.get_submodule(inner)))
        self._fixed = _fixed(module, self._parts)
        self._costs = layer_costs(module, inputs)
        self._whole = multiplications(module, inputs)

    def share(self, masks: Mapping[str, Tensor]) -> float:
        """The share of a network's multiplications that remains; masks: by layer, 0 for what is left out."""
        by_layer = {self.module.get_submodule(name): mask.detach().cpu() != 0 for name, mask in masks.items()}
        saved = 0
        for part in self._parts:
            layers = dict(part.module.named_modules(remove_duplicate=False))
            for step in Flow(part.graph, part.name, layers, by_layer, self._fixed).steps:
                if step.name in self._costs:
                    cost, rows = self._costs[step.name], step.after.varies
                    kept = int(rows.sum()) / len(rows)
                    if step.before is not None:
                        kept *= int(step.before.present.sum()) / len(step.before.present)
                    saved += cost.multiplications * (1 - kept)
        return 1 - saved / self._whole
