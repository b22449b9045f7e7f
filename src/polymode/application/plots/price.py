"""What a score costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import COLOURS, colour, figure, symbol

FEW = 5  # points whose names have room beside them


def price_figure(
    quality: str,
    members: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    learning: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> Any:
    """NLL against member-epochs: test NLL of the first members together, and of one member as it learns.

    members: label -> (member-epochs, test NLL of the mixture of the members trained for them). learning:
    label -> (member-epochs, mean validation NLL of single members), from the event log.
    """
    drawn = figure(f"{quality} against the price", "member-epochs (gradient passes over the data)", quality)
    for index, (label, (x, y)) in enumerate(members.items()):
        drawn.add_scatter(
            x=list(x),
            y=list(y),
            mode="lines+markers",
            name=label,
            legendgroup=label,
            line={"color": colour(index), "width": 2.5},
            marker={"size": 9},
            customdata=list(range(1, len(x) + 1)),
            hovertemplate=(
                f"{label}<br>%{{customdata}} member(s)<br>%{{x:.4g}} member-epochs"
                f"<br>test {quality} %{{y:.4f}}<extra></extra>"
            ),
        )
    for index, (label, (x, y)) in enumerate(learning.items()):
        drawn.add_scatter(
            x=list(x),
            y=list(y),
            mode="lines",
            name=f"{label}, mean member while training (validation)",
            legendgroup=label,  # one entry for both: a dozen lines would leave no room for the figure
            showlegend=label not in members,
            line={"color": colour(index), "width": 1.2, "dash": "dot"},
            hovertemplate=(
                f"{label}, mean member<br>%{{x:.4g}} member-epochs spent<br>validation {quality} %{{y:.4f}}"
                "<extra></extra>"
            ),
        )
    if _spans_decades(members):
        return drawn.update_yaxes(type="log")
    return drawn.update_yaxes(range=_range(members, learning))


def _range(
    members: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    learning: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> list[float] | None:
    """From the lowest value to well above the test scores: trainings that begin or end far off are cut."""
    tested = [y for _, ys in members.values() for y in ys]
    if not tested:
        return None
    low = min([*tested, *(y for _, ys in learning.values() for y in ys)])
    high = max(tested)
    room = max(high - low, 0.05 * abs(high), 1e-6)
    return [low - 0.2 * room, high + 1.5 * room]


def _spans_decades(*groups: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> bool:
    values = [v for group in groups for _, ys in group.values() for v in ys]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 10


def gain_figure(quality: str, points: Sequence[Mapping[str, Any]]) -> Any:
    """Gain over the first method against seconds of training, one dot a method.

    points: {"label", "seconds", "gain", "error" (standard error or None), "parameters"}.
    """
    few = len(points) <= FEW
    drawn = figure(
        "Is it worth its price?",
        "seconds of training (one replicate)",
        f"gain in {quality}",
        height=360 if few else 460,
    )
    drawn.add_hline(y=0, line={"color": "#999", "dash": "dot"})
    for index, point in enumerate(points):
        drawn.add_scatter(
            x=[point["seconds"]],
            y=[point["gain"]],
            error_y={"type": "data", "array": [point["error"] or 0.0], "visible": point["error"] is not None},
            mode="markers+text" if few else "markers",
            text=[point["label"]],
            textposition="top right",
            marker={"size": 12, "color": colour(index), "symbol": symbol(1 + index // len(COLOURS))},
            name=point["label"],
            showlegend=not few,  # names of many would cover each other
            customdata=[[point["parameters"]]],
            hovertemplate=(
                f"{point['label']}<br>%{{x:.1f}} s<br>gain %{{y:.4f}}<br>%{{customdata[0]:,.0f}} parameters"
                "<extra></extra>"
            ),
        )
    drawn.update_xaxes(range=[0, 1.3 * max(point["seconds"] for point in points)])  # room for the names
    return drawn
