"""polymode: one network's opinion is not enough. Ensembles and Bayesian posteriors on PyTorch."""

from polymode import errors, landscape, likelihoods, methods, metrics, models, priors, samplers, schedules
from polymode._version import __version__
from polymode.data import ArrayData, LoaderData
from polymode.evaluation import evaluate
from polymode.likelihoods import member_losses
from polymode.members import Members, forward_members, map_members, stack, unstack
from polymode.methods import METHODS
from polymode.patching import draw, kl, patch, patched_posterior
from polymode.posteriors import (
    ComponentMixture,
    LateMembers,
    Particles,
    Posterior,
    load_posterior,
    merge,
    sample_dropout,
)
from polymode.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive
from polymode.recalibration import ConformalIntervals, ConformalSets, TemperatureScaling
from polymode.stacked import StackedModule
from polymode.stacking import stack_members, stacked_weights
from polymode.training import Epoch, KeepBest, MemberOptimizer, Method, Optimizer, Phase, State, fit

__all__ = [
    "METHODS",
    "ArrayData",
    "BernoulliPredictive",
    "CategoricalPredictive",
    "ComponentMixture",
    "ConformalIntervals",
    "ConformalSets",
    "Epoch",
    "GaussianPredictive",
    "KeepBest",
    "LateMembers",
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
    "draw",
    "errors",
    "evaluate",
    "fit",
    "forward_members",
    "kl",
    "landscape",
    "likelihoods",
    "load_posterior",
    "map_members",
    "member_losses",
    "merge",
    "methods",
    "metrics",
    "models",
    "patch",
    "patched_posterior",
    "priors",
    "sample_dropout",
    "samplers",
    "schedules",
    "stack",
    "stack_members",
    "stacked_weights",
    "unstack",
]
