"""Networks drawn from Gaussians over their weights, with units that may be left out."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError, NotCollapsible, require
from polymode.networks.members import Members, Tensors
from polymode.networks.surgery import seed_buffers
from polymode.posteriors.base import BLOCK_BYTES, DRAWS, Posterior, register_posterior
from polymode.posteriors.network import Network, check_fingerprint
from polymode.posteriors.particles import BlockPosterior, Particles, rows_of
from polymode.posteriors.separate import Separate
from polymode.seeds import derive_generator, draw_seed
from polymode.storage import CheckedFile
from polymode.weights.gaussian import INCLUSION, RHO, GaussianWeights
from polymode.weights.late import LateWeights


@register_posterior
@dataclass(frozen=True, repr=False)
class Variational(BlockPosterior):
    """A mixture of factorised Gaussians, Σ_m w_m q_m(θ), of which any number of networks can be drawn.

    blocks: the members q_m, each by its means, spreads and inclusion variables. weights: which of the
    network's weights have them. late: what the network's weights are made of, where Gaussians are over
    factors of them. frozen: units are those of each member's mask; otherwise they are drawn. Draws are
    spread evenly over the members.
    """

    kind: ClassVar[str] = "variational"
    weights: GaussianWeights = field(default_factory=lambda: GaussianWeights({}))
    late: LateWeights | None = None
    frozen: bool = False

    def __repr__(self) -> str:
        module = type(self.network.module).__name__
        return f"Variational({self.num_components} × {module}, {self.network.likelihood.kind})"

    @property
    def num_components(self) -> int:
        """How many distributions are mixed."""
        return sum(block.num_members for block in self.blocks)

    @property
    def num_members(self) -> None:
        return None

    @property
    def num_parameters(self) -> int:
        statistics = {name for name, _ in self.network.module.named_buffers()}
        trained = {RHO, INCLUSION, *self.weights.shapes}
        trained |= {name for name, _ in self.network.module.named_parameters()} - statistics
        return sum(
            tensor.numel()
            for _, tensors in self.tensors()
            for name, tensor in tensors.items()
            if name.split("/", 1)[-1] in trained
        )

    def draw(
        self, num_draws: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Members]:
        self.check_num_draws(num_draws)
        if generator is None:
            generator = derive_generator(0, "draws")
        count, number = DRAWS if num_draws is None else num_draws, self.num_components
        seeds = torch.tensor([draw_seed(generator) for _ in range(count)])
        for place, member in enumerate(self._components()):
            first, beyond = (count * place) // number, (count * (place + 1)) // number
            if first == beyond:
                continue
            # Draws of a member share its weight.
            share = float(member.log_weights[0]) - math.log((beyond - first) * number / count)
            for part in seeds[first:beyond].split(self._draws_at_once(member)):
                yield self._drawn(member, part, first, share)
                first += len(part)

    def _components(self) -> Iterator[Members]:
        """The members that are mixed, one by one; weights relative to the largest."""
        largest = max(block.largest_log_weight for block in self.blocks)
        for block in self.blocks:
            for index in range(block.num_members):
                member = rows_of(block, index, index + 1).to(self.network.device)
                yield replace(member, log_weights=member.log_weights - largest)

    def _draws_at_once(self, member: Members) -> int:
        own = self.network.fingerprint
        size = sum(math.prod(own[name][1:]) for name in self._drawn_names)
        each = (size + member.stacked[RHO].numel()) * member.stacked[RHO].element_size()
        return max(1, BLOCK_BYTES // each)

    @property
    def _drawn_names(self) -> Sequence[str]:
        """Names of the network's weights that differ from draw to draw."""
        return tuple(self.weights.shapes) if self.late is None else self.late.factored

    def _drawn(self, member: Members, seeds: Tensor, first: int, log_weight: float) -> Members:
        # In one layout, so that draws have the same bits before and after they were stored.
        weights = {name: _laid_out(tensor) for name, tensor in member.member(0).items()}
        noise = self.weights.noise(seeds, weights[RHO])

        def realised(numbers: Tensors) -> Tensors:
            made = self._whole_weights(self.weights.realise(weights, numbers, frozen=self.frozen))
            return {name: made[name] for name in self._drawn_names}

        device = self.network.device
        stacked = torch.vmap(realised)(noise)
        stacked |= {name: seeds.to(device) for name in seed_buffers(self.network.module)}
        shared = {n: t[None] for n, t in weights.items() if "/" not in n and n not in stacked}
        labels = member.labels.repeat(len(seeds), 1)
        labels[:, 2] = torch.arange(first, first + len(seeds))
        log_weights = torch.full((len(seeds),), log_weight, device=device)
        return Members(stacked, shared, log_weights=log_weights, labels=labels)

    def _whole_weights(self, made: Tensors) -> Tensors:
        """The network's weights, from what was drawn and what they are made of beside it."""
        return made if self.late is None else self.late.realise(made)

    def means(self) -> Particles:
        """The networks at the means of the members, with the units of their masks.

        Where no mask is frozen, with the units that are more probable than not.
        """
        require(self.num_components > 0, "There is no member yet.")
        found = []
        for place, member in enumerate(self._components()):
            made = self._whole_weights(self.weights.means(member.member(0), frozen=self.frozen))
            labels = member.labels.clone()
            labels[:, 2] = place
            stacked = {name: tensor[None].clone() for name, tensor in made.items()}
            found.append(replace(member, stacked=stacked, shared={}, labels=labels))
        return Particles(self.network, blocks=found, record=self.record)

    def compact(self, num_draws: int | None = 1, seed: int = 0, *, mean: bool = False) -> Separate:
        """Draw networks and take out of each the units and channels without weights.

        num_draws: None draws one network of each member. mean: take the networks at the means instead, one
        for each member, with the units of its mask, or those that are more probable than not.
        """
        if mean:
            return self.means().compact(None)
        return super().compact(self.num_components if num_draws is None else num_draws, seed)

    def collapse(self) -> nn.Module:
        raise NotCollapsible(
            "This posterior draws a new network every time; the average of their predictions is not a "
            "network's. Predict with it, or take the network at the means: means().collapse()."
        )

    def merged(self, others: Sequence[Posterior]) -> "Variational":
        blocks = list(self.blocks)
        for other in others:
            if not isinstance(other, Variational) or other.options() != self.options():
                raise InputError(
                    f"A mixture of Gaussians cannot be merged with a {other.kind} of other settings."
                )
            check_fingerprint(self.network.fingerprint, other.network.fingerprint, "The posterior")
            blocks += other.blocks
        return replace(self, blocks=blocks)

    # --- saving -----------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        late = None if self.late is None else self.late.config()
        return {"weights": self.weights.config(), "late": late, "frozen": self.frozen}

    @classmethod
    def trained_in(cls, network: Network, options: Mapping[str, Any]) -> Mapping[str, list]:
        weights = GaussianWeights.from_config(options["weights"])
        own = network.fingerprint
        if options["late"] is not None:
            own = LateWeights.from_config(options["late"]).trained(own)
        for name, shape in weights.shapes.items():
            if own[name][1:] != list(shape):
                raise ValueError(f"{name!r} is {own[name][1:]}, not {list(shape)}")
        return weights.trained(own, frozen=options["frozen"])

    @classmethod
    def from_files(
        cls, network: Network, files: Sequence[CheckedFile], constants: Tensors, options: Mapping[str, Any]
    ) -> Self:
        plain = super().from_files(network, files, constants, options)
        return replace(
            plain,
            weights=GaussianWeights.from_config(options["weights"]),
            late=None if options["late"] is None else LateWeights.from_config(options["late"]),
            frozen=options["frozen"],
        )


def _laid_out(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor.contiguous()
