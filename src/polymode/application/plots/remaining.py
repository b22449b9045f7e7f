"""What remains of a network that is thinned while it is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymode.application.plots.style import colour, figure
from polymode.application.plots.trace import MOST_POINTS, extremes

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")  # of one quantity after another


def remaining_figure(methods: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Any:
    """Shares of the dense network against member-epochs, a colour a method and a dash a quantity.

    Figure 2 of Jantre et al. (2022).

    methods: label -> quantity, such as "parameters" -> {"member_epochs", "mean"}.
    """
    drawn = figure(
        "What remains of the network, epoch by epoch",
        "member-epochs (gradient passes over the data)",
        "share of the dense network",
    )
    quantities = list(dict.fromkeys(name for lines in methods.values() for name in lines))
    dashes = {quantity: _DASHES[i % len(_DASHES)] for i, quantity in enumerate(quantities)}
    for index, (label, lines) in enumerate(methods.items()):
        for number, (quantity, shares) in enumerate(lines.items()):
            look = {"color": colour(index), "width": 2, "dash": dashes[quantity]}
            _line(drawn, label, quantity, shares, line=look, showlegend=number == 0)
    for quantity, dash in dashes.items():  # what the dashes mean, once for all methods
        drawn.add_scatter(
            x=[None], y=[None], mode="lines", name=quantity, line={"color": "#555", "width": 2, "dash": dash}
        )
    drawn.update_yaxes(tickformat=".0%", rangemode="tozero")
    return drawn


def _line(drawn: Any, label: str, quantity: str, shares: Mapping[str, Sequence[float]], **look: Any) -> None:
    kept = extremes(shares["mean"], MOST_POINTS)
    drawn.add_scatter(
        x=[shares["member_epochs"][i] for i in kept],
        y=[shares["mean"][i] for i in kept],
        mode="lines" if len(kept) > 1 else "markers",
        name=label,
        legendgroup=label,  # one click hides all of a method
        hovertemplate=(
            f"{label}<br>%{{x:.4g}} member-epochs<br>{quantity} remaining %{{y:.2%}}<extra></extra>"
        ),
        **look,
    )
