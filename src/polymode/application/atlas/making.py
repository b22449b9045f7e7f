"""All views that some trainings allow, in the order of the page."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from polymode.application.atlas import opinions as say
from polymode.application.atlas import places
from polymode.application.atlas.material import Material, Track
from polymode.application.atlas.opinions import MOST_IN_MATRIX, Opinions
from polymode.application.atlas.shift import shift_view
from polymode.application.atlas.view import View
from polymode.errors import InputError, unknown_name
from polymode.landscape import cosine_matrix
from polymode.landscape.networks import each_network
from polymode.landscape.subspaces import RECENT

MAPPED_RUNS = 3  # trainings whose networks are all on the map, as in the paper's figures; of others the ends
MAPPED_DRAWS = 10
ALIGNED = 0.5  # cosine of weights above which two runs seem to share their start
MOST_NOTED = 10  # runs that are looked at for it


def similarity(material: Material) -> list[View | None]:
    """The ends of all trainings; the checkpoints of some."""
    tracks = material.tracks
    cosine = cosine_matrix([track.end for track in tracks]) if len(tracks) > 1 else None
    _note_shared_starts(material)
    found = [
        say.similarity_view(
            material.ends(),
            title="How the final networks of runs differ",
            difference=material.difference,
            cosine=cosine,
        )
    ]
    paths = [track for track in tracks if track.has_several][:MAPPED_RUNS]
    if paths:
        most = max(2, MOST_IN_MATRIX // len(paths))
        kept = []
        for track in paths:
            number = track.networks.num_members
            places_ = sorted({round(i * (number - 1) / (most - 1)) for i in range(most)})
            kept.append((track, places_))
        groups = [Opinions(t.label, material.opinions(t).values[p], "trajectory") for t, p in kept]
        cosine = cosine_matrix([track.networks.only(p) for track, p in kept])
        found.append(
            say.similarity_view(
                groups,
                key="checkpoints",
                title="Networks of each run, in their order",
                of="all networks: ",
                difference=material.difference,
                cosine=cosine,
            )
        )
        if material.is_classes:
            of = " (of trajectories their latest checkpoints)" if any(t.is_trajectory for t in tracks) else ""
            found.append(say.pairs_view([_latest(material, track) for track in tracks], of=of))
    return found


def _note_shared_starts(material: Material) -> None:
    """Say which runs do not seem to be independent: weights of separate starts are nearly at right angles.

    Only matrices and kernels count: scales of normalisation layers are near 1 in all networks.
    """
    names = [name for name in material.space.names if material.space.like[name].ndim > 1]
    seen: list[Tensor] = []
    for place, track in enumerate(material.tracks[:MOST_NOTED] if names else ()):
        [weights] = each_network(track.end)
        vector = torch.cat([weights[name].double().flatten() for name in names])
        for other, before in enumerate(seen):
            cosine = float(vector @ before / (vector.norm() * before.norm()).clamp(min=1e-300))
            if cosine > ALIGNED:
                material.notes.append(
                    f"{material.tracks[other].label} and {material.tracks[place].label} have weights with a "
                    f"cosine of {cosine:.2f}: they seem to share their start (the same --seed?), so they are "
                    "not independent runs."
                )
        seen.append(vector)


def _latest(material: Material, track: Track) -> Opinions:
    """Of a trajectory the last checkpoints, at most half of them; of any other method all networks."""
    found = material.opinions(track)
    if not track.is_trajectory:
        return found
    return Opinions(found.label, found.values[-max(1, min(RECENT, found.number // 2)) :], found.kind)


def functions(material: Material) -> list[View | None]:
    """A map of functions along trainings and in subspaces around their ends."""
    groups = []
    for track in material.tracks[:MAPPED_RUNS]:
        groups += _by_phase(material, track)
        if material.is_classes:
            for name in material.subspaces(track):
                values = material.drawn_values(track, name)[:MAPPED_DRAWS]
                groups.append(Opinions(track.label, values, name))
    groups += [Opinions(end.label, end.values, "end") for end in material.ends()[MAPPED_RUNS:]]
    return [say.map_view(groups, seed=material.looking.seed)]


def _by_phase(material: Material, track: Track) -> list[Opinions]:
    """What a track's networks say, phase by phase: the members of a sequence have colours of their own."""
    found = material.opinions(track)
    if not track.phases:
        return [found]
    return [
        Opinions(
            f"{track.label}, {phase}",
            found.values[[i for i, other in enumerate(track.phases) if other == phase]],
            found.kind,
        )
        for phase in dict.fromkeys(track.phases)
    ]


