"""The page: it stands alone, escapes what it is told, and shows what was measured."""

import json
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import ClassVar

import pytest
import torch

import polymode as pm
from polymode.application.comparison import compare
from polymode.application.plots import remaining_figure, trace_figure
from polymode.application.plots.style import COLOURS
from polymode.application.plots.trace import MOST_POINTS, MOST_TRAININGS
from polymode.application.report import write_page
from polymode.data import Split, Task
from polymode.errors import InputError
from polymode.networks.costs import Accounting
from polymode.training import epochs_of

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
EVIL = "<img src=x onerror=alert(1)></script><b>"


def task(likelihood):
    y = (X[:, 0] > 0).long() if likelihood == "categorical" else X[:, 0]
    data = pm.ArrayData(X, y, batch_size=20)
    ood = pm.ArrayData(X * 9, y) if likelihood == "categorical" else None
    outputs = 2 if likelihood == "categorical" else 1
    return Task("toy", [Split(data, data, validation=data)], likelihood, outputs, ood=ood)


def made(folder, likelihood, labels=("one", "two"), seeds=(0, 1)):
    chosen = task(likelihood)
    return compare(
        chosen,
        lambda: pm.models.MLP(3, chosen.num_outputs, (4,)),
        dict(zip(labels, (pm.methods.Single(), pm.methods.DeepEnsemble(3)), strict=False)),
        folder,
        budget=6,
        seeds=seeds,
    )


