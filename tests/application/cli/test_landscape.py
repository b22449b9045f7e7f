"""``polymode landscape``: what is on the page, computed again from the runs; and what is refused."""

import itertools
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from command_line import polymode, the_line
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import polymode as pm
from polymode.application.datasets.embedded import digits
from polymode.application.datasets.loading import load_task

DIGITS = ["--data", "digits", "--model", "mlp", "--set", "model.hidden=[8]"]
SMALL = [*DIGITS, "--set", "data.num_train=300", "--quiet"]
CLOSELY = ["--grid", 4, "--draws", 3, "--points", 60]


def factory():
    return pm.models.MLP(64, 8, (8,))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A trajectory of two seeds, an ensemble of two, and a tunnel between its members."""
    folder = tmp_path_factory.mktemp("runs")
    polymode(
        "train", *SMALL, "--method", "trajectory", "--seeds", 2, "--epochs", 4, "--run", "tr", cwd=folder
    )
    ensemble = ["--method", "deep_ensemble", "--set", "deep_ensemble.num_members=2", "--epochs", 2]
    polymode("train", *SMALL, *ensemble, "--run", "de", cwd=folder)
    tunnel = ["--method", "tunnel", "--set", "tunnel.num_points=2", "--initial", "de", "--epochs", 1]
    polymode("train", *SMALL, *tunnel, "--run", "tu", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def page(runs):
    """All views of the three runs, in out/."""
    return runs, polymode("landscape", "tr", "de", "tu", *CLOSELY, "--out", "out", cwd=runs)


def modules_of(folder, name, index=0):
    """The networks of a posterior as plain modules."""
    posterior = pm.load_posterior(folder / name / f"posterior-{index}", factory)
    made = []
    for block in posterior.draw():
        for i in range(block.num_members):
            module = factory().eval()
            module.load_state_dict(block.member(i))
            made.append(module)
    return made


@pytest.fixture(scope="module")
def tracks(runs):
    """Networks of every track that is not a tunnel."""
    first, second = modules_of(runs, "de")
    return [modules_of(runs, "tr", 0), modules_of(runs, "tr", 1), [first], [second]]


@pytest.fixture(scope="module")
def data():
    split = digits(num_train=300).splits[0]
    return split.test.inputs[:60], split.test.targets[:60], split.train.inputs[:60], split.train.targets[:60]


@torch.no_grad()
def said(module, inputs):
    return module(inputs).softmax(-1).double().numpy()


def vector(module):
    return parameters_to_vector(module.parameters()).detach().double()


def numbers_of(folder, view):
    document = json.loads((folder / "numbers.json").read_text())
    return {n["what"]: n["value"] for n in document["numbers"] if n["view"] == view}


def divergence(*members):
    mean = np.mean(members, axis=0)
    return float(np.mean([np.mean(np.sum(p * (np.log(p) - np.log(mean)), -1)) for p in members]))


# --- what is found -----------------------------------------------------------------------------------


def test_page_numbers_and_arrays_are_left(page):
    folder, output = page
    left = {path.name for path in (folder / "out").iterdir()}
    keys = ["similarity", "checkpoints", "pairs", "map", "plane", "sizes", "subspace-sizes", "radial"]
    keys += ["radial-loss", "three", "path-tunnel-0", "sheet-tunnel-0", "shift"]
    assert {f"{key}.npz" for key in keys} <= left
    content = (folder / "out/landscape.html").read_text()
    assert content.count("<figure>") == len(keys)
    assert "4 runs and 1 tunnel, 14 networks (MLP, 592 weights), looked at on 60 test points." in content
    assert "Landscape of tr, de, tu" in output.stdout
    assert "page     out/landscape.html" in output.stdout
    rows = json.loads((folder / "out/numbers.json").read_text())["runs"]
    assert [row["run"] for row in rows] == ["tr seed 0", "tr seed 1", "de chain 0", "de chain 1"]


def test_runs_are_scored(page, tracks, data):
    folder, _ = page
    x, y, *_ = data
    rows = json.loads((folder / "out/numbers.json").read_text())["runs"]
    for row, networks in zip(rows, tracks, strict=True):
        p = np.stack([said(module, x) for module in networks])
        assert row["networks"] == len(networks)
        assert row["mean accuracy of a single network"] == pytest.approx(
            np.mean(p.argmax(-1) == y.numpy()), abs=1e-6
        )
        assert row["accuracy"] == pytest.approx(np.mean(p.mean(0).argmax(-1) == y.numpy()), abs=1e-6)
        assert row["NLL"] == pytest.approx(-np.mean(np.log(p.mean(0)[range(60), y])), rel=1e-5)
        if len(networks) > 1:
            assert row["JS divergence of all"] == pytest.approx(divergence(*p), abs=1e-6)


def test_ends_are_compared(page, tracks, data):
    folder, _ = page
    x, *_ = data
    ends = [networks[-1] for networks in tracks]
    p, theta = [said(module, x) for module in ends], [vector(module) for module in ends]
    pairs = list(itertools.combinations(range(4), 2))
    found = numbers_of(folder / "out", "similarity")
    differ = [np.mean(p[i].argmax(-1) != p[j].argmax(-1)) for i, j in pairs]
    assert found["disagreement, between runs"] == pytest.approx(np.mean(differ), abs=1e-6)
    js = [divergence(p[i], p[j]) for i, j in pairs]
    assert found["JS divergence of pairs (nats), between runs"] == pytest.approx(np.mean(js), abs=1e-6)
    cosines = [float(theta[i] @ theta[j] / (theta[i].norm() * theta[j].norm())) for i, j in pairs]
    assert found["cosine of weights, between runs"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert numbers_of(folder / "out", "radial")["cosine of the first two ends"] == pytest.approx(cosines[0])
    document = json.loads((folder / "out/numbers.json").read_text())["numbers"]
    [error] = [n["standard_error"] for n in document if n["what"] == "cosine of weights, between runs"]
    without = [
        np.mean([c for c, pair in zip(cosines, pairs, strict=True) if i not in pair]) for i in range(4)
    ]
    assert error == pytest.approx(math.sqrt(3 * np.var(without)), abs=1e-6)  # the jackknife's


def test_checkpoints_are_compared_within_their_trainings(page, tracks, data):
    folder, _ = page
    x, *_ = data
    within, between = [], []
    answers = [[said(module, x).argmax(-1) for module in networks] for networks in tracks[:2]]
    for each in answers:
        within.append(np.mean([np.mean(a != b) for a, b in itertools.combinations(each, 2)]))
    between = [np.mean(a != b) for a in answers[0] for b in answers[1]]
    found = numbers_of(folder / "out", "checkpoints")
    assert found["all networks: disagreement, within a run"] == pytest.approx(np.mean(within), abs=1e-6)
    assert found["all networks: disagreement, between runs"] == pytest.approx(np.mean(between), abs=1e-6)
    assert np.load(folder / "out/checkpoints.npz")["runs"].tolist() == ["tr seed 0"] * 4 + ["tr seed 1"] * 4


def test_ensembles_of_runs(page, tracks, data):
    folder, _ = page
    x, y, *_ = data
    p = np.stack([said(networks[-1], x) for networks in tracks])
    found = np.load(folder / "out/sizes.npz")
    for size in range(1, 5):
        subsets = list(itertools.combinations(range(4), size))
        right = [np.mean(p[list(s)].mean(0).argmax(-1) == y.numpy()) for s in subsets]
        nll = [-np.mean(np.log(p[list(s)].mean(0)[range(60), y])) for s in subsets]
        assert found["baseline, accuracy"][size - 1] == pytest.approx(np.mean(right), abs=1e-6)
        assert found["baseline, nll"][size - 1] == pytest.approx(np.mean(nll), rel=1e-5)
    assert numbers_of(folder / "out", "sizes")["accuracy, baseline, 4 runs"] == pytest.approx(
        np.mean(p.mean(0).argmax(-1) == y.numpy()), abs=1e-6
    )


def test_independent_runs_beside_the_first(page, tracks, data):
    folder, _ = page
    x, y, *_ = data
    base, *others = (said(networks[-1], x).argmax(-1) for networks in tracks)
    found = np.load(folder / "out/plane.npz")
    assert float(found["base accuracy"]) == pytest.approx(np.mean(base == y.numpy()))
    np.testing.assert_allclose(found["independent, accuracy"], [np.mean(o == y.numpy()) for o in others])
    np.testing.assert_allclose(found["independent, disagreement"], [np.mean(o != base) for o in others])
    for name in ("random", "dropout", "diagonal", "low rank"):
        assert found[f"{name}, accuracy"].shape == (3,)


@torch.no_grad()
def test_the_radial_plane_is_that_of_the_first_two_ends(page, tracks, data):
    """Networks at places of the grid: their weights set by hand, and a plain pass."""
    folder, _ = page
    x, y, train_x, train_y = data
    found = np.load(folder / "out/radial-loss.npz")
    ends = [tracks[0][-1], tracks[1][-1]]
    e1, e2 = torch.from_numpy(found["e1"]), torch.from_numpy(found["e2"])
    a, b = (vector(module) for module in ends)
    torch.testing.assert_close(e1, a / a.norm())
    torch.testing.assert_close(b, (b @ e1) * e1 + (b @ e2) * e2)
    width = max(float(a.norm()), float(b @ e1), 0) - min(float(b @ e1), 0)
    assert found["x"][-1] - found["x"][0] == pytest.approx(1.5 * width)
    answers = [said(module, x).argmax(-1) for module in ends]
    module = factory().eval()
    for row, column in itertools.product(range(4), repeat=2):
        theta = float(found["x"][column]) * e1 + float(found["y"][row]) * e2
        vector_to_parameters(theta.float(), module.parameters())
        outputs = module(x)
        loss = torch.nn.functional.cross_entropy(outputs, y)
        assert found["loss"][row, column] == pytest.approx(float(loss), rel=1e-4)
        trained = torch.nn.functional.cross_entropy(module(train_x), train_y)
        assert found["training_loss"][row, column] == pytest.approx(float(trained), rel=1e-4)
        guess = outputs.argmax(-1)
        # Rounding may exchange two labels that are equally probable.
        assert found["error"][row, column] == pytest.approx(float((guess != y).double().mean()), abs=0.02)
        for place in range(2):
            apart = np.mean(guess.numpy() != answers[place])
            assert found["difference"][row, column, place] == pytest.approx(apart, abs=0.02)


@torch.no_grad()
def test_the_tunnel_is_walked_through(page, runs, data):
    folder, _ = page
    x, y, train_x, train_y = data
    networks = modules_of(runs, "tu")
    ends = modules_of(runs, "de")
    assert all(
        torch.equal(vector(a), vector(b)) for a, b in zip([networks[0], networks[-1]], ends, strict=True)
    )
    found = np.load(folder / "out/path-tunnel-0.npz")
    corners = found["tunnel, is_corner"]
    losses = [float(torch.nn.functional.cross_entropy(m(train_x), train_y)) for m in networks]
    np.testing.assert_allclose(found["tunnel, loss"][corners], losses, rtol=1e-5)
    np.testing.assert_allclose(found["tunnel, place"][corners], [0, 1 / 3, 2 / 3, 1], atol=1e-6)
    errors = [float((m(x).argmax(-1) != y).double().mean()) for m in networks]
    np.testing.assert_allclose(found["tunnel, error"][corners], errors, atol=1e-6)
    middle = factory().eval()
    vector_to_parameters(((vector(ends[0]) + vector(ends[1])) / 2).float(), middle.parameters())
    [at] = np.flatnonzero(np.isclose(found["straight line, place"], 0.5))
    expected = float(torch.nn.functional.cross_entropy(middle(train_x), train_y))
    assert found["straight line, loss"][at] == pytest.approx(expected, rel=1e-5)
    numbers = numbers_of(folder / "out", "path-tunnel-0")
    highest = {name: found[f"{name}, loss"].max() for name in ("straight line", "tunnel")}
    for name, value in highest.items():
        assert numbers[f"highest loss, {name}"] == pytest.approx(value)
    ratio = highest["straight line"] / highest["tunnel"]
    assert numbers["highest loss, straight line / tunnel"] == pytest.approx(ratio)
    apart = np.mean(said(middle, x).argmax(-1) != said(ends[0], x).argmax(-1))
    name = "difference at the middle of the straight line, with the first end"
    assert numbers[name] == pytest.approx(apart, abs=0.02)
    sheet = np.load(folder / "out/sheet-tunnel-0.npz")
    lengths = [float(vector(m).norm()) for m in networks]
    path_row = int(np.flatnonzero(np.isclose(sheet["share"], 1))[0])
    np.testing.assert_allclose(sheet["radius"][path_row][::3], lengths, rtol=1e-6)


def test_divergence_on_foreign_data(page, tracks):
    folder, _ = page
    foreign = digits(num_train=300).ood.inputs[:60]
    # All ways have as many networks as the one that has the fewest: of three draws some are rejected.
    content = (folder / "out/landscape.html").read_text()
    number = int(re.search(r"divergence of (\d) networks of each method", content)[1])
    assert 2 <= number <= 3
    p = [said(networks[-1], foreign) for networks in tracks[-number:]]
    found = numbers_of(folder / "out", "shift")
    assert found["JS divergence on out-of-distribution data, independent"] == pytest.approx(
        divergence(*p), abs=1e-6
    )
    along = [divergence(*(said(m, foreign) for m in networks[-number:])) for networks in tracks[:2]]
    assert found["JS divergence on out-of-distribution data, trajectory"] == pytest.approx(
        np.mean(along), abs=1e-6
    )


def test_the_map_has_every_network(page):
    folder, _ = page
    found = np.load(folder / "out/map.npz")
    kinds = dict(zip(*np.unique(found["kinds"], return_counts=True), strict=True))
    assert kinds["trajectory"] == 8
    assert kinds["diagonal"] == kinds["low rank"] == 6
    assert np.isfinite(found["places"]).all()
    assert len(found["places"]) == len(found["runs"]) == sum(kinds.values())


# --- again, in part, otherwise -----------------------------------------------------------------------


def test_a_second_call_goes_on_where_the_first_one_ended(page):
    folder, first = page
    assert "plane radial: 16 of 16 networks" in first.stderr
    surveys = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (folder / "out").glob("*.survey.npz")}
    assert len(surveys) == 8
    before = dict(np.load(folder / "out/radial.npz"))
    again = polymode("landscape", "tr", "de", "tu", *CLOSELY, "--out", "out", "--json", cwd=folder)
    assert "of 16 networks" not in again.stderr
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in surveys} == surveys
    after = np.load(folder / "out/radial.npz")
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    document = json.loads(again.stdout)
    assert document["page"] == "out/landscape.html"
    assert document["runs"] == json.loads((folder / "out/numbers.json").read_text())["runs"]


def test_a_folder_of_other_options_is_left_as_it_is(page):
    folder, _ = page
    before = (folder / "out/numbers.json").read_bytes()
    call = ["landscape", "tr", *CLOSELY[:4], "--points", 50, "--views", "radial", "--out", "out"]
    line = the_line(polymode(*call, cwd=folder, code=2))
    assert "out holds results of another command: choose another folder with --out" in line
    assert (folder / "out/numbers.json").read_bytes() == before


def test_some_views_only(page):
    folder, _ = page
    polymode("landscape", "tr", *CLOSELY, "--views", "radial, path", "--out", "some", "--quiet", cwd=folder)
    left = {path.name for path in (folder / "some").glob("*.npz") if ".survey" not in path.name}
    assert left == {"radial.npz", "radial-loss.npz", "path.npz"}
    everything = np.load(folder / "out/radial.npz")
    np.testing.assert_array_equal(np.load(folder / "some/radial.npz")["loss"], everything["loss"])


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    for place, name in (("a", "de"), ("b", "tr")):
        shutil.copytree(runs / name, tmp_path / place / "run")
    call = ["--points", 60, "--views", "similarity", "--json"]
    found = json.loads(polymode("landscape", "a/run", "b/run", *call, "--out", "x", cwd=tmp_path).stdout)
    expected = json.loads(polymode("landscape", "de", "tr", *call, "--out", "y", cwd=runs).stdout)
    assert len({row["run"] for row in found["runs"]}) == 4
    for one, other in zip(found["runs"], expected["runs"], strict=True):
        assert {k: v for k, v in one.items() if k != "run"} == {k: v for k, v in other.items() if k != "run"}
    assert [n["value"] for n in found["numbers"]] == [n["value"] for n in expected["numbers"]]


def test_names_of_folders_are_text_on_the_page(runs, tmp_path):
    name = "<img src=x onerror=alert(1)>"
    shutil.copytree(runs / "de", tmp_path / name)
    shutil.copytree(runs / "tr", tmp_path / "<script>alert(2)")
    call = ["--views", "similarity,radial,plane", *CLOSELY, "--out", "out", "--quiet"]
    polymode("landscape", name, "<script>alert(2)", *call, cwd=tmp_path)
    page = (tmp_path / "out/landscape.html").read_text()
    assert "<img src=x" not in page
    assert "<script>alert(2)" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


# --- checkpoints -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Tables of classes and of numbers, and states of networks for each."""
    folder = tmp_path_factory.mktemp("elsewhere")
    x = np.random.default_rng(0).normal(size=(80, 2))
    classes = "\n".join(f"{a:.4f},{b:.4f},{'yes' if a > 0 else 'no'}" for a, b in x)
    (folder / "table.csv").write_text(f"a,b,answer\n{classes}\n")
    (folder / "numbers.csv").write_text("a,b,y\n" + "\n".join(f"{a:.4f},{b:.4f},{a - b:.4f}" for a, b in x))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for kind, outputs in (("net", 2), ("line", 1)):
            module = pm.models.MLP(2, outputs, (8,))
            with torch.no_grad():
                for weight in module.parameters():
                    weight.copy_(torch.randn(weight.shape, generator=generator))
            torch.save(module.state_dict(), folder / f"{kind}{seed}.pt")
    return folder