def plane(material: Material) -> list[View | None]:
    """Diversity and accuracy of subspaces and independent runs, beside the first end."""
    if not material.is_classes:
        return [None]
    track, *others = material.tracks
    groups = []
    for name in material.rules(for_plane=True, track=track):
        groups.append(Opinions(name, material.drawn_values(track, name, for_plane=True), name))
    if others:
        ends = torch.cat([material.opinions(other).values[-1:] for other in others])
        groups.append(Opinions("independent", ends, "end"))
    base = material.opinions(track).values[-1]
    return [say.plane_view(base, groups, material.labels, base_name=track.label)]


def sizes(material: Material) -> list[View | None]:
    """Ensembles of runs, with and without subspaces."""
    if not material.is_classes or len(material.tracks) < 2:
        return [None]
    families = {"baseline": torch.cat([each.values for each in material.ends()])}
    for name in material.subspaces(material.tracks[0]):
        if all(name in material.subspaces(track) for track in material.tracks):
            means = [material.drawn_values(track, name).mean(0) for track in material.tracks]
            families[name] = torch.stack(means)
    draws = [material.drawn_values(track, "random") for track in material.tracks]
    return [
        say.sizes_view(families, material.labels),
        say.subspace_sizes_view("random", draws, material.labels),
    ]


Maker = Callable[[Material], Sequence[View | None]]
VIEWS: dict[str, tuple[str, Maker]] = {
    "similarity": ("how networks differ, pair by pair", similarity),
    "map": ("a t-SNE map of functions", functions),
    "plane": ("diversity and accuracy", plane),
    "sizes": ("ensembles of runs, with and without subspaces", sizes),
    "radial": ("the plane of the origin and two ends", places.radial_views),
    "three": ("the plane through three ends", lambda material: [places.three_view(material)]),
    "path": ("the straight line between two ends, and tunnels", places.path_views),
}
SHIFT = "shift"  # needs corruptions or data outside the distribution
NEEDS = {
    "similarity": "at least two networks",
    "map": "at least four networks",
    "plane": "probabilities of classes",
    "sizes": "at least two runs, and probabilities of classes",
    "radial": "at least two runs",
    "three": "at least three runs",
    "path": "at least two runs, or a tunnel",
    SHIFT: "several networks with probabilities of classes, and --corruptions (of images) or --ood",
}


def make_views(
    material: Material, wanted: Sequence[str] = (), corruptions: Sequence[str] = ()
) -> Iterator[View]:
    """Make the views that are wanted (none named: all) and that the trainings allow."""
    for name in wanted:
        if name not in (*VIEWS, SHIFT):
            raise unknown_name("view", name, (*VIEWS, SHIFT))
    for name, (about, maker) in VIEWS.items():
        if wanted and name not in wanted:
            continue
        if not material.tracks and name != "path":
            continue
        yield from _made(material, name, about, maker)
    if (not wanted or SHIFT in wanted) and material.tracks:
        about = "corrupted and foreign data"
        yield from _made(material, SHIFT, about, lambda m: [shift_view(m, corruptions)])


def _made(material: Material, name: str, about: str, maker: Maker) -> Iterator[View]:
    """The views of one kind; what stands in the way of one is told, and others are made all the same."""
    material.report(f"{name}: {about}")
    made = 0
    try:
        for view in maker(material):
            if view is not None:
                made += 1
                yield view
        if not made:
            material.left_out[name] = f"it needs {NEEDS[name]}."
    except InputError as error:
        material.left_out[name] = str(error)
        material.report(f"{name} is left out: {error}")
