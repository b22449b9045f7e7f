"""polymode: one network's opinion is not enough. Ensembles and Bayesian posteriors on PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polymode._version import __version__

if TYPE_CHECKING:
    from polymode import data, errors, landscape, likelihoods, methods, metrics, models, samplers, schedules
    from polymode.application import comparison, datasets, plots
    from polymode.data import ArrayData, LoaderData
    from polymode.judging.evaluation import evaluate
    from polymode.judging.recalibration import ConformalIntervals, ConformalSets, TemperatureScaling
    from polymode.judging.weighing import held_out_weights, weigh_members
    from polymode.likelihoods import member_losses
    from polymode.likelihoods.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive
    from polymode.methods import METHODS
    from polymode.networks.members import Members, forward_members, map_members, stack, unstack
    from polymode.own_loop.patching import draw, kl, patch, patched_posterior
    from polymode.own_loop.stacked import StackedModule
    from polymode.posteriors import (
        ComponentMixture,
        LateMembers,
        Particles,
        Posterior,
        load_posterior,
        merge,
        sample_dropout,
    )
    from polymode.training import fit
    from polymode.training.contract import Epoch, KeepBest, MemberOptimizer, Method, Optimizer, Phase, State
    from polymode.weights import priors

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
    "comparison",
    "data",
    "datasets",
    "draw",
    "errors",
    "evaluate",
    "fit",
    "forward_members",
    "held_out_weights",
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
    "plots",
    "priors",
    "sample_dropout",
    "samplers",
    "schedules",
    "stack",
    "unstack",
    "weigh_members",
]

# Names are read from their modules when they are first asked for: nobody waits for torch who does not use it.
_MODULES = {
    name: name for name in ("data", "errors", "landscape", "likelihoods", "methods", "metrics", "models")
}
_MODULES |= {"samplers": "samplers", "schedules": "schedules", "priors": "weights.priors"}
_MODULES |= {name: f"application.{name}" for name in ("comparison", "datasets", "plots")}
_HOMES = {
    "data": ("ArrayData", "LoaderData"),
    "judging.evaluation": ("evaluate",),
    "judging.recalibration": ("ConformalIntervals", "ConformalSets", "TemperatureScaling"),
    "judging.weighing": ("weigh_members", "held_out_weights"),
    "likelihoods": ("member_losses",),
    "likelihoods.predictive": ("BernoulliPredictive", "CategoricalPredictive", "GaussianPredictive"),
    "methods": ("METHODS",),
    "networks.members": ("Members", "forward_members", "map_members", "stack", "unstack"),
    "own_loop.patching": ("draw", "kl", "patch", "patched_posterior"),
    "own_loop.stacked": ("StackedModule",),
    "posteriors": (
        "ComponentMixture",
        "LateMembers",
        "Particles",
        "Posterior",
        "load_posterior",
        "merge",
        "sample_dropout",
    ),
    "training": ("fit",),
    "training.contract": ("Epoch", "KeepBest", "MemberOptimizer", "Method", "Optimizer", "Phase", "State"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a checker would take any name for known

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"polymode.{_MODULES[name]}")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'polymode' has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"polymode.{_HOME_OF[name]}"), name)
        return globals()[name]
