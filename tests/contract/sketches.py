"""Sketches of papers' methods in the contracts, as small as they can be.

They are not the methods, which come with their own files and tests: they show that chains of members
(Delaunoy and Louppe 2021), noise and KL terms (Jantre et al. 2022), component mixtures (Chang et al. 2019),
trajectories (Fort et al. 2019) and shared weights with an inner loop (von Oswald et al. 2021), masks
that change in training, and heads of a wider network (Havasi et al. 2021), need nothing that the core does
not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymode.errors import InputError, require
from polymode.networks.adaptations import Adaptation, register_adaptation
from polymode.networks.members import Members
from polymode.networks.selection import select_layers
from polymode.posteriors import Particles
from polymode.schedules import Schedule, Warmup
from polymode.seeds import draw_seed, fold, mix, uniform
from polymode.training.contract import Keep, Method, Optimizer, Over, Phase, State, descend, keep_rule
from polymode.weights.priors import gaussian_penalty

SGD = Optimizer("SGD", lr=0.05, momentum=0.9)
WARMUP = Warmup(2)


class Sketch(Method):
    summary: ClassVar[str] = "a sketch"

    def for_budget(self, member_epochs):
        raise AssertionError


def draw_normal(state: State, own: Tensor, groups: range | None = None) -> None:
    """Fill a tensor [M, ...] of ``state.own`` with normal numbers, each chain from its own generator."""
    for group in groups or range(state.members.num_groups):
        generator = state.generators[group]
        rows = state.members.rows(slice(group, group + 1))
        target = own[rows]
        target.copy_(torch.randn(target.shape, generator=generator, dtype=target.dtype))


@dataclass(frozen=True)
class AnchoredChain(Sketch):
    """Anchored chains: a long training at the first anchor, then short ones while the anchor walks."""

    name: ClassVar[str] = "anchored_chain"
    chains: int = 2
    length: int = 3

    @property
    def total_chains(self):
        return self.chains

    def init(self, problem, generator):
        members = problem.initial_members(generator)
        anchors = {
            n: torch.randn(members.stacked[n].shape, generator=generator, dtype=torch.float64)
            for n in sorted(problem.trainable)
        }
        return State(members, own={"anchor": anchors})

    def phases(self, problem, epochs):
        def penalty(weights, own):
            return gaussian_penalty({n: weights[n] for n in problem.trainable}, 1.0, own["anchor"])

        def walk(state):
            for anchor in state.own["anchor"].values():
                before = anchor.clone()
                draw_normal(state, anchor)
                anchor.mul_(0.3).add_(before, alpha=0.9)

        def finish(state):
            state.finished.append(state.members)

        objective = problem.objective(penalty)
        first = Phase("long", epochs, objective, optimizers={"all": Over(SGD)}, leave=finish)
        short = replace(first, name="short", epochs=1, enter=walk)
        return [first, *[short] * (self.length - 1)]

    def posterior(self, problem, state):
        return Particles(problem.network, blocks=state.finished.blocks)


@dataclass(frozen=True)
class MeanField(Sketch):
    """Gaussian weights; each step draws noise, the loss has a KL term of the whole data set."""

    name: ClassVar[str] = "mean_field"

    def init(self, problem, generator):
        start = problem.initial_members(generator)
        shared = {f"mean.{n}": start.stacked[n] for n in sorted(problem.trainable)}
        shared |= {f"rho.{n}": torch.full_like(start.stacked[n], -4.0) for n in problem.trainable}
        rest = {n: t for n, t in start.stacked.items() if n not in problem.trainable}
        own = {"noise": {n: torch.zeros_like(start.stacked[n]) for n in sorted(problem.trainable)}}
        # A group needs something of its own: its (empty) weight of the draw.
        return State(Members(rest | {"draw": torch.zeros(1, 1)}, shared), own=own)

    def phases(self, problem, epochs):
        names = sorted(problem.trainable)

        def realise(weights, own):
            rest = {
                n: t for n, t in weights.items() if "." not in n or n.split(".")[0] not in ("mean", "rho")
            }
            rest.pop("draw")
            drawn = {
                n: weights[f"mean.{n}"] + F.softplus(weights[f"rho.{n}"]) * own["noise"][n] for n in names
            }
            return rest | drawn

        def kl(weights, own):
            terms = []
            for n in names:
                mean, std = weights[f"mean.{n}"], F.softplus(weights[f"rho.{n}"])
                terms.append((-std.log() + 0.5 * (std.square() + mean.square()) - 0.5).sum())
            return torch.stack(terms).sum()

        def step(state: State, batches, objective) -> Tensor:
            for noise in state.own["noise"].values():
                draw_normal(state, noise, batches[0].groups)
            losses, gradients = objective.losses_and_gradients(state, batches[0])
            state.optimizers["all"].step(gradients.shared, batches[0].cohorts)
            return losses

        trainable = frozenset(f"{kind}.{n}" for n in names for kind in ("mean", "rho"))
        objective = problem.objective(kl, realise, trainable)
        return [Phase("fit", epochs, objective, step, {"all": Over(SGD, trainable)})]

    def posterior(self, problem, state):
        names = sorted(problem.trainable)
        shared = state.members.shared
        draws = {}
        for n in names:
            noise = torch.randn(
                4, *shared[f"mean.{n}"].shape[1:], generator=state.generators[0], dtype=torch.float64
            )
            draws[n] = shared[f"mean.{n}"] + F.softplus(shared[f"rho.{n}"]) * noise
        rest = {n: t.expand(4, *t.shape[1:]).clone() for n, t in state.members.stacked.items() if n != "draw"}
        return Particles(problem.network, blocks=[Members(draws | rest)])


@dataclass(frozen=True)
class Annealed(MeanField):
    """The same with a KL term whose weight grows to 1 over the first epochs."""

    name: ClassVar[str] = "annealed"
    schedule: Schedule = WARMUP

    def phases(self, problem, epochs):
        return [replace(phase, penalty_schedule=self.schedule) for phase in super().phases(problem, epochs)]


@dataclass(frozen=True)
class Components(Sketch):
    """Component mixtures: K components of the last bias, one drawn for each step; the rest is shared."""

    name: ClassVar[str] = "components"
    patched: str = "bias"

    def init(self, problem, generator):
        start = problem.initial_members(generator)
        name = self._patched(problem)
        components = start.stacked[name][:, None] + 0.1 * torch.randn(
            1, 3, *start.stacked[name].shape[1:], generator=generator, dtype=torch.float64
        )
        shared = {n: t for n, t in start.stacked.items() if n in problem.trainable and n != name}
        rest = {n: t for n, t in start.stacked.items() if n not in problem.trainable}
        index = {"index": torch.zeros(1, dtype=torch.int64)}
        return State(Members(rest | {"draw": torch.zeros(1, 1)}, shared | {name: components}), own=index)

    def _patched(self, problem):
        return max(n for n in problem.trainable if n.endswith(self.patched))

    def phases(self, problem, epochs):
        name = self._patched(problem)

        def realise(weights, own):
            chosen = weights[name].index_select(0, own["index"].reshape(1)).squeeze(0)
            return {n: t for n, t in weights.items() if n != "draw"} | {name: chosen}

        def step(state: State, batches, objective) -> Tensor:
            for group in batches[0].groups:
                state.own["index"][group] = torch.randint(3, (), generator=state.generators[group])
            losses, gradients = objective.losses_and_gradients(state, batches[0])
            state.optimizers["all"].step(gradients.shared, batches[0].cohorts)
            return losses

        objective = problem.objective(realise=realise)
        return [Phase("fit", epochs, objective, step, {"all": Over(SGD, problem.trainable)})]

    def posterior(self, problem, state):
        name = self._patched(problem)
        members = state.members
        shared = {n: t for n, t in members.shared.items() if n != name}
        rest = {n: t.expand(3, *t.shape[1:]).clone() for n, t in members.stacked.items() if n != "draw"}
        return Particles(problem.network, blocks=[Members(rest | {name: members.shared[name][0]}, shared)])


@dataclass(frozen=True)
class Trajectory(Sketch):
    """Trajectories: every epoch's weights of one run."""

    name: ClassVar[str] = "trajectory"

    def init(self, problem, generator):
        return State(problem.initial_members(generator))

    def phases(self, problem, epochs):
        keep = lambda state: state.finished.append(state.members)  # noqa: E731
        return [Phase("walk", epochs, problem.objective(), descend, {"all": Over(SGD)}, end_epoch=keep)]

    def posterior(self, problem, state):
        return Particles(problem.network, blocks=state.finished.blocks)


