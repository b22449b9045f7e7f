"""Results of a comparison: means and standard errors, the best per column, gains beside prices."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polymode.judging.reference import Reference
from polymode.likelihoods import Likelihood
from polymode.methods import METHODS
from polymode.metrics.columns import Column


@dataclass(frozen=True)
class Summary:
    """Mean over replicates, with its standard error where it can be told."""

    mean: float
    standard_error: float | None
    count: int

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        row_errors: Sequence[float] | None = None,
        *,
        same_rows: bool = False,
        test_ratio: float = 0.0,
    ) -> "Summary":
        """The mean of some replicates.

        row_errors: the standard error of each over its test rows. same_rows: whether all have the same test
        rows (seeds of one split), so that their mean is no better known than one of them; those of other rows
        (splits) spread by it already, and it bounds from below what a few of them show. test_ratio: test rows
        over training rows of random splits, which share rows: s²(1/n + ratio) is the variance of their mean
        (Nadeau and Bengio 2003).
        """
        number = len(values)
        with np.errstate(invalid="ignore"):  # an infinite score has no finite spread
            spread = float(np.std(values, ddof=1)) if number > 1 else None
        error = None if spread is None else spread * math.sqrt(1 / number + test_ratio)
        if row_errors is not None:
            square = float(np.mean(np.square(row_errors)))
            if same_rows:
                error = math.sqrt(square + (error or 0.0) ** 2)
            else:
                shared = test_ratio / (1 + test_ratio)  # of the rows of a test set, with another one
                error = max(error or 0.0, math.sqrt(square * (1 + (number - 1) * shared) / number))
        return cls(float(np.mean(values)), error, len(values))

    @property
    def is_decided(self) -> bool:
        """Whether a difference is more than two of its standard errors away from zero."""
        return self.standard_error is not None and abs(self.mean) > 2 * self.standard_error

    def text(self, digits: int) -> str:
        """The mean with its error, with fewer digits where the number is large."""
        if math.isfinite(self.mean) and abs(self.mean) >= 10:
            digits = max(0, digits - int(math.log10(abs(self.mean))))
        shown = f"{self.mean:.{digits}f}"
        return shown if self.standard_error is None else f"{shown} ±{self.standard_error:.{digits}f}"


def times(number: float, other: float) -> str:
    """How many times one number is another.

    >>> times(1017, 10), times(1, 3), times(1, 0)
    ('×102', '×0.33', '–')
    """
    if not other:
        return "–"
    ratio = number / other
    return f"×{ratio:,.0f}" if ratio >= 99.5 else f"×{ratio:.2g}"


def temperature_of(method: Mapping[str, Any]) -> float | None:
    """The posterior's temperature of a method as it is described, or of the one that it is made of."""
    known = METHODS.get(str(method.get("name")))
    if known is not None and known.tempered:
        return method["temperature"]
    inner = method.get("of")
    return temperature_of(inner) if isinstance(inner, Mapping) else None


def stated(label: str, method: Mapping[str, Any]) -> str:
    """The label with what results of a sampler must be read with: T = 1 is the posterior, others are not.

    >>> stated("chains", {"name": "deep_ensemble", "of": {"name": "cyclical_sgmcmc", "temperature": 0.01}})
    'chains (T = 0.01)'
    """
    temperature = temperature_of(method)
    return label if temperature is None else f"{label} (T = {temperature:g})"


