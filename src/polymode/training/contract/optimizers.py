"""Any ``torch.optim`` optimiser over stacked tensors, as if every member were alone."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, _fused_adam_, _fused_adamw_, _fused_sgd_  # pyright: ignore
from torch import _foreach_add_ as _add_  # pyright: ignore

from polymode.errors import InputError, unknown_name
from polymode.imports import import_object
from polymode.networks.members import Tensors

# Optimisers whose update of a scalar depends on that scalar's own history and the step count alone.
# One instance serves all members that step together; any other optimiser couples the scalars of a
# tensor (norms, line searches, factored moments), so every member gets an instance of its own.
ELEMENTWISE = frozenset(
    [
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "ASGD",
        "Rprop",
    ]
)
FUSED = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})
NEEDS_CLOSURE = frozenset({"LBFGS"})
FACTOR = "rate_factor"  # of a group of weights on the learning rate, in torch's own list of groups


@dataclass(frozen=True, init=False)
class Optimizer:
    """A description of an optimiser: ``Optimizer("SGD", lr=0.1, momentum=0.9, weight_decay=5e-4)``.

    kind: a name in ``torch.optim``, or ``"package.module:Class"``, or the class itself.
    decay_all: False exempts normalisation parameters and biases from ``weight_decay``.
    clip_norm: largest gradient norm of one member; gradients of others do not count.
    Further options go to the optimiser as they are.
    """

    kind: str
    lr: float
    decay_all: bool
    clip_norm: float | None
    options: Mapping[str, Any]

    def __init__(
        self,
        kind: str | type[torch.optim.Optimizer] = "Adam",
        lr: float = 1e-3,
        *,
        decay_all: bool = True,
        clip_norm: float | None = None,
        **options: Any,
    ) -> None:
        if inspect.isclass(kind):
            inside = getattr(torch.optim, kind.__name__, None) is kind
            kind = kind.__name__ if inside else f"{kind.__module__}:{kind.__qualname__}"
        for name, value in (("lr", lr), ("clip_norm", clip_norm)):
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise InputError(f"Optimizer({name}=...) must be a positive number, got {value!r}.")
        for name, value in locals().items():
            if name in self.__dataclass_fields__:
                object.__setattr__(self, name, value)
        accepted = inspect.signature(self.factory).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        for option in options:
            if option not in accepted and not takes_any:
                raise unknown_name(f"option of {kind}", option, accepted.keys() - {"params"})

    def with_options(self, **options: Any) -> "Optimizer":
        """The same with other options for torch's optimiser."""
        changed = dict(self.options) | options
        return Optimizer(self.kind, self.lr, decay_all=self.decay_all, clip_norm=self.clip_norm, **changed)

    @property
    def undecayed(self) -> "Optimizer":
        """The same without weight decay, also where torch's optimiser would have some by itself."""
        return self.with_options(weight_decay=0.0) if self._decay else self

    @property
    def _decay(self) -> float:
        parameter = inspect.signature(self.factory).parameters.get("weight_decay")
        return self.options.get("weight_decay", 0.0 if parameter is None else parameter.default)

    def with_clipping(self, clip_norm: float | None) -> "Optimizer":
        """The same with another bound of each member's gradient, or none."""
        return Optimizer(self.kind, self.lr, decay_all=self.decay_all, clip_norm=clip_norm, **self.options)

    @property
    def factory(self) -> Callable[..., torch.optim.Optimizer]:
        name = self.kind
        if ":" in name:
            return import_object(name, "The optimiser")
        known = [n for n, v in vars(torch.optim).items() if inspect.isclass(v) and n != "Optimizer"]
        if name not in known:
            raise unknown_name("optimiser", name, known)
        return getattr(torch.optim, name)

    @property
    def elementwise(self) -> bool:
        return self.kind in ELEMENTWISE

    @property
    def needs_closure(self) -> bool:
        return self.kind in NEEDS_CLOSURE

    @property
    def takes_groups(self) -> bool:
        """Whether parts of the weights may have options of their own; one that searches a line has none."""
        return not self.needs_closure

    def over(
        self, parameters: Mapping[str, Tensor], exempt: frozenset[str], rates: Mapping[str, float]
    ) -> torch.optim.Optimizer:
        """Build the optimiser over leaf tensors, with the exempt ones in a group without decay.

        rates: those that learn at a multiple of the rate, in groups without decay, too.
        """
        options = dict(self.options)
        chosen = {"fused", "foreach", "differentiable"} & options.keys()
        if self.kind in FUSED and not chosen and all(map(_is_dense, parameters.values())):
            options["fused"] = True
        spared = frozenset() if self.decay_all or not self._decay else exempt
        if not self.takes_groups or not (spared | rates.keys()) & parameters.keys():
            return self.factory(list(parameters.values()), lr=self.lr, **options)
        undecayed = {"weight_decay": 0.0} if self._decay else {}
        groups: dict[tuple[float, bool], dict[str, Any]] = {}
        for name, tensor in parameters.items():
            is_free = name in spared or name in rates
            group = groups.setdefault(
                (rates.get(name, 1.0), is_free),
                {"params": [], FACTOR: rates.get(name, 1.0)} | (undecayed if is_free else {}),
            )
            group["params"].append(tensor)
        return self.factory(list(groups.values()), lr=self.lr, **options)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its stretch of memory, in any order of axes.

    Fused kernels walk that stretch from the first element on and take it for the tensor: on every
    K-th row of a stack they would update the wrong members without a word.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


