"""Which method to take, and whether a network is worth it: chosen on validation data, told by test scores."""

from dataclasses import dataclass
from typing import Any

from polymode.application.comparison.judgement import VALIDATION
from polymode.application.comparison.results import Comparison, Result, Summary

# Nats of validation quality that are not worth a higher price.
WORTH = 0.01
LEAD = 13  # characters of a line before its text


@dataclass(frozen=True)
class Verdict:
    """What a comparison recommends.

    recommended: the cheapest method whose validation quality is not behind that of the best by more than
    ``WORTH`` and one standard error. best: the method of the best validation quality. baseline: the best
    baseline by validation; None where there are none. gain: of the recommended method over that baseline on
    the test rows; over_nothing: over the baseline that knows no inputs.
    """

    recommended: Result
    best: Result
    baseline: Result | None
    gain: Summary | None
    quality: str
    digits: int
    over_nothing: Summary | None = None

    @property
    def lines(self) -> list[str]:
        """The verdict in plain sentences."""
        found = self.recommended
        price = (
            f"{found.price['passes']:.0f} forward pass{'es'[: 2 * (found.price['passes'] != 1)]} a prediction"
        )
        text = f"{found.label} ({price}, {found.price['seconds']:.1f} s of training)"
        lines = [f"{'recommended':<{LEAD}}{text}, chosen on validation data by quality and price"]
        if self.best is not found:
            lines[0] += f"; {self.best.label} is not better by more than {WORTH} nats and its error"
        if found.mark:
            lines.append(f"{'':<{LEAD}}but it is {found.mark}: give it another budget before you rely on it")
        if self.baseline is not None and self.gain is not None:
            lines.append(f"{'worth it?':<{LEAD}}{self._worth()}")
        if self.over_nothing is not None and not (
            self.over_nothing.is_decided and self.over_nothing.mean > 0
        ):
            lines.append(
                f"{'':<{LEAD}}it is not decidedly better than a model that knows no inputs: they may say "
                "little about the target"
            )
        return lines

    def _worth(self) -> str:
        assert self.baseline is not None
        assert self.gain is not None
        amount = f"{abs(self.gain.mean):.{self.digits}f}"
        if self.gain.standard_error is not None:
            amount += f" ±{self.gain.standard_error:.{self.digits}f}"
        rival = f"{self.baseline.label} (scikit-learn, {self.baseline.price['seconds']:.1f} s)"
        if not self.gain.is_decided:
            ahead = self.recommended.label if self.gain.mean > 0 else rival
            behind = rival if self.gain.mean > 0 else self.recommended.label
            return f"undecided: {ahead} is ahead of {behind} in {self.quality} by {amount} on the test rows"
        if self.gain.mean > 0:
            return f"yes: {self.quality} is better than that of {rival} by {amount} on the test rows"
        return f"no: {rival} has a better {self.quality} by {amount} on the test rows"

    def config(self) -> dict[str, Any]:
        return {
            "recommended": self.recommended.label,
            "best_on_validation": self.best.label,
            "baseline": None if self.baseline is None else self.baseline.label,
            "gain_over_baseline": None if self.gain is None else self.gain.mean,
            "gain_over_baseline_se": None if self.gain is None else self.gain.standard_error,
        }


def verdict_of(comparison: Comparison) -> Verdict | None:
    """What a comparison recommends; None where nothing was held out to choose by."""
    key = f"{VALIDATION}{comparison.quality.key}"
    rank = comparison.quality.rank

    def of_best(results: list[Result]) -> Result | None:
        known = [(rank(summary.mean), result) for result in results if (summary := result.summary(key))]
        return min(known, key=lambda entry: entry[0])[1] if known else None

    best, baseline = of_best(comparison.methods), of_best(comparison.baselines)
    if best is None:
        return None
    near = [result for result in comparison.methods if _is_near(comparison, best, result)]
    cheapest = min(near, key=lambda result: (result.price["passes"], result.price["seconds"]))
    gain = None if baseline is None else comparison.difference(cheapest, baseline)
    quality = comparison.quality
    blind = next((each for each in comparison.baselines if each.label in ("constant", "prior")), None)
    over_nothing = None if blind is None else comparison.difference(cheapest, blind)
    return Verdict(cheapest, best, baseline, gain, quality.title, quality.digits, over_nothing)


def _is_near(comparison: Comparison, best: Result, result: Result) -> bool:
    if result is best:
        return True
    ahead = comparison.difference(best, result, VALIDATION)
    return ahead is not None and ahead.mean <= WORTH + (ahead.standard_error or 0.0)
