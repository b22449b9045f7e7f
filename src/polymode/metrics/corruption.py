"""Robustness to corruptions: errors over corruptions and severities, alone or relative to a baseline.

Scores come as a mapping from a corruption's name to one number a severity; every pair of both is about the
same number of images.
"""

from collections.abc import Mapping, Sequence

from polymode.errors import InputError, require

ByCorruption = Mapping[str, Sequence[float]]


class NoErrors(InputError, ZeroDivisionError):
    """A baseline whose errors cannot be divided by."""


def corruption_mean(values: ByCorruption) -> float:
    """Mean over all pairs of corruption and severity.

    Of accuracies it is cAcc and of NLL cNLL, as pooled over all images; of errors it is the unnormalised mean
    corruption error.
    """
    _check(values)
    numbers = [number for row in values.values() for number in row]
    return sum(numbers) / len(numbers)


def mean_corruption_error(errors: ByCorruption, baseline: ByCorruption) -> float:
    """The mCE: 100 · mean over corruptions c of Σ_s E_{s,c} / Σ_s B_{s,c}; B: errors of the baseline."""
    _check_pair(errors, baseline)
    return 100 * _mean_ratio({name: (sum(row), sum(baseline[name])) for name, row in errors.items()})


def relative_corruption_error(
    errors: ByCorruption, clean: float, baseline: ByCorruption, baseline_clean: float
) -> float:
    """Relative mCE = 100 · mean over c of Σ_s (E_{s,c} − E_clean) / Σ_s (B_{s,c} − B_clean).

    B: errors of the baseline. clean, baseline_clean: errors on the images without corruption.
    """
    _check_pair(errors, baseline)
    ratios = {}
    for name, row in errors.items():
        others = baseline[name]
        ratios[name] = sum(row) - len(row) * clean, sum(others) - len(others) * baseline_clean
    return 100 * _mean_ratio(ratios)


def _mean_ratio(parts: Mapping[str, tuple[float, float]]) -> float:
    for name, (_, below) in parts.items():
        if abs(below) < 1e-12:
            raise NoErrors(
                f"The baseline makes no errors with {name}, or as many as on clean images: there is nothing "
                "to divide by. Take more images, or leave this corruption out."
            )
    return sum(above / below for above, below in parts.values()) / len(parts)


def _check(values: ByCorruption) -> None:
    lengths = {name: len(row) for name, row in values.items()}
    require(len(lengths) > 0 and all(lengths.values()), "There are no scores of corruptions.")
    require(
        len(set(lengths.values())) == 1,
        f"All corruptions must have the same number of severities, got {lengths}.",
    )


def _check_pair(errors: ByCorruption, baseline: ByCorruption) -> None:
    for values in (errors, baseline):
        _check(values)
    differing = set(errors) ^ set(baseline)
    require(
        not differing,
        f"The baseline must have the same corruptions; only one of both has {', '.join(sorted(differing))}.",
    )
    name = next(iter(errors))
    require(
        len(errors[name]) == len(baseline[name]),
        f"The baseline has {len(baseline[name])} severities, not {len(errors[name])}.",
    )
