import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from polymode.application.datasets.folders import image_folder, read_images
from polymode.errors import InputError


def save(path, colour, size=(6, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "pets"
    for number in range(10):
        save(root / f"cat/{number}.png", (10 * number, 0, 255))
    for number in range(5):
        save(root / f"dog/sub/{number}.png", (0, 200 + number, 255))
    (root / "dog/notes.txt").write_text("not an image")
    return root


def raw(data, preprocessing):
    shift, scale = (
        torch.tensor(v)[:, None, None] for v in (preprocessing.input_shift, preprocessing.input_scale)
    )
    return ((data.inputs * scale + shift) * 255).round().int()


def test_a_folder_is_split_in_every_class(folder):
    task = image_folder(folder, num_validation=2, batch_size=5)
    split = task.splits[0]
    assert (task.name, task.num_outputs, split.preprocessing.classes) == ("pets", 2, ("cat", "dog"))
    assert split.test.targets.bincount().tolist() == [2, 1]
    assert (split.train.num_examples, split.validation.num_examples) == (10, 2)
    assert split.preprocessing.image_shape == (3, 4, 6)
    colours = set()
    for data in (split.train, split.validation, split.test):
        for image, label in zip(raw(data, split.preprocessing), data.targets.tolist(), strict=True):
            assert bool((image == image[:, :1, :1]).all())
            red, green, _ = image[:, 0, 0].tolist()
            assert (green > 0) == (label == 1)
            colours.add((red, green))
    assert len(colours) == 15  # every image once
    torch.testing.assert_close(split.train.inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    again = image_folder(folder, num_validation=2).splits[0]
    assert torch.equal(again.train.inputs, split.train.inputs)


def test_train_and_test_folders_are_the_split(tmp_path):
    for part, number in (("train", 3), ("test", 2), ("validation", 1)):
        for label, name in enumerate(("a", "b")):
            for index in range(number):
                save(tmp_path / f"{part}/{name}/{index}.png", 100 * label + index, mode="L")
    split = image_folder(tmp_path).splits[0]
    assert raw(split.test, split.preprocessing)[:, 0, 0, 0].tolist() == [0, 1, 100, 101]
    assert split.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert split.validation.targets.tolist() == [0, 1]
    assert split.preprocessing.image_shape == (1, 4, 6)
    save(tmp_path / "test/c/0.png", 5, mode="L")
    with pytest.raises(
        InputError, match=r"classes in .*test are not those in .*train; only one of them has c"
    ):
        image_folder(tmp_path)


def test_sizes_that_differ_need_a_size(folder):
    save(folder / "cat/large.png", (1, 2, 3), size=(12, 8))
    with pytest.raises(InputError, match=r"differ in size.*6×4.*12×8|12×8.*6×4") as caught:
        image_folder(folder)
    assert "data.image_size=" in str(caught.value)
    assert image_folder(folder, image_size=5).splits[0].preprocessing.image_shape == (3, 5, 5)
    assert image_folder(folder, image_size=[3, 2]).splits[0].preprocessing.image_shape == (3, 3, 2)
    with pytest.raises(InputError, match="image_size must be one number of pixels"):
        image_folder(folder, image_size=0)


def test_new_images_are_prepared_as_those_trained_on(folder):
    split = image_folder(folder).splits[0]
    inputs, names = read_images(folder, split.preprocessing)
    assert names == [f"cat/{number}.png" for number in range(10)] + [f"dog/sub/{n}.png" for n in range(5)]
    known = torch.cat([split.train.inputs, split.test.inputs])
    assert all(bool((known == image).flatten(1).all(1).any()) for image in inputs)
    save(folder / "grey.png", 7, size=(30, 20), mode="L")
    save(folder / "palette.gif", 0, mode="P")
    [grey, palette], names = read_images(
        [folder / "grey.png", str(folder / "palette.gif")], split.preprocessing
    )
    scale = torch.tensor(split.preprocessing.input_scale)
    seen = grey[:, 1, 1] * scale + torch.tensor(split.preprocessing.input_shift)
    torch.testing.assert_close(seen[:2], torch.full((2,), 7 / 255))
    assert not grey[2].any()  # no training image tells anything about this channel: all have the same blue
    assert palette.shape == (3, 4, 6)
    assert names[0].endswith("grey.png")
    one, _ = read_images(folder / "cat/3.png", split.preprocessing)
    assert torch.equal(one[0], inputs[3])


def test_a_broken_image_is_named(folder):
    buffer = io.BytesIO()
    Image.effect_noise((40, 40), 50).convert("RGB").save(buffer, "PNG")
    (folder / "cat/cut.png").write_bytes(buffer.getvalue()[:800])
    with pytest.raises(InputError, match=r"image .*cut.png cannot be read"):
        image_folder(folder, image_size=4)
    (folder / "cat/cut.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"image .*cut.png cannot be read"):
        image_folder(folder)
    Image.fromarray(np.full((4, 6), 40000, np.uint16)).save(folder / "cat/cut.png")
    with pytest.raises(InputError, match=r"more than 8 bits"):
        image_folder(folder)


def test_folders_that_are_no_data_set(tmp_path):
    with pytest.raises(InputError, match="There is no folder"):
        image_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match="at least two classes; it has no subfolders"):
        image_folder(tmp_path)
    save(tmp_path / "a/0.png", (0, 0, 0))
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="b has no images"):
        image_folder(tmp_path)
    save(tmp_path / "b/0.png", (0, 0, 0))
    save(tmp_path / "b/1.png", (0, 0, 0))
    with pytest.raises(InputError, match=r"The class 'a' of .* has one image"):
        image_folder(tmp_path, test_share=0.5)


def test_a_missing_pillow_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pillow: pip install 'polymode\[data\]'"):
        image_folder(folder)
