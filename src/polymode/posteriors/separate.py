"""An ensemble of networks of different shapes, such as those that pruning leaves."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

from polymode.errors import CheckpointError, InputError, NotCollapsible, require
from polymode.likelihoods import Likelihood, Predictive
from polymode.networks.compact_layers import orders_in
from polymode.networks.compaction import Compacted, compact, compact_with, masks_of
from polymode.networks.members import Backend, Members, Tensors
from polymode.networks.surgery import set_tensors, tensors_of, trainable_names
from polymode.posteriors.base import Posterior, names_in, register_posterior
from polymode.posteriors.network import Network, check_fingerprint, check_tensors
from polymode.posteriors.particles import Particles
from polymode.storage import CheckedFile, fingerprint_of, names_of, read_tensors
from polymode.trees import Tree

MASKS, CONSTANTS = "masks/", "constants/"


@register_posterior
@dataclass(frozen=True, repr=False)
class Separate(Posterior):
    """Networks that are parts of one mixture, Σ_i w_i p_i, each with layers of its own shapes.

    network: the one that all of them were made of. parts: members over a smaller network each. compactions:
    how each of these was made. log_weights: of the parts, unnormalised; that of a part is its heaviest
    member's.
    """

    kind: ClassVar[str] = "separate"
    parts: Sequence[Particles] = field(default_factory=list)
    compactions: Sequence[Compacted] = field(default_factory=list)
    log_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.log_weights:
            object.__setattr__(self, "log_weights", (0.0,) * len(self.parts))
        lengths = {len(self.parts), len(self.compactions), len(self.log_weights)}
        require(
            len(lengths) == 1 and lengths != {0} and all(map(math.isfinite, self.log_weights)),
            f"{len(self.parts)} parts need as many compactions and finite log_weights, at least one; got "
            f"{len(self.compactions)} and {list(self.log_weights)}.",
        )

    def __repr__(self) -> str:
        module, likelihood = type(self.network.module).__name__, self.network.likelihood.kind
        shapes = len({str(part.network.fingerprint) for part in self.parts})
        return f"Separate({self.num_members} × {module} in {shapes} shape{'s'[: shapes > 1]}, {likelihood})"

    @property
    def num_members(self) -> int:
        return sum(part.num_members for part in self.parts)

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def modules(self) -> list[nn.Module]:
        """The networks, each as an ordinary module."""
        return [part.collapse() for part in self.parts]

    def with_likelihood(self, likelihood: Likelihood) -> "Separate":
        parts = [part.with_likelihood(likelihood) for part in self.parts]
        return replace(super().with_likelihood(likelihood), parts=parts)

    def _compiled_prediction(self, inputs: Tree, batch_size: int) -> Predictive | None:
        return None  # each is a network of its own

    def _outputs(
        self,
        inputs: Tree,
        num_draws: int | None,
        generator: torch.Generator | None,
        batch_size: int | None,
        first_example: int,
    ) -> Iterator[tuple[slice, Tree, Tensor]]:
        self.check_num_draws(num_draws)
        options: Any = {"batch_size": batch_size, "first_example": first_example}
        for part, count, share in self._chosen(num_draws):
            for rows, outputs, weights in part.outputs(inputs, count, generator, **options):
                yield rows, outputs, weights * share

    def _chosen(self, num_draws: int | None) -> Iterator[tuple[Particles, int, float]]:
        """Parts with the number of members to draw from them, spread evenly over all, and their weights."""
        total, first, largest = self.num_members, 0, max(self.log_weights)
        count = total if num_draws is None else num_draws
        wanted = [(index * total) // count for index in range(count)]
        for part, log_weight in zip(self.parts, self.log_weights, strict=True):
            inside = sum(first <= index < first + part.num_members for index in wanted)
            first += part.num_members
            if inside:
                yield part, inside, math.exp(log_weight - largest)

    def draw(
        self, num_draws: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Members]:
        return self.one_network().draw(num_draws, generator)

    def one_network(self) -> Particles:
        first, *others = self.parts
        if not others:
            return first
        try:
            for other in others:
                first.check_joinable(other.network)
        except (CheckpointError, InputError) as error:
            raise InputError(
                f"The {len(self.parts)} networks of this posterior have different shapes, so their weights "
                "cannot be stacked: predict with it, or take one of them, posterior.parts[i] or "
                "posterior.modules[i]."
            ) from error
        blocks = [
            replace(members, log_weights=members.log_weights + log_weight)
            for part, log_weight in zip(self.parts, self.log_weights, strict=True)
            for members in part.draw()
        ]
        return Particles(first.network, blocks=blocks, record=self.record)

    def collapse(self) -> nn.Module:
        if len(self.parts) != 1:
            raise NotCollapsible(
                f"This posterior is {len(self.parts)} networks of different shapes. Predict with it, or take "
                "one of posterior.modules."
            )
        return self.parts[0].collapse()

    def compact(self, num_draws: int | None = 1, seed: int = 0) -> NoReturn:
        raise InputError(
            "These networks are compact already. To prune further, prune posterior.modules[i] and pass it to "
            "pm.compact."
        )

    def merged(self, others: Sequence[Posterior]) -> "Separate":
        parts, compactions, log_weights = list(self.parts), list(self.compactions), self.log_weights
        for other in others:
            if not isinstance(other, Separate) or other.network.adaptations != self.network.adaptations:
                raise InputError(f"Compact networks cannot be merged with a {other.kind} of other settings.")
            check_fingerprint(self.network.fingerprint, other.network.fingerprint, "The posterior")
            parts += other.parts
            compactions += other.compactions
            log_weights += other.log_weights
        return replace(self, parts=parts, compactions=compactions, log_weights=log_weights)

    def with_backend(self, backend: Backend) -> Self:
        parts = [part.with_backend(backend) for part in self.parts]
        return replace(super().with_backend(backend), parts=parts)

    def in_memory(self) -> Self:
        return replace(self, parts=[part.in_memory() for part in self.parts])

    def to(self, device: torch.device | str) -> "Separate":
        whole = super().to(device)
        assert isinstance(whole, Separate)
        return replace(whole, parts=[part.to(device) for part in self.parts])

    # --- saving -----------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        for index, (part, compaction) in enumerate(zip(self.parts, self.compactions, strict=True)):
            owned: set[str] = set()
            for name, tensors in part.tensors():
                owned |= names_in(tensors)
                yield f"{_prefix(index)}{name}", tensors
            masks = {MASKS + name: mask for name, mask in compaction.masks.items()}
            constants = part.network.constants(owned)
            yield f"{_prefix(index)}network.safetensors", masks | _under(CONSTANTS, constants)

    def options(self) -> dict[str, Any]:
        return {"log_weights": list(self.log_weights), "records": [part.record for part in self.parts]}

    @classmethod
    def from_files(
        cls, network: Network, files: Sequence[CheckedFile], constants: Tensors, options: Mapping[str, Any]
    ) -> Self:
        by_part: list[list[CheckedFile]] = [[] for _ in options["records"]]
        for file in files:
            by_part[int(file.path.name.removeprefix("part-").partition("-")[0])].append(file)
        parts, compactions = zip(*(_read_part(network, of_part) for of_part in by_part), strict=True)
        parts = [replace(p, record=dict(r)) for p, r in zip(parts, options["records"], strict=True)]
        log_weights = tuple(map(float, options["log_weights"]))
        try:
            return cls(network, parts=parts, compactions=compactions, log_weights=log_weights)
        except InputError as error:
            raise CheckpointError(f"The posterior is damaged: {error}") from error


def _prefix(index: int) -> str:
    return f"part-{index:05d}-"


def _under(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _without(prefix: str, tensors: Tensors) -> Tensors:
    return {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}


def _read_part(network: Network, files: Sequence[CheckedFile]) -> tuple[Particles, Compacted]:
    """Make a smaller network again from the one given, by its masks, and put the stored tensors in."""
    [own] = [file for file in files if file.path.name.endswith("-network.safetensors")]
    members = [file for file in files if file is not own]
    if not members:
        raise CheckpointError(f"{own.path} is a network without members.")
    stored = read_tensors(own.check())
    masks, constants = _without(MASKS, stored), _without(CONSTANTS, stored)
    owned = set().union(*(names_in(names_of(file.check())) for file in members))
    try:
        compaction = compact_with(network.module, masks, owned | constants.keys())
    except InputError as error:
        raise CheckpointError(f"{own.path} belongs to another network: {error}") from error
    smaller = replace(network, module=compaction.module)
    expected = {name: kind for name, kind in smaller.fingerprint.items() if name not in owned}
    kinds = {MASKS + name: ["bool", len(mask)] for name, mask in masks.items()}
    check_tensors(fingerprint_of(own.path, infinite=True), kinds | _under(CONSTANTS, expected), own.path)
    for name, order in orders_in(compaction.module).items():
        if not torch.equal(order.cpu(), constants[name]):
            raise CheckpointError(f"{own.path}: {name!r} is not what the masks beside it give.")
    part = Particles.from_files(smaller, members, constants, {})
    set_tensors(compaction.module, constants)
    return part, compaction


# --- making -------------------------------------------------------------------------------------


def compacted_draws(posterior: Posterior, num_draws: int | None, seed: int) -> Separate:
    """Draw networks and make each as small as its rows of zeros allow."""
    if num_draws is None and posterior.num_members is None:
        raise InputError(
            "This posterior can draw any number of networks: say how many, compact(num_draws=10)."
        )
    parts, compactions, log_weights = [], [], []
    for block in posterior.draw(num_draws, torch.Generator().manual_seed(seed)):
        for index in range(block.num_members):
            part, compaction = _compacted(posterior.network, block, index)
            parts.append(part)
            compactions.append(compaction)
        log_weights += (block.log_weights + posterior.weight_offset).tolist()
    return Separate(
        posterior.network,
        parts=parts,
        compactions=compactions,
        log_weights=tuple(log_weights),
        record=posterior.record,
    )


def _compacted(network: Network, block: Members, index: int) -> tuple[Particles, Compacted]:
    """One member of a block as a posterior over a network of its own shape."""
    weights = block.member(index)
    module = copy.deepcopy(network.module)
    set_tensors(module, weights)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in weights)  # what members own; what is added to a layer follows it
    compaction = compact(module, masks_of(module))
    tensors = tensors_of(compaction.module)
    buffers = {name for name, _ in compaction.module.named_buffers()}
    owned = trainable_names(compaction.module) | (weights.keys() & buffers)
    members = Members({name: tensors[name][None].clone() for name in owned}, labels=block.labels[[index]])
    return Particles(replace(network, module=compaction.module), blocks=[members]), compaction
