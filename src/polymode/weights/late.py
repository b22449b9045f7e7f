"""Weights of which some exist several times: w_k = h(θ, φ_k), and the one network they average to.

θ are base weights, which the members share; φ_k are late weights, a member's own (von Oswald et al. 2021,
Section 2.2).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require, require_whole
from polymode.networks.members import Members, Tensors
from polymode.networks.selection import Where, check_where, select_layers, selectable_layers
from polymode.networks.surgery import NORMALISATIONS, batch_norms

# Names with a slash, which no module has: factors of a matrix, templates of a bank, a kernel's embedding.
LEFT, RIGHT, TEMPLATES, EMBEDDING = "left/", "right/", "templates/", "embedding/"
NOTHING = "nothing/"  # what members own who own nothing else
LATE_MODELS = {
    "batch_norm": "scale and shift of every BatchNorm layer",
    "rank_one": "factors u, v of matrices θ ∘ u vᵀ",
    "hypernetwork": "embeddings of convolution kernels, templates · embedding",
}

Average = Literal["weights", "factors"]


@dataclass(frozen=True)
class Bank:
    """Templates that several convolutions are made of: kernels are templates · embedding.

    layers: the convolutions, by kind, type or pattern of their names. inputs: input channels of a template;
    a kernel with more is made of parts, side by side. templates: how many there are, the length of an
    embedding.
    """

    layers: Where
    inputs: int
    templates: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", check_where(self.layers))
        require_whole("inputs of a Bank", self.inputs)
        require_whole("templates of a Bank", self.templates)


@dataclass(frozen=True)
class LateWeights:
    """Which weights are late, and how those of the module follow from base and late ones.

    own: parameters of the module that are late themselves. factored: matrices W = θ ∘ u vᵀ (the first two
    axes of a kernel), by name. banks: kernels W = templates · embedding, by name.
    """

    own: tuple[str, ...] = ()
    factored: tuple[str, ...] = ()
    banks: tuple[Bank, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether late and base weights are those of the module."""
        return bool(self.own) and not self.factored and not self.banks

    @property
    def names(self) -> frozenset[str]:
        """What every member has its own of."""
        return frozenset(self.own) | self.multipliers

    @property
    def multipliers(self) -> frozenset[str]:
        """Late weights that multiply base weights; they carry no weight decay."""
        factors = {prefix + name for prefix in (LEFT, RIGHT) for name in self.factored}
        return frozenset(factors | {EMBEDDING + name for bank in self.banks for name in bank.layers})

    def base(self, trainable: frozenset[str]) -> frozenset[str]:
        """What the members share, of a module with these trained weights."""
        kernels = {name for bank in self.banks for name in bank.layers}
        templates = {TEMPLATES + bank.layers[0] for bank in self.banks}
        return (trainable - {*self.own, *kernels}) | templates

    def begin(self, start: Tensors, generator: torch.Generator, spread: float) -> Tensors:
        """What is trained in the place of a module's weights.

        spread: factors begin uniform within 1 ± spread.
        """
        weights = dict(start)
        if not self.names:
            weights[NOTHING] = torch.zeros((), device=next(iter(start.values())).device)
        for name in self.factored:
            for prefix, size in zip((LEFT, RIGHT), start[name].shape[:2], strict=True):
                drawn = 2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1
                weights[prefix + name] = (1 + spread * drawn).to(start[name])
        for bank in self.banks:
            kernels = {name: weights.pop(name) for name in bank.layers}
            weights[TEMPLATES + bank.layers[0]] = _drawn_templates(bank, kernels, generator)
            weights |= _drawn_embeddings(bank, kernels, generator)
        return weights

    def trained(self, tensors: Mapping[str, list]) -> dict[str, list]:
        """Types and shapes of what ``begin`` gives, from those of a module's tensors."""
        found: dict[str, list] = dict(tensors) if self.names else dict(tensors) | {NOTHING: ["float32"]}
        for name in self.factored:
            kind, rows, columns, *_ = tensors[name]
            found |= {LEFT + name: [kind, rows], RIGHT + name: [kind, columns]}
        for bank in self.banks:
            for name in bank.layers:
                kind, rows, columns, *size = found.pop(name)
                found[EMBEDDING + name] = [kind, bank.templates, columns // bank.inputs]
                found[TEMPLATES + bank.layers[0]] = [kind, rows, bank.inputs, *size, bank.templates]
        return found

    def realise(self, weights: Tensors) -> Tensors:
        """h(θ, φ): the weights of the module."""
        made = {name: tensor for name, tensor in weights.items() if "/" not in name}
        for name in self.factored:
            left, right = weights[LEFT + name], weights[RIGHT + name]
            rest = (1,) * (weights[name].ndim - 2)
            made[name] = weights[name] * left.reshape(-1, 1, *rest) * right.reshape(1, -1, *rest)
        for bank in self.banks:
            templates = weights[TEMPLATES + bank.layers[0]]  # [out, in, height, width, T]
            for name in bank.layers:
                parts = torch.movedim(templates @ weights[EMBEDDING + name], -1, 1)
                made[name] = parts.flatten(1, 2)
        return made

    def realised(self, members: Members) -> Members:
        """All members of one group under the names of the module."""
        if self.is_plain:
            return members
        made = [self.realise(members.member(index)) for index in range(members.num_members)]
        shared = {name: tensor for name, tensor in members.shared.items() if name in self._untouched(members)}
        own = made[0].keys() - shared.keys()
        return Members(
            {name: torch.stack([weights[name] for weights in made]) for name in sorted(own)},
            shared,
            log_weights=members.log_weights,
            labels=members.labels,
        )

    def _untouched(self, members: Members) -> set[str]:
        return {name for name in members.shared if "/" not in name and name not in self.factored}

    def average(self, module: nn.Module, members: Members, average: Average) -> Tensors:
        """The weights of the one network that the members of a group collapse to.

        average: of the realised "weights", Σ_k h(θ, φ_k)/K, or of the late weights before, h(θ, Σ_k φ_k/K).
        Normalisation by running statistics is averaged as the affine map that it is.
        """
        shared = {name: tensor[0] for name, tensor in members.shared.items()}
        if average == "factors":
            made = self.realise(shared | {name: _mean(t) for name, t in members.stacked.items()})
        else:
            made = {n: t for n, t in shared.items() if n in self._untouched(members)}
            made |= {n: _mean(t) for n, t in members.stacked.items() if "/" not in n}
            for name in (*self.factored, *(name for bank in self.banks for name in bank.layers)):
                made[name] = self._mean_of(name, members)
        return made | average_normalisation(module, members)

    def _mean_of(self, name: str, members: Members) -> Tensor:
        """The mean over members of one weight that is made of others; one is made at a time."""
        only = LateWeights(
            factored=tuple(n for n in self.factored if n == name),
            banks=tuple(bank for bank in self.banks if name in bank.layers),
        )
        first, *others = (only.realise(members.member(index))[name] for index in range(members.num_members))
        return (sum((other.double() for other in others), first.double()) / members.num_members).to(
            first.dtype
        )

    def config(self) -> dict[str, Any]:
        """JSON values from which ``from_config`` makes the same."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        banks = tuple(Bank(tuple(bank.pop("layers")), **bank) for bank in map(dict, config["banks"]))
        return cls(tuple(config["own"]), tuple(config["factored"]), banks)


def _mean(tensor: Tensor) -> Tensor:
    """The mean over members; of counts, the largest."""
    if not tensor.is_floating_point():
        return tensor.amax(0)
    return tensor.double().mean(0).to(tensor.dtype) if len(tensor) > 1 else tensor[0]


def average_normalisation(module: nn.Module, members: Members) -> Tensors:
    """The layers that normalise by running statistics, as one layer each.

    In use such a layer is an affine map, x ↦ a_k x + c_k with a = γ/s, c = β − γ m/s and s² = variance + ε.
    The mean of the maps is written with the mean statistics and γ, β solved for; without γ and β, the
    statistics are.
    """
    found: Tensors = {}
    for prefix, layer in module.named_modules():
        kind = nn.modules.batchnorm._NormBase
        if not isinstance(layer, kind) or layer.running_mean is None or layer.running_var is None:
            continue

        def each(name: str, prefix: str = prefix, layer: nn.Module = layer) -> Tensor | None:
            key = f"{prefix}.{name}".lstrip(".")
            for tensors in (members.stacked, members.shared):
                if key in tensors:
                    return tensors[key].double()
            frozen = getattr(layer, name)  # one that all members have in common
            return None if frozen is None else frozen.detach().double()[None]

        means, variances, scale, shift = map(each, ("running_mean", "running_var", "weight", "bias"))
        assert means is not None
        assert variances is not None
        if len(means) == 1:  # members with the same statistics, or one member
            continue
        deviations = (variances + layer.eps).sqrt()
        slope = (1 if scale is None else scale) / deviations
        offset = (0 if shift is None else shift) - slope * means
        slope, offset = slope.mean(0), offset.mean(0)
        if scale is not None:
            mean, variance = means.mean(0), variances.mean(0)
            solved = {
                "weight": slope * (variance + layer.eps).sqrt(),
                "bias": offset + slope * mean,
                "running_mean": mean,
                "running_var": variance,
            }
        else:
            solved = {"running_mean": -offset / slope, "running_var": slope.pow(-2) - layer.eps}
        for name, value in solved.items():
            found[f"{prefix}.{name}".lstrip(".")] = value.to(layer.running_mean.dtype)
    return found


# --- which weights are late ---------------------------------------------------------------------


def late_weights(
    module: nn.Module,
    trainable: frozenset[str],
    weights: Where | None,
    *,
    head: bool,
    matrices: Where | None = None,
    banks: Sequence[Bank] | None = None,
) -> LateWeights:
    """Read the options of a method for one network.

    weights: names of ``LATE_MODELS``, kinds, types or patterns of layers; None takes BatchNorm layers, or
    where there are none, rank-one factors. matrices: patterns of the weights that get factors; None takes
    those of all layers but embeddings and the head. banks: of a hypernetwork; None makes one for each shape
    of kernel.
    """
    norms = _batch_norms(module, trainable)
    own: set[str] = set()
    if head:
        require(
            bool(selectable_layers(module)), f"head=True: this {type(module).__name__} has no last layer."
        )
        own |= _parameters(module, select_layers(module, "output"), trainable)
    if weights is None:  # of a network that is nothing but a head, the head
        weights = ("batch_norm",) if norms else ("rank_one",) if _matrices_of(module, trainable - own) else ()
        require(bool(weights) or head, _has_no("BatchNorm and no matrices", "rank_one", module))
    entries = (weights,) if isinstance(weights, str) else tuple(weights)
    _check_known(entries, matrices, banks)
    layers = [entry for entry in entries if entry not in LATE_MODELS]
    if "batch_norm" in entries:
        require(bool(norms), _has_no("BatchNorm layers with a trained scale and shift", "batch_norm", module))
        own |= norms
    if layers:
        own |= _parameters(module, select_layers(module, layers), trainable)
    factored = _matrices(module, trainable - own, matrices) if "rank_one" in entries else ()
    made = _banks(module, trainable - own, banks) if "hypernetwork" in entries else ()
    own -= {*factored, *(name for bank in made for name in bank.layers)}
    order = [name for name, _ in module.named_parameters()]
    return LateWeights(tuple(name for name in order if name in own), factored, made)


def _check_known(entries: Sequence[str], matrices: Where | None, banks: Sequence[Bank] | None) -> None:
    if entries:
        check_where(entries)
    require(
        matrices is None or "rank_one" in entries,
        f"matrices={matrices!r} are those of weights='rank_one'; weights={entries!r} has none.",
    )
    require(
        banks is None or "hypernetwork" in entries,
        f"banks are those of weights='hypernetwork'; weights={entries!r} has none.",
    )
    require(
        not {"rank_one", "hypernetwork"} <= set(entries),
        "weights cannot be 'rank_one' and 'hypernetwork' at once: both make the same matrices. Choose one.",
    )


def _has_no(what: str, entry: str, module: nn.Module) -> str:
    kinds: dict[str, int] = {}
    for layer in selectable_layers(module).values():
        kinds[type(layer).__name__] = kinds.get(type(layer).__name__, 0) + 1
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no layers with weights"
    known = "; ".join(f"{name!r}: {meaning}" for name, meaning in LATE_MODELS.items())
    return (
        f"weights={entry!r}: this {type(module).__name__} has no {what}. It has {listed}. Choose among "
        f"{known}; or name layers by type or pattern."
    )


def _batch_norms(module: nn.Module, trainable: frozenset[str]) -> set[str]:
    return _parameters(module, batch_norms(module), trainable)


def _parameters(module: nn.Module, layers: Iterable[str], trainable: frozenset[str]) -> set[str]:
    first = {id(parameter): name for name, parameter in module.named_parameters()}  # of tied ones
    found = {first[id(p)] for layer in layers for p in module.get_submodule(layer).parameters(recurse=False)}
    return found & trainable


def _matrices_of(module: nn.Module, trainable: frozenset[str]) -> tuple[str, ...]:
    """Trained matrices and kernels by which layers multiply: no embeddings, no tables added to something."""
    others = (nn.Embedding, *NORMALISATIONS)
    layers = [n for n, layer in module.named_modules() if isinstance(layer, others)]
    left_out = _parameters(module, layers, trainable)
    return tuple(
        n for n, p in module.named_parameters() if n in trainable - left_out and p.ndim >= 2 and "weight" in n
    )


def _matrices(module: nn.Module, trainable: frozenset[str], wanted: Where | None) -> tuple[str, ...]:
    if wanted is None:
        found = _matrices_of(module, trainable)
        require(bool(found), _has_no("matrices for factors", "rank_one", module))
        return found
    matrices = [n for n, p in module.named_parameters() if n in trainable and p.ndim >= 2]
    inner = getattr(module, "wraps", None)  # of a likelihood's own part beside the user's network
    shown = {name: name.removeprefix(f"{inner}.") for name in matrices}
    chosen: set[str] = set()
    for pattern in check_where(wanted):
        fits = {
            name
            for name, own in shown.items()
            if fnmatchcase(own, pattern) or fnmatchcase(own.rpartition(".")[0], pattern)
        }
        if not fits:
            raise InputError(
                f"matrices: {pattern!r} fits no matrix of the network that is trained and not late itself; "
                f"there are {', '.join(list(shown.values())[:12]) or 'none'}."
            )
        chosen |= fits
    return tuple(name for name in matrices if name in chosen)


def _banks(module: nn.Module, trainable: frozenset[str], wanted: Sequence[Bank] | None) -> tuple[Bank, ...]:
    """Banks with the names of weights in the place of layers."""
    kernels = {
        f"{name}.weight".lstrip("."): layer.weight
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d) and f"{name}.weight".lstrip(".") in trainable
    }
    require(bool(kernels), _has_no("two-dimensional convolutions", "hypernetwork", module))
    if wanted is None:
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, kernel in kernels.items():
            by_shape.setdefault(tuple(kernel.shape), []).append(name)
        # As the networks of Table 7: layers of one shape share templates of half their channels.
        return tuple(
            Bank(tuple(names), shape[1] // 2, 14)
            if len(names) > 1 and shape[1] % 2 == 0
            else Bank(tuple(names), shape[1], 7)
            for shape, names in by_shape.items()
        )
    made, taken = [], set()
    for bank in wanted:
        layers = select_layers(module, bank.layers)
        names = [f"{layer}.weight" for layer in layers if f"{layer}.weight" in kernels]
        if not names:
            raise InputError(f"banks: {bank.layers!r} selects no convolution that is trained: {layers}.")
        shapes = {(kernels[n].shape[0], *kernels[n].shape[2:]) for n in names}
        if len(shapes) > 1 or any(kernels[n].shape[1] % bank.inputs for n in names):
            seen = {n: tuple(kernels[n].shape) for n in names}
            raise InputError(
                "The kernels of one bank need the same outputs and size and a multiple of "
                f"{bank.inputs} inputs; seen {seen}."
            )
        twice = taken & set(names)
        require(not twice, f"banks: {sorted(twice)} are in two banks.")
        taken |= set(names)
        made.append(Bank(tuple(names), bank.inputs, bank.templates))
    return tuple(made)


def _drawn_templates(bank: Bank, kernels: Tensors, generator: torch.Generator) -> Tensor:
    """Kaiming's normal numbers for a whole kernel, of which a template is a part: [out, in, h, w, T]."""
    first = next(iter(kernels.values()))
    fan_in = math.prod(first.shape[1:])
    shape = (first.shape[0], bank.inputs, *first.shape[2:], bank.templates)
    return (math.sqrt(2 / fan_in) * torch.randn(shape, generator=generator, dtype=torch.float64)).to(first)


def _drawn_embeddings(bank: Bank, kernels: Tensors, generator: torch.Generator) -> Tensors:
    """Orthogonal across the parts of all layers of one width, of norm one on average: [T, parts]."""
    found: Tensors = {}
    by_parts: dict[int, list[str]] = {}
    for name, kernel in kernels.items():
        by_parts.setdefault(kernel.shape[1] // bank.inputs, []).append(name)
    for parts, names in by_parts.items():
        columns = torch.empty(bank.templates, parts * len(names), dtype=torch.float64)
        nn.init.orthogonal_(columns, generator=generator)
        columns /= columns.norm(dim=0).mean()
        for index, name in enumerate(names):
            found[EMBEDDING + name] = (
                columns[:, index * parts : (index + 1) * parts].to(kernels[name]).clone()
            )
    return found
