"""Networks that share base weights and have late weights of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from polymode.errors import NotCollapsible
from polymode.networks.members import Members, Tensors
from polymode.posteriors.base import BLOCK_BYTES, Posterior, register_posterior
from polymode.posteriors.network import Network
from polymode.posteriors.particles import BlockPosterior, Particles
from polymode.storage import CheckedFile
from polymode.weights.late import Average, LateWeights

# The average of members of one basin is about as good as they are, or better. One that explains an
# observation worse than its members by this much (in nats) lies between basins.
LARGEST_BARRIER = 0.1


@register_posterior
@dataclass(frozen=True, repr=False)
class LateMembers(Particles):
    """K networks w_k = h(θ, φ_k) of one chain: an ensemble, and one network when it is collapsed.

    late: which weights are late. average: of what a collapse takes the mean. barrier: mean training loss of
    the average minus that of the members, where it was measured.
    """

    kind: ClassVar[str] = "late_members"
    late: LateWeights = field(default_factory=LateWeights)
    average: Average = "weights"
    barrier: float | None = None

    def draw(
        self, num_draws: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Members]:
        for members in super().draw(num_draws, generator):
            if self.late.is_plain:
                yield members
                continue
            whole = self.late.realised(members.between(0, 1))
            number = max(1, BLOCK_BYTES // whole.num_bytes)  # what is shared becomes each member's own
            for start in range(0, members.num_members, number):
                yield self.late.realised(members.between(start, min(start + number, members.num_members)))

    def __repr__(self) -> str:
        return super().__repr__().replace("Particles", "LateMembers", 1)

    @property
    def num_parameters(self) -> int:
        statistics = {name for name, _ in self.network.module.named_buffers()}
        return sum(
            tensor.numel()
            for _, tensors in self.tensors()
            for name, tensor in tensors.items()
            if "/" in name and name.split("/", 1)[1] not in statistics
        )

    def collapse(self, *, force: bool = False) -> nn.Module:
        return self.averaged(force=force).collapse()

    def averaged(self, *, force: bool = False) -> Particles:
        """The one network that the members average to.

        Members of different basins are refused: their average is worse than each of them. force: average
        them all the same, also where nobody has looked.
        """
        if len(self.blocks) != 1:
            raise NotCollapsible(f"These are the members of {len(self.blocks)} runs: average each by itself.")
        if not force and self.barrier is None:
            raise NotCollapsible(
                "Whether the members lie in one basin was not measured: they were to be kept, or come from "
                "a loop of one's own. collapse(force=True) averages them all the same: judge the result on "
                "data."
            )
        if not force and not self.barrier <= LARGEST_BARRIER:  # type: ignore[operator]  # not None here
            raise NotCollapsible(
                f"The {self.num_members} members lie in different basins: the training loss of their average "
                f"is {self.barrier:.3g} above theirs (allowed are {LARGEST_BARRIER:g}). Predict with the "
                "members, or train with fewer late weights, a later start or less noise; "
                "collapse(force=True), or force=True of the method, averages them all the same."
            )
        members = self.whole(self.blocks[0])
        weights = self.late.average(self.network.module, members, self.average)
        one = Members(
            {name: tensor[None].clone() for name, tensor in weights.items()}, labels=members.labels[:1]
        )
        return Particles(self.network, blocks=[one], record=self.record)

    def as_particles(self) -> Particles:
        """The same networks, each whole."""
        whole = [
            Members(
                {name: tensor[None].clone() for name, tensor in block.member(index).items()},
                log_weights=block.log_weights[[index]] + self._largest_log_weight,  # as they were
                labels=block.labels[[index]],
            )
            for block in self.draw()
            for index in range(block.num_members)
        ]
        return Particles(self.network, blocks=whole, record=self.record)

    def merged(self, others: Sequence[Posterior]) -> Particles:
        if all(isinstance(other, LateMembers) and other.late == self.late for other in others):
            return super().merged(others)
        return self.as_particles().merged(others)

    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        return BlockPosterior.tensors(self)  # as they were trained

    def options(self) -> dict[str, Any]:
        return {"late": self.late.config(), "average": self.average, "barrier": self.barrier}

    @classmethod
    def trained_in(cls, network: Network, options: Mapping[str, Any]) -> Mapping[str, list]:
        return LateWeights.from_config(options["late"]).trained(network.fingerprint)

    @classmethod
    def from_files(
        cls, network: Network, files: Sequence[CheckedFile], constants: Tensors, options: Mapping[str, Any]
    ) -> Self:
        plain = super().from_files(network, files, constants, options)
        return replace(
            plain,
            late=LateWeights.from_config(options["late"]),
            average=options["average"],
            barrier=options["barrier"],
        )