class Reader(HTMLParser):
    """Collects tags, addresses and the text of tables."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses, self.cells = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("td", "b", "span"):
            self.cells.append(data.strip())


def read(path):
    text = path.read_text()
    reader = Reader()
    reader.feed(text)
    return text, reader


@pytest.mark.parametrize(
    ("likelihood", "titles"),
    [
        (
            "categorical",
            [
                "Is it worth",
                "NLL against",
                "Training loss",
                "Reliability",
                "Confidence, in",
                "Entropy, in",
                "two: how members",
            ],
        ),
        (
            "gaussian",
            [
                "Is it worth",
                "NLL against",
                "Training loss",
                "Coverage",
                "Predictive standard",
                "two: how members",
            ],
        ),
    ],
)
def test_the_page_stands_alone_and_shows_every_figure(tmp_path, likelihood, titles):
    found = made(tmp_path / "c", likelihood)
    text, reader = read(write_page(found, tmp_path / "page.html", command="polymode compare --x"))
    assert reader.addresses == ["data:,"]  # nothing is fetched
    drawn = re.findall(r'"title":\{"font":\{"size":16\},"text":"([^"]*)"', text)
    assert len(drawn) == len(titles)
    for title, expected in zip(drawn, titles, strict=True):
        assert title.startswith(expected)
    assert "polymode compare --x" in text
    assert f"torch {torch.__version__}" in text
    for column in found.shown_columns():
        for result in found.results:
            summary = result.summary(column.key)
            if summary is not None:
                assert any(summary.text(column.digits) in cell for cell in reader.cells)


def test_strings_are_escaped_everywhere(tmp_path):
    found = made(tmp_path / "c", "categorical")
    evil = replace(
        found,
        title=EVIL,
        results=[replace(result, label=EVIL + result.label) for result in found.results],
        options={"data": EVIL},
    )
    text, reader = read(write_page(evil, tmp_path / "page.html", command=EVIL))
    assert "<img" not in text.split("</style>")[1]
    assert "img" not in reader.tags
    scripts = text.count("<script")
    assert scripts == text.count("</script>") == len(re.findall("plotly-graph-div", text)) + 1


def without_rows(replicate):
    """A replicate of which nothing is known about single test rows."""
    return {key: value for key, value in replicate.items() if key not in ("errors", "log_prob")}


def with_scores(found, scores, seeds):
    """The comparison with other NLLs, a list a method, that vary by seeds alone."""
    results = []
    for label, values in scores.items():
        base = found.results[0]
        first = without_rows(base.replicates[0])
        replicates = [
            {**first, "seed": seed, "scores": {**first["scores"], "nll": value}}
            for seed, value in zip(range(seeds), values, strict=True)
        ]
        results.append(replace(base, label=label, replicates=replicates))
    return replace(found, results=results)


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (
            {"one": [1.0, 2.0, 3.0], "two": [0.9, 1.8, 2.9], "wild": [0.1, 2.5, 2.0]},  # wild: 0.47 ±0.49
            "The largest decided gain in NLL is that of <b>two</b>: 0.1333 ± 0.0333 better than one",
        ),
        (
            {"one": [1.0, 2.0, 3.0], "two": [0.9, 2.1, 2.9], "three": [1.5, 2.5, 3.5]},
            "Undecided: no other network has a better NLL than <b>one</b> by more than two standard errors; "
            "two is ahead by 0.0333 ± 0.0667.",
        ),
        (
            {"one": [1.0, 2.0, 3.0], "two": [1.1, 1.9, 3.1]},
            "two is behind by 0.0333 ± 0.0667.",
        ),
        (
            {"one": [1.0, 2.0, 3.0], "two": [1.1, 2.2, 3.1]},
            "At this budget no other network has a better NLL than <b>one</b>; the nearest, two, is behind "
            "by 0.1333 ± 0.0333.",
        ),
        ({"one": [1.0], "two": [0.5]}, "two is ahead by 0.5000 (one replicate, no standard error)."),
    ],
)
def test_the_sentence_at_the_top_claims_only_what_is_decided(tmp_path, scores, sentence):
    found = made(tmp_path / "c", "categorical", labels=("one",), seeds=(0,))
    found = with_scores(found, scores, len(scores["one"]))
    text, _ = read(write_page(found, tmp_path / "page.html"))
    assert sentence in text.split('<p class="summary">')[1].split("</p>")[0]
    undecided = sum(1 for r in found.results if (g := found.gain(r)) and not g.is_decided)
    assert text.split("<h2>Gain and price</h2>")[1].split("</table>")[0].count("undecided") == undecided


def test_one_method_and_one_seed_make_a_page_too(tmp_path):
    found = made(tmp_path / "c", "categorical", labels=("one",), seeds=(0,))
    text, _ = read(write_page(found, tmp_path / "page.html"))
    assert "add others with --methods" in text
    scores = text.split("<h2>Scores</h2>")[1].split("</table>")[0]
    # One seed has the error over its test rows: of the NLL that of the mean of their log probabilities.
    [replicate] = found.results[0].replicates
    log_prob = replicate["log_prob"].double()
    error = log_prob.std().item() / len(log_prob) ** 0.5
    assert f"{-log_prob.mean().item():.4f} ±{error:.4f}" in scores
    assert "Mean ± one standard error over the test rows." in text
    alone = replace(found, results=[replace(found.results[0], replicates=[without_rows(replicate)])])
    text, _ = read(write_page(alone, tmp_path / "page.html"))
    assert "±" not in text.split("<h2>Scores</h2>")[1].split("</table>")[0]
    assert "One split, one seed: no standard errors." in text


def test_without_plotly_the_error_says_what_to_install(tmp_path, monkeypatch):
    import sys

    found = made(tmp_path / "c", "categorical", labels=("one",), seeds=(0,))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"pip install 'polymode\[report\]'"):
        write_page(found, tmp_path / "page.html")
    assert json.loads((tmp_path / "c/results.json").read_text())["rows"]  # the results are there all the same


# --- training losses -----------------------------------------------------------------------------------


def test_a_trace_is_the_mean_loss_of_every_epoch_with_the_beginnings_of_trainings(tmp_path):
    chosen = task("categorical")
    walk = pm.samplers.GuidedWalk(step=2.0)  # crosses the prior in the few steps there are
    found = compare(
        chosen,
        lambda: pm.models.MLP(3, 2, (4,)),
        {
            "together": pm.methods.Anchored(4),
            "in_turn": pm.methods.SequentialAnchored(2, first_epochs=4, walk=walk),
            "sampled": pm.methods.HMC(num_chains=2, num_samples=4),
        },
        tmp_path / "c",
        budget=24,
        seeds=(0, 1),
    )
    traces = {result.label: result.learning["trace"] for result in found.results}
    for label, trace in traces.items():
        epochs = epochs_of(tmp_path / "c" / label)
        means = [sum(epoch["losses"]) / len(epoch["losses"]) for epoch in epochs]
        assert trace["loss"] == pytest.approx(means)
        assert trace["member_epochs"] == [epoch["member_epochs"] for epoch in epochs]
        assert trace["sampled"] == (label == "sampled")
    assert traces["together"]["restarts"] == traces["sampled"]["restarts"] == []
    assert traces["together"]["member_epochs"] == [4.0, 8.0, 12.0, 16.0, 20.0, 24.0]
    assert traces["in_turn"]["restarts"] == [0, 4, 6, 8, 10]  # 4 epochs, then 2 at a time
    text, _ = read(write_page(found, tmp_path / "page.html"))
    assert "in_turn, 5 trainings in turn" in text
    assert "side by side, not one after another" in text
    assert "Samplers: the data term alone" in text


def test_results_without_traces_make_a_page_without_their_figure(tmp_path):
    found = made(tmp_path / "c", "categorical", seeds=(0,))
    empty = {"member_epochs": [], "loss": [], "restarts": [], "sampled": False}
    learning = [{"member_epochs": [], "validation_nll": []}, {"trace": empty}]
    old = [replace(result, learning=known) for result, known in zip(found.results, learning, strict=True)]
    text, _ = read(write_page(replace(found, results=old), tmp_path / "page.html"))
    assert "NLL against" in text
    assert "Training loss" not in text


def chain(trainings, first=6, short=2):
    """Losses of a chain that jump up at the beginning of each training and fall until its end."""
    losses, restarts = [], []
    for training in range(trainings):
        restarts.append(len(losses))
        losses += [1.0 + training / 1000 + 2.0 ** -(i + 1) for i in range(short if training else first)]
    return {"member_epochs": list(range(1, len(losses) + 1)), "loss": losses, "restarts": restarts}


def test_few_trainings_have_a_dot_each_and_many_a_line_through_their_ends():
    few = chain(5)
    line, dots = trace_figure({"few": few}).data
    assert (list(line.x), list(line.y)) == (few["member_epochs"], few["loss"])
    assert list(dots.x) == [1, 7, 9, 11, 13]
    assert list(dots.y) == [few["loss"][i] for i in (0, 6, 8, 10, 12)]
    many = chain(MOST_TRAININGS + 1)
    faint, line = trace_figure({"many": many}).data
    assert list(faint.y) == many["loss"]
    assert list(line.x) == [1, 2, 3, 4, 5, *range(6, 6 + 2 * MOST_TRAININGS + 1, 2)]
    assert list(line.y) == [many["loss"][x - 1] for x in line.x]
    assert {faint.legendgroup, line.legendgroup} == {"many"}
    assert (faint.showlegend, line.name) == (False, f"many, {MOST_TRAININGS + 1} trainings in turn")


def test_long_traces_are_thinned_to_their_extremes():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).exp()
    values[1234], values[8765] = 1e-3, 1e3  # one epoch each: they must not be lost
    x = list(range(10_000))
    [line] = trace_figure({"long": {"member_epochs": x, "loss": values.tolist()}}).data
    kept = torch.tensor(line.x)
    assert len(kept) <= MOST_POINTS + 2
    assert kept[[0, -1]].tolist() == [0, 9999]
    assert {1234, 8765} <= set(kept.tolist())
    assert (kept.diff() > 0).all()
    torch.testing.assert_close(torch.tensor(line.y), values[kept])
    for stretch in values.split(20):  # nothing that is left out lies outside of what is drawn beside it
        assert stretch.min() in values[kept]
        assert stretch.max() in values[kept]


@pytest.mark.parametrize(
    ("losses", "axis"), [((0.1, 2.0), "log"), ((0.5, 2.0), None), ((-0.1, 2.0), None), ((1e-6, 1e6), "log")]
)
def test_losses_of_many_sizes_have_a_logarithmic_axis(losses, axis):
    drawn = trace_figure({"one": {"member_epochs": [1, 2], "loss": losses, "restarts": []}})
    assert drawn.layout.yaxis.type == axis


# --- what remains --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thinned(pm.methods.Single):
    """Units of the first layer count as gone where their weights have a negative sum."""

    name: ClassVar[str] = "thinned"

    def phases(self, problem, epochs):
        accounting = Accounting.of(problem.network.module, problem.example)
        [first] = accounting.layers

        def measure(state):
            active = state.members.stacked[f"{first}.weight"].sum(-1) > 0
            shares = accounting.shares({first: active})
            shares = {f"{name}_remaining": share for name, share in shares.items()}
            return shares | {"units": active.sum(-1)}

        return [replace(phase, measure=measure) for phase in super().phases(problem, epochs)]


def test_what_remains_is_drawn_for_the_methods_that_measure_it(tmp_path):
    found = compare(
        task("categorical"),
        lambda: pm.models.MLP(3, 2, (4,)),
        {"dense": pm.methods.Single(), "thin": pm.methods.DeepEnsemble(3, of=Thinned())},
        tmp_path / "c",
        budget=6,
        seeds=(0, 1),
    )
    dense, thin = (result.learning["measures"] for result in found.results)
    assert dense == {}
    assert thin.keys() == {"parameters_remaining", "multiplications_remaining", "units"}
    epochs = epochs_of(tmp_path / "c/thin")
    for name, line in thin.items():
        means = [sum(epoch["measures"][name]) / 6 for epoch in epochs]  # three members on two seeds
        assert line["mean"] == pytest.approx(means)
        assert line["member_epochs"] == [epoch["member_epochs"] for epoch in epochs] == [3.0, 6.0]
    units, share = thin["units"]["mean"], thin["parameters_remaining"]["mean"]
    assert share == pytest.approx([(10 + 3 * each) / 22 for each in units], rel=1e-5)  # as logged
    text, _ = read(write_page(found, tmp_path / "page.html"))
    figure = text.split("<figure>")[4]
    assert all(words in figure for words in ("What remains", '"thin"', "multiplications remaining"))
    assert not any(words in figure for words in ('"dense"', "units"))


def test_shares_that_remain_have_a_colour_a_method_and_a_dash_a_quantity():
    line = {"member_epochs": [1.0, 2.0, 3.0], "mean": [1.0, 0.8, 0.5]}
    other = {"member_epochs": [2.0, 4.0, 6.0], "mean": [0.9, 0.7, 0.6]}
    methods = {
        "dense": {},
        "thin": {"parameters": line, "multiplications": other},
        "wide": {"multiplications": line},
    }
    drawn = remaining_figure(methods)
    *lines, solid, dashed = drawn.data
    assert [line.name for line in lines] == ["thin", "thin", "wide"]
    assert [line.showlegend for line in lines] == [True, False, True]
    assert [line.line.color for line in lines] == [COLOURS[1], COLOURS[1], COLOURS[2]]
    assert [line.line.dash for line in lines] == ["solid", "dash", "dash"]
    assert (solid.name, solid.line.dash) == ("parameters", "solid")
    assert (dashed.name, dashed.line.dash) == ("multiplications", "dash")
    assert (list(drawn.data[1].x), list(drawn.data[1].y)) == ([2.0, 4.0, 6.0], [0.9, 0.7, 0.6])
    long = {"member_epochs": list(range(10_000)), "mean": [1 / (1 + i) for i in range(10_000)]}
    thinned, _ = remaining_figure({"long": {"parameters": long}}).data
    assert len(thinned.x) <= MOST_POINTS + 2
    assert thinned.y[-1] == long["mean"][-1]
