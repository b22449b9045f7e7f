"""Labels whose logits calibration divides by a temperature."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from polymode.errors import require_positive
from polymode.likelihoods.base import Likelihood, Seen
from polymode.likelihoods.calibration import best_factor
from polymode.trees import Tree


@dataclass(frozen=True)
class Tempered(Likelihood):
    """Labels from logits; temperature: every member's logits are divided by it.

    It is 1 in training, and what calibration learns of held-out points (Guo et al. 2017).
    """

    temperature: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        require_positive("temperature", self.temperature)

    def read(self, outputs: Tree) -> Tensor:
        logits = super().read(outputs)
        return logits if self.temperature == 1 else logits / self.temperature

    @property
    def uncalibrated(self) -> Self:
        return replace(self, temperature=1.0)

    def calibrated(self, seen: Sequence[Seen]) -> Self:
        """The temperature with the lowest held-out NLL."""
        return replace(self, temperature=best_factor(lambda t: replace(self, temperature=t).nll(seen)))

    @property
    def learned_by_calibration(self) -> dict[str, float]:
        return {"temperature": self.temperature}