@dataclass(frozen=True)
class Unit:
    """Rows that step together: those of a cohort, or the ``member``-th of each of its groups."""

    cohort: int
    member: int | None
    rows: slice | int  # an integer drops the row axis


class MemberOptimizer:
    """One optimiser over tensors [R, ...] whose rows (members, or groups) step in cohorts.

    A cohort is a set of rows that always step together; with ``group_size`` its members step one at a
    time. Rows that do not step keep their weights, moments and step count bit by bit. exempt: names without
    decay, where the description says so. rates: names that learn at a multiple of the rate, and never decay.
    """

    def __init__(
        self,
        spec: Optimizer,
        tensors: Tensors,
        exempt: frozenset[str],
        cohorts: Sequence[slice],
        group_size: int | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.spec, self.needs_closure = spec, spec.needs_closure
        self.names = list(tensors)
        self.num_rows = len(next(iter(tensors.values()))) if tensors else 0
        self.units = [
            unit for number, rows in enumerate(cohorts) for unit in self._units(number, rows, group_size)
        ]
        self.parameters: list[Tensors] = []
        self.instances: list[torch.optim.Optimizer] = []
        for unit in self.units:
            # Views of the stacked storage: an in-place update of the view is one of the member.
            views = {name: t[unit.rows].detach().requires_grad_() for name, t in tensors.items()}
            self.parameters.append(views)
            self.instances.append(spec.over(views, exempt, rates or {}))
        self.steps = [_step_of(instance) for instance in self.instances]

    def _units(self, cohort: int, rows: slice, group_size: int | None) -> list[Unit]:
        if not self.spec.elementwise:
            # One row without its axis: an optimiser that looks at shapes (Muon, Adafactor) or norms
            # sees the member's own tensors and no others.
            return [
                Unit(cohort, None if group_size is None else row % group_size, row)
                for row in range(rows.start, rows.stop)
            ]
        if group_size is None:
            return [Unit(cohort, None, rows)]
        return [
            Unit(cohort, member, slice(rows.start + member, rows.stop, group_size))
            for member in range(group_size)
        ]

    def _active(self, cohorts: Sequence[int] | None, member: int | None) -> Iterator[int]:
        for index, unit in enumerate(self.units):
            if (cohorts is None or unit.cohort in cohorts) and unit.member == member:
                yield index

    def set_rates(self, factors: Sequence[float]) -> None:
        """Multiply the base learning rate by a factor for each cohort."""
        for unit, instance in zip(self.units, self.instances, strict=True):
            for group in instance.param_groups:
                group["lr"] = self.spec.lr * factors[unit.cohort] * group.get(FACTOR, 1.0)

    @property
    def rates(self) -> Tensor:
        """The learning rate that each row has at this step, [R]: what a sampler scales its noise by."""
        found = torch.empty(self.num_rows, dtype=torch.float64)
        for unit, instance in zip(self.units, self.instances, strict=True):
            first = instance.param_groups[0]
            found[unit.rows] = first["lr"] / first.get(FACTOR, 1.0)
        return found

    def step(
        self, gradients: Tensors, cohorts: Sequence[int] | None = None, member: int | None = None
    ) -> None:
        """Step some cohorts (all, unless given) with gradients [R, ...] of the same rows.

        member: which member of each group steps, where members step one at a time.
        """
        for index in self._active(cohorts, member):
            rows = self.units[index].rows
            own = {name: gradients[name] for name in self.names}
            if rows != slice(0, self.num_rows):
                own = {name: gradient[rows] for name, gradient in own.items()}
            self._assign(index, own)
            self.steps[index]()

    def step_with_closure(
        self,
        evaluate: Callable[[int], tuple[Tensor, Tensors]],
        cohorts: Sequence[int] | None = None,
        member: int | None = None,
    ) -> None:
        """Step optimisers that evaluate the loss themselves; ``evaluate(row)`` gives loss and gradients."""
        for index in self._active(cohorts, member):
            row = self.units[index].rows
            assert isinstance(row, int)

            def closure(index: int = index, row: int = row) -> Tensor:
                loss, gradients = evaluate(row)
                self._assign(index, {name: gradients[name] for name in self.names})
                return loss

            self.instances[index].step(closure)  # type: ignore[arg-type]

    def _assign(self, index: int, gradients: Tensors) -> None:
        if self.spec.clip_norm is not None:
            stacked = isinstance(self.units[index].rows, slice)
            gradients = clip_each(gradients, self.spec.clip_norm, stacked=stacked)
        for name, parameter in self.parameters[index].items():
            gradient = gradients[name]
            if self.needs_closure:
                gradient = gradient.contiguous()  # LBFGS lays all gradients end to end as views
            elif gradient.stride() != parameter.stride():  # fused kernels walk the raw memory
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient

    def copy_moments_from(self, member: int) -> None:
        """Give all members of a group the moments and the step count of one of them."""
        place = {
            (u.cohort, u.rows if isinstance(u.rows, int) else u.member): i for i, u in enumerate(self.units)
        }
        states = self.state_dict()
        for index, unit in enumerate(self.units):
            assert unit.member is not None
            of = unit.rows - unit.member + member if isinstance(unit.rows, int) else member
            self._load(self.instances[index], copy.deepcopy(states[place[unit.cohort, of]]))

    def state_dict(self) -> list[dict[str, Any]]:
        return [instance.state_dict() for instance in self.instances]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for instance, state in zip(self.instances, states, strict=True):
            self._load(instance, state)

    def _load(self, instance: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        groups = zip(instance.param_groups, state["param_groups"], strict=True)
        instance.load_state_dict(state | {"param_groups": [_with_options(*group) for group in groups]})
        for parameter, moments in instance.state.items():
            for name, value in moments.items():
                # Files hold tensors in plain order; fused kernels need the parameter's own layout.
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _with_options(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A saved group with the options that it lacks; a ``ValueError`` where one is none of the optimiser's."""
    for name, value in group.items():
        if isinstance(value, int | float) and not isinstance(saved.get(name, value), int | float | Tensor):
            raise ValueError(f"the optimiser's {name} is {saved[name]!r}, which is no number")
    return {name: value for name, value in group.items() if name != "params"} | saved


def _step_of(instance: torch.optim.Optimizer) -> Callable[[], Any]:
    """A step of an optimiser; where a fused kernel does it, without what ``torch.optim`` does around it.

    To look for states, sort tensors by device and type, and profile takes three times as long as the kernel
    where networks are small.
    """
    parameters = [p for group in instance.param_groups for p in group["params"]]
    update, kinds = _UPDATES.get(type(instance)), {(p.device, p.dtype) for p in parameters}
    if update is None or len(kinds) > 1 or not all(group["fused"] for group in instance.param_groups):
        return instance.step

    keeps_nothing = isinstance(instance, torch.optim.SGD) and not instance.defaults["momentum"]

    @torch.no_grad()
    def step() -> None:
        if not instance.state and not keeps_nothing:  # the first step makes what it keeps of each tensor
            instance.step()
            return
        for group in instance.param_groups:
            update(group, [instance.state.get(parameter, {}) for parameter in group["params"]])

    return step


def _update_adam(group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
    steps, (beta1, beta2) = [state["step"] for state in states], group["betas"]
    _add_(steps, 1)
    kernel = _fused_adamw_ if group["decoupled_weight_decay"] else _fused_adam_
    kernel(
        group["params"],
        [parameter.grad for parameter in group["params"]],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _update_sgd(group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
    _fused_sgd_(
        group["params"],
        [parameter.grad for parameter in group["params"]],
        [state["momentum_buffer"] for state in states] if group["momentum"] else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


_UPDATES: dict[type, Callable[[dict[str, Any], Sequence[dict[str, Tensor]]], None]] = {
    torch.optim.Adam: _update_adam,
    torch.optim.AdamW: _update_adam,
    torch.optim.SGD: _update_sgd,
}


def clip_each(gradients: Tensors, clip_norm: float, *, stacked: bool = True) -> Tensors:
    """Scale each row's gradient, over all its tensors, to a norm of at most ``clip_norm``."""
    start = 1 if stacked else 0
    squares = [
        g.square().flatten(start).sum(-1) if g.ndim > start else g.square() for g in gradients.values()
    ]
    norms = torch.stack(squares).sum(0).sqrt()
    factor = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
    return {
        name: gradient * (factor.reshape(-1, *[1] * (gradient.ndim - 1)) if stacked else factor)
        for name, gradient in gradients.items()
    }
