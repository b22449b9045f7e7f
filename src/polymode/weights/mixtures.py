"""Weights whose scalars each take their value from one of K components (Chang et al. 2019, Eq. 1).

W = Σ_k 1[Z = k] ⊙ M_k: the components M are trained, the assignment Z is drawn for every network. Ensemble
model patching draws Z once a layer, its crossed form once a scalar; dropout and DropConnect have a second
component that is zero, and an explicit ensemble one Z for the whole network. All of them are this file with
other settings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from polymode.errors import InputError, require_whole, unknown_name
from polymode.networks.members import Tensors
from polymode.networks.selection import Where, is_normalisation, select_layers
from polymode.seeds import fold, mix, uniform, uniform16

Assignment = Literal["network", "layer", "input", "scalar"]
_SALT = 0x5EED  # the key of assignments differs from those of dropout masks with the same seed
_MOST_COMPONENTS = 254  # an index is a byte, and one value stands for zero
_WIDE_INDICES = 2**21  # assignments that are made at once: a few tens of bytes each while they are made


@dataclass(frozen=True)
class Family:
    """How assignments are drawn, whatever the network.

    assignment: one Z for the whole network, for each layer, for each input of a layer, or for each scalar.
    num_components: K, components that are trained.
    probabilities: of the components; equal unless given. drop: probability of one more component that is
    zero, for weights only; biases are then shared. What remains is divided by 1 − drop.
    """

    assignment: Assignment
    num_components: int = 5
    probabilities: tuple[float, ...] | None = None
    drop: float = 0.0

    def __post_init__(self) -> None:
        if self.assignment not in get_args(Assignment):
            raise unknown_name("assignment", self.assignment, get_args(Assignment))
        require_whole("num_components", self.num_components, 1 if self.drop else 2)
        if self.num_components > _MOST_COMPONENTS:
            raise InputError(f"num_components must be at most {_MOST_COMPONENTS}, got {self.num_components}.")
        if not 0 <= self.drop < 1:
            raise InputError(f"A rate of dropping must be at least 0 and below 1, got {self.drop!r}.")
        given = self.probabilities
        if given is None:
            return
        if len(given) != self.num_components or any(not 0 <= p <= 1 for p in given):
            raise InputError(
                f"probabilities must be {self.num_components} numbers from 0 to 1, one a component, got "
                f"{list(given)}."
            )
        if abs(sum(given) - 1) > 1e-6:
            raise InputError(f"probabilities must sum to one, {list(given)} sum to {sum(given):g}.")

    @property
    def mixing(self) -> tuple[float, ...]:
        """Probabilities of the trained components, those that are not zero."""
        return self.probabilities or (1 / self.num_components,) * self.num_components


def family_of(
    scheme: str, num_components: int = 5, rate: float = 0.1, probabilities: Sequence[float] | None = None
) -> Family:
    """The members of the family that have names (Chang et al. 2019, Table 2 and Eqs. 4, 5)."""
    given = None if probabilities is None else tuple(probabilities)
    if given is not None and scheme in ("dropout", "dropconnect"):
        raise InputError(f"The scheme {scheme!r} has a rate, not probabilities={list(given)}.")
    schemes = {
        "emp": lambda: Family("layer", num_components, given),
        "ecmp": lambda: Family("scalar", num_components, given),
        "explicit": lambda: Family("network", num_components, given),
        "dropout": lambda: Family("input", 1, drop=rate),
        "dropconnect": lambda: Family("scalar", 1, drop=rate),
    }
    if scheme not in schemes:
        raise unknown_name("scheme", scheme, schemes)
    return schemes[scheme]()


@dataclass(frozen=True)
class Mixture:
    """A family over the patched tensors of one network.

    layers: the patched layers with the names of their tensors. shapes: of each tensor, without components.
    input_axes: the axis of each tensor that runs over the layer's inputs.
    """

    family: Family
    layers: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    input_axes: Mapping[str, int]
    _spans: Mapping[str, tuple[int, tuple[int, ...]]] = field(init=False, repr=False)
    num_assignments: int = field(init=False)

    def __post_init__(self) -> None:
        """Give every independent assignment of a draw its place among the draw's random numbers."""
        spans: dict[str, tuple[int, tuple[int, ...]]] = {}
        total, assignment = 0, self.family.assignment
        for names in self.layers.values():
            for position, name in enumerate(names):
                shape = self.shapes[name]
                if assignment == "scalar":
                    index = shape
                elif assignment == "input":
                    axis = self.input_axes[name]
                    index = tuple(size if a == axis else 1 for a, size in enumerate(shape))
                else:
                    index = (1,) * len(shape)
                again = assignment == "layer" and position > 0  # weight and bias of a layer go together
                spans[name] = (total - 1 if again else 0 if assignment == "network" else total, index)
                if assignment != "network" and not again:
                    total += math.prod(index)
        object.__setattr__(self, "_spans", spans)
        object.__setattr__(self, "num_assignments", 1 if assignment == "network" else total)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that have components."""
        return frozenset(self.shapes)

    def layer_of(self, name: str) -> str:
        return next(layer for layer, names in self.layers.items() if name in names)

    def numbers(self, seeds: Tensor) -> Tensor:
        """Uniform numbers [n, num_assignments] that the assignments of draws with seeds [n] are made of."""
        return uniform16(mix(fold(seeds) ^ _SALT), self.num_assignments)

    def index_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor's indices, which expands to that of the tensor."""
        return self._spans[name][1]

    def assignments_of(self, layer: str) -> int:
        """How many assignments of a layer are drawn independently of each other."""
        places = {self._spans[name] for name in self.layers[layer]}
        return sum(math.prod(shape) for _, shape in places) if self.family.assignment != "layer" else 1

    def indices(self, seeds: Tensor, probabilities: Tensors | None = None) -> Tensors:
        """The component of every scalar as bytes, [n, ...], in shapes that expand to the tensors'.

        probabilities: [K] of each layer, where they are learned; the family's otherwise. An index of K
        stands for zero.
        """
        numbers = self.numbers(seeds)
        found: Tensors = {}
        for layer, names in self.layers.items():
            mixing = probabilities[layer].tolist() if probabilities else self.family.mixing
            for name in names:
                first, shape = self._spans[name]
                bytes_ = self._component(numbers[:, first : first + math.prod(shape)], mixing)
                found[name] = bytes_.unflatten(1, shape)
        return found

    def _component(self, numbers: Tensor, mixing: Sequence[float]) -> Tensor:
        """Where a number falls when the unit interval is cut in K parts, and a last one for zero."""
        if not self.family.drop and len(set(mixing)) == 1:
            return (numbers * len(mixing)).to(torch.uint8)
        borders = [(1 - self.family.drop) * sum(mixing[: k + 1]) for k in range(len(mixing))]
        beyond = [numbers >= border for border in (borders if self.family.drop else borders[:-1])]
        return torch.stack(beyond).sum(0, dtype=torch.uint8)

    def choose(self, components: Tensor, index: Tensor) -> Tensor:
        """Tensors [n, ...] from components [K, ...] by bytes [n, ...] that expand to their shape.

        Components are not copied n times.
        """
        shape, drop = components.shape[1:], self.family.drop
        inside = index.clamp(max=self.family.num_components - 1) if drop else index
        chosen = torch.gather(components, 0, inside.long().expand(-1, *shape))
        if not drop:
            return chosen
        return chosen * ((index < self.family.num_components).to(chosen.dtype) / (1 - drop))

    def realise(self, components: Tensors, seed: Tensor) -> Tensors:
        """The weights of one network: its assignment is drawn from its seed."""
        return {name: drawn[0] for name, drawn in self.draw(components, seed.reshape(1)).items()}

    def realise_relaxed(self, components: Tensors, logits: Tensors, seed: Tensor) -> Tensors:
        """As ``realise`` with learned probabilities: values of a draw, gradients of its relaxation.

        The assignment is the largest of logits with Gumbel noise; the straight-through estimator passes the
        gradient of their softmax on to the logits (Jang et al. 2017).
        """
        count = self.family.num_components
        key = mix(fold(seed.reshape(1)) ^ _SALT)
        numbers = uniform(key, count * self.num_assignments) + 2.0**-33
        gumbel = -(-numbers.log()).log().reshape(count, self.num_assignments)
        realised: Tensors = {}
        for layer, names in self.layers.items():
            for name in names:
                first, shape = self._spans[name]
                noise = gumbel[:, first : first + math.prod(shape)].reshape(count, *shape)
                scores = logits[layer].reshape(count, *[1] * len(shape)) + noise.to(logits[layer].dtype)
                soft = scores.softmax(0)
                hard = torch.zeros_like(soft).scatter(0, scores.argmax(0, keepdim=True), 1.0)
                weights = hard + (soft - soft.detach())  # in this order: exactly one component
                realised[name] = (weights * components[name]).sum(0)
        return realised

    def draw(self, components: Tensors, seeds: Tensor, probabilities: Tensors | None = None) -> Tensors:
        """The patched tensors of draws with seeds [n], each [n, ...]; components are never copied n times."""
        parts = []
        for some in seeds.split(max(1, _WIDE_INDICES // max(1, self.num_assignments))):
            indices = self.indices(some, probabilities)
            parts.append({name: self.choose(components[name], indices[name]) for name in self.shapes})
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part.pop(name) for part in parts]) for name in self.shapes}


