"""Planes of weight space: how good the networks on them are, and whose answers they give."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.heat import add_heat, add_levels, add_marks, cased_line
from polymode.application.plots.panels import Panel, heat_layout
from polymode.application.plots.style import colour, finite, symbol

Place = Mapping[str, Any]


def cut_figure(
    title: str,
    x: Any,
    y: Any,
    panels: Mapping[str, Any],
    marks: Sequence[Place],
    tracks: Sequence[Place] = (),
    scatter: Sequence[Place] = (),
) -> Any:
    """Heatmaps over a plane, side by side (Figures 5 and S1 of Fort et al. 2019).

    panels: what is drawn -> matrix [Y, X]; losses on a logarithmic scale. marks: {"label", "x", "y", "symbol"
    (of plotly, optional)}, one place each. tracks: {"label", "x", "y"}, trajectories. scatter: {"label", "x",
    "y"}, clouds of points.
    """
    across, up = finite(x), finite(y)
    drawn, found = heat_layout(
        title,
        list(panels),
        "distance along the first direction",
        "distance along the<br>second direction",
        aspect=_length(up) / _length(across),
        legend=[entry["label"] for entry in (*marks, *tracks, *scatter)],
    )
    marks = [{"symbol": symbol(index)} | dict(mark) for index, mark in enumerate(marks)]
    for number, (panel, (name, values)) in enumerate(zip(found, panels.items(), strict=True)):
        shown = add_heat(drawn, panel, name, values, x=across, y=up, hover="at %{x:.3g}, %{y:.3g}")
        add_levels(drawn, panel, shown, across, up)
        for index, cloud in enumerate(scatter):
            _cloud(drawn, panel, cloud, colour(len(tracks) + index), showlegend=number == 0)
        for index, track in enumerate(tracks):
            _track(drawn, panel, track, colour(index), showlegend=number == 0)
        add_marks(drawn, panel, marks, showlegend=number == 0)
    return drawn


def _length(places: Any) -> float:
    return (float(places.max() - places.min()) if places.size else 0.0) or 1.0


def _track(drawn: Any, panel: Panel, track: Place, shade: str, *, showlegend: bool) -> None:
    cased_line(
        drawn,
        panel,
        finite(track["x"]),
        finite(track["y"]),
        shade=shade,
        name=track["label"],
        legendgroup=track["label"],
        showlegend=showlegend,
        hovertemplate=f"{track['label']}<br>%{{x:.3g}}, %{{y:.3g}}<extra></extra>",
    )


def _cloud(drawn: Any, panel: Panel, cloud: Place, shade: str, *, showlegend: bool) -> None:
    drawn.add_scatter(
        x=finite(cloud["x"]),
        y=finite(cloud["y"]),
        mode="markers",
        name=cloud["label"],
        legendgroup=cloud["label"],
        showlegend=showlegend,
        marker={"size": 6, "color": shade, "line": {"color": "white", "width": 0.8}},
        hovertemplate=f"{cloud['label']}<br>%{{x:.3g}}, %{{y:.3g}}<extra></extra>",
        **panel.axes,
    )
