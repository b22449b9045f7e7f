import hashlib
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from polymode.application.datasets.catalogue import DATASETS, Expected
from polymode.application.datasets.characters import enwik8, read_text, text
from polymode.application.datasets.loading import (
    check_data,
    fetch_data,
    is_ready,
    load_inputs_for_ood,
    load_labelled,
    load_task,
)
from polymode.data.task import Preprocessing
from polymode.errors import InputError

START = b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.3/">\n'


def content_of(num_bytes=2000):
    """The official start, then bytes of 30 values; the last one is in the test part only."""
    drawn = np.random.default_rng(0).integers(65, 95, num_bytes - len(START) - 1, dtype=np.uint8)
    return START + drawn.tobytes() + b"\xe2"


def write_enwik8(folder, content=None, name="enwik8"):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content_of() if content is None else content)
    return folder


def written(sequences, ready):
    return ["".join(ready.classes[number] for number in row) for row in sequences.tolist()]


# enwik8.


def test_enwik8_is_cut_into_parts_of_90_5_and_5_percent(tmp_path):
    task = enwik8(write_enwik8(tmp_path), length=10)
    split, content = task.splits[0], content_of().decode("latin-1")
    ready = split.preprocessing
    assert split.train.inputs.shape == split.train.targets.shape == (179, 10)  # 1,800 bytes
    assert split.validation.num_examples == split.test.num_examples == 9  # 100 bytes each
    assert split.train.inputs.dtype == split.train.targets.dtype == torch.int64
    assert "".join(written(split.train.inputs, ready)) == content[:1790]
    assert "".join(written(split.train.targets, ready)) == content[1:1791]
    assert "".join(written(split.validation.inputs, ready)) == content[1800:1890]
    assert "".join(written(split.test.targets, ready)) == content[1901:1991]
    assert (task.name, task.likelihood, task.model) == ("enwik8", "categorical", "char_lstm")
    assert task.num_outputs == len(ready.classes) == len(set(content[:1800])) + 1
    assert (ready.source, ready.symbols, ready.length) == ("text", "bytes", 10)


def test_inputs_and_targets_are_the_same_memory(tmp_path):
    """90 million symbols are 720 MB: once, not twice."""
    train = enwik8(write_enwik8(tmp_path), length=10).splits[0].train
    assert train.inputs.untyped_storage().data_ptr() == train.targets.untyped_storage().data_ptr()


def test_enwik8_may_be_limited(tmp_path):
    write_enwik8(tmp_path)
    whole = enwik8(tmp_path, length=10).splits[0]
    task = enwik8(tmp_path, length=10, num_train=20, num_validation=3, num_test=5, batch_size=4)
    split = task.splits[0]
    assert torch.equal(split.train.inputs, whole.train.inputs[:20])
    assert torch.equal(split.validation.targets, whole.validation.targets[:3])
    assert torch.equal(split.test.targets, whole.test.targets[:5])
    assert split.preprocessing == whole.preprocessing  # the vocabulary does not depend on the limits
    assert split.train.batch_size == 4
    assert enwik8(tmp_path, length=10, num_validation=0).splits[0].validation is None
    for option, available in (("num_train", 179), ("num_validation", 9), ("num_test", 9)):
        with pytest.raises(InputError, match=rf"{option}=180 is more than the {available} sequences of the"):
            enwik8(tmp_path, length=10, **{option: 180})
        with pytest.raises(InputError, match=rf"{option} must be a whole number of at least 1, got 0.5"):
            enwik8(tmp_path, length=10, **{option: 0.5})
    with pytest.raises(InputError, match=r"length must be a whole number of at least 1, got 0"):
        enwik8(tmp_path, length=0)
    with pytest.raises(
        InputError, match=r"length 100 needs 101 symbols, the validation part of enwik8 has 100"
    ):
        enwik8(tmp_path)


def test_a_missing_or_damaged_archive_is_named(tmp_path):
    with pytest.raises(InputError, match=r"needs enwik8.zip.*fetch enwik8.*mattmahoney.net/dc/enwik8.zip"):
        load_task("enwik8", {}, tmp_path)
    write_enwik8(tmp_path, name="text8")
    with pytest.raises(InputError, match=r"is not a whole archive of enwik8 .*no item named 'enwik8'"):
        enwik8(tmp_path)
    path = tmp_path / "enwik8.zip"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"is not a whole archive of enwik8 .*polymode data fetch enwik8"):
        enwik8(tmp_path)


