import gzip
import io
import json
import tarfile

import pytest
import torch

from polymode.application.datasets.imdb import convert_archive, imdb, read_reviews
from polymode.errors import InputError


def write(folder, part, reviews):
    (folder / "imdb").mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in reviews)
    (folder / f"imdb/{part}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "train", [("Bad, BAD film!<br /><br />Don't go", 0), ("A good film; go 10 times", 1)])
    write(tmp_path, "test", [("good bad ugly film", 0), ("go", 1), ("", 1)])
    return tmp_path


def test_words_are_numbered_by_frequency_then_alphabet(folder):
    task = imdb(folder, length=4)
    split = task.splits[0]
    # bad, film and go occur twice; then 10, a, don't, good and times once each.
    bad, film, go, ten, _, do_not, good, times = range(2, 10)
    rows = dict(zip(split.train.targets.tolist(), split.train.inputs.tolist(), strict=True))
    assert rows == {0: [bad, film, do_not, go], 1: [film, go, ten, times]}
    assert split.test.inputs.tolist() == [[good, bad, 1, film], [0, 0, 0, go], [0, 0, 0, 0]]
    assert split.test.targets.tolist() == [0, 1, 1]
    assert split.train.inputs.dtype == torch.int64
    assert (task.likelihood, task.num_outputs, task.model) == ("categorical", 2, "text")
    assert task.model_options == {"vocabulary": 20000}
    assert split.preprocessing.classes == ("negative", "positive")


def test_the_vocabulary_counts_padding_and_unknown(folder):
    assert imdb(folder, length=4, vocabulary=4).splits[0].test.inputs.tolist() == [
        [1, 2, 1, 3],
        [0, 0, 0, 1],
        [0, 0, 0, 0],
    ]
    assert imdb(folder).splits[0].test.inputs.shape == (3, 100)


def test_parts_mix_both_classes_and_words_are_those_trained_on(tmp_path):
    reviews = [(f"word{number}", int(number >= 50)) for number in range(100)]
    write(tmp_path, "train", reviews)
    write(tmp_path, "test", reviews)
    split = imdb(tmp_path, length=1, num_train=60, num_validation=30).splits[0]
    assert (split.train.num_examples, split.validation.num_examples) == (60, 30)
    assert 15 < int(split.train.targets.sum()) < 45
    assert sorted(split.train.inputs[:, 0].tolist()) == list(range(2, 62))
    assert set(split.validation.inputs.flatten().tolist()) == {1}  # no review is in both
    assert int((split.test.inputs > 1).sum()) == 60
    again = imdb(tmp_path, length=1, num_train=60, num_validation=30).splits[0]
    assert torch.equal(again.train.targets, split.train.targets)
    with pytest.raises(InputError, match="num_train=80 and num_validation=30 are more than the 100"):
        imdb(tmp_path, num_train=80, num_validation=30)


def test_a_part_of_the_training_set_without_validation(tmp_path):
    """As 20,000 of the 25,000: balanced, none held out, and the test set in its official order."""
    reviews = [(f"word{number}", int(number >= 50)) for number in range(100)]
    write(tmp_path, "train", reviews)
    write(tmp_path, "test", reviews)
    everything = imdb(tmp_path, length=1).splits[0]
    split = imdb(tmp_path, length=1, num_train=80).splits[0]
    assert (split.train.num_examples, split.validation) == (80, None)
    assert torch.equal(split.train.targets, everything.train.targets[:80])
    assert split.test.targets.tolist() == [0] * 50 + [1] * 50


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("vocabulary", 2, "vocabulary must be a whole number from 3 .*, got 2"),
        ("length", 0, "length must be a whole number of at least 1, got 0"),
    ],
)
def test_options_out_of_range_are_named(folder, option, value, message):
    with pytest.raises(InputError, match=message):
        imdb(folder, **{option: value})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(b'{"text": "a", "label": 0}\n' * 999)[:-20], "is damaged"),
        (b"no gzip", "is damaged"),
        (gzip.compress(b'{"text": "a", "label": 0}\nrubbish\n'), r"Line 2 of .* is not a review"),
        (gzip.compress(b'{"text": "a", "label": 2}\n'), r"Line 1 of .* is not a review"),
        (gzip.compress(b'{"text": "a"}\n'), r"Line 1 of .* is not a review"),
        (gzip.compress(b""), "holds no reviews"),
    ],
)
def test_damaged_files_are_named(folder, content, reason):
    (folder / "imdb/train.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match=f"{reason}.*polymode data fetch imdb|{reason}"):
        imdb(folder)


def test_a_missing_file_says_where_it_should_be(folder):
    (folder / "imdb/test.jsonl.gz").unlink()
    with pytest.raises(InputError, match=r"needs test.jsonl.gz.*polymode data fetch imdb.*aclImdb_v1.tar.gz"):
        imdb(folder)


def archive_of(path, entries):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in entries.items():
            info = tarfile.TarInfo(f"aclImdb/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


ENTRIES = {
    "README": "read me",
    "train/pos/10_9.txt": "tenth",
    "train/pos/9_7.txt": "ninth",
    "train/pos/1_8.txt": "first",
    "train/neg/0_1.txt": "poor<br />café",
    "train/unsup/0_0.txt": "unlabelled",
    "train/urls_pos.txt": "http",
    "test/neg/0_2.txt": "worse",
    "test/pos/0_10.txt": "great",
}


def test_the_archive_is_converted_in_the_published_order(tmp_path):
    convert_archive(archive_of(tmp_path / "a.tar.gz", ENTRIES), tmp_path / "data")
    texts, labels = read_reviews(tmp_path / "data", "train")
    assert texts == ["poor<br />café", "first", "tenth", "ninth"]
    assert labels.tolist() == [0, 1, 1, 1]
    assert read_reviews(tmp_path / "data", "test")[0] == ["worse", "great"]
    assert sorted(path.name for path in (tmp_path / "data/imdb").iterdir()) == [
        "test.jsonl.gz",
        "train.jsonl.gz",
    ]


def test_archives_that_are_not_the_reviews_are_named(tmp_path):
    path = archive_of(tmp_path / "a.tar.gz", {k: v for k, v in ENTRIES.items() if "test/pos" not in k})
    with pytest.raises(InputError, match=r"has no reviews aclImdb/test/pos"):
        convert_archive(path, tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="is not a whole archive"):
        convert_archive(path, tmp_path)
    assert not (tmp_path / "imdb").exists()
