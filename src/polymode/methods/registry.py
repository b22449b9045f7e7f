"""The methods by name. METHODS is what the command line, the tests and the docs read."""

from polymode.methods.deep_ensemble import DeepEnsemble
from polymode.methods.single import Single
from polymode.training import Method

METHODS: dict[str, type[Method]] = {method.name: method for method in (Single, DeepEnsemble)}

# What a comparison runs unless told otherwise: at most eight, the baseline first.
COMPARED: tuple[str, ...] = ("single", "deep_ensemble")
