"""Distances to a reference, in words."""

from collections.abc import Mapping

from polymode.application.comparison.results import Comparison
from polymode.judging.reference import Reference
from polymode.metrics.columns import TO_PROBABILITIES, by_key, to_samples

DISTANCES = by_key(*TO_PROBABILITIES, *to_samples(""))


def distances_text(distances: Mapping[str, float]) -> str:
    """Distances to a reference by their titles: ``agreement 0.9800, TV 0.0210``."""
    columns = [column for key, column in DISTANCES.items() if key in distances]
    return ", ".join(f"{c.title} {distances[c.key]:.{c.digits}f}" for c in columns)


def noise_floor_text(reference: Reference) -> str:
    """How far a reference is from itself, to be read beside every distance to it."""
    floor = reference.noise_floor
    if floor is None:
        return "the reference's own noise floor is not known"
    units = f", in {reference.units}" if reference.units else ""
    text = (
        f"noise floor of the reference: {distances_text(floor)} between halves of its own chains{units}; "
        "methods whose distances differ by less cannot be told apart"
    )
    effective = reference.about.get("effective_samples")
    return text if effective is None else f"{text} (its samples are worth {effective:,.0f} independent ones)"


def alike_texts(comparison: Comparison) -> list[str]:
    """Methods that the reference cannot tell from the closest one: their distances differ by too little.

    Agreement is not looked at: it has no such rule.
    """
    reference = comparison.reference
    floor = None if reference is None else reference.noise_floor
    lines = []
    for key, column in DISTANCES.items():
        if floor is None or key not in floor or key == "agreement":
            continue
        found = {r.label: s.mean for r in comparison.results if (s := r.summary(key)) is not None}
        if len(found) < 2:
            continue
        closest = min(found, key=lambda label: found[label])
        alike = [name for name, value in found.items() if value - found[closest] < floor[key]]
        if len(alike) == len(found):
            lines.append(f"by {column.title} to this reference, no method can be told from another")
        elif len(alike) > 1:
            others = ", ".join(name for name in alike if name != closest)
            lines.append(f"by {column.title} to this reference, {closest} cannot be told from {others}")
    return lines
