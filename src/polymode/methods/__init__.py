"""The methods, one file each."""

from polymode.methods.configuration import make_method
from polymode.methods.deep_ensemble import DeepEnsemble
from polymode.methods.registry import COMPARED, METHODS
from polymode.methods.single import Single

__all__ = ["COMPARED", "METHODS", "DeepEnsemble", "Single", "make_method"]
