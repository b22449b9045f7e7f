"""One look for all figures: colours that colour-blind readers can tell apart, little ink."""

from collections.abc import Iterable
from typing import Any

import numpy as np

# Okabe and Ito's palette, without its yellow, which is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
SYMBOLS = ("star", "circle", "diamond", "square", "cross", "triangle-up", "x", "pentagon")

AXIS = {
    "gridcolor": "#e6e6e6",
    "zeroline": False,
    "linecolor": "#999",
    "ticks": "outside",
    "automargin": True,
}

# Ways to get several networks keep their colours from figure to figure, whatever stands beside them.
_KNOWN = {
    "independent": "#D55E00",
    "baseline": "#000000",
    "random": "#0072B2",
    "dropout": "#E69F00",
    "diagonal": "#56B4E9",
    "low rank": "#CC79A7",
    "average": "#7F7F7F",
}
_LEGEND_LINE = 22  # pixels; a legend is as wide as the narrowest figure of a page, with 7 pixels a letter
_LEGEND_WIDTH = 440

_ON_DARK = {"#000": "#eee", "#000000": "#eee", "black": "#eee", "#222": "#ddd", "#222222": "#ddd"}
_ON_DARK |= {"#444": "#bbb", "#555": "#aaa"}


def colour(index: int) -> str:
    """The colour of the index-th method."""
    return COLOURS[index % len(COLOURS)]


def symbol(index: int) -> str:
    """The symbol of the index-th thing that is not told apart by its colour."""
    return SYMBOLS[index % len(SYMBOLS)]


def method_colours(names: Iterable[str], *, taken: Iterable[str] = ()) -> dict[str, str]:
    """A colour for each name: that of a known method whose name is part of it, or one that is left."""
    found: dict[str, str] = {}
    free = [c for c in COLOURS if c not in taken]
    for name in (names := list(names)):
        known = next((c for part, c in _KNOWN.items() if part in name.lower()), None)
        if known in free and known not in found.values():
            found[name] = str(known)
    left = [c for c in free if c not in found.values()] or free
    left.sort(key=lambda c: c in _KNOWN.values())  # those of no known method first
    others = [name for name in names if name not in found]
    return found | {name: left[i % len(left)] for i, name in enumerate(others)}


def finite(values: Any) -> np.ndarray:
    """Numbers as an array; what is missing or infinite is a gap."""
    array = np.array(values, dtype=float)
    array[~np.isfinite(array)] = np.nan
    return array


def decades(values: Any) -> float:
    """How many some numbers span; none where one of them has no logarithm."""
    known = finite(values)
    known = known[~np.isnan(known)]
    return float(np.log10(known.max() / known.min())) if known.size and known.min() > 0 else 0.0


def legend_room(labels: Iterable[str]) -> int:
    """Pixels that a legend below a figure takes where the figure is narrow."""
    widths = [45 + 7 * len(label) for label in labels]
    if not widths:
        return 0
    per_row = max(1, _LEGEND_WIDTH // max(widths))  # all entries are as wide as the widest one
    return 10 + _LEGEND_LINE * -(-len(widths) // per_row)


def small_titles(drawn: Any) -> Any:
    """The figure, with titles of axes as large as other text: long ones fit."""
    return drawn.update_xaxes(title_font_size=13).update_yaxes(title_font_size=13)


def legend_entry(drawn: Any, name: str, **look: Any) -> None:
    """What a dash or a symbol means, once for all lines or points that have it."""
    drawn.add_scatter(x=[None], y=[None], name=name, hoverinfo="skip", **look)


def figure(title: str, x_title: str, y_title: str, *, height: int = 420) -> Any:
    """An empty figure with axes."""
    import plotly.graph_objects as go

    return go.Figure(
        layout={
            "title": {"text": title, "x": 0.01, "xanchor": "left", "font": {"size": 16}},
            "height": height,
            "margin": {"l": 60, "r": 20, "t": 50, "b": 60},
            "plot_bgcolor": "white",
            "paper_bgcolor": "white",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
            "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
            "xaxis": AXIS | {"title": {"text": x_title}},
            "yaxis": AXIS | {"title": {"text": y_title}},
            "hovermode": "closest",
        }
    )


def dark(drawn: Any) -> Any:
    """A copy of a figure for dark paper; its data are the same."""
    import plotly.graph_objects as go

    copied = go.Figure(drawn)
    copied.update_layout(paper_bgcolor="#111", plot_bgcolor="#111", font={"color": "#ddd"})
    for axis in (*copied.select_xaxes(), *copied.select_yaxes()):
        axis.update(gridcolor="#333", linecolor="#888", tickcolor="#888")
    for trace in copied.data:
        for part in ("line", "marker", "error_x", "error_y", "textfont"):
            look = getattr(trace, part, None)
            if look is not None and look.color is not None:
                look.color = _on_dark(look.color)
    return copied


def _on_dark(look: Any) -> Any:
    return _ON_DARK.get(look.lower(), look) if isinstance(look, str) else look
