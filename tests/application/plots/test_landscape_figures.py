"""Figures of loss landscapes: the numbers they were given, at the places and in the colours promised."""

import json

import numpy as np
import pytest

from polymode.application.plots import (
    cut_figure,
    dark,
    diversity_figure,
    map_figure,
    matrices_figure,
    pairs_figure,
    path_figure,
    sheet_figure,
    shift_figure,
    sizes_figure,
)
from polymode.application.plots.fans import Fan
from polymode.application.plots.heat import logarithmic_ticks
from polymode.application.plots.style import COLOURS, legend_room, method_colours

RANDOM = np.random.default_rng(0)


def of_type(drawn, kind):
    return [trace for trace in drawn.data if trace.type == kind]


def named(drawn, name):
    return [trace for trace in drawn.data if trace.name == name]


def as_json(drawn):
    """What a page would hold; raises where a figure holds something that cannot be written."""
    return json.loads(drawn.to_json())


# --- matrices -------------------------------------------------------------------------------------------


def test_matrices_have_their_scales_and_lines_where_runs_change():
    disagreement, cosine = RANDOM.random((5, 5)), 2 * RANDOM.random((5, 5)) - 1
    runs = ["run 1", "run 1", "run 1", "run 2", "run 2"]
    drawn = matrices_figure(
        "Pairs", {"disagreement": disagreement, "cosine of weights": cosine.tolist()}, runs
    )
    first, second = of_type(drawn, "heatmap")
    np.testing.assert_allclose(first.z, disagreement, rtol=1e-6)
    np.testing.assert_allclose(second.z, cosine, rtol=1e-6)
    assert (first.zmin, second.zmin, second.zmax) == (0, -1, 1)
    assert first.colorscale != second.colorscale
    assert (first.xaxis, second.xaxis) == ("x", "x2")
    # Both panels are divided between networks 2 and 3, across and down.
    assert {(line.xref, line.x0, line.x1, line.y0, line.y1) for line in drawn.layout.shapes} == {
        (panel, *ends) for panel in ("x", "x2") for ends in ((2.5, 2.5, -0.5, 4.5), (-0.5, 4.5, 2.5, 2.5))
    }
    assert drawn.layout.xaxis.tickvals == (1, 3.5)
    assert drawn.layout.xaxis.ticktext == ("1", "2")  # in the order of the rows
    assert drawn.layout.xaxis.title.text == "network, by run"
    assert drawn.layout.yaxis.autorange == "reversed"
    assert [note.text for note in drawn.layout.annotations] == ["disagreement", "cosine of weights"]


def test_matrices_of_one_run_have_numbers_instead():
    drawn = matrices_figure("One", {"disagreement": [[0.0]]}, ["run 1"], places="checkpoint")
    assert not drawn.layout.shapes
    assert drawn.layout.xaxis.ticktext is None
    assert drawn.layout.xaxis.title.text == "checkpoint"
    (heat,) = of_type(drawn, "heatmap")
    assert heat.zmax > heat.zmin  # although all values are the same


def test_runs_of_one_network_each_are_named_but_not_divided():
    drawn = matrices_figure("All", {"disagreement": np.eye(3)}, ["a long name", "another", "third"])
    assert not drawn.layout.shapes
    assert drawn.layout.xaxis.ticktext == ("a long name", "another", "third")


def test_four_matrices_stand_in_two_rows():
    drawn = matrices_figure("Four", {name: np.eye(50) for name in "abcd"}, ["run 1"] * 25 + ["run 2"] * 25)
    layout = drawn.layout
    assert layout.xaxis3.domain == layout.xaxis.domain
    assert layout.yaxis.domain[0] > layout.yaxis3.domain[1]


# --- the map --------------------------------------------------------------------------------------------


