"""Whether confidence means what it says: reliability of classes, coverage of intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import colour, figure

Curve = Mapping[str, Sequence[float]]


def reliability_figure(curves: Mapping[str, Curve]) -> Any:
    """Accuracy against confidence, a line a method; size of the dots: share of points; bars: standard error.

    curves: label -> {"counts", "accuracy", "confidence"}, lists over bins; empty bins are left out.
    """
    drawn = figure("Reliability: does confidence mean what it says?", "confidence", "accuracy")
    _diagonal(drawn, "calibrated")
    for index, (label, curve) in enumerate(curves.items()):
        filled = [i for i, count in enumerate(curve["counts"]) if count]
        total = sum(curve["counts"])
        drawn.add_scatter(
            x=[curve["confidence"][i] for i in filled],
            y=[curve["accuracy"][i] for i in filled],
            mode="lines+markers",
            name=label,
            line={"color": colour(index), "width": 2},
            error_y={"type": "data", "array": [_error(curve, i) for i in filled], "thickness": 1, "width": 0},
            marker={"size": [5 + 20 * (curve["counts"][i] / total) ** 0.5 for i in filled], "opacity": 0.8},
            customdata=[[curve["counts"][i], 100 * curve["counts"][i] / total] for i in filled],
            hovertemplate=(
                f"{label}<br>confidence %{{x:.3f}}<br>accuracy %{{y:.3f}}"
                "<br>%{customdata[0]:.0f} points (%{customdata[1]:.1f} %)<extra></extra>"
            ),
        )
    drawn.update_xaxes(range=[0, 1.02])
    drawn.update_yaxes(range=[0, 1.02])
    return drawn


def _error(curve: Curve, index: int) -> float:
    """Standard error of a bin's accuracy; one hit and one miss more keep a bin of one point uncertain."""
    count = curve["counts"][index]
    share = (curve["accuracy"][index] * count + 1) / (count + 2)
    return (share * (1 - share) / (count + 2)) ** 0.5


def coverage_figure(curves: Mapping[str, Curve]) -> Any:
    """Observed against nominal coverage of central intervals, a line a method."""
    drawn = figure(
        "Coverage: how many targets lie inside the interval?", "nominal coverage", "observed coverage"
    )
    _diagonal(drawn, "calibrated")
    for index, (label, curve) in enumerate(curves.items()):
        drawn.add_scatter(
            x=list(curve["nominal"]),
            y=list(curve["observed"]),
            mode="lines+markers",
            name=label,
            line={"color": colour(index), "width": 2},
            hovertemplate=f"{label}<br>nominal %{{x:.2f}}<br>observed %{{y:.3f}}<extra></extra>",
        )
    drawn.update_xaxes(range=[0, 1.02])
    drawn.update_yaxes(range=[0, 1.02])
    return drawn


def _diagonal(drawn: Any, name: str) -> None:
    drawn.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", name=name, line={"color": "#999", "dash": "dot"}, hoverinfo="skip"
    )
