"""polymode: one network's opinion is not enough. Ensembles and Bayesian posteriors on PyTorch."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from polymode._version import __version__ as __version__

# Every public name, once. Type checkers follow these lines; Python reads them when a name is first asked
# for, so that nobody waits for torch who does not use it.
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
    from polymode.posteriors import load_posterior as load_posterior
    from polymode.posteriors import merge as merge
    from polymode.posteriors import sample_dropout as sample_dropout
    from polymode.training import fit as fit
    from polymode.training.contract import Epoch as Epoch
    from polymode.training.contract import KeepBest as KeepBest
    from polymode.training.contract import MemberOptimizer as MemberOptimizer
    from polymode.training.contract import Method as Method
    from polymode.training.contract import Optimizer as Optimizer
    from polymode.training.contract import Phase as Phase
    from polymode.training.contract import State as State
    from polymode.weights import priors as priors
else:

    @cache
    def _homes():
        """The module of every public name, as the lines above say."""
        import ast

        tree = ast.parse(__spec__.loader.get_source(__name__))
        [block] = [node for node in tree.body if isinstance(node, ast.If)]
        return {name.name: line.module for line in block.body for name in line.names}

    def __getattr__(name):
        if name == "__all__":
            return sorted([*_homes(), "__version__"])
        if name.startswith("__") or name not in _homes():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _homes()[name]
        if home != __name__ and hasattr(import_module(home), name):
            value = getattr(import_module(home), name)
        else:  # a module itself
            value = import_module(f"{home}.{name}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_homes(), "__all__"})
