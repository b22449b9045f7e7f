"""Views that need nothing but what networks say: anybody's probabilities will do."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polymode.application.atlas.view import Number, View, array
from polymode.application.plots import (
    diversity_figure,
    map_figure,
    matrices_figure,
    pairs_figure,
    sizes_figure,
)
from polymode.landscape import Pairs, by_ensemble_size, embedding, scores_of, theory, within_and_between
from polymode.metrics import disagreement, disagreement_matrix, jensen_shannon, js_matrix, kl_matrix

MOST_IN_MATRIX = 120  # networks; more are thinned evenly within their runs
MOST_IN_SUBSETS = 10  # runs, of which all subsets are judged: a thousand


@dataclass(frozen=True)
class Opinions:
    """What the networks of a run say of the same points.

    values: [M, N, C], probabilities of classes (or, of numbers, whatever tells functions apart). kind: what
    the networks are, for symbols and words: "trajectory", "end", "member", or the name of a subspace.
    """

    label: str
    values: Tensor
    kind: str = "member"

    @property
    def number(self) -> int:
        return len(self.values)

    def thinned(self, most: int) -> "Opinions":
        """At most so many of the networks, spread evenly, with the last one."""
        if self.number <= most:
            return self
        kept = [round(place * (self.number - 1) / (most - 1)) for place in range(most)] if most > 1 else [-1]
        return replace(self, values=self.values[kept])


Difference = Callable[[Tensor], Tensor]  # of values [M, N, ...] to a matrix [M, M]


def similarity_view(
    groups: Sequence[Opinions],
    *,
    key: str = "similarity",
    title: str = "How networks differ, pair by pair",
    of: str = "",
    difference: tuple[str, Difference] | None = None,
    cosine: Tensor | None = None,
) -> View | None:
    """Matrices of all pairs of networks; within runs and between them as numbers.

    of: what the networks are, for the names of numbers. difference: its name and how it is computed, for
    values that are not probabilities. cosine: of weights, for the same networks in the same order.
    """
    count = sum(group.number for group in groups)
    if count < 2:
        return None
    values = torch.cat([group.values for group in groups])
    runs = [group.label for group in groups for _ in range(group.number)]
    if difference is None:
        found = {
            "disagreement": disagreement_matrix(values),
            "KL divergence (nats)": kl_matrix(values),
            "JS divergence of pairs (nats)": js_matrix(values),
        }
    else:
        found = {difference[0]: difference[1](values)}
    if cosine is not None:
        found["cosine of weights"] = cosine
    numbers = []
    for name, matrix in found.items():
        inside, across = within_and_between(matrix, [runs.index(run) for run in runs])
        numbers += Number.of(f"{of}{name}, within a run", inside, "mean over pairs of its networks")
        numbers += Number.of(f"{of}{name}, between runs", across, "mean over pairs of runs")
    caption = (
        "Each pair of networks on the test points: the share of points with different labels, the mean KL "
        "divergence from the row's network to the column's, and the mean Jensen–Shannon divergence."
        if difference is None
        else f"Each pair of networks on the test points: {difference[0]}."
    )
    if cosine is not None:
        caption += " Last: the cosine of their weights and biases."
    if len(groups) < count:
        caption += " Lines divide runs; within a run networks are in order."
    arrays = {name: array(matrix) for name, matrix in found.items()} | {"runs": np.array(runs)}
    figure = matrices_figure(title, found_arrays(found), runs)
    return View(key, title, caption, figure, arrays, numbers, _sentence(found, groups, of))


def _sentence(found: dict[str, Tensor], groups: Sequence[Opinions], of: str) -> str:
    """The answer that most readers come for."""
    if of or "disagreement" not in found or len(groups) < 2:
        return ""
    _, across = within_and_between(
        found["disagreement"], [p for p, g in enumerate(groups) for _ in range(g.number)]
    )
    assert across is not None
    return f"Networks of two runs disagree on {across.mean:.1%} of the points."


def found_arrays(found: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Matrices as figures want them."""
    return {name: array(matrix) for name, matrix in found.items()}