NETS = ["--checkpoints", "net0.pt", "net1.pt", "net2.pt", "--model", "mlp", "--set", "model.hidden=[8]"]
TABLE = ["--data", "table.csv"]


@torch.no_grad()
def test_checkpoints_trained_elsewhere(elsewhere):
    said_ = polymode("landscape", *NETS, *TABLE, *CLOSELY, "--out", "out", "--json", cwd=elsewhere)
    document = json.loads(said_.stdout)
    assert [row["run"] for row in document["runs"]] == ["net0", "net1", "net2"]
    found = np.load(elsewhere / "out/three.npz")
    vectors = [
        parameters_to_vector(torch.load(elsewhere / f"net{i}.pt", weights_only=True).values()).double()
        for i in range(3)
    ]
    cosines = [
        float(vectors[i] @ vectors[j] / (vectors[i].norm() * vectors[j].norm()))
        for i, j in itertools.combinations(range(3), 2)
    ]
    values = {n["what"]: n["value"] for n in document["numbers"]}
    assert values["cosine of weights, between runs"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert np.isfinite(found["loss"]).all()
    similarity = np.load(elsewhere / "out/similarity.npz")
    test = load_task(str(elsewhere / "table.csv"), {}).splits[0].test
    answers = []
    for row, index in zip(document["runs"], range(3), strict=True):
        module = pm.models.MLP(2, 2, (8,)).eval()
        module.load_state_dict(torch.load(elsewhere / f"net{index}.pt", weights_only=True))
        p = said(module, test.inputs)
        assert row["NLL"] == pytest.approx(-np.mean(np.log(p[range(len(p)), test.targets])), rel=1e-5)
        answers.append(p.argmax(-1))
    for i, j in itertools.product(range(3), repeat=2):
        apart = np.mean(answers[i] != answers[j])
        assert similarity["disagreement"][i, j] == pytest.approx(apart, abs=1e-6)
    assert similarity["disagreement"].max() > 0


def test_the_order_of_checkpoints_is_that_of_the_table(elsewhere):
    call = ["--points", 60, "--views", "similarity", "--json"]
    forward = json.loads(polymode("landscape", *NETS, *TABLE, *call, "--out", "f", cwd=elsewhere).stdout)
    turned = ["--checkpoints", "net2.pt", "net1.pt", "net0.pt", *NETS[4:]]
    backward = json.loads(polymode("landscape", *turned, *TABLE, *call, "--out", "b", cwd=elsewhere).stdout)
    assert forward["runs"] == backward["runs"][::-1]
    assert forward["runs"][0] != forward["runs"][1]


def test_surveys_of_another_network_are_not_taken(elsewhere):
    """The same weights with another activation are another network, whatever an interrupted call has left."""
    (elsewhere / "nets.py").write_text(
        "from torch import nn\nimport polymode as pm\n"
        "def build():\n    return pm.models.MLP(2, 2, (8,), activation=nn.Tanh)\n"
    )
    call = [*TABLE, *CLOSELY, "--views", "radial", "--quiet"]
    polymode("landscape", *NETS, *call, "--out", "mixed", cwd=elsewhere)
    relu = dict(np.load(elsewhere / "mixed/radial.npz"))
    (elsewhere / "mixed/numbers.json").unlink()
    tanh = ["--checkpoints", "net0.pt", "net1.pt", "net2.pt", "--model", "nets:build"]
    polymode("landscape", *tanh, *call, "--out", "mixed", cwd=elsewhere)
    polymode("landscape", *tanh, *call, "--out", "alone", cwd=elsewhere)
    mixed, alone = (np.load(elsewhere / name / "radial.npz") for name in ("mixed", "alone"))
    np.testing.assert_array_equal(mixed["loss"], alone["loss"])
    assert not np.allclose(mixed["loss"], relu["loss"])


def test_networks_of_numbers(elsewhere):
    lines = ["--checkpoints", "line0.pt", "line1.pt", "--model", "mlp", "--set", "model.hidden=[8]"]
    lines += ["--data", "numbers.csv", *CLOSELY]
    line = the_line(polymode("landscape", *lines, cwd=elsewhere, code=1))
    assert "a network that was trained with squared errors has no noise level" in line
    fixed = ["--likelihood", "fixed_gaussian", "--out", "numbers"]
    found = json.loads(polymode("landscape", *lines, *fixed, "--json", cwd=elsewhere).stdout)
    assert found["runs"] == []
    names = [n["what"] for n in found["numbers"]]
    assert any(name.startswith("difference of means / spread of targets, between runs") for name in names)
    radial = np.load(elsewhere / "numbers/radial.npz")
    assert np.isfinite(radial["error"]).all()
    assert not (elsewhere / "numbers/plane.npz").exists()


def test_corruptions_are_for_images(elsewhere):
    call = [*NETS, *TABLE, "--corruptions", "fog", "--out", "none"]
    line = the_line(polymode("landscape", *call, cwd=elsewhere, code=1))
    assert "Corruptions are for images" in line
    assert not (elsewhere / "none").exists()


def test_a_pickle_among_checkpoints_is_not_executed(elsewhere):
    class Malicious:
        def __reduce__(self):
            return open, (str(elsewhere / "touched"), "w")

    torch.save(Malicious(), elsewhere / "evil.pt")
    call = ["--checkpoints", "net0.pt", "evil.pt", *NETS[4:], *TABLE]
    line = the_line(polymode("landscape", *call, cwd=elsewhere, code=1))
    assert "evil.pt is damaged, or holds more than tensors" in line
    assert not (elsewhere / "touched").exists()


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def others(runs):
    """Runs beside the others that do not go with them."""
    single = ["--method", "single", "--epochs", 1]
    polymode("train", *SMALL, *single, "--run", "one", cwd=runs)
    wide = [*SMALL[:4], "--set", "model.hidden=[9]", *SMALL[6:]]
    polymode("train", *wide, *single, "--run", "wide", cwd=runs)
    polymode("train", *SMALL, "--set", "data.num_train=200", *single, "--run", "fewer", cwd=runs)
    (runs / "nothing").mkdir()
    return runs


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Name folders of runs, or files with --checkpoints (and --model and --data)"),
        (["tr", "--checkpoints", "x.pt"], 2, "Name folders of runs, or files with --checkpoints"),
        (["--checkpoints", "x.pt"], 2, "--checkpoints needs the network and labelled data"),
        (["--checkpoints", "x.pt", "--model", "mlp"], 2, "--model MODEL --data DATA"),
        (["--checkpoints", "x.pt", "--data", "digits"], 2, "--model MODEL --data DATA"),
        (["--checkpoints", "x.pt", "--model", "mlp", "--data", "digits"], 1, "x.pt is missing"),
        (["nowhere"], 1, "nowhere is not a folder"),
        (["nothing"], 1, "manifest.json is missing: this is not a run"),
        (["tr", "nowhere"], 1, "nowhere is not a folder"),
        (["tr", "--views", "radail"], 2, "Unknown view 'radail'. Did you mean 'radial'"),
        (["tr", "--figures", "gif"], 2, "Unknown kind of figures 'gif'"),
        (["tr", "--corruptions", "smog"], 2, "Unknown corruption 'smog'"),
        (["tr", "--grid", "2"], 2, "--grid must be at least 3, got 2"),
        (["tr", "--points", "1"], 2, "--points must be at least 2, got 1"),
        (["tr", "--draws", "1"], 2, "--draws must be at least 2, got 1"),
        (["tr", "--least-accuracy", "1.5"], 2, "--least-accuracy lies between 0 and 1, got 1.5"),
        (["tr", "--steps", "long"], 2, "long"),
        (["tr", "--seed", "-1"], 2, "--seed must be at least 0, got -1"),
        (["one", "wide"], 1, "Networks of different forms have no plane or path in common"),
        (["one", "fewer"], 1, "one and fewer have different test points"),
        (["tr", "--model", "smallcnn"], 2, "tr was trained with mlp"),
    ],
)
def test_mistakes_get_one_line_and_an_exit_code(others, arguments, code, message):
    line = the_line(polymode("landscape", *arguments, cwd=others, code=code))
    assert message in line
    assert not (others / "runs").exists()


def test_one_run_has_no_radial_plane(others):
    output = polymode("landscape", "one", "--views", "radial", *CLOSELY, "--out", "none", cwd=others, code=2)
    assert "These networks allow none of the views radial" in output.stderr.splitlines()[-1]
    assert not (others / "none/landscape.html").exists()


def test_the_same_run_twice_has_no_plane(others):
    call = ["landscape", "one", "one", *CLOSELY, "--out", "none"]
    output = polymode(*call, "--views", "radial", cwd=others, code=2)
    assert "allow none of the views radial" in output.stderr.splitlines()[-1]
    assert "lie on one line" in output.stderr.splitlines()[-1]
    said_ = polymode(*call, "--views", "radial,similarity", "--json", cwd=others)
    assert "lie on one line" in json.loads(said_.stdout)["left_out"]["radial"]
    assert "lie on one line" in (others / "none/landscape.html").read_text()


def test_a_bound_that_nothing_reaches_is_told(others):
    call = ["landscape", "tr", *CLOSELY, "--views", "map", "--least-accuracy", "1", "--out", "bound"]
    output = polymode(*call, cwd=others, code=2)
    assert "draws reached an accuracy of 1.0" in output.stderr.splitlines()[-1]
