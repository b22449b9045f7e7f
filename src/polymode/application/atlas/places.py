"""Views of weight space: planes, paths and tunnels."""

import numpy as np
import torch
from torch import Tensor

from polymode.application.atlas.material import Material, Track
from polymode.application.atlas.view import Number, View, array
from polymode.application.plots import cut_figure, path_figure, sheet_figure
from polymode.data import ArrayData
from polymode.landscape import Cut, Plane, Walk, cut, margins, sheet, walk
from polymode.landscape.networks import each_network

MOST_ON_PLANE = 60  # checkpoints of a track that are drawn


def radial_views(material: Material) -> list[View]:
    """The plane of the origin and the first two ends: accuracy and agreement, then losses (Figures 5, S1)."""
    if len(material.tracks) < 2:
        return []
    one, two = material.tracks[:2]
    a, b = material.vector(one), material.vector(two)
    plane = Plane.radial(a, b)
    corners = {
        "origin": (0.0, 0.0),
        f"end of {one.label}": plane.coordinates(a),
        f"end of {two.label}": plane.coordinates(b),
    }
    x, y = (margins([place[axis] for place in corners.values()], material.looking.grid) for axis in (0, 1))
    references = torch.cat([material.answers(track.end, material.points) for track in (one, two)])
    found = _cut(material, "radial", plane, x, y, material.points, references)
    marks = _marks(corners)
    tracks = [_on_plane(material, plane, track) for track in (one, two) if track.is_trajectory]
    scatter = []
    if "diagonal" in material.subspaces(one):
        drawn = material.space.vectors(material.drawn(one, "diagonal"))
        places = [plane.coordinates(vector) for vector in drawn]
        scatter.append(
            {
                "label": f"Gaussian samples of {one.label}",
                "x": [place[0] for place in places],
                "y": [place[1] for place in places],
            }
        )
    quality = _quality(material)
    panels = {quality[0]: quality[1](found.error)}
    for place, track in enumerate((one, two)):
        name, values = _likeness(material, found.difference[..., place], track.label)
        panels[name] = values
    title = "A plane through the origin and two ends"
    caption = (
        "Weights are x·e₁ + y·e₂. Lines: checkpoints of each training, projected onto the plane. "
        f"Judged on {material.points.num_examples} test points."
    )
    arrays = _arrays(found) | {"e1": array(plane.first), "e2": array(plane.second)}
    numbers = [Number("cosine of the first two ends", float(a @ b / (a.norm() * b.norm())))]
    views = [
        View(
            "radial",
            title,
            caption,
            cut_figure(title, array(x), array(y), _as_arrays(panels), marks, tracks, scatter),
            arrays,
            numbers,
        )
    ]
    losses = {"test loss (nats)": found.loss}
    if material.training_points is not None:
        trained = _cut(material, "radial-training", plane, x, y, material.training_points, None)
        losses = {"training loss (nats)": trained.loss} | losses
        arrays = arrays | {"training_loss": array(trained.loss)}
    if material.is_classes:
        for place, track in enumerate((one, two)):
            ratio = found.difference[..., place] / found.error.clamp(min=1e-9)
            losses[f"disagreement with {track.label} / error"] = ratio
    title = "Losses on the same plane"
    caption = "Losses on training and test points"
    caption += (
        ", and the share of labels that differ from each end over the error." if material.is_classes else "."
    )
    drawn = cut_figure(title, array(x), array(y), _as_arrays(losses), marks, tracks)
    views.append(View("radial-loss", title, caption, drawn, arrays))
    return views


def three_view(material: Material) -> View | None:
    """The plane through the ends of the first three trainings."""
    if len(material.tracks) < 3:
        return None
    vectors = [material.vector(track) for track in material.tracks[:3]]
    plane = Plane.spanned(*vectors)
    corners = {
        f"end of {t.label}": plane.coordinates(v) for t, v in zip(material.tracks, vectors, strict=False)
    }
    x, y = (margins([place[axis] for place in corners.values()], material.looking.grid) for axis in (0, 1))
    found = _cut(material, "three", plane, x, y, material.points, None)
    quality = _quality(material)
    panels = {quality[0]: quality[1](found.error), "test loss (nats)": found.loss}
    title = "A plane through three ends"
    caption = f"Between three solutions, judged on {material.points.num_examples} test points."
    figure = cut_figure(title, array(x), array(y), _as_arrays(panels), _marks(corners))
    return View("three", title, caption, figure, _arrays(found))