def pairs_view(
    groups: Sequence[Opinions], *, key: str = "pairs", ordered: bool = True, of: str = ""
) -> View | None:
    """How far networks of one run are apart, beside networks of two runs.

    ordered: networks of a run stand in their order, so that of two runs the last ones are compared; otherwise
    all of them are. of: what the networks of one run are, in words.
    """
    values = torch.cat([group.values for group in groups])
    numbers_of = [place for place, group in enumerate(groups) for _ in range(group.number)]
    if len(groups) < 2 or len(values) == len(groups):
        return None
    inside, across = within_and_between(disagreement_matrix(values), numbers_of)
    if ordered:
        ends = disagreement_matrix(torch.cat([group.values[-1:] for group in groups]))
        _, across = within_and_between(ends, list(range(len(groups))))
    assert inside is not None
    assert across is not None
    title = "Within a run and between runs"
    last = "final networks" if ordered else "networks"
    bars = [
        {
            "label": "two networks of one run",
            "mean": inside.mean,
            "error": _error(inside),
            "group": "within",
        },
        {"label": f"{last} of two runs", "mean": across.mean, "error": _error(across), "group": "between"},
    ]
    caption = (
        f"Mean disagreement of two networks of one run{of} and of the {last} of two runs. Bars: one standard "
        "error over runs; between runs by leaving out one run at a time."
    )
    ratio = Number(
        "disagreement between runs / within a run",
        across.mean / max(inside.mean, 1e-12),
        note=f"{last} of two runs over networks of one run{of}",
    )
    arrays = {"within": np.array([inside.mean, inside.standard_error, inside.count])}
    arrays |= {"between": np.array([across.mean, across.standard_error, across.count])}
    sentence = f"Two networks of one run{of} disagree on {inside.mean:.1%} of the points."
    figure = pairs_figure(title, bars, "disagreement")
    return View(key, title, caption, figure, arrays, [ratio], sentence)


def _error(pairs: Pairs) -> float | None:
    return None if math.isnan(pairs.standard_error) else pairs.standard_error


def map_view(groups: Sequence[Opinions], *, key: str = "map", seed: int = 0) -> View | None:
    """A t-SNE map of functions; groups of one label share a colour."""
    count = sum(group.number for group in groups)
    if count < 4:
        return None
    places = embedding(torch.cat([group.values for group in groups]), seed=seed)
    points, start = [], 0
    for group in groups:
        part = places[start : start + group.number]
        start += group.number
        points.append(
            {
                "x": part[:, 0].tolist(),
                "y": part[:, 1].tolist(),
                "label": group.label,
                "kind": group.kind,
                "numbers": list(range(group.number)),
            }
        )
    caption = (
        "Each point is a network, placed by its predictions for the test points (t-SNE): neighbours predict "
        "alike. Distances between separate groups mean little."
    )
    arrays = {
        "places": array(places),
        "runs": np.array([g.label for g in groups for _ in range(g.number)]),
        "kinds": np.array([g.kind for g in groups for _ in range(g.number)]),
    }
    return View(key, "A map of functions", caption, map_figure(points), arrays)


def plane_view(
    base: Tensor, groups: Sequence[Opinions], labels: Tensor, *, base_name: str, key: str = "plane"
) -> View | None:
    """Accuracy and disagreement with one network, between the limits of Appendix D of Fort et al. (2019).

    base: probabilities [N, C] of the network that others are compared with.
    """
    if not groups:
        return None
    num_classes = base.shape[-1]
    answers = base.argmax(-1)
    accuracy = float((answers == labels).double().mean())
    samples, everything = {}, []
    for group in groups:
        said = group.values.argmax(-1)
        right = (said == labels).double().mean(-1)
        apart = (said != answers).double().mean(-1)
        entry = samples.setdefault(group.label, {"accuracy": [], "disagreement": []})
        entry["accuracy"] += right.tolist()
        entry["disagreement"] += apart.tolist()
        if group.kind != "end":
            everything += list(zip(right.tolist(), apart.tolist(), strict=True))
    limits, fitted, numbers = None, None, []
    if num_classes * accuracy > 1 and accuracy < 1:
        lowest = min([1 / num_classes, *(a for each in samples.values() for a in each["accuracy"])])
        highest = max([accuracy, *(a for each in samples.values() for a in each["accuracy"])])
        grid = torch.linspace(lowest, highest, 200, dtype=torch.float64)
        lower = theory.perturbed_disagreement(grid, accuracy, num_classes)
        lower[grid > accuracy] = torch.nan
        upper = theory.independent_disagreement(grid, accuracy, num_classes)
        limits = {"accuracy": grid.tolist(), "lower": lower.tolist(), "upper": upper.tolist()}
        inside = [(a, d) for a, d in everything if a <= accuracy]
        if len(inside) >= 3:
            exponent = theory.fit_exponent(
                [a for a, _ in inside], [d for _, d in inside], accuracy, num_classes
            )
            flips = torch.linspace(0, 1, 400, dtype=torch.float64) ** 2
            on_curve = theory.family(flips, exponent, accuracy, num_classes)
            kept = on_curve[0] >= lowest
            fitted = {
                "exponent": exponent,
                "accuracy": on_curve[0][kept].tolist(),
                "disagreement": on_curve[1][kept].tolist(),
            }
            numbers.append(Number("exponent e of the fitted family p₋ = p₊^e", exponent))
    for name, each in samples.items():
        far = [d / (1 - a) for a, d in zip(each["accuracy"], each["disagreement"], strict=True) if a < 1]
        if far:
            numbers.append(Number(f"disagreement / (1 − accuracy), {name}", float(np.mean(far))))
    figure = diversity_figure(
        samples, base_accuracy=accuracy, num_classes=num_classes, limits=limits, fitted=fitted
    )
    caption = (
        f"Each network compared with {base_name} (the star at zero): more accurate to the right, more "
        "different upwards, relative to its own error. Dashed: labels of the base flipped at random (lower "
        "limit) and independent errors (upper limit)."
    )
    arrays = {f"{name}, {what}": np.array(v) for name, each in samples.items() for what, v in each.items()}
    arrays["base accuracy"] = np.array(accuracy)
    return View(key, "Diversity and accuracy", caption, figure, arrays, numbers)


