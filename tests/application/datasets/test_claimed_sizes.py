"""Files that claim more than they hold, or than there is memory for: refused before memory is taken."""

import gzip
import io
import re
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import feather, parquet

from polymode import sizes
from polymode.application.datasets import downloads, folders, frames, imdb
from polymode.application.datasets.characters import enwik8
from polymode.application.datasets.downloads import Download, extract, fetch
from polymode.application.datasets.folders import image_folder
from polymode.application.datasets.frames import read_frame
from polymode.application.datasets.images import _idx_array, _svhn_part
from polymode.application.datasets.tables import table
from polymode.errors import CheckpointError, InputError
from polymode.posteriors.checkpoints import read_state_dict
from polymode.storage import read_document

BOUND = 2**25  # bytes that a refusal may take
FREE = 2**26


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(sizes, "free_memory", lambda: FREE)


def refused(read, message, error=InputError):
    """That reading raises an error of this message, having taken little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message):
            read()
        assert tracemalloc.get_traced_memory()[1] < BOUND
    finally:
        tracemalloc.stop()


# --- images ----------------------------------------------------------------------------------------


def idx(*sizes_):
    return bytes([0, 0, 8, len(sizes_)]) + np.array(sizes_, ">u4").tobytes()


def test_idx_files(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx(2**31, 2**31, 2**31) + bytes(100)))
    refused(lambda: _idx_array(path, 3), r"images.gz claims .* in a file of .* no packed file holds")
    path.write_bytes(gzip.compress(idx(2 * FREE) + bytes(2 * FREE)))
    refused(lambda: _idx_array(path, 1), r"claims 134.2 MB unpacked\) needs 134.2 MB of memory, and 67.1 MB")
    path.write_bytes(gzip.compress(idx(4) + bytes(2 * FREE)))  # it goes on beyond what it claims
    refused(lambda: _idx_array(path, 1), r"holds more than the 4 bytes of an array \[4\]")
    path.write_bytes(gzip.compress(idx(4) + bytes(3)))
    refused(lambda: _idx_array(path, 1), "holds 3 bytes where it claims 4")


def test_matlab_files(tmp_path):
    from scipy.io import savemat

    path = tmp_path / "train.mat"
    savemat(path, {"X": np.zeros((32, 32, 3, 2**15), np.uint8), "y": np.ones(2**15)}, do_compression=True)
    assert path.stat().st_size < 2**18
    refused(lambda: _svhn_part(path), r"train.mat .*claims 100.7 MB\) needs 302.0 MB of memory, and 67.1 MB")


def png(width, height, content=b""):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@pytest.fixture
def pictures(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (4, 4)).save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


@pytest.mark.parametrize("side", [9_000, 11_000, 2**31 - 1])
def test_images_that_claim_more_pixels_than_are_read(pictures, side):
    (pictures / "cat/0.png").write_bytes(png(side, side))
    refused(lambda: image_folder(pictures, image_size=4), r"0.png cannot be read \((it claims|Image size)")


def test_images_that_do_not_fit_together(pictures, monkeypatch):
    monkeypatch.setattr(folders, "MOST_PIXELS", 15)
    refused(
        lambda: image_folder(pictures), r"it claims 4×4 pixels in a file of \d+ bytes, at most 15 are read"
    )
    monkeypatch.undo()
    monkeypatch.setattr(sizes, "free_memory", lambda: 100)
    monkeypatch.setattr(sizes, "ALWAYS_THERE", 0)
    refused(lambda: image_folder(pictures), r"4 images of 4×4 pixels needs 320 bytes")


# --- tables ----------------------------------------------------------------------------------------


def test_a_text_file_whose_lines_are_empty(tmp_path):
    """A line end is a row of all columns: few bytes, many cells."""
    path = tmp_path / "a.csv"
    path.write_text(",".join(f"c{number}" for number in range(2000)) + "\n" * 5000)
    refused(
        lambda: read_frame(path), r"a.csv, 5,001 rows by 2,000 columns, needs 80.0 MB of memory, and 67.1 MB"
    )


def test_a_text_file_of_very_many_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "MOST_COLUMNS", 100)
    path = tmp_path / "a.csv"
    path.write_text(",".join(f"c{number}" for number in range(101)) + "\n" + ",".join(["1"] * 101) + "\n")
    refused(lambda: table(path), "a.csv has 101 columns; at most 100 can be read")


def spreadsheet(path, sheet):
    """An Excel file whose sheet is replaced."""
    pd.DataFrame({"a": [1, 2], "b": [3, 4]}).to_excel(path, index=False)
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    parts["xl/worksheets/sheet1.xml"] = sheet(parts["xl/worksheets/sheet1.xml"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return path


def test_a_spreadsheet_of_few_cells_far_apart(tmp_path):
    path = spreadsheet(
        tmp_path / "a.xlsx",
        lambda xml: xml.replace(
            b"</sheetData>", b'<row r="1048576"><c r="XFD1048576" t="n"><v>1</v></c></row></sheetData>'
        ),
    )
    refused(lambda: read_frame(path), r"a.xlsx .*1,048,576 rows by 16,384 columns, needs 137.4 GB of memory")


def test_a_spreadsheet_that_unpacks_to_more_than_there_is_memory_for(tmp_path):
    path = spreadsheet(
        tmp_path / "a.xlsx", lambda xml: xml.replace(b"<sheetData>", b" " * FREE + b"<sheetData>")
    )
    assert path.stat().st_size < FREE / 500
    refused(lambda: read_frame(path), r"Unpacking .*a.xlsx .* needs 5.+ MB of memory, and 67.1 MB are free")


def test_a_spreadsheet_that_defines_words_of_its_own(tmp_path):
    path = spreadsheet(
        tmp_path / "a.xlsx",
        lambda xml: re.sub(rb"^(<\?xml[^>]*>)?", b'<!DOCTYPE a [<!ENTITY b "cccc">]>', xml, count=1),
    )
    refused(lambda: read_frame(path), "defines words of its own is not read")


def test_a_plain_spreadsheet_is_read(tmp_path, monkeypatch):
    path = spreadsheet(tmp_path / "a.xlsx", lambda xml: xml)
    assert read_frame(path).to_dict("list") == {"a": [1, 2], "b": [3, 4]}


def test_columns_that_hold_one_value_very_often(tmp_path):
    """A few bytes stand for millions of equal cells."""
    path = tmp_path / "a.parquet"
    some = pa.table({f"c{number}": pa.array(np.zeros(2**21)) for number in range(8)})
    parquet.write_table(some, path)
    assert path.stat().st_size < 2**17
    refused(lambda: read_frame(path), "a.parquet, 2,097,152 rows by 8 columns, needs 134.2 MB of memory")
    path = tmp_path / "a.feather"
    feather.write_feather(pa.table({"a": pa.nulls(2**24)}), path, compression="uncompressed")
    refused(lambda: read_frame(path), "a.feather, 16,777,216 rows by 1 columns, needs 134.2 MB of memory")


# --- archives and downloads ------------------------------------------------------------------------


def test_the_archive_of_enwik8(tmp_path):
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("enwik8", bytes(2 * FREE))
    refused(lambda: enwik8(tmp_path), r"enwik8.zip .*claims 134.2 MB unpacked\) needs 134.2 MB of memory")


def test_archives_that_claim_more_than_they_hold_or_than_there_is_room_for(tmp_path, monkeypatch):
    path = tmp_path / "a.tar.gz"
    entry = tarfile.TarInfo("a/b")
    entry.size = 2**40
    path.write_bytes(gzip.compress(entry.tobuf() + bytes(1024)))
    refused(lambda: extract(path, tmp_path / "there"), r"claims more than .* which no archive holds")
    entry.size = 2000
    path.write_bytes(gzip.compress(entry.tobuf() + np.random.default_rng(0).bytes(2048) + bytes(1024)))
    monkeypatch.setattr(
        downloads.shutil, "disk_usage", lambda folder: downloads.shutil._ntuple_diskusage(1, 1, 1999)
    )
    refused(
        lambda: extract(path, tmp_path / "there"), r"'a/b' of .* needs 2.0 kB, and the disk of .* 2.0 kB left"
    )
    assert not [p for p in (tmp_path / "there").rglob("*") if p.is_file()]


class Answer(io.BytesIO):
    headers: ClassVar = {}


def test_downloads_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "MOST_BYTES", 2**20)
    monkeypatch.setattr(downloads.urllib.request, "urlopen", lambda *a, **k: Answer(bytes(2**21)))
    wanted = Download("https://example.org/a", "a.bin", "md5:0")
    refused(lambda: fetch(wanted, tmp_path), r"sends more than 1.0 MB, as no data set does; it was not kept")
    assert not list(tmp_path.iterdir())
    answer = Answer(b"abc")
    answer.headers = {"Content-Length": str(10**18)}
    monkeypatch.setattr(downloads.urllib.request, "urlopen", lambda *a, **k: answer)
    refused(lambda: fetch(wanted, tmp_path), r"example.org/a needs more than a million TB, and the disk")


def test_reviews_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(imdb, "MOST_CHARACTERS", 2**16)
    (tmp_path / "imdb").mkdir()
    path = tmp_path / "imdb/train.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 2**24))
    refused(lambda: imdb.read_reviews(tmp_path, "train"), "Line 1 of .* has more than 65,536 characters")
    line = b'{"text": "' + b"a" * 2**15 + b'", "label": 1}\n'
    path.write_bytes(gzip.compress(line * 2**5))
    assert len(imdb.read_reviews(tmp_path, "train")[0]) == 32
    monkeypatch.setattr(sizes, "free_memory", lambda: 2**15)
    monkeypatch.setattr(sizes, "ALWAYS_THERE", 0)
    refused(lambda: imdb.read_reviews(tmp_path, "train"), "Reading .* up to line 2 needs .* of memory")
    path.write_bytes(gzip.compress(b"[" * 50000))
    monkeypatch.setattr(sizes, "free_memory", lambda: FREE)
    refused(lambda: imdb.read_reviews(tmp_path, "train"), "Line 1 of .* is not a review")


# --- documents and weights -------------------------------------------------------------------------


def test_documents(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" * 100_000)
    refused(lambda: read_document(path, "run"), "is damaged", CheckpointError)
    path.write_text("{" + '"a": 1,' * 600_000)
    refused(lambda: read_document(path, "run"), r"Reading .*a.json needs 84.0 MB of memory")


def test_safetensors_headers(tmp_path):
    path = tmp_path / "a.safetensors"
    for header in (
        struct.pack("<Q", 2**62),
        struct.pack("<Q", 10**8) + b"{}",
        b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}',
        b"[" * 10_000,
    ):
        path.write_bytes(
            header if header[:1] not in b"{[" else struct.pack("<Q", len(header)) + header + bytes(8)
        )
        refused(lambda: read_state_dict(path), "not a readable safetensors file", CheckpointError)


def test_files_of_torch_that_unpack_to_more_than_there_is_memory_for(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", b"\x80\x02}.")
        file.writestr("a/data/0", bytes(2 * FREE))
    refused(
        lambda: read_state_dict(path), r"claims 134.2 MB unpacked\) needs 134.2 MB of memory", CheckpointError
    )
