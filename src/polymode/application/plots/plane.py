"""How different networks are from one of them, and what they pay for it in accuracy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polymode.application.plots.style import figure, finite, legend_room, method_colours, small_titles

BASE = "#009E73"
INDEPENDENT = "independent"


def diversity_figure(
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    base_accuracy: float,
    num_classes: int,
    limits: Mapping[str, Sequence[float]] | None,
    fitted: Mapping[str, Any] | None,
) -> Any:
    """The diversity–accuracy plane (Figures 6 and S6 of Fort et al. 2019).

    samples: way to get networks -> {"accuracy", "disagreement"} of each network, the latter with the base.
    limits: {"accuracy", "lower", "upper"}, disagreements that theory allows. fitted: {"exponent", "accuracy",
    "disagreement"}. All disagreements are divided by 1 − accuracy here.
    """
    drawn = figure(
        f"Diversity and accuracy, {num_classes} classes",
        "accuracy",
        "disagreement with the base<br>network / (1 − accuracy)",
    )
    if limits:
        _curve(drawn, limits["accuracy"], limits["upper"], "upper limit", "dash")
        _curve(drawn, limits["accuracy"], limits["lower"], "lower limit", "longdash")
    shades = method_colours(samples, taken=[BASE])
    for name in sorted(samples, key=lambda name: INDEPENDENT in name):  # those on top
        _dots(drawn, name, samples[name], shades[name])
    if fitted:
        name = f"fitted, exponent {fitted['exponent']:.2g}"
        _curve(drawn, fitted["accuracy"], fitted["disagreement"], name, "dot")
    drawn.add_scatter(
        x=[base_accuracy],
        y=[0],
        mode="markers",
        name="base network",
        marker={"symbol": "star", "size": 18, "color": BASE, "line": {"color": "white", "width": 1}},
        hovertemplate="base network<br>accuracy %{x:.4f}<extra></extra>",
    )
    _zoom(drawn, samples, base_accuracy)
    drawn.update_layout(height=400 + legend_room([trace.name for trace in drawn.data]))
    return small_titles(drawn)


def diversity(accuracy: Any, disagreement: Any) -> np.ndarray:
    """Disagreement over 1 − accuracy; a gap where nothing is wrong."""
    wrong = 1 - finite(accuracy)
    return finite(disagreement) / np.where(wrong > 0, wrong, np.nan)


def _dots(drawn: Any, name: str, sample: Mapping[str, Sequence[float]], shade: str) -> None:
    marker = {"symbol": "circle", "size": 7, "opacity": 0.75}
    if INDEPENDENT in name:
        marker = {"symbol": "star", "size": 14, "line": {"color": "white", "width": 0.8}}
    drawn.add_scatter(
        x=finite(sample["accuracy"]),
        y=diversity(sample["accuracy"], sample["disagreement"]),
        mode="markers",
        name=name,
        marker=marker | {"color": shade},
        customdata=finite(sample["disagreement"]),
        hovertemplate=(
            f"{name}<br>accuracy %{{x:.4f}}<br>disagreement %{{customdata:.4f}}, over 1 − accuracy %{{y:.3f}}"
            "<extra></extra>"
        ),
    )


def _curve(drawn: Any, accuracy: Any, disagreement: Any, name: str, dash: str) -> None:
    drawn.add_scatter(
        x=finite(accuracy),
        y=diversity(accuracy, disagreement),
        mode="lines",
        name=name,
        line={"color": "#222" if dash == "dot" else "#888", "dash": dash, "width": 2},
        hovertemplate=f"{name}<br>accuracy %{{x:.3f}}<br>%{{y:.3f}}<extra></extra>",
    )


def _zoom(drawn: Any, samples: Mapping[str, Any], base_accuracy: float) -> None:
    """Show the networks, and of the limits what lies near them: the upper one has no end."""
    x = np.concatenate([[base_accuracy], *(finite(sample["accuracy"]) for sample in samples.values())])
    low, high = float(np.nanmin(x)), float(np.nanmax(x))
    room = 0.06 * (high - low) or 0.02
    low, high = max(-0.01, low - room), min(1.01, high + room)
    near = [trace.y[(trace.x >= low) & (trace.x <= high)] for trace in drawn.data if trace.mode == "lines"]
    dots = [trace.y for trace in drawn.data if trace.mode == "markers"]
    tallest = np.nanmax(np.concatenate([[0.05], *dots]))
    top = min(max(np.nanmax(np.concatenate([[0.0], *near])), tallest), 2.5 * tallest)
    drawn.update_xaxes(range=[low, high])
    drawn.update_yaxes(range=[-0.05 * top, 1.08 * top])