def test_a_run_has_one_colour_and_a_kind_one_symbol():
    points = [
        {"x": [4], "y": [5], "label": "b", "kind": "end"},
        {"x": [0, 1], "y": [2, 3], "label": "b", "kind": "trajectory", "numbers": [7, 9]},
        {"x": [1, 1], "y": [2, 2], "label": "a", "kind": "random"},
        {"x": [4], "y": [6], "label": "a", "kind": "end"},
    ]
    drawn = map_figure(points)
    shown = {trace.name: trace for trace in drawn.data if trace.showlegend is False}
    assert shown["b, end"].marker.color == shown["b, trajectory"].marker.color == COLOURS[0]
    assert shown["a, end"].marker.color == shown["a, random"].marker.color == COLOURS[1]
    assert shown["a, end"].marker.symbol == shown["b, end"].marker.symbol == "star"
    assert shown["b, trajectory"].mode == "lines+markers"
    assert list(shown["b, trajectory"].customdata) == [7, 9]
    # Ends lie on top of all else; a run's entry hides all that is its own.
    assert list(shown)[-2:] == ["b, end", "a, end"]
    assert {trace.legendgroup for trace in shown.values()} == {"a", "b"}
    entries = [trace for trace in drawn.data if trace.showlegend is None]
    assert [e.name for e in entries if e.legend is None] == ["b", "a"]
    assert [e.name for e in entries if e.legend == "legend2"] == ["trajectory", "random", "end"]
    assert "no units" in drawn.layout.xaxis.title.text


# --- the plane of diversity and accuracy ----------------------------------------------------------------


def test_disagreements_are_divided_by_the_share_of_mistakes():
    samples = {
        "independent": {"accuracy": [0.75, 1.0], "disagreement": [0.2, 0.1]},
        "dropout": {"accuracy": [0.5], "disagreement": [0.3]},
    }
    limits = {"accuracy": [0.5, 0.75, 1.0], "lower": [0.25, 0.0, 0.0], "upper": [0.6, 0.4, 0.3]}
    fitted = {"exponent": 0.221, "accuracy": [0.6], "disagreement": [0.2]}
    drawn = diversity_figure(samples, base_accuracy=0.75, num_classes=10, limits=limits, fitted=fitted)
    names = [trace.name for trace in drawn.data]
    assert names.index("dropout") < names.index("independent")  # stars on top
    (independent,), (dropout,) = named(drawn, "independent"), named(drawn, "dropout")
    np.testing.assert_allclose(independent.y, [0.8, np.nan])  # nothing to divide by where nothing is wrong
    np.testing.assert_allclose(dropout.y, [0.6])
    assert (independent.marker.symbol, dropout.marker.symbol) == ("star", "circle")
    (upper,), (lower,) = named(drawn, "upper limit"), named(drawn, "lower limit")
    np.testing.assert_allclose(upper.y, [1.2, 1.6, np.nan])
    np.testing.assert_allclose(lower.y, [0.5, 0, np.nan])
    (curve,) = named(drawn, "fitted, exponent 0.22")
    np.testing.assert_allclose(curve.y, [0.5])
    assert curve.line.dash == "dot"
    (base,) = named(drawn, "base network")
    assert (base.x, base.y) == ((0.75,), (0,))
    low, high = drawn.layout.xaxis.range
    assert low < 0.5 <= 1.0 < high


def test_the_plane_of_nothing_but_a_base_can_be_drawn():
    drawn = diversity_figure({}, base_accuracy=0.9, num_classes=2, limits=None, fitted=None)
    assert [trace.name for trace in drawn.data] == ["base network"]


# --- cuts -----------------------------------------------------------------------------------------------


