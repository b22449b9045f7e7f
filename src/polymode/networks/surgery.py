"""Find, select and exchange parts of a module, always on a copy."""

import copy
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from polymode.errors import CannotRedraw, InputError
from polymode.networks.layers import SeededDropout
from polymode.networks.members import Tensors
from polymode.seeds import global_seed
from polymode.trees import Tree, map_tree

Model = nn.Module | Callable[[], nn.Module]

NORMALISATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def prepare(module: nn.Module) -> nn.Module:
    """Copy a module and exchange its dropout layers for replayable ones; see ``prepare_in_place``."""
    try:
        copied = copy.deepcopy(module)
    except (TypeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"This {type(module).__name__} cannot be copied ({error}), and chains have copies of their own. "
            "Keep what cannot be copied (locks, open files, tensors of a graph) outside the module."
        ) from error
    return prepare_in_place(copied)


def prepare_in_place(module: nn.Module) -> nn.Module:
    """Exchange the dropout layers of a module that is ours to change.

    Names of parameters and buffers stay as they are; each dropout layer gains a ``seed`` buffer.
    Convolution kernels are laid out ``channels_last``, which CPU and GPU kernels prefer.
    """
    device = next((parameter.device for parameter in module.parameters()), None)
    found = _children_of_type(module, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    exchanged: dict[nn.Module, nn.Module] = {}  # a layer that stands in several places stays one
    for parent, name, child in found:
        if child not in exchanged:
            seeded = SeededDropout(child.p, len(exchanged), type(child))  # type: ignore[arg-type]
            exchanged[child] = seeded.to(device).train(child.training)
        setattr(parent, name, exchanged[child])
    if has_convolutions(module):
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def as_plain_module(module: nn.Module, trainable: Iterable[str]) -> nn.Module:
    """Undo ``prepare_in_place``: ordinary dropout layers, gradients where they are named."""
    for parent, name, child in _children_of_type(module, SeededDropout):
        assert isinstance(child, SeededDropout)
        setattr(parent, name, child.original(child.p).train(child.training))
    names = set(trainable)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)
    return module