def mixture_over(module: nn.Module, where: Where, family: Family, trainable: frozenset[str]) -> Mixture:
    """Patch the layers of a module that ``where`` selects; see ``select_layers``.

    trainable: names of the parameters that are not frozen. A family with a zero component leaves biases
    shared, as dropout does.
    """
    layers: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    axes: dict[str, int] = {}
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name in select_layers(module, where):
        layer = module.get_submodule(name)
        if family.assignment == "input" and getattr(layer, "groups", 1) > 1:
            raise InputError(
                f"{name!r} is a convolution in {layer.groups} groups, whose weights have no axis of all "
                "inputs: assignment by input cannot patch it. Name other layers in where."
            )
        if parametrize.is_parametrized(layer):
            raise InputError(
                f"{name!r} has parametrised weights (weight norm, or a patch already), which have no "
                "components: name other layers in where."
            )
        inside = {
            first_names[id(parameter)]: parameter
            for own, parameter in layer.named_parameters(recurse=False)
            if own == "weight" or not family.drop
        }
        # What the user has frozen, or another patched layer is tied to, is not patched (again).
        inside = {n: p for n, p in inside.items() if n in trainable and n not in shapes}
        if not inside:
            continue
        layers[name] = tuple(inside)
        for full, tensor in inside.items():
            shapes[full] = tuple(tensor.shape)
            axes[full] = 0 if tensor.ndim < 2 or isinstance(layer, nn.Embedding) else 1
    if not layers:
        raise InputError(f"All layers that where={where!r} selects are frozen: there is nothing to patch.")
    return Mixture(family, layers, shapes, axes)


