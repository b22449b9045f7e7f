"""Networks around a solution or along a trajectory: what one training can offer beside its end.

Fort et al., "Deep Ensembles: A Loss Landscape Perspective", 2019, §4.2 and §5. A trajectory is a posterior of
checkpoints in their order (``methods.Trajectory``); its last network is the solution θ₀.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from polymode.data import arrays_of, as_data
from polymode.errors import InputError, require, require_positive, require_whole
from polymode.landscape.networks import WeightSpace, networks_of
from polymode.landscape.survey import judged, statistics_batches
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.posteriors.statistics import with_statistics
from polymode.seeds import derive_generator

RECENT = 10  # checkpoints at the end of a trajectory that Gaussians and averages are made of
RELATIVE = "lengths are shares of ‖θ₀‖ instead of numbers of weight space"

Draw = Callable[[torch.Generator], Tensor]


class Rule(Protocol):
    """How networks are drawn around some: the recent ones [K, D], of which the last is the solution."""

    def around(self, recent: Tensor) -> Draw: ...


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class RandomDirections:
    """θ₀ + t·v, v uniform on the unit sphere and t ~ U(0, reach)."""

    reach: float = option(10.0, "the longest step")
    relative: bool = option(False, RELATIVE)

    def __post_init__(self) -> None:
        require_positive("reach", self.reach)

    def around(self, recent: Tensor) -> Draw:
        centre = recent[-1]
        reach = self.reach * (float(centre.norm()) if self.relative else 1.0)

        def draw(generator: torch.Generator) -> Tensor:
            length = reach * _uniform(generator)
            direction = torch.randn(len(centre), generator=generator, dtype=torch.float64)
            return centre + length * direction / direction.norm()

        return draw


@dataclass(frozen=True)
class WeightDropout:
    """θ₀ with every weight and bias dropped with a rate d ~ U(0, largest_rate); survivors over 1 − d."""

    largest_rate: float = option(0.1, "the highest rate")

    def __post_init__(self) -> None:
        require(0 < self.largest_rate < 1, f"largest_rate lies between 0 and 1, got {self.largest_rate!r}.")

    def around(self, recent: Tensor) -> Draw:
        centre = recent[-1]

        def draw(generator: torch.Generator) -> Tensor:
            rate = self.largest_rate * _uniform(generator)
            kept = torch.rand(len(centre), generator=generator, dtype=torch.float64) >= rate
            return centre * kept / (1 - rate)

        return draw


@dataclass(frozen=True)
class DiagonalGaussian:
    """N(μ, diag σ²): mean and (population) deviation of every weight over the recent checkpoints."""

    scale: float = option(1.0, "of σ")
    varied: bool = option(False, "every draw has a scale of its own, u·scale with u ~ U(0, 1)")

    def __post_init__(self) -> None:
        require_positive("scale", self.scale)

    def around(self, recent: Tensor) -> Draw:
        require(
            len(recent) >= 2, f"A Gaussian needs at least two checkpoints, this trajectory has {len(recent)}."
        )
        mean, std = recent.mean(0), recent.std(0, correction=0)

        def draw(generator: torch.Generator) -> Tensor:
            scale = self.scale * (_uniform(generator) if self.varied else 1.0)
            return mean + scale * std * torch.randn(len(mean), generator=generator, dtype=torch.float64)

        return draw


@dataclass(frozen=True)
class LowRankGaussian:
    """μ + Σ_i z_i e_i, z ~ N(0, scale²): e_i the unit principal directions of the recent checkpoints.

    They are not scaled by how far checkpoints vary along them, as in the published code.
    """

    rank: int = option(5, "principal directions")
    scale: float = option(1.0, "standard deviation along each of them")
    relative: bool = option(False, RELATIVE)

    def __post_init__(self) -> None:
        require_whole("rank", self.rank)
        require_positive("scale", self.scale)

    def around(self, recent: Tensor) -> Draw:
        if len(recent) <= self.rank:
            raise InputError(
                f"rank={self.rank} directions need more than {self.rank} checkpoints, there are "
                f"{len(recent)}: keep more of them, or lower the rank."
            )
        mean = recent.mean(0)
        scale = self.scale * (float(recent[-1].norm()) if self.relative else 1.0)
        directions = principal_directions(recent, self.rank)

        def draw(generator: torch.Generator) -> Tensor:
            z = torch.randn(self.rank, generator=generator, dtype=torch.float64)
            return mean + scale * z @ directions

        return draw


@dataclass(frozen=True)
class WeightAverage:
    """The mean of the recent checkpoints: one network."""

    def around(self, recent: Tensor) -> Draw:
        mean = recent.mean(0)
        return lambda generator: mean


def principal_directions(points: Tensor, rank: int) -> Tensor:
    """The first principal directions of points [K, D] about their mean, [rank, D], of unit length."""
    centred = points - points.mean(0)
    _, singular, directions = torch.linalg.svd(centred, full_matrices=False)
    if not bool(singular[rank - 1] > 1e-12 * singular[0].clamp(min=1e-300)):
        raise InputError(f"The networks span fewer than {rank} directions: lower the rank.")
    return directions[:rank]


# The settings of the published code, for networks of raw pixels and a Xavier start (FOR_ENSEMBLES: §5 of the
# paper; FOR_PLANE: its diversity–accuracy plane). ``relative_to_length`` carries them over to other networks.
FOR_ENSEMBLES: Mapping[str, Rule] = {
    "random": RandomDirections(10.0),
    "diagonal": DiagonalGaussian(),
    "low rank": LowRankGaussian(5, 1.0),
    "average": WeightAverage(),
}
FOR_PLANE: Mapping[str, Rule] = {
    "random": RandomDirections(70.0),
    "dropout": WeightDropout(0.1),
    "diagonal": DiagonalGaussian(10.0, varied=True),
    "low rank": LowRankGaussian(5, 6.0),
}
# ‖θ₀‖ of the MediumCNN that those lengths were chosen for is not published. A Xavier start has 23.3; this is
# that of ours after 20 epochs on 10,000 images (experiments/loss_landscape). Longer training lengthens it.
PUBLISHED_LENGTH = 27.4


def relative_to_length(rules: Mapping[str, Rule], length: float = PUBLISHED_LENGTH) -> dict[str, Rule]:
    """The same rules with lengths as shares of ‖θ₀‖: those that they are of a solution of this length."""
    require_positive("length", length)

    def carried(rule: Rule) -> Rule:
        if isinstance(rule, RandomDirections) and not rule.relative:
            return RandomDirections(rule.reach / length, relative=True)
        if isinstance(rule, LowRankGaussian) and not rule.relative:
            return LowRankGaussian(rule.rank, rule.scale / length, relative=True)
        return rule

    return {name: carried(rule) for name, rule in rules.items()}


@dataclass(frozen=True)
class Acceptance:
    """Draws are accepted where their accuracy on some data is at least this; each has a few tries."""

    data: Any
    least_accuracy: float
    tries: int = 5

    def __post_init__(self) -> None:
        require_whole("tries", self.tries)
        if not 0 <= self.least_accuracy <= 1:
            raise InputError(f"least_accuracy lies between 0 and 1, got {self.least_accuracy!r}.")


def sample(
    rule: Rule,
    trajectory: Posterior,
    num_draws: int = 30,
    *,
    recent: int | None = RECENT,
    seed: int = 0,
    accept: Acceptance | None = None,
    statistics: Any = None,
) -> Particles:
    """Draw networks around a trajectory's end; a posterior with everything that a posterior can do.

    recent: how many of the last checkpoints a rule sees; None means all. accept: which draws are kept; one
    that no try was accepted for is left out (``record["left_out"]``). statistics: data or inputs that running
    statistics are estimated from for every draw, where there are any. A sample of ``RandomDirections`` is a
    trajectory for ``LowRankGaussian``: principal directions of random samples.
    """
    require_whole("num_draws", num_draws)
    if recent is not None:
        require_whole("recent", recent)
    networks = networks_of(trajectory)
    number = networks.num_members
    networks = networks.only(range(number - min(number, recent or number), number))
    space = WeightSpace.of(networks)
    batches = statistics_batches(space.network, statistics)
    if accept is not None and space.network.likelihood.reads != "labels":
        raise InputError(f"Accuracy is about labels; this likelihood is {space.network.likelihood.kind!r}.")
    checked = None if accept is None else arrays_of(as_data(accept.data))
    draw = rule.around(space.vectors(networks))
    labels = networks.labels[-1:]
    blocks, tried = [], 0
    for place in range(num_draws):
        generator = derive_generator(seed, "subspace", place)
        for _ in range(1 if accept is None else accept.tries):
            members = space.members(draw(generator)[None])
            if batches is not None:
                members = with_statistics(space.network, members, batches)
            tried += 1
            good = checked is None or accept is None
            if checked is not None and accept is not None:
                good = float(1 - judged(space.network, members, *checked).error[0]) >= accept.least_accuracy
            if good:
                own = labels.clone()
                own[:, 2] = place
                blocks.append(replace(members, labels=own))
                break
    if not blocks and accept is not None:
        raise InputError(
            f"None of {tried} draws reached an accuracy of {accept.least_accuracy}: take shorter steps (the "
            "solution itself may be below it, too), or a lower bound."
        )
    record = {"left_out": num_draws - len(blocks), "tried": tried, "rule": repr(rule)}
    return Particles(space.network, blocks=blocks, record=record)
