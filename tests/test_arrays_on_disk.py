"""NumPy's files of strangers: sizes are compared before memory is taken, and nothing is unpickled."""

import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from polymode import sizes
from polymode.arrays_on_disk import names_of_arrays, read_array, read_arrays
from polymode.errors import InputError

BOUND = 2**22  # bytes that a refusal may take


def header(shape, kind="<f8"):
    """The beginning of an NPY file that claims a shape."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": kind, "fortran_order": False, "shape": shape})
    return content.getvalue()


def archive(path, content, method=zipfile.ZIP_STORED, name="x.npy"):
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr(name, content)
    return path


def refused(read, path):
    """The reason for which a file is refused, having taken little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < BOUND
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_back(tmp_path, save):
    arrays = {
        "x": np.arange(6.0).reshape(2, 3),
        "y": np.array(["a", "bc"]),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "one": np.float32(3),
        "none": np.zeros((0, 4)),
        "truth": np.array([True, False]),
    }
    save(tmp_path / "a.npz", **arrays)
    read = read_arrays(tmp_path / "a.npz")
    assert list(read) == names_of_arrays(tmp_path / "a.npz") == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, strict=True)
    assert list(read_arrays(tmp_path / "a.npz", {"y", "z"})) == ["y"]
    np.save(tmp_path / "a.npy", arrays["columns"])
    for stays in (False, True):
        np.testing.assert_array_equal(read_array(tmp_path / "a.npy", stays_on_disk=stays), arrays["columns"])


CLAIMS = {
    "rows": ((10**12,), "<f8", "8.0 TB"),
    "product": ((2**20, 2**20, 2**20), "<f4", "more than a million TB"),
    "negative": ((-1, -(10**12)), "<f8", ""),
    "texts": ((1,), "<U100000000", "400.0 MB"),
    "nothing of each": ((10**12,), "<U0", "0 bytes"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_header_that_claims_more_than_there_is(tmp_path, claim):
    shape, kind, told = CLAIMS[claim]
    content = header(shape, kind) + bytes(64)
    for path in (
        archive(tmp_path / "stored.npz", content),
        archive(tmp_path / "packed.npz", content, zipfile.ZIP_DEFLATED),
    ):
        reason = refused(read_arrays, path)
        assert "'x' claims an array" in reason
        assert told in reason
        assert "holds 64 bytes" in reason
    (tmp_path / "a.npy").write_bytes(content)
    assert "claims an array" in refused(read_array, tmp_path / "a.npy")
    assert "claims an array" in refused(lambda path: read_array(path, stays_on_disk=True), tmp_path / "a.npy")


def test_an_archive_that_unpacks_to_more_than_there_is_memory_for(tmp_path, monkeypatch):
    size = 2**24
    path = archive(tmp_path / "bomb.npz", header((size,), "|u1") + bytes(size), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < size / 500
    assert len(read_arrays(path)["x"]) == size
    monkeypatch.setattr(sizes, "free_memory", lambda: size)
    reason = refused(read_arrays, path)
    assert "needs 16.8 MB of memory, and 16.8 MB are free" in reason
    assert f"Unpacking {path}" in reason


def test_an_archive_whose_sizes_are_lies(tmp_path):
    size = 2**24
    path = archive(tmp_path / "liar.npz", header((8,), "|u1") + bytes(size), zipfile.ZIP_DEFLATED)
    whole = bytearray(path.read_bytes())
    true = struct.pack("<I", size + 128)
    assert whole.count(true) == 2  # before the member, and in the directory
    path.write_bytes(whole.replace(true, struct.pack("<I", 128 + 8)))
    assert "Bad CRC-32" in refused(read_arrays, path)
    path.write_bytes(whole.replace(true, struct.pack("<I", 2**32 - 2)))
    reason = refused(read_arrays, path)
    assert "its part 'x.npy' claims 4.3 GB in 16." in reason
    assert "which no archive holds" in reason


def test_what_is_no_array_or_holds_objects(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK")
    assert "not a zip file" in refused(read_arrays, tmp_path / "a.npz")
    assert "magic string" in refused(read_arrays, archive(tmp_path / "b.npz", b"nothing of numpy"))
    np.savez(tmp_path / "c.npz", x=np.array([{}], dtype=object))
    assert "Python objects, which are not read" in refused(read_arrays, tmp_path / "c.npz")
    packed = archive(tmp_path / "d.npz", header((1,)) + bytes(8), zipfile.ZIP_LZMA)
    assert "method 14" in refused(read_arrays, packed)
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none.npz")
