"""The methods by name. METHODS is what the command line, the tests and the docs read."""

from polymode.methods.anchored import Anchored
from polymode.methods.batch_ensemble import BatchEnsemble
from polymode.methods.deep_ensemble import DeepEnsemble
from polymode.methods.hmc import HMC
from polymode.methods.late_phase import LatePhase
from polymode.methods.mc_dropout import MCDropout
from polymode.methods.model_patching import ECMP, EMP, DropConnect
from polymode.methods.sequential_anchored import SequentialAnchored
from polymode.methods.single import Single
from polymode.methods.weight_averaging import SWA, SWAG
from polymode.training.contract import Method

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Single,
        DeepEnsemble,
        Anchored,
        SequentialAnchored,
        MCDropout,
        DropConnect,
        EMP,
        ECMP,
        LatePhase,
        SWA,
        SWAG,
        BatchEnsemble,
        HMC,
    )
}

# What a comparison runs unless told otherwise: at most eight, the baseline first.
COMPARED: tuple[str, ...] = (
    "single",
    "deep_ensemble",
    "anchored",
    "sequential_anchored",
    "mc_dropout",
    "emp",
    "ecmp",
    "late_phase",
)
