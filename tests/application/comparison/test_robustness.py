"""Scores on corrupted images, against hand-worked numbers and against ``evaluate``."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import polymode as pm
from polymode.application.comparison import Robustness, judge_corrupted
from polymode.data import Preprocessing
from polymode.errors import InputError


def scores(accuracy, nll=1.0):
    return {"accuracy": accuracy, "nll": nll, "ece": 0.1}


OURS = Robustness(
    scores(0.9),
    {
        "fog": {1: scores(0.8, 1.0), 5: scores(0.6, 3.0)},
        "snow": {1: scores(0.7, 2.0), 5: scores(0.5, 4.0)},
        "saturate": {1: scores(0.9, 0.5), 5: scores(0.1, 7.5)},  # not one of the fifteen
    },
)
WEAK = Robustness(scores(0.7), {name: {1: scores(0.6), 5: scores(0.2)} for name in OURS.corrupted})
WEAKER = Robustness(scores(0.5), {name: {1: scores(0.4), 5: scores(0.4)} for name in OURS.corrupted})


def test_hand_worked_numbers():
    summary = OURS.summary
    assert summary["corruption_accuracy"] == pytest.approx(3.6 / 6)
    assert summary["corruption_nll"] == pytest.approx(18 / 6)
    assert summary["corruption_error"] == pytest.approx((0.2 + 0.4 + 0.3 + 0.5) / 4)
    # Errors 0.6 and 0.8 over 1.2; beyond clean (0.1, 0.3): 0.4 and 0.6 over 0.6.
    found = OURS.against([WEAK])
    assert found["mean_corruption_error"] == pytest.approx(100 * (0.6 + 0.8) / 1.2 / 2)
    assert found["relative_corruption_error"] == pytest.approx(100 * (0.4 + 0.6) / 0.6 / 2)
    # Of two baselines the mean errors count: 0.4 + 0.6 → 0.5, 0.8 + 0.6 → 0.7, clean 0.4.
    found = OURS.against([WEAK, WEAKER])
    assert found["mean_corruption_error"] == pytest.approx(100 * (0.6 + 0.8) / 1.2 / 2)
    assert found["relative_corruption_error"] == pytest.approx(100 * (0.4 + 0.6) / 0.4 / 2)
    document = OURS.document()
    assert document["corrupted"]["fog"]["5"] == scores(0.6, 3.0)
    assert document["clean"] == scores(0.9)


def test_a_baseline_without_errors_leaves_the_ratio_undefined():
    perfect = Robustness(scores(1.0), {name: {1: scores(1.0), 5: scores(1.0)} for name in OURS.corrupted})
    assert all(math.isnan(value) for value in OURS.against([perfect]).values())
    extra = Robustness(scores(1.0), {"saturate": {1: scores(1.0)}})
    assert "corruption_error" not in extra.summary
    with pytest.raises(InputError, match="none of them was judged"):
        extra.against([extra])


def test_posteriors_are_judged_on_the_same_images_each_as_it_was_prepared():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 8, 8), generator=generator).byte()
    labels = (images[:, 0].float().mean((1, 2)) > 127).long()
    readies = [
        Preprocessing(source="images", input_shift=(shift,) * 3, input_scale=(scale,) * 3)
        for shift, scale in ((0.5, 0.25), (0.0, 1.0))
    ]
    posteriors = [
        pm.fit(
            pm.methods.Single(),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)),
            pm.ArrayData(ready.inputs(images.float() / 255), labels),
            likelihood="categorical",
            epochs=2,
            progress=False,
        )
        for ready in readies
    ]
    asked, told = [], []

    def blocks(name, severity):
        asked.append((name, severity))
        return np.clip(images.numpy().astype(int) + 20 * severity, 0, 255).astype(np.uint8), labels.numpy()

    found = judge_corrupted(
        list(zip(posteriors, readies, strict=True)),
        (images.numpy(), labels.numpy()),
        blocks,
        ["fog", "snow"],
        [2, 4],
        progress=lambda done, name: told.append((done, name)),
    )
    assert asked == [("fog", 2), ("fog", 4), ("snow", 2), ("snow", 4)]  # once for both posteriors
    assert told == [(0, "fog"), (1, "snow")]
    for posterior, ready, robustness in zip(posteriors, readies, found, strict=True):
        for severity, seen in ((0, robustness.clean), (4, robustness.corrupted["snow"][4])):
            raw = (images.int() + 20 * severity).clamp(max=255).float() / 255
            expected = pm.evaluate(posterior, pm.ArrayData(ready.inputs(raw), labels))
            assert seen == {key: expected[key] for key in ("accuracy", "nll", "ece")}