@dataclass(frozen=True)
class Result:
    """One method in a comparison.

    replicates: a dictionary for every split and seed, with "split", "seed", "scores", "errors" (of the scores
    over test rows), "curves" and "log_prob" (of every test row).
    price: member_epochs, seconds (of training one replicate), parameters, passes (to predict one point).
    num_members: None where any number can be drawn. learning: validation NLL, training losses ("trace") and
    what the method measures of its members ("measures"), against member-epochs. is_baseline: whether it is
    one of scikit-learn's. mark: "over-trained" or "under-trained", where its validation says so. calibrated:
    scores after calibration, of every split and seed.
    """

    label: str
    method: dict[str, Any]
    epochs: int
    replicates: Sequence[Mapping[str, Any]]
    price: Mapping[str, float]
    num_members: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    learning: Mapping[str, Any] = field(default_factory=dict)
    is_baseline: bool = False
    mark: str = ""
    calibrated: Sequence[Mapping[str, float]] = ()

    @property
    def stated(self) -> str:
        """The label for a table of results."""
        return stated(self.label, self.method)

    @property
    def num_splits(self) -> int:
        return len({replicate["split"] for replicate in self.replicates})

    @property
    def unit(self) -> str:
        """What standard errors are over: splits where there are several, else seeds."""
        return "split" if self.num_splits > 1 else "seed"

    def values(self, key: str, kind: str = "scores") -> list[float] | None:
        """A score of every unit, or None where the method has no such score; kind: or "errors" over rows.

        Seeds of one split share its data, so they are no independent repetitions: their mean is one value.
        """
        return self.by_unit([replicate.get(kind, {}).get(key) for replicate in self.replicates])

    def by_unit(self, values: Sequence[float | None]) -> list[float] | None:
        """Means over the replicates of every unit of a value that each has; None where one lacks it."""
        found: dict[int, list[float]] = {}
        for replicate, value in zip(self.replicates, values, strict=True):
            if value is None:
                return None
            found.setdefault(replicate[self.unit], []).append(value)
        return [float(np.mean(values)) for values in found.values()]

    def summary(self, key: str) -> Summary | None:
        values = self.values(key)
        if values is None:
            return None
        errors = self.values(key, "errors")
        return Summary.of(values, errors, same_rows=self.unit == "seed", test_ratio=self.test_ratio)

    @property
    def test_ratio(self) -> float:
        """Test rows over other rows, where there are several splits that share them."""
        ratios = [replicate.get("test_ratio", 0.0) for replicate in self.replicates]
        return float(np.mean(ratios)) if self.unit == "split" else 0.0