def sizes_view(families: dict[str, Tensor], labels: Tensor, *, key: str = "sizes") -> View | None:
    """Scores against the number of runs in an ensemble.

    families: by the name of what is averaged within a run, what each run then says, [R, N, C].
    """
    if not families or min(len(values) for values in families.values()) < 2:
        return None
    curves, numbers, arrays = {}, [], {}
    for name, values in families.items():
        found = by_ensemble_size(values[:MOST_IN_SUBSETS], labels)
        curves[name] = {
            "num_runs": [each.num_runs for each in found],
            **{score: [each.scores[score] for each in found] for score in ("accuracy", "nll", "brier")},
            "spreads": {s: [each.spreads[s] for each in found] for s in ("accuracy", "nll", "brier")},
        }
        kept = ("num_runs", "accuracy", "nll", "brier")
        arrays |= {f"{name}, {score}": np.array(curves[name][score]) for score in kept}
        for each in (found[0], found[-1]):
            runs = "1 run" if each.num_runs == 1 else f"{each.num_runs} runs"
            numbers.append(Number(f"accuracy, {name}, {runs}", each.scores["accuracy"]))
    caption = (
        "Means over all subsets of that many runs. Within a run predictions are averaged first, then over "
        "runs. Bars: deviation over subsets, which share runs."
    )
    if max(len(values) for values in families.values()) > MOST_IN_SUBSETS:
        caption += f" Of the first {MOST_IN_SUBSETS} runs."
    return View(key, "Ensembles of runs", caption, sizes_figure(curves), arrays, numbers)


def subspace_sizes_view(
    name: str, draws: Sequence[Tensor], labels: Tensor, *, key: str = "subspace-sizes"
) -> View | None:
    """Scores against the number of networks drawn around each run, a line a number of runs.

    draws: what the draws around each run say, [D, N, C] each.
    """
    most = min(len(values) for values in draws)
    if most < 2:
        return None
    numbers_of_draws = sorted({1, 2, 3, 5, 10, 20, 30, most} & set(range(1, most + 1)))
    curves: dict[str, dict] = {}
    for number in numbers_of_draws:
        means = torch.stack([values[:number].double().mean(0) for values in draws[:MOST_IN_SUBSETS]])
        for each in by_ensemble_size(means, labels):
            label = "1 run" if each.num_runs == 1 else f"{each.num_runs} runs"
            curve = curves.setdefault(label, {"num_runs": [], "accuracy": [], "nll": [], "brier": []})
            curve["num_runs"].append(number)
            for score in ("accuracy", "nll", "brier"):
                curve[score].append(each.scores[score])
    title = f"Networks around each run: {name}"
    caption = (
        f"Means over all subsets of that many runs, each with its first draws of {name!r}. "
        "Going to the right a run gains from its subspace, going from line to line from other runs."
    )
    arrays = {f"{label}, {what}": np.array(v) for label, each in curves.items() for what, v in each.items()}
    figure = sizes_figure(curves, title=title, x_title="networks of each run")
    return View(key, title, caption, figure, arrays)


def scores_table(groups: Sequence[Opinions], labels: Tensor | None) -> list[dict[str, str | float]]:
    """A row a run: how its networks do alone and together, and how far they are apart."""
    rows: list[dict[str, str | float]] = []
    for group in groups:
        row: dict[str, str | float] = {"run": group.label, "networks": group.number}
        if labels is not None:
            row["mean accuracy of a single network"] = float(
                (group.values.argmax(-1) == labels).double().mean()
            )
            together = scores_of(group.values.double().mean(0), labels)
            row |= {"accuracy": together["accuracy"], "NLL": together["nll"], "Brier": together["brier"]}
        if group.number > 1:
            row["disagreement"] = disagreement(group.values)
            row["JS divergence of all"] = jensen_shannon(group.values)
        rows.append(row)
    return rows
