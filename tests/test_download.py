"""Downloads from a server on this machine: resumed, checked, and unpacked without harm."""

from __future__ import annotations

import hashlib
import io
import random
import re
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from curvlab.data import Cifar10
from curvlab.data.cifar10 import FOLDER, TEST_FILES, TRAIN_FILES, Release, obtain
from curvlab.data.download import fetch, unpack
from curvlab.exceptions import DataError

FILES = (*TRAIN_FILES, *TEST_FILES)
RECORDS = 10
LIMIT = 1_000_000


def _tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, destination in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, destination
            tar.addfile(info)
    return buffer.getvalue()


def _cifar_members() -> dict[str, bytes]:
    pixels = random.Random(0).randbytes
    record = [bytes([label]) + pixels(3072) for label in range(RECORDS)]
    return {f"{FOLDER}/{name}": b"".join(record) for name in FILES} | {f"{FOLDER}/readme.html": b"hello"}


class Server(ThreadingHTTPServer):
    """Serves `content`; `cuts` are how many bytes to send before each connection is dropped."""

    content = b""
    ranges = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts: list[int] = []
        self.requested: list[str | None] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/cifar-10-binary.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range")
        server.requested.append(asked)
        start = int(asked[6:-1]) if asked and server.ranges else 0
        body = server.content[start:]
        if server.status != 200 or (start and not body):
            self.send_error(server.status if server.status != 200 else 416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/*")
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        running.content = _tar(_cifar_members())
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    return tmp_path / "curvlab"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_cifar10_is_downloaded_once_and_only_its_own_files_are_kept(server, cache):
    class Tiny(Cifar10):
        release = Release(server.address, _sha256(server.content), RECORDS)

    data = Tiny().load()
    assert (len(data.train), len(data.test)) == (5 * RECORDS, RECORDS)
    assert data.test.targets.tolist() == list(range(10))
    assert sorted(path.name for path in (cache / FOLDER).iterdir()) == sorted(FILES)
    assert sorted(path.name for path in cache.iterdir()) == [".lock", FOLDER]
    Tiny().load()
    assert len(server.requested) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="the lock is POSIX's")
def test_two_that_need_cifar10_at_once_download_it_once(server, cache):
    release = Release(server.address, _sha256(server.content), RECORDS)
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: obtain(release=release), range(4)))
    assert set(folders) == {cache / FOLDER}
    assert len(server.requested) == 1


def test_a_connection_cut_half_way_is_resumed_where_it_ended(server, tmp_path):
    server.cuts = [1000, 500]
    target = fetch(server.address, tmp_path / "file", _sha256(server.content))
    assert target.read_bytes() == server.content
    assert server.requested == [None, "bytes=1000-", "bytes=1500-"]


def test_a_download_that_stops_keeps_its_part_and_the_next_run_continues(server, tmp_path):
    server.cuts = [1000, 0]
    with pytest.raises(DataError, match=r"1,000 bytes are kept in .*file\.part") as failure:
        fetch(server.address, tmp_path / "file", _sha256(server.content))
    assert server.address in str(failure.value)
    assert "--data-dir" in str(failure.value)
    assert (tmp_path / "file.part").read_bytes() == server.content[:1000]
    fetch(server.address, tmp_path / "file", _sha256(server.content))
    assert (tmp_path / "file").read_bytes() == server.content
    assert server.requested[-1] == "bytes=1000-"
    assert not (tmp_path / "file.part").exists()


def test_a_server_without_ranges_is_read_from_the_beginning(server, tmp_path):
    server.ranges = False
    (tmp_path / "file.part").write_bytes(server.content[:700])
    assert fetch(server.address, tmp_path / "file", _sha256(server.content)).read_bytes() == server.content


def test_a_part_that_is_whole_already_is_only_checked(server, tmp_path):
    (tmp_path / "file.part").write_bytes(server.content)
    assert fetch(server.address, tmp_path / "file", _sha256(server.content)).read_bytes() == server.content


def test_a_wrong_checksum_names_both_and_removes_the_part(server, tmp_path):
    with pytest.raises(DataError, match=f"is {_sha256(server.content)}, expected {'0' * 64}"):
        fetch(server.address, tmp_path / "file", "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_part_does_not_stay_in_the_way(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * 700)
    with pytest.raises(DataError, match="SHA-256"):
        fetch(server.address, tmp_path / "file", _sha256(server.content))
    assert fetch(server.address, tmp_path / "file", _sha256(server.content)).read_bytes() == server.content


def test_no_server_is_a_sentence_with_the_address_and_the_way_out(cache):
    closed = Server()
    closed.server_close()
    with pytest.raises(DataError, match=re.escape(closed.address)) as failure:
        obtain(release=Release(closed.address, "0" * 64))
    assert "Connection refused" in str(failure.value)
    assert "--data-dir or CURVLAB_DATA" in str(failure.value)


def test_an_answer_that_is_an_error_is_told(server, tmp_path):
    server.status = 404
    with pytest.raises(DataError, match="404"):
        fetch(server.address, tmp_path / "file", "0" * 64)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_names_the_part_and_says_that_it_continues(server, tmp_path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"file\.part: cannot be written .*No space left.*run again"):
        fetch(server.address, tmp_path / "file", _sha256(server.content))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    with pytest.raises(DataError, match=r"occupied.*cannot be written.*XDG_CACHE_HOME"):
        obtain()


@pytest.mark.parametrize(
    ("extra", "links", "problem"),
    [
        ({"../evil.bin": b"x"}, {}, "unsafe member"),
        ({}, {f"{FOLDER}/link": "/etc/passwd"}, "unsafe member"),
        ({}, {f"{FOLDER}/link": "../../outside"}, "unsafe member"),
    ],
)
def test_a_member_that_leaves_the_folder_is_refused_and_nothing_is_left(tmp_path, extra, links, problem):
    home = tmp_path / "cache"
    home.mkdir()
    (home / "archive.tar.gz").write_bytes(_tar(extra | _cifar_members(), links))
    with pytest.raises(DataError, match=problem):
        unpack(home / "archive.tar.gz", home / FOLDER, FILES, LIMIT)
    assert [path.name for path in home.iterdir()] == ["archive.tar.gz"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_link_in_place_of_a_data_file_is_not_followed(tmp_path):
    members = _cifar_members()
    del members[f"{FOLDER}/{FILES[0]}"]
    (tmp_path / "archive.tar.gz").write_bytes(_tar(members, {f"{FOLDER}/{FILES[0]}": FILES[1]}))
    with pytest.raises(DataError, match=f"{FILES[0]} is not in it"):
        unpack(tmp_path / "archive.tar.gz", tmp_path / FOLDER, FILES, LIMIT)


@pytest.mark.parametrize("damage", [lambda content: content[:-200], lambda content: b"not a tar" * 50])
def test_a_broken_archive_is_named_and_leaves_nothing(tmp_path, damage):
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(damage(_tar(_cifar_members())))
    with pytest.raises(DataError, match=re.escape(f"{archive}: the archive cannot be used")):
        unpack(archive, tmp_path / FOLDER, FILES, LIMIT)
    assert [path.name for path in tmp_path.iterdir()] == ["archive.tar.gz"]


def test_what_a_killed_run_left_unpacked_does_not_get_in_the_way(tmp_path):
    scratch = tmp_path / f".{FOLDER}.unpacking" / FOLDER
    scratch.mkdir(parents=True)
    (scratch / FILES[0]).write_bytes(b"half")
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(_tar(_cifar_members()))
    unpack(archive, tmp_path / FOLDER, FILES, LIMIT)
    assert len((tmp_path / FOLDER / FILES[0]).read_bytes()) == RECORDS * 3073
