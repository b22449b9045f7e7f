"""Paths between two networks: what lies on them, and between them and the origin of weight space."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polymode.application.plots.fans import Fan
from polymode.application.plots.heat import add_heat, add_levels, add_marks, cased_line
from polymode.application.plots.panels import Panel, heat_layout, panels_layout
from polymode.application.plots.style import colour, decades, finite, legend_entry

_DASHES = ("solid", "dash", "dot", "dashdot")
_LOGARITHMIC = 1.5  # decades that losses span at least where their axis is logarithmic
_WHERE = "%{x:.3g} sideways, %{y:.3g} upwards"


def path_figure(paths: Mapping[str, Mapping[str, Any]], *, error_title: str = "error") -> Any:
    """Loss, error and differences along paths, a colour a path (Figure S2 of Fort et al. 2019).

    paths: name -> {"place", "loss", "error", "differences": end -> list, "is_corner"}, lists over the points
    of the path; place: how far along the straight line between its ends a point is, from 0 to 1.
    """
    ends = list(dict.fromkeys(end for path in paths.values() for end in path["differences"]))
    titles = ["loss", error_title, *(["disagreement"] if ends else [])]
    drawn, panels = panels_layout(
        "From one network to another",
        [""] * (len(titles) - 1) + ["place on the straight line (0: first end, 1: second)"],
        titles,
        columns=1,
        panel_height=160,
        legend=[*paths, *(f"disagreement with {end}" for end in ends)],
    )
    for index, (name, path) in enumerate(paths.items()):
        _line(drawn, panels[0], name, path, path["loss"], "loss", index, showlegend=True)
        _line(drawn, panels[1], name, path, path["error"], error_title, index)
        for end, values in path["differences"].items():
            meaning, dash = f"disagreement with {end}", _DASHES[ends.index(end) % len(_DASHES)]
            _line(drawn, panels[2], name, path, values, meaning, index, dash=dash)
    for number, end in enumerate(ends):  # what the dashes mean, once for all paths
        look = {"color": "#7F7F7F", "width": 2, "dash": _DASHES[number % len(_DASHES)]}
        legend_entry(drawn, f"disagreement with {end}", mode="lines", line=look)
    for panel in panels:
        panel.adjust(drawn, y={"nticks": 5})
    for panel in panels[:-1]:
        panel.adjust(drawn, x={"showticklabels": False, "matches": panels[-1].x})
    span = decades(np.concatenate([[np.nan], *(finite(path["loss"]) for path in paths.values())]))
    if span > _LOGARITHMIC:
        drawn.update_layout(yaxis={"type": "log", "dtick": "D2" if span < 2.5 else 1, "tickformat": "~g"})
    return drawn


def _line(
    drawn: Any,
    panel: Panel,
    name: str,
    path: Mapping[str, Any],
    values: Any,
    meaning: str,
    index: int,
    *,
    dash: str = "solid",
    showlegend: bool = False,
) -> None:
    """A line, with dots at its corners."""
    corners = list(path["is_corner"])
    drawn.add_scatter(
        x=finite(path["place"]),
        y=finite(values),
        mode="lines+markers",
        name=name,
        legendgroup=name,  # one click hides all of a path
        showlegend=showlegend,
        line={"color": colour(index), "width": 2, "dash": dash},
        marker={
            "size": [6 if corner else 0 for corner in corners],
            "color": colour(index),
            "line": {"width": 0},
            "opacity": 1,
        },
        hovertemplate=f"{name}<br>place %{{x:.3f}}<br>{meaning} %{{y:.4g}}<extra></extra>",
        **panel.axes,
    )


def sheet_figure(
    title: str,
    angle: Any,
    radius: Any,
    panels: Mapping[str, Any],
    corner_angles: Any,
    *,
    path_row: int = -1,
) -> Any:
    """Triangles between the origin and the segments of a path as a fan (Figure S3 of Fort et al. 2019).

    angle: [P], radians that the path has turned around the origin. radius: [S, P], distances from it. panels:
    what is drawn -> matrix [S, P]; losses on a logarithmic scale. corner_angles: where triangles meet.
    path_row: the row of the radii that is the path itself. The path leads from the left to the right.
    """
    fan = Fan.of(angle, radius)
    marks = [{"label": "origin", "x": 0.0, "y": 0.0, "symbol": "cross"}]
    x, y = fan.places(fan.angle, fan.radius[path_row] if len(fan.radius) else [])
    for label, place, shape in (("first end", 0, "circle"), ("second end", -1, "diamond")) if len(x) else ():
        marks.append({"label": label, "x": x[place], "y": y[place], "symbol": shape})
    drawn, found = heat_layout(
        title,
        list(panels),
        "distance from the origin, sideways",
        "distance from<br>the origin, upwards",
        aspect=fan.aspect,
        legend=["path", *(mark["label"] for mark in marks)],
    )
    for number, (panel, (name, values)) in enumerate(zip(found, panels.items(), strict=True)):
        if fan.has_area:
            shown = add_heat(drawn, panel, name, fan.spread(values), x=fan.x, y=fan.y, hover=_WHERE)
            add_levels(drawn, panel, shown, fan.x, fan.y)
            _spokes(drawn, panel, fan, corner_angles)
            look = {"name": "path", "legendgroup": "path", "showlegend": number == 0, "hoverinfo": "skip"}
            cased_line(drawn, panel, x, y, shade="#D55E00", **look)
        add_marks(drawn, panel, marks, showlegend=number == 0)
    return drawn


def _spokes(drawn: Any, panel: Panel, fan: Fan, corner_angles: Sequence[float]) -> None:
    """Lines from the origin through the corners, as one line with gaps."""
    corners = finite(corner_angles)
    inner, outer = (np.interp(corners, fan.angle, fan.radius[row]) for row in (0, -1))
    inner = np.maximum(inner, 0.1 * outer)  # where they meet they would hide what they divide
    ends = [fan.places(corners, inner), fan.places(corners, outer)]
    x, y = (np.stack([ends[0][i], ends[1][i], np.full(len(corners), np.nan)], 1).ravel() for i in (0, 1))
    look = {"color": "rgba(255, 255, 255, 0.7)", "width": 1}
    drawn.add_scatter(x=x, y=y, mode="lines", line=look, showlegend=False, hoverinfo="skip", **panel.axes)