def path_views(material: Material) -> list[View]:
    """The straight line between two ends, beside every tunnel; and the tunnels' sheets."""
    views: list[View] = []
    for tunnel in material.tunnels:
        views.append(_path_view(material, tunnel))
        views.append(_sheet_view(material, tunnel))
    if not material.tunnels and len(material.tracks) >= 2:
        views.append(_path_view(material, None))
    return views


def _path_view(material: Material, tunnel: Track | None) -> View:
    corners: dict[str, Tensor] = {}
    if tunnel is None:
        ends = [track.end for track in material.tracks[:2]]
        names = [track.label for track in material.tracks[:2]]
        corners["straight line"] = torch.stack([material.vector(t) for t in material.tracks[:2]])
    else:
        bent = material.space.vectors(tunnel.networks)
        ends = [tunnel.networks.only([0]), tunnel.networks.only([tunnel.networks.num_members - 1])]
        names = ["the first end", "the last end"]
        corners = {"straight line": bent[[0, -1]], "tunnel": bent}
    references = torch.cat([material.answers(end, material.points) for end in ends])
    on_loss = material.training_points or material.points
    key = "path" if tunnel is None else f"path-{_place(material, tunnel)}"
    paths, arrays, numbers, highest = {}, {}, [], {}
    for name, points in corners.items():
        between = 19 if len(points) == 2 else 3
        if len(points) == 2 and tunnel is not None:
            between = 4 * (tunnel.networks.num_members - 1) - 1
        seen = _walk(material, f"{key}-{name}", points, material.points, references, between)
        lost = seen
        if on_loss is not material.points:
            lost = _walk(material, f"{key}-{name}-training", points, on_loss, None, between)
        differences = {end: array(seen.difference[:, i]) for i, end in enumerate(names)}
        paths[name] = {
            "place": array(seen.place),
            "loss": array(lost.loss),
            "error": array(seen.error),
            "differences": differences,
            "is_corner": array(seen.is_corner),
        }
        arrays |= {f"{name}, {what}": v for what, v in paths[name].items() if what != "differences"}
        arrays |= {f"{name}, difference {what}": v for what, v in differences.items()}
        highest[name] = float(lost.loss.max())
        numbers.append(Number(f"highest loss, {name}", highest[name], note=_data_name(material)))
        middle = int((seen.place - 0.5).abs().argmin())
        for place, end in enumerate(names):
            what = f"difference at the middle of the {name}, with {end}"
            numbers.append(Number(what, float(seen.difference[middle, place])))
    if tunnel is not None and material.likelihood.reads == "labels" and highest["tunnel"] > 0:
        ratio = highest["straight line"] / highest["tunnel"]  # log densities would have none
        numbers.append(Number("highest loss, straight line / tunnel", ratio))
    title = "From one solution to another" + (f": {tunnel.label}" if tunnel else "")
    caption = (
        f"Loss: {_data_name(material)}. Error and differences: test points. "
        + ("Dots: networks of the tunnel; between them lines are straight. " if tunnel else "")
        + f"{_ends_text(material, tunnel)}"
    )
    word = "error" if material.likelihood.reads == "labels" else "root mean square error"
    return View(key, title, caption, path_figure(paths, error_title=word), arrays, numbers)


