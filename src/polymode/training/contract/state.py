"""The state of a run: what training changes, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polymode.errors import CheckpointError
from polymode.networks.members import Members, Tensors, concatenate, join
from polymode.posteriors.particles import MemberStore
from polymode.seeds import draw_seed
from polymode.training.contract.optimizers import MemberOptimizer


@dataclass
class Best:
    """What validation has kept: a copy of ``State.tensors``, and the scores that its rows had.

    scores: [M], of members; chain_scores: [G], the means over the members of each chain.
    """

    tensors: dict[str, Tensors]
    scores: Tensor
    chain_scores: Tensor


@dataclass
class State:
    """Everything that training changes: tensors and generators, mutated in place.

    A method makes the state of one chain; ``fit`` puts the chains of all data sets side by side.
    members: the weights in training, in one group a chain.
    own: the method's tensors of each member, [M, ...]; common: those of each chain, [G, ...].
    generators: one a chain. noise: [M] seeds, advanced by every gradient.
    """

    members: Members
    own: Tensors = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=list)
    noise: Tensor = None  # type: ignore[assignment]  # drawn in begin()
    gradient_examples: Tensor = None  # type: ignore[assignment]  # [G], counted by the objective
    finished: MemberStore = field(default_factory=MemberStore)
    optimizers: dict[str, MemberOptimizer] = field(default_factory=dict)
    best: Best | None = None

    def begin(self, generator: torch.Generator, data_set: int, chain: int) -> "State":
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
        first = states[0]
        return State(
            members=replace(concatenate([s.members for s in states]), num_groups=len(states)),
            own={name: join([s.own[name] for s in states]) for name in first.own},
            common={name: join([s.common[name] for s in states]) for name in first.common},
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
            own={name: tensor[rows] for name, tensor in self.own.items()},
            common={name: tensor[groups] for name, tensor in self.common.items()},
            generators=self.generators[groups],
            noise=self.noise[rows],
            gradient_examples=self.gradient_examples[groups],
            finished=self.finished.of_group(group),
        )

    @property
    def tensors(self) -> dict[str, Tensors]:
        """All tensors that training moves: of each member "stacked" and "own", of each chain the others."""
        members = self.members
        return {
            "stacked": members.stacked,
            "own": self.own,
            "shared": members.shared,
            "common": self.common,
        }

    def trial_copy(self) -> "State":
        """A copy to measure on: same tensors, nothing finished, no optimisers."""
        return State(
            members=self.members.clone(),
            own={name: tensor.clone() for name, tensor in self.own.items()},
            common={name: tensor.clone() for name, tensor in self.common.items()},
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
            "finished": self.finished.digests,
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
            "best": None if self.best is None else vars(self.best),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a snapshot, in place; the optimisers of its phase must be built already."""
        members = self.members
        # Format 1 knows their number only.
        finished = saved["finished"] if "finished" in saved else saved["num_finished"]
        self.finished.restore(finished, members.num_groups, members.group_size)
        for kind, target in self.tensors.items():
            copy_into(target, saved[kind])
        self.generators[:] = saved["generators"]
        self.noise.copy_(saved["noise"])
        self.gradient_examples.copy_(saved["gradient_examples"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(saved["optimizers"][name])
        self.best = None
        if saved["best"] is not None:
            if "tensors" not in saved["best"]:
                raise CheckpointError(
                    "The checkpoint is of an earlier version, which kept less of the best epoch: begin again."
                )
            self.best = Best(**saved["best"] | {"tensors": clones(self.tensors)})
            for kind, target in self.best.tensors.items():
                copy_into(target, saved["best"]["tensors"][kind])


def under(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose names begin with a prefix, under the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def clones(tensors: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Copies of some dictionaries of tensors."""
    return {kind: {name: t.clone() for name, t in named.items()} for kind, named in tensors.items()}


def copy_into(target: Tensors, source: Tensors) -> None:
    """Copy tensors into others of the same names, in place."""
    if target.keys() != source.keys():
        raise CheckpointError(f"The checkpoint holds {sorted(source)}, this run needs {sorted(target)}.")
    for name, tensor in target.items():
        if tensor.shape != source[name].shape:
            raise CheckpointError(
                f"{name!r} of the checkpoint is {list(source[name].shape)}, this run needs "
                f"{list(tensor.shape)}."
            )
        tensor.copy_(source[name])


def _copy_generator(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
