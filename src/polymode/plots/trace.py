"""How training goes, epoch by epoch, with the places where it begins anew."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.plots.style import colour, figure

Trace = Mapping[str, Sequence[float]]

MOST_POINTS = 1000  # of a line: about two for each pixel of its width
MOST_TICKS = 120  # more of them would be a bar


def trace_figure(traces: Mapping[str, Trace]) -> Any:
    """Training loss against member-epochs, a line a method; ticks where a new training begins (000, Figure 1).

    traces: label -> {"member_epochs", "loss", "restarts" (optional)}; restarts are places in the two lists,
    the first epoch of each training.
    """
    drawn = figure("Training loss, epoch by epoch", "member-epochs (gradient passes over the data)", "loss")
    for index, (label, trace) in enumerate(traces.items()):
        x, y, restarts = trace["member_epochs"], trace["loss"], trace.get("restarts", ())
        kept = _extremes(y, MOST_POINTS)
        drawn.add_scatter(
            x=[x[i] for i in kept],
            y=[y[i] for i in kept],
            mode="lines" if len(kept) > 1 else "markers",
            name=f"{label}, {len(restarts):,} trainings in turn" if len(restarts) > 1 else label,
            legendgroup=label,  # one click hides the ticks, too
            line={"color": colour(index), "width": 1.5},
            hovertemplate=f"{label}<br>%{{x:.4g}} member-epochs<br>loss %{{y:.4g}}<extra></extra>",
        )
        if 1 < len(restarts) <= MOST_TICKS:
            drawn.add_scatter(
                x=[x[i] for i in restarts],
                y=[y[i] for i in restarts],
                mode="markers",
                name=f"{label}, new trainings",
                legendgroup=label,
                showlegend=False,
                marker={"symbol": "line-ns", "size": 9, "line": {"color": colour(index), "width": 1.5}},
                customdata=list(range(1, len(restarts) + 1)),
                hovertemplate=(
                    f"{label}, training %{{customdata}} begins<br>%{{x:.4g}} member-epochs"
                    "<br>loss of its first epoch %{y:.4g}<extra></extra>"
                ),
            )
    drawn.update_yaxes(type="log" if _spans_decades(traces) else "linear")
    return drawn


def _extremes(values: Sequence[float], most: int) -> list[int]:
    """Places of about ``most`` values that draw the same line: the lowest and highest of every stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    stretch = -(-2 * len(values) // most)
    kept = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        places = range(start, min(start + stretch, len(values)))
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    return sorted(kept)


def _spans_decades(traces: Mapping[str, Trace]) -> bool:
    values = [value for trace in traces.values() for value in trace["loss"]]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 10
