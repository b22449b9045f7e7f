"""One look for all figures: colours that colour-blind readers can tell apart, little ink."""

from typing import Any

# Okabe and Ito's palette, without its yellow, which is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")


def colour(index: int) -> str:
    """The colour of the index-th method."""
    return COLOURS[index % len(COLOURS)]


def figure(title: str, x_title: str, y_title: str, *, height: int = 420) -> Any:
    """An empty figure with axes."""
    import plotly.graph_objects as go

    axis = {
        "gridcolor": "#e6e6e6",
        "zeroline": False,
        "linecolor": "#999",
        "ticks": "outside",
        "automargin": True,
    }
    return go.Figure(
        layout={
            "title": {"text": title, "x": 0, "xanchor": "left", "font": {"size": 16}},
            "height": height,
            "margin": {"l": 60, "r": 20, "t": 50, "b": 60},
            "plot_bgcolor": "white",
            "paper_bgcolor": "white",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
            "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
            "xaxis": axis | {"title": {"text": x_title}},
            "yaxis": axis | {"title": {"text": y_title}},
            "hovermode": "closest",
        }
    )