def test_losses_of_a_cut_are_logarithmic_and_others_are_not():
    loss = np.array([[0.01, 1.0, 100.0], [np.inf, np.nan, 10.0]])
    error = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    marks = [{"label": "origin", "x": 0, "y": 0, "symbol": "cross"}, {"label": "optimum", "x": 1, "y": 1}]
    tracks = [{"label": "run 1", "x": [0, 1], "y": [0, 1]}]
    drawn = cut_figure("Cut", [0, 1, 2], [0, 1], {"loss (nats)": loss, "error": error}, marks, tracks, tracks)
    first, second = of_type(drawn, "heatmap")
    np.testing.assert_allclose(first.z, [[-2, 0, 2], [np.nan, np.nan, 1]], atol=1e-6)
    np.testing.assert_allclose(second.z, error, rtol=1e-6)
    ticks = dict(zip(first.colorbar.tickvals, first.colorbar.ticktext, strict=True))
    assert ticks == {-2: "0.01", -1: "0.1", 0: "1", 1: "10", 2: "100"}
    assert second.colorbar.tickvals is None
    assert drawn.layout.yaxis.scaleanchor == drawn.layout.yaxis2.scaleanchor == "x"
    for label in ("origin", "optimum", "run 1"):  # in both panels, in the legend once
        shown = named(drawn, label)
        assert {trace.xaxis for trace in shown} == {"x", "x2"}
    assert [t.name for t in drawn.data if t.showlegend] == ["run 1", "run 1", "origin", "optimum"]
    assert len({named(drawn, label)[0].marker.symbol for label in ("origin", "optimum")}) == 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.3, 40, [0.5, 1, 2, 5, 10, 20]),
        (0.01, 5, [0.01, 0.03, 0.1, 0.3, 1, 3]),
        (0.01, 500, [0.01, 0.1, 1, 10, 100]),
        (1e-6, 1e6, [1e-6, 1e-3, 1, 1e3, 1e6]),
        (0.21, 0.24, [0.21, 0.22, 0.23, 0.24]),
        (2.0, 2.0, [2.0]),
    ],
)
def test_ticks_of_losses_are_round_and_few(low, high, expected):
    assert logarithmic_ticks(low, high, 6) == expected


# --- paths ----------------------------------------------------------------------------------------------


def path(loss):
    count = len(loss)
    return {
        "place": np.linspace(0, 1, count),
        "loss": loss,
        "error": [0.1] * count,
        "differences": {"the first end": [0.0] * count, "the second end": [0.2] * count},
        "is_corner": [True] + [False] * (count - 2) + [True],
    }


@pytest.mark.parametrize(("highest", "scale"), [(1.0, "log"), (0.25, None)])
def test_losses_of_paths_are_logarithmic_where_they_span_decades(highest, scale):
    drawn = path_figure({"straight line": path([0.01, highest, 0.01]), "tunnel": path([0.01, 0.02, 0.01])})
    assert drawn.layout.yaxis.type == scale
    assert drawn.layout.yaxis2.type is None


def test_a_path_has_one_colour_an_end_one_dash_and_dots_at_corners():
    drawn = path_figure({"straight line": path([1, 2, 1]), "tunnel": path([1, 1, 1])}, error_title="accuracy")
    for index, name in enumerate(("straight line", "tunnel")):
        lines = named(drawn, name)
        assert [line.yaxis for line in lines] == ["y", "y2", "y3", "y3"]
        assert {line.line.color for line in lines} == {COLOURS[index]}
        assert [line.line.dash for line in lines] == ["solid", "solid", "solid", "dash"]
        sizes = lines[0].marker.size
        assert sizes[0] == sizes[2] > sizes[1] == 0
    np.testing.assert_array_equal(named(drawn, "straight line")[3].y, [0.2] * 3)
    assert drawn.layout.yaxis2.title.text == "accuracy"
    (key,) = named(drawn, "disagreement with the second end")
    assert key.line.dash == "dash"


def test_a_fan_points_up_and_values_lie_where_they_were_found():
    angle, share = np.linspace(0, 2, 21), np.linspace(0, 1.2, 13)
    length = 3 + np.sin(angle)
    fan = Fan.of(angle, share[:, None] * length)
    x, y = fan.places(angle, length)
    np.testing.assert_allclose(np.hypot(x, y), length)
    assert x[0] < 0 < x[-1]  # from the left to the right
    np.testing.assert_allclose(fan.places(1.0, 5.0), (0, 5), atol=1e-12)
    # A function of the place that is linear in angle and distance comes back as it was.
    spread = fan.spread(7 * angle[None] + 0 * share[:, None])
    grid_x, grid_y = np.meshgrid(fan.x, fan.y)
    turned = 1 + np.arctan2(grid_x, grid_y)
    inside = ~np.isnan(spread)
    np.testing.assert_allclose(spread[inside], 7 * turned[inside], atol=1e-9)
    reach = 1.2 * np.interp(turned, angle, length)
    expected = (turned >= 0) & (turned <= 2) & (np.hypot(grid_x, grid_y) <= reach)
    assert (inside == expected).mean() > 0.999  # but for rounding at the edge
    distance = fan.spread(share[:, None] * length)
    np.testing.assert_allclose(distance[inside], np.hypot(grid_x, grid_y)[inside], atol=1e-9)


