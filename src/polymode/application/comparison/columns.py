"""The columns of a comparison: what is shown of each kind of task, and which direction is better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from polymode.judging.reference import Reference
from polymode.likelihoods import Categorical, Gaussian, Likelihood


@dataclass(frozen=True)
class Column:
    """A score: its key, its title, which values are better, and the digits after the point."""

    key: str
    title: str
    better: Literal["high", "low"] | float | None  # a number: the closer to it the better
    digits: int = 3
    explanation: str = ""

    def rank(self, value: float) -> float:
        """A number that is lower where the value is better."""
        if self.better == "high":
            return -value
        return value if not isinstance(self.better, float) else abs(value - self.better)


CLASSES = (
    Column("accuracy", "accuracy", "high", 4, "share of test points whose most probable label is right"),
    Column("nll", "NLL", "low", 4, "−log probability of the true label, in nats"),
    Column("bits_per_character", "BPC", "low", 4, "NLL in bits a token: bits per character of a text"),
    Column("brier", "Brier", "low", 4, "squared error of the probabilities, 0 to 2"),
    Column("ece", "ECE", "low", 4, "gap between confidence and accuracy, in bins of confidence"),
    Column("ood_auroc", "OOD AUROC", "high", 4, "how well entropy tells foreign points, 0.5 is chance"),
    Column(
        "disagreement", "disagree", None, 4, "share of points on which two members differ, mean over pairs"
    ),
)
LABELS = (
    Column("accuracy", "accuracy", "high", 4, "share of right labels"),
    Column("nll", "NLL", "low", 4, "−log probability of the true labels, in nats"),
)
NUMBERS = (
    Column("rmse", "RMSE", "low", 4, "root mean square error of the mean, in the target's units"),
    Column("log_density", "log density", "high", 4, "mean log density of the targets, in their units"),
    Column("coverage90", "90 % coverage", 0.9, 3, "share of targets inside the central 90 % interval"),
    Column("mean_std", "mean std", None, 4, "mean predictive standard deviation"),
    Column("disagreement", "disagree", None, 4, "difference of two members' means over the targets' spread"),
)


# Closeness to a reference predictive, where one is given.
CLASSES_TO_REFERENCE = (
    Column("agreement", "agreement", "high", 4, "share of points with the reference's most probable class"),
    Column("total_variation", "TV", "low", 4, "total variation distance to the reference, mean over points"),
)
NUMBERS_TO_REFERENCE = (
    Column("wasserstein1", "W1", "low", 4, "Wasserstein-1 distance to the reference, standardised units"),
    Column("wasserstein2", "W2", "low", 4, "Wasserstein-2 distance to the reference, standardised units"),
)


def distances_text(distances: Mapping[str, float]) -> str:
    """Distances to a reference by their titles: ``agreement 0.9800, TV 0.0210``."""
    columns = [c for c in (*CLASSES_TO_REFERENCE, *NUMBERS_TO_REFERENCE) if c.key in distances]
    return ", ".join(f"{c.title} {distances[c.key]:.{c.digits}f}" for c in columns)


def noise_floor_text(reference: Reference) -> str:
    """How far a reference is from itself, to be read beside every distance to it."""
    floor = reference.noise_floor
    if floor is None:
        return "the reference's own noise floor is not known"
    units = ", in standardised units" if reference.kind == "samples" else ""
    text = (
        f"noise floor of the reference: {distances_text(floor)} between halves of its own chains{units}; "
        "methods whose distances differ by less cannot be told apart"
    )
    effective = reference.about.get("effective_samples")
    return text if effective is None else f"{text} (its samples are worth {effective:,.0f} independent ones)"


def columns_for(likelihood: Likelihood) -> Sequence[Column]:
    """The scores that are shown for a likelihood; those that a method has not been given are left out."""
    if isinstance(likelihood, Categorical):
        return CLASSES + CLASSES_TO_REFERENCE
    return NUMBERS + NUMBERS_TO_REFERENCE if isinstance(likelihood, Gaussian) else LABELS


def quality_of(likelihood: Likelihood) -> Column:
    """The one score that gains are measured in: proper, and about the whole predictive."""
    key = "log_density" if isinstance(likelihood, Gaussian) else "nll"
    return next(column for column in columns_for(likelihood) if column.key == key)
