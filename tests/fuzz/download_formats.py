"""What downloads leave behind, and what servers answer."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import socketserver
import sys
import threading
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from random import Random

import mutations
from format import Files, Format

from lmkit.data.download import Dataset, RemoteFile, download_dataset

if sys.version_info >= (3, 11):
    pass
else:
    pass


CONTENT = Random(1).randbytes(5_000) + b"text\n" * 3_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
ARCHIVE = gzip.compress(CONTENT, mtime=0)
ARCHIVE_DIGEST = hashlib.sha256(ARCHIVE).hexdigest()
PLAIN = Dataset("http://unused", RemoteFile("a.txt", "a.txt", 100_000), RemoteFile("a.txt", "a.txt", 100_000))
ZIPPED = Dataset("http://unused", RemoteFile("a.txt", "a.gz", 100_000), RemoteFile("a.txt", "a.gz", 100_000))


class Site:
    """A server on this machine that answers with what it is told to."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                request = b"".join(iter(self.rfile.readline, b"\r\n"))
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(answer(request))

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def response(request: bytes, content: bytes) -> bytes:
    """All of it, or the part that is asked for; the tag is the digest, as the Hugging Face hub sends it."""
    wanted = re.search(rb"Range: bytes=(\d+)-", request)
    start = int(wanted[1]) if wanted else 0
    if start >= len(content):
        return b"HTTP/1.1 416 No such range\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    part = (
        f"HTTP/1.1 206 Part\r\nContent-Range: bytes {start}-{len(content) - 1}/{len(content)}"
        if start
        else "HTTP/1.1 200 OK"
    )
    tag = hashlib.sha256(content).hexdigest()
    head = f'{part}\r\nETag: "{tag}"\r\nContent-Length: {len(content) - start}\r\nConnection: close\r\n\r\n'
    return head.encode() + content[start:]


class InterruptedDownload(Format):
    """What an interrupted download left is changed; the server is well and knows the digest."""

    name = "partial download"
    damages = (
        ("a.txt.partial", mutations.damage),
        ("a.txt.partial.version.json", mutations.damage_json),
        ("a.txt.partial.version.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        self.site: Site | None = None
        version = {"validator": f'"{DIGEST}"', "size": len(CONTENT), "sha256": DIGEST}
        return {
            "a.txt.partial": CONTENT[:7_000],
            "a.txt.partial.version.json": json.dumps(version).encode(),
        }

    def read(self, folder: Path, random: Random) -> None:
        self.site = self.site or Site(lambda request: response(request, CONTENT))
        paths = download_dataset(PLAIN, folder, base_url=self.site.url, retry_wait_s=0)
        assert [path.read_bytes() for path in paths] == [CONTENT] * 2
        assert {path.name for path in folder.iterdir()} == {".lock", "a.txt", "a.txt.sha256"}

    def close(self) -> None:
        if self.site is not None:
            self.site.close()
        self.site = None


class FinishedDownload(InterruptedDownload):
    """What was downloaded is changed, or its recorded digest."""

    name = "finished download"
    damages = (("a.txt", mutations.damage), ("a.txt.sha256", mutations.damage))

    def make(self, folder: Path) -> Files:
        self.site = None
        return {"a.txt": CONTENT, "a.txt.sha256": f"{DIGEST}  a.txt\n".encode()}


class ServerAnswers(InterruptedDownload):
    """The server's answers are changed, headers and body."""

    name = "server answers"
    damages = (
        ("answer", mutations.damage),
        ("answer", mutations.damage_http_head),
    )

    def make(self, folder: Path) -> Files:
        self.site = None
        return {"answer": response(b"", CONTENT)}

    def read(self, folder: Path, random: Random) -> None:
        answer = (folder / "answer").read_bytes()
        self.answers = cycle([answer])
        self.site = self.site or Site(lambda request: next(self.answers))
        paths = download_dataset(PLAIN, folder / "data", base_url=self.site.url, retry_wait_s=0)
        if f'\netag: "{DIGEST}"\r\n'.encode() in answer.partition(b"\r\n\r\n")[0].lower():
            assert [path.read_bytes() for path in paths] == [CONTENT] * 2


class Archive(InterruptedDownload):
    """A downloaded archive, changed before its digest was recorded: gzip's own checksum has to notice."""

    name = "gzip archive"
    damages = (
        ("a.gz", mutations.damage),
        ("a.gz", mutations.damage_archive),
    )

    def make(self, folder: Path) -> Files:
        self.site = None
        return {"a.gz": ARCHIVE}

    def read(self, folder: Path, random: Random) -> None:
        archive = (folder / "a.gz").read_bytes()
        (folder / "a.gz.sha256").write_text(f"{hashlib.sha256(archive).hexdigest()}  a.gz\n")
        paths = download_dataset(ZIPPED, folder, base_url="http://127.0.0.1:9", retry_wait_s=0)
        assert [path.read_bytes() for path in paths] == [gzip.decompress(archive)] * 2
        assert {path.name for path in folder.iterdir()} == {".lock", "a.txt", "a.txt.sha256"}


DOWNLOAD_FORMATS: dict[str, Callable[[Path], Format]] = {
    form.name: form for form in (InterruptedDownload, FinishedDownload, ServerAnswers, Archive)
}
