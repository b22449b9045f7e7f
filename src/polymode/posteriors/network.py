"""A prepared module with the meaning of its outputs: what all members of a posterior have in common."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from polymode.errors import CannotVectorise, CheckpointError
from polymode.likelihoods import Likelihood, Predictive
from polymode.networks.adaptations import Adaptation
from polymode.networks.members import (
    Backend,
    Members,
    Tensors,
    compiled_pass,
    copied_module,
    forward_members,
)
from polymode.networks.recording import form_of
from polymode.networks.surgery import (
    floating_type,
    has_convolutions,
    structure_of,
    tensors_of,
)
from polymode.trees import Tree, leaves, map_tree

# Looked up once a module and shape of inputs: a pass to find out costs as much as predicting one example.
_ACTIVATIONS: "WeakKeyDictionary[nn.Module, dict[tuple, int]]" = WeakKeyDictionary()

# What vmap has turned out not to be able to run in evaluation mode: modules with the names that members own.
_ONE_BY_ONE: "WeakKeyDictionary[nn.Module, set[frozenset[str]]]" = WeakKeyDictionary()

# A predictive of each graph that was compiled for a module, for all that is no tensor in it.
_PREDICTIONS: "WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, Likelihood]]]" = WeakKeyDictionary()

Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class Network:
    """A prepared module with the meaning of its outputs and the way its members are run.

    The module is a template: members replace its weights, what they do not hold stays as it is
    (frozen parameters and constant buffers).
    """

    module: nn.Module
    likelihood: Likelihood
    backend: Backend = "loop"

    always_eval: tuple[str, ...] = ()  # layers the user keeps in evaluation mode, such as frozen BatchNorm
    draws_globally: bool = False  # the module draws from the global random state by itself (``F.dropout``)
    adaptations: tuple[Adaptation, ...] = ()  # what was done to the user's network, in this order
    channels_last: bool = field(init=False)
    dtype: torch.dtype = field(init=False)  # of the weights, and hence of floating-point inputs

    def __post_init__(self) -> None:
        self.module.requires_grad_(False)
        self.module.eval()
        object.__setattr__(self, "channels_last", has_convolutions(self.module))
        object.__setattr__(self, "dtype", floating_type(self.module))

    def train(self) -> None:
        """Put the module into training mode, but for the layers that the user keeps out of it."""
        self.module.train()
        for name in self.always_eval:
            self.module.get_submodule(name).eval()

    def constants(self, owned: Iterable[str]) -> Tensors:
        """Tensors of the template that members do not own, and hence all have in common."""
        owned = set(owned)
        return {n: t for n, t in tensors_of(self.module).items() if n not in owned}

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def fingerprint(self) -> dict[str, list]:
        """Names, shapes and types of all tensors: two networks with the same can exchange weights."""
        return {
            name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
            for name, tensor in sorted(tensors_of(self.module).items())
        }

    def activation_bytes(self, two: Members, example: Tree) -> int:
        """Bytes of the largest output that a layer has for each member, for a batch of one example.

        Layers that run once for all members do not count. two: members to find out with.
        """
        known = _ACTIVATIONS.setdefault(self.module, {})
        names = frozenset(two.stacked)
        key = (names, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves(example)))
        if key not in known:
            sizes = [1]

            def note(_: nn.Module, __: Tree, outputs: Tree) -> None:
                own = [t for t in leaves(outputs) if isinstance(t, Tensor) and is_batchedtensor(t)]
                sizes.append(sum(t.numel() * t.element_size() for t in own))

            watched = copied_module(self.module)  # other threads may be predicting with the module
            for part in watched.modules():
                part.register_forward_hook(note)
            try:
                with torch.no_grad():
                    forward_members(watched, two, self.arrange(example), backend="vmap")
            except (RuntimeError, ValueError, TypeError, IndexError, CannotVectorise):
                pass  # the pass itself says what is wrong
            known[key] = max(sizes)
        return known[key]

    def run_members(
        self, run: Callable[[Members, Backend], Outputs], members: Members, backend: Backend
    ) -> Outputs:
        """Run members in evaluation mode, on the loop where vmap fails after all.

        Whether vmap can run a module may depend on what members own and on the number of inputs. The loop
        gives the same, and for inputs that no backend can take it says what is wrong with them. One member
        gains nothing from vmap, which would map what it shares with nobody, too.
        """
        names = frozenset(members.stacked)
        if backend == "loop" or members.num_members == 1 or names in _ONE_BY_ONE.get(self.module, ()):
            return run(members, "loop")
        try:
            return run(members, backend)
        except CannotVectorise as error:
            outputs = run(members, "loop")
            _ONE_BY_ONE.setdefault(self.module, set()).add(names)
            warnings.warn(
                f"Members predict one after another from now on, because vmap cannot run this "
                f"{type(self.module).__name__} here: {error.reason}",
                stacklevel=2,
            )
            return outputs

    def arrange(self, inputs: Tree, *, has_groups: bool = False) -> Tree:
        """Bring inputs [B, ...], or [G, B, ...], to the network's precision and preferred memory format."""

        def arranged(x: Tensor) -> Tensor:
            # A compiled graph reads memory as it is: signs that PyTorch has only noted are written there.
            x = x.resolve_conj().resolve_neg()
            x = x.to(self.dtype) if x.is_floating_point() else x
            if not self.channels_last or x.ndim != 4 + has_groups:
                return x
            images = x.flatten(0, 1) if has_groups else x
            images = images.contiguous(memory_format=torch.channels_last)
            return images.unflatten(0, x.shape[:2]) if has_groups else images

        return map_tree(arranged, inputs)


