"""Figures from plain lists and arrays, drawn with plotly; they know nothing of networks."""

from polymode.application.plots.calibration import coverage_figure, reliability_figure
from polymode.application.plots.cuts import cut_figure
from polymode.application.plots.draws import draws_figure
from polymode.application.plots.histograms import doubt_figure, spread_figure
from polymode.application.plots.maps import map_figure
from polymode.application.plots.matrices import matrices_figure
from polymode.application.plots.paths import path_figure, sheet_figure
from polymode.application.plots.plane import diversity_figure
from polymode.application.plots.price import gain_figure, price_figure
from polymode.application.plots.remaining import remaining_figure
from polymode.application.plots.similarity import similarity_figure
from polymode.application.plots.sizes import pairs_figure, shift_figure, sizes_figure
from polymode.application.plots.style import dark
from polymode.application.plots.trace import trace_figure

__all__ = [
    "coverage_figure",
    "cut_figure",
    "dark",
    "diversity_figure",
    "doubt_figure",
    "draws_figure",
    "gain_figure",
    "map_figure",
    "matrices_figure",
    "pairs_figure",
    "path_figure",
    "price_figure",
    "reliability_figure",
    "remaining_figure",
    "sheet_figure",
    "shift_figure",
    "similarity_figure",
    "sizes_figure",
    "spread_figure",
    "trace_figure",
]
