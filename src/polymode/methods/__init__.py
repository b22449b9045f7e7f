"""The methods, one file each."""

from polymode.methods.anchored import Anchored
from polymode.methods.batch_ensemble import BatchEnsemble
from polymode.methods.configuration import make_method
from polymode.methods.counting import ParameterCount, parameter_counts
from polymode.methods.deep_ensemble import DeepEnsemble
from polymode.methods.hmc import HMC
from polymode.methods.late_phase import LatePhase
from polymode.methods.mc_dropout import MCDropout
from polymode.methods.model_patching import ECMP, EMP, DropConnect
from polymode.methods.registry import COMPARED, METHODS
from polymode.methods.sequential_anchored import SequentialAnchored, split_budget
from polymode.methods.single import Single
from polymode.methods.weight_averaging import SWA, SWAG

__all__ = [
    "COMPARED",
    "ECMP",
    "EMP",
    "HMC",
    "METHODS",
    "SWA",
    "SWAG",
    "Anchored",
    "BatchEnsemble",
    "DeepEnsemble",
    "DropConnect",
    "LatePhase",
    "MCDropout",
    "ParameterCount",
    "SequentialAnchored",
    "Single",
    "make_method",
    "parameter_counts",
    "split_budget",
]