def test_a_sheet_marks_the_ends_of_its_path():
    angle, share = np.linspace(0, 1, 5), np.array([0.0, 0.5, 1.0, 1.5])
    radius = share[:, None] * np.full(5, 2.0)
    panels = {"loss": 10.0 ** (share[:, None] + angle), "error": share[:, None] + angle}
    drawn = sheet_figure("Sheet", angle, radius, panels, angle[::2], path_row=2)
    first, second = (named(drawn, name)[0] for name in ("first end", "second end"))
    assert first.x[0] == pytest.approx(-2 * np.sin(0.5))
    assert first.y[0] == pytest.approx(second.y[0]) == pytest.approx(2 * np.cos(0.5))
    loss, error = of_type(drawn, "heatmap")
    assert "0" not in loss.colorbar.ticktext
    assert loss.zmax == pytest.approx(2.5, abs=0.05)
    assert error.zmax == pytest.approx(2.5, abs=0.05)
    as_json(drawn)


# --- ensembles ------------------------------------------------------------------------------------------


def test_sizes_have_a_panel_a_score_and_a_black_baseline():
    curve = {"num_runs": [1, 2], "accuracy": [0.7, 0.8], "brier": [0.4, 0.3], "nll": [1.0, None]}
    curves = {"dropout": curve | {"spreads": {"nll": [0.1, 0.2]}}, "baseline": curve}
    drawn = sizes_figure(curves, scores=("accuracy", "nll"))
    baseline, dropout = named(drawn, "baseline"), named(drawn, "dropout")
    assert {line.line.color for line in baseline} == {"#000000"}
    assert dropout[0].line.color != "#000000"
    np.testing.assert_array_equal(baseline[0].y, [0.7, 0.8])
    np.testing.assert_array_equal(dropout[1].y, [1.0, np.nan])
    np.testing.assert_array_equal(dropout[1].error_y.array, [0.1, 0.2])
    assert dropout[0].error_y.array is None
    assert drawn.layout.yaxis2.title.text == "NLL (nats)"
    assert [line.showlegend for line in dropout] == [True, False]


def test_shifts_leave_out_divergences_of_one_network_and_show_foreign_ones():
    curve = {"severity": [0, 5], "accuracy": [0.8, 0.4], "brier": [0.3, 0.7]}
    curves = {"one": curve | {"js": None}, "independent": curve | {"js": [0.1, 0.3]}}
    drawn = shift_figure(curves, foreign={"independent": 0.5})
    assert [line.xaxis for line in named(drawn, "one")] == ["x", "x2"]
    independent = named(drawn, "independent")
    assert [line.xaxis for line in independent] == ["x", "x2", "x3", "x3"]
    np.testing.assert_array_equal(independent[3].y, [0.5])
    assert drawn.layout.xaxis3.ticktext[-1] == "foreign"
    assert independent[3].x[0] == drawn.layout.xaxis3.tickvals[-1] > 5
    assert shift_figure(curves, foreign=None).layout.xaxis3.ticktext is None


def test_bars_stand_in_their_order_with_the_colours_of_their_groups():
    bars = [
        {"label": "within runs", "mean": 0.1, "error": 0.01, "group": "a"},
        {"label": "between runs", "mean": 0.3, "error": None, "group": "b"},
        {"label": "within runs", "mean": 0.2, "error": 0.02, "group": "a"},
    ]
    drawn = pairs_figure("Pairs", bars, "disagreement")
    first, second = of_type(drawn, "bar")
    assert (first.y, second.y) == ((0, 2), (1,))
    np.testing.assert_array_equal(first.x, [0.1, 0.2])
    np.testing.assert_array_equal(first.error_x.array, [0.01, 0.02])
    assert np.isnan(second.error_x.array[0])
    assert drawn.layout.yaxis.ticktext == ("within runs", "between runs", "within runs")
    assert first.marker.color != second.marker.color
    assert drawn.layout.xaxis.title.text == "disagreement"


# --- the look -------------------------------------------------------------------------------------------


