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
    """Mean over replicates, with its standard error where there are two or more."""

    mean: float
    standard_error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        with np.errstate(invalid="ignore"):  # an infinite score has no finite spread
            error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
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

    replicates: a dictionary for every split and seed, with "split", "seed", "scores" and "curves".
    price: member_epochs, seconds (of training one replicate), parameters, passes (to predict one point).
    num_members: None where any number can be drawn. learning: validation NLL, training losses ("trace") and
    what the method measures of its members ("measures"), against member-epochs.
    """

    label: str
    method: dict[str, Any]
    epochs: int
    replicates: Sequence[Mapping[str, Any]]
    price: Mapping[str, float]
    num_members: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    learning: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stated(self) -> str:
        """The label for a table of results."""
        return stated(self.label, self.method)

    @property
    def unit(self) -> str:
        """What standard errors are over: splits where there are several, else seeds."""
        return "split" if len({replicate["split"] for replicate in self.replicates}) > 1 else "seed"

    def values(self, key: str) -> list[float] | None:
        """A score of every unit, or None where the method has no such score.

        Seeds of one split share its data, so they are no independent repetitions: their mean is one value.
        """
        by_unit: dict[int, list[float]] = {}
        for replicate in self.replicates:
            value = replicate["scores"].get(key)
            if value is None:
                return None
            by_unit.setdefault(replicate[self.unit], []).append(value)
        return [float(np.mean(values)) for values in by_unit.values()]

    def summary(self, key: str) -> Summary | None:
        values = self.values(key)
        return None if values is None else Summary.of(values)


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
        ours, theirs = result.values(self.quality.key), self.results[0].values(self.quality.key)
        if ours is None or theirs is None or result is self.results[0]:
            return None
        rank = self.quality.rank
        return Summary.of([rank(b) - rank(a) for a, b in zip(ours, theirs, strict=True)])

    @property
    def repetitions(self) -> str:
        """What standard errors are over, in words; empty where there are none."""
        count = len(self.results[0].values(self.quality.key) or [])
        return f"{count} {self.results[0].unit}s" if count > 1 else ""

    def shown_columns(self) -> list[Column]:
        """Columns for which at least one method has a score."""
        columns = self.likelihood.columns.values()
        return [c for c in columns if any(r.summary(c.key) is not None for r in self.results)]

    # --- as data --------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a method: means, standard errors, prices, gain."""
        rows = []
        for result in self.results:
            row: dict[str, Any] = {"method": result.label, "epochs": result.epochs}
            row |= {"replicates": len(result.replicates)}
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


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
