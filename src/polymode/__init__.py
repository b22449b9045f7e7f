"""polymode: one network's opinion is not enough. Ensembles and Bayesian posteriors on PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING

from polymode._version import __version__ as __version__

# Type checkers follow these lines; nobody waits for torch who does not use it.
if TYPE_CHECKING:
    from polymode import data as data
    from polymode import errors as errors
    from polymode import landscape as landscape
    from polymode import likelihoods as likelihoods
    from polymode import methods as methods
    from polymode import metrics as metrics
    from polymode import models as models
    from polymode import samplers as samplers
    from polymode import schedules as schedules
    from polymode.application import comparison as comparison
    from polymode.application import datasets as datasets
    from polymode.application import plots as plots
    from polymode.application.comparison import compare as compare
    from polymode.application.datasets.tables import table as table
    from polymode.application.estimators import EnsembleClassifier as EnsembleClassifier
    from polymode.application.estimators import EnsembleRegressor as EnsembleRegressor
    from polymode.data import ArrayData as ArrayData
    from polymode.data import LoaderData as LoaderData
    from polymode.judging.evaluation import evaluate as evaluate
    from polymode.judging.recalibration import ConformalIntervals as ConformalIntervals
    from polymode.judging.recalibration import ConformalSets as ConformalSets
    from polymode.judging.recalibration import TemperatureScaling as TemperatureScaling
    from polymode.judging.weighing import held_out_weights as held_out_weights
    from polymode.judging.weighing import weigh_members as weigh_members
    from polymode.likelihoods import BernoulliPredictive as BernoulliPredictive
    from polymode.likelihoods import CategoricalPredictive as CategoricalPredictive
    from polymode.likelihoods import GaussianPredictive as GaussianPredictive
    from polymode.likelihoods import member_losses as member_losses
    from polymode.methods import METHODS as METHODS
    from polymode.networks.compaction import Compacted as Compacted
    from polymode.networks.compaction import compact as compact
    from polymode.networks.compaction import masks_of as masks_of
    from polymode.networks.members import Members as Members
    from polymode.networks.members import forward_members as forward_members
    from polymode.networks.members import map_members as map_members
    from polymode.networks.members import stack as stack
    from polymode.networks.members import unstack as unstack
    from polymode.own_loop.patching import draw as draw
    from polymode.own_loop.patching import kl as kl
    from polymode.own_loop.patching import patch as patch
    from polymode.own_loop.patching import patched_posterior as patched_posterior
    from polymode.own_loop.stacked import StackedModule as StackedModule
    from polymode.posteriors import ComponentMixture as ComponentMixture
    from polymode.posteriors import LateMembers as LateMembers
    from polymode.posteriors import Particles as Particles
    from polymode.posteriors import Posterior as Posterior
    from polymode.posteriors import Separate as Separate
    from polymode.posteriors import Variational as Variational
    from polymode.posteriors import from_state_dicts as from_state_dicts
    from polymode.posteriors import load_posterior as load_posterior
    from polymode.posteriors import merge as merge
    from polymode.posteriors import sample_dropout as sample_dropout
    from polymode.training import Engine as Engine
    from polymode.training import fit as fit
    from polymode.training.contract import Epoch as Epoch
    from polymode.training.contract import KeepBest as KeepBest
    from polymode.training.contract import MemberOptimizer as MemberOptimizer
    from polymode.training.contract import Method as Method
    from polymode.training.contract import Optimizer as Optimizer
    from polymode.training.contract import Phase as Phase
    from polymode.training.contract import State as State
    from polymode.weights import priors as priors

# The same for Python, which reads a name's module when the name is first asked for.
_HOMES = {
    "polymode": (
        "data",
        "errors",
        "landscape",
        "likelihoods",
        "methods",
        "metrics",
        "models",
        "samplers",
        "schedules",
    ),
    "polymode.application": (
        "comparison",
        "datasets",
        "plots",
    ),
    "polymode.application.comparison": ("compare",),
    "polymode.application.datasets.tables": ("table",),
    "polymode.application.estimators": (
        "EnsembleClassifier",
        "EnsembleRegressor",
    ),
    "polymode.data": (
        "ArrayData",
        "LoaderData",
    ),
    "polymode.judging.evaluation": ("evaluate",),
    "polymode.judging.recalibration": (
        "ConformalIntervals",
        "ConformalSets",
        "TemperatureScaling",
    ),
    "polymode.judging.weighing": (
        "held_out_weights",
        "weigh_members",
    ),
    "polymode.likelihoods": (
        "BernoulliPredictive",
        "CategoricalPredictive",
        "GaussianPredictive",
        "member_losses",
    ),
    "polymode.methods": ("METHODS",),
    "polymode.networks.compaction": (
        "Compacted",
        "compact",
        "masks_of",
    ),
    "polymode.networks.members": (
        "Members",
        "forward_members",
        "map_members",
        "stack",
        "unstack",
    ),
    "polymode.own_loop.patching": (
        "draw",
        "kl",
        "patch",
        "patched_posterior",
    ),
    "polymode.own_loop.stacked": ("StackedModule",),
    "polymode.posteriors": (
        "ComponentMixture",
        "LateMembers",
        "Particles",
        "Posterior",
        "Separate",
        "Variational",
        "from_state_dicts",
        "load_posterior",
        "merge",
        "sample_dropout",
    ),
    "polymode.training": ("Engine", "fit"),
    "polymode.training.contract": (
        "Epoch",
        "KeepBest",
        "MemberOptimizer",
        "Method",
        "Optimizer",
        "Phase",
        "State",
    ),
    "polymode.weights": ("priors",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a checker would take any name for known
    __all__ = sorted([*_HOME_OF, "__version__"])

    def __getattr__(name):
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _HOME_OF[name]
        if home != __name__ and hasattr(import_module(home), name):
            value = getattr(import_module(home), name)
        else:  # a module itself
            value = import_module(f"{home}.{name}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