def every_figure():
    curve = {"num_runs": [1], "severity": [0], "accuracy": [0.7], "brier": [0.4], "js": [0.1]}
    points = [
        {"x": [0], "y": [1], "label": "a", "kind": kind} for kind in ("trajectory", "member", "average")
    ]
    return {
        "matrices": matrices_figure("M", {"disagreement": np.eye(2)}, ["a", "b"]),
        "map": map_figure(points),
        "plane": diversity_figure({}, base_accuracy=1.0, num_classes=2, limits=None, fitted=None),
        "cut": cut_figure("C", [0, 1], [0, 1], {"loss": np.eye(2)}, []),
        "path": path_figure({"straight line": path([1, 2, 1])}),
        "sheet": sheet_figure("S", [0, 1], np.eye(2) + 1, {"loss": np.eye(2)}, [0, 1]),
        "sizes": sizes_figure({"baseline": curve}),
        "shift": shift_figure({"baseline": curve}, foreign=None),
        "pairs": pairs_figure("P", [{"label": "x", "mean": 1, "error": None, "group": "g"}], "y"),
    }


def without_looks(content):
    numbers = ("x", "y", "z", "customdata", "text")
    return [{key: trace.get(key) for key in numbers} for trace in content["data"]]


@pytest.mark.parametrize("name", list(every_figure()))
def test_a_dark_copy_has_the_same_data_and_leaves_the_figure_alone(name):
    drawn = every_figure()[name]
    before = as_json(drawn)
    copied = dark(drawn)
    assert as_json(drawn) == before
    after = as_json(copied)
    assert without_looks(after) == without_looks(before)
    assert (copied.layout.paper_bgcolor, copied.layout.plot_bgcolor) == ("#111", "#111")
    assert copied.layout.font.color == "#ddd"
    assert {axis.gridcolor for axis in copied.select_xaxes()} == {"#333"}
    lines = [trace.line.color for trace in copied.data if trace.type == "scatter"]
    assert not {"#000000", "#222"} & set(lines)


def test_black_lines_turn_light_on_dark_paper():
    curve = {"num_runs": [1], "accuracy": [0.7], "brier": [0.4]}
    drawn = sizes_figure({"baseline": curve, "dropout": curve})
    copied = dark(drawn)
    assert named(drawn, "baseline")[0].line.color == "#000000"
    assert named(copied, "baseline")[0].line.color == "#eee"
    assert named(copied, "dropout")[0].line.color == named(drawn, "dropout")[0].line.color


@pytest.mark.parametrize("name", list(every_figure()))
def test_every_axis_has_a_title_where_one_can_be_read(name):
    drawn = every_figure()[name]
    shown = [a for a in (*drawn.select_xaxes(), *drawn.select_yaxes()) if a.showticklabels is not False]
    assert all(axis.title.text for axis in shown) or name == "pairs"  # names of bars need no title
    assert all(axis.title.text for axis in drawn.select_xaxes() if axis.showticklabels is not False)


def test_nothing_to_draw_is_drawn_as_nothing():
    for drawn in (
        matrices_figure("M", {}, []),
        map_figure([]),
        cut_figure("C", [], [], {}, []),
        path_figure({}),
        sheet_figure("S", [], np.zeros((0, 0)), {}, []),
        sheet_figure("S", [0.0], [[1.0]], {"loss": [[1.0]]}, [0.0]),
        cut_figure("C", [0], [0], {"loss": [[np.nan]]}, []),
        cut_figure("C", [0], [0], {"loss": [[0.0]], "error": [[0.0]]}, []),
        sizes_figure({}),
        shift_figure({}, foreign=None),
        pairs_figure("P", [], "y"),
    ):
        as_json(drawn)


def test_known_methods_keep_their_colours_and_all_differ():
    names = ["random", "weight average", "something new", "independent", "independent + random", "low rank"]
    colours = method_colours(names)
    assert len(set(colours.values())) == len(names)
    assert colours["independent"] == method_colours(["other", "independent"])["independent"]
    assert method_colours(["x"], taken=COLOURS[1:])["x"] == COLOURS[0]


def test_legends_have_room_for_long_names():
    assert legend_room([]) == 0
    assert legend_room(["a"] * 3) < legend_room(["a rather long name of a method"] * 3)
