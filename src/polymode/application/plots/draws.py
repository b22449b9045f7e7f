"""What more draws buy."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import colour, figure


def draws_figure(curves: Mapping[str, Mapping[str, Sequence[float]]], score: str) -> Any:
    """A score against the number of draws, a line a method; bands: standard error over replicates.

    curves: label -> {"draws", "mean", "error"}, lists of one length. A method without draws has one entry and
    is drawn as a level line.
    """
    drawn = figure(f"{score} against the number of draws", "draws", score)
    most = max((max(curve["draws"]) for curve in curves.values()), default=1)
    for index, (label, curve) in enumerate(curves.items()):
        draws, mean, error = (list(curve[key]) for key in ("draws", "mean", "error"))
        level = len(draws) == 1
        if level:
            draws, mean, error = [1, most], mean * 2, error * 2
        drawn.add_scatter(
            x=draws,
            y=mean,
            mode="lines" if level else "lines+markers",
            name=label,
            line={"color": colour(index), "width": 2, "dash": "dash" if level else "solid"},
            error_y={"type": "data", "array": error, "thickness": 1, "width": 3},
            hovertemplate=f"{label}<br>%{{x}} draws<br>{score} %{{y:.4f}}<extra></extra>",
        )
    places = sorted({number for curve in curves.values() for number in curve["draws"]})
    drawn.update_xaxes(type="log", tickvals=places, ticktext=[f"{number:g}" for number in places])
    drawn.update_yaxes(rangemode="tozero")
    return drawn
