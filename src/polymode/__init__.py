"""polymode: one network's opinion is not enough. Ensembles and Bayesian posteriors on PyTorch."""

from polymode import errors, likelihoods, methods, metrics, models, priors, samplers, schedules
from polymode._version import __version__
from polymode.data import ArrayData, LoaderData
from polymode.evaluation import evaluate
from polymode.likelihoods import member_losses
from polymode.members import Members, forward_members, map_members, stack, unstack
from polymode.methods import METHODS
from polymode.posteriors import Particles, Posterior, load_posterior, merge
from polymode.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive
from polymode.recalibration import ConformalIntervals, ConformalSets, TemperatureScaling
from polymode.stacked import StackedModule
from polymode.training import Epoch, KeepBest, MemberOptimizer, Method, Optimizer, Phase, State, fit

__all__ = [
    "METHODS",
    "ArrayData",
    "BernoulliPredictive",
    "CategoricalPredictive",
    "ConformalIntervals",
    "ConformalSets",
    "Epoch",
    "GaussianPredictive",
    "KeepBest",
    "LoaderData",
    "MemberOptimizer",
    "Members",
    "Method",
    "Optimizer",
    "Particles",
    "Phase",
    "Posterior",
    "StackedModule",
    "State",
    "TemperatureScaling",
    "__version__",
    "errors",
    "evaluate",
    "fit",
    "forward_members",
    "likelihoods",
    "load_posterior",
    "map_members",
    "member_losses",
    "merge",
    "methods",
    "metrics",
    "models",
    "priors",
    "samplers",
    "schedules",
    "stack",
    "unstack",
]
