"""A map of functions: networks that say the same are near each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import colour, figure, finite, legend_entry, small_titles

_SYMBOLS = {
    "trajectory": "circle",
    "random": "square",
    "PCA of random": "x",
    "dropout": "diamond",
    "diagonal": "triangle-up",
    "low rank": "cross",
    "average": "pentagon",
    "member": "hexagon2",
    "end": "star",
}
_SIZES = {"trajectory": 5, "end": 16, "average": 11, "member": 10}
_ORDER = list(_SYMBOLS)  # of drawing: ends lie on top
_LEGEND_LINE, _LEGEND_TITLES = 21, 80  # pixels


def map_figure(points: Sequence[Mapping[str, Any]]) -> Any:
    """Networks on a t-SNE map, a colour a run and a symbol a kind (Figures 2c and 4 of Fort et al. 2019).

    points: {"x", "y", "label" (the run), "kind", "numbers" (of checkpoints, optional)}. The kind is one of
    "trajectory", whose points are joined, "end", "random", "PCA of random", "dropout", "diagonal", "low
    rank", "average" and "member". A click on a run hides all that belongs to it.
    """
    runs = list(dict.fromkeys(entry["label"] for entry in points))
    kinds = sorted({entry["kind"] for entry in points}, key=_ORDER.index)
    height = max(480, 110 + _LEGEND_TITLES + _LEGEND_LINE * (len(runs) + len(kinds)))
    drawn = figure(
        "Map of the functions", "t-SNE, first axis (no units)", "t-SNE, second axis (no units)", height=height
    )
    for index, run in enumerate(runs):
        look = {"mode": "markers", "marker": {"size": 11, "color": colour(index)}}
        legend_entry(drawn, run, legendgroup=run, **look)
    for kind in kinds:
        for entry in points:
            if entry["kind"] == kind:
                _add(drawn, entry, colour(runs.index(entry["label"])))
        marker = {"symbol": _SYMBOLS[kind], "size": _SIZES.get(kind, 8), "color": "#7F7F7F"}
        legend_entry(drawn, kind, legend="legend2", mode="markers", marker=marker)
    place = {"orientation": "v", "x": 1.02, "xanchor": "left", "yref": "paper", "itemsizing": "trace"}
    quiet = {"itemclick": False, "itemdoubleclick": False}  # a key: what it would hide belongs to the runs
    drawn.update_layout(
        legend=place | {"title": {"text": "runs"}, "y": 1, "yanchor": "top", "tracegroupgap": 0},
        legend2=place | quiet | {"title": {"text": "kinds"}, "y": 0, "yanchor": "bottom"},
    )
    drawn.update_xaxes(showticklabels=False, ticks="")
    drawn.update_yaxes(showticklabels=False, ticks="", scaleanchor="x")
    return small_titles(drawn)


def _add(drawn: Any, entry: Mapping[str, Any], shade: str) -> None:
    kind, numbers = entry["kind"], entry.get("numbers")
    edge = {"color": "white", "width": 0 if kind == "trajectory" else 0.8}
    checkpoint = "" if numbers is None else "<br>checkpoint %{customdata}"
    drawn.add_scatter(
        x=finite(entry["x"]),
        y=finite(entry["y"]),
        mode="lines+markers" if kind == "trajectory" else "markers",
        name=f"{entry['label']}, {kind}",
        legendgroup=entry["label"],
        showlegend=False,
        line={"color": shade, "width": 1},
        marker={"symbol": _SYMBOLS[kind], "size": _SIZES.get(kind, 8), "color": shade, "line": edge},
        opacity=1 if kind in ("end", "trajectory", "average") else 0.75,
        customdata=None if numbers is None else list(numbers),
        hovertemplate=f"{entry['label']}, {kind}{checkpoint}<extra></extra>",
    )
