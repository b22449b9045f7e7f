import gzip
import hashlib
import pickle
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from polymode.application.datasets import catalogue
from polymode.application.datasets.catalogue import DATASETS
from polymode.application.datasets.downloads import Download
from polymode.application.datasets.loading import (
    check_data,
    fetch_data,
    is_ready,
    load_inputs_for_ood,
    load_task,
)
from polymode.errors import InputError

PIXELS = np.arange(3 * 784, dtype=np.uint8).reshape(3, 28, 28)


def write_mnist(folder, name="MNIST"):
    place = folder / name / "raw"
    place.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = bytes([0, 0, 8, 3]) + np.array([3, 28, 28], ">u4").tobytes() + PIXELS.tobytes()
        labels = bytes([0, 0, 8, 1]) + np.array([3], ">u4").tobytes() + bytes([5, 0, 4])
        (place / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (place / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return folder


def test_the_catalogue_describes_every_set():
    assert {"digits", "two_moons", "cifar10", "cifar100", "svhn", "imdb", "uci-boston", "uci-yacht"} <= set(
        DATASETS
    )
    assert len(DATASETS) == 23
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert dataset.summary
        assert dataset.facts
        assert bool(dataset.downloads) == bool(dataset.files)
        assert all(download.url.startswith("http") for download in dataset.downloads)


def test_ready_is_when_all_files_are_there(tmp_path, monkeypatch):
    assert is_ready(DATASETS["digits"], tmp_path)
    assert not is_ready(DATASETS["mnist"], tmp_path)
    write_mnist(tmp_path)
    assert is_ready(DATASETS["mnist"], tmp_path)
    monkeypatch.setenv("POLYMODE_DATA", str(tmp_path))
    assert is_ready(DATASETS["mnist"])
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    assert not is_ready(DATASETS["mnist"])


def test_fetching_downloads_unpacks_and_then_does_nothing(tmp_path, monkeypatch):
    source, folder = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    batch = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}, 2)
    with tarfile.open(source / "cifar-10-python.tar.gz", "w:gz") as tar:
        for name in DATASETS["cifar10"].files:
            path = source / "entry"
            path.write_bytes(pickle.dumps({"label_names": ["a", "b"]}) if name.endswith("meta") else batch)
            tar.add(path, name)
    content = (source / "cifar-10-python.tar.gz").read_bytes()
    official = DATASETS["cifar10"]
    download = replace(official.downloads[0], checksum=f"md5:{hashlib.md5(content).hexdigest()}")
    monkeypatch.setitem(DATASETS, "cifar10", replace(official, downloads=(download,)))
    monkeypatch.setenv("POLYMODE_MIRROR", source.as_uri())
    seen = []
    files = fetch_data("cifar10", folder, lambda *step: seen.append(step))
    assert all(file.is_file() for file in files)
    assert seen[-1] == ("cifar-10-python.tar.gz", len(content), len(content))
    monkeypatch.setenv("POLYMODE_MIRROR", "http://127.0.0.1:9")
    assert fetch_data("cifar10", folder) == files
    assert load_task("cifar10", {}, folder).splits[0].train.targets.tolist() == [0, 1] * 5
    with pytest.raises(InputError, match=r"could not fetch|Could not fetch"):
        fetch_data("mnist", folder)
    with pytest.raises(InputError, match=r"Unknown data set 'cifar1'. Did you mean 'cifar10'"):
        fetch_data("cifar1", folder)


def test_embedded_sets_need_nothing(tmp_path):
    assert fetch_data("digits", tmp_path) == []
    lines = check_data("diabetes", tmp_path)
    assert lines[:2] == ["training examples: 354", "test examples: 88"]
    assert lines[-1] == "mean and standard deviation of the target: 152.1, 77.01"
    for name in ("digits", "two_moons", "gap_regression", "breast_cancer"):
        assert check_data(name, tmp_path)


def test_what_differs_from_the_official_data_is_named(tmp_path):
    write_mnist(tmp_path)
    with pytest.raises(InputError, match=r"'mnist' differs .*: training examples 3, expected was 60000"):
        check_data("mnist", tmp_path)


def test_every_kind_of_fact_is_compared(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    counts = (1, 0, 0, 0, 1, 1, 0, 0, 0, 0)
    mean = float(PIXELS.mean() / 255)
    right = catalogue.Expected(3, 3, 1, counts, counts, (mean,), (5, 0), (5, 0, 4))
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], expected=right))
    assert len(check_data("mnist", tmp_path)) == 8
    for wrong in (
        {"num_test": 4},
        {"num_splits": 2},
        {"train_counts": counts[::-1]},
        {"test_counts": counts[::-1]},
        {"channel_means": (mean * 1.01,)},
        {"first_train": (5, 1)},
        {"first_test": (5, 0, 5)},
        {"num_features": 2},
    ):
        monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], expected=replace(right, **wrong)))
        with pytest.raises(InputError, match=r"differs from the official one"):
            check_data("mnist", tmp_path)


