"""The page of a comparison: tables and interactive figures in one HTML file that needs no network."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from polymode.application.comparison import (
    Comparison,
    Result,
    Summary,
    alike_texts,
    noise_floor_text,
    times,
    verdict_of,
)
from polymode.application.comparison.verdict import LEAD
from polymode.application.plots import (
    coverage_figure,
    doubt_figure,
    gain_figure,
    price_figure,
    reliability_figure,
    remaining_figure,
    similarity_figure,
    spread_figure,
    trace_figure,
)
from polymode.application.report.shell import escape as _escape
from polymode.application.report.shell import figure as _figure
from polymode.application.report.shell import require_plotly, write_shell
from polymode.application.report.shell import table as _table
from polymode.judging.reference import Reference
from polymode.metrics.columns import Column

TEMPLATE = Path(__file__).with_name("page.html")
REMAINING = "_remaining"  # how the names of measures end that are shares of a dense network


def write_page(comparison: Comparison, path: str | Path, *, command: str = "", about: str = "") -> Path:
    """Write the page and return where it is.

    command: what a reader would type to make it again. about: what the data are, in a line.
    """
    require_plotly()
    figures = "\n".join(_figure(*entry) for entry in _figures(comparison))
    body = Template(TEMPLATE.read_text()).substitute(
        title=_escape(comparison.title),
        about=_escape(about),
        verdict=_verdict(comparison),
        summary=_summary(comparison),
        marks=_marks(comparison),
        calibration=_calibration(comparison),
        repetitions=f"Mean ± one standard error over {comparison.repetitions}."
        if comparison.repetitions
        else "One split, one seed: no standard errors.",
        scores=_scores_table(comparison),
        floor="" if comparison.reference is None else _floor(comparison, comparison.reference),
        prices=_price_table(comparison),
        explanations=_explanations(comparison),
        figures=figures,
        command=_escape(command or "—"),
        versions=_escape(", ".join(f"{name} {version}" for name, version in comparison.versions.items())),
        details=_escape(json.dumps(_details(comparison), indent=2)),
    )
    return write_shell(path, comparison.title, body)


# --- words and tables ----------------------------------------------------------------------------------


def _verdict(comparison: Comparison) -> str:
    """What is recommended, and whether a network is worth it."""
    verdict = verdict_of(comparison)
    if verdict is None:
        return ""
    lines = []
    for line in verdict.lines:
        lead, text = line[:LEAD].strip(), _escape(line[LEAD:].strip())
        lines.append(f"<b>{_escape(lead.capitalize())}</b> {text}" if lead else text)
    return f'<p class="verdict">{"<br>".join(lines)}</p>'


def _marks(comparison: Comparison) -> str:
    """Trainings that went on for too long or not long enough."""
    marked = [f"{_escape(r.label)} is <b>{r.mark}</b>" for r in comparison.results if r.mark]
    if not marked:
        return ""
    return (
        f'<p class="note">{"; ".join(marked)}. Over-trained: its validation NLL ends above its best epoch, '
        "and it does not go back to that. Under-trained: it was still falling when the budget was spent.</p>"
    )


def _calibration(comparison: Comparison) -> str:
    """Scores before and after calibration, where it was asked for."""
    titles, rows = comparison.before_and_after()
    if not rows:
        return ""
    cells = [[f"<b>{_escape(row[0])}</b>", *map(_escape, row[1:])] for row in rows]
    table = _table([_escape(title) for title in titles], cells)
    return f'<h2>Before and after calibration</h2><div class="scroll">{table}</div>'


def _summary(comparison: Comparison) -> str:
    """One sentence with the answer a reader came for."""
    first = comparison.results[0]
    gains = [(r, g) for r in comparison.methods if (g := comparison.gain(r)) is not None]
    if not gains:
        return f"One method, {_escape(first.label)}: add others with --methods to compare."
    decided = [(r, g) for r, g in gains if g.is_decided and g.mean > 0]
    best, gain = max(decided or gains, key=lambda entry: entry[1].mean)
    digits = comparison.quality.digits
    quality = _escape(comparison.quality.title)
    if not gain.is_decided:
        ahead = f"{'ahead' if gain.mean > 0 else 'behind'} by {abs(gain.mean):.{digits}f}"
        return (
            f"Undecided: no other network has a better {quality} than <b>{_escape(first.label)}</b> by more "
            f"than two standard errors; {_escape(best.label)} is {ahead}{_error(gain, digits)}."
        )
    if gain.mean <= 0:
        return (
            f"At this budget no other network has a better {quality} than <b>{_escape(first.label)}</b>; the "
            f"nearest, {_escape(best.label)}, is behind by {-gain.mean:.{digits}f}{_error(gain, digits)}."
        )
    ratio = best.price["seconds"] / first.price["seconds"]
    return (
        f"The largest decided gain in {quality} is that of <b>{_escape(best.label)}</b>: "
        f"{gain.mean:.{digits}f}{_error(gain, digits)} better than {_escape(first.label)}, "
        f"for {ratio:.2g} times its seconds of training and {best.price['passes']:.0f} forward passes a "
        "prediction."
    )


def _error(gain: Summary, digits: int) -> str:
    if gain.standard_error is None:
        return " (one replicate, no standard error)"
    return f" ± {gain.standard_error:.{digits}f}"


def _gain_cell(gain: Summary | None, digits: int) -> str:
    if gain is None:
        return "–"
    text = ("+" if gain.mean > 0 else "") + _escape(gain.text(digits))
    return text if gain.is_decided else f"{text} <i>undecided</i>"


def _scores_table(comparison: Comparison) -> str:
    columns = comparison.shown_columns()
    arrows = {"high": " ↑", "low": " ↓"}
    head = ["method"] + [_escape(c.title) + arrows.get(str(c.better), "") for c in columns]
    rows = [
        [_named(result)] + [_cell(comparison, result, column) for column in columns]
        for result in comparison.results
    ]
    return _table(head, rows)


def _named(result: Result) -> str:
    """The label of a result: methods in bold, with what their training did wrong; baselines in italics."""
    if result.is_baseline:
        return f"<i>{_escape(result.stated)}</i> (scikit-learn)"
    mark = f' <span class="mark">{result.mark}</span>' if result.mark else ""
    return f"<b>{_escape(result.stated)}</b>{mark}"


def _floor(comparison: Comparison, reference: Reference) -> str:
    lines = [noise_floor_text(reference), *alike_texts(comparison)]
    return f'<p class="note">{_escape(" ".join(f"{text[:1].upper()}{text[1:]}." for text in lines))}</p>'


def _cell(comparison: Comparison, result: Result, column: Column) -> str:
    summary = result.summary(column.key)
    if summary is None:
        return "–"
    text = _escape(summary.text(column.digits))
    return f'<span class="best">{text} ★</span>' if result.label in comparison.best(column) else text


def _price_table(comparison: Comparison) -> str:
    first = comparison.results[0]
    head = [
        "method",
        f"{_escape(comparison.quality.title)} gain",
        "member-epochs",
        "seconds",
        "parameters",
        "passes to predict",
        "backend",
    ]
    rows = []
    for result in comparison.results:
        rows.append(
            [
                _named(result),
                _gain_cell(comparison.gain(result), comparison.quality.digits),
                f"{result.price['member_epochs']:,.0f}",
                f"{result.price['seconds']:,.1f} ({times(result.price['seconds'], first.price['seconds'])})",
                f"{result.price['parameters']:,.0f} "
                f"({times(result.price['parameters'], first.price['parameters'])})",
                f"{result.price['passes']:,.0f}",
                _escape(result.record.get("backend", "–")),
            ]
        )
    return _table(head, rows)


def _explanations(comparison: Comparison) -> str:
    items = [
        f"<li><b>{_escape(c.title)}</b>: {_escape(c.explanation)}</li>" for c in comparison.shown_columns()
    ]
    items += [
        "<li><b>gain</b>: difference to the first method, paired over splits or seeds; + is better; "
        "<i>undecided</i> where it is less than two standard errors, or has none</li>",
        "<li><b>member-epochs</b>: gradient passes over the training data that were spent</li>",
        "<li><b>seconds</b>: of training, divided by the replicates that were trained side by side</li>",
    ]
    return "<ul>" + "".join(items) + "</ul>"


def _details(comparison: Comparison) -> dict[str, Any]:
    return {
        "options": dict(comparison.options),
        "methods": {result.label: result.method for result in comparison.results},
        "versions": dict(comparison.versions),
        "hardware": dict(comparison.hardware),
    }


# --- figures -------------------------------------------------------------------------------------------


def _figures(comparison: Comparison) -> Iterator[tuple[Any, str]]:
    results = {_escape(result.label): result for result in comparison.results}
    count = len(comparison.results[0].replicates)
    pooled = f" All {count} replicates together." if count > 1 else ""
    if len(results) > 1:
        caption = "Gain over the first method against seconds of training; bars are one standard error."
        yield gain_figure(comparison.quality.title, _gains(comparison)), caption
    networks = {label: result for label, result in results.items() if not result.is_baseline}
    yield _price(comparison, networks)
    traces = {label: t for label, r in results.items() if (t := r.learning.get("trace")) and t["loss"]}
    if traces:
        yield trace_figure(traces), _about_traces(traces) + pooled
    remaining = {label: _remaining(r) for label, r in results.items()}  # all of them keep their colours
    if any(remaining.values()):
        caption = (
            "What is left, as a share of the dense network; the mean over the members in training. Units or "
            "weights: of those that may be left out. Parameters and multiplications: as Jantre et al. (2022) "
            "count them. Computed: what a compact network would multiply."
        )
        yield remaining_figure(remaining), caption + pooled
    reliability = {label: curve for label, r in results.items() if (curve := _reliability(r))}
    if reliability:
        caption = (
            "Below the dotted line: over-confident, above: under-confident. Larger dots hold more points;"
        )
        yield reliability_figure(reliability), f"{caption} bars are one standard error.{pooled}"
    for quantity in ("confidence", "entropy"):
        curves = {label: curve for label, r in results.items() if (curve := _histogram(r, quantity))}
        foreign = any("foreign" in curve for curve in curves.values())
        caption = "Solid: test points. Dashed: points outside the distribution, which should be less sure."
        if curves:
            yield doubt_figure(quantity, curves), (caption if foreign else "Test points.") + pooled
    coverage = {label: curve for label, r in results.items() if (curve := _coverage(r))}
    if coverage:
        caption = "Below the dotted line intervals are too narrow (over-confident), above it too wide."
        yield coverage_figure(coverage), caption + pooled
    spread = {label: curve for label, r in results.items() if (curve := _histogram(r, "std"))}
    if spread:
        drawn = spread_figure(spread, comparison.likelihood.units)
        yield drawn, "How sure the predictions are. First split and seed."
    meaning = comparison.likelihood.difference_name
    for label, result in results.items():
        curves = result.replicates[0]["curves"]
        if "difference" in curves:
            caption = f"Left: {meaning} of every pair of members on the test data."
            if curves.get("cosine"):
                caption += " Right: cosine of their weights."
            drawn = similarity_figure(label, curves["difference"], curves.get("cosine"), meaning)
            yield drawn, f"{caption} First split and seed."


def _gains(comparison: Comparison) -> list[dict[str, Any]]:
    points = []
    for result in comparison.results:
        gain = comparison.gain(result)
        points.append(
            {
                "label": _escape(result.label),
                "seconds": result.price["seconds"],
                "parameters": result.price["parameters"],
                "gain": 0.0 if gain is None else gain.mean,
                "error": None if gain is None else gain.standard_error,
            }
        )
    return points


def _price(comparison: Comparison, results: Mapping[str, Result]) -> tuple[Any, str]:
    members, learning = {}, {}
    for label, result in results.items():
        curves = [replicate["curves"]["nll_by_members"] for replicate in result.replicates]
        means = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        if result.num_members is None:  # draws cost no training: all of them stand for the whole price
            means = means[-1:]
        each = result.price["member_epochs"] / len(means)
        members[label] = ([each * (i + 1) for i in range(len(means))], means)
        if result.learning.get("member_epochs"):
            learning[label] = (result.learning["member_epochs"], result.learning["validation_nll"])
    caption = "Solid: test NLL of the first 1, 2, … members together, against what they cost."
    if learning:
        caption += " Dotted: validation NLL of the mean member while it was trained."
    if comparison.quality.key != "nll":
        caption += (
            f" NLL is minus the {comparison.quality.title}, of targets in {comparison.likelihood.units}."
        )
    return price_figure("NLL", members, learning), caption


def _about_traces(traces: Mapping[str, Mapping[str, Any]]) -> str:
    """What the lines are means of; members of one method are trained together, those of a chain in turn."""
    caption = (
        "What each method minimises, the data term and (where it has one) the prior term, per observation: "
        "the mean over an epoch and over the members trained in it."
    )
    if any(len(trace["restarts"]) > 1 for trace in traces.values()):
        caption += (
            " A dot: a chain begins its next training, where the last one ended (where there are too many, "
            "the line shows how they end). Members of an ensemble are trained side by side, not one after "
            "another as in Figure 1 of Delaunoy and Louppe (2021): their line falls once."
        )
    if any(trace["sampled"] for trace in traces.values()):
        caption += " Samplers: the data term alone, where a block of gradient passes ended."
    return caption


def _remaining(result: Result) -> dict[str, Mapping[str, Sequence[float]]]:
    """The shares that a method measures: those whose names say that they remain."""
    measures = result.learning.get("measures", {})
    return {
        _escape(name.removesuffix(REMAINING).replace("_", " ")): line
        for name, line in measures.items()
        if name.endswith(REMAINING) and line["mean"]
    }


def _summed(result: Result, *path: str) -> list[float] | None:
    """A list of counts under a path of the curves, added up over replicates."""
    lists = []
    for replicate in result.replicates:
        value: Any = replicate["curves"]
        for key in path:
            value = value.get(key) if value is not None else None
        if value is None:
            return None
        lists.append(value)
    return [sum(values) for values in zip(*lists, strict=True)]


def _reliability(result: Result) -> dict[str, list[float]] | None:
    counts = _summed(result, "reliability", "counts")
    correct = _summed(result, "reliability", "correct")
    confidence = _summed(result, "reliability", "confidence")
    if counts is None or correct is None or confidence is None:
        return None

    def per_point(sums: list[float]) -> list[float]:
        return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]

    return {"counts": counts, "accuracy": per_point(correct), "confidence": per_point(confidence)}


def _histogram(result: Result, quantity: str) -> dict[str, Any] | None:
    curve = result.replicates[0]["curves"].get(quantity)
    if curve is None:
        return None
    if quantity == "std":  # every replicate has bins of its own
        return curve
    found = {"end": curve["end"], "ordinary": _summed(result, quantity, "ordinary")}
    foreign = _summed(result, quantity, "foreign")
    return found if foreign is None else found | {"foreign": foreign}


def _coverage(result: Result) -> dict[str, Any] | None:
    observed = _summed(result, "coverage", "observed")
    if observed is None:
        return None
    nominal = result.replicates[0]["curves"]["coverage"]["nominal"]
    return {"nominal": nominal, "observed": [total / len(result.replicates) for total in observed]}
