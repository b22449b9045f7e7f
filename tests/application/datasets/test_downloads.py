import gzip
import hashlib
import io
import os
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polymode.application.datasets import downloads
from polymode.application.datasets.downloads import Download, data_folder, extract, fetch
from polymode.errors import InputError

CONTENT = bytes(range(256)) * 3000
SUM = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    requested: list[tuple[str, str | None]]

    def do_GET(self):
        self.requested.append((self.path, self.headers["User-Agent"]))
        if self.path.endswith("missing.bin"):
            self.send_error(404)
            return
        self.send_response(200)
        if not self.path.endswith("unstated.bin"):
            extra = 100 if self.path.endswith("lying.bin") else 0
            self.send_header("Content-Length", str(len(CONTENT) + extra))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("POLYMODE_MIRROR", raising=False)
    Handler.requested = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def left_over(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_data_folder_is_the_environment_variable_or_a_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYMODE_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv("POLYMODE_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "polymode" / "data"


def test_a_file_is_fetched_once_with_progress(server, tmp_path):
    download = Download(f"{server}/a.bin", "some/where/a.bin", SUM)
    seen = []
    path = fetch(download, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "some/where/a.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert fetch(download, tmp_path) == path
    assert Handler.requested == [("/a.bin", "polymode")]
    assert left_over(tmp_path) == [path]


def test_a_damaged_file_is_fetched_again(server, tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT[:-1])
    fetch(Download(f"{server}/a.bin", "a.bin", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_an_unstated_length_is_no_error(server, tmp_path):
    seen = []
    download = Download(f"{server}/unstated.bin", "a.bin", SUM)
    fetch(download, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(CONTENT), None)


def test_the_mirror_replaces_the_official_address(server, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYMODE_MIRROR", f"{server}/copies/")
    fetch(Download("https://official.invalid/x.bin", "some/a.bin", SUM), tmp_path)
    assert Handler.requested[0][0] == "/copies/some/a.bin"


def test_a_wrong_checksum_names_both_and_keeps_nothing(server, tmp_path):
    with pytest.raises(InputError, match=f"has the checksum {SUM}, expected was md5:0123"):
        fetch(Download(f"{server}/a.bin", "a.bin", "md5:0123"), tmp_path)
    assert left_over(tmp_path) == []


def test_a_truncated_response_names_the_numbers(server, tmp_path):
    length = len(CONTENT)
    with pytest.raises(InputError, match=f"cut off after {length} of {length + 100} bytes"):
        fetch(Download(f"{server}/lying.bin", "a.bin", SUM), tmp_path)
    assert left_over(tmp_path) == []


def test_http_errors_say_what_to_do_by_hand(server, tmp_path):
    with pytest.raises(InputError, match=r"missing.bin \(HTTP 404 .*by hand.*POLYMODE_DATA") as caught:
        fetch(Download(f"{server}/missing.bin", "sub/a.bin", SUM), tmp_path)
    assert f"place it as {tmp_path / 'sub/a.bin'}," in str(caught.value)


def test_no_network_leaves_an_existing_file_alone(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    (tmp_path / "a.bin").write_bytes(b"older")
    with pytest.raises(InputError, match=r"refused\)\. Download it by hand.*has a wrong checksum"):
        fetch(Download(f"http://127.0.0.1:{port}/a.bin", "a.bin", SUM), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"older"
    assert left_over(tmp_path) == [tmp_path / "a.bin"]


def test_a_server_that_stalls_is_a_timeout(tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr(downloads, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/a.bin"
        with pytest.raises(InputError, match="timed out"):
            fetch(Download(address, "a.bin", SUM), tmp_path)


def test_a_full_disk_is_said_and_the_partial_file_removed(server, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space left on device\).*POLYMODE_DATA"):
        fetch(Download(f"{server}/a.bin", "a.bin", SUM), tmp_path)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("file", ["/etc/a", "../a", ""])
def test_downloads_stay_inside_the_data_folder(file):
    with pytest.raises(InputError, match="inside the data folder"):
        Download("http://x.invalid", file, SUM)


def test_a_checksum_says_its_algorithm():
    with pytest.raises(InputError, match="must start with one of md5:, sha256:"):
        Download("http://x.invalid", "a", "crc:1")


# Archives.


def archive_of(path, entries):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w:") as tar:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
    return path


@pytest.mark.parametrize("file", ["a.tar.gz", "a.tar"])
def test_extraction_replaces_what_was_there_and_nothing_else(tmp_path, file):
    archive = archive_of(tmp_path / file, {"set/one": b"1", "set/sub/two": b"22"})
    target = tmp_path / "data"
    (target / "set").mkdir(parents=True)
    (target / "set" / "old").write_bytes(b"old")
    (target / "other").write_bytes(b"kept")
    extract(archive, target)
    contents = {str(path.relative_to(target)): path.read_bytes() for path in left_over(target)}
    assert contents == {"set/one": b"1", "set/sub/two": b"22", "other": b"kept"}
    assert sorted(path.name for path in target.iterdir()) == ["other", "set"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("../evil", b"x"),
        ("/tmp/evil", b"x"),
        ("set/../../evil", b"x"),
        ("set/link", "../../outside"),
        ("set/link", "/etc/passwd"),
    ],
)
def test_archives_that_lead_outside_are_refused(tmp_path, name, content):
    archive = archive_of(tmp_path / "a.tar.gz", {"set/one": b"1", name: content})
    with pytest.raises(InputError, match="was refused"):
        extract(archive, tmp_path / "data" / "deep")
    assert [path.name for path in left_over(tmp_path)] == ["a.tar.gz"]


@pytest.mark.parametrize("file", ["a.tar.gz", "a.tar"])
def test_a_cut_archive_leaves_nothing_half_done(tmp_path, file):
    archive = archive_of(tmp_path / file, {"set/one": b"1", "set/two": os.urandom(200_000)})
    archive.write_bytes(archive.read_bytes()[:100_000])
    with pytest.raises(InputError, match=rf"is not a whole {file[1:]} archive"):
        extract(archive, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_what_is_no_archive_is_said(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(b"no tar") + b"rubbish")
    with pytest.raises(InputError, match=r"is not a whole .tar.gz archive"):
        extract(tmp_path / "a.tar.gz", tmp_path / "data")
