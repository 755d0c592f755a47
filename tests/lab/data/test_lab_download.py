"""Downloads from a local server: checked, resumed, refused."""

import hashlib
import io
import socket
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from wsam.lab.data.download import RemoteFile, download, extract_archive

DATA = bytes(range(256)) * 5000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        start = 0
        requested = self.headers.get("Range")
        server.ranges.append(requested)
        if requested and server.supports_ranges:
            start = int(requested.removeprefix("bytes=").removesuffix("-"))
        body = server.contents[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.close_after])

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    """Connect to the local server directly."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.contents, server.ranges = DATA, []
    server.supports_ranges, server.close_after = True, None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def remote(server):
    url = f"http://127.0.0.1:{server.server_port}/set.bin"
    return RemoteFile(url, len(DATA), hashlib.sha256(DATA).hexdigest())


def test_download_reports_progress_and_is_not_repeated(server, remote, tmp_path):
    seen = []
    path = download(remote, tmp_path / "data", lambda have, total: seen.append((have, total)))
    assert path.read_bytes() == DATA
    assert seen == sorted(seen)
    assert seen[-1] == (len(DATA), len(DATA))
    assert download(remote, tmp_path / "data") == path
    assert server.ranges == [None]
    assert [p.name for p in path.parent.iterdir()] == ["set.bin"]


@pytest.mark.parametrize("supports_ranges", [True, False])
def test_an_interrupted_download_resumes(server, remote, tmp_path, supports_ranges):
    server.supports_ranges = supports_ranges
    server.close_after = 300_000
    with pytest.raises(OSError, match=r"run again to resume, or copy set\.bin to"):
        download(remote, tmp_path)
    assert (tmp_path / "set.bin.part").stat().st_size == 300_000
    assert not (tmp_path / "set.bin").exists()
    server.close_after = None
    assert download(remote, tmp_path).read_bytes() == DATA
    assert server.ranges == [None, "bytes=300000-"]
    assert not (tmp_path / "set.bin.part").exists()


def test_a_download_with_a_wrong_checksum_is_removed(server, remote, tmp_path):
    server.contents = DATA[:-1] + b"!"
    with pytest.raises(ValueError, match="SHA-256"):
        download(remote, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_too_long_is_refused(server, remote, tmp_path):
    server.contents = DATA + b"more"
    with pytest.raises(ValueError, match=r"damaged: \d+ bytes, expected"):
        download(remote, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_damaged_file_is_refused(server, remote, tmp_path):
    (tmp_path / "set.bin").write_bytes(DATA[:-5])
    with pytest.raises(ValueError, match=r"set\.bin is damaged: \d+ bytes, expected"):
        download(remote, tmp_path)
    assert server.ranges == []


def test_an_unreachable_server(tmp_path):
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        remote = RemoteFile(f"http://127.0.0.1:{taken.getsockname()[1]}/set.bin", 5, "0" * 64)
        with pytest.raises(OSError, match=r"copy set\.bin to"):
            download(remote, tmp_path)


def archive(path, name, kind=tarfile.REGTYPE, link=""):
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, link, 0 if link else 4
        tar.addfile(member, io.BytesIO(b"data"))
    return path


def test_extract_archive(tmp_path):
    extract_archive(archive(tmp_path / "a.tgz", "inside/file"), tmp_path / "out")
    assert (tmp_path / "out" / "inside" / "file").read_bytes() == b"data"


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "../outside"},
        {"name": "link", "kind": tarfile.SYMTYPE, "link": "/etc/passwd"},
        {"name": "pipe", "kind": tarfile.FIFOTYPE},
    ],
)
def test_archive_entries_outside_the_folder_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match="cannot extract"):
        extract_archive(archive(tmp_path / "a.tgz", **bad), tmp_path / "out")
    assert not (tmp_path / "outside").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_truncated_archive_is_refused(tmp_path):
    path = archive(tmp_path / "a.tgz", "file")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cannot extract .*a\.tgz"):
        extract_archive(path, tmp_path / "out")