@dataclass(frozen=True)
class LateHead(Sketch):
    """Late-phase weights: after T₀ the last layer becomes K members, trained in rounds; they collapse."""

    name: ClassVar[str] = "late_head"
    num_members: int = 3

    def init(self, problem, generator):
        start = problem.initial_members(generator)
        late = self._late(problem)
        stacked = {
            n: t.repeat(self.num_members, *[1] * (t.ndim - 1))
            for n, t in start.stacked.items()
            if n in late or n not in problem.trainable
        }
        shared = {n: t for n, t in start.stacked.items() if n in problem.trainable and n not in late}
        return State(Members(stacked, shared))

    def _late(self, problem):
        last = max(n.rsplit(".", 1)[0] for n in problem.trainable)
        return frozenset(n for n in problem.trainable if n.rsplit(".", 1)[0] == last)

    def phases(self, problem, epochs) -> Sequence[Phase]:
        objective, late = problem.objective(), self._late(problem)
        base = problem.trainable - late
        count = self.num_members

        def ordinary(state, batches, objective):
            losses, gradients = objective.losses_and_gradients(state, batches[0], member=0)
            state.optimizers["late"].step(gradients.stacked, batches[0].cohorts, member=0)
            state.optimizers["base"].step(gradients.shared, batches[0].cohorts)
            return losses

        def split(state):
            for tensor in state.members.stacked.values():
                each = tensor.unflatten(0, (-1, count))
                each.copy_(each[:, :1].expand_as(each).clone())

        def round_(state, batches, objective):
            total, losses = None, []
            for member, batch in enumerate(batches):
                each, gradients = objective.losses_and_gradients(state, batch, member=member)
                state.optimizers["late"].step(gradients.stacked, batch.cohorts, member=member)
                total = (
                    dict(gradients.shared)
                    if total is None
                    else {n: t + gradients.shared[n] for n, t in total.items()}
                )
                losses.append(each)
            if len(batches) == count:  # the base gradient of a leftover round is dropped
                state.optimizers["base"].step(total, batches[-1].cohorts)
            return torch.stack(losses).nanmean(0)

        optimizers = {"base": Over(SGD, base), "late": Over(SGD, late, separate_members=True)}
        early = Phase("early", epochs // 2, objective, ordinary, optimizers)
        rest = epochs - epochs // 2
        return [
            early,
            replace(
                early,
                name="late",
                epochs=rest,
                step=round_,
                batches=count,
                enter=split,
                carry=frozenset({"base"}),
            ),
        ]

    def posterior(self, problem, state):
        mean = {n: t.float().mean(0, keepdim=True).to(t.dtype) for n, t in state.members.stacked.items()}
        mean |= {
            n: t.mean(0, keepdim=True) for n, t in state.members.stacked.items() if t.is_floating_point()
        }
        return Particles(problem.network, blocks=[Members(mean | state.members.shared)])


@dataclass(frozen=True)
class Masked(Sketch):
    """Sparse training: half of the weights are zero, which ones is drawn anew after every epoch."""

    name: ClassVar[str] = "masked"
    keep: Keep = "last"

    def init(self, problem, generator):
        members = problem.initial_members(generator)
        masks = {n: torch.ones_like(members.stacked[n]) for n in sorted(problem.trainable)}
        return State(members, own={"mask": masks})

    def phases(self, problem, epochs):
        def realise(weights, own):
            return weights | {n: weights[n] * mask for n, mask in own["mask"].items()}

        def redraw(state):
            for name, mask in state.own["mask"].items():
                draw_normal(state, mask)
                mask.copy_((mask > 0).to(mask.dtype))
                state.members.stacked[name].mul_(mask)

        def sparsity(state):
            """The share of weights that are zero, of each member."""
            kept = torch.cat([mask.flatten(1) for mask in state.own["mask"].values()], 1)
            return {"sparsity": 1 - kept.mean(1)}

        first = Phase(
            "fit",
            epochs,
            problem.objective(realise=realise),
            optimizers={"all": Over(SGD)},
            keep=keep_rule(self.keep),
            measure=sparsity,
            enter=redraw,
            end_epoch=redraw,
        )
        return [first]

    def posterior(self, problem, state):
        own = {n: state.members.stacked[n] * mask for n, mask in state.own["mask"].items()}
        return Particles(problem.network, blocks=[Members(state.members.stacked | own)])


@dataclass(frozen=True)
class Tunnel(Sketch):
    """A low-loss tunnel: members on the line between two solutions, which descend at right angles to it."""

    name: ClassVar[str] = "tunnel"
    num_members: int = 3
    optimizer: Optimizer = SGD

    @property
    def num_initial(self):
        return 2

    def init(self, problem, generator):
        require(len(problem.initial) == 2, "A tunnel leads from one network to another: pass initial=.")
        first, last = problem.initial
        places = [(place + 1) / (self.num_members + 1) for place in range(self.num_members)]
        start = problem.initial_weights(generator)
        stacked = {
            n: torch.stack(
                [torch.lerp(first[n], last[n], at) if n in problem.trainable else t for at in places]
            )
            for n, t in start.items()
        }
        line = {n: torch.stack([t] * self.num_members) for n, t in self._direction(problem).items()}
        return State(Members(stacked), own={"line": line})

    def _direction(self, problem):
        first, last = problem.initial
        return {n: last[n] - first[n] for n in sorted(problem.trainable)}

    def phases(self, problem, epochs):
        def descend_across(state: State, batches, objective) -> Tensor:
            """A step, less the part of it that leads along the line."""
            before = {n: state.members.stacked[n].clone() for n in state.own["line"]}
            losses = descend(state, batches, objective)
            line = state.own["line"]
            moved = {n: state.members.stacked[n] - before[n] for n in line}
            along = sum((moved[n] * t).flatten(1).sum(1) for n, t in line.items())
            share = along / sum(t.square().flatten(1).sum(1) for t in line.values())
            for n, t in line.items():
                state.members.stacked[n].sub_(share.reshape(-1, *[1] * (t.ndim - 1)) * t)
            return losses

        over = {"all": Over(self.optimizer)}
        return [Phase("descend", epochs, problem.objective(), descend_across, over)]

    def posterior(self, problem, state):
        return Particles(problem.network, blocks=[state.members.clone()])


def orders(shuffle: Tensor, heads: int, count: int) -> Tensor:
    """An order of ``count`` examples for each head, [heads, count], keyed by a seed."""
    keys = mix(fold(shuffle) ^ torch.arange(1, heads + 1, device=shuffle.device))
    return uniform(keys, count).argsort(-1)


class JoinedInputs(nn.Linear):
    """A first layer that sees an example for every head: in training others, else the same one."""

    shuffle: Tensor

    def __init__(self, layer: nn.Linear, heads: int) -> None:
        weight, bias = layer.weight, layer.bias is not None
        size = heads * layer.in_features
        super().__init__(size, layer.out_features, bias, device=weight.device, dtype=weight.dtype)
        self.heads = heads
        self.register_buffer("shuffle", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            each = x[orders(self.shuffle, self.heads, len(x))]
        else:
            each = x.expand(self.heads, *x.shape)
        return super().forward(each.movedim(0, 1).flatten(1))


class JoinedOutputs(nn.Linear):
    """A last layer with outputs of every head, which gives those of one, examples in their own order."""

    shuffle: Tensor
    head: Tensor

    def __init__(self, layer: nn.Linear, heads: int) -> None:
        weight, bias = layer.weight, layer.bias is not None
        size = heads * layer.out_features
        super().__init__(layer.in_features, size, bias, device=weight.device, dtype=weight.dtype)
        self.heads = heads
        self.register_buffer("shuffle", torch.zeros((), dtype=torch.int64))
        self.register_buffer("head", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mine = self.head.reshape(1)
        outputs = super().forward(x).unflatten(-1, (self.heads, -1))
        outputs = outputs.index_select(1, mine).squeeze(1)
        if not self.training:
            return outputs
        order = orders(self.shuffle, self.heads, len(x)).index_select(0, mine).squeeze(0)
        return outputs[order.argsort()]


@register_adaptation
@dataclass(frozen=True)
class JoinHeads(Adaptation):
    """Widens the first and the last layer for several heads, with weights drawn anew."""

    kind: ClassVar[str] = "sketches/join_heads"
    heads: int
    first: str
    last: str

    def apply(self, module: nn.Module) -> nn.Module:
        for name, joined in ((self.first, JoinedInputs), (self.last, JoinedOutputs)):
            layer = module.get_submodule(name)
            if type(layer) is not nn.Linear or not name:
                raise InputError(f"Heads are joined in Linear layers of a network; {name!r} is {layer}.")
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, joined(layer, self.heads))
        return module


@dataclass(frozen=True)
class Mimo(Sketch):
    """Heads that share all weights of one wider network, each trained on examples in an order of its own.

    L = −Σ_h log p_h(y_h | x_1, ..., x_H), examples shuffled for each head; p(y | x) = mean_h p_h(y | x, ...).
    The network shuffles inputs and puts outputs back, so that all heads have the same targets; one seed does
    both, which the members of a chain share. What they share is not mapped by vmap: the body runs once for
    all heads.
    """

    name: ClassVar[str] = "mimo"
    heads: int = 3

    def adaptations(self, module):
        [first], [last] = select_layers(module, "input"), select_layers(module, "output")
        return [JoinHeads(self.heads, first, last)]

    def _names(self, problem):
        """The seeds of the shuffles, and the number of the head, among the tensors of the network."""
        [joined] = problem.network.adaptations
        return (f"{joined.first}.shuffle", f"{joined.last}.shuffle"), f"{joined.last}.head"

    def init(self, problem, generator):
        start = problem.initial_members(generator)
        shuffles, head = self._names(problem)
        shared = {n: t for n, t in start.stacked.items() if n in problem.trainable}
        shared |= {n: torch.zeros(1, dtype=torch.int64) for n in shuffles}
        rest = {n: t for n, t in start.stacked.items() if n not in shared}
        stacked = {n: t.expand(self.heads, *t.shape[1:]).clone() for n, t in rest.items()}
        return State(Members(stacked | {head: torch.arange(self.heads)}, shared))

    def phases(self, problem, epochs):
        shuffles, _ = self._names(problem)

        def step(state: State, batches, objective) -> Tensor:
            for group in batches[0].groups:
                seed = draw_seed(state.generators[group])
                for name in shuffles:
                    state.members.shared[name][group] = seed
            losses, gradients = objective.losses_and_gradients(state, batches[0])
            state.optimizers["all"].step(gradients.shared, batches[0].cohorts)
            return losses

        return [Phase("fit", epochs, problem.objective(), step, {"all": Over(SGD, problem.trainable)})]

    def posterior(self, problem, state):
        shared = {n: t for n, t in state.members.shared.items() if n in problem.trainable}
        return Particles(problem.network, blocks=[replace(state.members, shared=shared)])


SKETCHES = [
    AnchoredChain(),
    MeanField(),
    Annealed(),
    Components(),
    Trajectory(),
    LateHead(),
    Masked(),
    Mimo(),
]
