"""What averaging more members buys where a descent has come to rest."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import colour, figure

Curve = Mapping[str, Sequence[float]]
DASHES = {"late phase": "solid", "independent": "dash"}


def steady_loss_figure(curves: Mapping[str, Mapping[str, Curve]], *, one: Mapping[str, float]) -> Any:
    """Left: loss against members K; right: K times the loss over that of one model, 1 where it falls as 1/K.

    curves: label -> {"late phase", "independent" (both optional)} -> {"members", "loss", "error"}, lists of
    one length. one: label -> loss of one model. Bars: standard errors; grey on the right: within 10 %.
    """
    drawn = figure("Loss at rest against the number of members", "members K", "loss", height=460)
    drawn.update_layout(
        xaxis2={"domain": [0.57, 1], "title": {"text": "members K"}},
        yaxis2={"anchor": "x2", "title": {"text": "K · loss / loss of one model"}},
    )
    drawn.update_xaxes(**_look(drawn), type="log")
    drawn.update_yaxes(**_look(drawn))
    drawn.update_layout(
        xaxis={"domain": [0, 0.43]}, yaxis={"type": "log", "dtick": 1, "exponentformat": "power"}
    )
    drawn.add_shape(
        type="rect",
        layer="below",
        xref="x2 domain",
        yref="y2",
        x0=0,
        x1=1,
        y0=0.9,
        y1=1.1,
        fillcolor="#ddd",
        line_width=0,
    )
    places = sorted({k for kinds in curves.values() for curve in kinds.values() for k in curve["members"]})
    drawn.update_xaxes(tickvals=places, ticktext=[f"{k:g}" for k in places])
    for index, (label, kinds) in enumerate(curves.items()):
        drawn.add_scatter(
            x=[places[0], places[-1]],
            y=[one[label] / places[0], one[label] / places[-1]],
            mode="lines",
            line={"color": "#999", "dash": "dot", "width": 1},
            name="1/K",
            showlegend=index == 0,
            hoverinfo="skip",
        )
        for kind, curve in kinds.items():
            _curve(drawn, curve, one[label], f"{label}, {kind}", DASHES[kind], index)
    return drawn


def _curve(drawn: Any, curve: Curve, one: float, name: str, dash: str, index: int) -> None:
    members, loss, error = (list(curve[key]) for key in ("members", "loss", "error"))
    shares = [k * value / one for k, value in zip(members, loss, strict=True)]
    share_errors = [k * value / one for k, value in zip(members, error, strict=True)]
    for axis, y, errors, what in (
        ("", loss, error, "loss"),
        ("2", shares, share_errors, "K · loss / loss of one"),
    ):
        drawn.add_scatter(
            x=members,
            y=y,
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            mode="lines+markers",
            name=name,
            legendgroup=name,  # one click hides both
            showlegend=not axis,
            line={"color": colour(index), "width": 2, "dash": dash},
            marker={"size": 6, "symbol": "circle" if dash == "solid" else "circle-open"},
            error_y={"type": "data", "array": errors, "thickness": 1, "width": 3},
            hovertemplate=f"{name}<br>%{{x}} members<br>{what} %{{y:.4g}}<extra></extra>",
        )


def _look(drawn: Any) -> dict[str, Any]:
    """The first axis' look, for the second."""
    kept = ("gridcolor", "zeroline", "linecolor", "ticks", "automargin")
    return {key: drawn.layout.xaxis[key] for key in kept}
