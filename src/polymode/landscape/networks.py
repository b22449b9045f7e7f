"""Networks of a posterior as points of a space: whole, one after another, as vectors of their weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polymode.data import as_tree
from polymode.errors import InputError, require
from polymode.networks.members import Members, Tensors
from polymode.posteriors import Particles, Posterior, Variational
from polymode.posteriors.base import BLOCK_BYTES
from polymode.posteriors.network import Network
from polymode.samplers import as_vectors, views_of
from polymode.seeds import derive_generator
from polymode.trees import Tree

DRAWS = 10  # networks of a posterior that can be drawn from without end, unless told otherwise


def networks_of(posterior: Posterior, num_draws: int | None = None, seed: int = 0) -> Particles:
    """The networks that a posterior holds, each whole; of one without end so many draws.

    Of Gaussians over weights the networks at their means, unless draws are asked for.
    """
    posterior = posterior.one_network()
    if isinstance(posterior, Variational) and num_draws is None:
        posterior = posterior.means()
    if isinstance(posterior, Particles) and num_draws is None:
        return posterior.as_particles()
    count = num_draws or posterior.num_members or DRAWS
    blocks = list(posterior.draw(count, derive_generator(seed, "networks")))
    return Particles(posterior.network, blocks=blocks, record=posterior.record)


def each_network(posterior: Posterior, num_draws: int | None = None) -> Iterator[Tensors]:
    """The tensors of one network after another; they are read when their turn comes."""
    posterior.check_num_draws(num_draws)
    for block in posterior.draw(num_draws):
        for index in range(block.num_members):
            yield block.member(index)


def function_values(posterior: Posterior, inputs: Tree, num_draws: int | None = None) -> Tensor:
    """What every network says of every point, [M, N, ...]: probabilities, or means of numbers."""
    likelihood, parts = posterior.network.likelihood, []
    for _, outputs, _ in posterior.by_points(as_tree(inputs), num_draws, derive_generator(0, "networks")):
        parts.append(likelihood.function_values(outputs).cpu())
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class WeightSpace:
    """The trained weights of networks of one form as vectors [D] of doubles, and back.

    like: the tensors of one network; those that are not trained (running statistics, seeds of dropout) are
    taken along by every point that is made a network.
    """

    network: Network
    like: Tensors

    @classmethod
    def of(cls, posterior: Particles) -> "WeightSpace":
        """The space around a posterior's last network."""
        require(posterior.num_members > 0, "This posterior holds no network.")
        [weights] = each_network(posterior.only([posterior.num_members - 1]))
        space = cls(posterior.network, weights)
        require(bool(space.names), "These networks own no weights.")
        return space

    @property
    def names(self) -> list[str]:
        """Of the weights: all floating-point parameters that networks own."""
        own = self.like
        return [n for n, p in self.network.module.named_parameters() if n in own and p.is_floating_point()]

    @property
    def dimension(self) -> int:
        return sum(self.like[name].numel() for name in self.names)

    def vector(self, weights: Tensors) -> Tensor:
        """The weights of a network, [D]."""
        return as_vectors({name: weights[name][None].double().cpu() for name in self.names})[0]

    def vectors(self, posterior: Particles) -> Tensor:
        """The weights of all networks, [M, D]."""
        self.check(posterior.network)
        return torch.stack([self.vector(weights) for weights in each_network(posterior)])

    def check(self, network: Network) -> None:
        """Raise unless a network has the same tensors as those of this space."""
        ours, theirs = self.network.fingerprint, network.fingerprint
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise InputError(
                    f"Networks of different forms have no plane or path in common: {name!r} is "
                    f"{ours.get(name, 'absent')} in one and {theirs.get(name, 'absent')} in the other."
                )

    def members(self, vectors: Tensor) -> Members:
        """Networks with weights [P, D]; whatever else they have is as in ``like``."""
        device = self.network.device
        shapes = {name: self.like[name][None] for name in self.names}
        made = views_of(vectors, shapes)
        stacked = {n: t.to(device, self.like[n].dtype) for n, t in made.items()}
        rest = {n: t for n, t in self.like.items() if n not in stacked}
        stacked |= {n: t[None].to(device).repeat(len(vectors), *[1] * t.ndim) for n, t in rest.items()}
        return Members(stacked)

    @property
    def at_once(self) -> int:
        """How many networks are made at a time, so that memory stays bounded."""
        return int(max(1, min(32, BLOCK_BYTES // (16 * self.dimension))))


def cosine_matrix(posteriors: Sequence[Particles]) -> Tensor:
    """θ_i·θ_j/(‖θ_i‖ ‖θ_j‖) of all networks of some posteriors, one after another, [M, M].

    Weights are read in blocks: two of them are in memory at a time.
    """
    space = WeightSpace.of(posteriors[0])
    for posterior in posteriors:
        space.check(posterior.network)
    singles = [p.only([i]) for p in posteriors for i in range(p.num_members)]
    size = int(max(1, BLOCK_BYTES // (8 * space.dimension)))
    starts = range(0, len(singles), size)

    def block(start: int) -> Tensor:
        return torch.cat([space.vectors(each) for each in singles[start : start + size]])

    products = torch.zeros(len(singles), len(singles), dtype=torch.float64)
    for place, first in enumerate(starts):
        ours = block(first)
        for second in starts[place:]:
            theirs = ours if second == first else block(second)
            found = ours @ theirs.T
            products[first : first + len(ours), second : second + len(theirs)] = found
            products[second : second + len(theirs), first : first + len(ours)] = found.T
    lengths = products.diagonal().sqrt()
    return products / (lengths[:, None] * lengths).clamp(min=torch.finfo(torch.float64).tiny)
