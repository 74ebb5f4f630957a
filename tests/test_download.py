"""The download goes on where it was cut, and is whole or absent; servers on loopback stand for the network.

pytest tests/test_download.py            # some 8 seconds, most of them for importing torchvision
"""

import collections
import hashlib
import http.server
import pickle
import socket
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from synthetic import made, write_layout, write_parquet

from vit import datasets, download
from vit.datasets import DataError, find_data, load_pictures, main_data
from vit.sources import CLASSES

HUB_PATH = "/datasets/uoft-cs/cifar10/resolve/main/plain_text/test-00000-of-00001.parquet"
CUT_AT = 5_000


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))


class Hub(http.server.ThreadingHTTPServer):
    """Answers as the Hub does: the file's address states its checksum and leads to another host's bytes."""

    def __init__(self, body: bytes):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.body, self.sha256 = body, hashlib.sha256(body).hexdigest()
        self.cuts, self.knows_range, self.up_for = 0, True, float("inf")  # up_for: requests until it breaks
        self.seen = collections.Counter()
        self.ranges: list[str | None] = []  # of each request for bytes
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub = self.server
        hub.seen[self.command, self.path] += 1
        if hub.seen.total() > hub.up_for:
            self.reply(503)
        elif self.path == HUB_PATH:
            linked = {"X-Linked-Etag": f'"{hub.sha256}"', "X-Linked-Size": str(len(hub.body))}
            where = {"Location": f"http://localhost:{hub.server_port}/bytes", "X-Repo-Commit": "c" * 40}
            self.reply(302, {**linked, **where, "ETag": '"other"'})
        elif self.path == "/bytes" and self.command == "GET":
            self.send_bytes(hub, self.headers["Range"])
        else:
            self.reply(404)

    def send_bytes(self, hub: Hub, asked: str | None) -> None:
        hub.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and hub.knows_range else 0
        rest = hub.body[start:]
        where = {"Content-Range": f"bytes {start}-{len(hub.body) - 1}/{len(hub.body)}"} if start else {}
        self.reply(206 if start else 200, where, len(rest))
        if hub.cuts:
            hub.cuts -= 1
            rest = rest[:CUT_AT]
            self.close_connection = True
        self.wfile.write(rest)

    do_HEAD = do_GET

    def reply(self, status: int, headers: dict[str, str] | None = None, size_bytes: int = 0) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(size_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    write_parquet(tmp_path / "hub.parquet", *made(40, 1))
    with Hub((tmp_path / "hub.parquet").read_bytes()) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(download, "BACKOFF_SECONDS", (0.01, 0.02))
        monkeypatch.setattr(download, "_from_torchvision", lambda *_: pytest.fail("the Hub was to be enough"))
        yield server
        server.shutdown()


def _no_fallback(*_):
    raise RuntimeError("torchvision's source is down")


def kept(tmp_path: Path) -> set[str]:
    return {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()} - {".lock"}


def test_a_download_lands_where_it_is_found(hub, tmp_path):
    counted = []
    found = load_pictures(download=True, progress=lambda *at: counted.append(at))
    assert find_data() == tmp_path / "cache" / "cifar10"
    assert found.digest == load_pictures(write_layout("batches", tmp_path / "other")).digest
    name, size = "test-00000-of-00001.parquet", len(hub.body)
    assert (size, size, name) in counted
    assert counted[-1] == (40, 40, "test pictures")
    hub.seen.clear()
    lines = main_data(None, ("test",))
    assert not hub.seen  # what is there is not fetched again
    assert "40 pictures" in lines[0]
    assert any(line.strip() == f"Source: {find_data()}" for line in lines)
    assert "Not the published CIFAR-10 test split" in lines[-1]


@pytest.mark.parametrize("knows_range", [True, False])
def test_a_cut_download_goes_on_where_it_was_cut(hub, knows_range, tmp_path):
    hub.cuts, hub.knows_range = 1, knows_range
    datasets.download("test")
    assert hub.ranges == [None, f"bytes={CUT_AT}-"]
    (file,) = (tmp_path / "cache" / "cifar10").glob("*.parquet")
    assert file.read_bytes() == hub.body
    assert kept(tmp_path) == {".parquet"}


def test_the_next_run_goes_on_where_the_last_one_gave_up(hub, tmp_path, monkeypatch):
    hub.cuts, hub.up_for = 1, 3  # HEAD, GET, the first bytes
    monkeypatch.setattr(download, "_from_torchvision", _no_fallback)
    with pytest.raises(DataError, match=r"503.*what has arrived is kept"):
        datasets.download("test")
    assert kept(tmp_path) == {".part"}
    assert find_data() is None
    hub.up_for = float("inf")
    datasets.download("test")
    assert hub.ranges == [None, f"bytes={CUT_AT}-"]
    assert len(load_pictures()) == 40


def test_two_at_once_fetch_it_once(hub):
    with ThreadPoolExecutor() as pool:
        list(pool.map(datasets.download, ["test"] * 3))
    assert hub.ranges == [None]
    assert len(load_pictures()) == 40


def test_wrong_bytes_are_refused(hub, tmp_path):
    hub.sha256 = "0" * 64
    with pytest.raises(DataError, match=r"SHA-256 differs.*nothing else was touched"):
        datasets.download("test")
    assert kept(tmp_path) == set()
    assert find_data() is None


def test_a_folder_that_cannot_be_written_is_told(hub, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        datasets.download("test", tmp_path / "file" / "below")
    assert not hub.seen


@pytest.fixture
def nobody(monkeypatch):
    """No Hub, and torchvision's source where nobody listens."""
    from torchvision.datasets import CIFAR10

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(download, "BACKOFF_SECONDS", (0.01,))
    monkeypatch.setattr(CIFAR10, "url", f"{address}/cifar.tar.gz")
    return monkeypatch


def test_no_source_at_all_is_one_clear_sentence(nobody, tmp_path):
    with pytest.raises(
        DataError, match=r"could not be downloaded, neither.*Hub.*torchvision.*Nothing.*changed"
    ):
        load_pictures(download=True)
    assert kept(tmp_path) == set()


def test_without_the_hub_torchvision_fetches(nobody, tmp_path):
    from torchvision.datasets import CIFAR10

    def md5(path: Path) -> str:
        return hashlib.md5(path.read_bytes()).hexdigest()

    served = tmp_path / "served"
    root = write_layout("the batches' own folder", served)
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": list(CLASSES)}, 2))
    with tarfile.open(served / "cifar.tar.gz", "w:gz") as archive:
        archive.add(root, root.name)
    for name, files in {
        "train_list": [f"data_batch_{i}" for i in range(1, 6)],
        "test_list": ["test_batch"],
    }.items():
        nobody.setattr(CIFAR10, name, [[file, md5(root / file)] for file in files])
    nobody.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5(root / "batches.meta")})
    nobody.setattr(CIFAR10, "tgz_md5", md5(served / "cifar.tar.gz"))

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=served)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        nobody.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/cifar.tar.gz")
        found = load_pictures(download=True)
        server.shutdown()
    assert found.digest == load_pictures(root).digest
    assert sorted(p.name for p in find_data().iterdir() if not p.name.endswith(".lock")) == [root.name]