def set_tensors(module: nn.Module, tensors: Tensors) -> None:
    """Copy values into parameters and buffers by name, also into buffers that are not persistent."""
    own = tensors_of(module)
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def _children_of_type(module: nn.Module, *types: type[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()  # named_children() leaves out what was seen before
        if type(child) in types and child is not None
    ]


def has_convolutions(module: nn.Module) -> bool:
    """Whether a module has two-dimensional convolutions."""
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def tensors_of(module: nn.Module) -> Tensors:
    """Parameters and buffers by name, tied ones once, detached."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def trainable_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters with a gradient, tied ones once."""
    return frozenset(name for name, p in module.named_parameters() if p.requires_grad)


def normalisation_and_bias_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that usually carry no weight decay."""
    names = {name for name, _ in module.named_parameters() if name.split(".")[-1] == "bias"}
    for prefix, part in module.named_modules():
        if isinstance(part, NORMALISATIONS):
            names |= {f"{prefix}.{name}".lstrip(".") for name, _ in part.named_parameters()}
    return frozenset(names)


def floating_type(module: nn.Module) -> torch.dtype:
    """The type of a module's floating-point weights; of several the most precise one."""
    types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return functools.reduce(torch.promote_types, types) if types else torch.get_default_dtype()


def match_precision(dtype: torch.dtype, inputs: Tree) -> Tree:
    """Floating-point inputs in the type of a network's weights; integers stay as they are."""
    return map_tree(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def structure_of(module: nn.Module) -> dict[str, str]:
    """The class of every part of a prepared module, with what it says of itself.

    What does not matter to predictions is left out: devices, places in memory, rates of dropout that is off.
    """
    return {name: _described(part) for name, part in module.named_modules()}


# Text that differs between equal layers: addresses, devices, whether memory is reused.
_INCIDENTAL = re.compile(r" at 0x[0-9a-fA-F]+|,? ?\b(device=(device\([^)]*\)|[^,)]*)|inplace=\w+)")


def _described(part: nn.Module) -> str:
    if isinstance(part, SeededDropout):
        return f"{part.original.__name__}({f'p={part.p}' if part.sampled else ''})"
    return f"{type(part).__name__}({_said_by(part)})"


def _said_by(part: nn.Module) -> str:
    try:
        return _INCIDENTAL.sub("", part.extra_repr()).lstrip(", ")
    except Exception:  # the user's own, which nobody may have called yet
        return ""


def batch_norms(module: nn.Module) -> list[str]:
    """Names of the layers whose outputs depend on the other examples of a batch."""
    kind = nn.modules.batchnorm._BatchNorm
    return [name for name, part in module.named_modules() if isinstance(part, kind)]


def running_statistics(module: nn.Module) -> list[str]:
    """Names of the means and variances that normalisation layers keep for prediction."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None
        for name in ("running_mean", "running_var")
    ]


def random_layers(module: nn.Module) -> list[str]:
    """Names of the dropout layers of a prepared module that drop anything."""
    parts = module.named_modules()
    return [name for name, part in parts if isinstance(part, SeededDropout) and part.p > 0]


def build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Run a model factory under a forked global random state."""
    with global_seed(seed):
        try:
            module = factory()
        except TypeError as error:
            name = getattr(factory, "__name__", repr(factory))
            raise InputError(
                f"The model factory {name!r} failed: {error}. It must work without arguments: wrap it, "
                "lambda: Net(20, 3), or pass a module."
            ) from error
    if not isinstance(module, nn.Module):
        raise InputError(f"The model factory returned {type(module).__name__}; it must return an nn.Module.")
    return module


def reinitialised(module: nn.Module, seed: int) -> nn.Module:
    """Copy a module and draw its parameters anew with each layer's ``reset_parameters``.

    A trainable tensor that no layer re-draws, or whose scale changes when it is re-drawn (custom or
    pretrained values), is an error: only the user's own factory knows how to draw it.
    """
    fresh = copy.deepcopy(module)
    covered: set[int] = set()
    with global_seed(seed), torch.no_grad():
        # Children first: a parent such as MultiheadAttention re-draws some of their tensors.
        for part in reversed(list(fresh.modules())):
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            frozen = [not parameter.requires_grad for parameter in part.parameters(recurse=False)]
            if callable(reset) and not (frozen and all(frozen)):  # frozen layers are the user's: keep them
                reset()
                covered |= {id(parameter) for parameter in part.parameters(recurse=False)}
    for (name, new), old in zip(fresh.named_parameters(), module.parameters(), strict=True):
        if not old.requires_grad:
            new.data.copy_(old)  # frozen values are the user's: keep them
        elif id(new) not in covered:
            raise CannotRedraw(f"{name!r} cannot be re-initialised: its layer has no reset_parameters().")
        elif not _same_scale(old.detach(), new.detach()):
            raise CannotRedraw(
                f"Re-initialising {name!r} changes its scale from {_scale(old):.4g} to "
                f"{_scale(new):.4g}: the module holds custom or pretrained values that would be lost."
            )
    return fresh


def _scale(tensor: Tensor) -> float:
    return tensor.detach().double().square().mean().sqrt().item()


def _same_scale(old: Tensor, new: Tensor) -> bool:
    # The root mean square of n draws has a relative standard error of at most sqrt(1/2n) for the
    # uniform and normal laws of the usual initialisers; five of them, and a margin for truncation.
    before, after = _scale(old), _scale(new)
    if before == 0 or after == 0:
        return before == after
    if old.numel() < 10:  # a single draw may be as small as it likes
        return True
    return abs(math.log(before / after)) < 0.05 + 5 * (0.5 / old.numel()) ** 0.5


def seed_buffers(module: nn.Module) -> Iterator[str]:
    """Names of the noise seeds in a prepared module."""
    for prefix, part in module.named_modules():
        if isinstance(part, SeededDropout):
            yield f"{prefix}.seed"
