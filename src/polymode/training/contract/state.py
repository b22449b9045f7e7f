"""The state of a run: what training changes, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polymode.errors import CheckpointError
from polymode.networks.members import Members, concatenate, join
from polymode.posteriors.particles import MemberStore
from polymode.seeds import draw_seed
from polymode.training.contract.optimizers import MemberOptimizer
from polymode.trees import Tree, map_tree


@dataclass
class Best:
    """What validation has kept: a copy of ``State.tensors``, and the scores that its rows had.

    scores: [M], of members; chain_scores: [G], the means over the members of each chain. since, chain_since:
    epochs of the window that each has gone without a better one.
    """

    tensors: dict[str, Tree]
    scores: Tensor
    chain_scores: Tensor
    since: Tensor
    chain_since: Tensor


@dataclass
class State:
    """Everything that training changes: tensors and generators, mutated in place.

    A method makes the state of one chain; ``fit`` puts the chains of all data sets side by side.
    members: the weights in training, in one group a chain.
    own: the method's tensors of each member, a tree of [M, ...]; common: those of each chain, of [G, ...].
    generators: one a chain. noise: [M] seeds, advanced by every gradient.
    penalty_factors: [G], of the penalty at this step; None means 1.
    """

    members: Members
    own: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=list)
    noise: Tensor = None  # type: ignore[assignment]  # drawn in as_chain()
    gradient_examples: Tensor = None  # type: ignore[assignment]  # [G], counted by the objective
    finished: MemberStore = field(default_factory=MemberStore)
    optimizers: dict[str, MemberOptimizer] = field(default_factory=dict)
    best: Best | None = None
    penalty_factors: Tensor | None = None

    def as_chain(self, generator: torch.Generator, data_set: int, chain: int) -> "State":
        """Complete the state of one chain: its generator, noise seeds and labels."""
        self.generators = [generator]
        count = self.members.num_members
        self.noise = torch.tensor([draw_seed(generator) for _ in range(count)])
        self.gradient_examples = torch.zeros(1, dtype=torch.int64)
        self.members.labels[:, 0] = data_set
        self.members.labels[:, 1] = chain
        return self

    @staticmethod
    def side_by_side(states: Sequence["State"]) -> "State":
        """Join the states of several chains along the member and group axes."""
        return State(
            members=replace(concatenate([s.members for s in states]), num_groups=len(states)),
            own=map_tree(lambda *parts: join(parts), *(s.own for s in states)),
            common=map_tree(lambda *parts: join(parts), *(s.common for s in states)),
            generators=[generator for s in states for generator in s.generators],
            noise=torch.cat([s.noise for s in states]),
            gradient_examples=torch.cat([s.gradient_examples for s in states]),
        )

    def chain(self, group: int) -> "State":
        """The state of one chain, as views; what a method's ``posterior`` reads."""
        groups = slice(group, group + 1)
        size = self.members.group_size
        rows = slice(group * size, (group + 1) * size)
        return State(
            members=self.members.groups(groups),
            own=map_tree(lambda t: t[rows], self.own),
            common=map_tree(lambda t: t[groups], self.common),
            generators=self.generators[groups],
            noise=self.noise[rows],
            gradient_examples=self.gradient_examples[groups],
            finished=self.finished.of_group(group),
        )

    @property
    def tensors(self) -> dict[str, Tree]:
        """All tensors that training moves: of each member "stacked" and "own", of each chain the others."""
        members = self.members
        return {
            "stacked": members.stacked,
            "own": self.own,
            "shared": members.shared,
            "common": self.common,
        }

    def copy_first_members(self) -> None:
        """Give all members of a chain what its first one has."""
        for tensor in self.members.stacked.values():
            each = tensor.unflatten(0, (self.members.num_groups, -1))
            each.copy_(each[:, :1].clone().expand_as(each))

    def trial_copy(self) -> "State":
        """A copy to measure on: same tensors, nothing finished, no optimisers."""
        return State(
            members=self.members.clone(),
            own=map_tree(torch.clone, self.own),
            common=map_tree(torch.clone, self.common),
            generators=[_copy_generator(generator) for generator in self.generators],
            noise=self.noise.clone(),
            gradient_examples=self.gradient_examples.clone(),
        )

    def snapshot(self) -> dict[str, Any]:
        """Everything a checkpoint needs, as a nested value of tensors, generators and numbers."""
        return {
            **self.tensors,
            "generators": self.generators,
            "noise": self.noise,
            "gradient_examples": self.gradient_examples,
            "finished": self.finished.digests(),
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
            "best": None if self.best is None else vars(self.best),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a snapshot, in place; the optimisers of its phase must be built already."""
        members = self.members
        self.finished.restore(saved["finished"], members.num_groups, members.group_size)
        copy_into(self.tensors, {kind: saved[kind] for kind in self.tensors})
        self.generators[:] = saved["generators"]
        self.noise.copy_(saved["noise"])
        self.gradient_examples.copy_(saved["gradient_examples"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(saved["optimizers"][name])
        self.best = None
        if saved["best"] is not None:
            self.best = Best(**saved["best"] | {"tensors": map_tree(torch.clone, self.tensors)})
            copy_into(self.best.tensors, saved["best"]["tensors"])


def copy_into(target: Tree, source: Tree, where: str = "") -> None:
    """Copy the tensors of a tree into those of another one of the same form, in place."""
    if isinstance(target, Tensor):
        if not isinstance(source, Tensor) or target.shape != source.shape:
            found = list(source.shape) if isinstance(source, Tensor) else type(source).__name__
            raise CheckpointError(
                f"{where!r} of the checkpoint is {found}, this run needs {list(target.shape)}."
            )
        target.copy_(source)
        return
    if not isinstance(source, dict) or target.keys() != source.keys():
        raise CheckpointError(
            f"The checkpoint holds {sorted(source)}, this run needs {sorted(target)}"
            f"{f' in {where}' if where else ''}."
        )
    for name, part in target.items():
        copy_into(part, source[name], f"{where}.{name}".lstrip("."))


def _copy_generator(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
