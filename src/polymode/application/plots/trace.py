"""How training goes, epoch by epoch, with the places where it begins anew."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import colour, figure

Trace = Mapping[str, Sequence[float]]

MOST_POINTS = 1000  # of a line: about two for each pixel of its width
MOST_TRAININGS = 60  # of a line that shows each of them; more would be a bar


def trace_figure(traces: Mapping[str, Trace]) -> Any:
    """Training loss against member-epochs, a line a method; dots where trainings begin.

    Figure 1 of Delaunoy and Louppe (2021).

    traces: label -> {"member_epochs", "loss", "restarts" (optional)}; restarts are places in the two lists,
    the first epoch of each training. Where they are too many to be told apart, the line goes from the end of
    one training to the end of the next, and what lies between is faint.
    """
    drawn = figure("Training loss, epoch by epoch", "member-epochs (gradient passes over the data)", "loss")
    for index, (label, trace) in enumerate(traces.items()):
        restarts = list(map(int, trace.get("restarts", ())))
        every = range(len(trace["loss"]))
        if len(restarts) < 2:
            _line(drawn, trace, every, label, label, index)
            continue
        name = f"{label}, {len(restarts):,} trainings in turn"
        if len(restarts) <= MOST_TRAININGS:
            _line(drawn, trace, every, name, label, index)
            _dots(drawn, trace, restarts, label, index)
        else:
            _line(drawn, trace, every, f"{name}, all epochs", label, index, opacity=0.3, showlegend=False)
            ends = [i - 1 for i in restarts[2:]] + [every[-1]]
            _line(drawn, trace, [*every[: restarts[1]], *ends], name, label, index)
    decades = _decades(traces)
    if decades > 1:
        dtick = "D2" if decades < 4 else 1  # 1, 2, 5 of every decade, as long as they fit
        drawn.update_yaxes(type="log", dtick=dtick, tickformat="~g")
    return drawn


def _line(
    drawn: Any, trace: Trace, places: Sequence[int], name: str, label: str, index: int, **look: Any
) -> None:
    kept = extremes([trace["loss"][i] for i in places], MOST_POINTS)
    drawn.add_scatter(
        x=[trace["member_epochs"][places[i]] for i in kept],
        y=[trace["loss"][places[i]] for i in kept],
        mode="lines" if len(kept) > 1 else "markers",
        name=name,
        legendgroup=label,  # one click hides all of a method
        line={"color": colour(index), "width": 1 if look else 1.5},
        hovertemplate=f"{label}<br>%{{x:.4g}} member-epochs<br>loss %{{y:.4g}}<extra></extra>",
        **look,
    )


def _dots(drawn: Any, trace: Trace, places: Sequence[int], label: str, index: int) -> None:
    drawn.add_scatter(
        x=[trace["member_epochs"][i] for i in places],
        y=[trace["loss"][i] for i in places],
        mode="markers",
        name=f"{label}, new trainings",
        legendgroup=label,
        showlegend=False,
        marker={"size": 5, "color": "white", "line": {"color": colour(index), "width": 1.2}},
        customdata=list(range(1, len(places) + 1)),
        hovertemplate=(
            f"{label}, training %{{customdata}} begins<br>%{{x:.4g}} member-epochs"
            "<br>loss of its first epoch %{y:.4g}<extra></extra>"
        ),
    )


def extremes(values: Sequence[float], most: int) -> list[int]:
    """Places of about ``most`` values that draw the same line: the lowest and highest of every stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    stretch = -(-2 * len(values) // most)
    kept = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        places = range(start, min(start + stretch, len(values)))
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    return sorted(kept)


def _decades(traces: Mapping[str, Trace]) -> float:
    """How many the losses span; none where one of them has no logarithm."""
    values = [value for trace in traces.values() for value in trace["loss"]]
    return math.log10(max(values) / min(values)) if values and min(values) > 0 else 0.0
