"""How the contract tests make a small instance of every registered method.

A new method adds one line here; everything in this folder then runs on it.
"""

from collections.abc import Callable

import polymode as pm
from polymode.training import Method

# Not Adam: it turns rounding on gradients that are zero by symmetry (the key bias of attention) into
# steps of full size, so that backends could not be compared.
SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9)

SMALL: dict[str, Callable[[], Method]] = {
    "single": lambda: pm.methods.Single(prior_std=1.0, optimizer=SGD),
    "deep_ensemble": lambda: pm.methods.DeepEnsemble(3, of=pm.methods.Single(prior_std=1.0, optimizer=SGD)),
}
