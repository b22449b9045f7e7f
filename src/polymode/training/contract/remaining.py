"""What remains of sparse networks, in shares, for the measures of a phase."""

from collections.abc import Mapping

import torch
from torch import Tensor

from polymode.errors import InputError
from polymode.networks.compaction import Sizes
from polymode.networks.costs import Accounting
from polymode.networks.members import Tensors
from polymode.training.contract.problem import Problem


class Remaining:
    """Counts what remains of a problem's network; nothing, where it cannot be counted.

    "parameters" and "multiplications" are those of Jantre et al. (2022), "computed" what a compact network
    multiplies (``networks.costs``, ``networks.compaction``).
    """

    def __init__(self, problem: Problem) -> None:
        self.accounting: Accounting | None = None
        if problem.example is None:
            return
        try:
            self.accounting = Accounting.of(problem.network.module, problem.example)
            self.sizes = Sizes(problem.network.module, problem.example)
        except InputError:
            self.accounting = None

    def shares(self, units: Tensors, nonzero: Mapping[str, Tensor] | None = None) -> Tensors:
        """Shares [M]. units: by layer, [M, outputs], 0 where one is left out.

        nonzero: where weights are masked one by one, how many of each are left, [M].
        """
        if self.accounting is None:
            return {}
        found = self.accounting.shares({} if nonzero else units, nonzero)
        members = range(len(next(iter(units.values()))))
        each = [self.sizes.share({name: mask[row] for name, mask in units.items()}) for row in members]
        return found | {"computed": torch.tensor(each, dtype=torch.float64)}
