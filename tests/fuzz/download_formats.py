"""Formats of downloads: what lies in the folder, and what a server answers."""

import contextlib
import functools
import gzip
import hashlib
import http.client
import io
import json
import re
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from unittest import mock

from formats import TEXT, Files, Format, form
from mutations import damage, damage_text

import lmkit.data.download as module
from lmkit.data.download import Dataset, RemoteFile, download_dataset

CONTENT = Random(1).randbytes(5_000) + b"text\n" * 3_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
ARCHIVE = gzip.compress(CONTENT, mtime=0)


def answer(request: bytes) -> bytes:
    """Return the answer of a healthy server: all of the content, or the part that is asked for."""
    wanted = re.search(rb"Range: bytes=(\d+)-", request)
    start = int(wanted[1]) if wanted else 0
    if start >= len(CONTENT):
        return b"HTTP/1.1 416 No such range\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    part = (
        f"206 Part\r\nContent-Range: bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}" if start else "200 OK"
    )
    head = f'HTTP/1.1 {part}\r\nETag: "{DIGEST}"\r\nContent-Length: {len(CONTENT) - start}\r\n'
    head += "Connection: close\r\n\r\n"
    return head.encode() + CONTENT[start:]


class Server(socketserver.ThreadingTCPServer):
    """Serves `answer`, or what a case put there instead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[bytes], bytes] = answer
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        request = b"".join(iter(self.rfile.readline, b"\r\n"))
        with contextlib.suppress(ConnectionError):
            self.wfile.write(self.server.answer(request))


server = functools.cache(Server)


def at_once(dataset: Dataset, folder: Path) -> list[Path]:
    """Download without pauses between attempts."""
    with mock.patch.object(module, "RETRY_WAIT_S", 0):
        return download_dataset(dataset, folder)


def fetch(folder: Path, answer: Callable[[bytes], bytes] = answer, remote: str = "a.txt") -> None:
    server().answer = answer
    file = RemoteFile("a.txt", remote, 100_000)
    url = f"http://127.0.0.1:{server().server_address[1]}"
    for path in at_once(Dataset(url, file, file), folder):
        assert path.read_bytes() == CONTENT
    assert {path.name for path in folder.iterdir()} == {".lock", "a.txt", "a.txt.sha256"}


@form("interrupted or finished download")
def download(folder: Path) -> Format:
    """What lies in the folder is changed; the server is healthy and knows the digest."""
    version = {"validator": f'"{DIGEST}"', "size": len(CONTENT), "sha256": DIGEST}
    goods = [
        {
            "a.txt.lmkit-partial": CONTENT[:7_000],
            "a.txt.lmkit-partial.version.json": json.dumps(version).encode(),
        },
        {"a.txt": CONTENT, "a.txt.sha256": f"{DIGEST}  a.txt\n".encode()},
    ]
    damages = {name: TEXT if "." in name[-8:] else (damage,) for good in goods for name in good}
    return Format(goods, damages, lambda folder, good, random: fetch(folder))


@form("server answers")
def server_answers(folder: Path) -> Format:
    """The server's answers are changed, headers and body."""

    def damage_head(random: Random, data: bytes) -> bytes:
        head, _, body = data.partition(b"\r\n\r\n")
        return damage_text(random, head) + b"\r\n\r\n" + body

    def read(folder: Path, good: Files, random: Random) -> None:
        answered = (folder / "answer").read_bytes()
        (folder / "answer").unlink()
        try:
            fetch(folder, lambda request: answered)
        except AssertionError:  # without the digest nothing is promised
            head = io.BytesIO(answered.partition(b"\n")[2])
            assert http.client.parse_headers(head).get("ETag") != f'"{DIGEST}"'

    return Format([{"answer": answer(b"")}], {"answer": (damage_head, damage)}, read)


@form("gzip archive")
def archive(folder: Path) -> Format:
    """An archive is changed before its digest was recorded: gzip's own checksum has to notice."""
    bomb = gzip.compress(bytes(50_000_000), mtime=0)

    def odd_archive(random: Random, data: bytes) -> bytes:
        named = data[:3] + b"\x08" + data[4:10] + b"../../stolen\0" + data[10:]
        return random.choice((bomb, data * 2, data * 10, named, data + bytes(100), data + b"x"))

    def read(folder: Path, good: Files, random: Random) -> None:
        data = (folder / "a.gz").read_bytes()
        (folder / "a.gz.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  a.gz\n")
        file = RemoteFile("a.txt", "a.gz", 100_000)
        for path in at_once(Dataset("http://127.0.0.1:9", file, file), folder):
            assert path.read_bytes() == gzip.decompress(data)

    return Format([{"a.gz": ARCHIVE}], {"a.gz": (damage, odd_archive)}, read)