def check_layers(saved: Mapping[str, Any], module: nn.Module, where: str) -> None:
    """Raise when a file was written for a network of other layers, naming the first difference.

    What layers say of themselves is compared under one version of torch only, as it may change its words.
    """
    exact = saved["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    there, here = saved["parts"], structure_of(module)
    for name in [*there, *(name for name in here if name not in there)]:
        first, second = (parts.get(name, "absent") for parts in (there, here))
        if first != second and (exact or first.partition("(")[0] != second.partition("(")[0]):
            part = repr(name) if name else "the module itself"
            raise CheckpointError(
                f"{where} belongs to another network: {part} is {first} there and {second} in the module "
                "given. Pass the module it was made with; where a class has merely been renamed, "
                "load_posterior(..., check_structure=False) reads it all the same."
            )


def check_tensors(found: Mapping[str, list], expected: Mapping[str, list], where: Path) -> None:
    """Raise when the tensors of a file are not those that a network needs, naming the first difference."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in expected:
            raise CheckpointError(f"{where} holds {name!r}, which the network does not have.")
        if name not in found:
            raise CheckpointError(f"{where} lacks {name!r}, which the network needs.")
        if found[name] != expected[name]:
            raise CheckpointError(f"{where}: {name!r} is {found[name]}, the network needs {expected[name]}.")


def check_fingerprint(saved: dict, given: dict, where: str) -> None:
    """Raise when a file was written for another network, naming the first difference."""
    saved = {name: list(entry) for name, entry in saved.items()}
    for name in sorted(saved.keys() | given.keys()):
        if saved.get(name) != given.get(name):
            raise CheckpointError(
                f"{where} belongs to another network: {name!r} is {saved.get(name, 'absent')} there "
                f"and {given.get(name, 'absent')} in the module given. Pass the module it was made with."
            )


def compiled_prediction(
    network: Network, predict: Callable[..., Predictive], arguments: tuple[Tree, ...]
) -> Predictive | None:
    """What a function makes of members and inputs, as one compiled graph; None where there can be none."""
    made: list[Predictive] = []

    def tensors(*arguments: Tree) -> Tensors:
        made[:] = [predict(*arguments)]
        return {name: value for name, value in vars(made[0]).items() if isinstance(value, Tensor)}

    known = _PREDICTIONS.setdefault(network.module, {})
    key = (id(network.likelihood), form_of(arguments))
    if frozenset(arguments[0]) in _ONE_BY_ONE.get(network.module, ()):
        return None
    try:
        with torch.no_grad():
            found = compiled_pass(network.module, tensors, arguments, ("predict", *key))
    except (CannotVectorise, RuntimeError, ValueError, TypeError, IndexError):
        return None  # the usual way says what is wrong
    if made:  # the likelihood stays alive with it, so that its identity is its own
        known[key] = (made[0], network.likelihood)
    return replace(known[key][0], **found) if key in known else None
