"""What views are made of: trainings and their ends, and the data that networks are looked at on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymode.application.atlas.opinions import Difference, Opinions
from polymode.data import ArrayData, Preprocessing, arrays_of
from polymode.errors import InputError, require
from polymode.landscape import WeightSpace, function_values, judged
from polymode.landscape.subspaces import (
    FOR_ENSEMBLES,
    FOR_PLANE,
    RECENT,
    Acceptance,
    LowRankGaussian,
    Rule,
    relative_to_length,
    sample,
)
from polymode.likelihoods import Likelihood
from polymode.posteriors import Particles
from polymode.posteriors.statistics import estimated_names
from polymode.seeds import derive_seed
from polymode.trees import Tree, leaves, map_tree

Report = Callable[[str], None]
STATISTICS_EXAMPLES = 500  # training examples that running statistics are estimated from, at every point
MARGIN = 0.05  # how far below its solution a random sample may be, in accuracy
TRIES = 25  # of each random sample: five in the published code, where more of them are accepted
OF_RANDOM, RANDOM_RANK = "PCA of random", 4  # principal directions of random samples, and how many


@dataclass(frozen=True)
class Track:
    """A training: its checkpoints in their order, or only its end.

    phases: in which phase of the training each network was kept, where there are several.
    """

    label: str
    networks: Particles
    method: str = ""
    phases: tuple[str, ...] = ()

    @property
    def end(self) -> Particles:
        return self.networks.last

    @property
    def has_several(self) -> bool:
        return self.networks.num_members > 1

    @property
    def is_trajectory(self) -> bool:
        """Whether its networks are checkpoints of one training: others may lie in different modes."""
        return self.has_several and self.method == "trajectory"


@dataclass(frozen=True)
class Looking:
    """How closely to look.

    points: test points. grid: values along an axis of a plane. draws: networks of each subspace.
    published_steps: take the lengths of the published code as they are, which were chosen for networks of raw
    pixels; otherwise they are carried over to the length of each solution. least_accuracy: of random samples
    on validation data; None means 0.05 below the solution's.
    """

    points: int = 1000
    grid: int = 25
    draws: int = 10
    published_steps: bool = False
    least_accuracy: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Material:
    """Trainings of one network, and data for them.

    tunnels: paths between two of their ends. test, train, validation: labelled examples; foreign: inputs from
    outside the distribution. folder: where arrays are kept.
    """

    tracks: Sequence[Track]
    tunnels: Sequence[Track]
    test: ArrayData
    train: ArrayData | None
    validation: ArrayData | None
    foreign: Any
    preprocessing: Preprocessing
    folder: Path
    looking: Looking = Looking()
    report: Report = lambda message: None
    progress: Callable[[str], Callable[[int, int], None]] = lambda title: lambda done, total: None
    known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notes: list[str] = field(default_factory=list, compare=False)  # what a reader should know
    left_out: dict[str, str] = field(
        default_factory=dict, compare=False
    )  # views, and why they cannot be made

    def __post_init__(self) -> None:
        require(bool(self.tracks or self.tunnels), "There are no networks to look at.")
        for track in (*self.tracks, *self.tunnels):
            self.space.check(track.networks.network)
        if self.has_statistics and self.train is None:
            raise InputError("Networks with BatchNorm need training data, for running statistics of others.")

    @cached_property
    def space(self) -> WeightSpace:
        return WeightSpace.of((*self.tracks, *self.tunnels)[0].networks)

    @property
    def likelihood(self) -> Likelihood:
        return self.space.network.likelihood

    @property
    def is_classes(self) -> bool:
        """Whether networks give probabilities of classes, so that accuracy and divergences make sense."""
        return self.likelihood.reference_kind == "probabilities"

    @property
    def has_statistics(self) -> bool:
        return bool(estimated_names(self.space.network))

    @cached_property
    def statistics(self) -> Any:
        """Inputs for running statistics, where networks have any."""
        if not self.has_statistics or self.train is None:
            return None
        return map_tree(lambda t: t[:STATISTICS_EXAMPLES], self.train.inputs)

    @cached_property
    def points(self) -> ArrayData:
        return first(self.test, self.looking.points)

    @cached_property
    def training_points(self) -> ArrayData | None:
        return None if self.train is None else first(self.train, self.looking.points)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the observations among the test points."""
        targets = self.points.targets
        return targets[self.likelihood.observed(targets)]

    @property
    def difference(self) -> tuple[str, Difference] | None:
        """How values of networks are compared where they are not probabilities of classes."""
        if self.is_classes:
            return None
        likelihood, targets = self.likelihood, self.points.targets
        return likelihood.difference_name, lambda values: likelihood.difference(values, targets)

    def values(self, networks: Particles, inputs: Any = None) -> Tensor:
        """What networks say of the test points (or of other inputs), [M, N, C]; tokens count one by one.

        Of anything but classes their answers, [M, N]: means, or labels.
        """
        if not self.is_classes:
            return self.answers(networks, self.points).double()
        found = function_values(networks, self.points.inputs if inputs is None else inputs)
        if inputs is None:
            return found[:, self.likelihood.observed(self.points.targets)].flatten(1, -2)
        return found.flatten(1, -2)

    def opinions(self, track: Track) -> Opinions:
        """What the networks of a track say; read once."""
        key = f"opinions of {track.label}"
        if key not in self.known:
            self.known[key] = self.values(track.networks)
        kind = "trajectory" if track.is_trajectory else "member" if track.has_several else "end"
        return Opinions(track.label, self.known[key], kind)

    def ends(self) -> list[Opinions]:
        return [Opinions(t.label, self.opinions(t).values[-1:], "end") for t in self.tracks]

    def vector(self, track: Track) -> Tensor:
        return self.space.vectors(track.end)[0]

    def answers(self, networks: Particles, data: ArrayData) -> Tensor:
        """Answers of networks as they are, with running statistics of their own, [M, N]."""
        found = [judged(self.space.network, block, *arrays_of(data)) for block in networks.draw()]
        return torch.cat([each.answers for each in found])

    # --- subspaces --------------------------------------------------------------------------

    def rules(self, *, for_plane: bool, track: Track) -> dict[str, Rule]:
        """The subspaces that a track has checkpoints for; all but a trajectory has one solution alone."""
        wanted: Mapping[str, Rule] = FOR_PLANE if for_plane else FOR_ENSEMBLES
        rules = dict(wanted) if self.looking.published_steps else relative_to_length(wanted)
        number = min(RECENT, track.networks.num_members) if track.is_trajectory else 1
        low = rules["low rank"]
        assert isinstance(low, LowRankGaussian)
        rules["low rank"] = replace(low, rank=max(1, min(low.rank, number - 1)))
        if not for_plane:
            rules[OF_RANDOM] = replace(low, rank=min(RANDOM_RANK, self.looking.draws - 1))
        needed = {"diagonal": 2, "low rank": 3, "average": 2}
        return {name: rule for name, rule in rules.items() if number >= needed.get(name, 1)}

    def subspaces(self, track: Track) -> list[str]:
        """Subspaces around a track's end for ensembles; random samples may be too few for a PCA."""
        found = list(self.rules(for_plane=False, track=track))
        few = self.drawn(track, "random").num_members < 3
        return [name for name in found if name != OF_RANDOM or not few]

    def drawn(self, track: Track, name: str, *, for_plane: bool = False) -> Particles:
        """Networks of a subspace around a track's end; drawn once."""
        key = f"draws {track.label} {name} {for_plane}"
        if key not in self.known:
            self.report(f"{track.label}: sampling {name}")
            self.known[key] = self._draw(track, name, for_plane=for_plane)
        return self.known[key]

    def _draw(self, track: Track, name: str, *, for_plane: bool) -> Particles:
        rule = self.rules(for_plane=for_plane, track=track)[name]
        around, recent = track.networks if track.is_trajectory else track.end, RECENT
        if name == OF_RANDOM:
            around, recent = self.drawn(track, "random"), None
            assert isinstance(rule, LowRankGaussian)
            rule = replace(rule, rank=max(1, min(rule.rank, around.num_members - 1)))
        accept = None
        if name == "random" and not for_plane and self.is_classes:
            accept = self._acceptance(track)
        return sample(
            rule,
            around,
            1 if name == "average" else self.looking.draws,
            recent=recent,
            seed=derive_seed(self.looking.seed, self.tracks.index(track), name),
            accept=accept,
            statistics=self.statistics,
        )

    def drawn_values(self, track: Track, name: str, *, for_plane: bool = False) -> Tensor:
        key = f"values {track.label} {name} {for_plane}"
        if key not in self.known:
            self.known[key] = self.values(self.drawn(track, name, for_plane=for_plane))
        return self.known[key]

    def _acceptance(self, track: Track) -> Acceptance | None:
        """The bound that random samples are held to, on other data than the test points; None without any."""
        data = self.validation or self.training_points
        if data is None:
            return None
        least = self.looking.least_accuracy
        if least is None:
            solution = judged(self.space.network, next(track.end.draw()), *arrays_of(data))
            least = float(1 - solution.error[0]) - MARGIN
        return Acceptance(data, max(least, 0.0), tries=TRIES)


