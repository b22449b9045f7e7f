"""The methods, one file each. METHODS is what the command line, the tests and the docs read."""

from polymode.methods.deep_ensemble import DeepEnsemble
from polymode.methods.single import Single
from polymode.training import Method

METHODS: dict[str, type[Method]] = {method.name: method for method in (Single, DeepEnsemble)}

__all__ = ["METHODS", "DeepEnsemble", "Single"]
