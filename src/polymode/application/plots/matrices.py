"""What networks of several runs have in common, pair by pair."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from polymode.application.plots.heat import add_heat
from polymode.application.plots.panels import Panel, heat_layout

_MOST_LABELS = 16


def matrices_figure(
    title: str, matrices: Mapping[str, Any], runs: Sequence[str], *, places: str = "network"
) -> Any:
    """Matrices [M, M] of pairs side by side, with lines between runs (Figures 2 and 3 of Fort et al. 2019).

    matrices: what is compared -> matrix; a name with "cosine" in it gets colours from -1 to 1, others from 0.
    runs: the name of each network's run, in the order of the rows. places: what a row is.
    """
    blocks = _blocks(runs)
    axis, heading, labels_height = _ticks(blocks, len(runs), places, len(matrices))
    drawn, panels = heat_layout(
        title, list(matrices), heading, heading, aspect=1, labels_height=labels_height
    )
    numbers = list(range(len(runs)))
    named = [
        f"{places} {number}, {run}" if len(blocks) > 1 else f"{places} {number}"
        for number, run in enumerate(runs)
    ]
    for panel, (name, matrix) in zip(panels, matrices.items(), strict=True):
        shown = add_heat(drawn, panel, name, matrix, x=numbers, y=numbers, hover="%{text}", from_zero=True)
        drawn.data[-1].text = [[f"{a}<br>{b}" for b in named] for a in named[: len(shown["z"])]]
        if 1 < len(blocks) < len(runs):
            _separate(drawn, panel, [start - 0.5 for _, start, _ in blocks[1:]], len(runs))
    drawn.update_xaxes(**axis)
    drawn.update_yaxes(**axis | {"tickangle": 0}, autorange="reversed")
    return drawn


def _blocks(runs: Sequence[str]) -> list[tuple[str, int, int]]:
    """Name, first and last network of every stretch of one run."""
    found, start = [], 0
    for run, members in groupby(runs):
        count = len(list(members))
        found.append((run, start, start + count - 1))
        start += count
    return found


def _ticks(
    blocks: Sequence[tuple[str, int, int]], count: int, places: str, num_panels: int
) -> tuple[dict[str, Any], str, float]:
    """Ticks of both axes, their title, and how much room the labels need."""
    if len(blocks) < 2:
        return {"tick0": 0, "dtick": max(1, -(-count // 6))}, places, 20
    names = [run for run, _, _ in blocks]
    # "run 1", "run 2": what all of them begin with is said once, in the title.
    first = names[0][: names[0].rfind(" ") + 1]
    shared = first if all(name.startswith(first) for name in names) else ""
    title = f"{places}, by {shared.strip()}" if shared else f"{places}, by run"
    every = -(-len(blocks) // _MOST_LABELS)
    shown = blocks[::every]
    labels = [name[len(shared) :] for name, _, _ in shown]
    room = 400 / (num_panels if num_panels <= 3 else 2)
    upright = (7 * max(map(len, labels)) + 5) * len(labels) <= room
    axis = {
        "tickvals": [(first + last) / 2 for _, first, last in shown],
        "ticktext": labels,
        "tickangle": 0 if upright else -90,
        "tickfont": {"size": 12},
    }
    return axis, title, 20 if upright else 10 + 7 * max(map(len, labels))


def _separate(drawn: Any, panel: Panel, borders: Sequence[float], count: int) -> None:
    for border in borders:
        for look in ({"color": "white", "width": 2.5}, {"color": "#111", "width": 1}):
            ends = ((border, border, -0.5, count - 0.5), (-0.5, count - 0.5, border, border))
            for x0, x1, y0, y1 in ends:
                drawn.add_shape(
                    type="line", x0=x0, x1=x1, y0=y0, y1=y1, xref=panel.x, yref=panel.y, line=look
                )
