"""IMDB film reviews (Maas et al. 2011) as sequences of word numbers.

The reader takes ``imdb/train.jsonl.gz`` and ``imdb/test.jsonl.gz``, one {"text", "label"} a line, which
``convert_archive`` makes from the official archive of 100,000 files.
"""

import gzip
import json
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets.downloads import Download, missing_file, whole_file
from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, training_parts
from polymode.errors import InputError, require, require_whole
from polymode.sizes import check_memory

DOWNLOADS = (
    Download(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "aclImdb_v1.tar.gz",
        "md5:7c2ac02c03563afcf9b574c7e56c153a",
    ),
)
FILES = ("imdb/train.jsonl.gz", "imdb/test.jsonl.gz")
LABELS = {"neg": 0, "pos": 1}
PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
MOST_CHARACTERS = 2**24  # of a review
WORD = re.compile(r"[a-z0-9']+")

Reviews = tuple[list[str], Tensor]


def imdb(
    folder: Path | str,
    vocabulary: int = 20000,
    length: int = 100,
    num_train: int | None = None,
    num_validation: int = 0,
    batch_size: int = 128,
) -> Task:
    """IMDB reviews, positive or negative: int64 inputs [N, length].

    Each review is its last ``length`` words, padded in front. A word's number is its rank among the words
    trained on; 0 is padding, 1 every word outside the ``vocabulary`` (which counts both). The official
    training set lists all negative reviews first; a fixed permutation mixes it before ``num_train`` and
    ``num_validation`` apply. The test set keeps the official order.
    """
    require(
        isinstance(vocabulary, int) and vocabulary > FIRST_WORD,
        f"vocabulary must be a whole number from {FIRST_WORD + 1} (padding, unknown and words), got "
        f"{vocabulary!r}.",
    )
    require_whole("length", length)
    texts, labels = read_reviews(folder, "train")
    first, last = training_parts(len(texts), num_train, num_validation)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    train, validation = order[first], order[last]
    words = [_words(texts[row]) for row in train.tolist()]
    numbers = _numbers_of_words(words, vocabulary)

    def data(some_words: Iterable[list[str]], targets: Tensor) -> ArrayData:
        return ArrayData(_padded(some_words, numbers, length, len(targets)), targets, batch_size=batch_size)

    test_texts, test_labels = read_reviews(folder, "test")
    split = Split(
        data(words, labels[train]),
        data(map(_words, test_texts), test_labels),
        data((_words(texts[row]) for row in validation.tolist()), labels[validation])
        if num_validation
        else None,
        Preprocessing(source="text", classes=("negative", "positive")),
    )
    return Task(
        "imdb",
        [split],
        "categorical",
        num_outputs=2,
        model="text",
        model_options={"vocabulary": vocabulary},
    )


def read_reviews(folder: Path | str, part: str) -> Reviews:
    """Texts and labels of the "train" or the "test" reviews."""
    path = Path(folder) / "imdb" / f"{part}.jsonl.gz"
    if not path.is_file():
        raise missing_file(path, "imdb", DOWNLOADS[0].url)
    texts, labels, taken = [], [], 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            while line := file.readline(MOST_CHARACTERS):
                require(
                    len(line) < MOST_CHARACTERS,
                    f"Line {len(labels) + 1} of {path} has more than {MOST_CHARACTERS:,} characters, as no "
                    "review has. Delete the file and run `polymode data fetch imdb`.",
                )
                taken += len(line)
                if taken > MOST_CHARACTERS:
                    check_memory(taken, f"Reading {path} up to line {len(labels) + 1}")
                    taken = 0
                review = json.loads(line)
                texts.append(review["text"])
                labels.append((0, 1).index(review["label"]))
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} is damaged ({error}). Delete it and run `polymode data fetch imdb`."
        ) from error
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f'Line {len(labels) + 1} of {path} is not a review {{"text": ..., "label": 0 or 1}} ({error}). '
            "Delete the file and run `polymode data fetch imdb`."
        ) from error
    require(len(texts) > 0, f"{path} holds no reviews. Delete it and run `polymode data fetch imdb`.")
    return texts, torch.tensor(labels)


def convert_archive(archive: Path | str, folder: Path | str) -> None:
    """Turn the official ``aclImdb_v1.tar.gz`` into the two files that the reader takes.

    Reviews are read from the archive without unpacking it. Negative ones come first; the order in each half
    is that of the numbers before "_" as text, which is the order of the published HMC predictions.
    """
    reviews: dict[tuple[str, str], dict[str, str]] = {
        (part, label): {} for part in ("train", "test") for label in LABELS
    }
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                place = PurePosixPath(member.name).parts[-3:]
                if member.isfile() and place[:2] in reviews and place[-1].endswith(".txt"):
                    require(
                        member.size < MOST_CHARACTERS,
                        f"{archive} was refused: {member.name!r} claims {member.size:,} bytes, as no review "
                        "has. Download it again.",
                    )
                    content = tar.extractfile(member)
                    assert content is not None  # a regular file has content
                    reviews[place[0], place[1]][place[2].partition("_")[0]] = content.read().decode("utf-8")
    except (tarfile.TarError, OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(
            f"{archive} is not a whole archive of reviews ({error}). Delete it and run `polymode data fetch "
            "imdb`."
        ) from error
    for (part, label), found in reviews.items():
        require(len(found) > 0, f"{archive} has no reviews aclImdb/{part}/{label}/*.txt. Download it again.")
    for part in ("train", "test"):
        lines = [
            json.dumps({"text": text, "label": value}, ensure_ascii=False) + "\n"
            for label, value in LABELS.items()
            for _, text in sorted(reviews[part, label].items())
        ]
        with whole_file(Path(folder) / "imdb" / f"{part}.jsonl.gz") as file:
            file.write(gzip.compress("".join(lines).encode(), compresslevel=6, mtime=0))


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower().replace("<br />", " "))


def _numbers_of_words(reviews: Iterable[list[str]], vocabulary: int) -> dict[str, int]:
    """Numbers of the most frequent words; equally frequent ones in alphabetical order."""
    counts: Counter[str] = Counter()
    for words in reviews:
        counts.update(words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: rank for rank, word in enumerate(ranked[: vocabulary - FIRST_WORD], FIRST_WORD)}


def _padded(
    reviews: Iterable[Sequence[str]], numbers: dict[str, int], length: int, num_reviews: int
) -> Tensor:
    rows = np.full((num_reviews, length), PADDING, dtype=np.int64)
    for row, words in zip(rows, reviews, strict=True):
        last = [numbers.get(word, UNKNOWN) for word in words[-length:]]
        row[length - len(last) :] = last
    return torch.from_numpy(rows)
