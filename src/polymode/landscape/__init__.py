"""Losses and functions around trained networks, between them, and along their training."""

from polymode.landscape import subspaces, theory
from polymode.landscape.ensembling import OfSize, by_ensemble_size, scores_of
from polymode.landscape.flatness import Flatness, flatness
from polymode.landscape.networks import WeightSpace, cosine_matrix, function_values, networks_of
from polymode.landscape.paths import Sheet, Walk, sheet, walk
from polymode.landscape.planes import Cut, Plane, cut, margins
from polymode.landscape.similarity import Pairs, embedding, jackknife, within_and_between
from polymode.landscape.survey import Judged, Points, Survey, judged, survey

__all__ = [
    "Cut",
    "Flatness",
    "Judged",
    "OfSize",
    "Pairs",
    "Plane",
    "Points",
    "Sheet",
    "Survey",
    "Walk",
    "WeightSpace",
    "by_ensemble_size",
    "cosine_matrix",
    "cut",
    "embedding",
    "flatness",
    "function_values",
    "jackknife",
    "judged",
    "margins",
    "networks_of",
    "scores_of",
    "sheet",
    "subspaces",
    "survey",
    "theory",
    "walk",
    "within_and_between",
]
