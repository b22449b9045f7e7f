"""Figures from plain lists and arrays, drawn with plotly; they know nothing of networks."""

from polymode.application.plots.calibration import coverage_figure, reliability_figure
from polymode.application.plots.draws import draws_figure
from polymode.application.plots.histograms import doubt_figure, spread_figure
from polymode.application.plots.price import gain_figure, price_figure
from polymode.application.plots.remaining import remaining_figure
from polymode.application.plots.similarity import similarity_figure
from polymode.application.plots.trace import trace_figure

__all__ = [
    "coverage_figure",
    "doubt_figure",
    "draws_figure",
    "gain_figure",
    "price_figure",
    "reliability_figure",
    "remaining_figure",
    "similarity_figure",
    "spread_figure",
    "trace_figure",
]