# Specifications.


def test_names_take_the_options_of_their_loader(tmp_path):
    assert load_task("digits", {"num_train": 10}).splits[0].train.num_examples == 10
    with pytest.raises(InputError, match=r"Unknown option of .*digits 'num_trian'. Did you mean 'num_train'"):
        load_task("digits", {"num_trian": 10})
    with pytest.raises(InputError, match=r"Unknown option of the data set uci-boston 'name'"):
        load_task("uci-boston", {"name": "yacht"})
    with pytest.raises(InputError, match=r"needs data.txt.*bostonHousing"):
        load_task("uci-boston", {"gap": True}, tmp_path)


def test_tables_and_image_folders_are_named_by_their_path(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{n},{n / 2}\n" for n in range(10)))
    assert load_task(str(path), {"test_share": 0.5}).splits[0].test.num_examples == 5
    with pytest.raises(InputError, match=r"Unknown option of the table .*'shares'"):
        load_task(str(path), {"shares": 0.5})
    with pytest.raises(InputError, match=r"There is no file"):
        load_task(str(tmp_path / "b.csv"), {})
    for name in ("a", "b"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (4, 4), (number, 2, 3)).save(tmp_path / "pets" / name / f"{number}.png")
    assert load_task(str(tmp_path / "pets"), {"batch_size": 2}).splits[0].train.batch_size == 2


OWN = """
import torch

def load(number=4, *, shift):
    import beside
    x = torch.arange(number, dtype=torch.float32)[:, None] + shift + beside.EXTRA
    return (x, x[:, 0]), (x, x[:, 0])

def anything(**options):
    pair = torch.zeros(2, 1), torch.tensor([0, 1])
    return {"train": pair, "test": pair}

NUMBER = 3
"""


def test_functions_of_the_users_own(tmp_path, monkeypatch):
    import sys

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_data.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("EXTRA = 100")
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_task("my_own_data:load", {"shift": 1.0})
    assert task.splits[0].train.inputs[:, 0].tolist() == [101, 102, 103, 104]
    assert (task.name, task.likelihood) == ("my_own_data:load", "gaussian")
    assert load_task("my_own_data:anything", {"of": 1}).num_outputs == 2
    with pytest.raises(InputError, match=r"do not suffice: missing a required .*'shift'"):
        load_task("my_own_data:load", {})
    with pytest.raises(InputError, match=r"'laod'. Did you mean 'load'"):
        load_task("my_own_data:laod", {})
    with pytest.raises(InputError, match=r"my_own_data:NUMBER is a int: name a function"):
        load_task("my_own_data:NUMBER", {})
    with pytest.raises(InputError, match=r"'no_such_module:load': there is no module 'no_such_module'"):
        load_task("no_such_module:load", {})


def test_an_unknown_specification_lists_what_there_is():
    with pytest.raises(
        InputError, match=r"'digit'. Did you mean 'digits'.*two_moons.*\.csv.*package.module:callable"
    ):
        load_task("digit", {})


# Foreign data.


def test_foreign_images_are_standardised_as_the_task(tmp_path):
    write_mnist(tmp_path)
    write_mnist(tmp_path, "FashionMNIST")
    task = load_task("mnist", {}, tmp_path)
    foreign = load_inputs_for_ood("fashion_mnist", task, tmp_path)
    # The same pixels in both sets: so are the inputs, although each set has constants of its own.
    torch.testing.assert_close(foreign.inputs, task.splits[0].test.inputs, atol=1e-5, rtol=1e-5)
    with pytest.raises(
        InputError, match=r"Examples of digits are \[1, 8, 8\], those of mnist are \[1, 28, 28\]"
    ):
        load_inputs_for_ood("digits", task, tmp_path)


def test_foreign_image_files_and_tables_are_read_as_the_task(tmp_path):
    task = load_task("digits", {})
    (tmp_path / "strange").mkdir()
    Image.new("L", (8, 8), 51).save(tmp_path / "strange/a.png")
    foreign = load_inputs_for_ood(str(tmp_path / "strange"), task)
    torch.testing.assert_close(foreign.inputs, torch.full((1, 1, 8, 8), 0.2))
    moons = load_task("two_moons", {})
    (tmp_path / "far.csv").write_text("y,x\n1,50\n")
    [[x, y]] = load_inputs_for_ood(str(tmp_path / "far.csv"), moons).inputs.tolist()
    ready = moons.splits[0].preprocessing
    assert x == pytest.approx((50 - ready.input_shift[0]) / ready.input_scale[0], rel=1e-5)
    assert y == pytest.approx((1 - ready.input_shift[1]) / ready.input_scale[1], rel=1e-5)


def test_downloads_of_the_catalogue_are_in_different_places():
    downloads = {download for dataset in DATASETS.values() for download in dataset.downloads}
    assert all(isinstance(download, Download) for download in downloads)
    assert len({download.file for download in downloads}) == len(downloads)
