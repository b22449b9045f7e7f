"""Text as sequences of symbols, each predicted from those before it: enwik8, and files of one's own.

A symbol is a byte or a character. Symbols are numbered in the order of their codes.
"""

import zipfile
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polymode.application.datasets.downloads import Download, missing_file
from polymode.application.datasets.tables import share_of
from polymode.data.sources import ArrayData
from polymode.data.task import Preprocessing, Split, Task, training_parts
from polymode.errors import InputError, require, require_whole, unknown_name
from polymode.sizes import check_archive

DOWNLOADS = (
    Download(
        "https://mattmahoney.net/dc/enwik8.zip",
        "enwik8.zip",
        "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
)
SUFFIXES = (".txt",)
UNKNOWN = "unknown"  # the class of symbols that are not trained on
NUM_CODES = 0x110000  # of Unicode; the first 256 stand for bytes

Symbols = Literal["bytes", "characters"]
SYMBOLS: tuple[Symbols, ...] = ("bytes", "characters")


def enwik8(
    folder: Path | str,
    length: int = 100,
    num_train: int | None = None,
    num_validation: int | None = None,
    num_test: int | None = None,
    batch_size: int = 128,
) -> Task:
    """The first 100 million bytes of the English Wikipedia of 2006, from ``enwik8.zip``.

    The first 90 million are trained on, 5 million validated on and the last 5 million tested on, each in
    sequences of ``length`` bytes. num_train, num_validation, num_test: only the first so many sequences of a
    part; num_validation=0 leaves validation out. The vocabulary is that of all 90 million bytes.
    """
    require_whole("length", length)
    codes = _read_enwik8(Path(folder) / DOWNLOADS[0].file)
    train, validation, test = np.split(codes, [len(codes) * 90 // 100, len(codes) * 95 // 100])
    ready = _prepared(train, [validation, test], "bytes", length)
    return _task(
        "enwik8",
        _sequences(train, ready, "the training part of enwik8", num_train, "num_train"),
        None
        if num_validation == 0
        else _sequences(validation, ready, "the validation part of enwik8", num_validation, "num_validation"),
        _sequences(test, ready, "the test part of enwik8", num_test, "num_test"),
        ready,
        batch_size,
    )


def text(
    path: Path | str,
    symbols: Symbols = "characters",
    length: int = 100,
    test_share: float = 0.1,
    num_train: int | None = None,
    num_validation: int = 0,
    num_test: int | None = None,
    batch_size: int = 128,
) -> Task:
    """A text file as a task: the last ``test_share`` of it is tested on, what comes before is trained on.

    symbols: "characters" (of UTF-8) or "bytes". Text is cut into sequences of ``length`` symbols.
    num_validation: so many of the last sequences before the test part are kept for validation. num_train,
    num_test: only the first so many sequences are trained and tested on; the vocabulary is that of the
    training part without this limit.
    """
    if symbols not in SYMBOLS:
        raise unknown_name("kind of symbols", symbols, SYMBOLS)
    require_whole("length", length)
    path = Path(path)
    codes = _read_codes(path, symbols)
    require(len(codes) > 0, f"{path} is empty: there is nothing to train on.")
    end = len(codes) - share_of(len(codes), test_share, str(path))
    available = _num_sequences(codes[:end], length, f"the training part of {path}")
    first, last = training_parts(available, num_train, num_validation)
    border = last.start * length + 1 if num_validation else end
    train, validation, test = codes[:border], codes[last.start * length : end], codes[end:]
    ready = _prepared(train, [validation, test], symbols, length)
    return _task(
        path.stem,
        _sequences(train, ready, f"the training part of {path}", first.stop, "num_train"),
        _sequences(validation, ready, f"the validation part of {path}") if num_validation else None,
        _sequences(test, ready, f"the test part of {path}", num_test, "num_test"),
        ready,
        batch_size,
    )


def read_text(path: Path | str, preprocessing: Preprocessing) -> tuple[Tensor, Tensor]:
    """Inputs and targets [N, T] of a whole text file, cut and numbered as those trained on."""
    require(
        preprocessing.symbols in SYMBOLS,
        f"The network was not trained on symbols of a text but on {preprocessing.source or 'arrays'}; it "
        f"cannot read {path}.",
    )
    codes = _read_codes(Path(path), preprocessing.symbols)
    return _sequences(codes, preprocessing, str(path))


def _task(
    name: str,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None,
    test: tuple[Tensor, Tensor],
    preprocessing: Preprocessing,
    batch_size: int,
) -> Task:
    split = Split(
        ArrayData(*train, batch_size=batch_size),
        ArrayData(*test, batch_size=batch_size),
        None if validation is None else ArrayData(*validation, batch_size=batch_size),
        preprocessing,
    )
    return Task(name, [split], "categorical", num_outputs=len(preprocessing.classes), model="char_lstm")


# Symbols and their numbers.


def _read_enwik8(path: Path) -> np.ndarray:
    if not path.is_file():
        raise missing_file(path, "enwik8", DOWNLOADS[0].url)
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            content = archive.read("enwik8")
    except (InputError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a whole archive of enwik8 ({error}). Delete it and run `polymode data fetch "
            "enwik8`."
        ) from error
    return np.frombuffer(content, np.uint8)


def _read_codes(path: Path, symbols: str) -> np.ndarray:
    """The codes of all symbols of a file."""
    require(path.is_file(), f"There is no file {path.absolute()}. Check the path of the text.")
    content = path.read_bytes()
    if symbols == "bytes":
        return np.frombuffer(content, np.uint8)
    try:
        return np.frombuffer(content.decode("utf-8").encode("utf-32-le"), "<u4")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it, or take its bytes "
            "as symbols: data.symbols=bytes."
        ) from error


def _prepared(train: np.ndarray, others: list[np.ndarray], symbols: Symbols, length: int) -> Preprocessing:
    """The vocabulary of the training part; one more class where the other parts hold symbols outside it."""
    seen = np.zeros(NUM_CODES, bool)
    seen[train] = True
    classes = tuple(map(chr, np.flatnonzero(seen).tolist()))
    if not all(seen[part].all() for part in others):
        classes = (*classes, UNKNOWN)
    return Preprocessing(source="text", classes=classes, symbols=symbols, length=length)


def _num_sequences(codes: np.ndarray, length: int, what: str) -> int:
    count = (len(codes) - 1) // length  # the last symbol is predicted only
    require(
        count >= 1,
        f"A sequence of length {length} needs {length + 1} symbols, {what} has {len(codes)}. Give more text "
        "or a smaller length.",
    )
    return count


def _sequences(
    codes: np.ndarray, ready: Preprocessing, what: str, limit: int | None = None, option: str = ""
) -> tuple[Tensor, Tensor]:
    """Sequences [N, T] one after the other, and the symbol that follows each of theirs [N, T].

    Both are views of the same numbers.
    """
    count = _num_sequences(codes, ready.length, what)
    if limit is not None:
        require_whole(option, limit)
        require(limit <= count, f"{option}={limit} is more than the {count} sequences of {what}.")
        count = limit
    used = count * ready.length
    numbers = torch.from_numpy(_numbered(codes[: used + 1], ready, what))
    return numbers[:used].view(count, -1), numbers[1:].view(count, -1)


def _numbered(codes: np.ndarray, ready: Preprocessing, what: str) -> np.ndarray:
    known = [ord(name) for name in ready.classes if name != UNKNOWN]
    table = np.full(NUM_CODES, len(known) if UNKNOWN in ready.classes else -1)
    table[known] = np.arange(len(known))
    numbers = table[codes]
    if (bad := np.flatnonzero(numbers < 0)).size:
        symbol = chr(codes[bad[0]]) if ready.symbols == "characters" else int(codes[bad[0]])
        raise InputError(
            f"{what} holds {symbol!r} (place {bad[0]}), which is none of the {len(known)} {ready.symbols} "
            "that were trained on. Remove it, or train on text that holds it."
        )
    return numbers
