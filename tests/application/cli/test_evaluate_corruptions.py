"""``polymode evaluate --corruptions``, from files to tables."""

import json
import pickle

import numpy as np
import pytest
from command_line import polymode, the_line
from PIL import Image

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SMALL = ["--data", "cifar10", "--model", "smallcnn", "--epochs", 3, "--quiet", "--set", "data.batch_size=20"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs on images in the format of CIFAR-10: a colour for each class, with noise."""
    root = tmp_path_factory.mktemp("corruptions")
    folder = root / "data/cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = random.integers(0, 10, 30)
        colours = np.stack([labels * 25, 255 - labels * 25, (labels * 77) % 256], 1)[:, :, None]
        pixels = np.clip(colours + random.normal(0, 30, (30, 3, 1024)), 0, 255).astype(np.uint8)
        content = pickle.dumps({"data": pixels.reshape(30, 3072), "labels": labels.tolist()}, 2)
        (folder / name).write_bytes(content)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}, 2))
    polymode("train", *SMALL, "--method", "single", "--run", "one", cwd=root, **where(root))
    polymode(
        *("train", *SMALL, "--method", "deep_ensemble", "--set", "deep_ensemble.num_members=2"),
        *("--seeds", 2, "--run", "two"),
        cwd=root,
        **where(root),
    )
    return root


def where(root):
    return {"POLYMODE_DATA": str(root / "data")}


def test_corruptions_are_made_and_judged_beside_a_baseline(place):
    options = ["--corruptions", "fog,contrast,saturate", "--severities", "5,1", "--corruption-images", 20]
    shown = polymode("evaluate", "two", *options, "--baseline", "one", cwd=place, **where(place))
    assert "deep_ensemble on 20 corrupted images (made)" in shown.stdout
    for word in ("none", "fog", "saturate", "accuracy at 5", "cAcc", "cNLL", "mCE", "(2 of 15 were judged)"):
        assert word in shown.stdout
    assert "accuracy at 3" not in shown.stdout
    assert "contrast: corruption 2 of 3, eta" in shown.stderr
    told = polymode(
        *("evaluate", "two", *options, "--baseline", "one", "--json", "--out", "s.json", "--quiet"),
        cwd=place,
        **where(place),
    )
    assert told.stderr == ""
    content = json.loads(told.stdout)
    assert content["images"] == "made"
    assert json.loads((place / "s.json").read_text()) == content["posteriors"]
    assert len(content["posteriors"]) == 2
    first = content["posteriors"][0]
    assert list(first["corrupted"]) == ["fog", "contrast", "saturate"]
    pairs = [scores for levels in first["corrupted"].values() for scores in levels.values()]
    assert len(pairs) == 6
    assert first["corruption_accuracy"] == pytest.approx(sum(pair["accuracy"] for pair in pairs) / 6)
    assert first["corruption_nll"] == pytest.approx(sum(pair["nll"] for pair in pairs) / 6)

    # Against the run itself the error is 100 %.
    own = polymode("evaluate", "one", *options, "--baseline", "one", "--json", cwd=place, **where(place))
    [itself] = json.loads(own.stdout)["posteriors"]
    assert itself["mean_corruption_error"] == pytest.approx(100)
    assert itself["relative_corruption_error"] in (None, pytest.approx(100))
    # Without corruption it is the ordinary judgement, of all 30 images.
    whole = polymode("evaluate", "one", "--corruptions", "contrast", "--json", cwd=place, **where(place))
    [ordinary] = json.loads(polymode("evaluate", "one", "--json", cwd=place, **where(place)).stdout)[
        "posteriors"
    ]
    clean = json.loads(whole.stdout)["posteriors"][0]["clean"]
    assert clean == {key: ordinary[key] for key in clean}


def test_official_files_are_read_where_they_are(place):
    folder = place / "data/CIFAR-10-C"
    folder.mkdir()
    test = pickle.loads((place / "data/cifar-10-batches-py/test_batch").read_bytes())
    images = test["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    # Severity 1 is the clean images, the others are black.
    blocks = np.concatenate([images, np.zeros((120, 32, 32, 3), np.uint8)])
    np.save(folder / "fog.npy", blocks)
    np.save(folder / "labels.npy", np.tile(np.array(test["labels"], np.uint8), 5))
    found = polymode("evaluate", "one", "--corruptions", "fog", "--json", cwd=place, **where(place))
    content = json.loads(found.stdout)
    assert content["images"] == f"from {folder}"
    [scores] = content["posteriors"]
    assert scores["corrupted"]["fog"]["1"] == scores["clean"]
    assert len({str(scores["corrupted"]["fog"][severity]) for severity in "2345"}) == 1
    # A corruption that is not among them: all are made.
    found = polymode(
        *("evaluate", "one", "--corruptions", "fog,snow", "--severities", 1, "--json"),
        cwd=place,
        **where(place),
    )
    assert json.loads(found.stdout)["images"] == "made"

    # Folders as ImageNet-C has them.
    for number in range(6):
        part = place / f"official/fog/2/{NAMES[test['labels'][number]]}"
        part.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(part / f"{number}.png")
    found = polymode(
        *("evaluate", "one", "--corruptions", "fog", "--severities", 2, "--corruption-folder", "official"),
        "--json",
        cwd=place,
        **where(place),
    )
    content = json.loads(found.stdout)
    assert content["images"] == "from official"
    clean = polymode(
        *("evaluate", "one", "--corruptions", "contrast", "--corruption-images", 6, "--json"),
        cwd=place,
        **where(place),
    )
    expected = json.loads(clean.stdout)["posteriors"][0]["clean"]
    # The same six images, without loss, in another order.
    assert content["posteriors"][0]["corrupted"]["fog"]["2"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--corruptions", "fogg"], 2, "Unknown corruption 'fogg'. Did you mean 'fog'"),
        (["--corruptions", "fog", "--severities", "0"], 2, "--severities '0': they go from 1 to 5"),
        (["--corruptions", "fog", "--severities", "one"], 2, "--severities 'one': write whole numbers"),
        (["--corruptions", "fog", "--corruption-images", "-1"], 2, "--corruption-images must be a number"),
        (["--corruptions", "fog", "--ood", "svhn"], 2, "leave --ood and --reference out"),
        (["--corruptions", "saturate", "--baseline", "one"], 2, "needs one of the fifteen"),
        (["--corruptions", "fog", "--corruption-folder", "gone"], 1, "There is no folder"),
        (["--corruptions", "fog", "--data", "cifar10_shifted"], 2, "add --data cifar10"),
        (["--baseline", "one"], 2, "--baseline needs --corruptions"),
        (["--corruption-images", "5"], 2, "--corruption-images needs --corruptions"),
    ],
)
def test_mistakes_get_one_line(place, arguments, code, message):
    result = polymode("evaluate", "one", *arguments, cwd=place, code=code, **where(place))
    assert message in the_line(result)


def test_data_that_are_not_images_are_refused(tmp_path):
    small = ["--data", "two_moons", "--set", "data.num_train=50", "--set", "model.hidden=[4]"]
    polymode("train", *small, "--epochs", 2, "--run", "out", "--quiet", cwd=tmp_path)
    refused = polymode("evaluate", "out", "--corruptions", "fog", cwd=tmp_path, code=1)
    assert "Corruptions are for images; these are table of shape [2]" in the_line(refused)
