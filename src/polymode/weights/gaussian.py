"""Weights with a Gaussian of their own, and units that may be left out: spike and slab (Jantre et al. 2022).

w = z ∘ (μ + σ ∘ ε), ε ~ N(0, 1), σ = softplus(ρ), with one z ~ Bernoulli(γ), γ = sigmoid(ϑ), for all weights
of an output unit or channel. μ stands under the name of the weight; ρ, ϑ and a mask that is fixed, beside it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError
from polymode.networks.members import DRAW, Tensors
from polymode.networks.selection import WEIGHTED, Where, select_layers

# Names with a slash, which no module has: ρ of all weights, ϑ and the mask of all units, each as one vector,
# so that a step takes few operations however many layers there are.
RHO, INCLUSION, MASK = "spread/rho", "spread/inclusion", "spread/mask"
_SMALLEST = 1e-10  # keeps the logarithms of uniform numbers finite


@dataclass(frozen=True)
class GaussianWeights:
    """Which weights of a network have a Gaussian, and which units may be left out.

    shapes: of every weight with a Gaussian, in the order in which their ρ follow each other, [D]; those of a
    kernel over two axes follow each other as the kernel lies in memory, ``channels_last``. units: layers with
    inclusion variables, in the order of ϑ [U], and the names of the tensors whose rows they switch.
    temperature: τ of their relaxation.
    """

    shapes: Mapping[str, tuple[int, ...]]
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    temperature: float = 0.5
    sizes: tuple[int, ...] = field(init=False)  # numbers in each weight
    counts: tuple[int, ...] = field(init=False)  # units of each layer

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(map(math.prod, self.shapes.values())))
        firsts = (self.shapes[names[0]] for names in self.units.values())
        object.__setattr__(self, "counts", tuple(shape[0] for shape in firsts))

    def begin(self, start: Tensors, rho: float, inclusion: float = 0.5) -> Tensors:
        """What is trained beside the means: every ρ, and every ϑ at a probability of inclusion."""
        [like, *_] = (start[name] for name in self.shapes)
        found = {RHO: like.new_full((sum(self.sizes),), rho)}
        if self.units:
            logit = math.log(inclusion) - math.log1p(-inclusion)
            found[INCLUSION] = like.new_full((sum(self.counts),), logit)
        return found

    def by_name(self, vector: Tensor) -> Tensors:
        """The parts of a vector [..., D], in the shapes of the weights."""
        parts = vector.split(self.sizes, -1)
        return {
            n: _arranged(part, shape) for part, (n, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def by_layer(self, vector: Tensor) -> Tensors:
        """The parts of a vector [..., U] that belong to the units of each layer."""
        return dict(zip(self.units, vector.split(self.counts, -1), strict=True))

    # --- drawing ----------------------------------------------------------------------------

    def noise(self, seeds: Tensor, like: Tensor) -> dict[str, Tensor]:
        """Random numbers of draws with seeds [n]: "normal" [n, D], and "uniform" [n, U] for the units.

        They depend on the seed (on CPU its lower 32 bits) and the kind of device alone. A generator of
        PyTorch's is an order of magnitude faster than a hash of each number.
        """
        options: Any = {"device": like.device, "dtype": like.dtype}
        found = {"normal": torch.empty(len(seeds), sum(self.sizes), **options)}
        if self.units:
            found["uniform"] = torch.empty(len(seeds), sum(self.counts), **options)
        generator = torch.Generator(like.device)
        for row, seed in enumerate(seeds.tolist()):
            generator.manual_seed(seed)
            found["normal"][row].normal_(generator=generator)
            if self.units:
                found["uniform"][row].uniform_(generator=generator)
        return found

    def realise(self, weights: Tensors, noise: Mapping[str, Tensor], *, frozen: bool = False) -> Tensors:
        """The weights of one network, in the names of the module.

        frozen: units are those of the masks; otherwise they are drawn, with the gradient of a relaxation.
        """
        made = _others(weights)
        moved = self.by_name(F.softplus(weights[RHO]) * noise["normal"])
        made |= {name: weights[name] + moved[name].to(weights[name].dtype) for name in self.shapes}
        if not self.units:
            return made
        return made | self._switched(made, self.included(weights, noise, frozen=frozen))

    def means(self, weights: Tensors, *, frozen: bool = False) -> Tensors:
        """The network at the means, with the units of the masks, or those that are more probable than not."""
        made = _others(weights)
        if not self.units:
            return made
        kept = weights[MASK] if frozen else (weights[INCLUSION] > 0).to(weights[INCLUSION].dtype)
        return made | self._switched(made, kept)

    def included(self, weights: Tensors, noise: Mapping[str, Tensor], *, frozen: bool = False) -> Tensor:
        """The units that are taken in, [..., U], 0 or 1; arguments lead with any axes.

        z = 1[η > 0] with the gradient of sigmoid(η/τ), η = ϑ + log u − log(1 − u): straight through.
        """
        if frozen:
            return weights[MASK]
        numbers = noise["uniform"]
        logistic = (numbers + _SMALLEST).log() - (1 - numbers + _SMALLEST).log()
        soft = ((weights[INCLUSION] + logistic) / self.temperature).sigmoid()
        hard = (soft > 0.5).to(soft.dtype)
        return hard + (soft - soft.detach())  # in this order: exactly 0 or 1

    def _switched(self, made: Tensors, included: Tensor) -> Tensors:
        """The tensors of layers with inclusion variables; rows of units that are left out are zero."""
        return {
            name: made[name] * z.reshape(-1, *[1] * (made[name].ndim - 1))
            for layer, z in self.by_layer(included).items()
            for name in self.units[layer]
        }

    # --- the divergence ---------------------------------------------------------------------

    def kl(
        self, weights: Tensors, stds: Mapping[str, float], inclusion: float = 0.5, centre: float = 0.0
    ) -> Tensor:
        """KL of q from the prior N(c, s²), of units λ N(c, s²) + (1 − λ) δ₀ (λ: inclusion), in nats.

        Σ log(s/σ) + (σ² + (μ − c)²)/(2 s²) − ½ over weights, of a unit multiplied by its γ and with
        γ log(γ/λ) + (1 − γ) log((1 − γ)/(1 − λ)) added.
        """
        mean, sigma = torch.cat([_flat(weights[name]) for name in self.shapes]), F.softplus(weights[RHO])
        mean = mean - centre if centre else mean
        std = self._std(stds, mean)
        each = (sigma.square() + mean.square()) / (2 * std**2) - (sigma / std).log() - 0.5
        if not self.units:
            return each.sum()
        slabs = dict(zip(self.shapes, each.split(self.sizes), strict=True))
        logits = weights[INCLUSION]
        gamma = logits.sigmoid()
        inside, outside = (
            F.logsigmoid(logits) - math.log(inclusion),
            F.logsigmoid(-logits) - math.log1p(-inclusion),
        )
        terms = [(gamma * inside + (1 - gamma) * outside).sum()]
        for layer, of_layer in self.by_layer(gamma).items():
            rows = [slabs.pop(name).reshape(len(of_layer), -1) for name in self.units[layer]]
            terms += [(of_layer @ part).sum() for part in rows]
        return torch.stack([*terms, *(part.sum() for part in slabs.values())]).sum()

    def _std(self, stds: Mapping[str, float], like: Tensor) -> Tensor | float:
        """S of every weight: one number, or [D]."""
        each = [stds[name] for name in self.shapes]
        if len(set(each)) == 1:
            return each[0]
        sizes = torch.tensor(self.sizes, device=like.device)
        return torch.tensor(each, dtype=like.dtype, device=like.device).repeat_interleave(sizes)

    # --- in files ---------------------------------------------------------------------------

    def trained(self, tensors: Mapping[str, list], *, frozen: bool) -> dict[str, list]:
        """Types and shapes of what a member holds, from those of a module's tensors."""
        kind = tensors[next(iter(self.shapes))][0]
        found: dict[str, list] = dict(tensors) | {DRAW: ["int64"], RHO: [kind, sum(self.sizes)]}
        if self.units:
            found |= {name: [kind, sum(self.counts)] for name in (INCLUSION, *([MASK] if frozen else []))}
        return found

    def config(self) -> dict[str, Any]:
        """JSON values from which ``from_config`` makes the same."""
        # Lists, as the order counts, and entries of a JSON object have none.
        return {
            "shapes": [[name, list(shape)] for name, shape in self.shapes.items()],
            "units": [[layer, list(names)] for layer, names in self.units.items()],
            "temperature": self.temperature,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        made = cls(
            {name: tuple(map(int, shape)) for name, shape in config["shapes"]},
            {layer: tuple(names) for layer, names in config["units"]},
            float(config["temperature"]),
        )
        rows = {name: shape[:1] for name, shape in made.shapes.items()}
        alike = all(len({rows[name] for name in names}) == 1 for names in made.units.values())
        if not made.shapes or not alike or not 0 < made.temperature < math.inf:
            raise ValueError("weights without shapes, units of different numbers, or no temperature")
        return made


def gaussian_weights(
    module: nn.Module,
    trainable: frozenset[str],
    where: Where | None = None,
    units: Where | None = None,
    temperature: float = 0.5,
) -> GaussianWeights:
    """Read the options of a method for one network.

    where: layers whose weights have a Gaussian; None means all trained weights. units: layers whose units
    have inclusion variables; None means none.
    """
    order = {name: parameter for name, parameter in module.named_parameters() if name in trainable}
    chosen = set(order) if where is None else _parameters(module, select_layers(module, where), order)
    if not chosen:
        raise InputError(f"All layers that where={where!r} selects are frozen: no weight would be drawn.")
    shapes = {name: tuple(parameter.shape) for name, parameter in order.items() if name in chosen}
    switched = {} if units is None else _units(module, units, order)
    return GaussianWeights(shapes, switched, temperature)


def kaiming_uniform(
    module: nn.Module, names: Iterable[str], start: Tensors, generator: torch.Generator
) -> Tensors:
    """Weights of Linear layers and convolutions uniform within ±√(6/fan-in), for ReLU (He et al. 2015)."""
    found: Tensors = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        layer = module.get_submodule(owner)
        if own == "weight" and isinstance(layer, WEIGHTED) and not isinstance(layer, nn.Embedding):
            bound = math.sqrt(6 / start[name][0].numel())
            drawn = torch.rand(start[name].shape, generator=generator, dtype=torch.float64)
            found[name] = torch.empty_like(start[name]).copy_(bound * (2 * drawn - 1))
    return found


def _parameters(module: nn.Module, layers: Sequence[str], trained: Mapping[str, Tensor]) -> set[str]:
    inside = {id(p) for layer in layers for p in module.get_submodule(layer).parameters(recurse=False)}
    return {name for name, parameter in trained.items() if id(parameter) in inside}


def _units(module: nn.Module, where: Where, trained: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """The layers whose units can be left out, with the names of their weights: never the last layer."""
    [last] = select_layers(module, "output")[-1:] or [None]
    try:
        layers = select_layers(module, where)
    except InputError as error:
        raise InputError(f"There is no layer whose units could be left out: {error}") from error
    found = {}
    for name in layers:
        if name == last:
            raise InputError(
                f"where={where!r} selects {name!r}, the last layer: its units are the network's outputs, "
                "which cannot be left out. Name hidden layers."
            )
        layer = module.get_submodule(name)
        names = [f"{name}.{own}".lstrip(".") for own in ("weight", "bias")]
        inside = tuple(full for full in names if full in trained)
        if isinstance(layer, WEIGHTED) and not isinstance(layer, nn.Embedding) and names[0] in inside:
            found[name] = inside
    if not found:
        raise InputError(
            f"where={where!r} selects no Linear or convolutional layer with trained weights of its own (but "
            f"{', '.join(layers)}): no units could be left out. Name other layers, or use mean_field."
        )
    return found


def _others(weights: Tensors) -> Tensors:
    """All that networks are made of beside spreads, units and seeds; means are under the weights' names."""
    return {name: t for name, t in weights.items() if name not in (RHO, INCLUSION, MASK, DRAW)}


def _arranged(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers [..., n] in the shape of a weight; of kernels in the order of ``channels_last``."""
    if len(shape) != 4:
        return part.unflatten(-1, shape) if shape else part.squeeze(-1)
    outputs, inputs, height, width = shape
    return part.unflatten(-1, (outputs, height, width, inputs)).movedim(-1, -3)


def _flat(tensor: Tensor) -> Tensor:
    """All numbers of a weight, in the order that ``_arranged`` takes them in."""
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).reshape(-1)