def initial_components(
    mixture: Mixture,
    module: nn.Module,
    starts: Sequence[Tensors],
    generator: torch.Generator | None,
    *,
    keep: bool,
    spread: float,
) -> Tensors:
    """Components [K, ...] of every patched tensor.

    starts: weights that the components of layers with weights begin with, one each; with ``keep`` there is
    one, which component 0 is a copy of, and the others have it plus noise of ``spread`` of its size.
    Normalisation layers begin with γ_k = γ (1 + spread ε), β_k = β + spread ε.
    """
    components: Tensors = {}
    for layer, names in mixture.layers.items():
        normalises = is_normalisation(module.get_submodule(layer))
        for name in names:
            first = starts[0][name]
            if normalises or keep:
                scale = _scale(first, name, normalises=normalises)
                stacked = torch.stack([first] * mixture.family.num_components)
                noise = torch.randn(stacked.shape, generator=generator, dtype=torch.float64)
                noise = spread * scale * noise.to(first.device, first.dtype)
                if keep:
                    noise[0] = 0
                components[name] = stacked + noise
            else:
                components[name] = torch.stack([start[name] for start in starts])
    return components


def _scale(tensor: Tensor, name: str, *, normalises: bool) -> Tensor:
    if not normalises:
        return tensor.square().mean().sqrt()
    return tensor if name.endswith("weight") else torch.ones_like(tensor)


def mixture_kl(
    mixture: Mixture,
    weights: Tensors,
    stds: Mapping[str, float],
    log_probabilities: Tensors | None = None,
) -> Tensor:
    """KL of the mixture from the prior N(0, s²), up to a constant (Eq. 6).

    Σ_patched Σ_k p_k ‖M_k‖²/(2 s²) + Σ_shared ‖M‖²/(2 s²). Where probabilities are learned, Σ_k p_k log p_k
    is added once for each independent assignment: minus the entropy of Z, which is a constant otherwise.
    """
    family = mixture.family
    terms = []
    for name, std in stds.items():
        squares = weights[name].square()
        if name in mixture.shapes:
            # What is kept is divided by 1 − drop: p ‖M‖² with p = 1 − drop and M = W/(1 − drop).
            shares = squares.new_tensor(family.mixing) / (1 - family.drop)
            if log_probabilities is not None:
                shares = log_probabilities[mixture.layer_of(name)].exp()
            squares = shares @ squares.flatten(1)
        terms.append(squares.sum() / (2 * std**2))
    if log_probabilities is not None:
        for layer, logs in log_probabilities.items():
            terms.append(mixture.assignments_of(layer) * (logs.exp() * logs).sum())
    return torch.stack(terms).sum()
