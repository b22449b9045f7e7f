"""Methods that train sparse networks whose connections move while they are trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polymode.errors import InputError, require, require_whole
from polymode.networks.members import Tensors
from polymode.networks.selection import Where, check_where
from polymode.networks.surgery import trainable_names
from polymode.options import option
from polymode.training.contract.batch import Batch
from polymode.training.contract.method import Method
from polymode.training.contract.objective import Objective
from polymode.training.contract.optimizers import Optimizer
from polymode.training.contract.phase import Measure, Over, Phase
from polymode.training.contract.problem import Problem
from polymode.training.contract.remaining import Remaining
from polymode.training.contract.shared_options import LAYERS, OPTIMIZER, check_optimizer
from polymode.training.contract.state import State
from polymode.weights.sparse import draw_masks, erk_densities, masked_names, prune_and_grow, share_active


@dataclass(frozen=True)
class SparseDescent(Method):
    """θ ← z ∘ U(θ, ∇L): the optimiser sees the whole gradient, and what the mask z takes away stays 0.

    A chain is one network with masks ``own["mask"]``. Every ``update_every`` of its steps, which are counted
    in ``common["steps"]``, its smallest weights are exchanged for those of the largest gradient on the
    minibatch at hand; a share in ``common["exchange"]`` asks for it at the next step.
    """

    num_members: int = option(3, "M, networks of the ensemble")
    density: float = option(0.2, "share of the masked weights that are active (1 − sparsity), in all layers")
    where: Where = option(
        "all", f"layers to mask, {LAYERS}: of what is selected, the weights of Linear and convolutional ones"
    )
    update_every: int = option(1000, "ΔT, steps between two exchanges of weights")
    prune_rate: float = option(0.5, "p, the share of a layer's active weights that are exchanged then")
    optimizer: Optimizer = option(Optimizer("SGD", lr=0.1, momentum=0.9, weight_decay=5e-4), OPTIMIZER)

    def __post_init__(self) -> None:
        require_whole("num_members", self.num_members)
        require(0 < self.density <= 1, f"density must be above 0 and at most 1, got {self.density!r}.")
        object.__setattr__(self, "where", check_where(self.where))  # one way to say one thing
        require_whole("update_every", self.update_every)
        require(0 < self.prune_rate < 1, f"prune_rate must be above 0 and below 1, got {self.prune_rate!r}.")
        check_optimizer(self.optimizer)
        if self.optimizer.needs_closure:
            raise InputError(
                f"{self.optimizer.kind} evaluates the loss by itself, several times in a step, and here "
                "weights are masked after every step: use an optimiser such as SGD or Adam."
            )

    def num_parameters(self, module: nn.Module) -> int:
        """Active weights and all that has no mask, of every member; which ones are active costs more."""
        trainable = trainable_names(module)
        sizes = {name: p.numel() for name, p in module.named_parameters() if name in trainable}
        masked = sum(sizes[name] for name in masked_names(module, trainable, self.where))
        return self.num_members * (sum(sizes.values()) - masked + round(self.density * masked))

    def init(self, problem: Problem, generator: torch.Generator) -> State:
        members = problem.initial_members(generator)
        names = masked_names(problem.network.module, problem.trainable, self.where)
        densities = erk_densities({n: tuple(members.stacked[n].shape[1:]) for n in names}, self.density)
        masks = draw_masks(members.stacked, densities, generator)
        members.stacked.update({name: members.stacked[name] * mask for name, mask in masks.items()})
        clocks = {"steps": torch.zeros(1, dtype=torch.int64), "exchange": torch.zeros(1, dtype=torch.float64)}
        return State(members, own={"mask": masks}, common=clocks)

    def phase(self, name: str, epochs: int, problem: Problem) -> Phase:
        """A phase of such steps, to be given a schedule and hooks."""
        return Phase(
            name,
            epochs,
            problem.objective(),
            self._step,
            {"all": Over(self.optimizer)},
            measure=_measure(Remaining(problem)),
        )

    def _step(self, state: State, batches: Sequence[Batch], objective: Objective) -> Tensor:
        [batch] = batches
        losses, gradients = objective.losses_and_gradients(state, batch)
        state.optimizers["all"].step(gradients.stacked, batch.cohorts)
        groups = slice(batch.groups.start, batch.groups.stop)  # rows of members, too: a chain is one member
        rates = self._rates(state, groups)
        due = [row for row, rate in enumerate(rates.tolist()) if rate]
        for name, mask in state.own["mask"].items():
            weight = state.members.stacked[name]
            weight[groups].mul_(mask[groups])
            if due:
                weight[due], mask[due] = prune_and_grow(
                    weight[due], mask[due], gradients.stacked[name][due], rates[due]
                )
        return losses

    def _rates(self, state: State, groups: slice) -> Tensor:
        """The share of active weights that each chain exchanges after this step, [G]; the clocks go on."""
        rates = torch.zeros_like(state.common["exchange"])
        steps, asked = state.common["steps"][groups], state.common["exchange"][groups]
        steps += 1
        regular = self.prune_rate * (steps % self.update_every == 0).double()
        rates[groups] = torch.where(asked > 0, asked, regular)
        asked.zero_()
        return rates


def _measure(remaining: Remaining) -> Measure:
    """The share of masked weights that are active, and what remains of the network with them."""

    def measure(state: State) -> Tensors:
        masks = state.own["mask"]
        active = {name: mask.flatten(1).sum(1) for name, mask in masks.items()}
        units = {name.rpartition(".")[0]: mask.flatten(2).any(2) for name, mask in masks.items()}
        shares = {"weights": share_active(masks)} | remaining.shares(units, active)
        return {f"{name}_remaining": share for name, share in shares.items()}

    return measure
