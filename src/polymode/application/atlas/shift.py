"""Networks on data that drift away: corrupted images and foreign ones (Fort et al. 2019, Figure 9)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from polymode.application.atlas.material import Material
from polymode.application.atlas.view import Number, View
from polymode.application.datasets.corruptions.reading import Blocks, image_bytes, made_blocks
from polymode.application.plots import pairs_figure, shift_figure
from polymode.landscape import scores_of
from polymode.metrics import jensen_shannon
from polymode.posteriors import Particles

SAMPLES = 5  # networks of each way whose divergence is taken, as in the paper, or fewer


def ways(material: Material) -> dict[str, list[Particles]]:
    """Ways to several networks, each a list of samples of one number: one a training, or one in all."""
    found: dict[str, list[Particles]] = {}
    if len(material.tracks) >= 2:
        ends = [track.end for track in material.tracks[:SAMPLES]]
        found["independent"] = [Particles(material.space.network, blocks=[b for e in ends for b in e.blocks])]
    paths = [track for track in material.tracks if track.is_trajectory]
    if paths:
        counts = {track.label: track.networks.num_members for track in paths}
        found["trajectory"] = [
            t.networks.only(range(max(0, counts[t.label] - SAMPLES), counts[t.label])) for t in paths
        ]
    for track in material.tracks[:SAMPLES]:
        for name in material.subspaces(track):
            if name == "average":
                continue
            drawn = material.drawn(track, name)
            if drawn.num_members >= 2:
                found.setdefault(name, []).append(drawn)
    # The divergence of more networks is larger: all ways have as many as the one with the fewest.
    number = min([SAMPLES, *(each.num_members for samples in found.values() for each in samples)])
    return {
        name: [each.only(range(each.num_members - number, each.num_members)) for each in samples]
        for name, samples in found.items()
    }


def _number(of_ways: dict[str, list[Particles]]) -> int:
    return next(iter(of_ways.values()))[0].num_members


def foreign_numbers(material: Material) -> tuple[list[Number], dict[str, float]]:
    """The Jensen–Shannon divergence of each way on foreign data."""
    if material.foreign is None or not material.is_classes:
        return [], {}
    numbers, means = [], {}
    for name, samples in ways(material).items():
        each = torch.tensor([jensen_shannon(material.values(s, material.foreign)) for s in samples])
        error = float(each.std() / len(each) ** 0.5) if len(each) > 1 else None
        means[name] = float(each.mean())
        numbers.append(Number(f"JS divergence on out-of-distribution data, {name}", means[name], error))
    return numbers, means


def _foreign_view(numbers: list[Number], means: dict[str, float], count: int) -> View:
    """Divergences on data outside the distribution alone."""
    title = "On out-of-distribution data"
    bars = [
        {"label": name, "mean": mean, "error": number.error, "group": name}
        for (name, mean), number in zip(means.items(), numbers, strict=True)
    ]
    caption = (
        f"Jensen–Shannon divergence of {count} networks of each method on data outside the distribution, "
        "where they should disagree. Bars: one standard error over runs."
    )
    arrays = {f"{name}, JS": np.array(mean) for name, mean in means.items()}
    figure = pairs_figure(title, bars, "JS divergence (nats)")
    return View("shift", title, caption, figure, arrays, numbers)


def shift_view(
    material: Material,
    corruptions: Sequence[str],
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    *,
    blocks: Callable[[np.ndarray, np.ndarray], Blocks] | None = None,
) -> View | None:
    """Accuracy, Brier score and divergence of each way as images are corrupted more; and on foreign data.

    blocks: gives corrupted images for clean ones (bytes) and their labels; None makes them.
    """
    foreign, means = foreign_numbers(material)
    of_ways = ways(material) if material.is_classes else {}
    if not of_ways or not (corruptions or foreign):
        return None
    if not corruptions:
        return _foreign_view(foreign, means, _number(of_ways))
    curves = {n: {"severity": [], "accuracy": [], "brier": [], "js": []} for n in of_ways}
    levels: list[tuple[int, list[Tensor]]] = [(0, [material.points.inputs])]
    clean = image_bytes(material.points.inputs, material.preprocessing), material.labels.numpy()
    made = made_blocks(clean) if blocks is None else blocks(*clean)
    for severity in severities:
        material.report(f"corrupting images, severity {severity}")
        images = [torch.from_numpy(np.array(made(name, severity)[0])) for name in corruptions]
        levels.append((severity, [material.preprocessing.inputs(each.float() / 255) for each in images]))
    for severity, inputs in levels:
        for name, samples in of_ways.items():
            found = [material.values(each, x) for each in samples for x in inputs]
            scores = [scores_of(values.double().mean(0), material.labels) for values in found]
            curves[name]["severity"].append(severity)
            for key in ("accuracy", "brier"):
                curves[name][key].append(float(np.mean([each[key] for each in scores])))
            curves[name]["js"].append(float(np.mean([jensen_shannon(values) for values in found])))
    caption = (
        f"Means over {len(corruptions)} corruptions; 0 is no corruption. Each method averages "
        f"{_number(of_ways)} networks; the divergence is that between them."
    )
    arrays = {f"{name}, {key}": np.array(v) for name, each in curves.items() for key, v in each.items()}
    arrays |= {f"{name}, JS on out-of-distribution data": np.array(value) for name, value in means.items()}
    title = "When data drift away"
    return View("shift", title, caption, shift_figure(curves, foreign=means or None), arrays, foreign)
