"""How members differ from each other, in what they say and in their weights."""

from collections.abc import Sequence
from typing import Any

from polymode.application.plots.style import figure


def similarity_figure(
    label: str, difference: Sequence[Sequence[float]], cosine: Sequence[Sequence[float]] | None, meaning: str
) -> Any:
    """Differences of the members' answers, pair by pair, and beside them the cosines of their weights."""
    count, both = len(difference), cosine is not None
    drawn = figure(f"{label}: how members differ", "member", "member", height=440)
    axis = {"dtick": max(1, count // 10), "constrain": "domain"}
    drawn.update_xaxes(**axis, domain=[0, 0.44 if both else 1])
    drawn.update_yaxes(**axis, scaleanchor="x", autorange="reversed")
    drawn.add_heatmap(
        x=list(range(count)),
        y=list(range(count)),
        z=[list(row) for row in difference],
        colorscale="Viridis",
        zmin=0,
        colorbar=_bar(meaning, 0.22 if both else 0.5),
        hovertemplate=f"members %{{x}} and %{{y}}<br>{meaning} %{{z:.4f}}<extra></extra>",
    )
    if cosine is None:
        return drawn
    drawn.update_layout(
        xaxis2=axis | {"domain": [0.56, 1], "title": {"text": "member"}},
        yaxis2=axis | {"anchor": "x2", "scaleanchor": "x2", "autorange": "reversed"},
    )
    drawn.add_heatmap(
        x=list(range(count)),
        y=list(range(count)),
        z=[list(row) for row in cosine],
        xaxis="x2",
        yaxis="y2",
        colorscale="RdBu",
        reversescale=True,
        zmin=-1,
        zmax=1,
        colorbar=_bar("cosine of weights", 0.78),
        hovertemplate="members %{x} and %{y}<br>cosine of weights %{z:.4f}<extra></extra>",
    )
    return drawn


def _bar(title: str, centre: float) -> dict[str, Any]:
    """A colour bar below the matrix it belongs to."""
    return {
        "orientation": "h",
        "title": {"text": title, "side": "bottom"},
        "x": centre,
        "xanchor": "center",
        "y": -0.22,
        "yanchor": "top",
        "len": 0.42,
        "thickness": 12,
    }
