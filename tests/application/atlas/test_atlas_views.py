"""Views of networks with known weights: what they are made of, and when there is none."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import polymode as pm
from polymode.application.atlas.making import make_views
from polymode.application.atlas.material import OF_RANDOM, Looking, Material, Track, check_same_points
from polymode.application.atlas.opinions import Opinions, plane_view, similarity_view
from polymode.application.atlas.probabilities import read_predictions
from polymode.application.atlas.shift import shift_view
from polymode.application.atlas.view import Number, View
from polymode.application.report import write_atlas
from polymode.application.report.atlas_page import export_figures, number_text
from polymode.data import Preprocessing
from polymode.errors import InputError, UnknownName
from polymode.landscape.subspaces import FOR_ENSEMBLES, FOR_PLANE, LowRankGaussian

IMAGES = Preprocessing(
    source="images", input_shift=(0.5,), input_scale=(0.25,), classes=("a", "b", "c"), image_shape=(1, 4, 4)
)


def drawn_modules(factory, count, seed=0, spread=0.4):
    modules, generator = [], torch.Generator().manual_seed(seed)
    start = [spread * torch.randn(p.shape, generator=generator) for p in factory().parameters()]
    for _ in range(count):
        module = factory().eval()
        with torch.no_grad():
            for weight, first in zip(module.parameters(), start, strict=True):
                weight.copy_(first + 0.1 * torch.randn(weight.shape, generator=generator))
        modules.append(module)
    return modules


def classifier(**options):
    return lambda: pm.models.MLP(16, 3, (5,), **options)


def material(
    tmp_path,
    factory=None,
    lengths=(6, 6, 1),
    likelihood="categorical",
    targets=None,
    looking=None,
    **options,
):
    """Tracks of these lengths, with images [1, 4, 4] of bytes; and their modules."""
    factory = factory or classifier()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (50, 1, 4, 4), generator=generator) / 255
    inputs = IMAGES.inputs(pixels)
    if targets is None:
        targets = torch.randint(3, (50,), generator=generator)
    data = pm.ArrayData(inputs, targets, batch_size=25)
    modules = [drawn_modules(factory, length, seed) for seed, length in enumerate(lengths)]
    tracks = [
        Track(
            f"run {place}",
            pm.from_state_dicts(factory, [m.state_dict() for m in each], likelihood=likelihood),
            "trajectory",
        )
        for place, each in enumerate(modules)
    ]
    chosen = {"tunnels": [], "test": data, "train": data, "validation": None, "foreign": None}
    made = Material(
        tracks=tracks,
        preprocessing=IMAGES,
        folder=tmp_path,
        looking=looking or Looking(points=40, grid=3, draws=3),
        **chosen | options,
    )
    return made, modules


@torch.no_grad()
def said(module, inputs):
    return module(inputs).softmax(-1).double()


# --- subspaces of tracks -----------------------------------------------------------------------------


def test_tracks_have_the_subspaces_that_they_have_checkpoints_for(tmp_path):
    found, _ = material(tmp_path, lengths=(1, 2, 3, 12))
    names = [set(found.rules(for_plane=False, track=track)) for track in found.tracks]
    always = {"random", OF_RANDOM}
    assert names == [
        always,
        {*always, "diagonal", "average"},
        {*always, *FOR_ENSEMBLES},
        {*always, *FOR_ENSEMBLES},
    ]
    assert set(found.rules(for_plane=True, track=found.tracks[3])) == set(FOR_PLANE)
    # Members of any other method may lie in different modes: each has but itself.
    members = replace(found.tracks[3], method="deep_ensemble")
    assert set(found.rules(for_plane=False, track=members)) == always
    assert not members.is_trajectory
    few, many = (found.rules(for_plane=True, track=found.tracks[i])["low rank"] for i in (2, 3))
    assert (few.rank, many.rank) == (2, 5)  # three checkpoints span two directions
    assert many.relative
    published, _ = material(tmp_path, lengths=(12,), looking=Looking(published_steps=True))
    assert published.rules(for_plane=True, track=published.tracks[0])["low rank"] == LowRankGaussian(5, 6.0)


def test_random_samples_keep_within_a_margin_of_their_solution(tmp_path):
    """0.05 below the solution on validation data, or as told; draws are made once."""
    labels = torch.arange(50) % 3
    found, modules = material(tmp_path, targets=labels, lengths=(1,))
    [track] = found.tracks
    points = found.points.inputs
    solution = float((said(modules[0][0], points).argmax(-1) == found.labels).double().mean())
    assert found._acceptance(track).least_accuracy == pytest.approx(max(solution - 0.05, 0), abs=1e-6)
    drawn = found.drawn(track, "random")
    assert found.drawn(track, "random") is drawn
    accuracy = (found.values(drawn).argmax(-1) == found.labels).double().mean(-1)
    assert bool((accuracy >= solution - 0.05 - 1e-9).all())
    told, _ = material(tmp_path, targets=labels, lengths=(1,), looking=Looking(least_accuracy=0.125))
    assert told._acceptance(told.tracks[0]).least_accuracy == 0.125
    validation = pm.ArrayData(points[:7], found.labels[:7])
    beside, _ = material(tmp_path, targets=labels, lengths=(1,), validation=validation)
    assert beside._acceptance(beside.tracks[0]).data is validation
    without, _ = material(tmp_path, targets=labels, lengths=(1,), train=None)
    assert without._acceptance(without.tracks[0]) is None  # test points decide nothing


def test_principal_directions_of_random_samples(tmp_path):
    found, _ = material(tmp_path, lengths=(3, 3), looking=Looking(points=40, grid=3, draws=6))
    track = found.tracks[1]
    around = found.space.vectors(found.drawn(track, "random")).numpy()
    drawn = found.space.vectors(found.drawn(track, OF_RANDOM)).numpy()
    assert len(drawn) == 6
    rank = min(4, len(around) - 1)
    _, _, directions = np.linalg.svd(around - around.mean(0), full_matrices=False)
    inside = (drawn - around.mean(0)) @ directions[:rank].T
    np.testing.assert_allclose(drawn - around.mean(0), inside @ directions[:rank], atol=1e-5)


def test_tracks_and_subspaces_have_draws_of_their_own(tmp_path):
    """Steps around two ends are not the same steps."""
    found, _ = material(tmp_path, lengths=(1, 1), train=None)
    steps = [found.space.vectors(found.drawn(t, "random")) - found.vector(t) for t in found.tracks]
    directions = [each / each.norm(dim=1, keepdim=True) for each in steps]
    assert float((directions[0] * directions[1]).sum(1).abs().max()) < 0.9


def test_what_is_averaged_within_a_run_is_averaged_first(tmp_path):
    found, _ = material(tmp_path)
    view, by_draws = make_views(found, ["sizes"])
    families = {name.rsplit(", ", 1)[0] for name in view.arrays}
    assert families == {"baseline", "random", OF_RANDOM}  # one of the three tracks has but its end
    means = torch.stack([found.drawn_values(track, "random").double().mean(0) for track in found.tracks])
    right = (means.mean(0).argmax(-1) == found.labels).double().mean()
    assert view.arrays["random, accuracy"][-1] == pytest.approx(float(right), abs=1e-6)
    # The same by the number of draws: with one, all subsets of first draws.
    firsts = torch.stack([found.drawn_values(track, "random")[0].double() for track in found.tracks])
    alone = [float(-p[range(40), found.labels].log().mean()) for p in firsts]
    assert by_draws.arrays["1 run, nll"][0] == pytest.approx(np.mean(alone), rel=1e-5)
    three = float(-firsts.mean(0)[range(40), found.labels].log().mean())
    assert by_draws.arrays["3 runs, nll"][0] == pytest.approx(three, rel=1e-5)
    assert by_draws.arrays["3 runs, accuracy"][-1] == pytest.approx(float(right), abs=1e-6)


# --- views -------------------------------------------------------------------------------------------


def test_views_are_made_in_order_and_only_those_wanted(tmp_path):
    found, _ = material(tmp_path)
    keys = [view.key for view in make_views(found)]
    expected = ["similarity", "checkpoints", "pairs", "map", "plane", "sizes", "subspace-sizes"]
    assert keys == [*expected, "radial", "radial-loss", "three", "path"]
    assert list(found.left_out) == ["shift"]  # nothing is corrupted or foreign here
    assert [view.key for view in make_views(found, ["path", "similarity"])][-1] == "path"
    with pytest.raises(UnknownName, match=r"Unknown view 'paths'. Did you mean 'path'"):
        list(make_views(found, ["paths"]))
    alone, _ = material(tmp_path, lengths=(1,))
    assert [view.key for view in make_views(alone)] == ["map", "plane"]


def test_what_stands_in_the_way_of_a_view_is_told_and_others_are_made(tmp_path):
    found, _ = material(tmp_path, lengths=(1, 1))
    twice = replace(found, tracks=[found.tracks[0], replace(found.tracks[0], label="again")])
    views = {view.key: view for view in make_views(twice, ["similarity", "radial", "path"])}
    assert set(views) == {"similarity"}
    assert float(views["similarity"].arrays["disagreement"].max()) == 0
    assert set(twice.left_out) == {"radial", "path"}
    assert "lie on one line" in twice.left_out["radial"]
    assert "ends where it begins" in twice.left_out["path"]
    page = write_atlas(tmp_path / "page.html", "x", list(views.values()), left_out=twice.left_out)
    assert "lie on one line" in page.read_text()


def test_a_tunnel_alone_is_enough(tmp_path):
    _, modules = material(tmp_path, lengths=(4,))
    networks = pm.from_state_dicts(
        classifier(), [m.state_dict() for m in modules[0]], likelihood="categorical"
    )
    found, _ = material(tmp_path, lengths=(), tunnels=[Track("bent", networks, "tunnel")])
    views = list(make_views(found))
    assert [view.key for view in views] == ["path-tunnel-0", "sheet-tunnel-0"]
    losses = [-float(said(m, found.points.inputs)[range(40), found.labels].log().mean()) for m in modules[0]]
    corners = views[0].arrays["tunnel, is_corner"]
    np.testing.assert_allclose(views[0].arrays["tunnel, loss"][corners], losses, rtol=1e-5)


def test_networks_of_numbers_and_of_several_labels(tmp_path):
    numbers = torch.randn(50, generator=torch.Generator().manual_seed(2))
    found, modules = material(
        tmp_path,
        lambda: pm.models.MLP(16, 1, (5,)),
        likelihood=pm.likelihoods.FixedGaussian(std=0.5),
        targets=numbers,
    )
    views = {view.key: view for view in make_views(found)}
    assert set(views) == {"similarity", "checkpoints", "map", "radial", "radial-loss", "three", "path"}
    with torch.no_grad():
        ends = [each[-1](found.points.inputs)[:, 0] for each in modules]
    name = "difference of means / spread of targets"
    matrix = views["similarity"].arrays[name]
    for i in range(3):
        for j in range(3):
            apart = float((ends[i] - ends[j]).square().mean().sqrt() / numbers[:40].std())
            assert matrix[i, j] == pytest.approx(apart, abs=1e-5)
    several = torch.randint(0, 2, (50, 3), generator=torch.Generator().manual_seed(3)).float()
    found, modules = material(tmp_path, likelihood="bernoulli", targets=several)
    views = {view.key: view for view in make_views(found)}
    with torch.no_grad():
        ends = [(each[-1](found.points.inputs) > 0).flatten() for each in modules]
    matrix = views["similarity"].arrays["disagreement"]
    for i in range(3):
        for j in range(3):
            assert matrix[i, j] == pytest.approx(float((ends[i] != ends[j]).double().mean()), abs=1e-6)


def test_batch_norm_is_looked_at_with_training_data(tmp_path):
    with pytest.raises(InputError, match="BatchNorm need training data"):
        material(tmp_path, classifier(batch_norm=True), train=None)
    found, modules = material(tmp_path, classifier(batch_norm=True), lengths=(2, 2))
    views = {view.key: view for view in make_views(found)}
    assert "radial" in views
    [row] = [view for key, view in views.items() if key == "similarity"]
    ends = [said(each[-1], found.points.inputs).argmax(-1) for each in modules]
    assert row.arrays["disagreement"][0, 1] == pytest.approx(
        float((ends[0] != ends[1]).double().mean()), abs=1e-6
    )


def test_networks_of_different_forms_are_refused(tmp_path):
    found, _ = material(tmp_path, lengths=(2,))
    other, _ = material(tmp_path, lambda: pm.models.MLP(16, 3, (4,)), lengths=(2,))
    with pytest.raises(InputError, match="different forms"):
        Material([*found.tracks, *other.tracks], [], found.test, None, None, None, IMAGES, tmp_path)
    with pytest.raises(InputError, match="no networks to look at"):
        Material([], [], found.test, None, None, None, IMAGES, tmp_path)


def test_test_points_have_to_be_the_same_and_prepared_alike():
    x, y = torch.randn(6, 2), torch.arange(6) % 2
    one = pm.ArrayData(x, y)
    check_same_points([("a", one), ("b", pm.ArrayData(x.clone(), y.clone(), batch_size=3))])
    with pytest.raises(InputError, match=r"a and b have different test points \(6 and 5, or other targets\)"):
        check_same_points([("a", one), ("b", pm.ArrayData(x[:5], y[:5]))])
    with pytest.raises(InputError, match="different test points"):
        check_same_points([("a", one), ("b", one), ("c", pm.ArrayData(x, 1 - y))])
    with pytest.raises(InputError, match="a and b were trained on examples that were prepared otherwise"):
        check_same_points([("a", one), ("b", pm.ArrayData(2 * x, y))])
    with pytest.raises(InputError, match="different test points"):
        check_same_points([("a", one), ("b", pm.ArrayData(x, y.float()))])


def test_the_plane_and_its_fitted_curve(tmp_path):
    """Networks whose labels are flipped at equal rates lie on the lower limit: e is 1."""
    random = np.random.default_rng(0)
    truth = random.integers(0, 10, 4000)
    base = np.where(random.random(4000) < 0.8, truth, (truth + random.integers(1, 10, 4000)) % 10)
    flips = random.random((12, 4000)) < np.linspace(0.05, 0.6, 12)[:, None]
    said_ = np.where(flips, (base + random.integers(1, 10, (12, 4000))) % 10, base)
    one_hot = torch.eye(10, dtype=torch.float64)
    group = Opinions("flipped", one_hot[torch.from_numpy(said_)], "random")
    view = plane_view(one_hot[torch.from_numpy(base)], [group], torch.from_numpy(truth), base_name="x")
    values = {number.what: number.value for number in view.numbers}
    # One network of 48,000 flips: the shares of right and wrong labels among them, 0.8 and 0.2, have
    # relative errors of about 1 %, and e is the exponent that joins them.
    assert values["exponent e of the fitted family p₋ = p₊^e"] == pytest.approx(1, abs=0.1)
    accuracy = np.mean(said_ == truth, axis=1)
    apart = np.mean(said_ != base, axis=1)
    np.testing.assert_allclose(view.arrays["flipped, accuracy"], accuracy)
    assert values["disagreement / (1 − accuracy), flipped"] == pytest.approx(np.mean(apart / (1 - accuracy)))
    perfect = plane_view(one_hot[torch.from_numpy(truth)], [group], torch.from_numpy(truth), base_name="x")
    assert [n.what for n in perfect.numbers] == ["disagreement / (1 − accuracy), flipped"]  # no limits there
    assert plane_view(one_hot[:3], [], torch.arange(3), base_name="x") is None


def test_one_network_has_no_pairs():
    assert similarity_view([Opinions("a", torch.full((1, 4, 2), 0.5))]) is None


def test_opinions_are_thinned_evenly_with_the_last():
    values = torch.arange(10.0)[:, None, None].expand(10, 2, 2)
    assert Opinions("a", values).thinned(4).values[:, 0, 0].tolist() == [0, 3, 6, 9]
    assert Opinions("a", values).thinned(1).values[:, 0, 0].tolist() == [9]
    assert Opinions("a", values).thinned(10).number == 10


# --- shift -------------------------------------------------------------------------------------------


def test_corrupted_and_foreign_images(tmp_path):
    """Means over corruptions and samples of what ensembles say, from images that are made by hand."""
    foreign = IMAGES.inputs(torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(5)))
    found, modules = material(tmp_path, lengths=(6, 6), foreign=foreign)

    def blocks(images, labels):
        assert images.dtype == np.uint8
        assert labels.tolist() == found.labels.tolist()

        def made(name, severity):
            changed = 255 - images if name == "inverted" else images[..., ::-1]
            return (changed // severity).astype(np.uint8), labels

        return made

    view = shift_view(found, ["inverted", "mirrored"], (1, 2), blocks=blocks)
    pixels = (IMAGES.raw(found.points.inputs) * 255).round()
    ends = [each[-1] for each in modules]
    js = [_divergence([said(m, found.points.inputs) for m in ends])]
    accuracy = [_accuracy([said(m, found.points.inputs) for m in ends], found.labels)]
    for severity in (1, 2):
        each = []
        for changed in (255 - pixels, pixels.flip(-1)):
            inputs = IMAGES.inputs((changed // severity) / 255)
            each.append([said(m, inputs) for m in ends])
        js.append(np.mean([_divergence(p) for p in each]))
        accuracy.append(np.mean([_accuracy(p, found.labels) for p in each]))
    assert view.arrays["independent, severity"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(view.arrays["independent, js"], js, rtol=1e-4)
    np.testing.assert_allclose(view.arrays["independent, accuracy"], accuracy, atol=1e-6)
    # Of a training its last checkpoints, as many as there are runs; the mean over both trainings.
    along = [_divergence([said(m, foreign) for m in each[-2:]]) for each in modules]
    values = {number.what: number.value for number in view.numbers}
    assert values["JS divergence on out-of-distribution data, trajectory"] == pytest.approx(
        np.mean(along), rel=1e-4
    )
    [error] = [n.error for n in view.numbers if n.what.endswith("trajectory")]
    assert error == pytest.approx(np.std(along, ddof=1) / math.sqrt(2), rel=1e-3)


def _divergence(members):
    mean = torch.stack(members).mean(0)
    return float(np.mean([float((p * (p.log() - mean.log())).sum(-1).mean()) for p in members]))


def _accuracy(members, labels):
    return float((torch.stack(members).mean(0).argmax(-1) == labels).double().mean())


def test_without_corruptions_and_foreign_data_there_is_no_shift(tmp_path):
    found, _ = material(tmp_path, lengths=(2, 2))
    assert shift_view(found, []) is None


# --- the page ----------------------------------------------------------------------------------------


def test_a_page_escapes_whatever_it_is_given(tmp_path):
    import plotly.graph_objects as go

    hostile = "</script><script>alert('x')</script><b>&"
    drawn = go.Figure(layout={"title": {"text": hostile}})
    drawn.add_scatter(x=[0], y=[1], name=hostile)
    view = View("key", hostile, hostile, drawn, {}, [Number(hostile, 1.0, 0.5, hostile)])
    page = write_atlas(
        tmp_path / "page.html",
        hostile,
        [view],
        about=hostile,
        rows=[{"run": hostile, hostile: 0.25, "missing": None}],
        left_out={hostile: hostile},
        command=hostile,
        details={"option": hostile},
    ).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in page
    assert "0.2500" in page


def test_numbers_as_text():
    assert number_text(Number("a", 0.123456)) == "0.1235"
    assert number_text(Number("a", 0.123456, 0.0123)) == "0.1235 ± 0.012"
    assert number_text(Number("a", 2.0, math.nan)) == "2"


def test_other_kinds_of_figures_are_refused(tmp_path):
    with pytest.raises(InputError, match="png or svg, not as 'pdf'"):
        export_figures([], tmp_path, "pdf")


def test_predictions_keep_their_numbers(tmp_path):
    p = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 9))
    np.savez(tmp_path / "a.npz", p=p, labels=np.arange(9) % 3)
    np.savez(tmp_path / "b.npz", one=p[0].astype(np.float32), two=p[1].astype(np.float32))
    found = read_predictions([str(tmp_path / "a.npz"), str(tmp_path / "b.npz")])
    assert list(found.runs) == ["a", "b"]
    np.testing.assert_array_equal(found.runs["a"].numpy(), p)
    np.testing.assert_allclose(found.runs["b"].numpy(), p, rtol=1e-6)
    assert found.labels.tolist() == (np.arange(9) % 3).tolist()
