"""Any ``torch.optim`` optimiser over stacked tensors, as if every member were alone."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polymode.errors import InputError, unknown_name
from polymode.members import Tensors

# Optimisers whose update of a scalar depends on that scalar's own history and the step count alone.
# One instance serves all members that step together; any other optimiser couples the scalars of a
# tensor (norms, line searches, factored moments), so every member gets an instance of its own.
ELEMENTWISE = frozenset(
    "SGD Adam AdamW NAdam RAdam RMSprop Adagrad Adadelta Adamax ASGD Rprop".split()
)
FUSED = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})
NEEDS_CLOSURE = frozenset({"LBFGS"})


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
            if value is not None and not value > 0:
                raise InputError(f"Optimizer({name}=...) must be positive, got {value}.")
        for name, value in locals().items():
            if name in self.__dataclass_fields__:
                object.__setattr__(self, name, value)
        accepted = inspect.signature(self.factory).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        for option in options:
            if option not in accepted and not takes_any:
                raise unknown_name(f"option of {kind}", option, accepted.keys() - {"params"})

    @property
    def factory(self) -> Callable[..., torch.optim.Optimizer]:
        module, _, name = self.kind.rpartition(":")
        if module:
            return getattr(importlib.import_module(module), name)
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

    def over(self, parameters: Mapping[str, Tensor], exempt: frozenset[str]) -> torch.optim.Optimizer:
        """Build the optimiser over leaf tensors, with the exempt ones in a group without decay."""
        options = dict(self.options)
        if self.kind in FUSED and not {"fused", "foreach", "differentiable"} & options.keys():
            options["fused"] = True
        if self.decay_all or not options.get("weight_decay"):
            return self.factory(list(parameters.values()), lr=self.lr, **options)
        free = [t for name, t in parameters.items() if name in exempt]
        decayed = [t for name, t in parameters.items() if name not in exempt]
        groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
        return self.factory([g for g in groups if g["params"]], lr=self.lr, **options)


class MemberOptimizer:
    """One optimiser over tensors [R, ...] whose rows (members, or groups) step in cohorts.

    A cohort is a set of rows that always step together. Rows of a cohort that does not step keep
    their weights, moments and step count bit by bit.
    """

    def __init__(
        self,
        spec: Optimizer,
        tensors: Tensors,
        exempt: frozenset[str],
        cohorts: Sequence[slice],
    ) -> None:
        self.spec = spec
        self.names = list(tensors)
        num_rows = next(iter(tensors.values())).shape[0]
        # (cohort, index into the row axis): an integer index drops the axis, so that an optimiser
        # that looks at shapes (Muon, Adafactor) sees the member's own tensor.
        self.units: list[tuple[int, slice | int]] = [
            (number, rows)
            for number, cohort in enumerate(cohorts)
            for rows in ([cohort] if spec.elementwise else range(*cohort.indices(num_rows)))
        ]
        self.parameters: list[Tensors] = []
        self.instances: list[torch.optim.Optimizer] = []
        for _, rows in self.units:
            # Views of the stacked storage: an in-place update of the view is one of the member.
            views = {name: t[rows].detach().requires_grad_() for name, t in tensors.items()}
            self.parameters.append(views)
            self.instances.append(spec.over(views, exempt))

    def set_rates(self, factors: Sequence[float]) -> None:
        """Multiply the base learning rate by a factor for each cohort."""
        for (cohort, _), instance in zip(self.units, self.instances, strict=True):
            for group in instance.param_groups:
                group["lr"] = self.spec.lr * factors[cohort]

    def step(self, gradients: Tensors, active: Sequence[int] | None = None) -> None:
        """Step the active cohorts (all, unless given) with gradients [R, ...] of the same rows."""
        for unit, (cohort, rows) in enumerate(self.units):
            if active is None or cohort in active:
                mine = {name: gradients[name][rows] for name in self.names}
                self._assign(unit, mine, stacked=isinstance(rows, slice))
                self.instances[unit].step()

    def step_with_closure(
        self, evaluate: Callable[[int], tuple[Tensor, Tensors]], active: Sequence[int] | None = None
    ) -> None:
        """Step optimisers that evaluate the loss themselves; ``evaluate(row)`` gives loss and gradients."""
        for unit, (cohort, row) in enumerate(self.units):
            if active is None or cohort in active:
                assert isinstance(row, int)

                def closure(unit: int = unit, row: int = row) -> Tensor:
                    loss, gradients = evaluate(row)
                    mine = {name: gradients[name] for name in self.names}
                    self._assign(unit, mine, stacked=False)
                    return loss

                self.instances[unit].step(closure)  # type: ignore[arg-type]

    def _assign(self, unit: int, gradients: Tensors, *, stacked: bool) -> None:
        if self.spec.clip_norm is not None:
            gradients = clip_each(gradients, self.spec.clip_norm, stacked=stacked)
        for name, parameter in self.parameters[unit].items():
            gradient = gradients[name]
            if gradient.stride() != parameter.stride():  # fused kernels walk the raw memory
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient

    def state_dict(self) -> list[dict[str, Any]]:
        return [instance.state_dict() for instance in self.instances]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for instance, state in zip(self.instances, states, strict=True):
            instance.load_state_dict(state)


def clip_each(gradients: Tensors, clip_norm: float, *, stacked: bool = True) -> Tensors:
    """Scale each row's gradient, over all its tensors, to a norm of at most ``clip_norm``."""
    start = 1 if stacked else 0
    squares = [g.square().flatten(start).sum(-1) if g.ndim > start else g.square() for g in gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    factor = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
    return {
        name: gradient * (factor.reshape(-1, *[1] * (gradient.ndim - 1)) if stacked else factor)
        for name, gradient in gradients.items()
    }