def _sheet_view(material: Material, tunnel: Track) -> View:
    corners = material.space.vectors(tunnel.networks)
    inside = torch.linspace(0.0, 1.0, max(5, material.looking.grid // 2), dtype=torch.float64)
    shares = torch.cat([inside, inside[-1:] + inside[1:3]])  # a little beyond the path
    ends = tunnel.networks.only([0, tunnel.networks.num_members - 1])
    found = sheet(
        material.space,
        corners,
        shares,
        material.points,
        num_between=2,
        references=material.answers(ends, material.points),
        statistics=material.statistics,
        keep=material.folder / f"sheet-{_place(material, tunnel)}.survey.npz",
        progress=material.progress(f"sheet of {tunnel.label}"),
    )
    quality = _quality(material)
    panels = {quality[0]: array(quality[1](found.error))}
    for place, name in enumerate(("the first end", "the last end")):
        words, values = _likeness(material, found.difference[..., place], name)
        panels[words] = array(values)
    title = f"{tunnel.label}: triangles between the origin and the path"
    caption = "Each triangle has the origin and one segment of the path as corners; they stand side by side."
    figure = sheet_figure(
        title,
        array(found.angle),
        array(found.radius),
        panels,
        array(found.corner_angles),
        path_row=len(inside) - 1,
    )
    arrays = {name: array(value) for name, value in vars(found).items()}
    return View(f"sheet-{_place(material, tunnel)}", title, caption, figure, arrays)


def _ends_text(material: Material, tunnel: Track | None) -> str:
    """Which networks a path joins, where that can be told."""
    if tunnel is None:
        return f"From {material.tracks[0].label} to {material.tracks[1].label}."
    ends = {"first": 0, "last": tunnel.networks.num_members - 1}
    vectors = {name: material.space.vectors(tunnel.networks.only([i]))[0] for name, i in ends.items()}
    known = {
        name: track.label
        for name, vector in vectors.items()
        for track in material.tracks
        if torch.equal(material.vector(track), vector)
    }
    return " ".join(f"The {name} end is {label}." for name, label in known.items())


def _place(material: Material, tunnel: Track) -> str:
    """What names of files call a tunnel: labels may be of any length and hold any sign."""
    return f"tunnel-{list(material.tunnels).index(tunnel)}"


def _data_name(material: Material) -> str:
    if material.training_points is None:
        return f"{material.points.num_examples} test points"
    return f"{material.training_points.num_examples} training points"


def _cut(
    material: Material,
    key: str,
    plane: Plane,
    x: Tensor,
    y: Tensor,
    data: ArrayData,
    references: Tensor | None,
) -> Cut:
    return cut(
        material.space,
        plane,
        x,
        y,
        data,
        references=references,
        statistics=material.statistics,
        keep=material.folder / f"{key}.survey.npz",
        progress=material.progress(f"plane {key}"),
    )


def _walk(
    material: Material, key: str, corners: Tensor, data: ArrayData, references: Tensor | None, between: int
) -> Walk:
    return walk(
        material.space,
        corners,
        data,
        num_between=between,
        references=references,
        statistics=material.statistics,
        keep=material.folder / f"{key.replace(' ', '-')}.survey.npz",
        progress=material.progress(key),
    )


def _quality(material: Material):
    """How errors are shown: as accuracy where they are shares."""
    if material.likelihood.reads == "labels":
        return "accuracy", lambda error: 1 - error
    return "root mean square error", lambda error: error


def _likeness(material: Material, difference: Tensor, name: str) -> tuple[str, Tensor]:
    if material.likelihood.reads == "labels":
        return f"agreement with {name}", 1 - difference
    return f"{material.likelihood.difference_name} from {name}", difference


def _on_plane(material: Material, plane: Plane, track: Track) -> dict:
    number = track.networks.num_members
    kept = sorted({round(i * (number - 1) / (MOST_ON_PLANE - 1)) for i in range(MOST_ON_PLANE)})
    vectors = (material.space.vector(weights) for weights in each_network(track.networks.only(kept)))
    places = [plane.coordinates(vector) for vector in vectors]  # one network at a time is in memory
    return {"label": track.label, "x": [p[0] for p in places], "y": [p[1] for p in places]}


def _marks(corners: dict[str, tuple[float, float]]) -> list[dict]:
    return [{"label": name, "x": place[0], "y": place[1]} for name, place in corners.items()]


def _as_arrays(panels: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: array(values) for name, values in panels.items()}


def _arrays(found: Cut) -> dict[str, np.ndarray]:
    return {name: array(value) for name, value in vars(found).items()}
