"""The methods by name. METHODS is what the command line, the tests and the docs read."""

# isort: off
# One line for each file. The order is that of lists and tables, and ``as`` exports a name from the package.
from polymode.methods.single import Single as Single
from polymode.methods.deep_ensemble import DeepEnsemble as DeepEnsemble
from polymode.methods.anchored import Anchored as Anchored
from polymode.methods.sequential_anchored import SequentialAnchored as SequentialAnchored
from polymode.methods.mc_dropout import MCDropout as MCDropout
from polymode.methods.model_patching import DropConnect as DropConnect, EMP as EMP, ECMP as ECMP
from polymode.methods.mean_field import MeanField as MeanField
from polymode.methods.spike_slab import SpikeSlab as SpikeSlab
from polymode.methods.sequential_bnn import SequentialBNN as SequentialBNN
from polymode.methods.sebays import SeBayS as SeBayS
from polymode.methods.late_phase import LatePhase as LatePhase
from polymode.methods.weight_averaging import SWA as SWA, SWAG as SWAG
from polymode.methods.batch_ensemble import BatchEnsemble as BatchEnsemble
from polymode.methods.dst_ensemble import DSTEnsemble as DSTEnsemble
from polymode.methods.edst_ensemble import EDSTEnsemble as EDSTEnsemble
from polymode.methods.rank_one_bnn import RankOneBNN as RankOneBNN
from polymode.methods.mimo import MIMO as MIMO
from polymode.methods.snapshot import Snapshot as Snapshot
from polymode.methods.fast_geometric import FastGeometric as FastGeometric
from polymode.methods.cyclical_sgmcmc import CyclicalSGMCMC as CyclicalSGMCMC
from polymode.methods.trajectory import Trajectory as Trajectory
from polymode.methods.tunnel import Tunnel as Tunnel
from polymode.methods.hmc import HMC as HMC
from polymode.methods.microcanonical import Microcanonical as Microcanonical
# isort: on

from polymode.training.contract import Method as _Method

METHODS: dict[str, type[_Method]] = {
    value.name: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, _Method) and value is not _Method
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

# What it adds where the network and the data are small enough for thousands of passes.
COMPARED_WHERE_SMALL: tuple[str, ...] = ("microcanonical",)
