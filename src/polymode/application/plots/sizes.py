"""What ensembles of several runs are worth: with more runs, under corruption, and run against run."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.panels import Panel, panels_layout
from polymode.application.plots.style import colour, figure, finite, legend_room, method_colours, small_titles

_TITLES = {"accuracy": "accuracy", "nll": "NLL (nats)", "brier": "Brier score", "js": "JS divergence (nats)"}
_FOREIGN = 7  # where foreign points stand, after the five severities


def sizes_figure(
    curves: Mapping[str, Mapping[str, Any]],
    *,
    scores: Sequence[str] = ("accuracy", "brier"),
    title: str = "Size of the ensemble",
    x_title: str = "runs in the ensemble",
) -> Any:
    """Scores against the number of runs in an ensemble, a line a way to sample around each of them.

    Figure 8 of Fort et al. (2019).

    curves: name -> {"num_runs", a list for each score, "spreads" (optional): score -> list}; spreads
    are drawn as bars.
    """
    drawn, panels = _side_by_side(title, x_title, scores, curves)
    shades = method_colours(curves)
    for number, (panel, score) in enumerate(zip(panels, scores, strict=True)):
        for name, curve in curves.items():
            spread = (curve.get("spreads") or {}).get(score)
            bars = None if spread is None else {"array": finite(spread), "thickness": 1, "width": 3}
            hover = f"{name}<br>%{{x}} {x_title}<br>{_title(score)} %{{y:.4f}}<extra></extra>"
            _line(drawn, panel, name, curve["num_runs"], curve[score], shades[name], number == 0)
            drawn.data[-1].update(error_y=bars, hovertemplate=hover)
    most = max((max(curve["num_runs"], default=1) for curve in curves.values()), default=1)
    drawn.update_xaxes(tick0=0 if most > 10 else 1, dtick=max(1, -(-most // 10)))
    return drawn


def shift_figure(curves: Mapping[str, Mapping[str, Any]], *, foreign: Mapping[str, float] | None) -> Any:
    """Scores and disagreement of ensembles under corruption, a line a method (Figure 9 of Fort et al. 2019).

    curves: name -> {"severity", "accuracy", "brier", "js" (or None where it has one network)}. foreign:
    name -> JS divergence on data of other classes, drawn after the severities.
    """
    scores = ("accuracy", "brier", "js")
    drawn, panels = _side_by_side("Shifted data", "severity of corruption", scores, curves)
    shades = method_colours(curves)
    for number, (panel, score) in enumerate(zip(panels, scores, strict=True)):
        for name, curve in curves.items():
            if curve.get(score) is None:
                continue
            hover = f"{name}<br>severity %{{x}}<br>{_title(score)} %{{y:.4f}}<extra></extra>"
            _line(drawn, panel, name, curve["severity"], curve[score], shades[name], number == 0)
            drawn.data[-1].update(hovertemplate=hover)
    drawn.update_xaxes(tickvals=list(range(6)), tickangle=0, range=[-0.3, 5.3])
    for name, value in (foreign or {}).items():
        drawn.add_scatter(
            x=[_FOREIGN],
            y=finite([value]),
            mode="markers",
            name=name,
            legendgroup=name,
            showlegend=False,
            marker={"symbol": "diamond", "size": 10, "color": shades.get(name, "#7F7F7F")},
            hovertemplate=f"{name}<br>foreign data<br>{_title('js')} %{{y:.4f}}<extra></extra>",
            **panels[-1].axes,
        )
    if foreign:
        ticks = {"tickvals": [0, 2, 4, _FOREIGN], "ticktext": ["0", "2", "4", "foreign"]}
        panels[-1].adjust(drawn, x=ticks | {"range": [-0.3, _FOREIGN + 1.2]})
    return drawn


def _side_by_side(
    title: str, x_title: str, scores: Sequence[str], curves: Mapping[str, Any]
) -> tuple[Any, list[Panel]]:
    count = len(scores)
    titles = [_title(score) for score in scores]
    return panels_layout(
        title,
        [x_title] * count,
        titles,
        columns=max(1, count),
        panel_height=270,
        gap=0.1 + 0.02 * count,
        legend=curves,
    )


def _title(score: str) -> str:
    return _TITLES.get(score, score)


def _line(drawn: Any, panel: Panel, name: str, x: Any, y: Any, shade: str, showlegend: bool) -> None:
    drawn.add_scatter(
        x=finite(x),
        y=finite(y),
        mode="lines+markers",
        name=name,
        legendgroup=name,  # one click hides all of a method
        showlegend=showlegend,
        line={"color": shade, "width": 2},
        marker={"size": 6},
        **panel.axes,
    )


def pairs_figure(title: str, bars: Sequence[Mapping[str, Any]], y_title: str) -> Any:
    """Means over pairs of networks as bars, a colour a group (Figures S4 and S5 of Fort et al. 2019).

    bars: {"label", "mean", "error" (or None), "group"}, from the top down. y_title: what the means are of.
    """
    groups = list(dict.fromkeys(bar["group"] for bar in bars))
    room = legend_room(groups) if len(groups) > 1 else 0
    labels = ["<br>".join(textwrap.wrap(bar["label"], 26)) for bar in bars]
    lines = sum(max(2, label.count("<br>") + 1) for label in labels)
    drawn = figure(title, "<br>".join(textwrap.wrap(y_title, 36)), "", height=120 + 20 * lines + room)
    for index, group in enumerate(groups):
        own = [(place, bar) for place, bar in enumerate(bars) if bar["group"] == group]
        errors = finite([bar.get("error") for _, bar in own])
        drawn.add_bar(
            y=[place for place, _ in own],
            x=finite([bar["mean"] for _, bar in own]),
            orientation="h",
            name=group,
            marker={"color": colour(index), "line": {"width": 0}},
            width=0.65,
            error_x={"type": "data", "array": errors, "thickness": 1.5, "width": 5, "color": "#222"},
            customdata=[bar["label"] for _, bar in own],
            hovertemplate=f"%{{customdata}}<br>{group}<br>{y_title} %{{x:.4g}}<extra></extra>",
        )
    drawn.update_layout(barmode="overlay", showlegend=len(groups) > 1)
    drawn.update_xaxes(rangemode="tozero")
    drawn.update_yaxes(tickvals=list(range(len(bars))), ticktext=labels, autorange="reversed", showgrid=False)
    return small_titles(drawn)
