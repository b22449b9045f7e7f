"""The contract between a method and ``fit``: a method describes one chain."""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from polymode.networks.adaptations import Adaptation
from polymode.posteriors import Posterior
from polymode.training.contract.phase import Phase
from polymode.training.contract.problem import Problem
from polymode.training.contract.state import State


@dataclass(frozen=True)
class Method(ABC):
    """How a posterior is fitted: hyper-parameters and the algorithm of **one chain**.

    ``fit`` runs ``total_chains`` chains side by side on every data set; the posterior is the mixture
    of theirs.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    cost: ClassVar[str]  # in words, for whoever chooses a method
    kept: ClassVar[str] = ""  # what ``num_parameters`` counts, where it is not everything
    best_epoch: ClassVar[str] = ""  # what ``keep="best"`` keeps, or why there is no such thing
    tempered: ClassVar[bool] = False  # ``temperature`` is that of the posterior: results are stated with it
    reference: ClassVar[bool] = False  # a sampler to judge others by: compared only when it is named

    @property
    def total_chains(self) -> int:
        return 1

    @property
    def chain_members(self) -> int | None:
        """Networks that one chain leaves behind.

        None where any number can be drawn, or the length of the training decides.
        """
        return 1

    @property
    def chain_passes(self) -> int | None:
        """Forward passes that a prediction with all of them takes."""
        return self.chain_members

    @property
    def least_budget(self) -> float:
        """Member-epochs below which it is of no use: a comparison at a smaller budget gives it these."""
        return 0.0

    @property
    def num_initial(self) -> int:
        """Members of the posterior in ``fit(initial=...)`` that each chain begins at."""
        return 1

    @property
    def needs_initial(self) -> bool:
        """Whether chains can begin at members of such a posterior only."""
        return False

    @property
    def can_average(self) -> bool:
        """Whether the posterior is made of the weights as they are when training ends.

        Where it is, their average over epochs can take their place.
        """
        return False

    @property
    def undivided(self) -> str:
        """Why its minibatches cannot be shared out among processes; nothing where they can."""
        return ""

    @property
    def can_keep_best(self) -> bool:
        """Whether a best epoch can be chosen by validation: it, or what it is made of, has such an option."""
        return "keep" in (each.name for each in fields(self))

    def adaptations(self, module: nn.Module) -> Sequence[Adaptation]:
        """What has to be done to the user's network, here prepared, such as adding noise; nothing by default.

        It is done in this order to the template under a seed of the run, and to each chain's network under
        one of its own. A saved posterior names it all, and it is done again when that is loaded.
        """
        return ()

    def num_parameters(self, module: nn.Module) -> int:
        """Numbers that a posterior over this network keeps."""
        return self.total_chains * sum(p.numel() for p in module.parameters() if p.requires_grad)

    @abstractmethod
    def init(self, problem: Problem, generator: torch.Generator) -> State:
        """Make the state of one chain."""

    @abstractmethod
    def phases(self, problem: Problem, epochs: int) -> Sequence[Phase]:
        """The algorithm, phase by phase, for a chain that may train ``epochs`` epochs."""

    @abstractmethod
    def posterior(self, problem: Problem, state: State) -> Posterior:
        """What one finished chain leaves behind."""

    def remarks(self, epochs: int) -> Iterable[str]:
        """What is allowed, but might not be what was meant; ``fit`` warns of it."""
        return ()

    def findings(self, problem: Problem, state: State) -> dict[str, Any]:
        """What one chain, finished, has to say about itself, as JSON values; nothing unless it says so."""
        return {}

    @abstractmethod
    def for_budget(self, member_epochs: float) -> tuple[Self, int]:
        """This method and the epochs to fit it for, spending ``member_epochs`` in all."""

    def declared_budget(self, problem: Problem, epochs: int) -> float:
        """Member-epochs (gradient passes over the data) that fitting one data set takes."""
        return self.total_chains * sum(p.epochs * p.cost for p in self.phases(problem, epochs))

    def config(self) -> dict[str, Any]:
        """Name and hyper-parameters as JSON values."""
        return describe(self)


def describe(value: Any) -> Any:
    """Hyper-parameters as JSON values; functions and classes by their qualified name."""
    if isinstance(value, Method):
        options = {f.name: describe(getattr(value, f.name)) for f in fields(value)}
        return {"name": value.name} | options
    if is_dataclass(value) and not isinstance(value, type):
        options = {f.name: describe(getattr(value, f.name)) for f in fields(value)}
        return {"type": type(value).__name__} | options
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, functools.partial):
        return ["partial", describe(value.func), describe(value.args), describe(value.keywords)]
    named = value if hasattr(value, "__qualname__") else type(value)
    code = getattr(value, "__code__", None)  # tells one lambda from another
    suffix = "" if code is None else f":{hashlib.sha256(code.co_code).hexdigest()[:8]}"
    return f"{named.__module__}:{named.__qualname__}{suffix}"
