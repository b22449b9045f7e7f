"""Heatmaps with a colour bar below each of them, and what is drawn on them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polymode.application.plots.panels import Panel, wrapped
from polymode.application.plots.style import finite


def add_heat(
    drawn: Any, panel: Panel, name: str, z: Any, *, x: Any, y: Any, hover: str, from_zero: bool = False
) -> dict[str, Any]:
    """A heatmap with its colour bar; returns its z, as drawn, and colours.

    Losses get a logarithmic scale, cosines one that diverges from 0. hover: what to say of a place.
    """
    values = finite(z)
    look, numbers = _colours(name, values, from_zero, most=4 if panel.width < 0.4 else 6)
    shown = (_logarithms(values) if numbers else values).astype(np.float32)  # a page holds many of them
    bar = {
        "orientation": "h",
        "x": (panel.left + panel.right) / 2,
        "xanchor": "center",
        "y": panel.bar,
        "yanchor": "top",
        "ypad": 0,
        "len": 0.96 * panel.width,
        "thickness": 12,
        "tickfont": {"size": 12},
        "tickangle": 0,
        "outlinewidth": 0,
    }
    # A title of the bar itself would slip between its numbers.
    drawn.add_annotation(
        text=wrapped(name, panel.width),
        x=(panel.left + panel.right) / 2,
        y=panel.bar,
        xref="paper",
        yref="paper",
        xanchor="center",
        yanchor="top",
        yshift=-34,
        showarrow=False,
    )
    drawn.add_heatmap(
        x=x,
        y=y,
        z=shown,
        customdata=values.astype(np.float32) if numbers else None,
        colorbar=bar | (numbers or {"nticks": 6}),
        hovertemplate=f"{hover}<br>{name} %{{{'customdata' if numbers else 'z'}:.4g}}<extra></extra>",
        hoverongaps=False,
        **look,
        **panel.axes,
    )
    return {"z": shown, **look}


def _colours(
    name: str, values: np.ndarray, from_zero: bool, most: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The scale of a heatmap, and the numbers at the bar of a logarithmic one."""
    if "cosine" in name.lower():
        return {"colorscale": "RdBu", "reversescale": True, "zmin": -1, "zmax": 1}, None
    known = values[~np.isnan(values)]
    if "loss" in name.lower() and (known > 0).any():
        low, high = known[known > 0].min(), known.max()
        ticks = logarithmic_ticks(low, high, most)
        look = {
            "colorscale": "Viridis",
            "zmin": np.log10(low),
            "zmax": max(np.log10(high), np.log10(low) + 1e-6),
        }
        return look, {"tickvals": np.log10(ticks).tolist(), "ticktext": [f"{tick:.3g}" for tick in ticks]}
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    return {"colorscale": "Viridis", "zmin": low, "zmax": high if high > low else low + 1}, None


def _logarithms(values: np.ndarray) -> np.ndarray:
    """Of numbers of which some are positive; the lowest of those stands for what has no logarithm."""
    return np.log10(np.where(np.isnan(values), np.nan, np.maximum(values, np.nanmin(values[values > 0]))))


def logarithmic_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two others, as evenly spaced on a logarithmic scale as they can be."""
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{d}e{k}") for k in range(first, last + 1) for d in digits]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            break
    else:
        ticks = ticks[:: -(-len(ticks) // most)]
    if len(ticks) >= 2:
        return ticks
    return sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 4)})


def cased_line(
    drawn: Any, panel: Panel, x: Any, y: Any, *, shade: str, width: float = 2, **look: Any
) -> None:
    """A line with a light edge, so that it can be seen on any colour of a heatmap."""
    quiet = {"showlegend": False, "hoverinfo": "skip", "legendgroup": look.get("legendgroup")}
    drawn.add_scatter(
        x=x, y=y, mode="lines", line={"color": "white", "width": width + 2}, **quiet, **panel.axes
    )
    drawn.add_scatter(x=x, y=y, mode="lines", line={"color": shade, "width": width}, **look, **panel.axes)


def add_marks(drawn: Any, panel: Panel, marks: Sequence[Mapping[str, Any]], *, showlegend: bool) -> None:
    """Named places on a heatmap: {"label", "x", "y", "symbol"}."""
    for mark in marks:
        drawn.add_scatter(
            x=[mark["x"]],
            y=[mark["y"]],
            mode="markers",
            name=mark["label"],
            legendgroup=f"mark {mark['label']}",
            showlegend=showlegend,
            marker={
                "symbol": mark["symbol"],
                "size": 13,
                "color": "white",
                "line": {"color": "#111", "width": 1.5},
            },
            hovertemplate=f"{mark['label']}<extra></extra>",
            **panel.axes,
        )


def add_levels(drawn: Any, panel: Panel, shown: Mapping[str, Any], x: Any, y: Any) -> None:
    """Faint lines of equal height on a heatmap."""
    if min(shown["z"].shape, default=0) < 2:
        return
    step = (shown["zmax"] - shown["zmin"]) / 8
    drawn.add_contour(
        x=x,
        y=y,
        z=shown["z"],
        contours={
            "coloring": "none",
            "start": shown["zmin"] + step,
            "end": shown["zmax"] - step / 2,
            "size": step,
        },
        line={"color": "rgba(255, 255, 255, 0.45)", "width": 0.8},
        showscale=False,
        showlegend=False,
        hoverinfo="skip",
        **panel.axes,
    )
