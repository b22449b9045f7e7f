"""polymode: one network's opinion is not enough. Ensembles and Bayesian posteriors on PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polymode._version import __version__

if TYPE_CHECKING:
    from polymode import errors, landscape, likelihoods, methods, metrics, models, priors, samplers, schedules
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

# Names are read from their modules when they are first asked for: nobody waits for torch who does not use it.
_HOMES = {
    "data": ("ArrayData", "LoaderData"),
    "evaluation": ("evaluate",),
    "likelihoods": ("member_losses",),
    "members": ("Members", "forward_members", "map_members", "stack", "unstack"),
    "methods": ("METHODS",),
    "patching": ("draw", "kl", "patch", "patched_posterior"),
    "posteriors": (
        "ComponentMixture",
        "LateMembers",
        "Particles",
        "Posterior",
        "load_posterior",
        "merge",
        "sample_dropout",
    ),
    "predictive": ("BernoulliPredictive", "CategoricalPredictive", "GaussianPredictive"),
    "recalibration": ("ConformalIntervals", "ConformalSets", "TemperatureScaling"),
    "stacked": ("StackedModule",),
    "stacking": ("stack_members", "stacked_weights"),
    "training": ("Epoch", "KeepBest", "MemberOptimizer", "Method", "Optimizer", "Phase", "State", "fit"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a checker would take any name for known

    def __getattr__(name: str) -> Any:
        if name in _HOME_OF:
            value = getattr(import_module(f"polymode.{_HOME_OF[name]}"), name)
            globals()[name] = value
            return value
        missing = AttributeError(f"module 'polymode' has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        try:
            return import_module(f"polymode.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"polymode.{name}":  # it is there, and needs a package that is not
                raise
            raise missing from None
