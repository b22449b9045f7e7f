"""Several panels in one figure, and where they are."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polymode.application.plots.style import AXIS, figure, legend_room

# Pixels: the title of a figure, a line of text, a colour bar with its numbers, between rows.
_TOP, _LINE, _BAR, _GAP = 56, 17, 38, 14
_NARROW, _LETTER = 400, 6.5  # pixels: between the margins of the narrowest figure of a page, a letter
_BETWEEN = 0.05  # columns, a share of the width


@dataclass(frozen=True)
class Panel:
    """One of the panels: the names of its axes, and where it is, as shares of the area that all of them have.

    bar: the upper end of its colour bar.
    """

    x: str
    y: str
    left: float
    right: float
    bar: float

    @property
    def axes(self) -> dict[str, str]:
        """What a trace says to be drawn in this panel."""
        return {"xaxis": self.x, "yaxis": self.y}

    @property
    def width(self) -> float:
        """Its share of the width."""
        return self.right - self.left

    def adjust(
        self, drawn: Any, *, x: Mapping[str, Any] | None = None, y: Mapping[str, Any] | None = None
    ) -> None:
        """Change the axes of the panel."""
        drawn.update_layout({f"xaxis{self.x[1:]}": x or {}, f"yaxis{self.y[1:]}": y or {}})


def panels_layout(
    title: str,
    x_titles: Sequence[str],
    y_titles: Sequence[str],
    *,
    columns: int,
    panel_height: float,
    below: float = 0,
    bar: float = 0,
    gap: float = _BETWEEN,
    legend: Iterable[str] = (),
) -> tuple[Any, list[Panel]]:
    """A figure with empty panels, row by row, one for each pair of titles ("": an axis without one).

    below: pixels under the axes of each panel, for its numbers, title and colour bar; 0: those of the last
    row lie in the margin. bar: how many of these are the colour bar's. gap: between columns, a share of the
    width. legend: what its entries will say.
    """
    rows = max(1, -(-len(x_titles) // columns))
    step = panel_height + below + _GAP
    area, margin = rows * step - _GAP, 12 if below else 60
    # Room for the legend of the narrowest figure: in wider ones the panels have some of it.
    drawn = figure(title, "", "", height=int(_TOP + area + margin + legend_room(legend)))
    drawn.update_layout(margin={"t": _TOP, "b": margin})
    width = _width(columns, gap)
    found = []
    for index, (x_title, y_title) in enumerate(zip(x_titles, y_titles, strict=True)):
        row, column = divmod(index, columns)
        name = "" if index == 0 else str(index + 1)
        left, top = column * (width + gap), 1 - row * step / area
        floor = max(0.0, top - panel_height / area)
        panel = Panel(f"x{name}", f"y{name}", left, min(1.0, left + width), floor - (below - bar) / area)
        panel.adjust(
            drawn,
            x=_axis(wrapped(x_title, width), panel.y, panel.left, panel.right),
            y=_axis(y_title, panel.x, floor, top),
        )
        found.append(panel)
    return drawn, found


def _axis(title: str, anchor: str, low: float, high: float) -> dict[str, Any]:
    text = {"text": title, "standoff": 6, "font": {"size": 13}}
    return AXIS | {"anchor": anchor, "domain": [low, high], "title": text}


def heat_layout(
    title: str,
    names: Sequence[str],
    x_title: str,
    y_title: str,
    *,
    aspect: float,
    labels_height: float = 20,
    legend: Iterable[str] = (),
) -> tuple[Any, list[Panel]]:
    """Panels for heatmaps: up to three side by side, four in two rows; their units of x and y are as long.

    aspect: height of a panel over its width. labels_height: pixels of what stands at the ticks of x.
    """
    columns = max(1, len(names)) if len(names) <= 3 else 2
    bar = _BAR + _LINE * max((_lines(name, columns) for name in names), default=1)
    drawn, panels = panels_layout(
        title,
        [x_title] * len(names),
        [y_title if i % columns == 0 else "" for i in range(len(names))],
        columns=columns,
        panel_height=float(np.clip(aspect * 640 / columns, 110, 400)),
        below=labels_height + _LINE * _lines(x_title, columns) + 18 + bar,
        bar=bar,
        legend=legend,
    )
    look = {"constrain": "domain", "showgrid": False}
    for index, panel in enumerate(panels):
        panel.adjust(drawn, x=look, y=look | {"scaleanchor": "x", "constraintoward": "bottom"})
        if index:
            panel.adjust(
                drawn, x={"matches": "x"}, y={"matches": "y", "showticklabels": index % columns == 0}
            )
    return drawn, panels


def wrapped(text: str, width: float) -> str:
    """Text in as many lines as it needs in a narrow figure; width: the share of it that it has."""
    return "<br>".join(textwrap.wrap(text, max(1, int(_NARROW * width / _LETTER))))


def _lines(text: str, columns: int) -> int:
    return wrapped(text, _width(columns)).count("<br>") + 1


def _width(columns: int, gap: float = _BETWEEN) -> float:
    """The share of the width that each of some columns has."""
    return (1 - gap * (columns - 1)) / columns
