"""Fetching a release over HTTP: from a server on loopback that behaves well, badly, or is not there."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.deploy.broker.data_dir import VERSION, archive_name, fetched_release
from headrace.deploy.broker.download import CutError
from headrace.deploy.broker.fetch import Fetched, fetch
from headrace.schemas.errors import ConfigError

NAME = archive_name(VERSION)
PATH = f"/{VERSION}/{NAME}"
NOISE = hashlib.shake_256(b"noise").digest(1_500_000)
"""Does not compress: the archive has several chunks."""


def make_archive(*more: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        jar = tarfile.TarInfo(f"kafka_2.13-{VERSION}/libs/kafka_2.13-{VERSION}.jar")
        jar.size = len(NOISE)
        tar.addfile(jar, io.BytesIO(NOISE))
        for member in more:
            tar.addfile(member)
    return out.getvalue()


GOOD = make_archive()


@dataclass
class Site:
    """What the server has, how it misbehaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    base: str = ""
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    """Each answer that begins before such an offset ends there, once."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    etag: str = '"one"'
    before: Callable[[str], None] = lambda path: None

    def put(self, archive: bytes, sum_of: bytes | None = None) -> None:
        digest = hashlib.sha512(archive if sum_of is None else sum_of).hexdigest()
        self.files |= {PATH: archive, f"{PATH}.sha512": f"{digest}  {NAME}\n".encode()}

    def fetch(self, folder: Path, **more: Any) -> Fetched:
        return fetch(folder=folder, sites=(self.base,), pause_s=0, **more)

    @property
    def archive_ranges(self) -> list[str | None]:
        return [wanted for path, wanted in self.asked if path.endswith(".tgz")]


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site, wanted = self.site, self.headers.get("Range")
        site.asked.append((self.path, wanted))
        site.before(self.path)
        body = site.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        first = 0
        if site.ranges and wanted and self.headers.get("If-Range", site.etag) == site.etag:
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
        if first and first >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(body) - first))
        self.send_header("ETag", site.etag)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        cut = site.cuts.pop(0) if self.path.endswith(".tgz") and site.cuts else len(body)
        self.wfile.write(body[first:cut])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": found}))
    found.base = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def left(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {"lock"}


def test_a_good_archive_is_verified_unpacked_and_found(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    found = site.fetch(tmp_path / "kafka")
    assert found.sha512 == hashlib.sha512(GOOD).hexdigest() and found.source == site.base + PATH
    assert (found.path / "libs" / f"kafka_2.13-{VERSION}.jar").read_bytes() == NOISE
    assert left(tmp_path / "kafka") == {VERSION}
    assert fetched_release({"HEADRACE_DATA": str(tmp_path)}) == found.path


def test_what_is_there_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    site.fetch(tmp_path)
    site.asked.clear()
    assert site.fetch(tmp_path).source is None and site.asked == []


def test_a_release_that_was_damaged_later_is_named(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    for jar in site.fetch(tmp_path).path.glob("libs/*"):
        jar.unlink()
    with pytest.raises(ConfigError, match="was damaged: remove it"):
        site.fetch(tmp_path)


def test_a_wrong_sum_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.put(GOOD, sum_of=b"another")
    with pytest.raises(ConfigError, match=r"is not what was published.*it was removed: fetch it again"):
        site.fetch(tmp_path)
    assert left(tmp_path) == set()


def test_a_cut_connection_is_gone_on_with_in_the_same_fetch(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    site.cuts = [400_000, 900_000]
    site.fetch(tmp_path)
    assert site.archive_ranges == [None, "bytes=400000-", "bytes=900000-"]
    assert left(tmp_path) == {VERSION}


def test_a_later_fetch_goes_on_where_one_gave_up(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    site.cuts = [500_000] * 9
    with pytest.raises(CutError, match="goes on from there"):
        site.fetch(tmp_path)
    assert (tmp_path / f"{NAME}.part").read_bytes() == GOOD[:500_000]
    site.cuts, site.asked = [], []
    site.fetch(tmp_path)
    assert site.archive_ranges == ["bytes=500000-"] and left(tmp_path) == {VERSION}


def test_a_part_that_is_whole_already_is_only_checked(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    (tmp_path / f"{NAME}.part").write_bytes(GOOD)
    assert site.fetch(tmp_path).path.is_dir()


@pytest.mark.parametrize("change", ["no ranges", "another etag", "part too long"])
def test_what_cannot_be_resumed_starts_over(site: Site, tmp_path: Path, change: str) -> None:
    site.put(GOOD)
    site.cuts = [300_000] * 9
    with pytest.raises(CutError):
        site.fetch(tmp_path)
    site.cuts = []
    if change == "no ranges":
        site.ranges = False
    elif change == "another etag":
        site.etag = '"two"'
    else:
        (tmp_path / f"{NAME}.part").write_bytes(GOOD + b"more")
    assert site.fetch(tmp_path).path.is_dir()


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../evil", tarfile.REGTYPE, ""),
        (f"kafka_2.13-{VERSION}/libs/evil", tarfile.SYMTYPE, "/etc/passwd"),
        (f"kafka_2.13-{VERSION}/libs/evil", tarfile.SYMTYPE, "../../../evil"),
        (f"kafka_2.13-{VERSION}/libs/evil", tarfile.CHRTYPE, ""),
    ],
)
def test_an_archive_that_points_outside_leaves_nothing(
    site: Site, tmp_path: Path, name: str, kind: bytes, link: str
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    site.put(make_archive(member))
    with pytest.raises(ConfigError, match="unsafe and was not unpacked"):
        site.fetch(tmp_path / "kafka")
    assert left(tmp_path / "kafka") == set() and {p.name for p in tmp_path.iterdir()} == {"kafka"}


@pytest.mark.parametrize("limit", [600_000, len(GOOD) - 1000])
def test_a_full_disk_says_so_and_keeps_the_part(site: Site, tmp_path: Path, limit: int) -> None:
    site.put(GOOD)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, former[1]))
    try:
        with pytest.raises(ConfigError, match=r"no room for .*repeat the command; it goes on from there"):
            site.fetch(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert site.fetch(tmp_path).path.is_dir()
    assert site.archive_ranges[-1] is not None


def test_no_room_to_unpack_keeps_the_archive(site: Site, tmp_path: Path) -> None:
    zeros = tarfile.TarInfo(f"kafka_2.13-{VERSION}/libs/big.jar")
    zeros.size = 4_000_000
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.addfile(zeros, io.BytesIO(bytes(zeros.size)))
        tar.addfile(tarfile.TarInfo(f"kafka_2.13-{VERSION}/libs/kafka_2.13-{VERSION}.jar"), io.BytesIO())
    site.put(out.getvalue())
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, former[1]))
    try:
        with pytest.raises(ConfigError, match="no room to unpack"):
            site.fetch(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert left(tmp_path) == {f"{NAME}.part", f"{NAME}.part.from"}
    assert site.fetch(tmp_path).path.is_dir()


@pytest.mark.parametrize("missing", ["all", "sum", "archive"])
def test_what_no_site_has_is_named_with_the_way_out(site: Site, tmp_path: Path, missing: str) -> None:
    site.put(GOOD)
    for path in {"all": [PATH, f"{PATH}.sha512"], "sum": [f"{PATH}.sha512"], "archive": [PATH]}[missing]:
        del site.files[path]
    with pytest.raises(ConfigError, match=r"answers 404(.|\n)*--from FILE"):
        site.fetch(tmp_path)
    assert left(tmp_path) == set()


def test_no_server_at_all(tmp_path: Path) -> None:
    from headrace.deploy.processes import free_port

    with pytest.raises(ConfigError, match="no answer"):
        fetch(folder=tmp_path, sites=(f"http://127.0.0.1:{free_port()}",))


def test_the_second_site_where_the_first_has_it_no_more(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    found = fetch(folder=tmp_path, sites=(f"{site.base}/old", site.base))
    assert found.source == site.base + PATH


def test_an_interruption_keeps_the_part(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)

    def interrupt(done: int, total: int | None) -> None:
        if done > 500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        site.fetch(tmp_path, progress=interrupt)
    assert (tmp_path / f"{NAME}.part").stat().st_size > 500_000
    site.fetch(tmp_path)
    assert site.archive_ranges[-1] is not None and left(tmp_path) == {VERSION}


def test_two_at_once_download_one(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    waiting = threading.Event()

    def hold(path: str) -> None:
        # The first is answered only once the second waits for it.
        assert waiting.wait(20)

    site.before = hold
    with ThreadPoolExecutor(2) as pool:
        say = lambda text: waiting.set() if text.startswith("waiting for another") else None  # noqa: E731
        both = [f.result() for f in [pool.submit(site.fetch, tmp_path, say=say) for _ in range(2)]]
    assert sorted(found.source is None for found in both) == [False, True]
    assert len(site.archive_ranges) == 1


@pytest.mark.parametrize("how", ["base", "folder", "archive"])
def test_a_mirror_by_its_base_its_folder_or_the_archive(site: Site, tmp_path: Path, how: str) -> None:
    site.put(GOOD)
    origin = {"base": site.base + "/", "folder": f"{site.base}/{VERSION}", "archive": site.base + PATH}[how]
    assert fetch(origin=origin, folder=tmp_path).source == site.base + PATH


def test_an_archive_at_hand_needs_its_sum(tmp_path: Path) -> None:
    archive = tmp_path / NAME
    archive.write_bytes(GOOD)
    digest = hashlib.sha512(GOOD).hexdigest()
    with pytest.raises(ConfigError, match=r"cannot be verified: put .*\.sha512"):
        fetch(origin=str(archive), folder=tmp_path / "a")
    with pytest.raises(ConfigError, match="not what was published"):
        fetch(origin=str(archive), sha512="0" * 128, folder=tmp_path / "a")
    assert fetch(origin=str(archive), sha512=digest.upper(), folder=tmp_path / "a").path.is_dir()
    (tmp_path / f"{NAME}.sha512").write_text(f"{digest}  {NAME}\n")
    assert fetch(origin=str(archive), folder=tmp_path / "b").sha512 == digest
    assert archive.exists()


def test_an_unpacked_release_at_hand_is_copied(site: Site, tmp_path: Path) -> None:
    site.put(GOOD)
    source = site.fetch(tmp_path / "a").path
    found = fetch(origin=str(source), folder=tmp_path / "b")
    assert found.path == tmp_path / "b" / VERSION and left(tmp_path / "b") == {VERSION}
    with pytest.raises(ConfigError, match="no libs folder"):
        fetch(origin=str(tmp_path), folder=tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"version": "../x"}, "--version"),
        ({"sha512": "abc"}, "128 hexadecimal digits"),
        ({"origin": "ftp://x/y.tgz"}, "only http and https"),
        ({"origin": "/nowhere/kafka.tgz"}, "no such file or folder"),
        ({"origin": f"/nowhere/{NAME}", "version": "1.0.0"}, "--version 1.0.0, but"),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path: Path, options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fetch(folder=tmp_path, **options)


@pytest.mark.kafka
@pytest.mark.skipif(not os.environ.get("KAFKA_HOME"), reason="no Apache Kafka: set KAFKA_HOME")
def test_a_broker_starts_from_a_fetched_archive_of_a_real_release(site: Site, tmp_path: Path) -> None:
    from headrace.deploy.broker.choice import choose_kind
    from headrace.deploy.broker.launcher import start_broker
    from headrace.schemas.config import KafkaConfig

    packed = tmp_path / NAME
    with tarfile.open(packed, "w:gz", compresslevel=1) as tar:
        tar.add(os.environ["KAFKA_HOME"], arcname=f"kafka_2.13-{VERSION}")
    site.put(packed.read_bytes())
    site.cuts = [20_000_000]
    found = site.fetch(tmp_path / "kafka")
    kind, home = choose_kind(KafkaConfig(), {"HEADRACE_DATA": str(tmp_path)})
    assert (kind, home) == ("kafka", found.path)
    with start_broker(kind, tmp_path / "broker", home) as running:
        assert running.running and any(str(found.path) in part for part in running.nodes[0].command)
