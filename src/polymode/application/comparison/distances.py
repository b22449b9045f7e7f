"""Distances to a reference, in words."""

from collections.abc import Mapping

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
