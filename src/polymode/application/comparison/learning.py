"""How a run learned, epoch by epoch, and whether it went on for too long or not long enough."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polymode.training import epochs_of

# Nats of validation NLL, the mean over members, that the end of a training must lose or win to be told.
OVER, UNDER, LAST_PART = 0.05, 0.02, 0.1


def learning_of(folder: Path) -> dict[str, Any]:
    """Means over members after every epoch, by member-epochs: validation NLL, training losses, measures."""
    epochs = epochs_of(folder)
    known = _means(epochs, lambda epoch: epoch["validation"].get("nll", []))
    trained = [epoch for epoch in epochs if epoch["learning_rates"]]
    last = trained[-1] if trained else {}
    # Members of a sequence are taken all along its way, not at one best epoch.
    in_turn = sum(bool(epoch.get("restart")) for epoch in epochs) > 1
    return {
        "stopped": bool(last.get("stopped")),
        "keeps": bool(last.get("keeps_best")) and not in_turn,
        "member_epochs": [epoch["member_epochs"] for epoch, _ in known],
        "validation_nll": [mean for _, mean in known],
        "trace": _trace(epochs),
        "measures": _measures(epochs),
    }


def training_mark(curve: Sequence[float], *, stopped: bool, keeps: bool) -> str:
    """Whether a training went on for too long or not long enough, by its validation NLL epoch by epoch.

    Over-trained: it ends OVER above its best epoch, and does not go back to that. Under-trained: its last
    tenth has won UNDER or more, and nothing has ended it before its time.

    >>> training_mark([2.0, 1.0, 0.5, 0.9], stopped=False, keeps=False)
    'over-trained'
    >>> training_mark([2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2], stopped=False, keeps=True)
    'under-trained'
    """
    if len(curve) < 4:
        return ""
    part = max(1, round(LAST_PART * len(curve)))
    before = min(curve[:-part])  # a curve that falls to its end is no worse than its best epoch before
    if not keeps and sum(curve[-part:]) / part - before > OVER:
        return "over-trained"
    if not stopped and before - min(curve[-part:]) > UNDER:
        return "under-trained"
    return ""


def _trace(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean loss of every epoch, and the places where a chain begins a new training.

    sampled: whether there are epochs without an optimiser; their losses leave the prior term out.
    """
    known = _means(epochs, lambda epoch: epoch["losses"])
    return {
        "member_epochs": [epoch["member_epochs"] for epoch, _ in known],
        "loss": [mean for _, mean in known],
        "restarts": [place for place, (epoch, _) in enumerate(known) if epoch.get("restart")],
        "sampled": any(not epoch["learning_rates"] for epoch, _ in known),
    }


def _measures(epochs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Means over members of what a method measures of them, such as their sparsity, by its name."""
    found = {}
    for name in dict.fromkeys(name for epoch in epochs for name in epoch.get("measures", ())):
        known = _means(epochs, lambda epoch, name=name: epoch.get("measures", {}).get(name, []))
        found[name] = {
            "member_epochs": [epoch["member_epochs"] for epoch, _ in known],
            "mean": [mean for _, mean in known],
        }
    return found


def _means(
    epochs: Sequence[Mapping[str, Any]], values: Callable[[Mapping[str, Any]], Sequence[float | None]]
) -> list[tuple[Mapping[str, Any], float]]:
    """Epochs with the mean over members of some values; without those in which no member has one."""
    known = [(epoch, [v for v in values(epoch) if v is not None]) for epoch in epochs]
    return [(epoch, sum(found) / len(found)) for epoch, found in known if found]