def test_enwik8_is_fetched_and_checked(tmp_path, monkeypatch):
    source = write_enwik8(tmp_path / "source", content_of(40_000))
    handler = partial(SimpleHTTPRequestHandler, directory=str(source))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    official = DATASETS["enwik8"]
    digest = hashlib.sha256((source / "enwik8.zip").read_bytes()).hexdigest()
    small = replace(
        official,
        downloads=(replace(official.downloads[0], checksum=f"sha256:{digest}"),),
        expected=replace(official.expected, num_train=359 + 19, num_test=19),
    )
    folder = tmp_path / "data"
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("POLYMODE_MIRROR", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(InputError, match=r"has the checksum .*, expected was sha256:547994d9"):
            fetch_data("enwik8", folder)
        monkeypatch.setitem(DATASETS, "enwik8", small)
        assert not is_ready(small, folder)
        assert fetch_data("enwik8", folder) == [folder / "enwik8.zip"]
        server.shutdown()
        thread.join()
    lines = check_data("enwik8", folder)
    assert lines[:2] == ["training examples: 378", "test examples: 19"]
    assert lines[-1] == "start of the first training text: <mediawiki xmlns="
    wrong = replace(small, expected=Expected(378, 19, text="<html"))
    monkeypatch.setitem(DATASETS, "enwik8", wrong)
    with pytest.raises(InputError, match=r"differs .*first training text <medi, expected was <html"):
        check_data("enwik8", folder)


# Files of one's own.


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("Ärger am Öltank. " * 20, encoding="utf-8")  # 340 characters, 380 bytes
    return path


def test_a_text_is_a_task(story):
    task = load_task(str(story), {"length": 8, "batch_size": 5})
    split, content = task.splits[0], story.read_text(encoding="utf-8")
    ready = split.preprocessing
    assert ready.classes == tuple(sorted(set(content)))
    assert task.num_outputs == len(ready.classes) == 13
    assert (task.name, task.model, task.likelihood) == ("story", "char_lstm", "categorical")
    assert (split.train.num_examples, split.test.num_examples, split.validation) == (38, 4, None)
    assert "".join(written(split.train.inputs, ready)) == content[: 38 * 8]
    assert "".join(written(split.test.targets, ready)) == content[307 : 307 + 32]
    assert split.train.batch_size == 5


def test_validation_is_the_end_of_the_training_part(story):
    split = text(story, length=8, num_train=10, num_validation=5, num_test=2).splits[0]
    content, ready = story.read_text(encoding="utf-8"), split.preprocessing
    assert (split.train.num_examples, split.test.num_examples) == (10, 2)
    assert "".join(written(split.train.inputs, ready)) == content[:80]
    assert "".join(written(split.validation.inputs, ready)) == content[33 * 8 : 38 * 8]
    assert "".join(written(split.validation.targets, ready)) == content[33 * 8 + 1 : 38 * 8 + 1]
    with pytest.raises(InputError, match=r"num_train=36 and num_validation=5 are more than the 38 training"):
        text(story, length=8, num_train=36, num_validation=5)


def test_bytes_as_symbols(story):
    task = text(story, symbols="bytes", length=8)
    raw = story.read_bytes().decode("latin-1")
    assert task.splits[0].preprocessing.classes == tuple(sorted(set(raw)))
    assert "".join(written(task.splits[0].train.inputs, task.splits[0].preprocessing)) == raw[: 42 * 8]


def test_symbols_outside_the_vocabulary_share_a_class(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("ab" * 45 + "axbybababa")
    split = text(path, length=3).splits[0]
    assert split.preprocessing.classes == ("a", "b", "unknown")
    assert split.test.inputs.tolist() == [[0, 2, 1], [2, 1, 0], [1, 0, 1]]
    assert split.test.targets.tolist() == [[2, 1, 2], [1, 0, 1], [0, 1, 0]]
    path.write_text("ab" * 50)
    assert text(path, length=3).splits[0].preprocessing.classes == ("a", "b")


def test_new_text_is_read_as_the_one_trained_on(story, tmp_path):
    task = load_task(str(story), {"length": 8})
    ready = Preprocessing.from_config(task.splits[0].preprocessing.config())
    other = tmp_path / "other.txt"
    other.write_text("Öl am Tank.")
    with pytest.raises(
        InputError, match=r"other.txt holds 'T' \(place 6\), which is none of the 13 characters"
    ):
        load_labelled(str(other), ready)
    other.write_text("Öltank am rÄnk")
    data = load_labelled(str(other), ready)
    assert written(data.inputs, ready) == ["Öltank a"]
    assert written(data.targets, ready) == ["ltank am"]
    assert torch.equal(load_inputs_for_ood(str(other), task).inputs, data.inputs)
    with pytest.raises(InputError, match=r"was not trained on symbols of a text but on images"):
        read_text(other, Preprocessing(source="images"))


def test_texts_that_cannot_be_used_are_named(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(InputError, match=r"There is no file .*a.txt. Check the path of the text"):
        load_task(str(path), {})
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"a.txt is empty"):
        text(path)
    path.write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(InputError, match=r"is not UTF-8 text \(.* at byte 3\).*data.symbols=bytes"):
        text(path)
    assert text(path, symbols="bytes", length=9).num_outputs == 5
    with pytest.raises(InputError, match=r"length 100 needs 101 symbols, the test part of .* has 50"):
        text(path, symbols="bytes")
    with pytest.raises(InputError, match=r"Unknown kind of symbols 'byte'. Did you mean 'bytes'"):
        text(path, symbols="byte")
    with pytest.raises(InputError, match=r"test_share must lie between 0 and 1, got 2"):
        text(path, symbols="bytes", test_share=2)
    with pytest.raises(InputError, match=r"Unknown option of the text .*'lenght'. Did you mean 'length'"):
        load_task(str(path), {"lenght": 5})
