"""Late-phase weights for one's own training loop (von Oswald et al. 2021, Algorithm 1).

The module stays the user's and its parameters stay the same objects; their values are those of one member
at a time. ``fit(pm.methods.LatePhase(...))`` is the same algorithm with everything around it.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from polymode.errors import InputError, require, require_whole, unknown_name
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.networks.members import Backend, Members, Tensors
from polymode.networks.selection import Where
from polymode.networks.surgery import prepare_in_place, trainable_names
from polymode.posteriors import LateMembers
from polymode.posteriors.network import Network
from polymode.weights.late import LEFT, RIGHT, Average, LateWeights, late_weights

_MATRIX = LateWeights(factored=("matrix",))


class _RankOne(nn.Module):
    """The parametrisation θ ↦ θ ∘ u vᵀ of one matrix; u and v begin as ones."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        rows, columns = matrix.shape[:2]
        self.left = nn.Parameter(matrix.new_ones(rows))
        self.right = nn.Parameter(matrix.new_ones(columns))

    def forward(self, matrix: Tensor) -> Tensor:
        weights = {"matrix": matrix, LEFT + "matrix": self.left, RIGHT + "matrix": self.right}
        return _MATRIX.realise(weights)["matrix"]


class LateRounds:
    """K members of some weights of a module, trained in turns by one's own loop, then averaged.

    For each k: φ_k ← U_φ(φ_k, ∇φ_k L(M_k, θ, φ_k)) at once; after K minibatches θ ← U_θ(θ, γ Σ_k ∇θ L).
    Until ``split`` the module is trained as ever, with one φ.

    num_members: K. weights: what is late: "batch_norm", "rank_one" (factors of matrices, θ ∘ u vᵀ: parameters
    that the module has from now on), or layers by kind, type or pattern of their names; None takes BatchNorm,
    else factors. Buffers, such as running statistics, are each member's own. head: whether the last layer is
    late, too. matrices: patterns of the weights that get factors; None takes all but embeddings and the head.
    noise: σ₀, φ_k = φ₀ + σ₀ RMS(φ₀) ε for each tensor. base_scale: γ. average: of what the collapse takes the
    mean, realised "weights" or, as von Oswald et al., "factors". seed: of the noise.
    """

    def __init__(
        self,
        module: nn.Module,
        num_members: int = 10,
        *,
        weights: Where | None = None,
        head: bool = True,
        matrices: Where | None = None,
        noise: float = 0.0,
        base_scale: float = 1.0,
        average: Average = "weights",
        seed: int = 0,
    ) -> None:
        require_whole("num_members", num_members)
        for option, value in {"noise": noise, "base_scale": base_scale}.items():
            require(0 <= value < math.inf, f"{option} must be a number of at least 0, got {value!r}.")
        if average not in get_args(Average):
            raise unknown_name("average", average, get_args(Average))
        if "hypernetwork" in ((weights,) if isinstance(weights, str) else weights or ()):
            raise InputError(
                "A hypernetwork makes kernels of weights that the module does not have: train it with "
                "fit(pm.methods.LatePhase(weights='hypernetwork'))."
            )
        self.module, self.num_members, self.noise, self.base_scale = module, num_members, noise, base_scale
        self.average: Average = average
        self.seed = seed
        trainable = trainable_names(module)
        late = late_weights(module, trainable, weights, head=head, matrices=matrices)
        require(bool(late.names), "No weights are late: say head=True, or name some in weights.")
        self._late, self._base = late, late.base(trainable)
        self._factors = tuple(prefix + name for name in late.factored for prefix in (LEFT, RIGHT))
        saved = module.state_dict().keys()  # others are constants, such as masks
        self._buffers = tuple(n for n, b in module.named_buffers() if n in saved and not b.is_complex())
        names = (*(name for name, _ in module.named_parameters()), *self._buffers)
        self._places = {name: _place(module, name) for name in names}
        self._orders: dict[str, list[str]] = {}  # of the parameters in layers that have factors
        self._add_factors()
        self._members: list[Tensors] = []  # late weights and buffers of each
        self._shown = self._trained = 0  # the member in the module; how many the round has trained
        self._is_collapsed = False

    # --- what optimisers are made of ----------------------------------------------------------

    def base_parameters(self) -> list[nn.Parameter]:
        """θ. An optimiser of all of ``module.parameters()`` will do, too: it steps what has a gradient."""
        return [self._slot(name) for name in self._places if name in self._base]

    def member_parameters(
        self, member: int | None = None, *, factors: bool | None = None
    ) -> list[nn.Parameter]:
        """φ_k of one member, or of all: one optimiser of all does the same as one for each.

        factors: True gives rank-one factors only, which should carry no weight decay; False gives the others.
        """
        self._check_split("member_parameters()")
        chosen = self._members if member is None else [self._members[member]]
        names = (() if factors else self._late.own) + (() if factors is False else self._factors)
        return [own[name] for own in chosen for name in names]  # type: ignore[misc]  # these are parameters

    # --- the algorithm ------------------------------------------------------------------------

    def split(self) -> None:
        """Make K members of the late weights as they are now: the late phase begins."""
        require(not self._is_collapsed, "The members were collapsed: begin with a new LateRounds(module).")
        require(not self._members, f"split() was called before: there are {self.num_members} members.")
        generator = torch.Generator().manual_seed(self.seed)
        self._members = [self._drawn(generator) for _ in range(self.num_members)]
        self.module.zero_grad()  # of the last step before
        self._show(0)

    def _drawn(self, generator: torch.Generator) -> Tensors:
        drawn: Tensors = {name: self._slot(name).detach().clone() for name in self._buffers}
        for name in self._late.own + self._factors:
            start = self._slot(name).detach().clone()
            if self.noise:
                scale = self.noise * start.cpu().double().square().mean().sqrt()
                noise = scale * torch.randn(start.shape, generator=generator, dtype=torch.float64)
                start += noise.to(start)
            drawn[name] = nn.Parameter(start)
        return drawn

    def next_member(self) -> int:
        """Put the next member of the round into the module, and say which it is."""
        self._check_split("next_member()")
        require(not self.round_is_complete, "The round is complete: call outer_step() before the next.")
        self._show(self._trained)
        return self._trained

    @property
    def round_is_complete(self) -> bool:
        """Whether every member has been trained since the base was."""
        return self._trained == self.num_members

    def inner_step(self, optimizer: Optimizer, scaler: GradScaler | None = None) -> None:
        """Let the member in the module take its step; the gradients of the base stay, and add up."""
        self._check_split("inner_step()")
        require(self._shown == self._trained, "Call next_member() before each inner_step().")
        own = {name: self._members[self._shown][name] for name in self._late.own + self._factors}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held.isdisjoint(map(id, own.values())):
            raise InputError(
                f"This optimiser has no weights of member {self._shown}: make it of "
                f"member_parameters({self._shown}), or one for all of member_parameters()."
            )
        for name, parameter in own.items():
            slot = self._slot(name)
            parameter.grad, slot.grad = slot.grad, None
        _step(optimizer, scaler)
        for parameter in own.values():
            parameter.grad = None  # without one a member does not coast while others are trained
        self._trained += 1

    def outer_step(self, optimizer: Optimizer | None, scaler: GradScaler | None = None) -> None:
        """Let the base take its step, with γ Σ_k ∇θ; None, or base_scale=0, leaves it as it is."""
        self._check_split("outer_step()")
        require(
            self.round_is_complete,
            f"{self._trained} of {self.num_members} members were trained: ask round_is_complete before "
            "outer_step(), and call end_epoch() where the data end.",
        )
        if optimizer is not None and self.base_scale:
            for parameter in self.base_parameters() if self.base_scale != 1 else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.base_scale)
            _step(optimizer, scaler)
        self.end_epoch(scaler)

    def end_epoch(self, scaler: GradScaler | None = None) -> None:
        """Begin again with member 0; base gradients of a round that was cut short are dropped."""
        if scaler is not None and self._trained:
            scaler.update()  # once a round: gradients that are added up need one scale
        for parameter in self.base_parameters():
            parameter.grad = None
        self._trained = 0

    # --- what comes out -----------------------------------------------------------------------

    def members(self) -> Iterator[int]:
        """Put one member after another into the module, and in the end the one that was there."""
        self._check_split("members()")
        before = self._shown
        try:
            for member in range(self.num_members):
                self._show(member)
                yield member
        finally:
            self._show(before)

    def posterior(self, likelihood: str | Likelihood, *, backend: Backend = "vmap") -> LateMembers:
        """The ensemble as it is now: to predict, to be scored and to be saved."""
        self._check_split("posterior()")
        for layer in self.module.modules():
            if isinstance(layer, nn.RNNBase):  # it has kept weights with the graph of the last pass
                with torch.no_grad():
                    layer._init_flat_weights()
        plain = copy.deepcopy(self.module)
        _remove_factors(plain, self._orders)
        network = Network(prepare_in_place(plain), make_likelihood(likelihood), backend)
        members = self._stacked(self._base).clone()
        return LateMembers(network, blocks=[members], late=self._late, average=self.average)

    def collapse(self) -> None:
        """Put the average into the module, which is plain again; BatchNorm is averaged as the map it is."""
        self._check_split("collapse()")
        members = self._stacked(self._places.keys())  # frozen ones, too: a scale is part of the map
        for name, tensor in self._late.average(self.module, members, self.average).items():
            self._slot(name).data = tensor
        _remove_factors(self.module, self._orders)
        self._members, self._is_collapsed = [], True

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on, beside the states of the module and of the optimisers."""
        gradients = {name: self._slot(name).grad for name in self._places if name in self._base}
        return {
            "members": [{name: t.detach() for name, t in own.items()} for own in self._members],
            "shown": self._shown,
            "trained": self._trained,
            "gradients": {name: gradient for name, gradient in gradients.items() if gradient is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. It makes the members, too, so that optimisers can be made afterwards."""
        saved: Sequence[Tensors] = state["members"]
        expected = {*self._late.own, *self._factors, *self._buffers}
        counts = (self.num_members,) if self._members else (0, self.num_members)  # none before split()
        if len(saved) not in counts or any(own.keys() != expected for own in saved):
            raise InputError(
                f"The state has {len(saved)} members of {sorted(next(iter(saved), ()))}; here there are "
                f"{self.num_members} of {sorted(expected)}. Load it into what it was made with."
            )
        if saved and not self._members:
            self.split()
        for member, tensors in zip(self._members, saved, strict=True):
            for name, tensor in tensors.items():
                member[name].data.copy_(tensor)
        for name, gradient in state["gradients"].items():
            self._slot(name).grad = gradient.to(self._slot(name), copy=True)
        self._trained = state["trained"]
        if saved:
            self._show(state["shown"])

    # --- parts --------------------------------------------------------------------------------

    def _slot(self, name: str) -> Any:
        """The module's own tensor, whose values are those of the member it shows."""
        return getattr(*self._places[name])

    def _check_split(self, what: str) -> None:
        require(not self._is_collapsed, f"{what}: the members were collapsed, the module is their average.")
        require(bool(self._members), f"{what} needs members: call split() first.")

    @torch.inference_mode(False)  # a tensor of inference could not be trained later
    def _show(self, member: int) -> None:
        """Let the module's tensors be those of a member: they share memory, nothing is copied."""
        for name, tensor in self._members[member].items():
            slot = self._slot(name)
            tensor.data = tensor.data.to(slot.device, slot.dtype)  # the module may have been moved
            slot.data = tensor.data
        self._shown = member

    def _stacked(self, shared: Iterable[str]) -> Members:
        own = self._members[0].keys()
        return Members(
            {name: torch.stack([member[name].detach() for member in self._members]) for name in own},
            {name: self._slot(name).detach()[None] for name in shared if name not in own},
        )

    def _add_factors(self) -> None:
        """Parametrise each matrix that gets factors, in every layer that has it."""
        taken = [name for name in self._late.factored if _is_parametrised(self._places[name][0])]
        if taken:
            raise InputError(
                f"{taken} are in layers with parametrisations of their own, which factors cannot join: name "
                "other weights in matrices."
            )
        layers = list(self.module.named_modules())
        for name in self._late.factored:
            matrix = self._slot(name)
            factors = _RankOne(matrix.detach())
            for path, layer in layers:  # a tied matrix is in several
                for attribute in [n for n, parameter in layer._parameters.items() if parameter is matrix]:
                    self._orders.setdefault(path, list(layer._parameters))
                    parametrize.register_parametrization(layer, attribute, factors)
                    lists: Any = layer.parametrizations  # torch adds it untyped
                    self._places[name] = (lists[attribute], "original")
            self._places |= {LEFT + name: (factors, "left"), RIGHT + name: (factors, "right")}


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _is_parametrised(layer: nn.Module) -> bool:
    return parametrize.is_parametrized(layer) or isinstance(layer, parametrize.ParametrizationList)


def _remove_factors(module: nn.Module, orders: Mapping[str, Sequence[str]]) -> None:
    """Make layers plain: the matrices that were multiplied are parameters again, in the order of before."""
    for path, order in orders.items():
        layer = module.get_submodule(path)
        chains: Any = layer.parametrizations  # torch adds it untyped
        parameters = {name: chain.original for name, chain in chains.items()}
        # Not torch's remove_parametrizations: copies share a class, and it would take the weights of all.
        del layer._modules["parametrizations"]
        layer.__class__ = type(layer).__bases__[0]
        parameters |= layer._parameters
        layer._parameters.clear()
        layer._parameters.update(dict.fromkeys(order))
        for name in order:
            setattr(layer, name, parameters[name])  # recurrent layers note it


def _step(optimizer: Optimizer, scaler: GradScaler | None) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
