"""``polymode diversity``: numbers against loops over saved probabilities, and what is refused."""

import itertools
import json
import math
import pickle
import shutil

import numpy as np
import pytest
from command_line import polymode, the_line
from safetensors.numpy import save_file

POINTS, CLASSES = 40, 3


def probabilities(members, seed, points=POINTS, classes=CLASSES):
    return np.random.default_rng(seed).dirichlet(np.ones(classes), size=(members, points))


LABELS = np.random.default_rng(9).integers(0, CLASSES, POINTS)


def numbers_of(folder, view):
    document = json.loads((folder / "numbers.json").read_text())
    return {n["what"]: (n["value"], n["standard_error"]) for n in document["numbers"] if n["view"] == view}


def kl(p, q):
    return float(np.mean(np.sum(p * (np.log(p) - np.log(q)), axis=-1)))


def js(*members):
    mean = np.mean(members, axis=0)
    return float(np.mean([kl(p, mean) for p in members]))


def differ(p, q):
    return float(np.mean(p.argmax(-1) != q.argmax(-1)))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Probabilities of two runs with three and two members, and the page of them."""
    folder = tmp_path_factory.mktemp("two_runs")
    runs = {"first": probabilities(3, 1), "second": probabilities(2, 2)}
    np.savez(folder / "first.npz", probabilities=runs["first"], labels=LABELS)
    save_file({"p": runs["second"]}, folder / "second.safetensors")
    said = polymode("diversity", "first.npz", "second.safetensors", "--out", "out", cwd=folder)
    return folder, runs, said


def pairs(values):
    """Mean and standard error over runs."""
    return np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else None


def assert_number(found, values):
    mean, error = pairs(values)
    assert found[0] == pytest.approx(mean, abs=1e-6)
    assert found[1] == (None if error is None else pytest.approx(error, abs=1e-6))


def test_pairs_of_networks_are_compared_one_by_one(two_runs):
    folder, runs, _ = two_runs
    found = numbers_of(folder / "out", "similarity")
    measures = {"disagreement": differ, "KL divergence (nats)": kl, "JS divergence of pairs (nats)": js}
    for name, measure in measures.items():
        within = [
            np.mean([measure(p, q) for p, q in itertools.permutations(run, 2)]) for run in runs.values()
        ]
        both = [(p, q) for p in runs["first"] for q in runs["second"]]
        between = [np.mean([(measure(p, q) + measure(q, p)) / 2 for p, q in both])]
        assert_number(found[f"{name}, within a run"], within)
        assert_number(found[f"{name}, between runs"], between)  # one pair of runs has no error
    arrays = np.load(folder / "out/similarity.npz")
    everyone = [*runs["first"], *runs["second"]]
    for i, j in itertools.product(range(5), repeat=2):
        assert arrays["KL divergence (nats)"][i, j] == pytest.approx(kl(everyone[i], everyone[j]), abs=1e-9)
    assert arrays["runs"].tolist() == ["first"] * 3 + ["second"] * 2


def test_runs_are_scored_as_ensembles(two_runs):
    folder, runs, _ = two_runs
    rows = json.loads((folder / "out/numbers.json").read_text())["runs"]
    for row, (name, run) in zip(rows, runs.items(), strict=True):
        mean = run.mean(0)
        assert (row["run"], row["networks"]) == (name, len(run))
        assert row["mean accuracy of a single network"] == pytest.approx(
            np.mean(run.argmax(-1) == LABELS), abs=1e-6
        )
        assert row["accuracy"] == pytest.approx(np.mean(mean.argmax(-1) == LABELS), abs=1e-6)
        assert row["NLL"] == pytest.approx(-np.mean(np.log(mean[range(POINTS), LABELS])))
        assert row["Brier"] == pytest.approx(np.mean(np.sum((mean - np.eye(CLASSES)[LABELS]) ** 2, -1)))
        between = [differ(p, q) for p, q in itertools.combinations(run, 2)]
        assert row["disagreement"] == pytest.approx(np.mean(between), abs=1e-6)
        assert row["JS divergence of all"] == pytest.approx(js(*run))
    found = numbers_of(folder / "out", "sizes")
    means = np.stack([run.mean(0) for run in runs.values()])
    alone = np.mean([np.mean(mean.argmax(-1) == LABELS) for mean in means])
    assert found["accuracy, mean of each run, 1 run"][0] == pytest.approx(alone, abs=1e-6)
    together = np.mean(means.mean(0).argmax(-1) == LABELS)
    assert found["accuracy, mean of each run, 2 runs"][0] == pytest.approx(together, abs=1e-6)


def test_networks_stand_beside_the_first(two_runs):
    folder, runs, _ = two_runs
    base, *others = runs["first"]
    arrays = np.load(folder / "out/plane.npz")
    assert float(arrays["base accuracy"]) == pytest.approx(np.mean(base.argmax(-1) == LABELS))
    for name, group in (("others of first", others), ("second", runs["second"])):
        accuracy = [np.mean(p.argmax(-1) == LABELS) for p in group]
        apart = [differ(p, base) for p in group]
        np.testing.assert_allclose(arrays[f"{name}, accuracy"], accuracy)
        np.testing.assert_allclose(arrays[f"{name}, disagreement"], apart)
        expected = np.mean([d / (1 - a) for d, a in zip(apart, accuracy, strict=True)])
        found = numbers_of(folder / "out", "plane")[f"disagreement / (1 − accuracy), {name}"]
        assert found[0] == pytest.approx(expected)


def test_within_a_run_and_between_runs(two_runs):
    """Members of a file have no order: all of one run are compared with all of the other."""
    folder, runs, _ = two_runs
    within = [np.mean([differ(p, q) for p, q in itertools.combinations(run, 2)]) for run in runs.values()]
    between = np.mean([differ(p, q) for p in runs["first"] for q in runs["second"]])
    [(ratio, _)] = numbers_of(folder / "out", "pairs").values()
    assert ratio == pytest.approx(between / np.mean(within), abs=1e-5)


def test_what_is_said_and_left(two_runs):
    folder, _, said = two_runs
    assert {path.name for path in (folder / "out").iterdir()} == {
        "landscape.html",
        "numbers.json",
        *(f"{key}.npz" for key in ("similarity", "pairs", "map", "plane", "sizes")),
    }
    assert "Diversity of first, second" in said.stdout
    assert "5 networks on 40 points of 3 classes" in (folder / "out/landscape.html").read_text()
    again = polymode("diversity", "first.npz", "second.safetensors", "--out", "more", "--json", cwd=folder)
    document = json.loads(again.stdout)
    assert document["page"] == "more/landscape.html"
    assert document["numbers"] == json.loads((folder / "out/numbers.json").read_text())["numbers"]
    places = [np.load(folder / name / "map.npz")["places"] for name in ("out", "more")]
    np.testing.assert_array_equal(*places)


@pytest.mark.parametrize("where", ["inside", "npy", "npz", "safetensors", "any name"])
def test_labels_come_from_a_file_or_from_beside(where, tmp_path):
    run = probabilities(2, 3)
    np.savez(tmp_path / "run.npz", **{"probs": run} | ({"y": LABELS} if where == "inside" else {}))
    np.save(tmp_path / "labels.npy", LABELS)
    np.savez(tmp_path / "labels.npz", targets=LABELS, other=np.zeros(2))
    np.savez(tmp_path / "alone.npz", whatever=LABELS.astype(np.uint8))
    save_file({"labels": LABELS}, tmp_path / "labels.safetensors")
    given = {"npy": "labels.npy", "npz": "labels.npz", "safetensors": "labels.safetensors"}
    given |= {"any name": "alone.npz"}
    options = ["--labels", given[where]] if where in given else []
    said = polymode("diversity", "run.npz", "--out", "out", "--json", *options, cwd=tmp_path)
    [row] = json.loads(said.stdout)["runs"]
    assert row["accuracy"] == pytest.approx(np.mean(run.mean(0).argmax(-1) == LABELS), abs=1e-6)


def test_without_labels_there_is_no_accuracy(tmp_path):
    run = probabilities(4, 3)
    np.savez(tmp_path / "run.npz", anything=run)
    said = polymode("diversity", "run.npz", "--out", "out", "--json", cwd=tmp_path)
    [row] = json.loads(said.stdout)["runs"]
    assert row.keys() == {"run", "networks", "disagreement", "JS divergence of all"}
    assert row["JS divergence of all"] == pytest.approx(js(*run))
    assert not (tmp_path / "out/plane.npz").exists()


@pytest.mark.parametrize("kind", ["three axes", "a network each", "half", "double of other bytes", "npy"])
def test_members_in_any_usual_form(kind, tmp_path):
    run, tolerance = probabilities(3, 4), 1e-6
    name = "run.npz"
    if kind == "three axes":
        np.savez_compressed(tmp_path / name, predictions=run, logits=np.log(run))  # the known name counts
    elif kind == "a network each":
        np.savez(tmp_path / name, **{f"seed{i}": p for i, p in enumerate(run)}, labels=LABELS)
    elif kind == "half":
        np.savez(tmp_path / name, p=run.astype(np.float16))
        tolerance = 1e-2
    elif kind == "double of other bytes":
        np.savez(tmp_path / name, p=run.astype(">f8"))
    else:
        name = "run.npy"
        np.save(tmp_path / name, run)
    said = polymode("diversity", name, "--out", "out", "--json", cwd=tmp_path)
    [row] = json.loads(said.stdout)["runs"]
    assert row["networks"] == 3
    assert row["JS divergence of all"] == pytest.approx(js(*run), abs=tolerance)


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder, seed in (("x", 1), ("y", 2)):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "a.npz", p=probabilities(2, seed))
    np.savez(tmp_path / "a (1).npz", p=probabilities(2, 3))
    said = polymode("diversity", "x/a.npz", "y/a.npz", "a (1).npz", "--out", "out", "--json", cwd=tmp_path)
    rows = json.loads(said.stdout)["runs"]
    assert len({row["run"] for row in rows}) == 3
    found = [row["JS divergence of all"] for row in rows]
    assert found == pytest.approx([js(*probabilities(2, seed)) for seed in (1, 2, 3)])


def test_many_runs_are_thinned(tmp_path):
    """A dozen runs have thousands of subsets, and hundreds of networks no matrix that can be read."""
    names = []
    for seed in range(11):
        np.savez(tmp_path / f"r{seed}.npz", p=probabilities(11, seed, points=6), y=LABELS[:6])
        names.append(f"r{seed}.npz")
    polymode("diversity", *names, "--out", "out", "--quiet", cwd=tmp_path)
    assert len(np.load(tmp_path / "out/similarity.npz")["runs"]) == 110
    sizes = np.load(tmp_path / "out/sizes.npz")
    assert sizes["mean of each run, num_runs"].tolist() == list(range(1, 11))
    assert "Of the first 10 runs." in (tmp_path / "out/landscape.html").read_text()


def test_names_are_text_on_the_page(tmp_path):
    name = "<img src=x onerror=alert(1)>&\"'"
    np.savez(tmp_path / f"{name}.npz", p=probabilities(3, 1), y=LABELS)
    np.savez(tmp_path / "<script>alert(2).npz", p=probabilities(2, 2))
    polymode("diversity", f"{name}.npz", "<script>alert(2).npz", "--out", "out", cwd=tmp_path)
    page = (tmp_path / "out/landscape.html").read_text()
    assert "<img src=x" not in page
    assert "<script>alert(2)" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;" in page
    assert "&lt;script&gt;alert(2)" in page


# --- mistakes ----------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def changed(place, value):
    run = probabilities(2, 1)
    run[place] = value
    return run


def bad_files(folder):
    """Files that must not be believed, by name."""
    good = probabilities(2, 1)
    np.savez(folder / "good.npz", p=good)
    np.savez(folder / "labelled.npz", p=good, labels=LABELS)
    np.savez(folder / "nan.npz", p=changed((1, 4, 0), np.nan))
    np.savez(folder / "infinite.npz", p=changed((1, 4, 0), np.inf))
    np.savez(folder / "negative.npz", p=changed((0, 3), [1.5, -0.5, 0.0]))
    np.savez(folder / "logits.npz", p=np.log(good))
    np.savez(folder / "sums.npz", p=changed((1, 7), [0.5, 0.4, 0.0]))
    np.savez(folder / "points.npz", p=probabilities(2, 1, points=7))
    np.savez(folder / "classes.npz", p=probabilities(2, 1, classes=4))
    np.savez(folder / "one class.npz", p=np.ones((2, 40, 1)))
    np.savez(folder / "one.npz", p=good[:1])
    np.savez(folder / "flat.npz", p=good[0, :, 0])
    np.savez(folder / "shapes.npz", a=good[0], b=good[1, :5])
    np.savez(folder / "whole.npz", p=(good > 0.5).astype(int))
    np.savez(folder / "empty.npz", p=np.zeros((2, 0, 3)))
    np.savez(folder / "nothing.npz")
    np.savez(folder / "high.npz", p=good, labels=np.where(LABELS == 2, 3, LABELS))
    np.savez(folder / "low.npz", p=good, labels=LABELS - 1)
    np.savez(folder / "short.npz", p=good, labels=LABELS[:-1])
    np.savez(folder / "hot.npz", p=good, labels=np.eye(3)[LABELS])
    np.savez(folder / "other labels.npz", p=good, labels=LABELS[::-1])
    np.savez(folder / "two arrays.npz", a=LABELS, b=LABELS)
    objects = np.empty(3, dtype=object)
    objects[:] = Malicious(folder / "touched")
    np.savez(folder / "objects.npz", p=objects)
    (folder / "pickle.npz").write_bytes(pickle.dumps(Malicious(folder / "touched")))
    np.savez_compressed(folder / "packed.npz", p=good)
    whole = (folder / "packed.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "spoilt.npz").write_bytes(whole[:300] + b"x" * 200 + whole[500:])
    (folder / "no.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (folder / "rubbish.safetensors").write_bytes(b"rubbish")
    (folder / "run.csv").write_text("a,b\n0.5,0.5\n")


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    bad_files(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Name files of probabilities: polymode diversity FILE"),
        (["good.npz", "--figures", "jpg"], 2, "Unknown kind of figures 'jpg'"),
        (["none.npz"], 1, "none.npz is missing"),
        (["run.csv"], 1, "run.csv is not one of .npz, .npy, .safetensors"),
        (
            ["good.npz", "nan.npz"],
            1,
            "nan.npz: 1 probabilities are NaN or infinite, first at (member, point, ",
        ),
        (["infinite.npz"], 1, "(1, 4, 0)"),
        (["negative.npz"], 1, "the smallest of all is -0.5"),
        (["logits.npz"], 1, "Logits go through a softmax first"),
        (["sums.npz"], 1, "those of (member, point) (1, 7) sum to 0.9"),
        (["good.npz", "points.npz"], 1, "good has 40 points of 3 classes, points has 7 of 3"),
        (["good.npz", "classes.npz"], 1, "classes has 40 of 4: networks are compared on the same points"),
        (["one class.npz"], 1, "at least two classes"),
        (["one.npz"], 1, "There is one network: diversity needs at least two"),
        (["flat.npz"], 1, "flat.npz holds {'p': [40]}: probabilities are an array"),
        (["shapes.npz"], 1, "all of one shape"),
        (["whole.npz"], 1, "probabilities are an array"),
        (["empty.npz"], 1, "probabilities [2, 0, 3] need points"),
        (["nothing.npz"], 1, "nothing.npz holds {}"),
        (["high.npz"], 1, "Labels go from 0 to 3; 3 classes, counted from 0, end at 2"),
        (["low.npz"], 1, "Labels go from -1 to 1"),
        (["short.npz"], 1, "There are 39 labels for 40 points"),
        (["hot.npz"], 1, "labels must be whole numbers [points], got float64 [40, 3]"),
        (["labelled.npz", "other labels.npz"], 1, "hold different labels: they are about other points"),
        (["good.npz", "--labels", "two arrays.npz"], 1, "name the labels 'labels'"),
        (["good.npz", "--labels", "none.npy"], 1, "none.npy is missing"),
        (["objects.npz"], 1, "objects.npz cannot be read: it holds Python objects, which are not read"),
        (["pickle.npz"], 1, "pickle.npz cannot be read: File is not a zip file"),
        (["cut.npz"], 1, "cut.npz cannot be read"),
        (["spoilt.npz"], 1, "spoilt.npz cannot be read"),
        (["no.safetensors"], 1, "no.safetensors holds {}"),
        (["rubbish.safetensors"], 1, "rubbish.safetensors cannot be read"),
    ],
)
def test_mistakes_get_one_line_and_an_exit_code(bad, arguments, code, message):
    line = the_line(polymode("diversity", *arguments, cwd=bad, code=code))
    assert message in line
    assert not (bad / "touched").exists()
    assert not (bad / "runs").exists()


def browser():
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
    )


@pytest.mark.skipif(browser() is None, reason="figures as files are drawn by a browser, and none is found")
def test_figures_as_files(tmp_path):
    pytest.importorskip("kaleido")
    np.savez(tmp_path / "run.npz", p=probabilities(2, 1))
    polymode(
        "diversity",
        "run.npz",
        "--figures",
        "png",
        "--out",
        "out",
        "--quiet",
        cwd=tmp_path,
        BROWSER_PATH=browser(),
    )
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "out/figures").iterdir()}
    assert drawn.keys() == {"similarity.png", "similarity-dark.png"}
    assert all(content.startswith(b"\x89PNG") for content in drawn.values())
    assert len(set(drawn.values())) == 2