@dataclass(frozen=True)
class Comparison:
    """All results, in the columns of their likelihood; the first is what gains are measured against.

    reference: what distances are measured to, where there are any.
    """

    title: str
    likelihood: Likelihood
    results: Sequence[Result]
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    reference: Reference | None = None

    @property
    def quality(self) -> Column:
        """The score that gains are measured in."""
        return self.likelihood.columns[self.likelihood.quality]

    def best(self, column: Column) -> set[str]:
        """Labels of the results with the best mean, as far as the digits shown can tell."""
        if column.better is None:
            return set()
        ranks = {
            result.label: round(column.rank(summary.mean), column.digits)
            for result in self.results
            if (summary := result.summary(column.key)) is not None
        }
        if len(ranks) < 2:
            return set()
        lowest = min(ranks.values())
        return {label for label, rank in ranks.items() if rank == lowest}

    def gain(self, result: Result) -> Summary | None:
        """How much better than the first result, paired over splits (or seeds); positive is better."""
        return None if result is self.results[0] else self.difference(result, self.results[0])

    def difference(self, result: Result, other: Result, prefix: str = "") -> Summary | None:
        """How much better one result is than another, paired over splits (or seeds) and over test rows.

        prefix: of the names of other scores, such as those on validation data, whose rows are not known.
        """
        key = f"{prefix}{self.quality.key}"
        ours, theirs = result.values(key), other.values(key)
        if ours is None or theirs is None:
            return None
        rank = self.quality.rank
        gains = [rank(b) - rank(a) for a, b in zip(ours, theirs, strict=True)]
        errors = None if prefix else _paired_errors(result, other)
        return Summary.of(gains, errors, same_rows=result.unit == "seed", test_ratio=result.test_ratio)

    @property
    def methods(self) -> list[Result]:
        """The results of networks."""
        return [result for result in self.results if not result.is_baseline]

    @property
    def baselines(self) -> list[Result]:
        """The results of scikit-learn's models."""
        return [result for result in self.results if result.is_baseline]

    @property
    def repetitions(self) -> str:
        """What standard errors are over, in words; empty where there are none."""
        first = self.results[0]
        count = len(first.values(self.quality.key) or [])
        rows = "the test rows" if first.values(self.quality.key, "errors") is not None else ""
        units = f"{count} {first.unit}s" if count > 1 else ""
        return " and ".join(part for part in (units, rows) if part)

    def shown_columns(self) -> list[Column]:
        """Columns for which at least one method has a score."""
        columns = self.likelihood.columns.values()
        return [c for c in columns if any(r.summary(c.key) is not None for r in self.results)]

    def before_and_after(self) -> tuple[list[str], list[list[str]]]:
        """Scores before and after calibration, means over splits and seeds: titles, and a row a method."""
        known = [result for result in self.methods if result.calibrated]
        columns = [c for c in self.shown_columns() if any(c.key in r.calibrated[0] for r in known)]
        rows = []
        for result in known:
            cells = [result.stated]
            for column in columns:
                before = result.summary(column.key)
                after = [s[column.key] for s in result.calibrated if s.get(column.key) is not None]
                shown = "–" if before is None else f"{before.mean:.{column.digits}f}"
                cells.append(f"{shown} → {sum(after) / len(after):.{column.digits}f}" if after else shown)
            rows.append([*cells, _learned(result.calibrated)])
        return ["method", *(column.title for column in columns), "learned"], rows

    # --- as data --------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a method: means, standard errors, prices, gain."""
        rows = []
        for result in self.results:
            row: dict[str, Any] = {"method": result.label, "epochs": result.epochs}
            row |= {"replicates": len(result.replicates), "baseline": result.is_baseline, "mark": result.mark}
            if (temperature := temperature_of(result.method)) is not None:
                row["temperature"] = temperature
            for column in self.shown_columns():
                summary = result.summary(column.key)
                row[column.key] = None if summary is None else summary.mean
                row[f"{column.key}_se"] = None if summary is None else summary.standard_error
            gain = self.gain(result)
            row[f"{self.quality.key}_gain"] = None if gain is None else gain.mean
            row[f"{self.quality.key}_gain_se"] = None if gain is None else gain.standard_error
            rows.append(row | dict(result.price))
        return rows

    def csv(self) -> str:
        return _csv(self.rows())

    def replicates_csv(self) -> str:
        """One flat row a method, split and seed, with every score."""
        return _csv(
            [
                {"method": result.label, "split": replicate["split"], "seed": replicate["seed"]}
                | dict(replicate["scores"])
                for result in self.results
                for replicate in result.replicates
            ]
        )

    def config(self) -> dict[str, Any]:
        """Everything but the curves, as JSON values."""
        return {
            "title": self.title,
            "rows": self.rows(),
            "methods": {result.label: result.method for result in self.results},
            "options": dict(self.options),
            "versions": dict(self.versions),
            "hardware": dict(self.hardware),
            "noise_floor": None if self.reference is None else self.reference.noise_floor,
        }


def _learned(scores: Sequence[Mapping[str, float]]) -> str:
    """The factor that calibration learned, the mean over splits and seeds."""
    for name in ("temperature", "noise_scale"):
        values = [each[name] for each in scores if name in each]
        if values:
            return f"{name.replace('_', ' ')} {sum(values) / len(values):.3g}"
    return "–"


def _paired_errors(result: Result, other: Result) -> list[float] | None:
    """Standard errors over test rows of the differences of log probabilities, for every unit."""
    errors: list[float | None] = []
    for ours, theirs in zip(result.replicates, other.replicates, strict=True):
        first, second = ours.get("log_prob"), theirs.get("log_prob")
        if first is None or second is None or first.shape != second.shape or first.numel() < 2:
            return None
        each = (first - second).double().flatten()
        errors.append((each.std() / each.numel() ** 0.5).item())
    return result.by_unit(errors)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
