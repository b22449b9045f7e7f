"""A path of low loss between two solutions.

Fort and Jastrzebski, "Large Scale Structure of Neural Network Loss Landscapes", 2019; Fort et al. 2019,
Appendix A.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require_whole
from polymode.networks.members import Members, Tensors, join
from polymode.options import option
from polymode.posteriors import Particles, Posterior
from polymode.schedules import Constant, Schedule
from polymode.training.contract import (
    OPTIMIZER,
    PRIOR_STD_OR_FLAT,
    SCHEDULE,
    Batch,
    Method,
    Objective,
    Optimizer,
    Over,
    Phase,
    Problem,
    State,
    check_optimizer,
    check_schedule,
    descend,
    empty_statistics,
    estimated_statistics,
    re_estimate,
)
from polymode.weights.priors import PriorStd, check_prior_std


@dataclass(frozen=True)
class Tunnel(Method):
    """J points on the straight line θ_1 → θ_2 descend, each in the plane at right angles to the line.

    Point j keeps its place: (θ − θ_1)·(θ_2 − θ_1)/‖θ_2 − θ_1‖² = j/(J + 1). The members are θ_1, the points
    and θ_2, in their order. ``State.common["ends"]`` holds the two solutions of each chain.
    """

    name: ClassVar[str] = "tunnel"
    summary: ClassVar[str] = "a path of low loss between two networks of fit(initial=...)"
    cost: ClassVar[str] = "num_points member-epochs an epoch; predicts with num_points + 2 passes"
    best_epoch: ClassVar[str] = "none: the path as it is at the end"

    num_points: int = option(9, "J, between the two solutions")
    prior_std: PriorStd | None = option(None, PRIOR_STD_OR_FLAT)
    optimizer: Optimizer = option(
        Optimizer("Adam", lr=1e-4), f"{OPTIMIZER}; a tenth of the rate that the solutions were trained with"
    )
    schedule: Schedule = option(Constant(), SCHEDULE)

    def __post_init__(self) -> None:
        require_whole("num_points", self.num_points)
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)
        if self.prior_std is not None:
            check_prior_std(self.prior_std)

    @property
    def num_initial(self) -> int:
        return 2

    @property
    def needs_initial(self) -> bool:
        return True

    @property
    def chain_members(self) -> int:
        return self.num_points + 2

    def num_parameters(self, module: nn.Module) -> int:
        return self.chain_members * super().num_parameters(module)

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        if len(problem.initial) != 2:
            raise InputError(
                "A tunnel leads from one solution to another: pass fit(..., initial=posterior) with "
                "a posterior of at least two networks, such as a deep ensemble (--initial RUN on the command "
                "line)."
            )
        first, last = problem.initial
        if all(torch.equal(first[name], last[name]) for name in problem.trainable):
            raise InputError("The two networks that a tunnel should join are the same one.")
        places = [place / (self.num_points + 1) for place in range(1, self.num_points + 1)]
        start = problem.initial_weights(generator)
        on_line = [
            start | {n: torch.lerp(first[n], last[n], at) for n in sorted(problem.trainable)} for at in places
        ]
        stacked = {name: torch.stack([each[name] for each in on_line]) for name in start}
        # What an end does not own is the same for all networks of the template.
        ends = {name: torch.stack([first.get(name, t), last.get(name, t)])[None] for name, t in start.items()}
        state = State(Members(stacked), common={"ends": ends})
        state.common["statistics"] = empty_statistics(problem, state)
        return state

    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        prior = problem.prior(self.prior_std)

        def descend_across(state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
            """A step of every point; then each is put back to its place along the line."""
            losses = descend(state, batches, objective)
            [batch] = batches
            for group in batch.groups:
                chain = state.chain(group)
                ends = {name: t[0] for name, t in chain.common["ends"].items()}
                put_back(chain.members.stacked, ends, sorted(problem.trainable))
            return losses

        objective = problem.objective(prior)
        descent = Phase(
            "descend",
            epochs,
            objective,
            descend_across,
            {"all": Over(self.optimizer)},
            schedule=self.schedule,
            cost=float(self.num_points),
        )
        if not estimated_statistics(problem):
            return [descent]
        return [descent, re_estimate("statistics", problem, objective)]

    def posterior(self, problem: Problem, state: State) -> Posterior:
        stacked = {
            name: join([ends[0, :1], state.members.stacked[name], ends[0, 1:]])
            for name, ends in state.common["ends"].items()
        }
        labels = state.members.labels[:1].repeat(self.chain_members, 1)
        earlier = labels[0, 2] // self.num_points  # paths, where this is a checkpoint of a trajectory
        labels[:, 2] = earlier * self.chain_members + torch.arange(self.chain_members)
        members = replace(Members(stacked), labels=labels)
        return Particles(problem.network, blocks=[members])

    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        return self, max(1, round(member_epochs / self.num_points))


@torch.no_grad()
def put_back(points: Tensors, ends: Tensors, names: Sequence[str]) -> None:
    """Move points [J, ...] along the line between ``ends`` [2, ...] to their places on it, j/(J + 1).

    The place is computed from the position and not from the step, so that rounding does not add up.
    """
    first, line = ({n: ends[n][i].double() for n in names} for i in (0, 1))
    line = {n: line[n] - first[n] for n in names}
    length = torch.stack([t.square().sum() for t in line.values()]).sum()
    count = len(points[names[0]])
    along = [((points[n].double() - first[n]) * line[n]).reshape(count, -1).sum(1) for n in names]
    place = torch.stack(along).sum(0) / length
    wanted = torch.arange(1, count + 1, device=place.device, dtype=torch.float64) / (count + 1)
    for n in names:
        move = (wanted - place).reshape(-1, *[1] * line[n].ndim) * line[n]
        points[n].add_(move.to(points[n].dtype))
