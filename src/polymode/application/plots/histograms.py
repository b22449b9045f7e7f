"""How sure the predictives are, in and out of the distribution."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import colour, figure

TITLES = {
    "confidence": ("Confidence, in and out of the distribution", "probability of the most probable label"),
    "entropy": ("Entropy, in and out of the distribution", "entropy of the mean probabilities (nats)"),
}


def doubt_figure(quantity: str, curves: Mapping[str, Mapping[str, Any]]) -> Any:
    """Shares of points by confidence or entropy: solid for test points, dashed for foreign ones.

    curves: label -> {"end", "ordinary", "foreign" (optional)}, counts in equal bins from 0 to end.
    """
    title, axis = TITLES[quantity]
    if not any("foreign" in curve for curve in curves.values()):
        title = title.split(",")[0]
    drawn = figure(title, axis, "share of points")
    for index, (label, curve) in enumerate(curves.items()):
        for kind, dash, name in (("ordinary", "solid", "test"), ("foreign", "dash", "foreign")):
            if kind in curve:
                _steps(drawn, curve["end"], curve[kind], f"{label}, {name}", label, index, dash)
    drawn.update_yaxes(rangemode="tozero")
    return drawn


def spread_figure(curves: Mapping[str, Mapping[str, Any]], units: str = "standardised units") -> Any:
    """Shares of points by predictive standard deviation; in some units."""
    drawn = figure("Predictive standard deviation", f"standard deviation ({units})", "share of points")
    for index, (label, curve) in enumerate(curves.items()):
        _steps(drawn, curve["end"], curve["ordinary"], label, label, index, "solid")
    drawn.update_yaxes(rangemode="tozero")
    return drawn


def _steps(
    drawn: Any, end: float, counts: Sequence[float], name: str, group: str, index: int, dash: str
) -> None:
    total, width = sum(counts) or 1, end / len(counts)
    drawn.add_scatter(
        x=[width * (i + 0.5) for i in range(len(counts))],
        y=[count / total for count in counts],
        mode="lines",
        legendgroup=group,  # one click hides all of a method
        line={"color": colour(index), "dash": dash, "shape": "hvh", "width": 2},
        name=name,
        hovertemplate=f"{name}<br>around %{{x:.2f}}<br>share %{{y:.3f}}<extra></extra>",
    )
