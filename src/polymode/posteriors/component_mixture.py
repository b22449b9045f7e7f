"""Networks drawn from components: the posterior of model patching, dropout and DropConnect."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from polymode.errors import InputError, NotCollapsible, require
from polymode.networks.adaptations import Sampling, adapt
from polymode.networks.layers import Masks
from polymode.networks.members import Members, Tensors
from polymode.networks.surgery import random_layers, seed_buffers
from polymode.posteriors.base import BLOCK_BYTES, DRAWS, Posterior, register_posterior
from polymode.posteriors.network import Network, check_fingerprint, check_tensors
from polymode.seeds import derive_generator, draw_seed
from polymode.storage import CheckedFile, fingerprint_of, read_tensors
from polymode.weights.mixtures import Family, Mixture

# Where a chain keeps its tensors: K components, what all draws share, learned probabilities of the
# components [K], running statistics of each component [K, ...].
COMPONENTS, SHARED, PROBABILITIES, STATISTICS = "components/", "shared/", "probabilities/", "statistics/"

Value = TypeVar("Value")


def _part(prefix: str, tensors: Mapping[str, Value]) -> dict[str, Value]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


@register_posterior
@dataclass(frozen=True, repr=False)
class ComponentMixture(Posterior):
    """Every draw takes its patched weights from K components and its dropout masks from a seed.

    mixture: which tensors have components, and how they are assigned; None where only dropout is sampled.
    chains: tensors of each chain, under the prefixes above. log_weights: of the chains, equal unless given.
    Dropout layers of the network that are ``sampled`` act in every draw. With one assignment for the whole
    network the K networks are all there is, and ``draw()`` gives each of them once, with its probability;
    otherwise draws have no end.
    """

    kind: ClassVar[str] = "component_mixture"
    mixture: Mixture | None = None
    chains: Sequence[Tensors] = field(default_factory=list)
    log_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.log_weights:
            object.__setattr__(self, "log_weights", (0.0,) * len(self.chains))

    def __repr__(self) -> str:
        module = type(self.network.module).__name__
        if self.mixture is None:
            return f"ComponentMixture(dropout masks of {module}, {self.network.likelihood.kind})"
        family, number = self.mixture.family, len(self.mixture.shapes)
        each = f"{family.num_components} components of {number} tensors by {family.assignment}"
        return f"ComponentMixture({each} × {module}, {self.network.likelihood.kind})"

    @property
    def _is_explicit(self) -> bool:
        return self.mixture is not None and self.mixture.family.assignment == "network"

    @property
    def num_members(self) -> int | None:
        if not self._is_explicit:
            return None
        assert self.mixture is not None
        return self.mixture.family.num_components * len(self.chains)

    def draw(
        self, num_draws: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Members]:
        self.check_num_draws(num_draws)
        if generator is None:
            generator = derive_generator(0, "draws")
        if self._is_explicit:
            yield from self._networks(num_draws, generator)
            return
        count, number = DRAWS if num_draws is None else num_draws, len(self.chains)
        generators = [torch.Generator().manual_seed(draw_seed(generator)) for _ in self.chains]
        for chain, tensors in enumerate(self.chains):
            # Draws are spread over the chains; those of a chain share its weight.
            of_chain = (count * (chain + 1)) // number - (count * chain) // number
            seeds = torch.randint(2**62, (of_chain,), generator=generators[chain])
            share = self.log_weights[chain] - math.log(of_chain * number / count) if of_chain else 0.0
            first = 0
            for part in seeds.split(self._draws_at_once(tensors)) if of_chain else ():
                yield self._members(tensors, part, chain, first, share)
                first += len(part)

    def _draws_at_once(self, tensors: Tensors) -> int:
        each = sum(t[0].numel() * t.element_size() for t in _part(COMPONENTS, tensors).values())
        return max(1, BLOCK_BYTES // max(each, 1024))

    def _members(self, tensors: Tensors, seeds: Tensor, chain: int, first: int, log_weight: float) -> Members:
        device = self.network.device
        seeds = seeds.to(device)
        stacked: Tensors = {name: seeds.clone() for name in seed_buffers(self.network.module)}
        if self.mixture is not None:
            components = {name: t.to(device) for name, t in _part(COMPONENTS, tensors).items()}
            probabilities = _part(PROBABILITIES, tensors) or None
            stacked |= self.mixture.draw(components, seeds, probabilities)
            statistics = _part(STATISTICS, tensors)
            if statistics:
                indices = self.mixture.indices(seeds, probabilities)
                of_layer = {layer: indices[names[0]] for layer, names in self.mixture.layers.items()}
                for name, each in statistics.items():
                    stacked[name] = each.to(device)[of_layer[name.rpartition(".")[0]].flatten().long()]
        shared = {name: t[None].to(device) for name, t in _part(SHARED, tensors).items()}
        labels = torch.tensor([[0, chain, first + index] for index in range(len(seeds))])
        log_weights = torch.full((len(seeds),), log_weight, device=device)
        return Members(stacked, shared, log_weights=log_weights, labels=labels)

    def _networks(self, num_draws: int | None, generator: torch.Generator) -> Iterator[Members]:
        """The K networks of each chain, in order; fewer than all are spread evenly."""
        assert self.mixture is not None
        family, total = self.mixture.family, self.num_members
        assert total is not None
        count = total if num_draws is None else num_draws
        wanted = [(index * total) // count for index in range(count)]
        for chain, tensors in enumerate(self.chains):
            rows = [w % family.num_components for w in wanted if w // family.num_components == chain]
            if not rows:
                continue
            device, number = self.network.device, len(rows)
            seeds = torch.randint(2**62, (number,), generator=generator).to(device)
            stacked = {name: seeds.clone() for name in seed_buffers(self.network.module)}
            stacked |= {name: t[rows].to(device) for name, t in _part(COMPONENTS, tensors).items()}
            stacked |= {name: t[rows].to(device) for name, t in _part(STATISTICS, tensors).items()}
            shared = {name: t[None].to(device) for name, t in _part(SHARED, tensors).items()}
            weights = torch.tensor(family.mixing)[rows].log() + self.log_weights[chain]
            yield Members(stacked, shared, log_weights=weights.to(device))

    def collapse(self) -> nn.Module:
        raise NotCollapsible(
            "This posterior draws a new network every time; the average of their predictions is not a "
            "network's. Predict with it: draws share all weights but those that are drawn."
        )

    def merged(self, others: Sequence[Posterior]) -> "ComponentMixture":
        chains, log_weights = list(self.chains), list(self.log_weights)
        for other in others:
            if not isinstance(other, ComponentMixture) or other._mixes() != self._mixes():
                raise InputError(
                    f"A mixture of components cannot be merged with a {other.kind} of other settings."
                )
            check_fingerprint(self.network.fingerprint, other.network.fingerprint, "The posterior")
            chains += other.chains
            log_weights += other.log_weights
        return replace(self, chains=chains, log_weights=tuple(log_weights))

    def _mixes(self) -> tuple:
        return self.options()["mixture"], self.network.adaptations

    # --- saving -----------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        for index, tensors in enumerate(self.chains):
            yield f"chain-{index:05d}.safetensors", tensors

    def options(self) -> dict[str, Any]:
        mixture = None
        if self.mixture is not None:
            mixture = {
                "family": asdict(self.mixture.family),
                "layers": {name: list(tensors) for name, tensors in self.mixture.layers.items()},
                "shapes": {name: list(shape) for name, shape in self.mixture.shapes.items()},
                "input_axes": dict(self.mixture.input_axes),
            }
        return {"mixture": mixture, "log_weights": list(self.log_weights)}

    @classmethod
    def from_files(
        cls, network: Network, files: Sequence[CheckedFile], constants: Tensors, options: Mapping[str, Any]
    ) -> Self:
        mixture = options["mixture"]
        if mixture is not None:
            family = dict(mixture["family"])
            given = family["probabilities"]
            family["probabilities"] = None if given is None else tuple(given)
            mixture = Mixture(
                Family(**family),
                {name: tuple(tensors) for name, tensors in mixture["layers"].items()},
                {name: tuple(shape) for name, shape in mixture["shapes"].items()},
                mixture["input_axes"],
            )
        paths = sorted(file.path for file in files)
        log_weights = tuple(map(float, options["log_weights"]))
        require(
            len(log_weights) == len(paths) and all(map(math.isfinite, log_weights)),
            f"{len(paths)} chains need as many finite log_weights, got {list(log_weights)}",
        )
        for path in paths:
            check_tensors(found := fingerprint_of(path), _expected(found, network, constants, mixture), path)
        chains = [read_tensors(path) for path in paths]
        return cls(network, mixture=mixture, chains=chains, log_weights=log_weights)


def _expected(
    found: Mapping[str, list], network: Network, constants: Tensors, mixture: Mixture | None
) -> dict[str, list]:
    """Types and shapes of the tensors that the file of a chain has to hold, with what is optional in it."""
    own = network.fingerprint
    expected: dict[str, list] = {}
    if mixture is not None:
        count = mixture.family.num_components
        if any(key.startswith(PROBABILITIES) for key in found):
            kind = "float64" if network.dtype == torch.float64 else "float32"
            expected |= {PROBABILITIES + layer: [kind, count] for layer in mixture.layers}
        patched = {COMPONENTS: mixture.shapes, STATISTICS: _part(STATISTICS, found)}
        for prefix, names in patched.items():
            for name in names:
                kind, *shape = own[name]
                expected[prefix + name] = [kind, count, *shape]
        for name, shape in mixture.shapes.items():
            require(own[name][1:] == list(shape), f"{name!r} is {own[name][1:]}, not {list(shape)}")
    there = {key.split("/", 1)[1] for key in expected}
    rest = own.keys() - there - (constants.keys() - _part(SHARED, found).keys())
    return expected | {SHARED + name: own[name] for name in rest}


def sample_dropout(posterior: Posterior, masks: Masks = "example") -> ComponentMixture:
    """Let the dropout layers of networks that are trained already act in every draw.

    posterior: networks fitted by any method whose members are whole networks, such as ``Single`` or a deep
    ensemble, of a module with dropout layers. masks: one for each example, or one for each draw.
    """
    network = posterior.network
    if not random_layers(network.module):
        raise InputError(
            f"This {type(network.module).__name__} has no dropout layer with a rate above 0 to sample. Fit "
            "mc_dropout, which adds one, or a network that has some."
        )
    if posterior.num_members is None:
        raise InputError("This posterior draws networks already: its dropout cannot be sampled beside that.")
    sampling = Sampling(masks)
    module = adapt(copy.deepcopy(network.module), [sampling], seed=0)  # nothing is drawn
    drawn = frozenset(seed_buffers(module))
    chains, log_weights = [], []
    for block in posterior.draw():
        for index in range(block.num_members):
            weights = block.member(index).items()
            chains.append({SHARED + name: t.clone() for name, t in weights if name not in drawn})
        log_weights += block.log_weights.tolist()
    changed = replace(network, module=module, adaptations=(*network.adaptations, sampling))
    return ComponentMixture(changed, chains=chains, log_weights=tuple(log_weights), record=posterior.record)