def first(data: ArrayData, count: int) -> ArrayData:
    """The first examples of a data set."""
    inputs = map_tree(lambda t: t[:count], data.inputs)
    return ArrayData(inputs, data.targets[:count], batch_size=min(data.batch_size, count))


def as_arrays(data: Any) -> ArrayData:
    """A data set in memory."""
    if isinstance(data, ArrayData):
        return data
    inputs, targets = arrays_of(data)
    return ArrayData(inputs, targets, batch_size=data.batch_size)


def check_same_points(data: Sequence[tuple[str, ArrayData]]) -> None:
    """Raise unless all runs are looked at on the same test points."""
    (name, one), *others = data
    for other_name, other in others:
        if not same_tensors(one.targets, other.targets):
            raise InputError(
                f"{name} and {other_name} have different test points ({one.num_examples} and "
                f"{other.num_examples}, or other targets): networks are compared on the same ones. Give data "
                "for all of them with --data."
            )
        if not same_tensors(one.inputs, other.inputs):
            raise InputError(
                f"{name} and {other_name} were trained on examples that were prepared otherwise: their "
                "inputs of the same test points differ, and networks are compared on the same ones."
            )


def same_tensors(one: Tree, other: Tree) -> bool:
    """Whether all tensors of two trees are equal."""
    ours, theirs = list(leaves(one)), list(leaves(other))
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )
